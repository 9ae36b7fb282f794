"""Rows of kept runs compared: seeds pooled over a profile's rows, ensembles, groups, profiles."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from kept_runs import add, any_name
from scipy import stats

from puma_study import contrasts, groups, store
from pumalib import config, evaluation, paths
from pumalib.evaluation import Averages

CLASSES = {"cars_196": 30, "characters": 40}
PER_CLASS = 5
RUN = json.loads(config.Profile("x", pretrained="random").run("linear").to_json())


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    any_name(monkeypatch)


def keep(row, seed, rates, profile="test", members=None, more=None):
    """Keep a run whose queries hit at a rate for each dataset, with `more` scores; its name."""
    rng = np.random.default_rng([*row.encode(), seed])
    hits = {}
    first = {}
    for name, count in CLASSES.items():
        hits[name] = (rng.random(count * PER_CLASS) < rates[name]).astype(float)
        first[name] = np.arange(count * PER_CLASS) % PER_CLASS == 0
    for parts in (hits, first):
        parts["unified"] = np.concatenate(list(parts.values()))
    means = {name: float(queries.mean()) for name, queries in hits.items()}
    own = {name: means[name] for name in CLASSES}
    table = []
    for name, mean in {**means, "harmonic": float(evaluation.averaged(own)["harmonic"])}.items():
        queries = len(hits.get(name, hits["unified"]))
        table.append({"dataset": name, "queries": queries, "R@1": mean, **(more or {})})
    record = {
        "name": f"{row}-{seed}",
        "environment": {"device": "cpu"},
        "parameters": {"trainable": 1, "total": 2},
        "seconds": 1.0,
        "images_per_second": None,
        "table": table,
        "hits": {name: evaluation.pack(queries) for name, queries in hits.items()},
        "classes": {name: evaluation.pack(queries) for name, queries in first.items()},
    }
    if members is None:
        record["run"] = RUN | {"seed": seed, "dim": 16 + sum(row.encode())}
    else:
        record["members"] = members
    return add(record, profile)


def keep_row(row, shifts, rate=0.5, profile="test"):
    """Keep a row with a seed for each shift of its rate."""
    names = []
    for seed, shift in enumerate(shifts):
        names.append(keep(row, seed, dict.fromkeys(CLASSES, rate + shift), profile))
    return names


def records(names):
    return list(store.records(names, "test").values())


def accuracies(names, profile="test"):
    """R@1 (seeds, columns) of some runs, from their hits."""
    lines = []
    for name in names:
        means = {key: hits.mean() for key, hits in store.record(name, profile).hits().items()}
        own = np.array([means[key] for key in CLASSES])
        lines.append({**means, "harmonic": 2 / (1 / own).sum()})
    return pd.DataFrame(lines)


def test_a_difference_has_the_variance_of_all_stable_rows():
    rows = {name: keep_row(name, [0, 0.02, -0.02]) for name in ("ours", "theirs", "third")}
    rows["wild"] = keep_row("wild", [0.3, -0.3, 0])
    found = contrasts.difference(rows["ours"], rows["theirs"], "test")

    variances = {name: accuracies(names).var(ddof=1) for name, names in rows.items()}
    stable = [variances[name] for name in ("ours", "theirs", "third")]
    pooled = sum(stable) / 3
    for name in ("ours", "theirs"):
        spread = contrasts.spread(records(rows[name]), "test", Averages())
        expected = np.maximum(variances[name], pooled)
        found_variance = spread.variance[expected.index]
        pd.testing.assert_series_equal(found_variance, expected, check_names=False)
        assert set(spread.dof) == {6}
    wild = contrasts.spread(records(rows["wild"]), "test", Averages())
    assert wild.variance["unified"] == pytest.approx(variances["wild"]["unified"])
    assert set(wild.dof) == {2}

    gain = accuracies(rows["ours"]) - accuracies(rows["theirs"])
    assert found["value"][gain.columns].tolist() == pytest.approx(gain.mean().tolist())
    ours, theirs = (dict(enumerate(records(rows[name]))) for name in ("ours", "theirs"))
    terms = [
        evaluation.Term({seed: record.hits() for seed, record in ours.items()}),
        evaluation.Term({seed: record.hits() for seed, record in theirs.items()}, -1),
    ]
    lone = evaluation.contrast(terms, store.classes(rows["ours"][0], "test"))
    of_classes = lone.at["unified", "error"] ** 2 - gain["unified"].var(ddof=1) / 3
    of_seeds = sum(np.maximum(variances[name], pooled)["unified"] for name in ("ours", "theirs"))
    expected = np.sqrt(of_classes + of_seeds / 3)
    assert found.at["unified", "error"] == pytest.approx(expected)


def test_a_row_may_have_the_spread_of_its_own_seeds_alone():
    """Welch's error in place of the pooled one, by hand."""
    ours = keep_row("ours", [0, 0.02, -0.02, 0.01])
    theirs = keep_row("theirs", [0, 0.1, -0.1])
    pooled = contrasts.difference(ours, theirs, "test").loc["unified"]
    own = contrasts.difference(ours, theirs, "test", own_seeds=True).loc["unified"]
    of_seeds = []
    for names in (ours, theirs):
        of_seeds.append(accuracies(names)["unified"].var(ddof=1) / len(names))
    of_classes = own["error"] ** 2 - sum(of_seeds)
    dof = own["error"] ** 4 / (of_seeds[0] ** 2 / 3 + of_seeds[1] ** 2 / 2)
    assert own["value"] == pooled["value"]
    assert of_classes == pytest.approx(own["class_error"] ** 2, abs=1e-9)
    assert own["dof"] == pytest.approx(dof)
    assert own["error"] != pooled["error"]


def test_other_metrics_are_compared_by_their_seeds():
    scores = {"ours": [0.5, 0.6, 0.7], "theirs": [0.2, 0.4], "third": [0.3, 0.3, 0.6]}
    names = {}
    for row, values in scores.items():
        names[row] = []
        for seed, value in enumerate(values):
            names[row].append(keep(row, seed, dict.fromkeys(CLASSES, 0.5), more={"MAP@R": value}))
    found = contrasts.by_seeds(names["ours"], names["theirs"], "test", "MAP@R")

    # Pooled over the three rows: squares 0.02, 0.02 and 0.06 of 2, 1 and 2 degrees of freedom.
    variance = (0.02 + 0.02 + 0.06) / 5
    error = np.sqrt(variance / 3 + variance / 2)
    width = stats.t.ppf(0.975, 5 * (1 / 3 + 1 / 2) ** 2 / (1 / 9 + 1 / 4)) * error
    line = found.loc["harmonic"]
    assert line["value"] == pytest.approx(0.6 - 0.3)
    assert line["error"] == pytest.approx(error)
    assert line["high"] - line["value"] == pytest.approx(width)
    assert set(found["seeds"]) == {2}
    with pytest.raises(contrasts.NotTestable, match="one seed"):
        contrasts.by_seeds(names["ours"], names["theirs"][:1], "test", "MAP@R")
    with pytest.raises(contrasts.NotTestable, match="share a run"):
        contrasts.by_seeds(names["ours"], names["ours"][:2], "test", "MAP@R")


def test_rows_whose_seeds_draw_the_images_help_each_other_alone(monkeypatch):
    rows = {name: keep_row(name, [0, 0.02, -0.02]) for name in ("ours", "theirs")}
    alone = contrasts.spread(records(rows["ours"]), "test", Averages())

    few = RUN | {"data": RUN["data"] | {"shots": 2}}
    monkeypatch.setattr("test_contrasts.RUN", few)
    for name in ("few", "fewer"):
        rows[name] = keep_row(name, [0, 0.04, -0.04])
    beside = contrasts.spread(records(rows["ours"]), "test", Averages())
    pd.testing.assert_series_equal(beside.variance, alone.variance)
    assert set(beside.dof) == set(alone.dof) == {4}

    variances = [accuracies(rows[name]).var(ddof=1) for name in ("few", "fewer")]
    of_few = contrasts.spread(records(rows["few"]), "test", Averages())
    expected = np.maximum(variances[0], sum(variances) / 2)
    found = of_few.variance[expected.index]
    pd.testing.assert_series_equal(found, expected, check_names=False)
    assert set(of_few.dof) == {4}

    before = {key: value for key, value in RUN["data"].items() if key != "shots"}
    monkeypatch.setattr("test_contrasts.RUN", RUN | {"data": before})
    keep_row("before-shots", [0, 0.02, -0.02])
    with_older = contrasts.spread(records(rows["ours"]), "test", Averages())
    assert set(with_older.dof) == {6}


@pytest.mark.parametrize("profile", ["photos-8", "photos", "mini"])
def test_kept_rows_with_few_images_lie_farther_apart(profile, monkeypatch):
    """Why they help each other alone (docs/protocol-changes.md): F over the kept rows."""
    monkeypatch.setattr(paths, "RESULTS", paths.ROOT / "results")
    found = []
    for record in store.read(profile).values():
        if record.members is not None:
            continue
        row = replace(record.settings, seed=0).fingerprint("", "")
        few = record.settings.data.shots > 0
        found.append((few, row, str(record.queries), record.accuracy("unified")))
    table = pd.DataFrame(found, columns=["few", "row", "queries", "accuracy"])
    # The benchmark's own test images: those with which few images were tried.
    own = table.loc[table["few"], "queries"].mode()[0]
    table = table[table["queries"] == own]

    pooled = {}
    for few, rows in table.groupby("few"):
        seeds_of = rows.groupby("row")["accuracy"]
        squares = (seeds_of.transform("mean") - rows["accuracy"]).pow(2).sum()
        pooled[few] = (squares, len(rows) - seeds_of.ngroups)
    variances = {few: squares / freedom for few, (squares, freedom) in pooled.items()}
    ratio = variances[True] / variances[False]
    assert ratio > 5
    assert stats.f.sf(ratio, pooled[True][1], pooled[False][1]) < 1e-10


def test_seeds_of_a_row_that_were_kept_before_a_setting_are_of_the_row(monkeypatch):
    ours = keep_row("ours", [0, 0.1])
    older = {key: value for key, value in RUN.items() if key != "data"}
    older["data"] = {key: value for key, value in RUN["data"].items() if key != "split"}
    assert older != RUN
    monkeypatch.setattr("test_contrasts.RUN", older)
    ours.append(keep("ours", 2, dict.fromkeys(CLASSES, 0.4)))
    spread = contrasts.spread(records(ours), "test", Averages())
    assert set(spread.dof) == {2}
    expected = accuracies(ours)["unified"].var(ddof=1)
    assert spread.variance["unified"] == pytest.approx(expected)


def test_a_row_beside_itself_has_no_spread_and_a_new_run_is_seen():
    ours = keep_row("ours", [0, 0.05, -0.05])
    same = contrasts.difference(ours, ours, "test")
    assert (same[["value", "low", "high"]] == 0).all(axis=None)
    theirs = keep_row("theirs", [0, 0, 0])
    before = contrasts.difference(ours, theirs, "test").at["unified", "error"]
    keep_row("third", [0.1, -0.1, 0])
    assert contrasts.difference(ours, theirs, "test").at["unified", "error"] != before


def test_an_ensemble_is_judged_over_all_choices_of_its_members():
    ours = keep_row("ours", [0, 0, 0])
    names = []
    for seed, (cars, characters) in enumerate([(0.2, 0.8), (0.5, 0.5), (0.8, 0.2)]):
        member = keep("member", seed, dict.fromkeys(CLASSES, 0.5))
        rates = {"cars_196": cars, "characters": characters}
        names.append(keep("both", seed, rates, members=[member]))
    table = accuracies(names)
    spread = contrasts.spread(records(names), "test", Averages())
    choices = [2 / (1 / a + 1 / b) for a in table["cars_196"] for b in table["characters"]]
    assert spread.value["harmonic"] == pytest.approx(np.mean(choices), abs=0.02)
    # Seed by seed one member's luck would make up for the other's.
    assert spread.variance["harmonic"] > 3 * table["harmonic"].var(ddof=1)
    assert spread.variance["unified"] == pytest.approx(table["unified"].var(ddof=1))
    found = contrasts.difference(names, ours, "test")
    expected = spread.value["harmonic"] - accuracies(ours)["harmonic"].mean()
    assert found.at["harmonic", "value"] == pytest.approx(expected)


def test_an_interaction_is_of_two_profiles_with_the_same_queries():
    by_profile = {}
    for profile, gain in (("printed", 0.3), ("reversed", 0.0)):
        ours = []
        for seed in range(3):
            rates = {"cars_196": 0.4, "characters": 0.4 + gain}
            ours.append(keep(f"ours-{profile}", seed, rates, profile))
        theirs = keep_row(f"theirs-{profile}", [0, 0, 0], 0.4, profile)
        by_profile[profile] = (ours, theirs)
    ours, theirs = zip(*by_profile.values(), strict=True)
    found = contrasts.interaction(ours, theirs, list(by_profile), ["cars_196"])
    line = found.loc["small - large"]
    single = [
        contrasts.difference(*rows, profile, Averages(large=("cars_196",)))
        for profile, rows in by_profile.items()
    ]
    one, other = (table.at["small - large", "value"] for table in single)
    assert line["value"] == pytest.approx(one - other)
    assert line["value"] == pytest.approx(0.3, abs=0.1) and line["p_greater"] < 0.01
    assert line["error"] > max(table.at["small - large", "error"] for table in single)


def test_rows_of_other_queries_are_refused(monkeypatch):
    ours = keep_row("ours", [0, 0])
    monkeypatch.setitem(CLASSES, "characters", 20)
    theirs = keep_row("theirs", [0, 0])
    with pytest.raises(contrasts.NotTestable, match="ours-0 and theirs-0 were tested on other"):
        contrasts.difference(ours, theirs, "test")


# ---- groups


@pytest.mark.parametrize(
    ("dataset", "class_name", "group"),
    [
        ("cars_196", "001_AM_General_Hummer_SUV_2000", "AM"),
        ("cars_196", "196_smart_fortwo_Convertible_2012", "smart"),
        ("cars_196", "160_Mercedes-Benz_300-Class_Convertible_1993", "Mercedes-Benz"),
        ("characters_omniglot", "Alphabet_of_the_Magi_character01", "Alphabet_of_the_Magi"),
        ("birds_cub50", "049_Boat_tailed_Grackle", "Grackle"),
        ("birds_cub50", "001_Bobolink", "Bobolink"),
        ("emoji_emojione", "1f460", "1f460"),
    ],
)
def test_the_group_of_a_class_is_in_its_name(dataset, class_name, group):
    assert groups.group_of(dataset, class_name) == group


@pytest.mark.parametrize("class_name", ["", "Hummer", "001_", "character01"])
def test_a_name_without_a_group_is_refused(class_name):
    with pytest.raises(ValueError, match=r"has no group by .*: mend data/photos/groups.yaml"):
        groups.group_of("cars_196", class_name)


@pytest.fixture
def loaded(monkeypatch):
    """Test images as of `keep`: a make has three models, and a class without a second image."""
    lines = []
    for dataset, count in CLASSES.items():
        for number in range(count):
            name = f"{number:03d}_Make{number // 3}_Model_{number}"
            lines += [(dataset, number, name)] * PER_CLASS
    lines.append(("characters", 999, "alone"))
    test = pd.DataFrame(lines, columns=["dataset", "label", "class_name"]).assign(split="test")
    benchmark = SimpleNamespace(test=test)
    monkeypatch.setattr(groups.data, "load", lambda settings: benchmark)
    return benchmark


def test_queries_are_numbered_by_their_groups(loaded):
    (name,) = keep_row("ours", [0])
    found = groups.numbers(name, "test")
    assert found["cars_196"].tolist() == (np.arange(30 * PER_CLASS) // (3 * PER_CLASS)).tolist()
    # Without groups its classes, numbered after the others.
    assert found["characters"].tolist() == (10 + np.arange(40 * PER_CLASS) // PER_CLASS).tolist()
    assert found["unified"].tolist() == [*found["cars_196"], *found["characters"]]


def test_groups_are_drawn_with_all_their_classes(loaded):
    # All classes of a make hit or miss together: their number says nothing.
    rates = {"cars_196": np.repeat(np.arange(10) % 2, 3 * PER_CLASS), "characters": 0.5}
    names = [keep("ours", seed, rates) for seed in range(2)]
    row = contrasts.Row(tuple(names), "test")
    by_class = contrasts.contrast([row]).loc["cars_196"]
    by_group = contrasts.contrast([row], units=groups.numbers).loc["cars_196"]
    assert by_group["value"] == by_class["value"] == 0.5
    assert by_class["error"] == pytest.approx(0.5 / np.sqrt(30), rel=0.1)
    assert by_group["error"] == pytest.approx(0.5 / np.sqrt(10), rel=0.1)


def test_as_many_queries_in_classes_of_other_sizes_are_not_compared():
    ours = keep_row("ours", [0])
    content = store.record(ours[0], "test").content()
    first = {name: np.arange(count * PER_CLASS) % PER_CLASS == 0 for name, count in CLASSES.items()}
    first["cars_196"][1] = True
    first["unified"] = np.concatenate(list(first.values()))
    packed = {name: evaluation.pack(flags) for name, flags in first.items()}
    theirs = [add({**content, "name": "theirs-0", "classes": packed}, "test")]
    with pytest.raises(contrasts.NotTestable, match="ours-0 and theirs-0 were tested on other"):
        contrasts.difference(ours, theirs, "test")


def test_other_images_than_those_kept_are_refused(loaded):
    (name,) = keep_row("ours", [0])
    loaded.test = loaded.test[1:]
    with pytest.raises(ValueError, match="cars_196: today's images have other queries than test/"):
        groups.numbers(name, "test")


def test_a_difference_over_splits_is_their_mean_with_students_t():
    tables = []
    for unified, harmonic in [(1.0, -2.0), (3.0, -2.5), (2.0, -1.5)]:
        points = {"unified": unified, "harmonic": harmonic}
        tables.append(pd.DataFrame({"points": points}))
    found = contrasts.over_splits(tables)
    # The standard deviation of 1, 2, 3 is 1; Student's t of two degrees of freedom is 4.303.
    half_width = 4.3027 / np.sqrt(3)
    assert found.loc["unified", "points"] == pytest.approx(2)
    assert found.loc["unified", "low"] == pytest.approx(2 - half_width, abs=1e-4)
    assert found.loc["unified", "high"] == pytest.approx(2 + half_width, abs=1e-4)
    assert found.loc["harmonic", "high"] == pytest.approx(-2 + half_width / 2, abs=1e-4)
    assert (found["seeds"] == 3).all()
    with pytest.raises(ValueError, match="one split of the classes says nothing"):
        contrasts.over_splits(tables[:1])


def test_an_interval_over_four_splits_covers_what_all_splits_would_give():
    """Drawn: classes with effects of their own, halves of them to test on, and seeds."""
    rng = np.random.default_rng(0)
    trials = 2000
    effects = rng.normal(1.0, 6.0, (trials, 40))
    truth = effects.mean(axis=1)
    on_splits = []
    for _ in range(4):
        order = rng.random((trials, 40)).argsort(axis=1)
        tested = np.take_along_axis(effects, order[:, :20], axis=1)
        of_training = rng.normal(0.0, 0.8, trials)
        on_splits.append(tested.mean(axis=1) + of_training)
    tables = [pd.DataFrame({"points": points}) for points in on_splits]
    found = contrasts.over_splits(tables)
    covered = (found["low"] <= truth) & (truth <= found["high"])
    # Two standard errors of a share of 2,000 are one point.
    assert covered.mean() == pytest.approx(0.95, abs=0.015)
