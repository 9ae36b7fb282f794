"""Runs are trained once, found again, told apart, and gathered into one table."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pumalib import config, models, paths, study, training
from pumalib import results as results_module

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


def test_interval_adds_both_sources_of_chance():
    one = results_module.interval(np.array([0.5]), np.array([0.4]), np.array([0.7]))
    assert (one["value"], one["low"], one["high"]) == pytest.approx((0.5, 0.4, 0.7)) and np.isnan(one["sd"])
    two = results_module.interval(np.array([0.4, 0.6]), np.array([0.3, 0.5]), np.array([0.5, 0.7]))
    half = np.hypot(0.1, 12.7062 * np.sqrt(0.02) / np.sqrt(2))  # Student's t of one degree of freedom
    assert (two["low"], two["high"]) == pytest.approx((0.5 - half, 0.5 + half))


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
