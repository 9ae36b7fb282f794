"""Rows given by their settings are compared over the seeds that are kept of each."""

from dataclasses import replace

import kept_runs
import numpy as np
import pandas as pd
import pytest
from kept_runs import RUNS

from puma_study import contrasts, store
from pumalib import evaluation, paths

SEVERAL = replace(kept_runs.PROFILE, seeds=(0, 1))


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Three kept runs: linear at seeds 0 and 1, PUMA at seed 0."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    return kept_runs.keep_three()


def test_a_difference_with_a_row_of_one_seed_is_of_that_seed(names):
    gain = contrasts.kept_difference(RUNS["puma"], RUNS["linear"], SEVERAL)
    expected = contrasts.difference([names["puma"]], [names["linear"]], "test")
    assert gain["points"].to_numpy() == pytest.approx(100 * expected["value"].to_numpy())
    assert set(gain["seeds"]) == {1}
    assert set(gain["ours"]) == {names["puma"]}
    assert set(gain["theirs"]) == {f"{names['linear']} {names['again']}"}

    hits = [
        store.record(names[key], "test").hits()["aircraft"].mean() for key in ("puma", "linear")
    ]
    assert gain.at["aircraft", "points"] == pytest.approx(100 * (hits[0] - hits[1]))


def test_an_interaction_is_one_difference_minus_another(names):
    """Under two lists; here the second is the first with the rows exchanged."""
    puma, linear = RUNS["puma"], RUNS["linear"]
    gain = contrasts.kept_difference(
        puma, linear, SEVERAL, evaluation.Averages(large=("aircraft",))
    )
    found = contrasts.kept_interaction(
        [puma, linear], [linear, puma], [SEVERAL, SEVERAL], ["aircraft"]
    )
    assert list(found.index) == list(gain.index)
    assert found["points"].to_numpy() == pytest.approx(2 * gain["points"].to_numpy())
    assert set(found["seeds"]) == {1}
    small, large = gain.at["digits", "points"], gain.at["aircraft", "points"]
    assert found.at["small - large", "points"] == pytest.approx(2 * (small - large))


def test_the_profile_says_which_seeds_are_looked_for(names):
    both = {0: names["linear"], 1: names["again"]}
    assert contrasts.kept_seeds(RUNS["linear"], SEVERAL) == both
    alone = replace(SEVERAL, seeds=(1,))
    assert contrasts.kept_seeds(RUNS["linear"], alone) == {1: names["again"]}
    with pytest.raises(store.NotKept, match="test: no run of puma"):
        contrasts.kept_seeds(RUNS["puma"], alone)
    with pytest.raises(store.NotKept, match="no run of linear"):
        contrasts.kept_difference(RUNS["puma"], replace(RUNS["linear"], dim=8), SEVERAL)


def test_accuracies_are_means_over_seeds_in_percent(names):
    found = contrasts.kept_accuracies(RUNS["linear"], SEVERAL)
    hits = [store.record(names[key], "test").hits()["digits"].mean() for key in ("linear", "again")]
    assert found["digits"] == pytest.approx(100 * np.mean(hits))


DRAWN = sorted((paths.ROOT / "results").glob("*/when_puma_wins.csv"))


@pytest.mark.parametrize("file", DRAWN, ids=lambda file: file.parent.name)
def test_every_kept_difference_is_that_of_its_runs(file, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", paths.ROOT / "results")
    table = pd.read_csv(file)
    assert len(table)
    remedy = f"python -m puma_study run 19 --kept --profile {file.parent.name}"
    for (profile, ours, theirs), lines in table.groupby(["profile", "ours", "theirs"]):
        again = 100 * contrasts.difference(ours.split(), theirs.split(), profile)
        again = again.loc[lines["dataset"], ["value", "low", "high"]]
        drawn = lines[["points", "low", "high"]]
        message = f"{profile}: {ours}; to draw it anew: {remedy}"
        np.testing.assert_allclose(drawn, again, atol=1e-3, err_msg=message)
