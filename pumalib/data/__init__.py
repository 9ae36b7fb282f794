"""Benchmarks as one table: `load(name)` returns a `Benchmark` whose `.images` has a row per image.

Everything else is said by filtering that table: a dataset-specific run is
`images[images.dataset == "cub"]`, a few-shot run a sample of its train rows, universal no filter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from .packing import Pack

COLUMNS = ["path", "label", "class_name", "dataset", "split"]
SPLITS = ("train", "test", "query", "gallery")


@dataclass(frozen=True)
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
        packed: the packed copies that images are read from instead of the files, by dataset (`packing.use`).
    """

    name: str
    images: pd.DataFrame
    root: Path | None = None
    pixels: np.ndarray | None = None
    packed: dict[str, Pack] = field(default_factory=dict)

    @property
    def form(self) -> str:
        """What images are read from: "embedded", "files" or "packed"."""
        return "embedded" if self.pixels is not None else "packed" if self.packed else "files"

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
        place = rows.groupby("dataset", sort=False)["label"].transform(lambda labels: labels.rank(method="dense", pct=True))
        return replace(self, images=rows.assign(split=np.where(place <= 0.5, "train", "test")))

    def digest(self) -> str:
        """SHA-256 of the table (and of embedded pixels or packed copies): changes when the benchmark changes."""
        return self._digest

    @cached_property
    def _digest(self) -> str:  # once per table: every run of a notebook asks
        sha = hashlib.sha256()
        sha.update(self.images[COLUMNS].to_csv(index=False).encode())
        if self.pixels is not None:
            sha.update(np.ascontiguousarray(self.pixels[self.images["path"].to_numpy(int)]).data)
        for name in self.datasets if self.packed else ():
            sha.update(self.packed[name].digest.encode())
        return sha.hexdigest()


def check_known(kind: str, names, known) -> None:
    """Raise ValueError naming the unknown `names` and the `known` ones."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown {kind} {', '.join(map(repr, unknown))}; known: {', '.join(map(str, known))}")


def load(
    benchmark: str, root: str | Path | None = None, datasets: list[str] | None = None, strict: bool = True
) -> Benchmark:
    """Load a benchmark.

    Args:
        benchmark: "mini" (embedded, no files needed), "folders" (`root/<dataset>/<class>/*.jpg`) or "paper" (the
            eight datasets of Table 1 as they are distributed, see `paper`).
        root: the folder with the images; not used by "mini".
        datasets: only these datasets; None: all.
        strict: False: datasets of "paper" that are incomplete are used as they are, with a warning.

    Raises:
        ValueError: unknown benchmark or dataset, a missing root, or a table that breaks its contract
            (see `check`).
    """
    from . import folders, mini, paper

    loaders = {"mini": mini.load, "folders": folders.load, "paper": partial(paper.load, strict=strict)}
    check_known("benchmark", [benchmark], loaders)
    if benchmark != "mini" and root is None:
        raise ValueError(f"benchmark {benchmark!r} needs root=, the folder that holds its datasets")
    return check(loaders[benchmark](root, datasets))


def check(benchmark: Benchmark) -> Benchmark:
    """Return `benchmark` if its table keeps the contract, else raise ValueError naming the dataset."""
    images = benchmark.images
    missing = [column for column in COLUMNS if column not in images]
    if missing:
        raise ValueError(f"benchmark {benchmark.name!r}: the table lacks {missing}")
    wrong = set(images["split"]) - set(SPLITS)
    if wrong:
        raise ValueError(f"benchmark {benchmark.name!r}: unknown split {sorted(wrong)}; known: {SPLITS}")
    if images.duplicated(["dataset", "path"]).any():
        twice = images[images.duplicated(["dataset", "path"])].iloc[0]
        raise ValueError(f"dataset {twice.dataset!r}: image {twice.path!r} stands twice in the table")
    for name, rows in images.groupby("dataset", sort=False):
        seen = rows["split"] == "train"
        both = set(rows[seen]["class_name"]) & set(rows[~seen]["class_name"])
        if both:
            raise ValueError(
                f"dataset {name!r}: class {sorted(both)[0]!r} is in train and test ({len(both)} such classes); "
                "metric learning is tested on classes not seen in training: move it to one side"
            )
        for side, part in (("train", rows[seen]), ("test", rows[~seen])):
            if part["class_name"].nunique() < 2:
                raise ValueError(
                    f"dataset {name!r}: {part['class_name'].nunique()} class(es) in {side}; at least 2 are needed there"
                )
    if (images.groupby("label")[["dataset", "class_name"]].nunique() > 1).any(axis=None):
        raise ValueError(f"benchmark {benchmark.name!r}: a label stands for two classes; labels must be unique")
    return benchmark
