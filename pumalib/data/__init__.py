"""Benchmarks as one table: read from disk as they are, or as a run's settings ask.

Read `table` first, for what a `Benchmark` is; then `images` and `batches`, for what a network is
shown of it.
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

# What was seen of a benchmark's files, by its name, root, datasets and split.
_States = dict[tuple[Any, ...], str]
_seen: ContextVar[_States | None] = ContextVar("seen", default=None)


def load(settings: config.Data, seed: int = 0) -> Benchmark:
    """Load the benchmark that a run asks for; `seed` draws its shots.

    It is read again only where its files have changed (see `Reader.state`), as notebooks ask often.
    Raises ValueError as `read` does.
    """
    if not settings.shots:
        seed = 0
    return _load(settings, seed, _state(settings))


def _state(settings: config.Data) -> str:
    """What tells whether the files have changed since a benchmark was read."""
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
    """Within it, files are looked at once: for telling the names of many runs, not for training.

    Telling whether the files of `photos` have changed takes a tenth of a second, for each run.
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
    """The benchmark whose `test` are the classes that a training is scored on while it runs.

    Those of "val"; with `holdout` what the run tests, which are held-out training classes too.
    Never the test classes.  Raises ValueError where no class is held out, or a dataset has too few.
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
    """`load`, once for each `state` of the files, which nothing else here needs."""
    benchmark = _whole(replace(settings, holdout=False, shots=0), state)
    benchmark = check(benchmark.holdout()) if settings.holdout else benchmark.without_val()
    if settings.shots:
        few = batches.few_shot(benchmark.train, settings.shots, seed)
        table = pd.concat([few, benchmark.test], ignore_index=True)
        benchmark = replace(benchmark, images=table)
    return benchmark


@lru_cache(maxsize=4)
def _whole(settings: config.Data, state: str) -> Benchmark:
    """The images of all splits that `settings` name, once for each `state` of the files."""
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
    """Read a benchmark of `READERS`, or some of its datasets, as it is on disk.

    `split` is as of `folders.load`.  Without `strict`, datasets of "paper" that are incomplete are
    used, with a warning.  Raises ValueError where the benchmark is unknown, damaged, or cannot be
    trained and tested on, or where `datasets` names none.
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
    """What the chosen datasets are known to hold, also before their files are there.

    A row per dataset and split with the columns dataset, split, images and classes; None where
    only the files tell.
    """
    hook = reader(settings.benchmark).expected
    if hook is None:
        return None
    table = hook()
    if settings.datasets is not None:
        table = table[table["dataset"].isin(settings.datasets)]
    return table.reset_index(drop=True)
