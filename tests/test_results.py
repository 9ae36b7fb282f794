"""Intervals and differences of finished runs, against plain loops over what was stored."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pumalib import evaluation, results, training

QUERIES = {"a": 40, "b": 60}


def made_run(folder, rates, seed):
    """A finished run whose queries hit at these rates, by dataset."""
    rng = np.random.default_rng(seed)
    values = {name: (rng.random((count, 1)) < rates[name]).astype(float) for name, count in QUERIES.items()}
    values["unified"] = np.concatenate(list(values.values()))
    full = {name: np.repeat(v, len(results.METRIC_ORDER), axis=1) for name, v in values.items()}
    folder.mkdir(parents=True)
    scores = evaluation.Scores(tuple(results.METRIC_ORDER), full, dict.fromkeys(full, 0))
    training.finish(folder, scores, trainable=1, total=2, seconds=3.0, images_per_second=4.0)
    (folder / "environment.json").write_text(json.dumps(dict(device="cpu")))
    return folder


@pytest.fixture
def made(tmp_path):
    rates = {"good": dict(a=0.9, b=0.8), "poor": dict(a=0.5, b=0.5), "same": dict(a=0.9, b=0.8)}
    folders = {
        row: [made_run(tmp_path / f"{row}-{seed}", rate, seed) for seed in range(3)] for row, rate in rates.items()
    }
    return results.collect(folders, "test")


def test_hits_are_those_of_the_queries(made):
    for folder in made.folders["good"]:
        table = pd.DataFrame(json.loads((folder / "metrics.json").read_text())["table"]).set_index("dataset")
        for name, hit in results.hits(folder).items():
            assert set(hit) <= {0, 1} and hit.mean() == pytest.approx(table.at[name, "R@1"], abs=1e-8)


def test_a_difference_is_taken_in_pairs(made):
    difference = made.difference("good", "poor")
    wide = made.wide()
    expected = wide.loc["good"] - wide.loc["poor"]
    np.testing.assert_allclose(difference.loc[["a", "b", "unified"], "value"], expected[["a", "b", "unified"]], atol=1e-7)
    pairs = [[results.hits(f) for f in seed] for seed in zip(made.folders["good"], made.folders["poor"])]
    harmonic = np.mean([2 / (1 / g["a"].mean() + 1 / g["b"].mean()) - 2 / (1 / p["a"].mean() + 1 / p["b"].mean()) for g, p in pairs])
    assert difference.at["harmonic", "value"] == pytest.approx(harmonic)
    # The bootstrap over queries, in a plain loop, and the spread of the seeds
    rng = np.random.default_rng(1)
    gains = []
    for _ in range(2000):
        drawn = rng.integers(QUERIES["a"], size=QUERIES["a"])
        gains.append(np.mean([g["a"][drawn].mean() - p["a"][drawn].mean() for g, p in pairs]))
    seeds = [g["a"].mean() - p["a"].mean() for g, p in pairs]
    spread = 4.3027 * np.std(seeds, ddof=1) / 3**0.5  # Student's t of two degrees of freedom
    low = difference.at["a", "value"] - np.hypot(difference.at["a", "value"] - np.percentile(gains, 2.5), spread)
    assert difference.at["a", "low"] == pytest.approx(low, abs=0.02)


def test_a_model_does_not_differ_from_its_copy(made):
    difference = made.difference("good", "same")  # the same seeds drew the same hits
    assert (difference[["value", "low", "high"]] == 0).all(axis=None) and set(difference["verdict"]) == {"open"}


def test_verdicts_say_what_the_interval_allows(made):
    one = replace(made, folders={row: folders[:1] for row, folders in made.folders.items()})
    printed = pd.DataFrame(dict(unified=[80.0, 60.0]), index=["good", "poor"])
    said = one.verdicts([("good", "poor"), ("poor", "good"), ("good", "same"), ("good", "absent")], printed, ("unified",))
    assert list(said["here"]) == ["holds", "FAILS", "open"]
    assert list(said["paper"]) == ["+20.0", "-20.0", ""]


def test_beside_puts_measured_printed_and_difference_together(made):
    printed = pd.DataFrame(dict(cub=[80.0], unified=[70.0], harmonic=[75.0]), index=["good"])
    table = made.beside(printed)
    assert list(table.index) == ["good", "poor", "same"]
    measured = 100 * made.wide().loc["good"]
    assert table.at["good", "unified, difference"] == pytest.approx(measured["unified"] - 70, abs=0.051)
    assert table.at["good", "unified"].startswith(f"{measured['unified']:.1f} [")
    assert np.isnan(table.at["poor", "unified, paper"])
    for names, beside in (({"a": "cub"}, False), ({"a": "cub", "b": "cars"}, True)):  # a name alone makes no CUB
        renamed = replace(made, tidy=made.tidy.replace({"dataset": names})).beside(printed)
        assert ("cub, paper" in renamed) == beside
    assert renamed.at["good", "cub, difference"] == pytest.approx(measured["a"] - 80, abs=0.051)


def test_interval_adds_both_sources_of_chance():
    one = results.interval(np.array([0.5]), np.array([0.4]), np.array([0.7]))
    assert (one["value"], one["low"], one["high"]) == pytest.approx((0.5, 0.4, 0.7)) and np.isnan(one["sd"])
    two = results.interval(np.array([0.4, 0.6]), np.array([0.3, 0.5]), np.array([0.5, 0.7]))
    half = np.hypot(0.1, 12.7062 * np.sqrt(0.02) / np.sqrt(2))  # Student's t of one degree of freedom
    assert (two["low"], two["high"]) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-4)
