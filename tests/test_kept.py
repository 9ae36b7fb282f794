"""`results/<profile>/kept-*.jsonl`: whole or damaged, written by several at once; and `python -m pumalib runs` on top of it."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from filelock import FileLock

from pumalib import config, evaluation, paths, study
from pumalib.__main__ import main
from pumalib.study import kept
from pumalib.training import run_folder

QUERIES = {"digits": 40, "aircraft": 60}
DATA = config.Data(datasets=tuple(QUERIES), image_size=48)
PROFILE = config.Profile("test", data=DATA, pretrained="random", training=config.Training(epochs=3))
RUNS = {name: PROFILE.run(name) for name in ("linear", "puma")} | {"again": PROFILE.run("linear", seed=1)}


def made(run, seed, rate):
    """A finished run's folder whose queries hit at this rate."""
    rng, metrics = np.random.default_rng(seed), [f"R@{k}" for k in evaluation.KS] + ["RP", "MAP@R"]
    values = {name: (rng.random((count, 1)) < rate).astype(float) for name, count in QUERIES.items()}
    values["unified"] = np.concatenate(list(values.values()))
    full = {name: np.repeat(v, len(metrics), axis=1) for name, v in values.items()}
    run_folder.make(folder := kept.folder(study.run_name(run), "test"))
    (folder / kept.MODEL).touch()
    (folder / "run.json").write_text(run.to_json())
    classes = {name: np.arange(len(v)) // 4 for name, v in full.items()}
    scores = evaluation.Scores(tuple(metrics), full, classes, dict.fromkeys(full, 0))
    table = scores.table().reset_index(names="dataset").to_dict("records")
    record = {"run": json.loads(run.to_json()), "environment": {"device": "cpu"}, "log": [], "images_per_second": 4.0}
    record |= {"parameters": {"trainable": 1, "total": 2}, "seconds": 1 / 3, "table": table, **scores.packed()}
    (folder / "metrics.json").write_text(json.dumps(record))
    return folder


def finish(folder):
    with kept.held(folder):
        pass


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Three kept runs by what they are, without folders."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    folders = {key: made(run, seed, 0.9 - 0.3 * seed) for seed, (key, run) in enumerate(RUNS.items())}
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(finish, folders.values()))
    shutil.rmtree(tmp_path / "test" / "runs")
    return {key: folder.name for key, folder in folders.items()}


def call(capsys, *argv):
    status = main(["runs", *argv])
    return status, *capsys.readouterr()


def test_lines_are_sorted_whole_of_eight_digits_and_fill_files(names, monkeypatch):
    file = paths.RESULTS / "test" / "kept-1.jsonl"
    assert [json.loads(line)["name"] for line in file.read_text().splitlines()] == sorted(names.values())
    monkeypatch.setattr(kept, "FULL", 3)
    kept.add({"name": "fourth"}, "test")
    second = file.with_name("kept-2.jsonl")
    file.write_text(file.read_text() + second.read_text())  # in both, as after a merge
    kept.remove("fourth", "test")
    assert kept.read("test").keys() == set(names.values()) and second.read_text() == ""
    record = kept.read("test")[names["puma"]]
    assert record["seconds"] == 0.33333333 and record["log"] == [] and "metrics" not in record
    assert study.run_of(names["puma"], "test") == RUNS["puma"]
    assert study.hits(names["puma"], "test")["unified"].mean() == pytest.approx(record["table"][2]["R@1"], abs=1e-7)


def test_list_filters_by_any_setting(names, capsys):
    table = study.runs("test")
    assert table.loc[names["again"], ["method", "seed", "epochs"]].tolist() == ["linear", 1, 3]
    assert table.loc[names["puma"], "data.image_size"] == 48
    r1 = kept.record(names["puma"], "test")["table"][2]["R@1"]
    assert table.loc[names["puma"], "unified"] == pytest.approx(100 * r1)
    status, out, _ = call(capsys, "list", "--query", "method == 'linear' and `training.lr` < 1")
    assert status == 0 and names["linear"] in out and names["again"] in out and names["puma"] not in out
    status, _, err = call(capsys, "list", "--query", "metod == 'linear'")
    assert status == 2 and "metod" in err and "method" in err
    assert call(capsys, "list", "--profile", "none")[1] == "no runs\n"


def test_compare_gives_settings_and_the_paired_difference(names, capsys):
    settings, table = kept.compare(names["linear"], f"test/{names['again']}")
    assert settings.T.to_dict("list") == {"seed": [0, 1]}
    first, second = (study.hits(names[key], "test")["unified"].mean() for key in ("linear", "again"))
    assert table.at["unified", "value"] == pytest.approx(100 * (second - first))
    assert table.at["unified", "high"] < 0
    assert call(capsys, "compare", names["linear"], names["puma"])[0] == 0
    status, _, err = call(capsys, "compare", names["linear"], "pum")
    assert status == 2 and "no run is called 'pum'" in err


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_verify_finds_what_is_wrong_and_goes_on(names, capsys):
    assert call(capsys, "verify") == (0, "no problem\n", "")
    file = paths.RESULTS / "test" / "kept-1.jsonl"
    changed = kept.read("test")[names["linear"]]
    call(capsys, "remove", names["linear"], "--yes")
    kept.add(changed | {"run": changed["run"] | {"dim": 17}}, "test")
    line = kept.lines("test")[1][names["again"]]
    file.write_text(file.read_text().replace(line, line.replace('"R@8": 0.', '"R@8": 1.', 1)))  # one digit
    run_folder.make(folder := kept.folder(names["puma"], "test"))
    (folder / kept.MODEL).write_bytes(b"no model")
    status, out, _ = call(capsys, "verify")
    assert status == 1 and f"{names['again']}: damaged line" in out and "SafetensorError" in out
    assert f"{names['linear']}: outdated:" in out
    file.write_text(f"<<<<<<< ours\n{file.read_text()}")
    kept.add({"name": "another"}, "test")  # leaves damaged lines where they are
    lines = file.read_text().splitlines()
    assert len(lines) == 5 and set(kept.read("test")) == {names["linear"], names["puma"], "another"}
    assert call(capsys, "remove", f"line {lines.index('<<<<<<< ours') + 1} of kept-1.jsonl", "--yes")[0] == 0
    assert file.read_text().splitlines() == [line for line in lines if line != "<<<<<<< ours"]


def test_remove_says_first_and_leaves_what_a_process_holds(names, capsys):
    folder = made(RUNS["puma"], 1, 0.5)
    assert "would remove (add --yes) test/" in call(capsys, "remove", names["puma"])[1] and folder.is_dir()
    with FileLock(folder / ".lock"):
        assert "a running process holds it" in call(capsys, "remove", names["puma"], "--yes")[1]
    assert names["puma"] in kept.read("test")
    status, _out, _ = call(capsys, "remove", names["puma"], names["linear"], "--yes")
    assert status == 0 and not folder.exists() and set(kept.read("test")) == {names["again"]}
    assert call(capsys, "remove", names["puma"], "--yes")[0] == 2


def test_errors_are_one_line_and_unknown_commands_usage(capsys):
    assert main(["data", "download", "cubb"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown dataset 'cubb'; known: ")
    assert main(["dance"]) == 2 and main(["runs", "remove"]) == 2 and "Traceback" not in capsys.readouterr().err
