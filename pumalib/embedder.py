"""A trained model with the image transform it was evaluated with: images in, embeddings out."""

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from tqdm import tqdm

from .config import Run
from .data import batches
from .models import EmbeddingModel, backbones, load_model


def load(folder: str | Path, pretrained: str | Path | None = None, device: str | torch.device = "cpu") -> "Embedder":
    """The trained model of a run's folder, ready to embed; arguments and errors as of `models.load_model`."""
    model, run = load_model(folder, pretrained)
    return Embedder(model.to(device), run)


def embed_rows(model, benchmark, rows: pd.DataFrame, settings, *, device="cpu", workers: int = 0, prompt_weights=False):
    """Embeddings (n, dim) float32 of rows of a benchmark, by the test view of `settings`, a `config.Data`.
    With `prompt_weights`, of a model with a prompt pool, these and the weights (n, M) of its prompts."""
    view = batches.View(settings, *backbones.normalisation(model.backbone))
    parts = np.split(np.arange(len(rows)), range(256, len(rows), 256))
    shown, model = batches.batches(batches.Plan(benchmark, rows, parts, view, workers=workers, device=device)), model.eval()
    with torch.inference_mode():
        outputs = [model(images, prompt_weights=True) for images, _ in shown]
    embeddings, weights = (p if p[0] is None else torch.cat(p).float().cpu().numpy() for p in zip(*outputs))
    return (embeddings, weights) if prompt_weights else embeddings


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
