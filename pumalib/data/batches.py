"""From the table to batches: any image as RGB, what is shown of it, which images form a batch, worker processes.
Order and augmentation are pure functions of (seed, epoch, place), whatever the processes and the first batch."""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torchvision.transforms import v2

from ..config import Data
from .table import Benchmark, check, each

_ORDER, _AUGMENT, _SHOTS = 1, 2, 3  # keep the random streams apart
_small: dict[tuple, Image.Image] = {}  # decoded images
_CHUNK = 64  # images that a worker process decodes at a time, so that all of them share a batch


class ImageError(ValueError):
    """An image that cannot be read; the message names the file and what can be done."""


def decode(source: str | Path | Image.Image, upright: bool = False) -> Image.Image:
    """The image as RGB: on white where transparent, 16 bits scaled to 8, of an animation the first frame; ImageError.
    `upright` turns it as its EXIF orientation says (the authors' code ignores it)."""
    try:
        with nullcontext(source) if isinstance(source, Image.Image) else Image.open(source) as image:
            image.seek(0)
            return _to_rgb(ImageOps.exif_transpose(image) if upright else image)
    except Exception as error:  # decoders of damaged files raise nearly anything
        what = f"{getattr(source, 'filename', None) or source}: cannot be read as an image ({error!r}); replace it, or"
        raise ImageError(f"{what} set drop_unreadable = True; `python -m pumalib data verify` lists all") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode[0] in "FI":  # floats, or more than 8 bits
        grey = np.asarray(image)
        if image.mode == "F" or grey.min() < 0 or grey.max() > 65535:
            raise ValueError(f"{grey.dtype} up to {grey.max()} has no agreed range; save it with 8 or 16 bits")
        image = Image.fromarray((grey // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def image_error(function: Callable, path: str | Path) -> ImageError | None:
    """The error that `function` of a path raises, if it does."""
    try:
        function(path)
    except ImageError as error:
        return error


def unreadable(benchmark: Benchmark) -> dict[int, ImageError]:
    """Decode every image file; the errors by position in `benchmark.images`."""
    files = benchmark.images["path"].tolist() if benchmark.pixels is None else []
    errors = each(lambda path: image_error(decode, benchmark.root / path), files, "decoding")
    return {position: error for position, error in enumerate(errors) if error}


def drop_unreadable(benchmark: Benchmark) -> Benchmark:
    """The benchmark without the images that cannot be decoded, with one warning that names each of them."""
    images = benchmark.images
    if bad := list(unreadable(benchmark)):
        names = "\n  ".join(images["path"].iloc[bad])
        warnings.warn(f"{len(bad)} of {len(images)} images cannot be read and are left out:\n  {names}", stacklevel=2)
        benchmark = check(replace(benchmark, images=images.drop(images.index[bad]).reset_index(drop=True)))
    return benchmark


@dataclass(frozen=True)
class View:
    """How an image becomes the network's input, as `settings` say: resized and its centre, or in `training` a random
    crop, resized, and half of them flipped (Appendix A).  `mean` and `std` of channels from 0 to 1 are the backbone's."""

    settings: Data
    mean: Sequence[float]
    std: Sequence[float]
    training: bool = False

    @property
    def upright(self) -> bool:
        """Whether EXIF orientation is honoured."""
        return self.settings.benchmark == "folders" if self.settings.upright is None else self.settings.upright


_BICUBIC = v2.InterpolationMode.BICUBIC
_random_crop = cache(v2.RandomResizedCrop)


def pixels(image: Image.Image | np.ndarray, view: View, seed: int = 0) -> Tensor:
    """(3, size, size) uint8 of an RGB image or array (H, W, 3) uint8; a training view depends on `seed` alone."""
    settings, size = view.settings, view.settings.image_size
    if isinstance(image, np.ndarray):
        if not view.training and image.shape[:2] == (size, size):  # shown as it is
            return torch.tensor(image).permute(2, 0, 1)
        image = Image.fromarray(image)
    if not view.training:
        if settings.resize == "shorter":  # a long strip, resized, would fill the memory; its ends are not shown anyway
            width, height = image.size
            image = v2.functional.center_crop(image, [min(height, 4 * width), min(width, 4 * height)])
        image = v2.functional.resize(image, [round(256 * size / 224)] * (1 + (settings.resize == "both")), _BICUBIC)
        image = v2.functional.center_crop(image, [size])
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            top, left, height, width = _random_crop(size, settings.crop_scale).make_params([image]).values()
            mirrored = settings.flip and torch.rand(1) < 0.5
        # What v2's own forward does, without its overhead, which for small images is half of the time.
        image = image.crop((left, top, left + width, top + height)).resize([size] * 2, Image.Resampling.BICUBIC)
        image = ImageOps.mirror(image) if mirrored else image
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def normalise(images: Tensor, view: View) -> Tensor:
    """uint8 (B, 3, S, S) as float32, less the mean, over the standard deviation."""
    mean, std = ([255 * value for value in values] for values in (view.mean, view.std))
    return v2.functional.normalize(images.float(), mean, std, inplace=True)


def batches(benchmark, rows, positions, view, seed=0, *, epoch=0, first=0, part=0, workers=0, device="cpu") -> Iterator:
    """Images (B, 3, size, size) float32, normalised, on `device`, and their places (B,) in the table `rows`, for each
    batch that `positions` has; ImageError.  It begins with batch `first`, as if those before had been taken.  Where a
    batch is shared, `positions` are number `part` of its equal parts.  `workers` processes decode; 0: this one."""
    # One array of bytes, not 100,000 str: reading those in forked workers would copy their memory.
    places = [os.fsencode(f"{benchmark.root}/{path}") if benchmark.pixels is None else path for path in rows["path"]]
    make, chunks = partial(_part, benchmark.pixels, np.array(places), view), []
    for place, mine in enumerate(positions[first:], first):
        rng = np.random.default_rng((_AUGMENT, seed, epoch, place))
        seeds = rng.integers(2**63, size=(part + 1, len(mine)))[part]
        chunks += np.split(np.stack([mine, seeds], 1), range(_CHUNK, len(mine), _CHUNK))
    own = {"generator": torch.Generator(), "worker_init_fn": _end_with_parent}  # else it draws from the training's
    parts = iter(DataLoader(chunks, None, collate_fn=make, num_workers=workers, **own))
    pin, size = torch.device(device).type == "cuda", view.settings.image_size
    try:
        for mine in positions[first:]:
            batch = torch.empty((len(mine), 3, size, size), dtype=torch.uint8, pin_memory=pin)
            for at in range(0, len(batch), _CHUNK):
                chunk = next(parts)
                if isinstance(chunk, str):
                    raise ImageError(chunk)
                batch[at : at + _CHUNK] = torch.from_numpy(chunk)
            yield normalise(batch.to(device, non_blocking=pin), view), np.asarray(mine)
    finally:
        del parts  # ends the workers now, also where a traceback keeps this frame


def _part(embedded: np.ndarray | None, places: np.ndarray, view: View, chunk: np.ndarray) -> np.ndarray | str:
    """(b, 3, size, size) uint8 of `chunk`, (b, 2) int64: an image's position and the seed of its augmentation."""
    shown = []
    for place, seed in zip(places[chunk[:, 0]], chunk[:, 1].tolist()):
        try:
            image = _decoded(os.fsdecode(place), view.upright) if embedded is None else embedded[place]
        except ImageError as error:
            return str(error)  # raised by who takes the batch: a pickled error may bring frames that keep the workers
        shown.append(pixels(image, view, seed))
    return np.stack(shown)  # no tensor: torch's shared memory is too small in many containers


def _decoded(path: str, upright: bool) -> Image.Image:
    """`decode`, once for all epochs and runs of this process where the image is small, up to 1 GB of them; not in the
    processes that decode, which end with their epoch."""
    key = path, upright, os.stat(path).st_mtime_ns if os.path.exists(path) else 0
    if (image := _small.get(key)) is None:
        image = decode(path, upright)
        if image.width * image.height <= 128 * 128 and len(_small) < 20_000 and not get_worker_info():
            _small[key] = image
    return image


def _end_with_parent(worker: int) -> None:
    """End this process soon after its parent, however that ended and whatever this one waits for."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def random_batches(count: int, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """A fresh permutation of `range(count)` in batches; an incomplete last one is dropped unless it is the only one."""
    order = np.random.default_rng((_ORDER, seed, epoch)).permutation(count)
    return [order[at : at + batch_size] for at in range(0, max(1, count - batch_size + 1), batch_size)]


def class_batches(labels: Sequence[int], classes: int, images: int, repeat: bool, seed: int, epoch: int) -> list:
    """Batches of P `classes` x K `images`, class by class, for the pair-based losses (Appendix A: 180 x 4).
    A class or, without `repeat`, an image comes twice only where there are too few; the authors' code has `repeat`."""
    rng = np.random.default_rng((_ORDER, seed, epoch))
    members = list(pd.Series(labels).groupby(np.asarray(labels)).indices.values())
    draw, batches = rng.choice if repeat else partial(_draw, rng), []
    for _ in range(max(1, len(labels) // (classes * images))):
        chosen = np.resize(rng.permutation(len(members)), classes)
        batches.append(np.concatenate([draw(members[c], images) for c in chosen]))
    return batches


def few_shot(images: pd.DataFrame, shots: int, seed: int) -> pd.DataFrame:
    """`shots` train rows of each class, one twice only if there are fewer; a seed's fewer shots are among its more."""
    train = images[images["split"] == "train"]
    members = enumerate(train.groupby("label").indices.values())
    rows = [_draw(np.random.default_rng((_SHOTS, seed, i)), own, shots) for i, own in members]
    return train.iloc[np.concatenate(rows)].reset_index(drop=True)


def _draw(rng: np.random.Generator, members: np.ndarray, count: int) -> np.ndarray:
    """`count` of `members`, each at most once unless there are too few (then each at least once)."""
    picked = rng.permutation(members)[:count]
    return np.concatenate([picked, rng.choice(members, count - len(picked))])
