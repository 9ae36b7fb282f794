"""A trained model with the image transform it was evaluated with: images in, embeddings out."""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from .config import Data, Run
from .data import Benchmark, batches
from .data.images import View, decode, normalise, pixels
from .models import EmbeddingModel, backbones, load_model
from .progress import bar

# Images that pass the network at a time where a benchmark is embedded.
_BATCH = 256
# The benchmark whose pictures have the network's size, and are shown as they are.
_SHOWN_AS_THEY_ARE = "mini"


def load(
    folder: str | Path, pretrained: str | Path | None = None, device: str | torch.device = "cpu"
) -> "Embedder":
    """Load the trained model of a run's folder, ready to embed.

    Arguments and errors are those of `models.load_model`.
    """
    model, run = load_model(folder, pretrained)
    return Embedder(model.to(device), run)


# ---- a benchmark's images


def embed_rows(
    model: EmbeddingModel,
    benchmark: Benchmark,
    rows: pd.DataFrame,
    settings: Data,
    *,
    device: str | torch.device = "cpu",
    workers: int = 0,
) -> np.ndarray:
    """Embed rows of a benchmark, by the test view of `settings`: (n, dim) float32.

    `workers` processes decode the images; 0: this one.  Raises ImageError.
    """
    embeddings, _ = embed_with_prompt_weights(
        model, benchmark, rows, settings, device=device, workers=workers
    )
    return embeddings


def embed_with_prompt_weights(
    model: EmbeddingModel,
    benchmark: Benchmark,
    rows: pd.DataFrame,
    settings: Data,
    *,
    device: str | torch.device = "cpu",
    workers: int = 0,
) -> tuple[np.ndarray, np.ndarray | None]:
    """`embed_rows`, and the weights (n, M) of the pool's prompts, None without a pool (Fig. 4)."""
    model.eval()
    view = View(settings, *backbones.normalisation(model.backbone))
    positions = np.split(np.arange(len(rows)), range(_BATCH, len(rows), _BATCH))
    plan = batches.Plan(benchmark, rows, positions, view, workers=workers, device=device)
    embeddings = []
    weights = []
    with torch.inference_mode():
        for images, _ in batches.batches(plan):
            embedded, chosen = model(images, prompt_weights=True)
            embeddings.append(embedded)
            if chosen is not None:
                weights.append(chosen)
    if not weights:
        return _joined(embeddings), None
    return _joined(embeddings), _joined(weights)


def _joined(parts: list[Tensor]) -> np.ndarray:
    return torch.cat(parts).float().cpu().numpy()


# ---- any images


class Embedder:
    """A trained model with the image transform it was evaluated with.

    `load(folder).embed(images)`.
    """

    def __init__(self, model: EmbeddingModel, run: Run):
        self.model = model
        self.run = run
        self.view = View(run.data, *backbones.normalisation(model.backbone))

    def embed(
        self,
        images: Any,
        batch_size: int = 64,
        progress: bool = True,
        *,
        prepared: bool = False,
    ) -> np.ndarray:
        """Embed one image, or an iterable of images: (n, dim) float32.

        An image is a file's path, a PIL image or an array (H, W, 3) uint8, and it makes no
        difference which: each is resized and cropped as the run's test images were.  (But the
        pictures of `mini` have the network's size: to a model of it, a picture of that size is
        shown as it is.)  `prepared` images are instead tensors (3, size, size), normalised for the
        network already.

        A generator is read a batch at a time.  Raises ValueError for what is no image, and says
        at which position.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            what = f"batch_size = {batch_size!r}"
            raise ValueError(f"{what}; it must be a whole number of at least 1")
        if _is_one(images):
            images = [images]
        shown = bar(images, desc="embedding", unit="image", delay=1, disable=not progress)
        inputs = self._prepared(shown) if prepared else self._pixels(shown)

        device = next(self.model.parameters()).device
        # One without rows, should there be no image.
        embeddings = [np.zeros((0, self.model.dim), np.float32)]
        with torch.inference_mode():
            while batch := list(islice(inputs, batch_size)):
                network_input = torch.stack(batch).to(device)
                if not prepared:
                    network_input = normalise(network_input, self.view)
                embeddings.append(self.model(network_input).float().cpu().numpy())
        return np.concatenate(embeddings)

    def _pixels(self, images: Iterable) -> Iterator[Tensor]:
        """What the network is shown of each image, (3, size, size) uint8."""
        size = self.view.settings.image_size
        as_it_is = self.run.data.benchmark == _SHOWN_AS_THEY_ARE
        for position, image in enumerate(images):
            decoded = _decoded(image, position, self.view.upright)
            if as_it_is and decoded.size == (size, size):
                # An array of this size is not resized.
                yield pixels(np.asarray(decoded), self.view)
            else:
                yield pixels(decoded, self.view)

    def _prepared(self, images: Iterable) -> Iterator[Tensor]:
        """The images, which are the network's input; ValueError where one is not."""
        size = self.view.settings.image_size
        for position, image in enumerate(images):
            is_float = isinstance(image, Tensor) and image.is_floating_point()
            if not is_float or image.shape != (3, size, size):
                expected = f"a normalised tensor of floats (3, {size}, {size})"
                what = f"prepared image {position} is {_described(image)}"
                raise ValueError(f"{what}; expected {expected}")
            yield image.float()


def _is_one(images: Any) -> bool:
    """Whether this is one image, not several."""
    if isinstance(images, str) or not isinstance(images, Iterable):
        return True
    return getattr(images, "ndim", 0) in (2, 3)


def _decoded(image: Any, position: int, upright: bool) -> Image.Image:
    """The image as RGB; ValueError where it is none."""
    if isinstance(image, os.PathLike):
        image = Path(image)
    if isinstance(image, (str, Path, Image.Image)):
        return decode(image, upright)
    if not _is_rgb_array(image):
        expected = "a file path, a PIL image or an array uint8 (H, W, 3) of RGB in 0..255"
        if isinstance(image, Tensor):
            expected += ", or prepared=True for tensors that are the network's input"
        raise ValueError(f"image {position} is {_described(image)}; expected {expected}")
    return Image.fromarray(np.ascontiguousarray(image))


def _is_rgb_array(image: Any) -> bool:
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
        return False
    return image.ndim == 3 and image.shape[2] == 3 and image.size > 0


def _described(image: Any) -> str:
    """Type and shape of what was given."""
    kind = getattr(image, "dtype", type(image).__name__)
    shape = getattr(image, "shape", None)
    if not shape:
        return str(kind)
    return f"{kind} {tuple(shape)}"
