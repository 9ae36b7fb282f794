"""One run by itself, as `python -m pumalib train` has it: a new one, or a kept one again."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import paths, training
from ..config import Run
from ..training import parallel, run_folder
from . import store
from .runs import run_of


@dataclass(frozen=True)
class Report:
    """What came out of a training, in words, and whether it is what had been kept before."""

    text: str
    agrees: bool = True


def is_kept(name: str, profile: str) -> bool:
    """Whether `name` is that of a kept run; raises `store.Failed` where that run failed."""
    store.require_none_failed([name], profile)
    return name in store.read(profile)


def train_new(run: Run, profile: str) -> Report | None:
    """Train a run where notebooks look for it, or go on where it stopped.

    None in all processes but the first, which tells.  Raises what `training.train` raises, and
    `store.Failed` where it has failed before.
    """
    return _train(training.run_name(run), run, profile)


def train_again(name: str, profile: str) -> Report | None:
    """Train the model of a kept run again, and compare its numbers with those that are kept.

    Other numbers are kept beside them.  None and errors as of `train_new`.
    """
    return _train(name, run_of(name, profile), profile)


def _train(name: str, run: Run, profile: str) -> Report | None:
    was_kept = is_kept(name, profile)
    folder = store.folder(name, profile)
    with _held_by_the_first(folder):
        parallel.join(training.choose_device(run.training.device))
        training.train(run, folder)
        parallel.leave()  # if nothing was left to train
    if not parallel.is_first():
        return None

    now = run_folder.read_record(folder)
    lines = [paths.shown(folder), f"R@1: {_accuracies(now)}"]
    if not was_kept:
        return Report("\n".join(lines))
    repeat = store.compare_repeat(folder, profile)
    lines.append(f"kept: {_accuracies(repeat.kept)}")
    lines.append(_verdict(repeat))
    return Report("\n".join(lines), repeat.agree)


@contextmanager
def _held_by_the_first(folder: Path) -> Iterator[None]:
    """Lock a run's folder before the other processes are let in; they do not ask for it."""
    if not parallel.is_first():
        yield
        return
    with store.held(folder):
        yield


def _accuracies(record: Mapping[str, Any]) -> str:
    """R@1 of every dataset, unified and harmonic."""
    return ", ".join(f"{row['dataset']} {row['R@1']:.3f}" for row in record["table"])


def _verdict(repeat: store.Repeat) -> str:
    if repeat.agree:
        return "They agree: all numbers, and the hit of every query, are those that were kept."
    device = repeat.kept["environment"]["device"]
    here = repeat.again["environment"]["device"]
    return (
        f"They differ: {_what_differs(repeat)} (kept: trained on {device}; now: on {here}).  "
        "The new numbers are kept beside, in repeated.jsonl."
    )


def _what_differs(repeat: store.Repeat) -> str:
    kept = store.unpacked(repeat.kept, "hits")
    again = store.unpacked(repeat.again, "hits")
    if kept.keys() != again.keys():
        return "other datasets were tested"
    datasets = [name for name in kept if name != "unified"]
    other = sum(int((kept[name] != again[name]).sum()) for name in datasets)
    total = sum(len(kept[name]) for name in datasets)
    if other == 0:
        return "R@1 of every query in its own dataset is the same, other numbers are not"
    return f"R@1 is another for {other:,} of {total:,} queries"
