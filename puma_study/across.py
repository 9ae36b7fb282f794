"""Comparisons of what is kept across profiles; nothing is trained here."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy import stats

from pumalib.config import Profile, Run
from pumalib.training import run_folder

from . import contrasts, runs, store

# Resamples behind a correlation's interval.
DRAWS = 2000


def kept_seeds(run: Run, profile: Profile) -> list[str]:
    """The names of the kept runs that are `run` at one of the profile's seeds.

    Raises store.NotKept where there is none, ValueError or OSError where its data or weights are
    not on this machine, so that its name cannot be told.
    """
    kept = store.read(profile.name)
    seeds = (*profile.seeds, *profile.further_seeds)
    names = [run_folder.run_name(replace(run, seed=seed)) for seed in seeds]
    found = [name for name in names if name in kept]
    if not found:
        raise store.NotKept(f"{profile.name}: no run of {run.method.name} as it is wanted is kept")
    return found


def gain(
    ours: Run, theirs: Run, profile: Profile, averages: contrasts.Averages = contrasts.PLAIN
) -> pd.DataFrame:
    """R@1 of one run minus another's over the seeds that both have, in points.

    A row per dataset, "unified", "harmonic" and what `averages` asks for; columns points, low, high
    (95 %), seeds, and the names `ours` and `theirs`.  Errors as of `kept_seeds`, and
    contrasts.NotTestable where no seed is common.
    """
    our_names = kept_seeds(ours, profile)
    their_names = kept_seeds(theirs, profile)
    common = _seeds(our_names, profile.name) & _seeds(their_names, profile.name)
    difference = contrasts.difference(our_names, their_names, profile.name, averages)
    return _in_points(difference).assign(
        seeds=len(common),
        ours=_at(our_names, common, profile.name),
        theirs=_at(their_names, common, profile.name),
    )


def interaction(
    ours: Sequence[Run], theirs: Sequence[Run], profiles: Sequence[Profile], large: Sequence[str]
) -> pd.DataFrame:
    """What a second list of training images changes in a difference, in points.

    `ours` and `theirs` are a run under the first list and one under the second; the table is that
    of `contrasts.interaction`, the first difference minus the second, with columns points, low,
    high and seeds.  Errors as of `gain`.
    """
    our_names = []
    their_names = []
    seeds = []
    for our_run, their_run, profile in zip(ours, theirs, profiles, strict=True):
        our_kept = kept_seeds(our_run, profile)
        their_kept = kept_seeds(their_run, profile)
        our_names.append(our_kept)
        their_names.append(their_kept)
        seeds += [_seeds(our_kept, profile.name), _seeds(their_kept, profile.name)]
    names = [profile.name for profile in profiles]
    found = contrasts.interaction(our_names, their_names, names, large)
    return _in_points(found).assign(seeds=len(set.intersection(*seeds)))


def _in_points(contrast: pd.DataFrame) -> pd.DataFrame:
    table = 100 * contrast[["value", "low", "high"]]
    return table.rename(columns={"value": "points"})


def _seeds(names: Collection[str], profile: str) -> set[int]:
    return {runs.run_of(name, profile).seed for name in names}


def _at(names: Sequence[str], seeds: Collection[int], profile: str) -> str:
    """The names of some seeds, as a cell of a CSV."""
    return " ".join(name for name in names if runs.run_of(name, profile).seed in seeds)


def accuracies(run: Run, profile: Profile) -> pd.Series:
    """R@1 in percent by dataset, mean of the kept seeds; errors as of `kept_seeds`."""
    tables = []
    for name in kept_seeds(run, profile):
        tables.append(100 * store.record(name, profile.name).scores()["R@1"])
    return pd.concat(tables, axis=1).mean(axis=1)


def rank_correlation(
    x: Sequence[float], y: Sequence[float], groups: Sequence[str], seed: int = 0
) -> tuple[float, float, float]:
    """Spearman's correlation with a 95 % interval, groups drawn with replacement.

    Points of one group, as one dataset under two backbones, are drawn together.  The interval is
    NaN with fewer than four groups, and the correlation with fewer than three points.
    """
    frame = pd.DataFrame({"x": list(x), "y": list(y), "group": list(groups)})
    if len(frame) < 3:
        return np.nan, np.nan, np.nan
    value = float(stats.spearmanr(frame["x"], frame["y"]).statistic)
    parts = [part[["x", "y"]].to_numpy() for _, part in frame.groupby("group")]
    if len(parts) < 4:
        return value, np.nan, np.nan

    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(DRAWS):
        chosen = rng.integers(len(parts), size=len(parts))
        points = np.concatenate([parts[number] for number in chosen])
        # One point alone has no ranks to compare.
        if len(np.unique(points[:, 0])) > 1 and len(np.unique(points[:, 1])) > 1:
            drawn.append(stats.spearmanr(points[:, 0], points[:, 1]).statistic)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return value, float(low), float(high)
