"""Benchmarks as one table (`table`): read from disk as they are, or loaded as a run's settings ask for them."""

from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import pandas as pd

from .. import config, paths
from . import batches, folders, mini, paper, prepared
from .table import COLUMNS, Benchmark, check, check_known

__all__ = ["COLUMNS", "Benchmark", "check_known", "load", "read"]


def load(settings: config.Data, seed: int = 0) -> Benchmark:
    """The benchmark that a run asks for (cached: notebooks ask often); `seed` draws its shots.  Errors as of `read`."""
    return _load(settings, seed if settings.shots else 0)


@lru_cache(maxsize=16)
def _load(settings: config.Data, seed: int) -> Benchmark:
    root, split = (place and paths.resolve(place) for place in (settings.root, settings.split))
    benchmark = read(settings.benchmark, root, settings.datasets, split=split)
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


def read(benchmark: str, root: str | Path | None = None, datasets=None, strict=True, split=None) -> Benchmark:
    """The table of "mini", "folders" (`split` as of `folders.load`) or "paper", or of some of its datasets, as on disk.
    ValueError: it is bad.  Without `strict`, datasets of "paper" that are incomplete are used, with a warning."""
    readers = {"mini": mini.load, "folders": partial(folders.load, split=split)}
    readers["paper"] = partial(paper.load, strict=strict)
    check_known("benchmark", [benchmark], readers)
    if benchmark != "mini" and root is None:
        raise ValueError(f"benchmark {benchmark!r} needs root=, the folder that holds its datasets")
    return check(readers[benchmark](root, datasets))
