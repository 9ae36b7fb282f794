"""What the paper prints: its tables, and its numbers of parameters counted again.

`data/paper/table<n>.csv` transcribes Tables 1 to 12 (percentages as printed; empty where the print is unreadable;
the authors' "Ours" is "PUMA").  In our copy Table 1 is damaged: its counts are restored from the datasets' own
files (`source`: counted there, or quoted) and what is readable stands in `printed_*`.  Table 3's check marks are
damaged too: rows with `marks` "restored" are told by their numbers of parameters.
"""

import functools

import pandas as pd
import torch

from .. import config, paths
from ..models import build, count_parameters

DATASETS = ("cub", "cars", "sop", "inshop", "nabirds", "dogs", "flowers", "aircraft")
LARGE = ("sop", "inshop")  # "large-scale datasets such as SOP and In-Shop", Sec. 5.1
OVERALL = ("unified", "harmonic")
SETTINGS = ("params_train_m", "params_total_m", "dim")  # the columns of numbers that are no accuracies
SCALES = ("ViT-S/16 128", "ViT-S/16 512", "ViT-B/16 128")  # Table 4
# The paper's name of a loss: ours.
LOSSES = {"Triplet": "triplet", "Margin": "margin", "MS": "ms", "SupCon": "supcon", "SoftTriple": "softtriple"}
LOSSES |= {"CosFace": "cosface", "ArcFace": "arcface", "Hyp": "hyp"}
LOSSES |= {"PA": "proxyanchor", "ProxyNCA++": "proxynca++", "CurricularFace": "curricularface"}
# The paper's name of a row: ours, where it is not a loss's, which in Tables 2 and 4 means full fine-tuning.
METHODS = {"Linear Emb.": "linear", "MLP-3 Emb.": "mlp3", "VPT": "vpt", "LoRA": "lora", "AdaptFormer": "adaptformer"}
METHODS |= {"PUMA": "puma", "PUMA + LoRA": "puma+lora", "PUMA + Stochastic LoRA": "puma+lora-stochastic"}
METHODS |= {"Stochastic LoRA": "lora-stochastic", "single": "vpt", "conditional": "prompt-pool", "static": "adapter"}
METHODS |= {"stochastic": "adapter-stochastic", "single + static": "vpt+adapter", "conditional + stochastic": "puma"}
SIZES = {"ViT-Ti/16": "tiny", "ViT-S/16": "small", "ViT-B/16": "base", "ViT-L/16": "large"}
BACKBONES = {name: f"vit_{size}_patch16_224.augreg_in21k" for name, size in SIZES.items()}
ROUNDING = 0.05  # half a unit of the last printed digit


def table(number: int) -> pd.DataFrame:
    """Table `number` (1 to 12) of the paper, indexed by `row`; accuracies in percent, parameters in millions."""
    return pd.read_csv(paths.PAPER / f"table{number}.csv", index_col="row")


def comparable(printed: pd.DataFrame, datasets) -> pd.DataFrame:
    """`printed` without its single datasets unless all `datasets` are the paper's: names may coincide, images do not."""
    if set(datasets) <= set(DATASETS):
        return printed
    return printed[[column for column in printed if column.split("_")[0] not in DATASETS]]


def inconsistent(number: int) -> pd.DataFrame:
    """Rows of Table `number` whose printed harmonic mean is not that of the printed columns, to their rounding.

    Columns: `column` (harmonic, or one per metric in Table 12), `printed`, `recomputed`.
    """
    printed, found = table(number), []
    for column in [name for name in printed if name.startswith("harmonic") and not name.endswith("_change")]:
        parts = [dataset + column.removeprefix("harmonic") for dataset in DATASETS]
        values = printed[[name for name in parts if name in printed]]
        # The mean grows with each of its parts: the extremes of their rounding bound it.
        low, high = (_harmonic(values + step) + step for step in (-ROUNDING, ROUNDING))
        for row in printed.index[~printed[column].between(low, high) & printed[column].notna()]:
            found.append((row, column, printed.at[row, column], _harmonic(values)[row]))
    return pd.DataFrame(found, columns=["row", "column", "printed", "recomputed"]).set_index("row")


def _harmonic(values: pd.DataFrame) -> pd.Series:
    return values.notna().sum(axis=1) / (1 / values).sum(axis=1)


def parameters() -> pd.DataFrame:
    """Trainable and total parameters of each row of Tables 2, 3, 4, 6 and 7, counted from models, beside the paper's.

    Columns: `table`, `row` (as in `table`), `method`, `backbone`, `dim`, `adapter_layers`, `models` (eight for a
    specific model per dataset), `trainable`, `total` (of all `models`), `paper_trainable_m`, `paper_total_m` (millions;
    empty where not printed), `agrees` (to the paper's rounding).
    """
    rows = []
    for number in (2, 3, 4, 6, 7):
        for row, printed in table(number).astype(object).iterrows():
            # Table 6 names a row by its backbone, the others by the method.
            method = "puma" if number == 6 else METHODS.get(printed.get("method", row), "full")
            layers = str(printed.get("adapter_layers", "all")).removeprefix("first ")
            backbone, dim = BACKBONES[printed.get("backbone", "ViT-S/16")], int(printed.get("dim", 128))
            models = len(DATASETS) if printed.get("group") == "specific" else 1
            ours = [models * count for count in _count(method, backbone, dim, layers)]
            paper = [printed.get(name) for name in SETTINGS[:2]]
            agrees = all(p is None or _rounds_to(n, p) for n, p in zip(ours, paper, strict=True))
            rows.append((number, row, method, backbone, dim, layers, models, *ours, *paper, agrees))
    columns = ["table", "row", "method", "backbone", "dim", "adapter_layers", "models"]
    columns += ["trainable", "total", "paper_trainable_m", "paper_total_m", "agrees"]
    return pd.DataFrame(rows, columns=columns)


@functools.cache
def _count(method: str, backbone: str, dim: int, layers: str) -> tuple[int, int]:
    chosen = config.method(method, **({} if layers == "all" else {"adapter_layers": int(layers)}))
    with torch.device("meta"):  # shapes without memory: ViT-L too is counted in a second
        return count_parameters(build(chosen, backbone, dim, pretrained=False))


def _rounds_to(count: int, printed: float) -> bool:
    digits = len(str(printed).partition(".")[2])
    return abs(count / 1e6 - printed) <= 0.5 * 10**-digits
