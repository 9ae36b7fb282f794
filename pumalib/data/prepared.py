"""Smaller copies of image files, which decode several times as fast: plain JPEGs in `paths.CACHE`.

A copy is written whole, with its image's time of change, by which missing and outdated ones are found.  EXIF's
orientation is copied, not applied.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from .. import paths
from .batches import ImageError, decode
from .table import Benchmark, cache_name, check, each

SIDE, QUALITY = 384, 92  # the shorter side in pixels, at most, and quality of the JPEGs


def prepare(benchmark: Benchmark) -> Path:
    """Make the copies that are missing or outdated; returns the folder they are in.

    Raises:
        ValueError: an embedded benchmark, or images that cannot be read (all others are prepared).
        OSError: no space left; what is done is kept.
    """
    folder = _prepared(benchmark)
    copied = each(partial(_copy, benchmark.root, folder), unprepared(benchmark), "preparing")
    if errors := [error for error in copied if error]:
        raise ValueError(f"{len(errors)} images cannot be prepared, all others are; the first: {errors[0]}")
    return folder


def use_prepared(benchmark: Benchmark) -> Benchmark:
    """`benchmark` with the copies that `prepare` made in place of its images.

    Raises:
        ValueError: an embedded benchmark, or copies that are missing or outdated.
    """
    if left := unprepared(benchmark):
        raise ValueError(
            f"{len(left):,} of {len(benchmark.images):,} images have no prepared copy of their present state, for "
            f"instance {left[0]}; run `python -m pumalib data prepare --benchmark {benchmark.name} "
            f"--root {benchmark.root} {' '.join(benchmark.datasets)}`"
        )
    images = benchmark.images.assign(path=benchmark.images["path"].map(_jpeg))
    return check(replace(benchmark, images=images, root=_prepared(benchmark)))


def _prepared(benchmark: Benchmark) -> Path:
    if benchmark.pixels is not None:
        raise ValueError(f"benchmark {benchmark.name!r} is embedded; only image files are prepared")
    return paths.CACHE / "prepared" / cache_name(benchmark.root)


def _jpeg(path: str) -> str:
    return path if path.lower().endswith((".jpg", ".jpeg")) else f"{path}.jpg"


def unprepared(benchmark: Benchmark) -> list[str]:
    """Paths of the images whose copy is missing or has another time; file systems keep it to 2 s or better."""
    folder, left = _prepared(benchmark), []
    for path in benchmark.images["path"]:
        try:
            copied = os.stat(f"{folder}/{_jpeg(path)}").st_mtime
        except FileNotFoundError:
            copied = -np.inf
        if abs(copied - os.stat(f"{benchmark.root}/{path}").st_mtime) > 2:
            left.append(path)
    return left


def _copy(root: Path, folder: Path, path: str) -> ImageError | None:
    source, changed, exif = root / path, os.stat(root / path).st_mtime_ns, Image.Exif()
    try:
        image = decode(source)
    except ImageError as error:
        return error
    with Image.open(source) as original:
        exif[ExifTags.Base.Orientation] = original.getexif().get(ExifTags.Base.Orientation, 1)
    scale = min(1, SIDE / min(image.size))
    image = image.resize([max(1, round(length * scale)) for length in image.size], Image.Resampling.BICUBIC)
    with paths.written_whole(folder / _jpeg(path)) as temporary:
        image.save(temporary, "JPEG", quality=QUALITY, exif=exif)
        os.utime(temporary, ns=(changed, changed))
