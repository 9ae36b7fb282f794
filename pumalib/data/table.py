"""The one table: a `Benchmark` has a row per image; datasets and splits are filters of it."""

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd

from .. import paths
from ..progress import bar

COLUMNS = ["path", "label", "class_name", "dataset", "split"]
SPLITS = ("train", "val", "test", "query", "gallery")
# Files after which digests are written: a killed process loses only the last ones.
WRITTEN_TOGETHER = 20_000
# The coarsest resolution of file times, in nanoseconds.
SAME_TIME = 2 * 10**9

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Benchmark:
    """A set of retrieval datasets, as files under `root` or embedded as `pixels`.

    The columns of `images`: `path` (str, relative to `root`, or the row of `pixels`), `label` (int,
    unique over all datasets), `class_name`, `dataset` and `split`: "train", "val", "query",
    "gallery" or "test", which is both query and gallery; "val" is for `holdout` and `held_out`.
    """

    name: str  # a key of `data.READERS`, such as "mini"
    images: pd.DataFrame  # a row per image
    root: Path | None = None
    pixels: np.ndarray | None = None  # (n, H, W, 3) uint8

    @property
    def datasets(self) -> list[str]:
        """The names of its datasets, in the order of the table."""
        return list(dict.fromkeys(self.images["dataset"]))

    @property
    def train(self) -> pd.DataFrame:
        """Every row that is trained on."""
        return self.images[self.images["split"] == "train"]

    @property
    def test(self) -> pd.DataFrame:
        """Every row that is evaluated: test, query and gallery."""
        return self.images[~self.images["split"].isin(["train", "val"])]

    @property
    def folder(self) -> Path:
        """The folder that `path` is relative to; ValueError if the images are not files."""
        if self.root is None:
            raise ValueError(f"benchmark {self.name!r} is embedded: its images are no files")
        return self.root

    def without_val(self) -> "Benchmark":
        """Return the benchmark without the images that are neither trained on nor tested."""
        is_val = self.images["split"] == "val"
        if not is_val.any():
            return self
        return replace(self, images=self.images[~is_val].reset_index(drop=True))

    def select(self, datasets: Sequence[str] | None) -> "Benchmark":
        """Return the benchmark with only these datasets (None: all), in the given order."""
        if datasets is None:
            return self
        check_asked(datasets)
        check_known("dataset", datasets, self.datasets)
        parts = [self.images[self.images["dataset"] == name] for name in datasets]
        return replace(self, images=pd.concat(parts, ignore_index=True))

    def holdout(self) -> "Benchmark":
        """Return a benchmark of training images only, to choose settings without the test classes.

        Its test classes are the "val" classes or, without any, the second half of each dataset's
        training classes.
        """
        is_val = self.images["split"] == "val"
        if is_val.any():
            rows = self.images[is_val | (self.images["split"] == "train")]
            split = rows["split"].replace("val", "test")
            return replace(self, images=rows.assign(split=split).reset_index(drop=True))
        rows = self.train.reset_index(drop=True)
        place = rows.groupby("dataset", sort=False)["label"].rank("dense", pct=True)
        return replace(self, images=rows.assign(split=np.where(place <= 0.5, "train", "test")))

    @cached_property
    def contents(self) -> pd.Series:
        """SHA-256 of each image's file, or of its embedded pixels, by the index of `images`."""
        if self.pixels is not None:
            pixels = self.pixels
            return self.images["path"].map(lambda row: _sha256(pixels[int(row)].tobytes()))
        parts = self.images.groupby("dataset", sort=False)["path"]
        return pd.concat([_contents(self.folder, str(name), files) for name, files in parts])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the table and of the contents of every image; `root` does not change it.

        Cached: every run of a notebook needs it for its name.
        """
        table = self.images[COLUMNS].assign(contents=self.contents)
        return _sha256(table.to_csv(index=False, lineterminator="\n").encode())


@dataclass(frozen=True)
class Reader:
    """How to read a benchmark: an entry of `data.READERS`.

    `load(root, datasets)` returns the `Benchmark` of the named datasets (None: all); it raises
    ValueError where something is missing or damaged.  The other fields have defaults that suit most
    benchmarks.
    """

    load: Callable[..., Benchmark]
    # Whether `load` needs the folder of the datasets.
    needs_root: bool = False
    # Whether to apply the EXIF rotation where a run's settings do not decide.
    upright: bool = False
    # Which of `split=` and `strict=` of `data.read` are passed to `load`.
    options: tuple[str, ...] = ()
    # `state(root, datasets, split)` is a text that changes with the files that `load` reads, found
    # without reading them.  Without it a process reads a benchmark only once.
    state: Callable[[Path, Sequence[str] | None, Path | None], str] | None = None
    # `expected()` gives the known sizes, available before the files are: a row per dataset and
    # split, with the columns dataset, split, images and classes.
    expected: Callable[[], pd.DataFrame] | None = None


def check_known(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError naming the unknown `names` and the `known` ones."""
    unknown = [name for name in names if name not in known]
    if unknown:
        asked = ", ".join(map(repr, unknown))
        raise ValueError(f"unknown {kind} {asked}; known: {', '.join(map(str, known))}")


def check_asked(datasets: Sequence[str] | None) -> None:
    """Raise ValueError if `datasets` is empty; None, for all, is fine."""
    if datasets is not None and len(datasets) == 0:
        raise ValueError(
            f"datasets = {datasets!r} names none; name one or more, or give None for all"
        )


# ---- checks of a benchmark


def check(benchmark: Benchmark) -> Benchmark:
    """Return `benchmark` if it can be trained and tested on.

    Otherwise raises ValueError, which names the dataset and the remedy.
    """
    images = benchmark.images
    twice = images[images.duplicated(["dataset", "path"])]
    if len(twice):
        first = twice.iloc[0]
        what = f"image {first['path']!r} stands twice in the table"
        raise ValueError(f"dataset {first['dataset']!r}: {what}")
    for name, rows in images.groupby("dataset", sort=False):
        problem = _problem(str(name), rows)
        if problem:
            raise ValueError(f"dataset {name!r}: {problem}")
    return benchmark


def _problem(name: str, rows: pd.DataFrame) -> str | None:
    """The first reason why a dataset with these rows cannot be used."""
    if name in ("unified", "harmonic"):
        return "the name of an overall accuracy; rename the dataset"
    problem = _class_on_both_sides(rows)
    if problem:
        return problem
    used = rows[rows["split"] != "val"]
    return _too_few_classes(used) or _nothing_to_find(used)


def _classes_of_sides(rows: pd.DataFrame) -> tuple[set[str], set[str]]:
    """The class names in train, and the class names in test."""
    in_train = rows["split"] == "train"
    return set(rows["class_name"][in_train]), set(rows["class_name"][~in_train])


def _class_on_both_sides(rows: pd.DataFrame) -> str | None:
    side = rows["split"].where(rows["split"].isin(["train", "val"]), "test")
    for one, other in (("train", "test"), ("train", "val"), ("val", "test")):
        both = set(rows["class_name"][side == one]) & set(rows["class_name"][side == other])
        if both:
            count = f"({len(both)} such classes)"
            return f"class {min(both)!r} is in {one} and {other} {count}; move it to one side"
    return None


def _too_few_classes(rows: pd.DataFrame) -> str | None:
    train, test = _classes_of_sides(rows)
    if min(len(train), len(test)) >= 2:
        return None
    count = f"{len(train)} class(es) in train, {len(test)} in test"
    remedy = "add some, or leave the dataset out with datasets=[...]"
    return f"{count}; at least 2 are needed in each: {remedy}"


def _nothing_to_find(rows: pd.DataFrame) -> str | None:
    split = rows["split"]
    classes = rows["class_name"]
    in_gallery = classes[split.isin(["test", "gallery"])].value_counts()
    # An image is not its own positive.
    positives = classes.map(in_gallery).fillna(0) - (split == "test")
    queries = split.isin(["test", "query"])
    if (positives[queries] > 0).any():
        return None
    what = "no query has another image of its class to find (in the gallery)"
    return f"{what}; give a test class two images"


# ---- equal files


@dataclass(frozen=True)
class Duplicates:
    """The numbers of two kinds of duplicate images, each with a pair of paths as an example."""

    # Test images whose file is also a training image, of any dataset.
    tested: int
    tested_example: tuple[str, str] | None
    # Images whose file is also in another class of the same side (train or test).
    ambiguous: int
    ambiguous_example: tuple[str, str] | None


def duplicates(benchmark: Benchmark) -> Duplicates:
    """Count equal files between train and test, and between classes of either, by their digests.

    Costs nothing once `Benchmark.digest` has read the same contents.
    """
    rows = benchmark.images.assign(contents=benchmark.contents)
    in_train = rows["split"] == "train"
    originals = rows[in_train].drop_duplicates("contents").set_index("contents")["path"]
    tested = rows[~in_train & rows["contents"].isin(originals.index)]
    tested_example = None
    if len(tested):
        copy = tested.iloc[0]
        tested_example = (str(originals[copy["contents"]]), str(copy["path"]))

    side = in_train.rename("side")
    classes = rows.groupby([side, "contents"])["label"].transform("nunique")
    ambiguous = rows[classes > 1]
    ambiguous_example = None
    if len(ambiguous):
        first = ambiguous.iloc[0]
        same_side = in_train[ambiguous.index] == in_train[first.name]
        same = ambiguous[same_side & (ambiguous["contents"] == first["contents"])]
        other = same[same["label"] != first["label"]].iloc[0]
        ambiguous_example = (str(first["path"]), str(other["path"]))
    return Duplicates(len(tested), tested_example, len(ambiguous), ambiguous_example)


def warn_of_duplicates(benchmark: Benchmark) -> None:
    """Warn if test images are copies of training images, or equal files are in two classes."""
    found = duplicates(benchmark)
    if found.tested_example:
        original, copy = found.tested_example
        text = f"{found.tested} test images are copies of training images, for instance {copy}"
        warnings.warn(f"{text} of {original}; results count them as new", stacklevel=2)
    if found.ambiguous_example:
        one, other = found.ambiguous_example
        text = f"{found.ambiguous} images stand in two classes or more, for instance {one}"
        warnings.warn(f"{text} as {other}; no model can tell these apart", stacklevel=2)


# ---- reading many files


def _contents(root: Path, dataset: str, files: pd.Series) -> pd.Series:
    """SHA-256 of each of a dataset's files; only new and changed files are read.

    Digests are cached in `paths.CACHE` by path and `paths.state`.  A file that was changed just now
    is not cached: its next change may have the same time.
    """
    cache = paths.CACHE / "contents" / cache_name(root) / f"{dataset}.json"
    known = _kept_digests(cache)
    keys = {}
    fresh: set[str] = set()
    folder = str(root)
    for path in files:
        # Making a `Path` would take longer than the file system's answer.
        state = paths.state(os.stat(f"{folder}/{path}"))  # noqa: PTH116
        keys[path] = f"{' '.join(map(str, state))} {path}"
        if time.time_ns() - state[1] < SAME_TIME:
            fresh.add(keys[path])
    new = [path for path, key in keys.items() if key not in known]

    def digest(path: str) -> str:
        return _sha256((root / path).read_bytes())

    for start in range(0, len(new), WRITTEN_TOGETHER):
        part = new[start : start + WRITTEN_TOGETHER]
        digests = in_threads(digest, part, f"digests of {dataset}")
        for path, value in zip(part, digests):
            known[keys[path]] = value
        with paths.written_whole(cache) as temporary:
            kept = {key: value for key, value in known.items() if key not in fresh}
            temporary.write_text(json.dumps(kept), "utf-8")
    return files.map(keys).map(known)


def _kept_digests(cache: Path) -> dict[str, str]:
    """The digests in a file of the cache; {} if it is missing or damaged."""
    try:
        return dict(json.loads(cache.read_text("utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], what: str
) -> list[Result]:
    """Call `function` on every item in threads, with a bar named `what`; return results in order.

    Threads help because reading, hashing and decoding release the GIL.
    """
    if not items:
        return []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(function, items)
        return list(bar(results, desc=what, total=len(items), unit="image"))


def cache_name(root: Path) -> str:
    """A folder's name in the cache, different for two folders of the same name."""
    return f"{root.name}-{_sha256(os.fsencode(root.resolve()))[:8]}"
