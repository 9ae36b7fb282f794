"""A trained model as a file: what was trained, and which backbone it belongs to."""

import json
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from .. import paths
from ..config import Run
from ..data import batches
from . import backbones
from .embedding import EmbeddingModel, build

FILE = "model.safetensors"


def trainable_state(model: EmbeddingModel) -> dict[str, Tensor]:
    """The tensors that training changes: trainable parameters, and a tuned backbone's buffers."""
    state = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if model.method.tune_backbone:
        state |= {f"backbone.{name}": b for name, b in model.backbone.named_buffers()}
    return {name: tensor.contiguous() for name, tensor in state.items()}


def save(model: EmbeddingModel, run: Run, folder: Path) -> None:
    """Write `model.safetensors`: what was trained (and a random backbone, to be had nowhere else), run and backbone."""
    whole = model.method.tune_backbone or run.pretrained == "random"
    digest = "" if whole else backbones.state_digest(model.backbone.state_dict())
    metadata = {"run": run.to_json(), "backbone_digest": digest, "normalise": json.dumps(model.normalise)}
    state = model.state_dict() if whole else trainable_state(model)
    metadata["digest"] = backbones.state_digest(state, *metadata.values())
    with paths.written_whole(folder / FILE) as file:  # bytes: save_file's own errors are no OSError
        file.write_bytes(safetensors.torch.save(state, metadata))


def load(folder: str | Path, pretrained: str | Path | None = None, device: str | torch.device = "cpu") -> "Embedder":
    """The trained model of a run's folder, ready to embed; ValueError: a damaged file, or one for another backbone.
    `pretrained` says where the backbone's weights are here, None: as in the run; FileNotFoundError without them."""
    file = Path(folder) / FILE
    if not file.is_file():
        raise FileNotFoundError(f"no {FILE} in {folder}; a finished run's folder holds one")
    try:
        with safetensors.safe_open(file, "pt") as opened:
            metadata, names = opened.metadata() or {}, opened.keys()
            state = {name: opened.get_tensor(name) for name in names}
        run, digest, normalise = (metadata[key] for key in ("run", "backbone_digest", "normalise"))
        if metadata["digest"] != backbones.state_digest(state, run, digest, normalise):
            raise ValueError("its contents have another digest")
        run, normalise = Run.from_dict(json.loads(run)), json.loads(normalise)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is damaged or not of pumalib ({error!r}); copy it again or train it again") from error
    options = {"image_size": run.data.image_size, "normalise": normalise}
    source = (pretrained or run.pretrained) if digest else "random"
    model = build(run.method, run.backbone, run.dim, pretrained=source, **options)
    if digest and backbones.state_digest(model.backbone.state_dict()) != digest:
        why = f"{file} adapts another backbone than {run.backbone!r} with weights {str(source)!r}"
        raise ValueError(f"{why}; give pretrained= the weights it was trained on (digest: its metrics.json)")
    expected = trainable_state(model) if digest else model.state_dict()
    if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in expected.items()}:
        raise ValueError(f"{file} is damaged: its tensors are not those of {run.method.name!r} on {run.backbone!r}")
    model.load_state_dict(state, strict=False)
    return Embedder(model.to(device).eval(), run)


class Embedder:
    """A trained model with the image transform it was evaluated with: `load(folder).embed(images)`."""

    def __init__(self, model: EmbeddingModel, run: Run):
        self.model, self.run = model, run
        self.view = batches.View(run.data, *backbones.normalisation(model.backbone))

    def embed(self, images, batch_size: int = 64, progress: bool = True) -> np.ndarray:
        """Embeddings (n, dim) float32 of a file path, a PIL image, an (H, W, 3) uint8 array, or any iterable of these.
        A generator is read a batch at a time; an array of the network's size is not resized.  ValueError: no image."""
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size = {batch_size!r}; it must be a whole number of at least 1")
        if isinstance(images, str) or not isinstance(images, Iterable) or getattr(images, "ndim", 0) in (2, 3):
            images = [images]
        shown = tqdm(images, "embedding", unit="image", delay=1, disable=not progress)
        pixels = (batches.pixels(_decoded(image, i, self.view.upright), self.view) for i, image in enumerate(shown))
        embeddings = [np.zeros((0, self.model.dim), np.float32)]
        with torch.inference_mode():
            while batch := list(islice(pixels, batch_size)):
                batch = batches.normalise(torch.stack(batch).to(next(self.model.parameters()).device), self.view)
                embeddings.append(self.model(batch).float().cpu().numpy())
        return np.concatenate(embeddings)


def _decoded(image, position: int, upright: bool) -> Image.Image | np.ndarray:
    if isinstance(image, (str, os.PathLike, Image.Image)):
        return batches.decode(image, upright)
    kind, shape = getattr(image, "dtype", type(image).__name__), getattr(image, "shape", ())
    if not isinstance(image, np.ndarray) or kind != np.uint8 or len(shape) != 3 or shape[2] != 3 or not image.size:
        expected = "a file path, a PIL image or an array uint8 (H, W, 3) of RGB in 0..255"
        raise ValueError(f"image {position} is {kind} {shape or ''}; expected {expected}")
    return np.ascontiguousarray(image)
