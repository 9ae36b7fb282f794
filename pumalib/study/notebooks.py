"""Notebooks executed, several or all: planned, with progress on the terminal, cleaned of what differs between times.
One that succeeded appears in `results/<profile>/`, one that failed as `<name>.failed.ipynb`."""

import base64
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TextIO

import nbformat
import pandas as pd
import papermill
import yaml
from nbclient import NotebookClient
from papermill.exceptions import PapermillExecutionError
from PIL import Image

from .. import config, paths
from ..training import run_folder
from . import kept

PLANNING = """
from pumalib import study as _study
print("[]" if rows is None else _study.plan(rows, p, side or ()).reset_index().to_json(orient="records"))
"""
QUIET = ["--log-level=CRITICAL"]  # a kernel's own log goes to this screen
os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")  # of tqdm, in kernels without widgets
CELL = re.compile(r"\S*ipykernel_\d+\S*\.py")  # the file that a warning is said to come from
REDRAWN = re.compile(r"[^\n]*(\r|\x1b\[A)[^\n]*\n?")  # a line of progress
PLACE = re.compile(r'(, )?"(dask|jobs|train)": ("[^"]*"|\d+|False)(?(1)|(, )?)')  # where and whether runs were trained


def find(names: list[str]) -> list[Path]:
    """Notebooks by stem, file name or beginning ("03"), or a ValueError; without names all but the tools (9x)."""
    known = {file.stem: file for file in sorted(paths.NOTEBOOKS.glob("*.ipynb"))}
    found = {} if names else {stem: file for stem, file in known.items() if not stem.startswith("9")}
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        fit = [stem] if stem in known else [other for other in known if stem and other.startswith(stem)]
        if len(fit) != 1:
            raise ValueError(f"no notebook {name!r}; near: {kept.near(stem, known)}; known: {', '.join(known)}")
        found[fit[0]] = known[fit[0]]
    return list(found.values())


def assigned(pairs: Sequence[str]) -> dict:
    """{"name": value} of "name=value", the values read as YAML."""
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        try:
            values[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            equals = ""
        if not (name and equals):
            raise ValueError(f"{pair!r}: write name=value, the value in YAML")
    return values


def parameters(notebooks: list[Path], profile: str, values: dict) -> dict[Path, dict]:
    """The parameters of each notebook: of `values` its own, and as `overrides` what changes a field of the profile."""
    if {"profile", "overrides"} & values.keys():
        raise ValueError("profile and overrides: use --profile, and -p with the name of a field of the profile")
    found = {}
    for notebook in notebooks:
        own = re.findall(r"^(\w+) *=", _code(notebook)[0].source, re.MULTILINE)
        known = own + (config.overridable() if "overrides" in own else [])
        for name in values.keys() - set(known):
            said = f"near: {kept.near(name, known)}; known: {', '.join(known)}"
            raise ValueError(f"{notebook.stem} has no parameter {name!r}; {said}")
        overrides = {name: value for name, value in values.items() if name not in own}
        config.profile(profile, **overrides)
        given = {"profile": profile, "overrides": overrides, **values}
        found[notebook] = {name: given[name] for name in own if name in given}
    return found


def _code(notebook: Path) -> list:  # cells of code; the first has the parameters
    return [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]


def plan(wanted: dict[Path, dict]) -> str:
    """What each notebook would train that none before it does, and how long that takes, as text; trains nothing.
    The cells of all notebooks up to their cells `rows` are executed as one notebook, in one kernel."""
    parts = {}
    for notebook, values in wanted.items():
        first, *cells = _code(notebook)
        rows = [number for number, cell in enumerate(cells, 1) if "rows" in cell.metadata.get("tags", [])]
        needed = [cell.source for cell in cells[: rows[0] if rows else 0]]  # without `rows` it has no runs
        given = [f"{name} = {value!r}" for name, value in values.items()]
        sources = ["%reset -f\nrows, side = None, ()", first.source, *given, *needed, PLANNING]
        parts[notebook.stem] = [nbformat.v4.new_code_cell(source) for source in sources]
    joined = nbformat.v4.new_notebook(cells=[cell for part in parts.values() for cell in part])
    client = NotebookClient(joined, allow_errors=True, kernel_name="python3", timeout=None)
    client.extra_arguments = QUIET
    client.execute(cwd=str(paths.NOTEBOOKS))
    lines, lost, seen = {}, [], set()
    for stem, part in parts.items():
        outputs = [output for cell in part for output in cell.outputs]
        if errors := [output for output in outputs if output.output_type == "error"]:
            lost.append(f"{stem} cannot be planned: {errors[0].ename}: {' '.join(errors[0].evalue.split())[:200]}")
            continue
        told = "".join(output.text for output in part[-1].outputs if output.get("name") == "stdout")
        table = pd.DataFrame(json.loads(told), columns=["name", "method", "images", "kept", "hours"])
        new = table[~table["kept"].astype(bool) & ~table["name"].isin(seen)]
        lines[stem] = [len(table), len(new), new["images"].sum(), new["hours"].sum(skipna=False)]
        seen |= set(table["name"])
    table = pd.DataFrame.from_dict(lines, orient="index", columns=["runs", "new", "images", "hours"])
    table.loc["all, shared once"] = [len(seen), *table.iloc[:, 1:].sum(skipna=False)]
    text = table.astype(dict.fromkeys(table.columns[:3], int)).round(2).to_string(na_rep="speed unknown")
    return "\n".join([text, *lost, "An estimate, of training alone, one run after another here. Nothing was trained."])


def run(wanted: dict[Path, dict], profile: str) -> int:
    """Execute notebooks one after another into `results/<profile>/` and say what became of each; 1 if one failed."""
    folder, rows = paths.RESULTS / profile, []
    run_folder.make(folder)
    for number, (notebook, values) in enumerate(wanted.items(), 1):
        start, before, status, why = time.time(), len(kept.read(profile)), "done", ""
        print(f"[{number}/{len(wanted)}] {notebook.stem}", file=sys.stderr, flush=True)
        try:
            execute(notebook, folder, values)
        except (PapermillExecutionError, OSError, ValueError, RuntimeError) as error:  # the next can still succeed
            status, why = "FAILED", f"{type(error).__name__}: {error}"
            if isinstance(error, PapermillExecutionError):
                status = "left out" if error.ename == kept.NotKept.__name__ else status
                why = f"{error.ename}: {' '.join(error.evalue.split())[:200]} (cell In [{error.exec_count}])"
        written = " ".join(sorted(file.name for file in folder.glob("*.csv") if file.stat().st_mtime >= start))
        new, minutes = len(kept.read(profile)) - before, f"{(time.time() - start) / 60:.1f}"
        rows.append((notebook.stem, status, new, minutes, why or written))
    table = pd.DataFrame(rows, columns=["notebook", "status", "trained", "minutes", "CSV, or why not"])
    print(f"\n{table.to_string(index=False, justify='left')}\nin {paths.shown(folder)}")
    return int((table["status"] == "FAILED").any())


def execute(notebook: Path, folder: Path, values: dict) -> None:
    """Execute a notebook into `folder`; where a cell fails, what there is so far is `<name>.failed.ipynb`."""
    target, failed = folder / notebook.name, folder / f"{notebook.stem}.failed.ipynb"
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # it warns of its own deprecations
    options = {"kernel_name": "python3", "cwd": paths.NOTEBOOKS, "progress_bar": False, "stdout_file": sys.stdout}
    with (
        paths.written_whole(target) as temporary,
        warnings.catch_warnings(action="ignore"),
        open(folder / "run.log", "a", encoding="utf-8") as log,
    ):
        try:
            executed = papermill.execute_notebook(
                notebook, temporary, values, stderr_file=Relay(log), extra_arguments=QUIET, **options
            )
        except Exception as error:
            if temporary.is_file() and getattr(error, "ename", "") != kept.NotKept.__name__:
                temporary.replace(failed)
            raise
        nbformat.write(clean(executed), temporary)
    failed.unlink(missing_ok=True)


class Relay:
    """What a kernel writes to stderr, to ours and to a log: as it is on a terminal, else redrawn lines once in 30 s."""

    def __init__(self, log: TextIO, seconds: float = 30):
        self.log, self.seconds, self.last, self.begun = log, seconds, -seconds, ""

    def write(self, text: str) -> None:
        terminal = sys.stderr.isatty()
        if terminal:
            sys.stderr.write(text)
        *pieces, self.begun = re.split("(?<=[\r\n])", self.begun + text)
        for piece in pieces:
            if piece.strip() and (piece[-1] == "\n" or time.monotonic() - self.last >= self.seconds):
                self.last = time.monotonic()
                for file in [self.log] if terminal else [self.log, sys.stderr]:
                    print(piece.strip(), file=file, flush=True)

    def flush(self) -> None:
        sys.stderr.flush()


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Take out, in place, what differs between executions: times, versions, ids, places and lines of progress."""
    notebook.metadata.pop("papermill", None)
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        cell["metadata"] = {"tags": tags} if tags else {}
        if "injected-parameters" in tags:
            cell["id"], cell["source"] = "injected-parameters", PLACE.sub("", cell.source)  # papermill draws an id
        outputs, streams = [], {}
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                first = streams.setdefault(output.name, output)
                if first is not output:  # how a stream falls into pieces is chance
                    first["text"] += output.text
                    continue
            elif figure := output.get("data", {}).get("image/png"):
                small = Image.open(BytesIO(base64.b64decode(figure))).convert("RGB").quantize(256)
                small.save(file := BytesIO(), "PNG", optimize=True)  # a third of the bytes
                output["data"]["image/png"] = base64.b64encode(file.getvalue()).decode()
            outputs.append(output)
        for stream in streams.values():
            text = REDRAWN.sub("", stream["text"]).replace(f"{paths.ROOT}{os.sep}", "")
            stream["text"] = CELL.sub("a cell", text) * bool(text.strip())
        if cell.cell_type == "code":
            cell["outputs"] = [output for output in outputs if output.output_type != "stream" or output.text]
    return notebook
