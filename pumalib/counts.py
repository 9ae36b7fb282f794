"""The parameters of every row of the paper's Tables 2, 3, 4, 6 and 7, counted from the models: `results/parameters.csv`."""

from __future__ import annotations

import functools
from pathlib import Path

import pandas as pd
import torch

from . import config, paths, reference
from .models import build, count_parameters

TABLES = (2, 3, 4, 6, 7)
FILE = paths.RESULTS / "parameters.csv"
BACKBONES = {
    "ViT-Ti/16": "vit_tiny_patch16_224.augreg_in21k",
    "ViT-S/16": "vit_small_patch16_224.augreg_in21k",
    "ViT-B/16": "vit_base_patch16_224.augreg_in21k",
    "ViT-L/16": "vit_large_patch16_224.augreg_in21k",
}
METHODS = {  # the paper's row names -> ours; a loss's name in Tables 2 and 4 means full fine-tuning
    "Linear Emb.": "linear", "MLP-3 Emb.": "mlp3", "VPT": "vpt", "LoRA": "lora", "AdaptFormer": "adaptformer", "PUMA": "puma",
    "single": "vpt", "conditional": "prompt-pool", "static": "adapter", "stochastic": "adapter-stochastic",
    "single + static": "vpt+adapter", "conditional + stochastic": "puma",
    "Stochastic LoRA": "lora-stochastic", "PUMA + LoRA": "puma+lora", "PUMA + Stochastic LoRA": "puma+lora-stochastic",
}  # fmt: skip


def parameters() -> pd.DataFrame:
    """Trainable and total parameters of each row, beside what the paper prints.

    Returns:
        Columns: `table`, `row` (as in `reference.table`), `method`, `backbone`, `dim`, `adapter_layers`, `models` (eight
        for a specific model per dataset), `trainable`, `total` (numbers of parameters of all `models`),
        `paper_trainable_m`, `paper_total_m` (millions; empty where not printed), `agrees` (to the paper's rounding).
    """
    rows = []
    for number in TABLES:
        for row, printed in reference.table(number).astype(object).iterrows():
            settings = _settings(number, row, printed)
            models = 8 if printed.get("group") == "specific" else 1
            ours = [models * count for count in _count(**settings)]
            paper = [printed.get(name) for name in ("params_train_m", "params_total_m")]
            agrees = all(p is None or _rounds_to(n, p) for n, p in zip(ours, paper, strict=True))
            rows.append(dict(table=number, row=row, **settings, models=models, trainable=ours[0], total=ours[1],
                             paper_trainable_m=paper[0], paper_total_m=paper[1], agrees=agrees))  # fmt: skip
    return pd.DataFrame(rows)


def write(path: Path = FILE) -> Path:
    """Write `parameters()` to `results/parameters.csv`."""
    with paths.written_whole(path) as temporary:
        parameters().to_csv(temporary, index=False)
    return path


def _settings(number: int, row: str, printed: pd.Series) -> dict:
    """What a printed row means to `build`; Table 6 names a row by its backbone, the others by the method."""
    method = "puma" if number == 6 else METHODS.get(printed.get("method", row), "full")
    first = str(printed.get("adapter_layers", "all"))
    return dict(
        method=method, backbone=BACKBONES[printed.get("backbone", "ViT-S/16")], dim=int(printed.get("dim", 128)),
        adapter_layers="all" if first == "all" else int(first.removeprefix("first ")),
    )  # fmt: skip


@functools.cache
def _count(method: str, backbone: str, dim: int, adapter_layers: int | str) -> tuple[int, int]:
    layers = {} if adapter_layers == "all" else {"adapter_layers": adapter_layers}
    with torch.device("meta"):  # shapes without memory: ViT-L too is counted in a second
        return count_parameters(build(config.method(method, **layers), backbone, dim, pretrained=False))


def _rounds_to(count: int, printed: float) -> bool:
    digits = len(str(printed).partition(".")[2])
    return abs(count / 1e6 - printed) <= 0.5 * 10**-digits
