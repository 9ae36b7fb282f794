"""Readings: whether the effect that the paper prints is still possible, by constructed numbers."""

import math

import pandas as pd
import pytest
from test_paper import FULL, study_of

from puma_study import claims, reading

__all__ = ["study_of"]  # a fixture


@pytest.mark.parametrize(
    ("low", "high", "paper", "expected"),
    [
        (1.0, 3.0, 2.0, "as printed"),
        (1.0, 3.0, 3.1, "as printed"),  # to the rounding of two printed numbers
        (1.0, 3.0, 3.2, "smaller than printed"),
        (1.0, 3.0, 0.5, "larger than printed"),
        (-3.0, -1.0, 2.0, "opposite"),
        (-1.0, 1.0, 2.0, "no clear difference, printed effect excluded"),
        (-1.0, 3.0, 2.0, "too uncertain to say"),
        # A print below 0, where the paper's own table fails the claim.
        (-3.0, -1.0, -2.0, "as printed"),
        (-3.0, -1.0, -0.5, "larger than printed"),
        (-3.0, -1.0, -5.0, "smaller than printed"),
        (1.0, 3.0, -2.0, "opposite"),
        # A print of 0, to its rounding.
        (-0.3, -0.05, 0.0, "as printed"),
        (0.05, 0.3, 0.0, "as printed"),
        # No size is printed.
        (1.0, 3.0, math.nan, "as claimed"),
        (-3.0, -1.0, math.nan, "opposite"),
        (-1.0, 3.0, math.nan, "too uncertain to say"),
    ],
)
def test_a_reading_is_of_the_interval_and_the_print(low, high, paper, expected):
    assert reading.reading(low, high, paper) == expected
    assert expected in reading.READINGS


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.5, 3.0, "as claimed"),
        (-3.0, -1.5, "as claimed"),
        (-0.5, 0.9, "opposite"),
        (0.2, 1.5, "too uncertain to say"),
    ],
)
def test_sensitive_is_read_by_its_distance_from_0(low, high, expected):
    assert reading.reading_apart(low, high, 1.0) == expected


def test_every_claim_has_a_reading_or_a_reason(study_of):
    rows = FULL | {"PUMA": 0.4, "LoRA": 0.6, "VPT": 0.2}
    card = study_of(main_results=rows)
    read = reading.readings(study_of.profile)
    assert list(read.index) == list(card.index)
    assert set(read["reading"]) <= set(reading.READINGS)
    is_run = read["reading"] != "not run"
    assert (read.loc[~is_run, "reason"].str.len() > 0).all()
    assert (read["needs"].str.len() > 0).all()
    assert (read.loc[is_run, "ours"].str.len() > 0).all()
    pd.testing.assert_series_equal(read["here"], card["here"])

    line = read.loc["beats-universal"]
    assert line["pair"] == "PUMA over universal CurricularFace"
    assert (line["reading"], line["here"]) == ("opposite", "contradicted")
    assert line["paper"] in (3.4, 4.6)
    assert line["reason"] == "not run here: universal * (8 of 9)"
    assert line["needs"] == "decided"

    pairs = reading.pair_readings(study_of.profile)
    of_claim = pairs[pairs["name"] == "beats-efficient"]
    assert len(of_claim) == 4
    of_vpt = of_claim[of_claim["rival"] == "VPT"]
    assert set(of_vpt["reading"]) <= {"as printed", "smaller than printed", "larger than printed"}


def test_seeds_that_would_decide_follow_from_the_error(monkeypatch):
    monkeypatch.setattr(reading, "_hours", lambda names, seeds, profile: 2.0)
    runs = claims.Kept("test", {2: pd.Series({"a": ["1", "2", "3"], "b": ["4", "5", "6"]})})
    claim = claims.read_claims()[0]
    line = {"statement": 0, "row": "a", "rival": "b", "value": 2.0, "error": 1.0, "dof": 1000.0}
    line["apart"] = math.nan
    of_seeds_alone = pd.Series(line | {"class_error": 0.0})
    # 2 = (1.96 + 0.84) sqrt(3 / seeds), so that 5.9 seeds find it in four of five.
    said = reading._seeds_needed(claim, of_seeds_alone, runs, 0.05)
    assert said.startswith("about 6 seeds a row, were the difference as found; 2 h of")
    # Farther from 0 than 1 by as much.
    farther = of_seeds_alone.copy()
    farther[["value", "apart"]] = [-3.0, 1.0]
    assert reading._seeds_needed(claim, farther, runs, 0.05) == said
    # With 5 and 3 seeds the variance is 8/15 of a run's, with 8 and 8 it is 1/4.
    unlike = claims.Kept("test", {2: pd.Series({"a": list("12345"), "b": list("678")})})
    said = reading._seeds_needed(claim, of_seeds_alone, unlike, 0.05)
    assert said.startswith("about 8 seeds a row")
    of_classes = pd.Series(line | {"class_error": 0.99})
    assert "more test classes" in reading._seeds_needed(claim, of_classes, runs, 0.05)
