"""The command line: fast help, exact messages for wrong input, and a status that is true."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import numpy as np
import pandas as pd
import pytest
import yaml
from kept_runs import add
from PIL import Image
from safetensors.torch import load_file

from puma_study import notebooks, one_run, runs, store
from puma_study.__main__ import main as study_main
from puma_study.record import FinishedRun
from pumalib import evaluation, paths
from pumalib.__main__ import main as library_main
from pumalib.models import backbones

PACKAGE = Path(paths.__file__).parent
HEAVY = ["faiss", "matplotlib", "numpy", "pandas", "pydantic", "scipy", "timm", "torch"]


def environment(**variables):
    return {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **variables}


HELPS = f"""
import sys
import puma_study.__main__ as study, pumalib.__main__ as library, tools.__main__ as workshop
count = 0
for program in (library, study, workshop):
    commands = [[], *([name] for name in program.cli.commands)]
    if program is study:
        commands += [["runs", name] for name in study.cli.commands["runs"].commands]
    for command in commands:
        assert program.main([*command, "--help"]) == 0, command
        count += 1
print(sorted(set({HEAVY!r}) & sys.modules.keys()), count)
"""


def test_help_imports_nothing_that_takes_time():
    said = subprocess.run(
        [sys.executable, "-c", HELPS], env=environment(), capture_output=True, text=True, check=True
    )
    loaded = said.stdout.splitlines()[-1]
    assert loaded == "[] 18", loaded
    assert not said.stderr


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def small(results):
    """A profile of a second, by its file."""
    file = results / "small.yaml"
    content = {
        "data": {"datasets": ["photos", "aircraft"], "image_size": 48},
        "backbone": "test_vit",
        "pretrained": "random",
        "dim": 8,
        "training": {"epochs": 1, "batch_size": 300, "lr": 1e-3, "device": "cpu"},
    }
    file.write_text(yaml.safe_dump(content))
    return str(file)


def call(capsys, *arguments):
    main = study_main if arguments[0] in ("run", "runs") else library_main
    status = main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


# ---- Refusals

REFUSED = {
    "a method's name": (["-s", "name=x"], "method 'puma': unknown setting 'name'"),
    "a profile's name": (["-p", "name=x"], "profile 'smoke': unknown setting 'name'"),
    "a seed too large": (
        ["--seed", "99999999999"],
        "profile 'smoke': seed = 99999999999: it should",
    ),
    "deep prompts of a pool": (["-s", "prompt_deep=true"], "prompt_deep is for one prompt"),
    "an unknown setting": (["-s", "keep=1"], "unknown setting 'keep'"),
    "classes above batches": (["-p", "batch_size=3"], "images_per_class = 4 is more than"),
    "the hub": (["-p", "pretrained=hub"], "pretrained = 'hub' has no weights of 'mini_vit_64'"),
    "seeds": (["-p", "seeds=[3]"], "-p seeds is for several runs; this is one, see --seed"),
    "jobs": (["-p", "jobs=3"], "-p jobs is for several runs"),
    "null": (["-p", "datasets=null"], "datasets = null would change nothing: give a value"),
    "nothing": (["-p", "root="], "root = null would change nothing"),
    "no value": (["-p", "epochs"], "'epochs': write name=value, the value in YAML"),
    "no YAML": (["-p", "epochs=[1"], "'epochs=[1': write name=value, the value in YAML"),
    "a key twice": (["-p", "recipes={full: {lr: 1, lr: 2}}"], "the key 'lr' stands twice"),
    "a date": (["-p", "epochs=2020-01-01"], "a date is a text in quotes: epochs='\"2020-01-31\"'"),
    "a date in a list": (["-p", "datasets=[2020-01-01]"], "write a finite number, a text"),
    "no number": (["-p", "lr=.inf"], "write a finite number, a text"),
    "a value twice": (["-p", "epochs=1", "-p", "epochs=2"], "epochs is given twice"),
    "deep YAML": (["-p", "recipes=" + 4000 * "["], "nested too deep"),
    "no UTF-8": (["-p", "root=/fot\udcf3s"], "is not UTF-8: set PYTHONUTF8=1"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_what_would_fail_or_be_ignored_is_refused_in_words(arguments, message, results, capsys):
    status, out, err = call(capsys, "train", "puma", *arguments)
    assert status == 2 and message in err and not out
    assert "pydantic" not in err and len(err) < 6000
    assert not (results / "smoke").exists()


def test_a_message_about_an_alias_bomb_is_short(results, capsys):
    text = "[&a [lol, lol, lol, lol, lol, lol, lol, lol, lol]"
    for name, below in zip("bcdefghi", "abcdefgh"):
        text += f", &{name} [{', '.join(9 * [f'*{below}'])}]"
    status, _, err = call(capsys, "train", "puma", "-p", f"datasets={text}]")
    assert status == 2 and "datasets" in err and len(err) < 2000


def test_without_a_head_what_trains_needs_the_width_of_the_backbone(small, results, capsys):
    headless = ["train", "adapter", "--profile", small, "-s", "head=none", "-s", "adapter_rank=2"]
    status, _, err = call(capsys, *headless)
    said = "head = 'none' leaves the backbone's 64 features, and dim = 8: set dim = 64, or"
    assert status == 2 and said in err
    assert not list(results.glob("small/runs/*/run.json"))
    assert call(capsys, *headless, "-p", "dim=64")[0] == 0
    assert call(capsys, "train", "pretrained", "--profile", small)[0] == 0, "it trains nothing"


# ---- Training, and training again


def kept(profile, method):
    (record,) = [r for r in store.read(profile).values() if r.name.startswith(f"{method}-")]
    return record


def test_a_run_that_fails_is_noted_and_told_until_it_is_removed(small, results, capsys):
    values = ["-p", "lr=1e30", "-p", "clip_value=0", "-p", "epochs=3"]
    diverging = ["runs", "train", "linear", "--profile", small, *values]
    status, _, error = call(capsys, *diverging)
    ((name, record),) = store.failures("small").items()
    assert status == 1
    assert f"run {name}, {record.where}: {record.what}" in error
    assert f"not trained again before `python -m puma_study runs remove {name} --yes`" in error
    assert "Traceback" not in error and store.read("small") == {}

    for again in (diverging, ["runs", "train", name, "--profile", small]):
        status, _, error = call(capsys, *again)
        assert status == 1
        assert error.startswith("error: failed, and so without numbers, in profile small: ")
        assert f"`python -m puma_study runs remove {name} --yes`, and it is trained again" in error

    assert call(capsys, "runs", "remove", f"small/{name}", "--yes")[0] == 0
    status, _, error = call(capsys, *diverging)
    assert status == 1 and record.what in error
    assert store.failures("small").keys() == {name}


def test_a_kept_run_that_is_trained_again_says_that_it_agrees(small, results, capsys):
    status, first, _ = call(capsys, "runs", "train", "linear", "--profile", small, "-p", "epochs=2")
    name = kept("small", "linear").name
    assert status == 0 and first.splitlines()[0].endswith(name)
    assert "R@1: photos 0." in first and "kept:" not in first

    model = results / "small" / "runs" / name / "model.safetensors"
    before = load_file(model)
    model.unlink()  # as in a fresh clone: only the numbers are kept
    status, again, _ = call(capsys, "runs", "train", name, "--profile", small)
    assert status == 0
    after = load_file(model)
    assert before.keys() == after.keys()
    assert all(tensor.equal(after[key]) for key, tensor in before.items())
    lines = again.splitlines()
    assert lines[:2] == first.splitlines()
    assert lines[2] == lines[1].replace("R@1:", "kept:") and lines[3].startswith("They agree: ")
    assert not (results / "small" / "repeated.jsonl").exists()


def with_three_other_hits(record):
    """The record of a run in which three queries of photos have the opposite result."""
    other = record.content()
    hits = record.hits()["photos"]
    hits[:3] = 1 - hits[:3]
    other["hits"]["photos"] = evaluation.pack(hits)
    rows = {row["dataset"]: row for row in other["table"]}
    rows["photos"]["R@1"] = float(hits.mean())
    own = [rows[name]["R@1"] for name in ("photos", "aircraft")]
    rows["harmonic"]["R@1"] = float(evaluation.harmonic_mean(np.array(own)))
    return FinishedRun.rounded(other)


def test_other_numbers_are_told_and_kept_beside(small, results, capsys):
    assert call(capsys, "runs", "train", "linear", "--profile", small)[0] == 0
    record = kept("small", "linear")
    name = record.name
    other = with_three_other_hits(record)
    photos = f"{other.accuracy('photos'):.3f}"
    store.drop(name, "small")
    store.add(other, "small")  # as if another machine had kept it
    was_kept = store.record(name, "small")

    for _ in range(2):
        status, said, _ = call(capsys, "runs", "train", name, "--profile", small)
        assert status == 1
        _, now, before, verdict = said.splitlines()
        assert now.startswith(f"R@1: photos {record.accuracy('photos'):.3f}, ")
        assert before.startswith(f"kept: photos {photos}, ")
        assert now != before.replace("kept:", "R@1:")
        assert verdict.startswith("They differ: R@1 is another for 3 of ") and "on cpu" in verdict
        assert "in their own dataset (most in photos: 3) and for 0 in all" in verdict
        assert "no other seed of it is kept" in verdict
    assert store.record(name, "small") == was_kept, "what was kept stays"
    (line,) = (results / "small" / "repeated.jsonl").read_text().splitlines()
    assert json.loads(line)["table"] == record.content()["table"]


def test_numbers_may_differ_where_no_hit_does(small, capsys):
    assert call(capsys, "runs", "train", "linear", "--profile", small)[0] == 0
    was = kept("small", "linear")
    other = was.content()
    other["table"][0]["R@8"] = 0.987654
    store.drop(was.name, "small")
    add(other, "small")
    status, said, _ = call(capsys, "runs", "train", was.name, "--profile", small)
    assert status == 0, "every query's hit is the same"
    apart = abs(other["table"][0]["R@8"] - was.content()["table"][0]["R@8"])
    verdict = "They agree in the hit of every query; other numbers do not: at most by "
    assert f"{verdict}{apart:.2g} (R@8 of photos)" in said


def test_changed_hits_are_shown_beside_what_seeds_change():
    """By hand: seeds at 20, 22 and 24 % have a standard deviation of 2 points."""
    before = {"unified": 0.22, "harmonic": 0.5}
    now = {"unified": 0.225, "harmonic": 0.5}
    seeds = pd.DataFrame({"unified": [0.2, 0.22, 0.24], "harmonic": 0.5})
    said = one_run._changes(before, now, seeds)
    assert "unified 22.00 to 22.50 (+0.50; standard deviation of the 3 kept seeds 2.00)" in said
    assert "harmonic 50.00 to 50.00 (+0.00; standard deviation of the 3 kept seeds 0.00)" in said


def test_a_run_of_another_profile_says_where_it_is_kept(small, results, capsys):
    assert call(capsys, "runs", "train", "pretrained", "--profile", small)[0] == 0
    name = kept("small", "pretrained").name
    status, _, err = call(capsys, "runs", "train", name)
    assert status == 2
    assert f"{name} is not kept in profile smoke, but in small: add --profile small" in err


def test_lines_of_the_list_are_told_apart_by_what_varies(small, results, capsys):
    for changes in ([], ["-p", "dim=4"], ["-p", "lr=0.01", "-p", "dim=4"]):
        assert call(capsys, "runs", "train", "whitened", "--profile", small, *changes)[0] == 0
    listed = runs.list_runs("small")
    shown = runs.shown_columns(listed)
    added = [name for name in shown if name not in runs.COLUMNS]
    assert added == ["dim", "training.lr"]
    texts = listed[[name for name in shown if name not in runs.RESULTS]].astype(str)
    assert not texts.duplicated().any()
    status, out, _ = call(capsys, "runs", "list", "--profile", "small")
    assert status == 0 and "training.lr" in out.splitlines()[0]

    query = "dim == 4 and `training.lr` in [0.01, 0.02] and not method == 'puma'"
    assert len(runs.select(listed, query)) == 1
    marker = results / "run"
    for code in (
        f"@os.system('touch {marker}')",
        "@dim == 4",
        f"__import__('os').system('touch {marker}')",
        f"method.to_csv('{marker}')",
        "method.__class__ == 1",
        "`a' @os.system('b`",
        f"method == 'a`' or @os.system('touch {marker}') or '`'",
        "dim = 4",
        "dim",
        "(" * 5000,
    ):
        status, _, err = call(capsys, "runs", "list", "--profile", "small", "--query", code)
        assert status == 2 and "--query: " in err, code
        assert not marker.exists()


def test_no_two_lines_of_the_study_look_alike(monkeypatch, capsys):
    monkeypatch.setattr(paths, "RESULTS", paths.ROOT / "results")
    listed = runs.list_runs("mini")
    listed = listed[listed["members"] == 0]
    shown = [name for name in runs.shown_columns(listed) if name not in runs.RESULTS]
    assert not listed[shown].astype(object).map(str).duplicated().any()
    assert "method.adapter_keep" in shown
    _, out, _ = call(capsys, "runs", "list", "--profile", "mini", "--query", "`training.lr` < 1e-3")
    assert "training.lr" in out.splitlines()[0]
    assert re.search(r" 0\.000\d+ ", out), "a rate is not rounded to 0.0"


def test_a_kept_run_is_trained_as_it_is(small, capsys):
    assert call(capsys, "runs", "train", "pretrained", "--profile", small)[0] == 0
    name = kept("small", "pretrained").name
    for ignored in (["--loss", "ms"], ["--seed", "0"], ["-s", "prompts=1"], ["-p", "epochs=3"]):
        status, _, err = call(capsys, "runs", "train", name, "--profile", small, *ignored)
        assert status == 2 and "is a kept run, trained again as it is: leave out -p, -s" in err


# ---- Interrupted


def started(small, *arguments):
    """A process that trains by the command line."""
    given = ["train", "linear", "--profile", small, *arguments]
    text = f"import sys\nfrom pumalib.__main__ import main\nsys.exit(main({given!r}))"
    return forks.Program(text, environment=environment(PUMALIB_RESULTS=str(Path(small).parent)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_training_that_is_ended_says_that_it_goes_on(number, small, results):
    with started(small, "-p", "epochs=1000", "-p", "checkpoint_seconds=1e-3") as program:
        deadline = time.monotonic() + 200
        while not list(results.glob("small/runs/*/checkpoint.pt")):
            assert program.process.is_alive() and time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(program.process.pid, number)
        done = program.done(60)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert done.stderr.endswith("checkpoints are kept: the same command goes on\n")


@pytest.mark.parametrize("module", ["torch", "pandas", "pydantic"])
def test_ctrl_c_during_imports_ends_quietly(module, small, tmp_path):
    hook = tmp_path / "sitecustomize.py"  # at the moment when a module is looked for
    hook.write_text(
        "import sys, signal\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    said = subprocess.run(
        [sys.executable, "-m", "pumalib", "train", "linear", "--profile", small],
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{PACKAGE.parent}"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 130 and "Traceback" not in said.stderr
    assert said.stderr.endswith("the same command goes on\n")


def test_sigterm_is_again_what_it_was_when_a_command_has_ended(capsys):
    before = signal.getsignal(signal.SIGTERM)
    assert call(capsys, "runs", "list", "--profile", "none")[:2] == (0, "no runs\n")
    assert signal.getsignal(signal.SIGTERM) is before


# ---- Plans and data


def test_a_failed_plan_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(notebooks, "find", lambda names: names)
    monkeypatch.setattr(notebooks, "parameters", lambda *arguments: {})
    for complete, status in {True: 0, False: 1}.items():
        planned = ("03 cannot be planned: KeyError", complete)
        monkeypatch.setattr(notebooks, "plan", lambda *asked, planned=planned: planned)
        assert call(capsys, "run", "--plan")[:2] == (status, f"{planned[0]}\n")


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    for dataset in ("cups", "pens"):
        for number in range(8):
            file = tmp_path / "images" / dataset / f"class {number // 2}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file)
    return tmp_path / "images"


def test_data_without_names_means_all_datasets(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    asked = ["--benchmark", "folders", "--root", images]
    assert call(capsys, "data", "verify", *asked)[:2] == (0, "every image can be decoded\n")
    assert call(capsys, "data", "prepare", *asked)[0] == 0
    assert len(list((tmp_path / "cache").rglob("*.jpg"))) == 16
    assert (
        "read only when asked for: `run` and `train` with -p prepared=true"
        in (call(capsys, "data", "prepare", *asked)[1])
    )
    broken = images / "pens" / "class 3" / "7.png"
    broken.write_bytes(b"no image")
    os.utime(broken, (1e9, 1e9))  # not as old as its copy
    status, out, _ = call(capsys, "data", "verify", *asked)
    assert status == 1 and "7.png" in out
    assert call(capsys, "data", "verify", "cups", *asked)[0] == 0
    assert call(capsys, "data", "prepare", *asked)[0] == 2
    status, _, err = call(capsys, "data", "verify", "--root", tmp_path)
    assert status == 2 and "not found under" in err and "concatenate" not in err
    status, _, err = call(capsys, "data", "verify", "--benchmark", "no", "--root", images)
    assert status == 2 and "unknown benchmark 'no'; known: " in err


def test_status_says_what_is_missing_and_is_no_success(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(backbones, "_is_cached", lambda known: False)
    status, out, _ = call(capsys, "data", "status", "--root", tmp_path)
    assert status == 1
    assert out.count("not found under") == 8
    assert f"`python -m pumalib data download --root {tmp_path}` fetches what is free" in out
    assert "weights: the weights of vit_small_patch16_224.augreg_in21k are not in the cache" in out
