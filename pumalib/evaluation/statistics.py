"""Chance in retrieval accuracies: the bootstrap over classes, the spread over seeds, and differences in pairs."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import pandas as pd
from scipy import stats

KS = (1, 2, 4, 8, 10, 20, 100)  # of R@k in the paper's tables
OVERALL = ("unified", "harmonic")
NOT_DATASETS = (*OVERALL, "large", "small", "small - large")


def harmonic_mean(accuracies: np.ndarray) -> np.ndarray:
    """Over the first axis; 0 where one accuracy is 0 (Sec. 5.1)."""
    with np.errstate(divide="ignore"):
        return len(accuracies) / (1 / np.asarray(accuracies, dtype=float)).sum(0)


def resampled(scores: Mapping, classes: Mapping, bootstrap: int, seed: int = 0) -> dict[str, np.ndarray]:
    """(1 + bootstrap, columns) means of each (queries, columns) as they are, then resampled; last those of `harmonic`.
    Classes (queries,) are drawn with replacement, with all their queries: these are alike, classes are independent.
    "unified", the queries of all datasets in their order, is drawn with the datasets' classes."""
    means, weights = {}, []
    for place, (name, values) in enumerate(scores.items()):
        labels, count = np.unique(classes[name], return_inverse=True)[1], len(np.unique(classes[name]))
        sums = np.stack([np.bincount(labels, column, count) for column in [*values.T, np.ones(len(values))]], axis=1)
        weights.append(np.concatenate(weights, axis=1) if name == "unified" else _drawn(count, bootstrap, seed, place))
        total = weights[-1] @ sums
        means[name] = total[:, :-1] / total[:, -1:]
    means["harmonic"] = harmonic_mean(np.stack([means[name] for name in scores if name != "unified"]))
    return means


@lru_cache(32)  # comparisons of a study share them
def _drawn(count: int, bootstrap: int, seed: int, place: int) -> np.ndarray:
    """(1 + bootstrap, count) how often each class counts: once, then as drawn with replacement."""
    drawn = np.random.default_rng((seed, place)).multinomial(count, np.full(count, 1 / count), bootstrap)
    return np.concatenate([np.ones((1, count)), drawn])


def interval(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> dict[str, float]:
    """Mean and sd over seeds of `values` (seeds,) with a 95% interval from each seed's bootstrap `low` and `high`.
    Two half-widths add as independent errors: the queries' (mean over seeds, which share them), and t sd / sqrt(n)."""
    count, mean = len(values), float(values.mean())
    sd = float(values.std(ddof=1)) if count > 1 else float("nan")
    seeds = 0.0 if count == 1 else float(stats.t.ppf(0.975, count - 1)) * sd / count**0.5
    low, high = (float(np.hypot(np.mean(width), seeds)) for width in (values - low, high - values))
    return {"value": mean, "low": mean - low, "high": mean + high, "sd": sd}


def paired_difference(ours: list[Mapping], theirs: list[Mapping], classes: Mapping, large=()) -> pd.DataFrame:
    """Accuracy of one model minus another's: value, low, high (95%), and one-sided p-values, `above` 0 and `below` 0.
    `ours` and `theirs` are, per seed in one order (seeds of both count), the (queries,) hits of each dataset and of
    "unified"; `classes` as for `resampled`.  A row per key, then `harmonic`, and where some but not all datasets are
    `large` the means of large and small ones, and "small - large".  The classes' bootstrap error of the mean and the
    seeds' sd / sqrt(seeds) add, by Student's t with Satterthwaite's degrees of freedom; one seed has no p-values."""
    pairs = list(zip(ours, theirs))
    values = {name: np.stack([seed[name] for pair in pairs for seed in pair], axis=1) for name in ours[0]}
    gains = {name: mean[:, ::2] - mean[:, 1::2] for name, mean in resampled(values, classes, 1000).items()}
    own = [name for name in ours[0] if name != "unified"]
    groups = {"large": [name for name in own if name in large], "small": [name for name in own if name not in large]}
    if all(groups.values()):
        gains |= {group: np.mean([gains[name] for name in names], axis=0) for group, names in groups.items()}
        gains["small - large"] = gains["small"] - gains["large"]
    lines, seeds = {}, len(pairs)
    for name, gain in gains.items():  # (1 + bootstrap, seeds)
        value, queries = gain[0].mean(), gain[1:].mean(1).var(ddof=1)
        spread = gain[0].var(ddof=1) / seeds if seeds > 1 else 0.0
        error, freedom = np.sqrt(queries + spread), (seeds - 1) * (1 + queries / spread) ** 2 if spread else np.inf
        width, t = stats.t.ppf(0.975, freedom) * error, value / max(error, 1e-12)
        above, below = (stats.t.sf(t, freedom), stats.t.cdf(t, freedom)) if seeds > 1 else (np.nan, np.nan)
        lines[name] = {"value": value, "low": value - width, "high": value + width, "above": above, "below": below}
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("dataset")


def holm(chances: Mapping[str, float]) -> dict[str, float]:
    """p-values corrected for their number (Holm, 1979)."""
    names = sorted(chances, key=chances.get)
    scaled = [(len(names) - rank) * chances[name] for rank, name in enumerate(names)]
    return dict(zip(names, np.maximum.accumulate(scaled).clip(max=1).tolist()))
