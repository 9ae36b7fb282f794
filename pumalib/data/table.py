"""The one table: a `Benchmark` has a row per image, and everything else is said by filtering it."""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from .. import paths

COLUMNS = ["path", "label", "class_name", "dataset", "split"]
SPLITS = ("train", "test", "query", "gallery")


@dataclass(frozen=True, eq=False)
class Benchmark:
    """A set of retrieval datasets, as files under `root` or embedded as `pixels`.
    The columns of `images`: `path` (str, relative to `root`, or the row of `pixels`), `label` (int, unique over all
    datasets), `class_name`, `dataset` and `split` ("train", "test", "query" or "gallery"; "test": both of the last)."""

    name: str  # "mini", "folders" or "paper"
    images: pd.DataFrame  # a row per image
    root: Path | None = None
    pixels: np.ndarray | None = None  # (n, H, W, 3) uint8

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(self.images["dataset"]))

    @property
    def train(self) -> pd.DataFrame:
        return self.images[self.images["split"] == "train"]

    @property
    def test(self) -> pd.DataFrame:
        """Every row that is evaluated: test, query and gallery."""
        return self.images[self.images["split"] != "train"]

    def select(self, datasets: list[str] | tuple[str, ...] | None) -> "Benchmark":
        """The same benchmark, only these datasets (None: all), in the given order."""
        if datasets is None:
            return self
        check_known("dataset", datasets, self.datasets)
        parts = [self.images[self.images["dataset"] == name] for name in datasets]
        return replace(self, images=pd.concat(parts, ignore_index=True))

    def holdout(self) -> "Benchmark":
        """The training images alone, each dataset's classes halved: to choose settings without the test classes."""
        rows = self.train.reset_index(drop=True)
        place = rows.groupby("dataset", sort=False)["label"].rank("dense", pct=True)
        return replace(self, images=rows.assign(split=np.where(place <= 0.5, "train", "test")))

    @cached_property
    def digest(self) -> str:  # once per table: every run of a notebook asks
        """SHA-256 of the table and of the contents of every image, wherever they lie."""
        if self.pixels is None:
            parts = self.images.groupby("dataset", sort=False)["path"]
            contents = pd.concat([_contents(self.root, name, files) for name, files in parts])
        else:
            contents = self.images["path"].map(lambda row: _sha256(self.pixels[int(row)].tobytes()))
        table = self.images[COLUMNS].assign(contents=contents)
        return _sha256(table.to_csv(index=False, lineterminator="\n").encode())


def check_known(kind: str, names, known) -> None:
    """Raise ValueError naming the unknown `names` and the `known` ones."""
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown {kind} {', '.join(map(repr, unknown))}; known: {', '.join(map(str, known))}")


def check(benchmark: Benchmark) -> Benchmark:
    """Return `benchmark` if it can be trained and tested on, else raise ValueError: the dataset and what to do."""
    images = benchmark.images
    for image in images[images.duplicated(["dataset", "path"])].itertuples():
        raise ValueError(f"dataset {image.dataset!r}: image {image.path!r} stands twice in the table")
    for name, rows in images.groupby("dataset", sort=False):
        split, classes = rows["split"], rows["class_name"]
        train, test = set(classes[split == "train"]), set(classes[split != "train"])
        gallery = classes[split.isin(["test", "gallery"])].value_counts()
        positives = classes.map(gallery).fillna(0) - (split == "test")  # an image is not its own positive
        if name in ("unified", "harmonic"):
            problem = "the name of an overall accuracy; rename the dataset"
        elif both := train & test:
            problem = f"class {min(both)!r} is in train and test ({len(both)} such classes); move it to one side"
        elif min(len(train), len(test)) < 2:
            count = f"{len(train)} class(es) in train, {len(test)} in test"
            problem = f"{count}; at least 2 are needed in each: add some, or leave the dataset out with datasets=[...]"
        elif not (positives[split.isin(["test", "query"])] > 0).any():
            problem = "no query has another image of its class to find (in the gallery); give a test class two images"
        else:
            continue
        raise ValueError(f"dataset {name!r}: {problem}")
    return benchmark


def _contents(root: Path, dataset: str, files: pd.Series) -> pd.Series:
    """SHA-256 of each file, kept in `paths.CACHE` by size, time of change and path: only new and changed are read."""
    cache = paths.CACHE / "contents" / cache_name(root) / f"{dataset}.json"
    try:
        known = dict(json.loads(cache.read_text("utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # a damaged cache is made again
        known = {}
    stats = ((path, os.stat(f"{root}/{path}")) for path in files)
    keys = {path: f"{stat.st_size} {stat.st_mtime_ns} {path}" for path, stat in stats}
    new = [path for path, key in keys.items() if key not in known]
    for at in range(0, len(new), 20_000):  # kept after each: a killed process loses only the last
        part = new[at : at + 20_000]
        digests = each(lambda path: _sha256((root / path).read_bytes()), part, f"digests of {dataset}")
        known |= zip(map(keys.get, part), digests)
        with paths.written_whole(cache) as temporary:
            temporary.write_text(json.dumps(known), "utf-8")
    return files.map(keys).map(known)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def each(function: Callable, items: list, what: str) -> list:
    """`function` of every item, by threads (reading, hashing and decoding let others run), with a bar named `what`."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(tqdm(pool.map(function, items), what, len(items), unit="image")) if items else []


def cache_name(root: Path) -> str:
    """A folder's name in the cache, different for roots of the same name."""
    return f"{root.name}-{_sha256(os.fsencode(root.resolve()))[:8]}"
