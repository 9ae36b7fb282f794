"""Smaller copies of image files, which decode several times as fast: JPEGs in `paths.CACHE`, as old as the images."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from PIL import ExifTags, Image

from .. import paths
from .batches import decode, image_error
from .table import Benchmark, cache_name, check, each

SIDE, QUALITY = 384, 92  # the shorter side in pixels, at most, and quality of the JPEGs


def prepare(benchmark: Benchmark) -> Path:
    """Make the copies that are missing or outdated in a folder, returned; ValueError, in the end: unreadable images."""
    folder = _folder(benchmark)
    copy = partial(image_error, partial(_copy, benchmark.root, folder))
    if errors := list(filter(None, each(copy, unprepared(benchmark), "preparing"))):
        raise ValueError(f"{len(errors)} images cannot be prepared, all others are; the first: {errors[0]}")
    return folder


def use_prepared(benchmark: Benchmark) -> Benchmark:
    """`benchmark` with the copies of `prepare` in place of its images; ValueError where one is missing or outdated."""
    if left := unprepared(benchmark):
        what = f"{len(left):,} of {len(benchmark.images):,} images have no prepared copy of their present state"
        remedy = f"prepare --benchmark {benchmark.name} --root {benchmark.root} {' '.join(benchmark.datasets)}"
        raise ValueError(f"{what}, for instance {left[0]}; run `python -m pumalib data {remedy}`")
    images = benchmark.images.assign(path=benchmark.images["path"].map(_jpeg))
    return check(replace(benchmark, images=images, root=_folder(benchmark)))


def unprepared(benchmark: Benchmark) -> list[str]:
    """Paths of the images whose copy is missing or has another time; file systems keep it to 2 s or better."""
    folder, left = _folder(benchmark), []
    for path in benchmark.images["path"]:
        image, copy = f"{benchmark.root}/{path}", f"{folder}/{_jpeg(path)}"
        if not os.path.exists(copy) or abs(os.path.getmtime(copy) - os.path.getmtime(image)) > 2:
            left.append(path)
    return left


def _folder(benchmark: Benchmark) -> Path:
    if benchmark.pixels is not None:
        raise ValueError(f"benchmark {benchmark.name!r} is embedded; only image files are prepared")
    return paths.CACHE / "prepared" / cache_name(benchmark.root)


def _jpeg(path: str) -> str:
    return path if path.lower().endswith((".jpg", ".jpeg")) else f"{path}.jpg"


def _copy(root: Path, folder: Path, path: str) -> None:
    changed, turn, exif = os.stat(root / path).st_mtime_ns, ExifTags.Base.Orientation, Image.Exif()
    image = decode(root / path)
    with Image.open(root / path) as original:  # its orientation is copied, not applied
        exif[turn] = original.getexif().get(turn, 1)
    scale = min(1, SIDE / min(image.size))
    image = image.resize([max(1, round(length * scale)) for length in image.size], Image.Resampling.BICUBIC)
    with paths.written_whole(folder / _jpeg(path)) as temporary:
        image.save(temporary, "JPEG", quality=QUALITY, exif=exif)
        os.utime(temporary, ns=(changed, changed))
