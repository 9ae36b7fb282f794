"""From the table to batches: any image as RGB, what is shown of it, which images form a batch, worker processes.

Order and augmentation are pure functions of (seed, epoch, place): the same seed gives the same batches whatever the
number of processes, and training resumes in mid-epoch by starting at a batch.
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from tqdm import tqdm

from ..config import Data
from .table import Benchmark, check

_ORDER, _AUGMENT, _SHOTS = 1, 2, 3  # keep the random streams apart
_CHUNK = 64  # images that a worker process decodes at a time, so that all of them share a batch


class ImageError(ValueError):
    """An image that cannot be read; the message names the file and what can be done."""


def decode(source: str | Path | BinaryIO | Image.Image, upright: bool = False) -> Image.Image:
    """The image as RGB: on white where transparent, 16-bit values scaled to 8 bits, of an animation the first frame.

    Args:
        upright: turn the image as its EXIF orientation says (the authors' code ignores it).

    Raises:
        ImageError: missing, truncated, no image, or values without an agreed range (floats, beyond 16 bits).
    """
    try:
        with nullcontext(source) if isinstance(source, Image.Image) else Image.open(source) as image:
            image.seek(0)
            return _to_rgb(ImageOps.exif_transpose(image) if upright else image)
    except Exception as error:  # decoders of damaged files raise nearly anything
        given = isinstance(source, str | Path)
        name = source if given else getattr(source, "filename", None) or getattr(source, "name", None) or source
        remedy = "Replace the file, or leave such images out with drop_unreadable = True (of a profile's data, or -p)"
        what = f"{name}: cannot be read as an image ({type(error).__name__}: {error})"
        raise ImageError(f"{what}. {remedy}; `python -m pumalib data verify` lists them all") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floats have no agreed range; save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        grey = np.asarray(image)
        if grey.min() < 0 or grey.max() > 65535:
            raise ValueError(f"values {grey.min()} to {grey.max()} are no 16-bit grey; save it with 8 or 16 bits")
        image = Image.fromarray((grey // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def unreadable(benchmark: Benchmark, progress: bool = False) -> dict[int, ImageError]:
    """Decode every image file; the errors by position in `benchmark.images`."""

    def error_of(path: str) -> ImageError | None:
        try:
            decode(benchmark.root / path)
        except ImageError as error:
            return error

    files = benchmark.images["path"] if benchmark.pixels is None else []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = tqdm(pool.map(error_of, files), "decoding", len(files), unit="image", disable=not progress)
        return {position: error for position, error in enumerate(errors) if error is not None}


def drop_unreadable(benchmark: Benchmark) -> Benchmark:
    """The benchmark without the images that cannot be decoded, with one warning that names each of them."""
    images, bad = benchmark.images, list(unreadable(benchmark))
    if not bad:
        return benchmark
    names = "\n  ".join(images["path"].iloc[bad])
    warnings.warn(f"{len(bad)} of {len(images)} images cannot be read and are left out:\n  {names}", stacklevel=2)
    return check(replace(benchmark, images=images.drop(images.index[bad]).reset_index(drop=True)))


@dataclass(frozen=True)
class View:
    """How an image becomes the network's input."""

    size: int  # pixels, height and width
    mean: tuple[float, ...]  # of the backbone's pretraining, per channel, for values from 0 to 1
    std: tuple[float, ...]
    resize: str = "both"  # at test, "both" sides to 256/224 of size (paper) or the "shorter" (authors' code)
    crop_scale: tuple[float, float] | None = None  # area share of a random crop; None: the test view
    flip: bool = False  # half of the images left to right, in training
    upright: bool = False  # honour EXIF orientation


def test_view(settings: Data, mean: Sequence[float], std: Sequence[float]) -> View:
    """Resize and centre crop."""
    upright = settings.benchmark == "folders" if settings.upright is None else settings.upright
    return View(settings.image_size, tuple(mean), tuple(std), settings.resize, upright=upright)


def train_view(settings: Data, mean: Sequence[float], std: Sequence[float]) -> View:
    """Random resized crop and flip (Appendix A)."""
    return replace(test_view(settings, mean, std), crop_scale=tuple(settings.crop_scale), flip=settings.flip)


@cache
def _transform(view: View) -> v2.Compose:
    bicubic = {"interpolation": v2.InterpolationMode.BICUBIC, "antialias": True}
    if view.crop_scale is not None:
        flip = [v2.RandomHorizontalFlip()] if view.flip else []
        return v2.Compose([v2.RandomResizedCrop(view.size, view.crop_scale, **bicubic), *flip, v2.PILToTensor()])
    side = round(256 * view.size / 224)
    resize = v2.Resize([side, side] if view.resize == "both" else [side], **bicubic)
    return v2.Compose([resize, v2.CenterCrop(view.size), v2.PILToTensor()])


def pixels(image: Image.Image | np.ndarray, view: View, seed: int | None = None) -> Tensor:
    """(3, size, size) uint8; a training view depends on `seed` alone, and leaves torch's generator as it was.

    Args:
        image: RGB; an array (H, W, 3) uint8 that has the view's size is shown as it is at test.
    """
    if isinstance(image, np.ndarray):
        if view.crop_scale is None and image.shape[:2] == (view.size, view.size):
            return torch.tensor(image).permute(2, 0, 1)
        image = Image.fromarray(image)
    if view.crop_scale is None:
        if view.resize == "shorter":  # a long strip, resized, would fill the memory; its ends are not shown anyway
            width, height = image.size
            image = v2.functional.center_crop(image, [min(height, 4 * width), min(width, 4 * height)])
        return _transform(view)(image)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _transform(view)(image)


def normalise(images: Tensor, view: View) -> Tensor:
    """uint8 (B, 3, S, S) as float32, less the mean, over the standard deviation."""
    images = images.float()
    for channel, mean, std in zip(images.unbind(1), view.mean, view.std):
        channel.sub_(255 * mean).div_(255 * std)
    return images


@dataclass(frozen=True)
class Plan:
    """Which batches are made, where and for what."""

    positions: Sequence[np.ndarray]  # of each batch's images, in the rows
    seed: int = 0
    epoch: int = 0
    first: int = 0  # begin with this batch, as if those before it had been taken
    part: int = 0  # each of `positions` is this one of the equal parts of a batch, and augmented as there
    workers: int = 0  # processes that decode; 0: this one
    device: torch.device | str = "cpu"  # where the batches are wanted


def batches(benchmark: Benchmark, rows: pd.DataFrame, plan: Plan, view: View) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Images (B, 3, size, size) float32, normalised, on the plan's device, and their positions (B,) in `rows`.

    `rows` are any of `benchmark.images`, in any order.  Raises ImageError, naming an image that cannot be read.
    """
    # One array of bytes, not 100,000 str: reading those in forked workers would copy their memory.
    places = [os.fsencode(benchmark.root / path) if benchmark.pixels is None else path for path in rows["path"]]
    make, chunks = partial(_part, benchmark.pixels, np.array(places), view), list(_chunks(plan))
    if plan.workers == 0:
        parts = map(make, chunks)
    else:  # torch would draw from the training's generator
        own = {"generator": torch.Generator(), "worker_init_fn": _end_with_parent}
        parts = iter(DataLoader(chunks, batch_size=None, collate_fn=make, num_workers=plan.workers, **own))
    pin = torch.device(plan.device).type == "cuda"
    try:
        for positions in plan.positions[plan.first :]:
            batch = torch.empty((len(positions), 3, view.size, view.size), dtype=torch.uint8, pin_memory=pin)
            for at in range(0, len(batch), _CHUNK):
                part = next(parts)
                if isinstance(part, str):
                    raise ImageError(part)
                batch[at : at + _CHUNK] = torch.from_numpy(part)
            yield normalise(batch.to(plan.device, non_blocking=pin), view), np.asarray(positions)
    finally:
        del parts  # ends the workers now, also where a traceback keeps this frame


def _chunks(plan: Plan) -> Iterator[np.ndarray]:
    """(b, 2) int64, b at most 64: the position of an image and the seed of its augmentation."""
    for place, positions in enumerate(plan.positions[plan.first :], plan.first):
        rng = np.random.default_rng((_AUGMENT, plan.seed, plan.epoch, place))
        keys = np.stack([positions, rng.integers(2**63, size=(plan.part + 1, len(positions)))[plan.part]], 1)
        yield from (keys[at : at + _CHUNK] for at in range(0, len(keys), _CHUNK))


def _part(embedded: np.ndarray | None, places: np.ndarray, view: View, chunk: np.ndarray) -> np.ndarray | str:
    """(b, 3, size, size) uint8; an array, for torch's shared memory is too small in many containers."""
    try:
        images = (
            decode(os.fsdecode(place), view.upright) if embedded is None else embedded[place]
            for place in places[chunk[:, 0]]
        )
        return np.stack([pixels(image, view, seed) for image, seed in zip(images, chunk[:, 1].tolist())])
    except ImageError as error:
        return str(error)  # raised by whoever takes the batch: a pickled error may bring frames that keep the workers


def _end_with_parent(worker: int) -> None:
    """End this process soon after its parent, however that ended and whatever this one waits for."""
    threading.Thread(target=_watch, args=[os.getppid()], daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def random_batches(count: int, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """A fresh permutation of `range(count)` in batches; an incomplete last one is dropped, unless it is the only one."""
    order = np.random.default_rng((_ORDER, seed, epoch)).permutation(count)
    if count < batch_size:
        return [order]
    return [order[at : at + batch_size] for at in range(0, count - batch_size + 1, batch_size)]


def class_batches(labels: Sequence[int], classes: int, images: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Batches of P `classes` x K `images`, class by class, for the pair-based losses (Appendix A: 180 x 4).

    All classes come once before one comes again.  A class with fewer than K images repeats some of them; with fewer
    than P classes every batch holds all of them.  An epoch has as many batches as fit into the number of images, and
    at least so many that every class comes once.
    """
    rng = np.random.default_rng((_ORDER, seed, epoch))
    members = _members(labels)
    width = min(classes, len(members))
    count = max(len(labels) // (width * images), math.ceil(len(members) / width))
    batches, queue = [], []
    for _ in range(count):
        chosen, queue = queue[:width], queue[width:]
        if len(chosen) < width:
            fresh = rng.permutation(len(members)).tolist()
            new = [c for c in fresh if c not in chosen][: width - len(chosen)]
            chosen, queue = chosen + new, [c for c in fresh if c not in new]
        batches.append(np.concatenate([_draw(rng, members[c], images) for c in chosen]))
    return batches


def ordered_batches(count: int, batch_size: int) -> list[np.ndarray]:
    """`range(count)` in order, the last batch shorter: for embedding a whole table."""
    return [np.arange(at, min(at + batch_size, count)) for at in range(0, count, batch_size)]


def few_shot(images: pd.DataFrame, shots: int, seed: int) -> pd.DataFrame:
    """`shots` train rows of each class of `images`; a row comes twice only where a class has fewer.

    With the same seed, fewer shots are a part of more shots.
    """
    train = images[images["split"] == "train"]
    rows = [
        _draw(np.random.default_rng((_SHOTS, seed, i)), own, shots) for i, own in enumerate(_members(train["label"]))
    ]
    return train.iloc[np.concatenate(rows)].reset_index(drop=True)


def _members(labels: Sequence[int]) -> list[np.ndarray]:
    """The positions of each class, in the order of the labels."""
    return list(pd.Series(labels).groupby(np.asarray(labels)).indices.values())


def _draw(rng: np.random.Generator, members: np.ndarray, count: int) -> np.ndarray:
    """`count` of `members`, each at most once unless there are too few (then each at least once)."""
    picked = rng.permutation(members)[:count]
    return np.concatenate([picked, rng.choice(members, count - len(picked))])
