"""The one table: a `Benchmark` has a row per image, and everything else is said by filtering it.

A dataset-specific run is `images[images.dataset == "cub"]`, a few-shot run a sample of its train rows, universal
no filter.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from .. import paths

COLUMNS = ["path", "label", "class_name", "dataset", "split"]
SPLITS = ("train", "test", "query", "gallery")
OVERALL = ("unified", "harmonic")  # what stands beside the datasets in a table of accuracies


@dataclass(frozen=True, eq=False)
class Benchmark:
    """A set of retrieval datasets.

    Attributes:
        name: "mini", "folders" or "paper".
        images: a row per image with the columns
            `path` (str relative to `root`, or the row of `pixels` for an embedded benchmark),
            `label` (int, unique over all datasets), `class_name` (str), `dataset` (str) and
            `split` ("train", "test", "query" or "gallery"; "test" is both query and gallery).
        root: the folder `path` is relative to; None for an embedded benchmark.
        pixels: (n, H, W, 3) uint8 for an embedded benchmark, else None.
    """

    name: str
    images: pd.DataFrame
    root: Path | None = None
    pixels: np.ndarray | None = None

    @property
    def datasets(self) -> list[str]:
        """Dataset names in the order of the table."""
        return list(dict.fromkeys(self.images["dataset"]))

    @property
    def train(self) -> pd.DataFrame:
        return self.images[self.images["split"] == "train"]

    @property
    def test(self) -> pd.DataFrame:
        """Every row that is evaluated: test, query and gallery."""
        return self.images[self.images["split"] != "train"]

    def select(self, datasets: list[str] | tuple[str, ...] | None) -> Benchmark:
        """The same benchmark, only these datasets (None: all), in the given order."""
        if datasets is None:
            return self
        check_known("dataset", datasets, self.datasets)
        parts = [self.images[self.images["dataset"] == name] for name in datasets]
        return replace(self, images=pd.concat(parts, ignore_index=True))

    def holdout(self) -> Benchmark:
        """The training images alone, each dataset's classes halved in order into train and test.

        For choosing settings without a look at the test classes.
        """
        rows = self.train.reset_index(drop=True)
        place = rows.groupby("dataset", sort=False)["label"].rank("dense", pct=True)
        return replace(self, images=rows.assign(split=np.where(place <= 0.5, "train", "test")))

    def digest(self) -> str:
        """SHA-256 of the table and of the contents of every image, wherever they lie."""
        return self._digest

    @cached_property
    def _digest(self) -> str:  # once per table: every run of a notebook asks
        table = self.images[COLUMNS].assign(contents=contents(self))
        return hashlib.sha256(table.to_csv(index=False, lineterminator="\n").encode()).hexdigest()


def check_known(kind: str, names, known) -> None:
    """Raise ValueError naming the unknown `names` and the `known` ones."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown {kind} {', '.join(map(repr, unknown))}; known: {', '.join(map(str, known))}")


def check(benchmark: Benchmark) -> Benchmark:
    """Return `benchmark` if it can be trained and tested on, else raise ValueError naming the dataset."""
    images, where = benchmark.images, f"benchmark {benchmark.name!r}"
    missing = [column for column in COLUMNS if column not in images]
    if missing:
        raise ValueError(f"{where}: the table lacks {missing}")
    wrong = set(images["split"]) - set(SPLITS)
    if wrong:
        raise ValueError(f"{where}: unknown split {sorted(wrong)}; known: {SPLITS}")
    if images.duplicated(["dataset", "path"]).any():
        twice = images[images.duplicated(["dataset", "path"])].iloc[0]
        raise ValueError(f"dataset {twice.dataset!r}: image {twice.path!r} stands twice in the table")
    for name, rows in images.groupby("dataset", sort=False):
        if name in OVERALL:
            raise ValueError(f"dataset {name!r}: the name of an overall accuracy; rename the dataset")
        seen = rows["split"] == "train"
        both = set(rows[seen]["class_name"]) & set(rows[~seen]["class_name"])
        if both:
            raise ValueError(
                f"dataset {name!r}: class {min(both)!r} is in train and test ({len(both)} such classes); "
                "metric learning is tested on classes not seen in training: move it to one side"
            )
        for side, part in (("train", rows[seen]), ("test", rows[~seen])):
            if (count := part["class_name"].nunique()) < 2:
                raise ValueError(f"dataset {name!r}: {count} class(es) in {side}; at least 2 are needed there")
        queries, gallery = (rows[rows["split"].isin(["test", side])] for side in ("query", "gallery"))
        found = queries["class_name"].map(gallery["class_name"].value_counts()).fillna(0)
        if not (found > (queries["split"] == "test")).any():  # an image is not its own positive
            raise ValueError(
                f"dataset {name!r}: no query has another image of its class to find (in the gallery); "
                "give at least one test class two images, or query and gallery images of one class"
            )
    if (images.groupby("label")[["dataset", "class_name"]].nunique() > 1).any(axis=None):
        raise ValueError(f"{where}: a label stands for two classes; labels must be unique")
    return benchmark


def contents(benchmark: Benchmark) -> pd.Series:
    """SHA-256 of each image (the file's bytes, or embedded pixels), for `benchmark.images`.

    Those of files are kept in `paths.CACHE` by path, size and time of change: only new and changed files are read.
    """
    images = benchmark.images
    if benchmark.pixels is not None:
        return images["path"].map(lambda row: hashlib.sha256(benchmark.pixels[int(row)].tobytes()).hexdigest())
    parts = images.groupby("dataset", sort=False)["path"]
    return pd.concat([_contents(benchmark.root, name, files) for name, files in parts])[images.index]


def _contents(root: Path, dataset: str, files: pd.Series) -> pd.Series:
    file, keys = paths.CACHE / "contents" / cache_name(root) / f"{dataset}.csv", ["path", "size", "mtime_ns"]
    try:
        known = pd.read_csv(file, keep_default_na=False, dtype={"path": str, "sha256": str})
        known = known[known["sha256"].str.len() == 64]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # a damaged cache is made again
        known = pd.DataFrame(columns=[*keys, "sha256"])
    known = known.drop_duplicates(keys).astype({"size": "int64", "mtime_ns": "int64"})
    stats = ((path, os.stat(f"{root}/{path}")) for path in files)
    now = pd.DataFrame([(path, s.st_size, s.st_mtime_ns) for path, s in stats], files.index, keys)
    now["sha256"] = now.merge(known, "left", keys)["sha256"].to_numpy()
    new = now.index[now["sha256"].isna()]
    for at in range(0, len(new), 20_000):  # kept after each: a killed process loses only the last
        part = new[at : at + 20_000]
        now.loc[part, "sha256"] = each(partial(_digest, root), files[part].tolist(), f"digests of {dataset}")
        with paths.written_whole(file) as temporary:
            pd.concat([known, now.dropna()]).drop_duplicates(keys).to_csv(temporary, index=False)
    return now["sha256"]


def _digest(root: Path, path: str) -> str:
    with open(root / path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def each(function: Callable, items: list, what: str) -> list:
    """`function` of every item, with progress; by threads, since reading, hashing, decoding and encoding let others run."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(tqdm(pool.map(function, items), what, len(items), unit="image")) if items else []


def cache_name(root: Path) -> str:
    """A folder's name in the cache, different for roots of the same name."""
    return f"{root.name}-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:8]}"
