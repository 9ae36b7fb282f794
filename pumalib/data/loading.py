"""From the table to batches: what is shown of each image, normalised, in worker processes or not.

Augmentation is a pure function of (seed, epoch, batch position), as the order (`sampling`) is of (seed, epoch).  So the same seed gives the same batches whatever the number of worker processes, and training
resumes in mid-epoch by starting at a batch position.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from . import Benchmark
from .decoding import ImageError, reading, to_rgb

_AUGMENT = 2  # keeps its random stream apart from those of `sampling`
_ASPECT = (3 / 4, 4 / 3)  # of a random crop, as in torchvision's RandomResizedCrop
_TRIES = 10
_CHUNK = 64  # images that a worker process decodes at a time


# ---- which part of an image is shown ---------------------------------------------------------------------------


def random_box(
    uniform: Sequence[float], height: int, width: int, scale: tuple[float, float]
) -> tuple[int, int, int, int]:
    """The box of RandomResizedCrop as left, top, right, bottom in pixels.

    Area `scale` of the image, aspect ratio 3/4 to 4/3, ten tries, then the largest centred box; the distribution
    is that of torchvision.transforms.RandomResizedCrop.get_params.

    Args:
        uniform: 22 random numbers in [0, 1).
    """
    low, high = (math.log(ratio) for ratio in _ASPECT)
    for i in range(_TRIES):
        area = height * width * (scale[0] + uniform[i] * (scale[1] - scale[0]))
        aspect = math.exp(low + uniform[_TRIES + i] * (high - low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(uniform[-2] * (width - w + 1)), int(uniform[-1] * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * _ASPECT[1])), min(height, round(width / _ASPECT[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def test_size(height: int, width: int, size: int, resize: str = "both") -> tuple[int, int]:
    """Height and width to which an image is resized before its centre is cropped to `size`: 256 for 224 pixels.

    `resize` is "both" (both sides become 256, as in the paper) or "shorter" (the shorter side, as in the authors'
    code).
    """
    side = round(256 * size / 224)
    if resize == "both":
        return side, side
    if resize == "shorter":
        return (int(side * height / width), side) if width <= height else (side, int(side * width / height))
    raise ValueError(f"unknown resize {resize!r}; known: both, shorter")


def _centre(images: torch.Tensor, size: int) -> torch.Tensor:
    top, left = (round((side - size) / 2) for side in images.shape[-2:])
    return images[..., top : top + size, left : left + size]


def _resized(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(..., 3, height, width), antialiased bicubic; of uint8 within two levels of Pillow's, four times as fast."""
    return F.interpolate(images, (height, width), mode="bicubic", antialias=True, align_corners=False)



class _Files:
    """The images of some batches as uint8, in chunks; a map-style dataset for torch's DataLoader."""

    def __init__(self, benchmark, rows, batches, draws, size, crop_scale, flip, resize):
        self.size, self.crop_scale, self.flip, self.resize = size, crop_scale, flip, resize
        self.batches, self.draws = batches, draws
        self.root = os.fspath(benchmark.root)
        # One array of bytes, not 100,000 str: reading those in forked workers would copy their memory.
        self.paths = np.array([path.encode() for path in rows["path"]])
        self.packs = list(benchmark.packed.values())
        if self.packs:
            names = list(benchmark.packed)
            self.pack = np.array([names.index(name) for name in rows["dataset"]])
            self.record = np.empty(len(rows), int)
            for number, pack in enumerate(self.packs):
                here = self.pack == number
                self.record[here] = pack.find(rows["path"][here])

    def __getitem__(self, chunk: tuple[int, int]) -> np.ndarray | ImageError:
        """(b, 3, size, size) uint8 of at most 64 images of batch `chunk[0]`, from place `chunk[1]` on."""
        batch, first = chunk
        positions = self.batches[batch][first : first + _CHUNK]
        draws = self.draws(batch, len(self.batches[batch]))[first:] if self.draws else [None] * len(positions)
        out = np.empty((len(positions), 3, self.size, self.size), np.uint8)
        try:
            for row, position in enumerate(positions):
                out[row] = self._image(position, draws[row])
        except ImageError as error:
            return error  # raised by whoever takes the batch, without the worker's traceback around it
        return out

    def _image(self, position: int, draw: list[float] | None) -> torch.Tensor:
        path = os.path.join(self.root, self.paths[position].decode())
        if self.packs:
            pack, record = self.packs[self.pack[position]], self.record[position]
            box, out = self._view(*pack.size(record), draw)
            level = pack.level(_shrink(box, out))
            box = _scaled(box, pack.size(record), pack.size(record, level))
            jpeg, (left, top) = pack.part(record, level, box)
            with reading(jpeg, f"{pack.file}: {path}") as image:
                pixels = np.array(image)[box[1] - top : box[3] - top, box[0] - left : box[2] - left]
        else:
            with reading(path) as image:
                width, height = image.size
                box, out = self._view(width, height, draw)
                shrink = _shrink(box, out)
                if shrink >= 2:  # JPEG only: decode at 1/2, 1/4 or 1/8, still as large as what is shown
                    image.draft(None, (int(width / shrink), int(height / shrink)))
                image = to_rgb(image)
                pixels = np.array(image.crop(_scaled(box, (width, height), image.size)))
        x = _resized(torch.from_numpy(pixels).permute(2, 0, 1)[None], *out)[0]
        if draw is None:
            return _centre(x, self.size)
        return x.flip(2) if self.flip and draw[0] < 0.5 else x

    def _view(self, width: int, height: int, draw: list[float] | None):
        """The box that is taken, and the (height, width) it is resized to."""
        if draw is None:
            return (0, 0, width, height), test_size(height, width, self.size, self.resize)
        return random_box(draw[1:], height, width, self.crop_scale), (self.size, self.size)


def _shrink(box, out: tuple[int, int]) -> float:
    return min((box[2] - box[0]) / out[1], (box[3] - box[1]) / out[0])


def _scaled(box, size: tuple[int, int], new: tuple[int, int]) -> tuple[int, int, int, int]:
    """`box` of an image of `size` (width, height), in the same image at size `new`; at least one pixel."""
    x, y = new[0] / size[0], new[1] / size[1]
    left, top = min(int(box[0] * x), new[0] - 1), min(int(box[1] * y), new[1] - 1)
    return left, top, max(left + 1, min(round(box[2] * x), new[0])), max(top + 1, min(round(box[3] * y), new[1]))


def in_order(dataset, keys: Sequence, workers: int) -> Iterator:
    """`dataset[key]` for each of `keys`, made by worker processes; raises an ImageError that comes instead."""
    if workers == 0:
        parts = map(dataset.__getitem__, keys)
    else:  # arrays come back through a pipe: torch's shared memory is too small in many containers
        parts = iter(DataLoader(dataset, None, sampler=keys, num_workers=workers, collate_fn=_as_it_is))
    try:
        for part in parts:
            if isinstance(part, ImageError):
                raise part
            yield part
    finally:
        del parts  # ends the workers now, also where a traceback keeps this frame


def _as_it_is(part):
    return part


def _empty(shape: tuple[int, ...], dtype: type) -> torch.Tensor:
    """Uninitialised memory from NumPy, which asks for huge pages: a new batch is touched in half the time."""
    return torch.from_numpy(np.empty(shape, dtype))


def _file_batches(files: _Files, start: int, workers: int, pin: bool) -> Iterator[torch.Tensor]:
    """(B, 3, size, size) uint8 of each batch from `start` on."""
    batches = files.batches
    chunks = [(b, at) for b in range(start, len(batches)) for at in range(0, len(batches[b]), _CHUNK)]
    parts = in_order(files, chunks, workers)
    for batch in batches[start:]:
        out = _empty((len(batch), 3, files.size, files.size), np.uint8)
        out = out.pin_memory() if pin else out
        for at in range(0, len(batch), _CHUNK):
            out[at : at + _CHUNK] = torch.from_numpy(next(parts))
        yield out


# ---- embedded pixels -------------------------------------------------------------------------------------------


def resample(pixels: torch.Tensor, boxes: Sequence, size: int, flipped: Sequence[bool]) -> torch.Tensor:
    """What `boxes` show of each image, as (B, 3, size, size) float32 from 0 to 255.

    Antialiased bicubic as in Pillow's resize(box=...), without its rounding: two matrix products per image.

    Args:
        pixels: (B, H, W, 3) uint8.
        boxes: (B, 4), left, top, right, bottom in pixels.
        flipped: (B,) bool, left and right exchanged.
    """
    boxes = torch.as_tensor(boxes, dtype=torch.float32)
    across = _weights(boxes[:, 0], boxes[:, 2], pixels.shape[2], size)  # (B, size, W)
    down = _weights(boxes[:, 1], boxes[:, 3], pixels.shape[1], size)  # (B, size, H)
    flipped = torch.as_tensor(flipped)[:, None, None]
    across = torch.where(flipped, across.flip(1), across)
    x = pixels.permute(0, 3, 1, 2).float()
    return (down[:, None] @ x @ across[:, None].mT).clamp_(0, 255)


def _weights(low: torch.Tensor, high: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """(B, size, length): how much each of `length` pixels counts in each of `size` pixels from `low` to `high`."""
    step = ((high - low) / size)[:, None, None]
    centre = low[:, None, None] + (torch.arange(size)[:, None] + 0.5) * step
    d = (torch.arange(length) + 0.5 - centre).div_(step.clamp(min=1)).abs_()
    near = (1.5 * d - 2.5) * d * d + 1  # cubic convolution with a = -0.5
    far = ((-0.5 * d + 2.5) * d - 4) * d + 2
    weights = torch.where(d < 1, near, torch.where(d < 2, far, 0))
    return weights / weights.sum(-1, keepdim=True)


def _pixel_batch(pixels, draws, size, crop_scale, flip, resize) -> torch.Tensor:
    """(B, 3, size, size) float32 from 0 to 255."""
    count, height, width = pixels.shape[:3]
    if draws is not None:
        boxes = [random_box(draw[1:], height, width, crop_scale) for draw in draws]
        return resample(pixels, boxes, size, [flip and draw[0] < 0.5 for draw in draws])
    if (height, width) == (size, size):
        return pixels.permute(0, 3, 1, 2).float()
    x = _resized(pixels.permute(0, 3, 1, 2).float(), *test_size(height, width, size, resize))
    return _centre(x, size).clamp(0, 255)


# ---- the one entry ---------------------------------------------------------------------------------------------


def batches(
    benchmark: Benchmark,
    rows: pd.DataFrame,
    index_batches: Sequence[np.ndarray],
    *,
    train: bool,
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
    labels: Sequence[int] | None = None,
    seed: int = 0,
    epoch: int = 0,
    part: int = 0,
    start: int = 0,
    workers: int = 0,
    crop_scale: tuple[float, float] = (0.2, 1.0),
    flip: bool = True,
    resize: str = "both",
    pin: bool = False,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[torch.Tensor, torch.Tensor, np.ndarray]]:
    """Batches of images (B, 3, size, size) float32 normalised, labels (B,) int64, and positions (B,) in `rows`.

    In training a random crop (`random_box`) and flip; in testing a resize and centre crop (`test_size`), or
    nothing where embedded pixels have that size already.

    Args:
        rows: some rows of `benchmark.images`, in any order.
        index_batches: positions in `rows` for each batch, from `random_batches`, `class_batches` or
            `ordered_batches`.
        size: side of the images in pixels.
        mean, std: of the backbone's own pretraining, per channel, for values from 0 to 1.
        labels: for each of `rows`; by default its column `label`.
        seed, epoch: augmentation depends on these and on the batch's position only.
        part: each of `index_batches` is this one (from 0) of the equal parts of a batch, and augmented as there.
        start: begin with this batch, as if those before it had been taken.
        workers: processes that decode image files; 0: this one.  Embedded pixels never need any.
        resize: see `test_size`.
        pin: page-locked memory for image files, so that a GPU fetches them while it computes.
        device: where the batches are wanted; uint8 travels there and is normalised there.

    Raises:
        ImageError: an image cannot be read.
    """
    labels = torch.tensor(np.array(rows["label"] if labels is None else labels, np.int64))
    scale = 1 / (torch.tensor(std, device=device)[:, None, None] * 255)
    shift = torch.tensor(mean, device=device)[:, None, None] * 255 * scale
    draws = partial(_draws, seed, epoch, part) if train else None
    if benchmark.pixels is None:
        files = _Files(benchmark, rows, index_batches, draws, size, crop_scale, flip, resize)
        images = _file_batches(files, start, workers, pin)
    else:
        paths = rows["path"].to_numpy(int)
        images = (
            _pixel_batch(
                torch.from_numpy(benchmark.pixels[paths[positions]]),
                draws(place, len(positions)) if train else None,
                size, crop_scale, flip, resize,
            )
            for place, positions in enumerate(index_batches[start:], start)
        )  # fmt: skip
    for positions, x in zip(index_batches[start:], images):
        x = x.to(device, non_blocking=pin)
        yield _normalised(x, scale, shift), labels[positions].to(device), np.asarray(positions)


def _normalised(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """x * scale - shift as contiguous float32."""
    if x.device.type != "cpu":
        return x.float().contiguous().mul_(scale).sub_(shift)
    out = _empty(x.shape, np.float32)
    for one, raw in zip(out, x):  # one image at a time stays in the cache
        one.copy_(raw).mul_(scale).sub_(shift)
    return out


def _draws(seed: int, epoch: int, part: int, place: int, count: int) -> list[list[float]]:
    """(count, 23) random numbers in [0, 1) that augment a part of the batch at `place`: one flips, the others crop."""
    draws = np.random.default_rng((_AUGMENT, seed, epoch, place)).random(((part + 1) * count, 2 * _TRIES + 3))
    return draws[part * count :].tolist()
