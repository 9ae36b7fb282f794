"""One run by itself (`python -m puma_study runs train`): a new one, or a kept one again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from pumalib import evaluation, paths, training
from pumalib.config import Run
from pumalib.training import run_folder

from . import runs, store


@dataclass(frozen=True)
class Report:
    """What came out of a training, in words, and whether it has the hits that were kept before."""

    text: str
    agrees: bool = True


def is_kept(name: str, profile: str) -> bool:
    """Whether `name` is that of a kept run; raises `store.Failed` where that run failed."""
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

    None in all processes but the first, which tells.  Raises what `training.train` raises, and
    `store.Failed` where it has failed before.
    """
    return _train(training.run_name(run), run, profile)


def train_again(name: str, profile: str) -> Report | None:
    """Train the model of a kept run again, and compare its numbers with those that are kept.

    Other numbers are kept beside them.  None and errors as of `train_new`.
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
    repeat = store.compare_repeat(folder, profile)
    lines.append(f"kept: {run_folder.accuracies(repeat.kept)}")
    lines.append(_verdict(repeat, _kept_seeds(name, profile)))
    return Report("\n".join(lines), repeat.same_hits)


def _verdict(repeat: store.Repeat, seeds: pd.DataFrame) -> str:
    """One of three: all numbers are the same; all hits are; or some hits are not."""
    if repeat.agree:
        return "They agree: all numbers, and the hit of every query, are those that were kept."
    device = repeat.kept["environment"]["device"]
    here = repeat.again["environment"]["device"]
    where = f"(kept: trained on {device}; now: on {here})"
    beside = "The new numbers are kept beside, in repeated.jsonl."
    if repeat.same_hits:
        return (
            "They agree in the hit of every query; other numbers do not: "
            f"{_largest_difference(repeat)} {where}.  {beside}"
        )
    return f"They differ: {_other_hits(repeat, seeds)} {where}.  {beside}"


def _largest_difference(repeat: store.Repeat) -> str:
    """The number of the table that is farthest from what was kept."""
    kept = _table(repeat.kept)
    again = _table(repeat.again)
    bounds = [name for name in kept if name.endswith(("_low", "_high"))]
    apart = (again - kept).abs().drop(columns=bounds).stack()
    dataset, metric = apart.idxmax()
    return f"at most by {apart.max():.2g} ({metric} of {dataset})"


def _other_hits(repeat: store.Repeat, seeds: pd.DataFrame) -> str:
    """How many queries find otherwise, where most do, and what that is beside other seeds."""
    kept = store.unpacked(repeat.kept, "hits")
    again = store.unpacked(repeat.again, "hits")
    if kept.keys() != again.keys():
        return "other datasets were tested"
    if any(len(kept[name]) != len(again[name]) for name in kept):
        return "other queries were tested"
    changed = {name: int((kept[name] != again[name]).sum()) for name in kept}
    in_all = changed.pop("unified", 0)
    total = sum(len(kept[name]) for name in changed)
    most = max(changed, key=lambda name: changed[name])
    said = f"R@1 is another for {sum(changed.values()):,} of {total:,} queries in their own dataset"
    if changed[most]:
        said += f" (most in {most}: {changed[most]:,})"
    said += f" and for {in_all:,} in all datasets together; in percent, {_changes(repeat, seeds)}"
    return said


def _changes(repeat: store.Repeat, seeds: pd.DataFrame) -> str:
    """R@1 of both beside the standard deviation between the kept seeds of the row."""
    kept = 100 * _table(repeat.kept)["R@1"]
    again = 100 * _table(repeat.again)["R@1"]
    parts = []
    for row in [name for name in evaluation.OVERALL if name in kept.index]:
        change = f"{row} {kept[row]:.2f} to {again[row]:.2f} ({again[row] - kept[row]:+.2f}"
        if len(seeds) > 1:
            spread = 100 * seeds[row].std()
            change += f"; standard deviation of the {len(seeds)} kept seeds {spread:.2f}"
        parts.append(f"{change})")
    if len(seeds) < 2:
        parts.append("no other seed of it is kept, to compare with")
    return ", ".join(parts)


def _table(record: Mapping[str, Any]) -> pd.DataFrame:
    """The accuracies of a record, a row for each dataset."""
    return pd.DataFrame(record["table"]).set_index("dataset")


def _kept_seeds(name: str, profile: str) -> pd.DataFrame:
    """R@1 of a kept run, and of all that differ from it in their seed alone: a row for each."""
    known = store.read(profile)
    own = _without_seed(known[name])
    rows = {}
    for other, record in known.items():
        if "run" in record and _without_seed(record) == own:
            rows[other] = _table(record)["R@1"]
    return pd.DataFrame.from_dict(rows, orient="index")


def _without_seed(record: Mapping[str, Any]) -> Run:
    return replace(Run.from_dict(record["run"]), seed=0)
