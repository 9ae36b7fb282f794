"""`make gpu` and `make gpu-paper` take each step once, and say before what the machine lacks."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import torch

from puma_study import needs, notebooks
from pumalib import paths
from tools.once import run_once

# In place of Python: it logs what it is asked for, and fails the first time for what is in FAILS.
STAND_IN = """#!/bin/sh
if [ "$1" = tools/once.py ]; then exec "{python}" "$@"; fi
echo "$@" >> log.txt
case "$*" in *bench*) mkdir -p results/bench; touch results/bench/$4-cuda.csv; esac
for word in $FAILS; do
    case "$*" in *$word*)
        if [ ! -e failed-$word ]; then
            touch failed-$word
            rm -f results/bench/$4-cuda.csv
            exit 1
        fi
    esac
done
"""


@pytest.fixture
def project(tmp_path):
    """What make needs of the checkout, and a Python that only logs."""
    shutil.copy(paths.ROOT / "Makefile", tmp_path)
    (tmp_path / "tools").mkdir()
    shutil.copy(paths.ROOT / "tools" / "once.py", tmp_path / "tools")
    shutil.copytree(paths.ROOT / "notebooks" / "profiles", tmp_path / "notebooks" / "profiles")
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    return tmp_path


def make(project, target, fails=""):
    environment = {**os.environ, "FAILS": fails, "MAKEFLAGS": ""}
    command = ["make", target, "GPU_PYTHON=./python"]
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, check=False
    )


def steps(project):
    """What was asked of Python, but for whether there is a GPU."""
    log = project / "log.txt"
    if not log.exists():
        return []
    return [line for line in log.read_text().splitlines() if not line.startswith("-c ")]


@pytest.mark.parametrize("target", ["gpu", "gpu-paper"])
def test_a_step_that_has_succeeded_is_not_taken_again(target, project):
    whole = make(project, target)
    assert whole.returncode == 0, whole.stderr
    assert "\nall done\n" in whole.stdout
    once = steps(project)
    assert len(once) == len(set(once)) > 20
    assert "--plan" in once[0], "needs are told before the first step"

    (project / "log.txt").unlink()
    again = make(project, target)
    assert "\nall done\n" in again.stdout
    assert steps(project) == []


def test_after_a_stop_it_goes_on_with_the_step_that_was_stopped(project):
    fails = "search precision=float32"
    ends = [make(project, "gpu", fails).returncode for _ in range(3)]
    assert ends[0] and ends[1] and not ends[2]
    taken = steps(project)
    twice = {step for step in taken if taken.count(step) == 2}
    assert len(twice) == 2
    assert len(taken) == len(set(taken)) + 2


def test_a_command_that_failed_has_no_stamp(tmp_path, capfd):
    fails = [sys.executable, "-c", "import sys; print('ran'); sys.exit(3)"]
    assert [run_once(tmp_path / "stamps", fails) for _ in range(2)] == [3, 3]
    assert capfd.readouterr().out.count("\nran") == 2
    assert not (tmp_path / "stamps").exists()
    works = [sys.executable, "-c", "print('ran')"]
    assert [run_once(tmp_path / "stamps", works) for _ in range(2)] == [0, 0]
    shown = capfd.readouterr().out
    assert shown.count("\nran") == 1
    assert "done before: " in shown


ENDS_ITSELF = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1], "begun").touch()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    pathlib.Path(sys.argv[1], "ended").touch()
    sys.exit(7)
"""


def test_an_interrupted_command_ends_by_itself(tmp_path):
    """As a training does, which leaves a checkpoint and a message."""
    command = [sys.executable, "-c", ENDS_ITSELF, str(tmp_path)]
    once = [sys.executable, str(paths.ROOT / "tools" / "once.py"), str(tmp_path / "stamps")]
    with subprocess.Popen([*once, *command], process_group=0) as running:
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(timeout=30) == 7
    assert (tmp_path / "ended").exists()


# ---- what `--plan` says of the machine


RUNS = {
    "images": [3_600_000, 0],
    "hours": [1.0, 0.0],
    "memory": [30.0, 0.0],
    "disk": [0.1, 0.0],
    "files": [True, True],
}


def limits(monkeypatch, cores=64, free=80e9, **changes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: free is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80e9))
    table = pd.DataFrame({**RUNS, **changes})
    return notebooks._limits(table[table["images"] > 0])


def test_a_plan_says_what_the_models_take_on_the_disk(monkeypatch):
    (line,) = limits(monkeypatch)
    assert line.startswith("Disk: 0.1 GB of models at most, 0.6 GB of checkpoints of a run")


def test_a_plan_warns_of_too_few_cores_where_images_are_files(monkeypatch):
    needed = needs.cores(1000)
    assert len(limits(monkeypatch, cores=needed)) == 1
    _, line = limits(monkeypatch, cores=needed - 1)
    assert f"1,000 images/s need {needed} that do nothing else" in line
    assert len(limits(monkeypatch, cores=1, free=None)) == 1, "there is no GPU to wait"
    assert len(limits(monkeypatch, cores=1, files=[False, False])) == 1


def test_a_plan_warns_of_a_gpu_with_too_little_memory(monkeypatch):
    assert len(limits(monkeypatch, free=31e9)) == 1
    _, line = limits(monkeypatch, free=24e9)
    assert "A run needs 30 GB of the GPU, and 24 are free: -p micro_batch=auto" in line


def test_nothing_that_is_left_has_no_limits(monkeypatch):
    assert limits(monkeypatch, images=[0, 0]) == []
