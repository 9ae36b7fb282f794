"""The packed copy of a dataset: one memory-mapped file in which any part of an image is decoded alone.

Decoding is what limits the input, and most of it is wasted: a random crop shows 60% of an image on average, at a
third of its resolution.  `prepare` therefore re-encodes each image at a shorter side of at most 512 pixels, and again
at 0.7 and 0.5 of that size for the larger crops, as JPEGs with restart markers: every segment of 64 x 16 pixels can
then be decoded without those before it.  `part` puts the segments that a crop needs together as an ordinary, smaller
JPEG.

Files, for each dataset: `<dataset>.pack` (the records one after the other) and `<dataset>.index.npz` (where each
is, what it was made from, and the digest), which is written last.  While they are made, `<dataset>.pack.part` and
`<dataset>.journal` stand there instead, from which an interrupted `prepare` goes on.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import filelock
import numpy as np
import pandas as pd
from PIL import Image
from tqdm import tqdm

from . import Benchmark, decoding, loading

FORMAT = 1
FOLDER = ".packed"  # the default, beside the datasets
LEVELS = 3  # sizes of each image, each 1 / sqrt(2) of the one before
_WIDTH, _HEIGHT = 64, 16  # of a segment in pixels: 4 MCUs of 16 x 16 (4:2:0)
_FIELDS = 4  # unsigned 16-bit numbers at the start of a JPEG's record, before the lengths of its segments


# ---- one image -------------------------------------------------------------------------------------------------


def encode(image: Image.Image, quality: int) -> bytes:
    """A record: sizes of header and grid, lengths of the segments, JPEG header, segments."""
    grid = -(-image.height // _HEIGHT), -(-image.width // _WIDTH)
    margin = (0, grid[0] * _HEIGHT - image.height), (0, grid[1] * _WIDTH - image.width), (0, 0)
    padded = Image.fromarray(np.pad(np.asarray(image), margin, mode="edge"))
    stream = io.BytesIO()
    padded.save(stream, "JPEG", quality=quality, subsampling="4:2:0", optimize=True, restart_marker_blocks=4)
    jpeg = np.frombuffer(stream.getvalue(), np.uint8)
    at, frame = 2, 0
    while jpeg[at + 1] != 0xDA:  # up to "start of scan"
        if jpeg[at + 1] == 0xC0:
            frame = at
        at += 2 + (int(jpeg[at + 2]) << 8) + int(jpeg[at + 3])
    header = at + 2 + (int(jpeg[at + 2]) << 8) + int(jpeg[at + 3])
    marks = np.flatnonzero((jpeg[header:-1] == 0xFF) & (jpeg[header + 1 :] >= 0xD0) & (jpeg[header + 1 :] <= 0xD9))
    lengths = np.diff(marks + 2, prepend=0)  # the last one ends with "end of image" instead of a restart marker
    fields = np.concatenate([[header, frame, *grid], lengths]).astype("<u2")
    return fields.tobytes() + stream.getvalue()


def part(record: np.ndarray, box: tuple[int, int, int, int]) -> tuple[bytes, tuple[int, int]]:
    """A JPEG of the segments of `record` that hold `box`, and where in the image its corner (left, top) is.

    Args:
        record: what `encode` made, as uint8.
        box: left, top, right, bottom in pixels.
    """
    header, frame, rows, columns = record[: 2 * _FIELDS].view("<u2").tolist()
    start = 2 * (_FIELDS + rows * columns)
    lengths = record[2 * _FIELDS : start].view("<u2").astype(np.int64)
    ends = (start + header + np.cumsum(lengths)).reshape(rows, columns)
    lengths = lengths.reshape(rows, columns)
    left, right = box[0] // _WIDTH, -(-box[2] // _WIDTH)
    top, bottom = box[1] // _HEIGHT, -(-box[3] // _HEIGHT)
    begins = ends[top:bottom, left] - lengths[top:bottom, left]
    scan = np.concatenate([record[a:b] for a, b in zip(begins, ends[top:bottom, right - 1])])
    marks = np.cumsum(lengths[top:bottom, left:right]) - 1
    scan[marks] = 0xD0 + np.arange(len(marks)) % 8  # restart markers count 0 to 7
    scan[-1] = 0xD9  # end of image
    head = record[start : start + header].copy()
    head[frame + 5 : frame + 9].view(">u2")[:] = (bottom - top) * _HEIGHT, (right - left) * _WIDTH
    return head.tobytes() + scan.tobytes(), (left * _WIDTH, top * _HEIGHT)


# ---- one dataset -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pack:
    """The packed copy of one dataset, for reading.

    Attributes:
        file: the records.
        digest: SHA-256 of `file`.
        side, quality: what it was made with.
        index: arrays with a row per image: `paths` (bytes), `start` (in `file`), `length` (3: of its records),
            `sizes` (2: width and height in the largest), `source` (2: bytes and time of change in ns).
    """

    file: Path
    digest: str
    side: int
    quality: int
    index: dict[str, np.ndarray]

    def find(self, paths: pd.Series) -> np.ndarray:
        """The record numbers of `paths`."""
        records = pd.Index(self.index["paths"]).get_indexer([path.encode() for path in paths])
        if (records < 0).any():
            raise ValueError(f"{self.file} lacks {paths.iloc[records.argmin()]!r}; {_REMEDY}")
        return records

    def size(self, record: int, level: int = 0) -> tuple[int, int]:
        """Width and height in pixels; `level` 0 is the largest."""
        return _at_level(*self.index["sizes"][record].tolist(), level)

    def level(self, shrink: float) -> int:
        """The smallest that is still not smaller than 1 / `shrink` of the largest."""
        return min(LEVELS - 1, int(2 * math.log2(max(1, shrink))))

    def part(self, record: int, level: int, box: tuple[int, int, int, int]) -> tuple[io.BytesIO, tuple[int, int]]:
        """A JPEG of what is around `box`, and where its corner is (see `part`)."""
        start, lengths = int(self.index["start"][record]), self.index["length"][record].tolist()
        start += sum(lengths[:level])
        try:
            jpeg, corner = part(_memory(self.file, self.digest)[start : start + lengths[level]], box)
        except (ValueError, IndexError):
            raise decoding.ImageError(f"{self.file}: record {record} is damaged; remove it and {_REMEDY}") from None
        return io.BytesIO(jpeg), corner


_REMEDY = "run `python -m pumalib data prepare` again"


def _at_level(width: int, height: int, level: int) -> tuple[int, int]:
    return max(1, round(width / 2 ** (level / 2))), max(1, round(height / 2 ** (level / 2)))


@lru_cache(maxsize=64)
def _memory(file: Path, digest: str) -> np.ndarray:
    return np.asarray(np.memmap(file, np.uint8, "r"))


def prepare(
    benchmark: Benchmark, folder: str | Path | None = None, side: int = 512, quality: int = 90, workers: int = 2
) -> list[Path]:
    """Make the packed copies of the datasets of `benchmark` that are not there yet; the files' names.

    Interrupted, it goes on where it was.  Two processes may be called for the same dataset: one waits.

    Args:
        folder: where to; by default `.packed` beside the datasets (hidden, so that it is no dataset itself).
        side: of the shorter side, at most, in pixels.
        quality: of the JPEGs, 1 to 95.
        workers: processes that decode and encode; 0: this one.

    Raises:
        ValueError: an embedded benchmark, or side or quality out of range.
        ImageError: an image cannot be read.
        OSError: no space left; what is done is kept.
    """
    folder = _folder(benchmark, folder)
    if side < 16 or not 1 <= quality <= 95:
        raise ValueError(f"side {side}, quality {quality}; expected at least 16, and 1 to 95")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name in benchmark.datasets:
        images = benchmark.images[benchmark.images["dataset"] == name]
        with filelock.FileLock(folder / f"{name}.lock"):
            try:
                pack = read(folder, name)
                done = (pack.side, pack.quality) == (side, quality) and _stale(pack, benchmark.root, images) is None
            except ValueError:
                done = False
            if not done:
                _prepare(benchmark.root, images["path"], folder, name, side, quality, workers)
        files.append(folder / f"{name}.pack")
    return files


def _folder(benchmark: Benchmark, folder: str | Path | None) -> Path:
    if benchmark.pixels is not None:
        raise ValueError(f"benchmark {benchmark.name!r} is embedded; only image files are packed")
    return Path(folder).expanduser() if folder else benchmark.root / FOLDER


def _prepare(root: Path, paths: pd.Series, folder: Path, name: str, side: int, quality: int, workers: int):
    data, index = folder / f"{name}.pack", folder / f"{name}.index.npz"
    unfinished, journal = folder / f"{name}.pack.part", folder / f"{name}.journal"
    index.unlink(missing_ok=True)
    settings = {"format": FORMAT, "side": side, "quality": quality}
    entries = _resume(root, paths, unfinished, journal, settings)
    try:
        with open(unfinished, "ab") as out, open(journal, "a", encoding="utf-8") as log:
            if log.tell() == 0:
                _append(log, json.dumps(settings) + "\n")
            rest = paths.iloc[len(entries) :]
            made = loading.in_order(_Sources(root, rest, side, quality), range(len(rest)), workers)
            bar = tqdm(made, f"packing {name}", len(paths), initial=len(entries), unit="image", mininterval=1)
            for path, (records, entry) in zip(rest, bar):
                _append(out, b"".join(records))
                entry = [path, *map(len, records), *entry]
                _append(log, json.dumps(entry) + "\n")
                entries.append(entry)
            os.fsync(out.fileno())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        per_image = unfinished.stat().st_size / max(1, len(entries))
        raise OSError(
            error.errno,
            f"no space left in {folder}: {len(entries)} of {len(paths)} images of {name} are packed; free about "
            f"{per_image * (len(paths) - len(entries)) / 1e9:.1f} GB and run it again, it goes on from there",
        ) from None
    numbers = np.array([entry[1:] for entry in entries], np.int64)
    length, sizes, source = np.split(numbers, [LEVELS, LEVELS + 2], axis=1)
    digest = _digest(unfinished)
    os.replace(unfinished, data)
    new = folder / f"{name}.index.part"
    with open(new, "wb") as out:
        np.savez(
            out,
            meta=np.array(json.dumps(settings | {"digest": digest, "bytes": int(length.sum())})),
            paths=np.array([path.encode() for path in paths]),
            start=np.cumsum(length.sum(1)) - length.sum(1),
            length=length,
            sizes=sizes,
            source=source,
        )
    os.replace(new, index)
    journal.unlink()


def _append(stream, data) -> None:
    stream.write(data)
    stream.flush()


def _resume(root: Path, paths: pd.Series, unfinished: Path, journal: Path, settings: dict) -> list[list]:
    """The journal's entries that are still true; both files are cut back to them."""
    entries, end, kept = [], 0, 0
    if unfinished.is_file() and journal.is_file():
        lines = journal.read_bytes().splitlines(keepends=True)
        if lines and lines[0] == (json.dumps(settings) + "\n").encode():
            kept = len(lines[0])
            for path, line in zip(paths, lines[1:]):
                entry = json.loads(line) if line.endswith(b"\n") else [None]
                after = end + sum(entry[1 : 1 + LEVELS])
                if entry[0] != path or entry[-2:] != _source(root / path) or after > unfinished.stat().st_size:
                    break
                entries.append(entry)
                end, kept = after, kept + len(line)
    for file, length in ((unfinished, end), (journal, kept)):
        with open(file, "ab") as stream:
            stream.truncate(length)
    return entries


class _Sources:
    """What packing makes of each image; a map-style dataset for torch's DataLoader."""

    def __init__(self, root: Path, paths: pd.Series, side: int, quality: int):
        self.root, self.paths, self.side, self.quality = root, list(paths), side, quality

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[list[bytes], list[int]] | decoding.ImageError:
        """The records; width and height in the first, bytes and time of change of the file."""
        file = self.root / self.paths[i]
        try:
            source = _source(file)
            image = decoding.decode(file)
        except decoding.ImageError as error:
            return error
        scale = min(1.0, self.side / min(image.size))
        width, height = (max(1, round(length * scale)) for length in image.size)
        sizes = [_at_level(width, height, level) for level in range(LEVELS)]
        levels = [image.resize(size, Image.Resampling.BICUBIC) for size in sizes]
        return [encode(level, self.quality) for level in levels], [width, height, *source]


def _source(file: Path) -> list[int]:
    try:
        stat = file.stat()
    except FileNotFoundError:
        raise decoding.ImageError(f"{file}: no such image; unpack its dataset again") from None
    return [stat.st_size, stat.st_mtime_ns]


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read(folder: str | Path, name: str) -> Pack:
    """The packed copy of dataset `name` in `folder`; its length is checked, its digest by `verify`."""
    data, index = Path(folder) / f"{name}.pack", Path(folder) / f"{name}.index.npz"
    if not (data.is_file() and index.is_file()):
        raise ValueError(f"dataset {name!r}: no finished packed copy in {folder}; {_REMEDY}")
    try:
        with np.load(index) as stored:
            arrays = {key: stored[key] for key in stored.files}
        meta = json.loads(str(arrays.pop("meta")))
    except Exception as error:  # a damaged zip file raises many things
        raise ValueError(f"{index}: damaged ({error}); {_REMEDY}") from None
    if meta["format"] != FORMAT:
        raise ValueError(f"{index}: format {meta['format']}, expected {FORMAT}; {_REMEDY}")
    if data.stat().st_size != meta["bytes"]:
        raise ValueError(f"{data}: cut short, {data.stat().st_size:,} of {meta['bytes']:,} bytes; {_REMEDY}")
    return Pack(data, meta["digest"], meta["side"], meta["quality"], arrays)


def use(benchmark: Benchmark, folder: str | Path | None = None) -> Benchmark:
    """`benchmark`, read from the packed copies that `prepare` made.

    Raises:
        ValueError: a packed copy is missing, cut short, or older than one of its images.
    """
    folder = _folder(benchmark, folder)
    packs = {}
    for name in benchmark.datasets:
        packs[name] = read(folder, name)
        stale = _stale(packs[name], benchmark.root, benchmark.images[benchmark.images["dataset"] == name])
        if stale:
            raise ValueError(f"{packs[name].file}: {stale}; {_REMEDY}")
    return replace(benchmark, packed=packs)


def _stale(pack: Pack, root: Path, images: pd.DataFrame) -> str | None:
    """Why the pack no longer is a copy of these images, or None."""
    paths = images["path"]
    records = pd.Index(pack.index["paths"]).get_indexer([path.encode() for path in paths])
    if (records < 0).any():
        return f"lacks {(records < 0).sum()} images, for instance {paths.iloc[records.argmin()]}"
    for path, (size, time) in zip(paths, pack.index["source"][records].tolist()):
        now = _source(root / path)
        if now[0] != size or now[1] > time:
            return f"older than its source {path}"
    return None


def verify(folder: str | Path, name: str) -> None:
    """Raise ValueError unless the packed copy of dataset `name` is whole, by its SHA-256."""
    pack = read(folder, name)
    if _digest(pack.file) != pack.digest:
        raise ValueError(f"{pack.file}: damaged, its SHA-256 is not the one in its index; {_REMEDY}")
