"""Intervals, paired differences and their p-values against plain loops and on constructed data."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from pumalib.evaluation import harmonic_mean, interval, paired_difference

CLASSES = {"a": 60, "b": 40, "c": 80}  # of five queries each
NUMBERS = {
    name: np.repeat(np.arange(count), 5) + 100 * n
    for n, (name, count) in enumerate(CLASSES.items())
}
NUMBERS["unified"] = np.concatenate(list(NUMBERS.values()))


def drawn(rng, effect, seeds):
    """Hits of two models by seed.

    Classes differ in how hard they are and in which model suits them, seeds a little.
    """
    both = [{seed: {} for seed in range(seeds)} for _ in range(2)]
    for name, count in CLASSES.items():
        ease, suits = rng.normal(0.5, 0.15, count), rng.normal(0, 0.1, count)
        for model, shift in zip(both, (effect + suits, 0 * suits), strict=True):
            for seed in model.values():
                rate = ease + shift + rng.normal(0, 0.01)
                seed[name] = (rng.random((5, count)) < rate).T.ravel().astype(float)
    for seed in (*both[0].values(), *both[1].values()):
        seed["unified"] = np.concatenate(list(seed.values()))
    return both


GOOD, POOR = drawn(np.random.default_rng(0), 0.3, 3)


def test_interval_adds_both_sources_of_chance():
    one = interval(np.array([0.5]), np.array([0.4]), np.array([0.7]))
    assert (one["value"], one["low"], one["high"]) == pytest.approx((0.5, 0.4, 0.7)) and np.isnan(
        one["sd"]
    )
    two = interval(np.array([0.4, 0.6]), np.array([0.3, 0.5]), np.array([0.5, 0.7]))
    half = np.hypot(
        0.1, 12.7062 * np.sqrt(0.02) / np.sqrt(2)
    )  # Student's t of one degree of freedom
    assert (two["low"], two["high"]) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-4)


def test_a_difference_is_taken_in_pairs_and_by_classes():
    found = paired_difference(GOOD, POOR, NUMBERS, ["c"])
    assert list(found.index) == [
        "a",
        "b",
        "c",
        "unified",
        "harmonic",
        "large",
        "small",
        "small - large",
    ]
    means = {
        name: [[seed[name].mean() for seed in model.values()] for model in (GOOD, POOR)]
        for name in NUMBERS
    }
    for name, (ours, theirs) in means.items():
        assert found.at[name, "value"] == pytest.approx(np.mean(np.subtract(ours, theirs)))
    harmonic = [3 / sum(1 / np.array(means[name][side]) for name in "abc") for side in range(2)]
    assert found.at["harmonic", "value"] == pytest.approx(np.subtract(*harmonic).mean())
    small = found.loc[["a", "b"], "value"].mean()
    large = found.at["c", "value"]
    assert found["value"][["small", "large", "small - large"]].tolist() == pytest.approx(
        [small, large, small - large]
    )
    assert (found.loc[["a", "b", "c", "unified", "harmonic"], "above"] < 0.01).all()
    assert found["above"].add(found["below"]).to_numpy() == pytest.approx(1)
    assert harmonic_mean([0.5, 1.0]) == pytest.approx(2 / 3) and harmonic_mean([0.0, 1.0]) == 0
    # The bootstrap over the classes of "a" in a plain loop, and the spread of the seeds.
    rng = np.random.default_rng(1)
    by_seed = [GOOD[seed]["a"] - POOR[seed]["a"] for seed in GOOD]
    gains = np.mean(by_seed, axis=0).reshape(60, 5)
    queries = np.std([gains[rng.integers(60, size=60)].mean() for _ in range(2000)])
    spread = np.std([gain.mean() for gain in by_seed], ddof=1) / 3**0.5
    freedom = (queries**2 + spread**2) ** 2 / (spread**4 / 2)
    expected = np.hypot(queries, spread) * stats.t.ppf(0.975, freedom)
    assert found.at["a", "value"] - found.at["a", "low"] == pytest.approx(expected, rel=0.06)


def test_a_model_does_not_differ_from_its_copy_and_one_seed_has_no_chance():
    found = paired_difference(GOOD, dict(GOOD), NUMBERS)
    assert (found[["value", "low", "high"]] == 0).all(axis=None) and (
        found[["above", "below"]] == 0.5
    ).all(axis=None)
    one = paired_difference({4: GOOD[0]}, {4: POOR[0]}, NUMBERS)
    assert one[["above", "below"]].isna().all(axis=None) and (one["low"] < one["value"]).all()


def test_seeds_are_paired_whatever_their_order():
    backwards = {seed: POOR[seed] for seed in reversed(POOR)}
    assert list(backwards) != list(POOR)
    found = paired_difference(GOOD, backwards, NUMBERS)
    pd.testing.assert_frame_equal(found, paired_difference(GOOD, POOR, NUMBERS), check_exact=True)


@pytest.mark.parametrize("others", [(0, 1), (0, 1, 5), ()])
def test_seeds_that_only_one_side_has_are_refused(others):
    theirs = dict.fromkeys(others, POOR[0])
    with pytest.raises(ValueError, match=r"seeds \[0, 1, 2\] cannot be paired with seeds \["):
        paired_difference(GOOD, theirs, NUMBERS)
