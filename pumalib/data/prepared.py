"""Smaller copies of image files, which decode several times as fast.

They are JPEGs in `paths.CACHE`; each has the modification time of its image.
"""

import os
import shlex
from dataclasses import replace
from pathlib import Path

from PIL import ExifTags, Image

from .. import paths
from .images import FORMATS, ImageError, decode, image_error
from .table import Benchmark, cache_name, check, in_threads

SIDE = 384  # the shorter side in pixels, at most
QUALITY = 92  # of the JPEGs
# Some file systems store times in steps of this many seconds.
SAME_TIME = 2


def prepare(benchmark: Benchmark) -> Path:
    """Make the copies that are missing or outdated, and return their folder.

    Raises ValueError, once all others are made, if some images cannot be read.
    """
    folder = _copies_folder(benchmark)
    root = benchmark.folder

    def copy(path: str) -> ImageError | None:
        return image_error(_copy, root / path, folder / _jpeg(path))

    results = in_threads(copy, unprepared(benchmark), "preparing")
    errors = [error for error in results if error is not None]
    if errors:
        what = f"{len(errors)} images cannot be prepared, all others are"
        raise ValueError(f"{what}; the first: {errors[0]}")
    return folder


def use_prepared(benchmark: Benchmark) -> Benchmark:
    """The benchmark with the copies made by `prepare` in place of its images.

    Raises ValueError where a copy is missing or outdated.
    """
    left = unprepared(benchmark)
    if left:
        count = f"{len(left):,} of {len(benchmark.images):,} images"
        what = f"{count} have no prepared copy of their present state, for instance {left[0]}"
        where = ["--benchmark", benchmark.name, "--root", str(benchmark.root)]
        asked = shlex.join([*where, *benchmark.datasets])
        command = f"python -m pumalib data prepare {asked}"
        raise ValueError(f"{what}; run `{command}`")
    copies = benchmark.images.assign(path=benchmark.images["path"].map(_jpeg))
    return check(replace(benchmark, images=copies, root=_copies_folder(benchmark)))


def unprepared(benchmark: Benchmark) -> list[str]:
    """Paths of the images whose copy is missing or outdated."""
    folder = _copies_folder(benchmark)
    root = benchmark.folder
    return [
        path
        for path in benchmark.images["path"]
        if not _is_as_old(folder / _jpeg(path), root / path)
    ]


def _is_as_old(copy: Path, image: Path) -> bool:
    """Whether a copy exists and was made from the image's present state."""
    try:
        copied = copy.stat()
    except OSError:
        return False
    # A power loss can leave an empty file.
    if copied.st_size == 0:
        return False
    of_image = image.stat()
    # The image was changed after its copy was made, even if its modification time says otherwise.
    if of_image.st_ctime_ns > copied.st_ctime_ns:
        return False
    apart = abs(copied.st_mtime - of_image.st_mtime)
    if copied.st_mtime % SAME_TIME == 0:
        return apart <= SAME_TIME
    # The copy's time is set to the image's, rounded by some file systems.
    return apart < 1e-3


def _copies_folder(benchmark: Benchmark) -> Path:
    if benchmark.pixels is not None:
        what = f"benchmark {benchmark.name!r} is embedded"
        raise ValueError(f"{what}; only image files are prepared")
    return paths.CACHE / "prepared" / cache_name(benchmark.folder)


def _jpeg(path: str) -> str:
    """The path of an image's copy."""
    if path.lower().endswith((".jpg", ".jpeg")):
        return path
    return f"{path}.jpg"


def _copy(source: Path, target: Path) -> None:
    """Write the copy of one image; ImageError where it cannot be read."""
    changed = source.stat().st_mtime_ns
    image = decode(source)
    # Its orientation is copied, not applied.
    orientation = ExifTags.Base.Orientation
    exif = Image.Exif()
    with Image.open(source, formats=FORMATS) as original:
        if original.format == "TIFF":
            # Loading turns it, and leaves no orientation.
            original.load()
        exif[orientation] = original.getexif().get(orientation, 1)

    scale = min(1, SIDE / min(image.size))
    width, height = (max(1, round(length * scale)) for length in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    with paths.written_whole(target, durable=False) as temporary:
        image.save(temporary, "JPEG", quality=QUALITY, exif=exif)
        os.utime(temporary, ns=(changed, changed))
