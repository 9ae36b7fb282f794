"""Intervals and paired differences against plain loops."""

import numpy as np
import pytest

from pumalib.evaluation import harmonic_mean, interval, paired_difference

QUERIES = {"a": 40, "b": 60}


def hits(rates, seed):
    rng = np.random.default_rng(seed)
    values = {name: (rng.random(count) < rates[name]).astype(float) for name, count in QUERIES.items()}
    return values | {"unified": np.concatenate(list(values.values()))}


GOOD = [hits({"a": 0.9, "b": 0.8}, seed) for seed in range(3)]
POOR = [hits({"a": 0.5, "b": 0.5}, seed) for seed in range(3)]


def test_interval_adds_both_sources_of_chance():
    one = interval(np.array([0.5]), np.array([0.4]), np.array([0.7]))
    assert (one["value"], one["low"], one["high"]) == pytest.approx((0.5, 0.4, 0.7)) and np.isnan(one["sd"])
    two = interval(np.array([0.4, 0.6]), np.array([0.3, 0.5]), np.array([0.5, 0.7]))
    half = np.hypot(0.1, 12.7062 * np.sqrt(0.02) / np.sqrt(2))  # Student's t of one degree of freedom
    assert (two["low"], two["high"]) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-4)


def test_a_difference_is_taken_in_pairs():
    difference = paired_difference(GOOD, POOR)
    assert list(difference.index) == ["a", "b", "unified", "harmonic"] and set(difference["verdict"]) == {"higher"}
    assert set(paired_difference(POOR, GOOD)["verdict"]) == {"lower"}
    for name in ("a", "b", "unified"):
        expected = np.mean([g[name].mean() - p[name].mean() for g, p in zip(GOOD, POOR)])
        assert difference.at[name, "value"] == pytest.approx(expected)
    assert harmonic_mean([0.5, 1.0]) == pytest.approx(2 / 3) and harmonic_mean([0.0, 1.0]) == 0
    harmonic = [[2 / (1 / seed["a"].mean() + 1 / seed["b"].mean()) for seed in model] for model in (GOOD, POOR)]
    assert difference.at["harmonic", "value"] == pytest.approx(np.subtract(*harmonic).mean())
    # The bootstrap over queries, in a plain loop, and the spread of the seeds
    rng = np.random.default_rng(1)
    gains = []
    for _ in range(2000):
        drawn = rng.integers(QUERIES["a"], size=QUERIES["a"])
        gains.append(np.mean([g["a"][drawn].mean() - p["a"][drawn].mean() for g, p in zip(GOOD, POOR)]))
    spread = 4.3027 * np.std([g["a"].mean() - p["a"].mean() for g, p in zip(GOOD, POOR)], ddof=1) / 3**0.5
    value = difference.at["a", "value"]
    assert difference.at["a", "low"] == pytest.approx(
        value - np.hypot(value - np.percentile(gains, 2.5), spread), abs=0.02
    )


def test_a_model_does_not_differ_from_its_copy_and_only_common_seeds_count():
    difference = paired_difference(GOOD, GOOD[:2])
    assert (difference[["value", "low", "high"]] == 0).all(axis=None) and set(difference["verdict"]) == {"open"}
