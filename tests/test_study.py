"""Runs are trained once, found again, told apart, and gathered into one table."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pumalib import config, models, paths, study, training

PROFILE = config.Profile(
    "test", data=config.Data(datasets=("digits", "aircraft"), image_size=32), pretrained="random", dim=16, seeds=(0, 1),
    rank_scale=0.1, training=config.Training(epochs=1, batch_size=100, lr=1e-3),
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", tmp_path_factory.mktemp("results"))
        yield study.run_all({"Linear": PROFILE.run("linear"), "PUMA": PROFILE.run("puma")}, PROFILE)


def test_rows_become_a_table(results):
    wide = results.wide("R@1")
    assert list(wide.index) == ["Linear", "PUMA"]
    assert list(wide.columns) == ["digits", "aircraft", "unified", "harmonic"]
    assert set(results.tidy["seeds"]) == {2} and len(results.folders["PUMA"]) == 2
    assert results.parameters.loc["Linear", "trainable"] == 128 * 16 + 16
    tidy = results.tidy
    assert (tidy["low"] <= tidy["value"]).all() and (tidy["value"] <= tidy["high"]).all()
    metrics = [pd.read_json(f / "metrics.json", typ="series") for f in results.folders["PUMA"]]
    both = [pd.DataFrame(m["table"]).set_index("dataset").loc["unified", "R@1"] for m in metrics]
    assert wide.loc["PUMA", "unified"] == pytest.approx(np.mean(both))


def test_finished_runs_are_shared_and_changed_ones_are_not(results, monkeypatch):
    monkeypatch.setattr(training, "_Training", None)  # training anything fails
    monkeypatch.setattr(paths, "RESULTS", results.folders["PUMA"][0].parents[2])
    again = study.run_all({"ours": PROFILE.run("puma")}, PROFILE)
    assert again.folders["ours"] == results.folders["PUMA"]
    with pytest.raises(TypeError):
        study.run_all({"ours": PROFILE.run("puma", adapter_keep=0.3)}, PROFILE)


def test_a_saved_table_reads_back(results, monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    file = results.save("table")
    assert file == tmp_path / "test" / "table.csv"
    columns = ["row", "dataset", "metric", "value", "low", "high", "sd", "seeds", "runs", "profile", "device"]
    assert list(pd.read_csv(file).columns) == columns


def test_test_embeddings_of_a_finished_run_give_its_numbers(results):
    from pumalib import evaluation

    folder = results.folders["PUMA"][0]
    embeddings, images = study.embeddings(folder)
    table = evaluation.evaluate(embeddings, images, (1,), bootstrap=0)
    stored = pd.DataFrame(pd.read_json(folder / "metrics.json", typ="series")["table"]).set_index("dataset")
    pd.testing.assert_series_equal(table["R@1"], stored["R@1"], check_names=False)
    assert models.load(folder).run == replace(PROFILE.run("puma"), seed=0)


def test_an_ensemble_is_its_members_and_their_mean(results, monkeypatch):
    from pumalib import evaluation

    monkeypatch.setattr(paths, "RESULTS", results.folders["PUMA"][0].parents[2])
    one = replace(PROFILE, seeds=(0,))
    both = study.run_all({"specific": study.specific(one.run("linear")), "Linear": one.run("linear")}, one)
    members = study.members(both.folders["specific"][0])
    assert list(members) == ["digits", "aircraft"]
    vectors, images = zip(*(study.embeddings(folder, one.data) for folder in members.values()))
    mean = evaluation.evaluate((vectors[0] + vectors[1]) / 2, images[0], (1,), bootstrap=0)["R@1"]
    wide = both.wide().loc["specific"]
    assert wide["unified"] == pytest.approx(mean["unified"], abs=1e-6)
    own = {name: study.collect({name: [folder]}, "test").wide().loc[name, name] for name, folder in members.items()}
    assert dict(wide[["digits", "aircraft"]]) == pytest.approx(own)
    assert wide["harmonic"] == pytest.approx(2 / sum(1 / value for value in own.values()))
    assert both.parameters.loc["specific", "total"] == 2 * both.parameters.loc["Linear", "total"]


def test_side_rows_have_seeds_of_their_own(results, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", results.folders["PUMA"][0].parents[2])
    monkeypatch.setattr(training, "_Training", None)  # training anything fails
    side = study.run_all({"a": PROFILE.run("puma"), "b": PROFILE.run("linear")}, replace(PROFILE, side_seeds=(1,)), side=["a"])
    assert [len(side.folders[row]) for row in "ab"] == [1, 2] and side.folders["a"] == results.folders["PUMA"][1:]


def test_planning_tells_the_runs_and_trains_none(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    with pytest.raises(study.Planned), study.planning() as plan:
        study.run_all({"a": PROFILE.run("puma"), "b": study.specific(PROFILE.run("linear"))}, PROFILE)
    assert len(plan) == 2 + 2 * 2 and not list(tmp_path.iterdir())
    assert {run.seed for run in plan.values()} == {0, 1}


def test_a_model_that_was_not_kept_is_trained_again(results, tmp_path):
    import shutil

    folder = shutil.copytree(results.folders["Linear"][0], tmp_path / results.folders["Linear"][0].name)
    (folder / "model.safetensors").unlink()
    again, _ = study.embeddings(folder)
    before, _ = study.embeddings(results.folders["Linear"][0])
    np.testing.assert_allclose(again, before, atol=1e-5)
    assert (folder / "model.safetensors").is_file() and not (folder / "again").exists()


def test_derived_tables_are_made_once(tmp_path):
    from pumalib import analysis

    calls = []
    table = pd.DataFrame(dict(a=[1, 2], b=["x", "y"]))
    for size in (1, 1, 2):
        found = analysis.derived("t", tmp_path, lambda: calls.append(1) or table, size=size)
        pd.testing.assert_frame_equal(found, table)
    assert len(calls) == 2 and len(list((tmp_path / "derived").iterdir())) == 2


def test_few_shots_are_drawn_by_the_seed():
    data = replace(PROFILE.data, shots=2)
    one, other = (training.load_data(data, seed).train for seed in (0, 1))
    assert (one.groupby("label").size() == 2).all() and not one["path"].equals(other["path"])
    few, all_images = training.load_data(data, 1).test, training.load_data(PROFILE.data).test
    pd.testing.assert_frame_equal(few.reset_index(drop=True), all_images.reset_index(drop=True))


def test_results_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "file")
    with pytest.raises(OSError, match="cannot make .*; name another place with PUMALIB_RESULTS"):
        study.run_all({"Linear": PROFILE.run("linear")}, PROFILE)


def test_two_processes_train_a_run_once(tmp_path):
    program = (
        "import sys; from dataclasses import replace; from pumalib import config, study; "
        "p = config.Profile('two', data=config.Data(datasets=('digits', 'aircraft'), image_size=32), pretrained='random', "
        "dim=16, training=config.Training(epochs=2, batch_size=60)); study.run_all({'x': p.run('linear')}, p)"
    )
    environment = {**__import__("os").environ, "PUMALIB_RESULTS": str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=300)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert sum("batch/s" in text for text in said) == 1
