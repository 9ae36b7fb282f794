"""`python -m pumalib runs`: what it lists, compares, finds wrong and takes away, on real tiny runs."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from filelock import FileLock
from test_study import PROFILE

from pumalib import config, paths, runs, study, training
from pumalib import kept as kept_module
from pumalib.__main__ import main

PUMA = PROFILE.run("puma")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Results with a linear and a PUMA run on both datasets, and a linear ensemble with its two members."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", folder)
        linear = PROFILE.run("linear")
        rows = {"Linear": linear, "PUMA": PUMA, "each": study.specific(linear)}
        study.run_all(rows, replace(PROFILE, seeds=(0,)))
    return folder


@pytest.fixture
def folders(trained, tmp_path, monkeypatch):
    """A copy of them to spoil, by name: linear, puma, digits, aircraft, ensemble."""
    shutil.copytree(trained, tmp_path / "results")
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    found = {}
    for k in kept_module.find():
        alone = k.settings["data.datasets"]
        found["ensemble" if k.members else alone[0] if len(alone) == 1 else k.settings["method.name"]] = k.folder
    assert len(found) == 5
    return found


def call(capsys, *argv):
    status = main(["runs", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def change(file, edit):
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def unfinish(folder):
    (folder / "metrics.json").unlink()
    (folder / "model.safetensors").unlink()


def test_list_tells_what_each_run_is(folders, capsys, tmp_path):
    unfinish(folders["digits"])
    (folders["puma"] / "model.safetensors").unlink()
    status, out, _ = call(capsys, "list", "--csv", str(tmp_path / "list.csv"))
    lines = {line.split()[0]: line for line in out.splitlines() if "curricularface" in line}
    assert status == 0 and set(lines) == {folder.name for folder in folders.values()}
    assert "unfinished: epoch 1 of 1" in lines[folders["digits"].name]
    assert "finished, numbers only" in lines[folders["puma"].name]
    assert "finished, ensemble of 2" in lines[folders["ensemble"].name]
    table = pd.read_csv(tmp_path / "list.csv").set_index("name")
    stored = json.loads((folders["linear"] / "metrics.json").read_text())
    line = table.loc[folders["linear"].name]
    assert line["unified R@1 %"] == pytest.approx(100 * stored["table"][-2]["R@1"])
    assert line["minutes"] == pytest.approx(stored["seconds"] / 60)
    assert (line["method"], line["seed"], line["datasets"], line["state"]) == ("linear", 0, "digits,aircraft", "finished")
    assert call(capsys)[1].splitlines()[0] == out.splitlines()[0]  # the default


def test_no_runs_names_the_folder(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    for command in runs.COMMANDS:
        status, out, _ = call(capsys, command, "--profile", "mini")
        assert (status, out) == (0, f"no runs in {tmp_path / 'mini' / 'runs'}\n")


@pytest.mark.parametrize("filters, names", [
    (("-w", "method=puma"), {"puma"}),
    (("-w", "method.name=lin*", "-w", "data.datasets=digits,aircraft"), {"linear", "ensemble"}),
    (("-w", "members=2"), {"ensemble"}),
    (("-w", "lr=0.001", "-w", "training.epochs=1", "-w", "flip=true", "-w", "adapter_keep=0.5"), {"puma"}),
    (("puma-*", "-w", "seed=0"), {"puma"}),
    (("*-ensemble-*", "puma*"), {"ensemble", "puma"}),
    (("-w", "seed=3"), set()),
])  # fmt: skip
def test_filters(folders, capsys, filters, names):
    status, out, _ = call(capsys, "list", *filters)
    assert status == 0 and {name for name, folder in folders.items() if folder.name in out} == names


@pytest.mark.parametrize("filters, message", [
    (("-w", "adaptor_keep=1"), "unknown setting 'adaptor_keep'; near: adapter_keep"),
    (("-w", "seed"), "give field=value"),
    (("-w", "seed=first"), "seed is a number"),
    (("-w", "flip=maybe"), "data.flip is true or false"),
    (("pumma-*",), "no run is called 'pumma-"),
])  # fmt: skip
def test_wrong_filters_are_refused(folders, capsys, filters, message):
    status, out, err = call(capsys, "remove", *filters, "--yes")
    assert status == 1 and out == "" and message in err
    assert all(folder.is_dir() for folder in folders.values())


def test_compare_gives_settings_and_paired_differences(folders, capsys):
    status, out, _ = call(capsys, "compare", folders["linear"].name, folders["puma"].name, folders["ensemble"].name)
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert status == 0
    assert lines["method.name"][1:] == ["linear", "puma", "linear"] and lines["members"][1:] == ["0", "0", "2"]
    assert "seed" not in lines and "dim" not in lines
    tables = [json.loads((folders[name] / "metrics.json").read_text())["table"] for name in ("linear", "puma")]
    for linear, puma in zip(*tables):
        shown = lines[linear["dataset"]]
        assert shown[1:3] == [f"{100 * row['R@1']:.1f}" for row in (linear, puma)]
        assert float(shown[4]) == pytest.approx(100 * (puma["R@1"] - linear["R@1"]), abs=0.051)


def test_what_cannot_be_compared(folders, capsys):
    status, _, err = call(capsys, "compare", folders["linear"].name, folders["digits"].name)
    assert status == 1 and "tested on the same queries cannot" in err and "aircraft (105)" in err
    change(folders["puma"] / "environment.json", lambda content: content.update(data="0" * 64))
    status, _, err = call(capsys, "compare", folders["linear"].name, folders["puma"].name)
    assert status == 1 and "digest 00000000" in err
    unfinish(folders["puma"])
    status, _, err = call(capsys, "compare", folders["linear"].name, folders["puma"].name)
    assert status == 1 and "it is not finished" in err
    status, _, err = call(capsys, "compare", folders["linear"].name)
    assert status == 1 and "two runs or more" in err


def test_verify_finds_nothing_wrong_with_what_was_trained(folders, capsys):
    status, out, _ = call(capsys, "verify", "--evaluate")
    assert status == 0 and out.splitlines()[0] == "5 finished runs verified: no problem"
    (folders["digits"] / "model.safetensors").unlink()
    status, out, _ = call(capsys, "verify", "--evaluate", folders["digits"].name)
    assert status == 0 and "only its numbers were kept" in out and "1 check could not be made" in out
    assert not (folders["digits"] / "model.safetensors").exists()  # nothing was trained


def r1(value):
    return lambda content: content["table"][0].update({"R@1": value})


@pytest.mark.parametrize("name, file, edit, message", [
    ("puma", "metrics.json", r1(float("nan")), "R@1 of digits is nan, no fraction"),
    ("puma", "metrics.json", r1(0.9999), "R@1 of digits is 0.999900, its stored hits give"),
    ("puma", "metrics.json", lambda c: c["table"][-1].update({"R@1": 0.5}), "R@1 of harmonic is 0.500000, its stored hits give"),
    ("puma", "metrics.json", lambda c: c["hits"].update(digits=""), "stored hits of digits are not those of its 225 queries"),
    ("puma", "metrics.json", lambda c: c.pop("seconds"), "KeyError: 'seconds'"),
    ("puma", "metrics.json", lambda c: c["table"].pop(1), "has the rows digits, unified, harmonic, not digits, aircraft, unified"),
    ("puma", "run.json", lambda c: c.update(dim=17), "outdated: the same data gives puma-curricularface-"),
    ("puma", "run.json", lambda c: c.update(dim=17), "trained with other settings than run.json has: dim"),
    ("puma", "run.json", lambda c: c.update(dimm=17), "unknown setting 'dimm'"),
    ("ensemble", "run.json", lambda c: c["members"].reverse(), "its members give linear-curricularface-ensemble-"),
    ("ensemble", "run.json", lambda c: c["members"].append("gone"), "member gone is missing"),
])  # fmt: skip
def test_verify_finds_what_was_changed(folders, capsys, name, file, edit, message):
    change(folders[name] / file, edit)
    status, out, _ = call(capsys, "verify", folders[name].name)
    assert status == 1 and message in out and "in 1 run" in out
    assert call(capsys, "list")[0] == 0  # a damaged run is listed all the same


def test_an_ensemble_outlives_its_members(folders, capsys):
    for name in ("digits", "aircraft"):
        shutil.rmtree(folders[name])
        assert "finished, ensemble of 2" in call(capsys, "list")[1]
        status, out, _ = call(capsys, "verify", folders["ensemble"].name)
        assert status == 1 and f"its member {folders['digits'].name} is missing" in out and "1 problem in 1 run" in out
    status, _, err = call(capsys, "compare", folders["linear"].name, folders["ensemble"].name)
    assert status == 1 and "its members are missing" in err


def test_verify_finds_broken_files(folders, capsys):
    (folders["puma"] / "metrics.json").write_text("{")
    model = folders["digits"] / "model.safetensors"
    model.write_bytes(model.read_bytes()[:1000])
    status, out, _ = call(capsys, "verify")
    assert status == 1 and "2 problems in 2 runs" in out
    assert "metrics.json or environment.json is damaged" in out and "model.safetensors cannot be read" in out


def test_evaluating_again_tells_another_model(folders, capsys):
    from safetensors import safe_open
    from safetensors.torch import save_file

    model = folders["puma"] / "model.safetensors"
    with safe_open(model, "pt") as opened:
        metadata, state = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}
    save_file({name: tensor * 0 + np.float32(0.01) for name, tensor in state.items()}, model, metadata=metadata)
    assert call(capsys, "verify", folders["puma"].name)[0] == 0
    status, out, _ = call(capsys, "verify", "--evaluate", folders["puma"].name)
    assert status == 1 and "evaluated again, R@1 of digits is" in out


def test_outdated_and_absent_data(folders, capsys, monkeypatch):
    monkeypatch.setattr(config, "NUMBERS", config.NUMBERS + 1)
    status, out, _ = call(capsys, "verify")
    assert status == 1 and "5 problems in 5 runs" in out and f"config.NUMBERS, now {config.NUMBERS}" in out
    change(folders["puma"] / "environment.json", lambda content: content.update(data="0" * 64))
    assert "the data has changed since (digest 00000000, now" in call(capsys, "verify", folders["puma"].name)[1]

    def absent(*_):
        raise FileNotFoundError("no such folder of images")

    monkeypatch.setattr(training, "load_data", absent)
    status, out, _ = call(capsys, "verify", folders["linear"].name)
    assert status == 0 and "cannot tell whether it is outdated, data or weights absent: no such folder" in out
    status, out, _ = call(capsys, "remove", "--outdated", "--yes")
    assert "kept" in out and "removed 0 runs" in out and folders["linear"].is_dir()
    monkeypatch.undo()


def test_remove_shows_first_and_takes_only_what_is_named(folders, capsys):
    status, out, err = call(capsys, "remove", "--yes")
    assert status == 1 and "this would remove every run" in err
    status, out, _ = call(capsys, "remove", "puma-*")
    assert status == 0 and f"would remove test/{folders['puma'].name} (" in out and "add --yes" in out and folders["puma"].is_dir()
    hidden = folders["puma"].with_name(".left.1.removed")  # by a removal that was killed
    hidden.mkdir()
    status, out, _ = call(capsys, "remove", "puma-*", "--yes")
    assert status == 0 and "removed 1 run," in out
    assert {f.name for f in folders["puma"].parent.iterdir()} == {f.name for n, f in folders.items() if n != "puma"}
    assert call(capsys, "remove", "--all", "--yes")[0] == 0 and list(folders["puma"].parent.iterdir()) == []


def test_remove_of_models_unfinished_and_outdated(folders, capsys, monkeypatch):
    status, out, _ = call(capsys, "remove", "-w", "method=linear", "--models", "--yes")
    assert status == 0 and "removed 3 models" in out
    assert [(f / "model.safetensors").exists() for f in folders.values()].count(True) == 1 and folders["linear"].is_dir()
    (folders["digits"] / "metrics.json").unlink()
    assert "removed 1 run," in call(capsys, "remove", "--unfinished", "--yes")[1] and not folders["digits"].exists()
    assert "removed 0 runs" in call(capsys, "remove", "--outdated", "--yes", "-w", "members=0")[1]
    monkeypatch.setattr(config, "NUMBERS", config.NUMBERS + 1)
    assert "removed 2 runs" in call(capsys, "remove", "--outdated", "--yes", "-w", "datasets=digits,aircraft", "-w", "members=0")[1]
    assert sorted(f.name for f in folders["puma"].parent.iterdir()) == sorted((folders["aircraft"].name, folders["ensemble"].name))


def test_a_run_that_a_process_holds_stays(folders, capsys):
    unfinish(folders["puma"])
    with FileLock(folders["puma"] / ".lock"):
        assert "unfinished: epoch 1 of 1, locked by a running process" in call(capsys, "list")[1]
        assert f"skipped test/{folders['puma'].name}" in call(capsys, "remove", "puma-*")[1]
        status, out, _ = call(capsys, "remove", "--unfinished", "--yes")
        assert f"skipped test/{folders['puma'].name}: a running process holds it" in out and "removed 0 runs" in out
    assert folders["puma"].is_dir()
    assert "removed 1 run," in call(capsys, "remove", "--unfinished", "--yes")[1] and not folders["puma"].exists()


def test_a_run_that_finished_in_the_meantime_stays(folders):
    chosen = type("Chosen", (), dict(unfinished=True, models=False))
    kept = kept_module.select(kept_module.find(), [folders["puma"].name])[0]
    assert not runs._take_away(kept, chosen) and folders["puma"].is_dir()
