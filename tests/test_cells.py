"""What cells of notebooks have in common."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

import puma_study as study
from puma_study import store
from puma_study.text import excluding_zero
from pumalib import config, paths

KNOWN = ["frozen", "full", "puma"]


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    return tmp_path


def test_a_notebook_begins_with_its_profile_and_its_folder(results, capsys):
    profile, out = study.begin("smoke", {"epochs": 3})
    assert profile == config.profile("smoke", epochs=3)
    assert out == results / "smoke"
    assert capsys.readouterr().out.startswith("torch ")


def test_what_is_run_by_hand_changes_nothing_that_is_kept(results, monkeypatch):
    monkeypatch.delenv(store.KEEPS, raising=False)
    assert store.output_folder("mini") == results / "mini"
    monkeypatch.setattr("IPython.get_ipython", object)
    assert store.output_folder("mini") == results / "mini" / "lab"
    assert study.begin("smoke", {})[1] == results / "smoke" / "lab"
    monkeypatch.setenv(store.KEEPS, "yes")
    assert store.output_folder("mini") == results / "mini"

    ignored = (paths.ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert f"results/*/{store.BY_HAND}/" in ignored


def test_rows_are_those_asked_for_a_few_in_smoke_or_all():
    smoke, mini = config.profile("smoke"), config.profile("mini")
    assert study.chosen("row", None, KNOWN, mini, smoke=["puma"]) == KNOWN
    assert study.chosen("row", None, KNOWN, smoke, smoke=["puma"]) == ["puma"]
    assert study.chosen("row", ["full"], KNOWN, smoke, smoke=["puma"]) == ["full"]
    with pytest.raises(ValueError, match="unknown row 'ful'; known: frozen, full, puma"):
        study.chosen("row", ["ful"], KNOWN, mini, smoke=["puma"])


def test_a_table_is_written_and_named(results, capsys):
    table = pd.DataFrame({"x": [1 / 3]}, index=["a"])
    study.save_table(table, results / "plain.csv", "%.2f")
    study.save_table(table, results / "named.csv", index=True)
    assert (results / "plain.csv").read_text() == "x\n0.33\n"
    assert (results / "named.csv").read_text() == ",x\na,0.3333333333333333\n"
    assert capsys.readouterr().out.count("table ") == 2


def test_a_figure_is_written_and_shown(results, monkeypatch):
    seen = []
    monkeypatch.setattr("IPython.display.display", seen.append)
    figure = plt.figure()
    study.show_figure(figure, results / "figure.png")
    assert seen == [figure]
    assert (results / "figure.png").is_file()


def test_differences_whose_interval_excludes_zero_are_named_by_their_sign():
    table = pd.DataFrame(
        [("a", "harmonic", 1, 3), ("b", "unified", -1, 1), ("c", "unified", 0, 2)],
        columns=["difference", "of", "low", "high"],
    )
    assert excluding_zero(table, "gains", "loses").splitlines() == [
        "gains, by an interval that excludes 0, in 1 of 3: a, harmonic",
        "loses, by an interval that excludes 0, in 0 of 3: none",
    ]
