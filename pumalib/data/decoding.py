"""Image files to RGB, and what is done about those that cannot be read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image
from tqdm import tqdm

from . import Benchmark, check


class ImageError(ValueError):
    """An image that cannot be read; the message names the file and what can be done."""


@contextmanager
def reading(source: str | Path | BinaryIO, packed: str = "") -> Iterator[Image.Image]:
    try:
        with Image.open(source) as image:
            yield image
    except Exception as error:  # decoders of damaged files raise nearly anything
        remedy = (
            "Make the packed copy again: `python -m pumalib data prepare`"
            if packed
            else "Replace the file, or leave such images out with drop_unreadable = True (of a profile's data, or -p); "
            "`python -m pumalib data verify` lists them all"
        )
        what = f"{packed or source}: cannot be read as an image ({type(error).__name__}: {error})"
        raise ImageError(f"{what}. {remedy}") from None


def decode(source: str | Path | BinaryIO) -> Image.Image:
    """The image as RGB; what EXIF says of orientation is ignored, as in the authors' code.

    Greyscale, palette and CMYK images are converted, transparent pixels are laid on white, 16-bit values are
    scaled to 8 bits, and of an animation the first frame is taken.

    Raises:
        ImageError: missing, truncated, or no image.
    """
    with reading(source) as image:
        return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def unreadable(benchmark: Benchmark, progress: bool = False) -> dict[int, ImageError]:
    """Decode every image file; the errors by position in `benchmark.images`."""
    if benchmark.pixels is not None:
        return {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = pool.map(_error_of, (benchmark.root / path for path in benchmark.images["path"]))
        errors = tqdm(errors, "decoding", len(benchmark.images), unit="image", disable=not progress)
        return {position: error for position, error in enumerate(errors) if error is not None}


def _error_of(path: Path) -> ImageError | None:
    try:
        decode(path)
    except ImageError as error:
        return error
    return None


def drop_unreadable(benchmark: Benchmark) -> Benchmark:
    """The benchmark without the images that cannot be decoded, with one warning that names each of them."""
    bad = list(unreadable(benchmark))
    if not bad:
        return benchmark
    images = benchmark.images
    names = "\n  ".join(images["path"].iloc[bad])
    warnings.warn(f"{len(bad)} of {len(images)} images cannot be read and are left out:\n  {names}", stacklevel=2)
    return check(replace(benchmark, images=images.drop(images.index[bad]).reset_index(drop=True)))
