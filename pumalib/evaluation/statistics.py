"""Chance in accuracies: the bootstrap over classes, the spread over seeds, differences in pairs."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
import pandas as pd
from scipy import stats

# The rows of a table that are over all datasets.
OVERALL = ("unified", "harmonic")
# What is no dataset: the columns and rows besides those of single datasets.
NOT_DATASETS = (*OVERALL, "large", "small", "small - large")
# Resamples behind a difference's interval.
BOOTSTRAP = 1000


def harmonic_mean(accuracies: np.ndarray) -> np.ndarray:
    """Over the first axis; 0 where one accuracy is 0 (Sec. 5.1)."""
    with np.errstate(divide="ignore"):
        return len(accuracies) / (1 / np.asarray(accuracies, dtype=float)).sum(0)


def resampled(
    values: Mapping[str, np.ndarray],
    classes: Mapping[str, np.ndarray],
    bootstrap: int,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Means over the queries of each dataset, (1 + bootstrap, columns): as they are, and resampled.

    `values` has by dataset (queries, columns), and last "unified", the queries of all datasets in
    their order; `classes` likewise the class (queries,) of each.  Classes are drawn with
    replacement, with all their queries: queries of a class are alike, classes are independent.
    "unified" is drawn with the datasets' classes.  The last of the means are those of `harmonic`.
    """
    means = {}
    weights: list[np.ndarray] = []
    for place, (name, own_values) in enumerate(values.items()):
        if name == "unified":
            weight = np.concatenate(weights, axis=1)
        else:
            weight = _weights(len(np.unique(classes[name])), bootstrap, seed, place)
            weights.append(weight)
        means[name] = _weighted_means(weight, own_values, classes[name])
    own = [mean for name, mean in means.items() if name != "unified"]
    means["harmonic"] = harmonic_mean(np.stack(own))
    return means


@lru_cache(32)  # comparisons of a study share them
def _weights(count: int, bootstrap: int, seed: int, place: int) -> np.ndarray:
    """(1 + bootstrap, count) how often each class counts: once, then as drawn with replacement."""
    rng = np.random.default_rng((seed, place))
    drawn = rng.multinomial(count, np.full(count, 1 / count), bootstrap)
    return np.concatenate([np.ones((1, count)), drawn])


def _weighted_means(weight: np.ndarray, values: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """(samples, columns) means of `values` (queries, columns), each class as often as it counts."""
    _, codes = np.unique(classes, return_inverse=True)
    queries = np.ones(len(values))
    sums = [np.bincount(codes, column) for column in (*values.T, queries)]
    totals = weight @ np.stack(sums, axis=1)
    return totals[:, :-1] / totals[:, -1:]


def interval(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> dict[str, float]:
    """Mean and sd over seeds of `values` (seeds,) with a 95 % interval.

    `low` and `high` (seeds,) are each seed's bootstrap interval.  Two half-widths add as
    independent errors: the queries' (mean over seeds, which share them), and t sd / sqrt(n).
    """
    count = len(values)
    mean = float(values.mean())
    sd = float("nan")
    of_seeds = 0.0
    if count > 1:
        sd = float(values.std(ddof=1))
        of_seeds = float(stats.t.ppf(0.975, count - 1)) * sd / count**0.5
    below = float(np.hypot(np.mean(values - low), of_seeds))
    above = float(np.hypot(np.mean(high - values), of_seeds))
    return {"value": mean, "low": mean - below, "high": mean + above, "sd": sd}


def paired_difference(
    ours: Mapping[int, Mapping[str, np.ndarray]],
    theirs: Mapping[int, Mapping[str, np.ndarray]],
    classes: Mapping[str, np.ndarray],
    large: Collection[str] = (),
) -> pd.DataFrame:
    """Accuracy of one model minus another's, seed by seed.

    `ours` and `theirs` map each seed to the (queries,) hits of each dataset and of "unified";
    `classes` as for `resampled`.  A row per dataset, `unified`, `harmonic`, and where some but not
    all datasets are `large` the means of large and small ones, and "small - large".  Columns:
    value, low, high (95 %), and one-sided p-values: `above` 0 and `below` 0.

    The classes' bootstrap error of the mean and the seeds' sd / sqrt(seeds) add, by Student's t
    with Satterthwaite's degrees of freedom; one seed has no p-values.

    Raises ValueError where the two sides' seeds differ, or there is none.
    """
    if not ours or ours.keys() != theirs.keys():
        raise ValueError(
            f"seeds {sorted(ours)} cannot be paired with seeds {sorted(theirs)}: "
            "give both sides the same"
        )
    gains = _gains(ours, theirs, classes)
    datasets = [name for name in gains if name not in NOT_DATASETS]
    gains.update(_groups(gains, datasets, large))
    lines = {name: asdict(_student(gain)) for name, gain in gains.items()}
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("dataset")


def _gains(ours: Mapping, theirs: Mapping, classes: Mapping) -> dict[str, np.ndarray]:
    """Per dataset, unified and harmonic the differences (1 + bootstrap, seeds) of accuracies."""
    seeds = sorted(ours)
    hits = {}
    for name in ours[seeds[0]]:
        columns = []
        for seed in seeds:
            columns += [ours[seed][name], theirs[seed][name]]
        hits[name] = np.stack(columns, axis=1)
    means = resampled(hits, classes, BOOTSTRAP)
    return {name: mean[:, ::2] - mean[:, 1::2] for name, mean in means.items()}


def _groups(
    gains: Mapping[str, np.ndarray], datasets: list[str], large: Collection[str]
) -> dict[str, np.ndarray]:
    """Mean gains of the large datasets, the small ones, and their difference, if there are both."""
    of_large = [gains[name] for name in datasets if name in large]
    of_small = [gains[name] for name in datasets if name not in large]
    if not of_large or not of_small:
        return {}
    mean_large = np.mean(of_large, axis=0)
    mean_small = np.mean(of_small, axis=0)
    return {"large": mean_large, "small": mean_small, "small - large": mean_small - mean_large}


@dataclass(frozen=True)
class Difference:
    """A line of `paired_difference`."""

    value: float
    low: float
    high: float
    above: float  # p-value of "not above 0"
    below: float  # p-value of "not below 0"


def _student(gain: np.ndarray) -> Difference:
    """Student's t of differences (1 + bootstrap, seeds): the errors of queries and seeds add."""
    seeds = gain.shape[1]
    value = gain[0].mean()
    of_queries = gain[1:].mean(1).var(ddof=1)
    of_seeds = 0.0
    if seeds > 1:
        of_seeds = gain[0].var(ddof=1) / seeds
    error = np.sqrt(of_queries + of_seeds)
    freedom = np.inf
    if of_seeds:
        # Satterthwaite's: the bootstrap's error counts as known.
        freedom = (seeds - 1) * (1 + of_queries / of_seeds) ** 2
    width = stats.t.ppf(0.975, freedom) * error

    above = np.nan
    below = np.nan
    if seeds > 1:
        t = value / max(error, 1e-12)
        above = stats.t.sf(t, freedom)
        below = stats.t.cdf(t, freedom)
    return Difference(value, value - width, value + width, above, below)


def holm(chances: Mapping[str, float]) -> dict[str, float]:
    """p-values corrected for their number (Holm, 1979)."""
    names = sorted(chances, key=lambda name: chances[name])
    corrected = {}
    highest = 0.0
    for rank, name in enumerate(names):
        scaled = (len(names) - rank) * chances[name]
        highest = max(highest, scaled)
        corrected[name] = min(1.0, highest)
    return corrected
