"""A trained model as a file: what was trained, and which backbone it belongs to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import safetensors
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor

from .. import paths
from ..config import Run
from ..data import Benchmark, loading
from . import backbones
from .embedding import EmbeddingModel, build

FILE = "model.safetensors"


def trainable_state(model: EmbeddingModel) -> dict[str, Tensor]:
    """The tensors that training changes: trainable parameters, and a tuned backbone's buffers."""
    state = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if model.method.tune_backbone:
        state |= {f"backbone.{name}": b for name, b in model.backbone.named_buffers()}
    return {name: tensor.contiguous() for name, tensor in state.items()}


def save(model: EmbeddingModel, run: Run, folder: Path) -> Path:
    """Write `model.safetensors` into `folder`: trainable tensors, with run and backbone in its metadata.

    A random backbone can be had nowhere else, so it is saved too.
    """
    whole = model.method.tune_backbone or backbones.source_of(run.pretrained) == "random"
    metadata = {
        "run": run.to_json(),
        "backbone_digest": "" if whole else backbones.state_digest(model.backbone),
        "normalise": json.dumps(model.normalise),
    }
    state = model.state_dict() if whole else trainable_state(model)
    state = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
    with paths.written_whole(folder / FILE) as file:
        safetensors.torch.save_file(state, file, metadata=metadata)
    return folder / FILE


def load(folder: str | Path, pretrained: str | Path | None = None, device: str | torch.device = "cpu") -> Embedder:
    """The trained model of a run's folder, ready to embed images.

    Args:
        folder: of a run, or any folder that holds its `model.safetensors`.
        pretrained: where the backbone's weights are on this machine; None: as in the run.

    Raises:
        FileNotFoundError: no model in the folder, or no backbone weights.
        ValueError: the weights are of another backbone than the one that was adapted.
    """
    file = Path(folder) / FILE
    if not file.is_file():
        raise FileNotFoundError(f"no {FILE} in {folder}; a finished run's folder holds one")
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata() or {}
        state = {name: opened.get_tensor(name) for name in opened.keys()}
    if "run" not in metadata:
        raise ValueError(f"{file} was not written by pumalib: it does not name its run")
    run = Run.from_json(metadata["run"])
    whole = not metadata["backbone_digest"]
    source = "random" if whole else pretrained or run.pretrained
    model = build(run.method, run.backbone, run.dim, pretrained=source, image_size=run.data.image_size,
                  normalise=json.loads(metadata["normalise"]))  # fmt: skip
    if not whole and backbones.state_digest(model.backbone) != metadata["backbone_digest"]:
        raise ValueError(
            f"{file} adapts another backbone than {run.backbone!r} with weights {str(source)!r}: its frozen weights differ. "
            "Give pretrained= the very weights the run was trained on (its environment.json has their digest)"
        )
    expected = model.state_dict() if whole else trainable_state(model)
    if state.keys() != expected.keys() or any(state[k].shape != expected[k].shape for k in state):
        raise ValueError(f"{file} does not hold the tensors of method {run.method.name!r} on {run.backbone!r}: it is damaged")
    model.load_state_dict(state, strict=False)
    return Embedder(model.to(device).eval(), run)


class Embedder:
    """A trained model with the image transform it was evaluated with: `load(folder).embed(paths_or_images)`."""

    def __init__(self, model: EmbeddingModel, run: Run):
        self.model, self.run = model, run

    def embed(self, images, batch_size: int = 64) -> np.ndarray:
        """Embeddings (n, dim), float32, of a sequence of file paths, PIL images or (H, W, 3) uint8 arrays.

        Raises:
            ImageError: a file that is no image, by name.
        """
        images = list(images)
        parts = [np.zeros((0, self.run.dim), np.float32)]
        with torch.inference_mode():
            for first in range(0, len(images), batch_size):
                part = images[first : first + batch_size]
                if all(isinstance(image, (str, Path)) for image in part):
                    batch = self._tensor(Benchmark("files", _table([str(Path(p).absolute()) for p in part]), Path("/")))
                else:  # images of any size, each its own embedded benchmark of one
                    arrays = [np.asarray(Image.fromarray(np.asarray(image)).convert("RGB")) for image in part]
                    batch = torch.cat([self._tensor(Benchmark("arrays", _table([0]), pixels=a[None])) for a in arrays])
                parts.append(self.model(batch).float().cpu().numpy())
        return np.concatenate(parts)

    def _tensor(self, benchmark: Benchmark) -> Tensor:
        """All images of a benchmark as one batch, by the test transform."""
        mean, std = backbones.normalisation(self.model.backbone)
        settings, rows = self.run.data, benchmark.images
        batches = loading.batches(
            benchmark, rows, [np.arange(len(rows))], train=False, size=settings.image_size, mean=mean, std=std,
            resize=settings.resize, device=next(self.model.parameters()).device,
        )  # fmt: skip
        return next(iter(batches))[0]


def _table(places: list) -> pd.DataFrame:
    return pd.DataFrame({"path": places, "label": 0})
