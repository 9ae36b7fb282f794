"""Intervals, paired differences and their p-values against plain loops and on constructed data."""

import warnings
from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from pumalib.evaluation import (
    Averages,
    Spread,
    Term,
    contrast,
    ensemble_spread,
    harmonic_mean,
    harmonic_shares,
    holm,
    interval,
    pooled_spreads,
    rank_correlation,
    smallest_found,
    statistics,
)
from tools import simulation

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


def paired_difference(ours, theirs, classes, large=()):
    """The accuracy of one model minus that of another, seed by seed."""
    return contrast([Term(ours), Term(theirs, -1)], classes, Averages(large=tuple(large)))


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
    assert (found.loc[["a", "b", "c", "unified", "harmonic"], "p_greater"] < 0.01).all()
    assert found["p_greater"].add(found["p_less"]).to_numpy() == pytest.approx(1)
    assert harmonic_mean([0.5, 1.0]) == pytest.approx(2 / 3) and harmonic_mean([0.0, 1.0]) == 0
    # The bootstrap over the classes of "a" in a plain loop, and the spread of the seeds.
    rng = np.random.default_rng(1)
    by_seed = [GOOD[seed]["a"] - POOR[seed]["a"] for seed in GOOD]
    gains = np.reshape(by_seed, (3, 60, 5))
    drawn_means = []
    for _ in range(2000):
        drawn_classes = rng.integers(60, size=60)
        drawn_means.append(gains[:, drawn_classes].mean(axis=(1, 2)))
    drawn_means = np.array(drawn_means)
    mean = drawn_means.mean(axis=1)
    # The interaction of class and seed belongs to the variance over seeds: do not count it twice.
    of_seed_and_class = np.mean([np.var(drawn_means[:, seed] - mean) for seed in range(3)]) / 2
    queries = np.var(mean) - of_seed_and_class
    assert 0 < queries < np.var(mean)
    spread = np.var([gain.mean() for gain in by_seed], ddof=1) / 3
    freedom = (queries + spread) ** 2 / (spread**2 / 2)
    expected = np.sqrt(queries + spread) * stats.t.ppf(0.975, freedom)
    assert found.at["a", "value"] - found.at["a", "low"] == pytest.approx(expected, rel=0.06)


def test_a_point_on_the_lowest_dataset_moves_the_harmonic_mean_most():
    shares = harmonic_shares(pd.Series({"low": 0.25, "high": 0.5}))
    assert shares.to_dict() == pytest.approx({"low": 0.8, "high": 0.2})
    # By moving each a little.
    start = np.array([0.25, 0.5])
    slopes = [harmonic_mean(start + step) - harmonic_mean(start) for step in 1e-6 * np.eye(2)]
    assert slopes / np.sum(slopes) == pytest.approx([0.8, 0.2], abs=1e-4)


def test_a_model_does_not_differ_from_its_copy_and_one_seed_has_no_chance():
    found = paired_difference(GOOD, dict(GOOD), NUMBERS)
    assert (found[["value", "low", "high"]] == 0).all(axis=None) and (
        found[["p_greater", "p_less"]] == 0.5
    ).all(axis=None)
    one = paired_difference({4: GOOD[0]}, {4: POOR[0]}, NUMBERS)
    assert one[["p_greater", "p_less"]].isna().all(axis=None) and (one["low"] < one["value"]).all()


def test_seeds_are_paired_whatever_their_order():
    backwards = {seed: POOR[seed] for seed in reversed(POOR)}
    assert list(backwards) != list(POOR)
    found = paired_difference(GOOD, backwards, NUMBERS)
    pd.testing.assert_frame_equal(found, paired_difference(GOOD, POOR, NUMBERS), check_exact=True)


@pytest.mark.parametrize("others", [(0, 1), (0, 1, 5)])
def test_seeds_that_only_one_side_has_are_refused_without_spreads(others):
    theirs = dict.fromkeys(others, POOR[0])
    with pytest.raises(ValueError, match=r"seeds \[0, 1, 2\] cannot be paired with seeds \["):
        paired_difference(GOOD, theirs, NUMBERS)


def test_a_row_without_seeds_is_refused():
    with pytest.raises(ValueError, match="without seeds"):
        paired_difference(GOOD, {}, NUMBERS)


def test_all_seeds_of_each_row_count_where_their_spreads_are_known():
    names = [*CLASSES, "unified", "harmonic"]
    spreads = []
    for variance, dof in ((0.0009, 20.0), (0.0036, 2.0)):
        spreads.append(Spread(pd.Series(variance, names), pd.Series(dof, names)))
    two = {seed: POOR[seed] for seed in (0, 2)}
    found = contrast([Term(GOOD, 1, spreads[0]), Term(two, -1, spreads[1])], NUMBERS).loc["a"]

    ours = [GOOD[seed]["a"].mean() for seed in (0, 1, 2)]
    theirs = [POOR[seed]["a"].mean() for seed in (0, 2)]
    assert found["value"] == pytest.approx(np.mean(ours) - np.mean(theirs))
    of_seeds = 0.0009 / 3 + 0.0036 / 2
    of_classes = found["error"] ** 2 - of_seeds
    dof = found["error"] ** 4 / ((0.0009 / 3) ** 2 / 20 + (0.0036 / 2) ** 2 / 2)
    assert found["dof"] == pytest.approx(dof)

    # The classes' variance by a plain bootstrap, less what seeds and classes share, row by row.
    rng = np.random.default_rng(1)
    gains = []
    within = []
    for _ in range(2000):
        chosen = rng.integers(60, size=60)
        levels = []
        for row in (GOOD, two):
            by_seed = [hits["a"].reshape(60, 5)[chosen].mean() for hits in row.values()]
            levels.append(by_seed)
        gains.append(np.mean(levels[0]) - np.mean(levels[1]))
        within.append([np.subtract(by_seed, np.mean(by_seed)) for by_seed in levels])
    shared = 0.0
    for place, seeds in enumerate((3, 2)):
        deviations = np.array([one[place] for one in within])
        shared += deviations.var(axis=0).mean() / (seeds - 1)
    assert of_classes == pytest.approx(np.var(gains) - shared, rel=0.15)


# ---- seeds


def table(*unified):
    return pd.DataFrame({"unified": unified, "harmonic": unified})


def test_seeds_of_stable_rows_are_pooled_and_a_larger_own_spread_counts():
    # Variances 0, 1, 4 and, with four degrees of freedom, 2.5.
    rows = {
        "lucky": table(5.0, 5.0, 5.0001),
        "usual": table(1.0, 2.0, 3.0),
        "wide": table(1.0, 3.0, 5.0),
        "five": table(1.0, 2.0, 3.0, 4.0, 5.0),
        "once": table(7.0),
    }
    found = pooled_spreads(rows, ["unified", "harmonic"])
    assert list(found) == ["lucky", "usual", "wide", "five"]
    pooled = (2 * 0 + 2 * 1 + 2 * 4 + 4 * 2.5) / 10
    for name, variance in {"lucky": pooled, "usual": pooled, "wide": 4, "five": 2.5}.items():
        assert found[name].variance["unified"] == pytest.approx(variance, abs=1e-6)
        assert found[name].dof["unified"] == 10


def test_an_unstable_row_and_one_without_seeds_keep_their_own():
    rows = {number: table(1.0, 2.0, 3.0) for number in range(6)}
    rows["frozen"] = table(4.0, 4.0, 4.0)
    # Nine times the spread, in one column alone.
    rows["unstable"] = table(1.0, 2.0, 3.0).assign(harmonic=[1.0, 10.0, 19.0])
    found = pooled_spreads(rows, ["unified", "harmonic"])
    assert found["frozen"].variance.tolist() == [0, 0]
    assert found["unstable"].variance.tolist() == pytest.approx([1, 81])
    assert found["unstable"].dof.tolist() == [2, 2]
    assert found[0].variance.tolist() == pytest.approx([1, 1])
    assert found[0].dof.tolist() == [12, 12]
    # A column that is not judged does not make a row unstable.
    lenient = pooled_spreads(rows, ["unified"])
    assert lenient["unstable"].dof.tolist() == [14, 14]
    assert lenient["unstable"].variance["harmonic"] == pytest.approx(81)
    assert pooled_spreads({"once": table(1.0)}, ["unified"]) == {}


def test_a_row_that_is_the_same_with_every_seed_is_none_of_the_stable_ones():
    same = table(0.7, 0.7, 0.7)
    assert same.var(ddof=1)["unified"] > 0, "rounding must leave a variance for this to be a test"
    rows = {number: table(1.0, 2.0, 3.0) for number in range(6)} | {"frozen": same}
    found = pooled_spreads(rows, ["unified"])
    assert found[0].variance.tolist() == pytest.approx([1, 1])
    assert found[0].dof.tolist() == [12, 12]
    assert found["frozen"].dof.tolist() == [2, 2]


def test_unstable_rows_do_not_hide_each_other():
    rng = np.random.default_rng(0)
    rows = {number: table(*rng.normal(0, 1, 3)) for number in range(12)}
    for number in range(5):
        rows[f"unstable {number}"] = table(0.0, 30.0 + number, -40.0)
    found = pooled_spreads(rows, ["unified"])
    assert {name for name, spread in found.items() if spread.dof["unified"] == 2} == {
        f"unstable {number}" for number in range(5)
    }


def test_known_spreads_add_to_the_error_of_the_classes():
    spread = Spread(pd.Series({"a": 0.0009}), pd.Series({"a": 20.0}))
    other = Spread(pd.Series({"a": 0.0036}), pd.Series({"a": 2.0}))
    classes = {"a": NUMBERS["a"], "unified": NUMBERS["a"]}

    def of_a(models):
        return {seed: {"a": one["a"], "unified": one["a"]} for seed, one in models.items()}

    columns = pd.Series(dict.fromkeys(["a", "unified", "harmonic"], 1.0))
    sides = [
        Term(of_a(model), sign, Spread(columns * one.variance["a"], columns * one.dof["a"]))
        for model, sign, one in ((GOOD, 1, spread), (POOR, -1, other))
    ]
    found = contrast(sides, classes).loc["a"]
    own = paired_difference(of_a(GOOD), of_a(POOR), classes).loc["a"]
    spread_of_gain = np.var(
        [GOOD[seed]["a"].mean() - POOR[seed]["a"].mean() for seed in GOOD], ddof=1
    )
    # What classes and seeds share is estimated row by row and not from the gain: nearly the same.
    of_classes = found["error"] ** 2 - 0.0003 - 0.0012
    assert of_classes == pytest.approx(own["error"] ** 2 - spread_of_gain / 3, rel=0.1)
    error = of_classes + 0.0003 + 0.0012
    freedom = error**2 / (0.0003**2 / 20 + 0.0012**2 / 2)
    assert found["dof"] == pytest.approx(freedom)
    width = stats.t.ppf(0.975, freedom) * np.sqrt(error)
    assert found[["low", "high"]].tolist() == pytest.approx(
        [found["value"] - width, found["value"] + width]
    )
    assert found["p_greater"] == pytest.approx(stats.t.sf(found["value"] / np.sqrt(error), freedom))


def test_members_of_an_ensemble_are_combined_over_all_choices_of_seeds():
    own = {
        "a": np.array([0.5, 0.52, 0.55]),
        "b": np.array([0.3, 0.31, 0.36]),
        "c": np.array([0.8, 0.7, 0.75]),
    }
    found = ensemble_spread(own, {"unified": np.array([0.4, 0.5, 0.6])}, Averages(("c",), ("b",)))
    choices = list(product(range(3), repeat=3))
    for name, average in {
        "harmonic": lambda a, b, c: 3 / (1 / a + 1 / b + 1 / c),
        "small - large": lambda a, b, c: (a + b) / 2 - c,
        "harmonic without b": lambda a, b, c: 2 / (1 / a + 1 / c),
    }.items():
        levels = np.array(
            [average(own["a"][i], own["b"][j], own["c"][k]) for i, j, k in choices]
        ).reshape(3, 3, 3)
        assert found.value[name] == pytest.approx(levels.mean(), abs=2e-4)
        # The variance of the mean of all choices: what each member's seeds change, added.
        changes = [levels.mean(axis=axes) for axes in ((1, 2), (0, 2), (0, 1))]
        variances = np.array([change.var(ddof=1) for change in changes])
        assert found.variance[name] == pytest.approx(variances.sum(), rel=0.02)
        freedom = variances.sum() ** 2 / (variances**2 / 2).sum()
        assert found.dof[name] == pytest.approx(freedom, rel=0.02)
    assert (found.dof[["harmonic", "small - large"]] > 2).all()
    assert found.variance[["a", "unified"]].tolist() == pytest.approx([own["a"].var(ddof=1), 0.01])


def test_a_combined_ensemble_is_compared_by_its_value_over_all_choices():
    columns = ["a", "b", "c", "unified", "harmonic"]
    none = pd.Series(dict.fromkeys(columns, 0.0))
    known = Spread(none, none + 2, pd.Series({"harmonic": 0.25}))
    found = contrast([Term(GOOD, 1, known), Term(POOR, -1, Spread(none, none + 2))], NUMBERS)
    means = {name: np.mean([POOR[seed][name].mean() for seed in POOR]) for name in "abc"}
    by_seed = [harmonic_mean([POOR[seed][name].mean() for name in "abc"]) for seed in POOR]
    assert found.at["harmonic", "value"] == pytest.approx(0.25 - np.mean(by_seed))
    ours = np.mean([GOOD[seed]["a"].mean() for seed in GOOD])
    assert found.at["a", "value"] == pytest.approx(ours - means["a"])


# ---- averages


def test_averages_leave_out_a_dataset_or_weigh_them():
    shares = (("a", 1.0), ("b", 0.0), ("c", 3.0))
    found = contrast([Term(GOOD)], NUMBERS, Averages(without=("b", "c"), shares=shares))
    own = {name: [GOOD[seed][name].mean() for seed in GOOD] for name in "abc"}
    without_b = np.mean([2 / (1 / a + 1 / c) for a, c in zip(own["a"], own["c"])])
    assert found.at["harmonic without b", "value"] == pytest.approx(without_b)
    # Here every query hits in the union as in its own dataset.
    weighted = np.mean(own["a"]) / 4 + 3 * np.mean(own["c"]) / 4
    assert found.at["weighted unified", "value"] == pytest.approx(weighted)
    assert found.at["weighted unified", "low"] < weighted
    by_queries = tuple((name, float(5 * count)) for name, count in CLASSES.items())
    plain = contrast([Term(GOOD)], NUMBERS, Averages(shares=by_queries))
    same = ["value", "low", "high"]
    assert plain.loc["weighted unified", "value"] == pytest.approx(plain.at["unified", "value"])
    assert plain.loc["weighted unified", same].to_numpy() == pytest.approx(
        plain.loc["unified", same].to_numpy(), abs=0.005
    )


@pytest.mark.parametrize(
    ("averages", "said"),
    [
        (Averages(without=("d",)), "no harmonic mean without 'd': the datasets are a, b, c"),
        (Averages(shares=(("a", 1.0),)), "give each of a, b, c its share"),
        (Averages(shares=(("a", 1.0), ("b", -1.0), ("c", 1.0))), "none below 0"),
    ],
)
def test_averages_of_datasets_that_there_are_not_are_refused(averages, said):
    with pytest.raises(ValueError, match=said):
        contrast([Term(GOOD)], NUMBERS, averages)


def test_an_interaction_is_a_difference_of_differences():
    terms = [Term(GOOD), Term(POOR, -1), Term(POOR, -1), Term(GOOD)]
    found = contrast(terms, NUMBERS, Averages(large=("c",)))
    one = paired_difference(GOOD, POOR, NUMBERS, ["c"])
    assert found["value"].to_numpy() == pytest.approx(2 * one["value"].to_numpy())
    assert found["error"].to_numpy() == pytest.approx(2 * one["error"].to_numpy())


# ---- power, coverage and false positives


def test_the_smallest_difference_found_is_found_in_four_of_five():
    rng = np.random.default_rng(0)
    for freedom in (2, 4, 30):
        smallest = smallest_found(np.array(1.0), np.array(freedom), 0.05 / 37)
        error = np.sqrt(rng.chisquare(freedom, 200_000) / freedom)
        t = (smallest + rng.normal(size=error.size)) / error
        found = np.mean(t > stats.t.ppf(1 - 0.05 / 74, freedom))
        assert found == pytest.approx(0.8, abs=0.005)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("effect", [0.0, 0.08])
def test_intervals_cover_and_false_positives_stay_below_their_level(seeds, effect, monkeypatch):
    monkeypatch.setattr(statistics, "BOOTSTRAP", 100)
    world = simulation.World(rows=8, seeds=seeds, effect=effect)
    found = simulation.rates(world, 40).loc["chosen"]
    # 280 intervals, dependent within a study, give a standard error of about two points.
    assert 0.91 <= found["covered"] <= 0.995
    if effect == 0:
        assert found["strict"] <= 0.01
        assert found["family"] <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 40)
    else:
        assert found["refused"] > 0.5


def test_intervals_cover_where_the_rows_have_unlike_numbers_of_seeds(monkeypatch):
    monkeypatch.setattr(statistics, "BOOTSTRAP", 100)
    found = simulation.rates(simulation.World(rows=8, seeds=5, fewer=3), 40).loc["chosen"]
    assert 0.91 <= found["covered"] <= 0.995
    assert found["strict"] <= 0.01


class TestRankCorrelation:
    def test_it_is_spearmans_with_an_interval_around_it(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=20)
        y = x + rng.normal(size=20)
        value, low, high = rank_correlation(x, y, [str(n) for n in range(20)])
        assert value == pytest.approx(stats.spearmanr(x, y).statistic)
        assert low < value < high < 1
        assert low > 0

    def test_points_of_one_group_count_once(self):
        x = np.array([1.0, 2, 3, 4, 5, 6])
        y = np.array([2.0, 1, 4, 3, 6, 5])
        alone = rank_correlation(x, y, list("abcdef"))
        copies = rank_correlation(np.tile(x, 9), np.tile(y, 9), list("abcdef") * 9)
        fooled = rank_correlation(
            np.tile(x, 9), np.tile(y, 9), [str(number) for number in range(54)]
        )
        width = alone[2] - alone[1]
        assert copies[2] - copies[1] == pytest.approx(width, abs=0.05)
        assert fooled[2] - fooled[1] < width / 2

    def test_too_few_have_none(self):
        assert np.isnan(rank_correlation([1, 2], [1, 2], ["a", "b"])).all()
        with warnings.catch_warnings(action="ignore"):
            assert np.isnan(rank_correlation([1] * 4, [1, 2, 3, 4], list("abcd"))).all()

        value, low, high = rank_correlation([1, 2, 3], [1, 2, 3], ["a", "b", "c"])
        assert value == pytest.approx(1)
        assert np.isnan([low, high]).all()


def test_what_was_not_tested_stays_so_and_counts():
    corrected = holm({"none": np.nan, "weak": 0.04, "strong": 0.01})
    assert corrected == pytest.approx({"strong": 0.03, "weak": 0.08, "none": np.nan}, nan_ok=True)
