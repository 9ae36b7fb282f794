"""One base learning rate for each family of the survey's losses, on held-out training classes.

The rate that suits one loss may sink another (docs/protocol.md, "The survey on real images").
Some losses of a family are trained at neighbouring rates; the family's rate is the one with the
highest mean of their harmonic R@1, of equals the lower; where it is at an edge of what was tried,
the next of the series is tried, for all of them.

Read `wanted` first: what is to be run next, given the scores that are known.  As in `tuning`, it
and `chosen` are pure functions, and a search goes on by itself from the runs that are kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from pumalib.config import Profile, Run
from pumalib.data import check_known

from . import store
from .rows import run_all
from .tuning import SERIES, Progress, go_through, require_neighbours, yaml_number

# The survey's losses: those that compare images with images, and with vectors of classes.
FAMILIES = {
    "pair": ("contrastive", "triplet", "npair", "ms", "supcon"),
    "proxy": ("proxynca", "proxyanchor", "proxygml", "softtriple", "crossentropy", "normsoftmax"),
}
# Those that choose for their family, unlike each other as they are.
CHOOSE = (
    *("contrastive", "triplet", "npair", "ms"),
    *("proxynca", "proxyanchor", "softtriple", "crossentropy"),
)
RATES = (3e-5, 1e-4, 3e-4)


class Trial(NamedTuple):
    """A training that a search may ask for: a loss at its defaults, and a base rate."""

    loss: str
    rate: float


# Harmonic R@1 of finished trials, as fractions; 0 where the loss was not finite.
Scores = Mapping[Trial, float]


@dataclass(frozen=True)
class Search:
    """The method that is trained, the losses that choose, and the rates that they begin with."""

    method: str = "full"
    losses: tuple[str, ...] = CHOOSE
    rates: tuple[float, ...] = RATES

    def __post_init__(self) -> None:
        known = [name for members in FAMILIES.values() for name in members]
        check_known("loss", self.losses, known)
        require_neighbours(self.rates)

    def choosing(self) -> dict[str, list[str]]:
        """By family the losses that choose for it; a family that has none of them is left out."""
        found = {}
        for family, members in FAMILIES.items():
            own = [name for name in members if name in self.losses]
            if own:
                found[family] = own
        return found


def wanted(search: Search, scores: Scores) -> list[Trial]:
    """The trials to be run next; none where the search is finished."""
    first = [Trial(loss, rate) for loss in search.losses for rate in search.rates]
    missing = [trial for trial in first if trial not in scores]
    if missing:
        return missing
    further = []
    for losses in search.choosing().values():
        for rate in _rates_beyond(losses, scores):
            further += [Trial(loss, rate) for loss in losses]
    return [trial for trial in further if trial not in scores]


def _rates_beyond(losses: list[str], scores: Scores) -> list[float]:
    """The neighbour that the best rate lacks, where it is at an edge of those that were tried."""
    means = mean_by_rate(losses, scores)
    place = SERIES.index(best_rate(means))
    near = SERIES[max(0, place - 1) : place + 2]
    return [rate for rate in near if rate not in means]


def mean_by_rate(losses: list[str], scores: Scores) -> dict[float, float]:
    """The mean score of some losses at each rate that all of them have."""
    means = {}
    for rate in SERIES:
        trials = [Trial(loss, rate) for loss in losses]
        if all(trial in scores for trial in trials):
            means[rate] = float(np.mean([scores[trial] for trial in trials]))
    return means


def best_rate(means: Mapping[float, float]) -> float:
    """The rate with the highest mean, of equals the lower."""
    return min(means, key=lambda rate: (-means[rate], rate))


def chosen(search: Search, scores: Scores) -> dict[str, float]:
    """The rate of each family; {} before the search has ended."""
    if wanted(search, scores):
        return {}
    return {
        family: best_rate(mean_by_rate(losses, scores))
        for family, losses in search.choosing().items()
    }


# ---- from trials to kept runs


def run_for(trial: Trial, search: Search, profile: Profile) -> Run:
    """The run of a trial, on the held-out training classes of the profile's benchmark; seed 0."""
    data = replace(profile.data, holdout=True)
    recipe = {"lr": trial.rate}
    return profile.run(search.method, loss=trial.loss, data=data, training=recipe, seed=0)


def replay(search: Search, profile: Profile) -> Progress[Trial]:
    """Go through the search by the kept runs of a profile, as far as they lead."""

    def asked(scores: Scores) -> list[Trial]:
        return wanted(search, scores)

    def run_of(trial: Trial) -> Run:
        return run_for(trial, search, profile)

    return go_through(asked, run_of, profile)


def train(search: Search, progress: Progress[Trial], profile: Profile) -> None:
    """Train what a search waits for; that a loss was not finite is kept, and counts as 0."""
    rows = {label(trial): run_for(trial, search, profile) for trial in progress.missing}
    first_seed = replace(profile, seeds=(0,), side_seeds=(), further_seeds=())
    run_all(rows, first_seed, may_fail=rows)


def label(trial: Trial) -> str:
    """A trial in words."""
    return f"{trial.loss}, lr {trial.rate:g}"


# ---- the table


COLUMNS = ["family", "loss", "rate", "harmonic", "unified", "run", "chosen"]


def table(search: Search, progress: Progress[Trial], profile: Profile) -> pd.DataFrame:
    """A line per trial: harmonic and unified R@1 as fractions, its run, and what is chosen.

    A loss that was not finite has harmonic 0 and no unified.
    """
    kept = store.read(profile.name)
    rates = chosen(search, progress.scores)
    family_of = {name: family for family, members in FAMILIES.items() for name in members}
    lines = []
    for trial, harmonic in progress.scores.items():
        family = family_of[trial.loss]
        name = progress.names[trial]
        unified = np.nan
        if name in kept:
            unified = kept[name].accuracy("unified")
        lines.append(
            {
                "family": family,
                "loss": trial.loss,
                "rate": trial.rate,
                "harmonic": harmonic,
                "unified": unified,
                "run": name,
                "chosen": rates.get(family) == trial.rate,
            }
        )
    return pd.DataFrame(lines, columns=COLUMNS)


def yaml_tuned_losses(method: str, rates: Mapping[str, float]) -> str:
    """The block `recipes:` of a profile that has each loss of a family at its rate."""
    lines = ["recipes:"]
    for family, rate in rates.items():
        lines += [f"  {method}/{name}: {{lr: {yaml_number(rate)}}}" for name in FAMILIES[family]]
    return "\n".join(lines)
