"""Chance in retrieval accuracies: the bootstrap over queries, the spread over seeds, and differences in pairs."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

KS = (1, 2, 4, 8, 10, 20, 100)  # of R@k in the paper's tables
SAYS = {"higher": "holds", "lower": "FAILS", "open": "open"}


def harmonic_mean(accuracies: np.ndarray, axis: int = 0) -> np.ndarray:
    """D / sum(1 / accuracy) over the D entries of `axis`; 0 where one of them is 0 (Sec. 5.1)."""
    accuracies = np.asarray(accuracies, dtype=float)
    with np.errstate(divide="ignore"):
        return accuracies.shape[axis] / (1 / accuracies).sum(axis)


def resample(values: np.ndarray, bootstrap: int, rng: np.random.Generator) -> np.ndarray:
    """(bootstrap, columns) means of `values` (queries, columns), queries drawn with replacement."""
    n = len(values)
    means = np.empty((bootstrap, values.shape[1]))
    for sample in means:
        sample[:] = np.bincount(rng.integers(n, size=n), minlength=n) @ values / n
    return means


def interval(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> dict[str, float]:
    """Mean and sd over seeds of `values` (seeds,) with a 95% interval from each seed's bootstrap `low` and `high`.

    The half-widths of both sources of chance add as independent errors: that of the queries (its mean over seeds;
    they share their queries, so it does not shrink with their number) and t sd / sqrt(seeds), Student's t.
    """
    count, mean = len(values), float(values.mean())
    sd = float(values.std(ddof=1)) if count > 1 else float("nan")
    seeds = 0.0 if count == 1 else float(stats.t.ppf(0.975, count - 1)) * sd / count**0.5
    low, high = (float(np.hypot(np.mean(width), seeds)) for width in (values - low, high - values))
    return {"value": mean, "low": mean - low, "high": mean + high, "sd": sd}


def paired_difference(ours: list[dict[str, np.ndarray]], theirs: list[dict[str, np.ndarray]]) -> pd.DataFrame:
    """Accuracy of one model minus another's: value, low, high, and the verdict "higher", "lower" or "open".

    Both are resampled with the same queries and compared seed by seed, so that what makes a query or a seed
    easy for both cancels out; the two sources of chance are added as in `interval`.  `ours` and `theirs` are, per
    seed in the same order (only seeds of both count), the (queries,) hits of each dataset and of "unified"; the
    result has a row per key, then `harmonic`.
    """
    pairs = list(zip(ours, theirs))
    rng = np.random.default_rng(0)
    samples = {}
    for name in ours[0]:
        values = np.stack([seed[name] for pair in pairs for seed in pair], axis=1)  # (queries, seeds x 2)
        samples[name] = np.concatenate([values.mean(0, keepdims=True), resample(values, 1000, rng)])
    samples["harmonic"] = harmonic_mean(np.stack([samples[name] for name in samples if name != "unified"]))
    lines = {}
    for name, sample in samples.items():
        gains = sample[:, ::2] - sample[:, 1::2]  # (1 + bootstrap, seeds)
        low, high = np.percentile(gains[1:].mean(1), (2.5, 97.5))
        line = interval(gains[0], np.full(len(pairs), low), np.full(len(pairs), high))
        verdict = "higher" if line["low"] > 0 else "lower" if line["high"] < 0 else "open"
        lines[name] = {key: line[key] for key in ("value", "low", "high")} | {"verdict": verdict}
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("dataset")
