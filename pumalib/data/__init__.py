"""Benchmarks as one table: as they are on disk (`read`), or as a run's settings ask (`load`).

Read `table` first, which defines a `Benchmark`; then `images` and `batches`, which turn it into the
network's input.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from .. import config, paths
from . import batches, images, prepared
from .readers import READERS, list_benchmarks, reader
from .table import COLUMNS, Benchmark, Reader, check, check_asked, check_known

__all__ = [
    "COLUMNS",
    "READERS",
    "Benchmark",
    "Reader",
    "check_known",
    "expected",
    "held_out",
    "list_benchmarks",
    "load",
    "read",
    "unchanged",
]

# The state of each benchmark's files, by its name, root, datasets and split.
_States = dict[tuple[Any, ...], str]
_seen: ContextVar[_States | None] = ContextVar("seen", default=None)


def load(settings: config.Data, seed: int = 0) -> Benchmark:
    """Load the benchmark that a run asks for; `seed` draws its shots.

    Notebooks call this often, so files are read again only if they have changed (`Reader.state`).
    Raises ValueError as `read` does.
    """
    if not settings.shots:
        seed = 0
    return _load(settings, seed, _state(settings))


def _state(settings: config.Data) -> str:
    """A text that differs once a benchmark's files have changed; "" where that is not checked."""
    state = reader(settings.benchmark).state
    if state is None or settings.root is None:
        return ""

    asked = (paths.find(settings.root), settings.datasets, _split_file(settings))
    key = (settings.benchmark, *asked)
    seen = _seen.get()
    if seen is None:
        seen = {}
    if key not in seen:
        seen[key] = state(*asked)
    return seen[key]


@contextmanager
def unchanged() -> Iterator[None]:
    """Check once per benchmark, inside this context, whether its files have changed.

    For naming many runs, not for training: the check takes a tenth of a second for `photos`.
    """
    if _seen.get() is not None:
        yield
        return
    token = _seen.set({})
    try:
        yield
    finally:
        _seen.reset(token)


def _split_file(settings: config.Data) -> Path | None:
    return paths.find(settings.split) if settings.split else None


def held_out(settings: config.Data) -> Benchmark:
    """The benchmark whose `test` split holds the classes for scoring epochs during training.

    They are the classes of "val" or, with `holdout`, those that the run tests, which are held-out
    training classes too; never the real test classes.  Raises ValueError where no class is held
    out, or a dataset has too few.
    """
    if not settings.holdout and not _has_val(settings):
        raise ValueError(
            f"score_epochs needs held-out classes, and benchmark {settings.benchmark!r} has none: "
            "give some training classes the split val (of folders, in split.csv), "
            "or set data.holdout = True to train on half of the training classes alone"
        )
    try:
        return load(replace(settings, holdout=True, shots=0))
    except ValueError as error:
        raise ValueError(f"score_epochs, with the classes of val as test: {error}") from None


def _has_val(settings: config.Data) -> bool:
    whole = _whole(replace(settings, holdout=False, shots=0), _state(settings))
    return bool((whole.images["split"] == "val").any())


@lru_cache(maxsize=16)
def _load(settings: config.Data, seed: int, state: str) -> Benchmark:
    """`load`, cached; `state` is unused here, but another state misses the cache."""
    benchmark = _whole(replace(settings, holdout=False, shots=0), state)
    benchmark = check(benchmark.holdout()) if settings.holdout else benchmark.without_val()
    if settings.shots:
        few = batches.few_shot(benchmark.train, settings.shots, seed)
        table = pd.concat([few, benchmark.test], ignore_index=True)
        benchmark = replace(benchmark, images=table)
    return benchmark


@lru_cache(maxsize=4)
def _whole(settings: config.Data, state: str) -> Benchmark:
    """The benchmark of `settings` with all splits, cached for each `state` of its files."""
    root = paths.find(settings.root) if settings.root else None
    split = _split_file(settings)
    benchmark = read(settings.benchmark, root, settings.datasets, split=split)
    if settings.drop_unreadable:
        benchmark = images.drop_unreadable(benchmark)
    if settings.prepared:
        benchmark = prepared.use_prepared(benchmark)
    return benchmark


def read(
    benchmark: str,
    root: str | Path | None = None,
    datasets: Sequence[str] | None = None,
    strict: bool = True,
    split: str | Path | None = None,
) -> Benchmark:
    """Read the benchmark of this name in `READERS`, or some of its datasets, as it is on disk.

    `split` is a file, see `folders.load`.  If `strict` is false, incomplete datasets of "paper" are
    used, with a warning.  Raises ValueError where the benchmark is unknown, damaged, or cannot be
    trained and tested on, or where `datasets` is empty.
    """
    chosen = reader(benchmark)
    check_asked(datasets)
    if chosen.needs_root and root is None:
        what = f"benchmark {benchmark!r} needs root="
        raise ValueError(f"{what}, the folder that holds its datasets")
    options: dict[str, Any] = {}
    if "strict" in chosen.options:
        options["strict"] = strict
    if "split" in chosen.options:
        options["split"] = split
    return check(chosen.load(root, datasets, **options))


def expected(settings: config.Data) -> pd.DataFrame | None:
    """The known sizes of the chosen datasets, available before their files are.

    A row per dataset and split with the columns dataset, split, images and classes; None where
    the sizes are only known from the files.
    """
    hook = reader(settings.benchmark).expected
    if hook is None:
        return None
    table = hook()
    if settings.datasets is not None:
        table = table[table["dataset"].isin(settings.datasets)]
    return table.reset_index(drop=True)
