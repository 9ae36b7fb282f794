"""Benchmarks as one table (`table`): read from disk as they are, or loaded as a run's settings ask for them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import pandas as pd

from .. import config, paths
from .table import COLUMNS, OVERALL, SPLITS, Benchmark, check, check_known

__all__ = ["COLUMNS", "OVERALL", "SPLITS", "Benchmark", "check", "check_known", "load", "read"]


def load(settings: config.Data, seed: int = 0) -> Benchmark:
    """The benchmark that a run asks for; `seed` draws its shots (cached: notebooks ask often).

    Raises:
        ValueError: as of `read`; or a prepared copy is asked for that is not finished.
    """
    return _load(settings, seed if settings.shots else 0)


@lru_cache(maxsize=16)
def _load(settings: config.Data, seed: int) -> Benchmark:
    from . import batches, prepared

    root = None if settings.root is None else paths.resolve(settings.root)
    benchmark = read(settings.benchmark, root, settings.datasets)
    if settings.drop_unreadable:
        benchmark = batches.drop_unreadable(benchmark)
    if settings.prepared:
        benchmark = prepared.use_prepared(benchmark)
    if settings.holdout:
        benchmark = check(benchmark.holdout())
    if settings.shots:
        few = batches.few_shot(benchmark.train, settings.shots, seed)
        benchmark = replace(benchmark, images=pd.concat([few, benchmark.test], ignore_index=True))
    return benchmark


def read(
    benchmark: str, root: str | Path | None = None, datasets: list[str] | None = None, strict: bool = True
) -> Benchmark:
    """The table of a benchmark as it is on disk.

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

    readers = {"mini": mini.load, "folders": folders.load, "paper": partial(paper.load, strict=strict)}
    check_known("benchmark", [benchmark], readers)
    if benchmark != "mini" and root is None:
        raise ValueError(f"benchmark {benchmark!r} needs root=, the folder that holds its datasets")
    return check(readers[benchmark](root, datasets))
