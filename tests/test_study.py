"""Runs are trained once, kept, found again, told apart, and gathered into one table; models are analysed by their names."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pumalib import config, data, evaluation, paths, study, training
from pumalib.study import analysis, store

PROFILE = config.Profile(
    "test",
    data=config.Data(datasets=("photos", "aircraft"), image_size=48),
    pretrained="random",
    dim=16,
    seeds=(0, 1),
    rank_scale=0.1,
    training=config.Training(epochs=1, batch_size=100, lr=1e-3, device="cpu"),
)
ONE = replace(PROFILE, seeds=(0,))
ROWS = {"Linear": PROFILE.run("linear"), "PUMA": PROFILE.run("puma")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", tmp_path_factory.mktemp("results"))
        study.run_all(ROWS, PROFILE)
        study.run_all({"each": study.specific(PROFILE.run("linear"))}, ONE)
        yield paths.RESULTS


@pytest.fixture
def results(trained, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", trained)
    return study.run_all(ROWS, PROFILE)


@pytest.fixture
def copied(trained, tmp_path, monkeypatch):
    """Numbers as in a fresh clone: lines and no folders."""
    (tmp_path / "test").mkdir()
    shutil.copy(trained / "test" / "kept-1.jsonl", tmp_path / "test")
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    return tmp_path / "test"


def test_rows_become_a_table(results):
    wide, tidy = results.wide("R@1"), results.tidy
    assert list(wide.index) == ["Linear", "PUMA"]
    assert list(wide.columns) == ["photos", "aircraft", "unified", "harmonic"]
    assert (
        set(tidy["seeds"]) == {2} and results.parameters.loc["Linear", "trainable"] == 128 * 16 + 16
    )
    assert (tidy["low"] <= tidy["value"]).all() and (tidy["value"] <= tidy["high"]).all()
    hits = [study.hits(name, "test")["unified"] for name in results.names["PUMA"]]
    assert len(hits) == 2 and wide.loc["PUMA", "unified"] == pytest.approx(np.mean(hits), abs=1e-7)
    columns = [
        "row",
        "dataset",
        "metric",
        "value",
        "low",
        "high",
        "sd",
        "seeds",
        "runs",
        "profile",
        "device",
    ]
    assert list(pd.read_csv(results.save("table")).columns) == columns


def test_kept_runs_are_taken_without_folders_and_changed_ones_are_trained(
    copied, results, monkeypatch
):
    monkeypatch.setattr(training, "train", None)
    monkeypatch.setattr(paths, "RESULTS", copied.parent)
    copied.chmod(0o555)  # reading needs no right to write
    try:
        again = study.run_all({"ours": ROWS["PUMA"]}, PROFILE)
    finally:
        copied.chmod(0o755)
    assert again.names["ours"] == results.names["PUMA"] and not (copied / "runs").exists()
    side = study.run_all(
        ROWS, replace(PROFILE, seeds=(1, 0, 2), side_seeds=(1,)), side=ROWS
    )  # seed 2 is not kept
    assert side.names == {row: names[::-1] for row, names in results.names.items()}
    with pytest.raises(TypeError):
        study.run_all({"ours": PROFILE.run("puma", adapter_keep=0.3)}, PROFILE)


def test_embeddings_of_a_kept_run_give_its_numbers(results):
    name = results.names["PUMA"][0]
    embeddings, images = study.embeddings(name, "test")
    table = evaluation.scores(embeddings, images, (1,)).table(0)["R@1"]
    stored = pd.DataFrame(store.record(name, "test")["table"]).set_index("dataset")["R@1"]
    pd.testing.assert_series_equal(table, stored, check_names=False)
    assert study.model(name, "test").run == study.run_of(name, "test") == ROWS["PUMA"]


def test_an_ensemble_is_its_members_and_their_mean(trained, results):
    both = study.run_all(
        {"specific": study.specific(ROWS["Linear"]), "Linear": ROWS["Linear"]}, ONE
    )
    members = dict(
        zip(
            ["photos", "aircraft"], study.store.record(both.names["specific"][0], "test")["members"]
        )
    )
    assert [study.run_of(name, "test").data.datasets for name in members.values()] == [
        ("photos",),
        ("aircraft",),
    ]
    vectors, images = zip(
        *(study.embeddings(name, "test", PROFILE.data) for name in members.values())
    )
    mean = evaluation.scores((vectors[0] + vectors[1]) / 2, images[0], (1,)).table(0)["R@1"]
    wide = both.wide().loc["specific"]
    assert wide["unified"] == pytest.approx(mean["unified"], abs=1e-6)
    own = {
        dataset: study.collect({"x": [name]}, "test").wide().at["x", dataset]
        for dataset, name in members.items()
    }
    assert dict(wide[["photos", "aircraft"]]) == pytest.approx(own)
    assert wide["harmonic"] == pytest.approx(2 / sum(1 / value for value in own.values()))
    assert both.parameters.loc["specific", "total"] == 2 * both.parameters.loc["Linear", "total"]
    with pytest.raises(store.NotKept, match="0 of 2 runs and 1 ensembles are not kept"):
        study.run_all({"mean": (ROWS["Linear"], ROWS["PUMA"])}, replace(ONE, train=False))
    with pytest.raises(ValueError, match="is an ensemble of linear-"):
        study.model(both.names["specific"][0], "test")


def test_a_model_that_was_not_kept_is_trained_again_only_on_demand(copied, results, monkeypatch):
    name, before = (
        results.names["Linear"][0],
        study.embeddings(results.names["Linear"][0], "test")[0],
    )
    monkeypatch.setattr(paths, "RESULTS", copied.parent)
    with pytest.raises(
        store.NotKept, match=f"only the numbers .*{name} .* train=True .*pumalib train {name}"
    ):
        study.embeddings(name, "test")
    np.testing.assert_allclose(study.embeddings(name, "test", train=True)[0], before, atol=1e-5)
    with pytest.raises(ValueError, match="no run 'linear-' is kept in profile 'test'; near: "):
        study.model("linear-", "test")


def test_a_plan_tells_runs_and_trains_none(results, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", None)
    rows = {
        **ROWS,
        "none": PROFILE.run("pretrained"),
        "new": study.specific(PROFILE.run("linear", dim=8)),
    }
    table = study.plan(rows, PROFILE)
    assert (
        table["kept"].tolist() == [True] * 4 + [False] * 6
        and table.loc[results.names["PUMA"][0], "hours"] > 0
    )
    images = len(data.load(PROFILE.data).train)
    assert table["images"].tolist()[:6] == [images] * 4 + [0] * 2
    assert table["hours"].notna().all()  # the speed is that of the kept linear runs
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    assert study.plan(ROWS, PROFILE)["hours"].isna().all() and not list(tmp_path.iterdir())
    run = PROFILE.run("puma", data=config.Data(benchmark="paper", root=str(tmp_path / "nothing")))
    table = study.plan({"x": study.specific(run), "y": run}, ONE)
    counts = study.printed.table(1)["train_samples"][list(study.printed.PAPER_DATASETS)].tolist()
    assert table["images"].tolist() == [*counts, sum(counts)] and not table["kept"].any()


def test_verdicts_and_printed_numbers_beside(results):
    printed = pd.DataFrame({"cub": [80.0, 70.0], "unified": [80.0, 60.0]}, index=["PUMA", "Linear"])
    difference = results.difference("PUMA", "Linear")
    assert difference.at["unified", "value"] == pytest.approx(
        results.wide()["unified"].diff()["PUMA"], abs=1e-7
    )
    said = results.differences(
        [("PUMA", "Linear"), ("PUMA", "absent"), ("PUMA", "PUMA")], printed, ("unified",)
    )
    *points, above, below = (100 * difference.loc["unified"]).tolist()
    assert said[["points", "low", "high"]].to_numpy() == pytest.approx(
        np.array([points, [0, 0, 0]]), abs=0.051
    )
    assert said["p"][0] == pytest.approx(min(above, below) / 50, abs=1e-4) and said[
        "paper"
    ].tolist() == [20, 0]
    table, values = results.beside(printed), results.wide()
    shown = study.marked(table, values).data["unified"]  # as text, with tags
    first, second = results.wide()["unified"].sort_values(ascending=False).index[:2]
    number, span, said = (
        table.at[first, "unified"]
        .replace(", ", ",&nbsp;")
        .replace("(paper ", "(paper&nbsp;")
        .split()
    )
    assert (
        number == f"{100 * values.at[first, 'unified']:.1f}"
        and study.marked(table[:0], values).data.empty
    )
    assert (
        said == f"(paper&nbsp;{printed.at[first, 'unified']:.1f})" and table.columns[0] == "seeds"
    )
    assert shown[first] == f"<b>{number}</b><br><small>{span}</small><br><small>{said}</small>"
    assert (
        shown[second].startswith("<u>")
        and study.marked(table, values).data["photos"].str.contains("<[bu]>").all()
    )
    assert study.marked(table.loc[[second]], values).data.at[second, "unified"] == shown[second], (
        "second of all rows"
    )
    told = results.headline(PROFILE, pairs=[("PUMA", "Linear")]).data
    assert (
        f"{results.wide()['harmonic'].idxmax()} {100 * results.wide()['harmonic'].max():.1f} ["
        in told.split(";")[0]
    )
    assert (
        f"PUMA over Linear {100 * results.difference('PUMA', 'Linear').at['harmonic', 'value']:+.1f} ["
        in told
    )
    for names, beside in (
        ({"photos": "cub", "aircraft": "b"}, False),
        ({"photos": "cub", "aircraft": "cars"}, True),
    ):
        renamed = replace(results, tidy=results.tidy.replace({"dataset": names})).beside(printed)
        assert (
            renamed["cub"].astype(str).str.contains("paper").all() == beside
        )  # a name alone makes no CUB


PROGRAM = """
from pumalib import config, study
p = config.Profile("two", data=config.Data(datasets=("photos", "aircraft"), image_size=48), pretrained="random", dim=16,
                   training=config.Training(epochs=4, batch_size=60, checkpoint_seconds=1e-3))
study.run_all({"x": p.run("linear")}, p)
"""


def test_two_processes_train_a_run_once_and_one_that_is_killed_goes_on(tmp_path, monkeypatch):
    def start():
        return subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True)

    monkeypatch.setenv("PUMALIB_RESULTS", str(tmp_path))
    first = start()
    deadline = time.monotonic() + 200
    while not (logs := list(tmp_path.glob("two/runs/*/log.csv"))):
        assert first.poll() is None and time.monotonic() < deadline, (
            "it ended before it could be killed"
        )
        time.sleep(0.01)
    first.kill()
    first.communicate()
    log = logs[0].read_text()  # with seconds, which no second training would repeat
    both = [start() for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert logs[0].read_text().startswith(log) and len(logs[0].read_text().splitlines()) == 5
    assert sum("epoch" in text for text in said) <= 1 and any("run 1 of 1" in text for text in said)
    (line,) = (tmp_path / "two" / "kept-1.jsonl").read_text().splitlines()
    assert len(json.loads(line)["log"]) == 4


def test_specific_models_search_their_own_dataset_and_others_all(results):
    each = study.run_all({"each": study.specific(ROWS["Linear"])}, ONE).names["each"][0]
    members = dict(zip(["photos", "aircraft"], study.store.record(each, "test")["members"]))
    names = {"PUMA": results.names["PUMA"][0], "specific": members}
    vectors, images = study.embeddings(names["PUMA"], "test")
    query = int(np.flatnonzero(images["dataset"] == "aircraft")[3])
    found = analysis.nearest(names, "test", PROFILE.data, [3, query], k=5)
    expected = evaluation.neighbours(vectors, images, [3, query], 5, within_dataset=False)
    np.testing.assert_array_equal(found["PUMA"], expected)
    own, _ = study.embeddings(names["specific"]["aircraft"], "test", PROFILE.data)
    np.testing.assert_array_equal(
        found["specific"][1:], evaluation.neighbours(own, images, [query], 5)
    )
