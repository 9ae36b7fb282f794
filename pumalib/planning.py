"""What notebooks would train, and how long it would take: for `python -m pumalib run --plan`, which trains nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pandas as pd
from papermill.exceptions import PapermillExecutionError

from . import config, paths, study, training
from .config import Profile, Run


def plan(wanted: dict[Path, dict], profile: Profile) -> str:
    """What would be trained, notebook by notebook, and for how long, from the speed of finished runs; trains nothing.

    A run that two notebooks want is new for the first and counts as cached for the later.
    """
    device = training.choose_device(profile.training.device)
    speeds = [finished_speeds(profile, device), bench_speeds(profile, device)]

    def line(name: str, new: dict[Path, Run], cached: int) -> tuple:
        costs = [(images_to_train(run), _speed(run, speeds)) for run in new.values()]
        known = all(speed or not images for images, speed in costs)
        seconds = sum(images / speed for images, speed in costs if images) if known else 0
        minutes = f"{seconds / 60:.1f}" if known else "no measured speed"
        return name, len(new), cached, f"{sum(images for images, _ in costs):,}", minutes

    rows = [("notebook", "new", "cached", "images to train on", "minutes")]
    notes, planned, trained = {}, {}, set()
    for notebook, parameters in wanted.items():
        runs, error = runs_of(notebook, parameters)
        if runs is None:
            rows.append((notebook.stem, "?", "?", "?", "?"))
            notes[notebook.stem] = f"its runs are not known, and not in the sum: {error}"
            continue
        trained |= set(finished(runs))
        new = {folder: run for folder, run in runs.items() if folder not in trained and folder not in planned}
        planned |= new
        rows.append(line(notebook.stem, new, len(runs) - len(new)))
    rows.append(line("sum, shared once", planned, len(trained)))
    estimate = ESTIMATE.format(device=training.device_name(device), profile=profile.name, runs=len(speeds[0]))
    return f"{aligned(rows, notes)}\n{estimate}"


ESTIMATE = """
An estimate, for training alone, one run after another on this machine ({device}), from {runs} finished runs of
profile {profile} (where none fits: from results/bench); evaluation, figures and kernels come on top.
Nothing was trained."""


def runs_of(notebook: Path, parameters: dict) -> tuple[dict[Path, Run] | None, str]:
    """The runs by folder that a notebook asks `study.run_all` for; (None, the error) if it cannot be told.

    Its code runs in this process up to that call, which is the first thing a notebook does after its imports.
    """
    cells = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    if not any("run_all" in cell.source for cell in cells):
        return {}, ""
    names, swallow = {"__name__": "__main__", "display": lambda *objects, **options: None}, io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(swallow), contextlib.redirect_stderr(swallow), contextlib.chdir(paths.NOTEBOOKS),
            environment(MPLBACKEND="Agg"), warnings.catch_warnings(action="ignore"), study.planning() as runs,
        ):  # fmt: skip
            for cell in cells:
                exec(compile(cell.source, notebook.name, "exec"), names)
                if "parameters" in cell.metadata.get("tags", []):
                    names |= parameters
    except study.Planned:
        return dict(runs), ""
    except (Exception, SystemExit) as error:
        return None, said(error)
    return {}, ""


def images_to_train(run: Run) -> int:
    """Images that pass the network in training: epochs x training images; none where nothing is trained."""
    m = run.method
    trains = m.tune_backbone or m.head != "none" or m.prompts or m.adapter_rank or m.lora_rank
    return run.training.epochs * len(training.data_of(run).train) if trains else 0


def finished_speeds(profile: Profile, device) -> pd.DataFrame:
    """A line per finished run of the profile on this kind of device: the columns `SPEED`; speed in images/s."""
    lines = []
    for file in (paths.RESULTS / profile.name / "runs").glob(f"*/{training.FINISHED}"):
        try:
            metrics = json.loads(file.read_text(encoding="utf-8"))
            environment = json.loads(file.with_name("environment.json").read_text(encoding="utf-8"))
            speed = metrics["images_per_second"] if environment["device"] == training.device_name(device) else None
            if not speed:  # an ensemble, or a run that trains nothing
                continue
            run = Run.from_json(file.with_name("run.json").read_text(encoding="utf-8"))
        except (ValueError, KeyError, OSError):  # of another version, or just removed
            continue
        lines.append((run.backbone.partition(".")[0], run.data.image_size, run.method.name, run.method.tune_backbone, speed))
    return pd.DataFrame(lines, columns=SPEED)


SPEED = ["backbone", "size", "method", "tuned", "speed"]


def bench_speeds(profile: Profile, device) -> pd.DataFrame:
    """The same from `results/bench/train-<device>.csv`, measured without reading images."""
    file = paths.RESULTS / "bench" / f"train-{device.type}.csv"
    if not file.is_file():
        return pd.DataFrame(columns=SPEED)
    table = pd.read_csv(file).rename(columns={"images_per_s": "speed"})
    table["backbone"] = table["backbone"].str.split(".").str[0]
    table["tuned"] = table["method"] == "full"
    dtype = str(training.precision(profile.run(), device)).removeprefix("torch.")
    ours = table["method"].isin(config.METHODS) & (table["dtype"] == dtype) & (table["device"] == training.device_name(device))
    return table[ours & (table["compiled"] == profile.training.compile)]


def _speed(run: Run, tables: list[pd.DataFrame]) -> float | None:
    """Median images/s of the same method, else of those that tune as much, else of any, on the same network."""
    for table in tables:
        same = table[(table["backbone"] == run.backbone.partition(".")[0]) & (table["size"] == run.data.image_size)]
        for part in (same[same["method"] == run.method.name], same[same["tuned"] == run.method.tune_backbone], same):
            if len(part):
                return float(part["speed"].median())
    return None


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Variables that kernels inherit, put back afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def aligned(rows: list[tuple], notes: dict[str, str]) -> str:
    """Rows as lines of aligned columns, under each the note of its first column."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        lines.append("  ".join(f"{cell!s:{width}}" for cell, width in zip(row, widths)).rstrip())
        if notes.get(row[0]):
            lines.append(f"    {notes[row[0]]}")
    return "\n".join(lines)


def said(error: Exception) -> str:
    """An exception in a line or two: name, message and, of a notebook's, the cell."""
    name, text, cell = type(error).__name__, str(error), ""
    if isinstance(error, PapermillExecutionError):
        name, text, cell = error.ename, error.evalue, f" (cell In [{error.exec_count}])"
        if not text:  # a bare assertion: its line says more
            trace = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))
            text = next(iter(re.findall(r"^-+> \d+ (.*)", trace, re.MULTILINE)), "")
    return textwrap.shorten(f"{name}: {text}", 200, placeholder=" ...") + cell


def finished(runs: dict[Path, Run] | None) -> list[Path]:
    return [folder for folder in runs or () if (folder / training.FINISHED).is_file()]
