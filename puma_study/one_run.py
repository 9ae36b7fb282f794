"""Train one run (`python -m puma_study runs train`): a new one, or a kept one again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pandas as pd

from pumalib import evaluation, paths, training
from pumalib.config import Run
from pumalib.training import run_folder

from . import runs, store
from .record import FinishedRun


@dataclass(frozen=True)
class Report:
    """What came out of a training, in words, and whether it has the hits that were kept before."""

    text: str
    agrees: bool = True


def is_kept(name: str, profile: str) -> bool:
    """Whether a run of this name is kept; raises `store.Failed` if it failed."""
    store.require_none_failed([name], profile)
    return name in store.read(profile)


def require_kept_nowhere_else(name: str, profile: str) -> None:
    """Raise ValueError, which names the profile, where `name` is a run that is kept in another."""
    found = [one for one in runs.profiles_of(name) if one != profile]
    if found:
        raise ValueError(
            f"{name} is not kept in profile {profile}, but in {' and '.join(found)}: "
            f"add --profile {found[0]}"
        )


def train_new(run: Run, profile: str) -> Report | None:
    """Train a run where notebooks look for it, or go on where it stopped.

    None in all processes but the first, which reports.  Raises what `training.train` raises, and
    `store.Failed` where it has failed before.
    """
    return _train(training.run_name(run), run, profile)


def train_again(name: str, profile: str) -> Report | None:
    """Train a kept run again, and compare its numbers with the kept ones.

    Other numbers are kept beside them.  Returns None and raises as `train_new` does.
    """
    return _train(name, runs.run_of(name, profile), profile)


def _train(name: str, run: Run, profile: str) -> Report | None:
    was_kept = is_kept(name, profile)
    folder = store.folder(name, profile)
    now = training.train_together(run, folder, store.held(folder))
    if now is None:
        return None

    lines = [paths.shown(folder), f"R@1: {run_folder.accuracies(now)}"]
    if not was_kept:
        return Report("\n".join(lines))
    kept = store.record(name, profile)
    again = store.record_in(folder)
    lines.append(f"kept: {run_folder.accuracies(kept.content())}")
    lines.append(_verdict(kept, again, _kept_seeds(kept, profile)))
    return Report("\n".join(lines), kept.packed_hits == again.packed_hits)


def _verdict(kept: FinishedRun, again: FinishedRun, seeds: pd.DataFrame) -> str:
    """One of three: all numbers are the same; all hits are; or some hits are not."""
    if kept.agrees(again):
        return "They agree: all numbers, and the hit of every query, are those that were kept."
    where = f"(kept: trained on {kept.environment.device}; now: on {again.environment.device})"
    beside = "The new numbers are kept beside, in repeated.jsonl."
    if kept.packed_hits == again.packed_hits:
        return (
            "They agree in the hit of every query; other numbers do not: "
            f"{_largest_difference(kept, again)} {where}.  {beside}"
        )
    return f"They differ: {_other_hits(kept, again, seeds)} {where}.  {beside}"


def _largest_difference(kept: FinishedRun, again: FinishedRun) -> str:
    """The largest difference between the new table and the kept one."""
    apart = (again.scores() - kept.scores()).abs()
    bounds = [name for name in apart if name.endswith(("_low", "_high"))]
    apart = apart.drop(columns=bounds).stack()
    dataset, metric = apart.idxmax()
    return f"at most by {apart.max():.2g} ({metric} of {dataset})"


def _other_hits(kept: FinishedRun, again: FinishedRun, seeds: pd.DataFrame) -> str:
    """The number of queries whose hit changed, by dataset, and the spread of kept seeds."""
    before = kept.hits()
    now = again.hits()
    if before.keys() != now.keys():
        return "other datasets were tested"
    if any(len(before[name]) != len(now[name]) for name in before):
        return "other queries were tested"
    changed = {name: int((before[name] != now[name]).sum()) for name in before}
    in_all = changed.pop("unified", 0)
    total = sum(len(before[name]) for name in changed)
    most = max(changed, key=lambda name: changed[name])
    text = f"R@1 is another for {sum(changed.values()):,} of {total:,} queries in their own dataset"
    if changed[most]:
        text += f" (most in {most}: {changed[most]:,})"
    changes = _changes(kept.accuracies, again.accuracies, seeds)
    return f"{text} and for {in_all:,} in all datasets together; in percent, {changes}"


def _changes(kept: Mapping[str, float], again: Mapping[str, float], seeds: pd.DataFrame) -> str:
    """R@1 of both beside the standard deviation between the kept seeds of the row."""
    parts = []
    for row in evaluation.OVERALL:
        before = 100 * kept[row]
        now = 100 * again[row]
        change = f"{row} {before:.2f} to {now:.2f} ({now - before:+.2f}"
        if len(seeds) > 1:
            spread = 100 * seeds[row].std()
            change += f"; standard deviation of the {len(seeds)} kept seeds {spread:.2f}"
        parts.append(f"{change})")
    if len(seeds) < 2:
        parts.append("no other seed of it is kept, to compare with")
    return ", ".join(parts)


def _kept_seeds(kept: FinishedRun, profile: str) -> pd.DataFrame:
    """R@1 of a kept run, and of all that differ from it in their seed alone: a row for each."""
    own = replace(kept.settings, seed=0)
    rows = {}
    for other in store.read(profile).values():
        if other.members is None and replace(other.settings, seed=0) == own:
            rows[other.name] = other.accuracies
    return pd.DataFrame.from_dict(rows, orient="index")
