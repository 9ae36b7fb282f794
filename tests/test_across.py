"""Comparisons across profiles read kept runs, over the seeds that both rows have."""

from dataclasses import replace

import kept_runs
import numpy as np
import pandas as pd
import pytest
from kept_runs import RUNS
from scipy import stats

import puma_study as study
from puma_study import across, store
from pumalib import evaluation, paths

SEVERAL = replace(kept_runs.PROFILE, seeds=(0, 1))


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Three kept runs: linear at seeds 0 and 1, PUMA at seed 0."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    return kept_runs.keep_three()


def test_a_gain_is_of_the_seeds_that_both_have(names):
    gain = across.gain(RUNS["puma"], RUNS["linear"], SEVERAL)
    expected = study.contrasts.difference([names["puma"]], [names["linear"]], "test")
    assert gain["points"].to_numpy() == pytest.approx(100 * expected["value"].to_numpy())
    assert set(gain["seeds"]) == {1}
    assert set(gain["ours"]) == {names["puma"]}
    assert set(gain["theirs"]) == {names["linear"]}

    hits = [
        store.record(names[key], "test").hits()["aircraft"].mean() for key in ("puma", "linear")
    ]
    assert gain.at["aircraft", "points"] == pytest.approx(100 * (hits[0] - hits[1]))


def test_an_interaction_is_one_gain_minus_another(names):
    """Under two lists; here the second is the first with the rows exchanged."""
    puma, linear = RUNS["puma"], RUNS["linear"]
    gain = across.gain(puma, linear, SEVERAL, evaluation.Averages(large=("aircraft",)))
    found = across.interaction([puma, linear], [linear, puma], [SEVERAL, SEVERAL], ["aircraft"])
    assert list(found.index) == list(gain.index)
    assert found["points"].to_numpy() == pytest.approx(2 * gain["points"].to_numpy())
    assert set(found["seeds"]) == {1}
    small, large = gain.at["digits", "points"], gain.at["aircraft", "points"]
    assert found.at["small - large", "points"] == pytest.approx(2 * (small - large))


def test_the_profile_says_which_seeds_are_looked_for(names):
    assert across.kept_seeds(RUNS["linear"], SEVERAL) == [names["linear"], names["again"]]
    alone = replace(SEVERAL, seeds=(1,))
    assert across.kept_seeds(RUNS["linear"], alone) == [names["again"]]
    with pytest.raises(store.NotKept, match="test: no run of puma"):
        across.kept_seeds(RUNS["puma"], alone)
    with pytest.raises(store.NotKept, match="no run of linear"):
        across.gain(RUNS["puma"], replace(RUNS["linear"], dim=8), SEVERAL)


def test_accuracies_are_means_over_seeds_in_percent(names):
    found = across.accuracies(RUNS["linear"], SEVERAL)
    hits = [store.record(names[key], "test").hits()["digits"].mean() for key in ("linear", "again")]
    assert found["digits"] == pytest.approx(100 * np.mean(hits))


class TestRankCorrelation:
    def test_it_is_spearmans_with_an_interval_around_it(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=20)
        y = x + rng.normal(size=20)
        value, low, high = across.rank_correlation(x, y, [str(n) for n in range(20)])
        assert value == pytest.approx(stats.spearmanr(x, y).statistic)
        assert low < value < high < 1
        assert low > 0

    def test_points_of_one_group_count_once(self):
        x = np.array([1.0, 2, 3, 4, 5, 6])
        y = np.array([2.0, 1, 4, 3, 6, 5])
        alone = across.rank_correlation(x, y, list("abcdef"))
        copies = across.rank_correlation(np.tile(x, 9), np.tile(y, 9), list("abcdef") * 9)
        fooled = across.rank_correlation(
            np.tile(x, 9), np.tile(y, 9), [str(number) for number in range(54)]
        )
        width = alone[2] - alone[1]
        assert copies[2] - copies[1] == pytest.approx(width, abs=0.05)
        assert fooled[2] - fooled[1] < width / 2

    def test_too_few_have_none(self):
        assert np.isnan(across.rank_correlation([1, 2], [1, 2], ["a", "b"])).all()
        value, low, high = across.rank_correlation([1, 2, 3], [1, 2, 3], ["a", "b", "c"])
        assert value == pytest.approx(1)
        assert np.isnan([low, high]).all()


DRAWN = sorted((paths.ROOT / "results").glob("*/when_puma_wins.csv"))


@pytest.mark.parametrize("file", DRAWN, ids=lambda file: file.parent.name)
def test_every_kept_difference_is_that_of_its_runs(file, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", paths.ROOT / "results")
    table = pd.read_csv(file)
    assert len(table)
    for (profile, ours, theirs), lines in table.groupby(["profile", "ours", "theirs"]):
        again = 100 * study.contrasts.difference(ours.split(), theirs.split(), profile)
        again = again.loc[lines["dataset"], ["value", "low", "high"]]
        drawn = lines[["points", "low", "high"]]
        np.testing.assert_allclose(drawn, again, atol=1e-3, err_msg=f"{profile}: {ours}")
