"""Notebooks executed, several or all: planned, with progress on the terminal, cleaned of what differs between times.

An executed notebook appears in `results/<profile>/` only when it succeeded; one that failed is kept beside it as
`<name>.failed.ipynb`.  Runs are kept by `run_all`, so a command that was stopped goes on when it is called again.
"""

from __future__ import annotations

import base64
import difflib
import json
import logging
import os
import re
import sys
import time
import warnings
from io import BytesIO
from pathlib import Path
from typing import TextIO

import nbformat
import pandas as pd
import papermill
import psutil
import yaml
from nbclient import NotebookClient
from papermill.exceptions import PapermillExecutionError
from PIL import Image

from .. import config, paths
from ..training import run_folder
from . import kept

PLAN = ["name", "method", "images", "kept", "hours"]
PLANNED = "planned "  # begins the line that a planning cell prints
PLANNING = f"""
from pumalib import study as _study
print({PLANNED!r} + ("" if rows is None else _study.plan(rows, p, side or ()).reset_index().to_json(orient="records")))
"""
os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")  # of tqdm, in kernels without widgets
CELL = re.compile(r"\S*ipykernel_\d+\S*\.py")  # the file that a warning is said to come from
PLACE = re.compile(r'(, )?"(dask|jobs)": ("[^"]*"|\d+)(?(1)|(, )?)')  # where runs were trained, in injected parameters


def find(names: list[str]) -> list[Path]:
    """Notebooks by stem, file name or beginning ("03"); without names all but the tools, which start with 9.

    Raises:
        ValueError: unknown, or more than one begins so.
    """
    known = {file.stem: file for file in sorted(paths.NOTEBOOKS.glob("*.ipynb"))}
    found = {} if names else {stem: file for stem, file in known.items() if not stem.startswith("9")}
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        fit = [stem] if stem in known else [other for other in known if stem and other.startswith(stem)]
        if len(fit) != 1:
            words = {word: other for other in known for word in (other, other.partition("_")[2])}
            near = fit or dict.fromkeys(words[word] for word in difflib.get_close_matches(stem, words))
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(f"no notebook {name!r}; {hint}known: {', '.join(known)}")
        found[fit[0]] = known[fit[0]]
    return list(found.values())


def assigned(pairs: list[str]) -> dict:
    """{"name": value} of "name=value", the values read as YAML.

    Raises:
        ValueError: no name=value, or no YAML.
    """
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise ValueError(f"{pair!r}: write name=value")
        try:
            values[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{pair!r}: the value is no YAML ({' '.join(str(error).split())})") from None
    return values


def parameters(notebooks: list[Path], profile: str, values: dict) -> dict[Path, dict]:
    """The parameters of each notebook: of `values` its own, and as `overrides` what changes a field of the profile.

    Raises:
        ValueError: a name that is neither for one of them, or a value that the profile refuses.
    """
    if {"profile", "overrides"} & values.keys():
        raise ValueError("profile and overrides: use --profile, and -p with the name of a field of the profile")
    found = {}
    for notebook in notebooks:
        cells = nbformat.read(notebook, as_version=4).cells
        source = "\n".join(c.source for c in cells if "parameters" in c.metadata.get("tags", []))
        known = re.findall(r"^(\w+) *=", source, re.MULTILINE)
        fields = config.overridable() if "overrides" in known else []
        for name in values:
            if name not in (*known, *fields):
                near = difflib.get_close_matches(name, [*known, *fields])
                hint = f"did you mean {' or '.join(near)}? " if near else ""
                own = ", ".join(known) or "none"
                known_here = f"its own: {own}; fields of the profile: {', '.join(fields) or 'none'}"
                raise ValueError(f"{notebook.stem} has no parameter {name!r}; {hint}{known_here}")
        overrides = {name: value for name, value in values.items() if name not in known}
        config.profile(profile, **overrides)
        common = {"profile": profile, "overrides": overrides}
        found[notebook] = {name: value for name, value in {**common, **values}.items() if name in known}
    return found


def plan(wanted: dict[Path, dict]) -> dict[Path, pd.DataFrame | str]:
    """What `study.plan` says of each notebook's rows, or why it could not be told; trains nothing.

    All notebooks' cells up to their cell `rows` are executed as one notebook, in one kernel.
    """
    cells, parts = [], []
    for notebook, values in wanted.items():
        mine, left = [nbformat.v4.new_code_cell("%reset -f\nrows, side = None, ()")], []
        for cell in nbformat.read(notebook, as_version=4).cells:
            if cell.cell_type != "code":
                continue
            tags = cell.metadata.get("tags", [])
            left.append(nbformat.v4.new_code_cell(cell.source))
            if "parameters" in tags:
                left.append(nbformat.v4.new_code_cell("\n".join(f"{k} = {v!r}" for k, v in values.items())))
            if "rows" in tags:  # without one it has no runs, and need not be executed
                mine += left
                break
        mine.append(nbformat.v4.new_code_cell(PLANNING))
        cells += mine
        parts.append(mine)
    joined = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(joined, allow_errors=True, kernel_name="python3", timeout=None)
    client.extra_arguments = ["--log-level=CRITICAL"]
    client.execute(cwd=str(paths.NOTEBOOKS))
    return {notebook: _told(mine) for notebook, mine in zip(wanted, parts, strict=True)}


def _told(cells: list) -> pd.DataFrame | str:
    outputs = [output for cell in cells for output in cell.outputs]
    for output in outputs:
        if output.output_type == "error":
            return f"{output.ename}: {' '.join(output.evalue.split())[:200]}"
    line = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout").rpartition(PLANNED)[2]
    return pd.DataFrame(json.loads(line) if line.strip() else [], columns=PLAN).set_index("name")


def told(plans: dict[Path, pd.DataFrame | str]) -> str:
    """A plan as text: what each notebook trains that none before it does, and why those stay out that have no plan."""
    tables = {notebook.stem: table for notebook, table in plans.items() if not isinstance(table, str)}
    lost = [f"{notebook.stem} cannot be planned: {why}" for notebook, why in plans.items() if isinstance(why, str)]
    none = {"none": pd.DataFrame(columns=PLAN)}
    every = pd.concat({stem: table.reset_index() for stem, table in tables.items()} or none)
    new = ~(every["kept"].astype(bool) | every["name"].duplicated())
    every = every.assign(notebook=every.index.get_level_values(0), runs=1, new=new)
    every[["images", "hours"]] = every[["images", "hours"]].astype(float).where(new, 0)
    sums = every.groupby("notebook")[["runs", "new", "images", "hours"]].agg(lambda column: column.sum(skipna=False))
    sums = sums.reindex(list(tables), fill_value=0)
    sums.loc["all, shared once"] = [every["name"].nunique(), *sums[["new", "images", "hours"]].sum(skipna=False)]
    formats = {"runs": "{:.0f}".format, "new": "{:.0f}".format, "images": "{:,.0f}".format, "hours": "{:.2f}".format}
    text = sums.to_string(formatters=formats, na_rep="speed unknown")
    return "\n".join([text, *lost, "An estimate, of training alone, one run after another here. Nothing was trained."])


def run(wanted: dict[Path, dict], profile: str, only_kept: bool = False) -> int:
    """Execute notebooks one after another into `results/<profile>/` and say what became of each; 1 if one failed.

    Args:
        profile: its name.
        only_kept: leave notebooks out whose runs are not all kept, so that nothing is trained.
    """
    folder, plans, rows = paths.RESULTS / profile, plan(wanted), []
    run_folder.make(folder)
    for number, (notebook, values) in enumerate(wanted.items(), 1):
        planned, title = plans[notebook], f"[{number}/{len(wanted)}] {notebook.stem}"
        if only_kept and (isinstance(planned, str) or not planned["kept"].all()):
            why = planned if isinstance(planned, str) else f"{(~planned['kept'].astype(bool)).sum()} runs are not kept"
            rows.append((notebook.stem, "left out", "", "", why))
            continue
        names = [] if isinstance(planned, str) else planned.index
        before, tables = set(kept.read(profile)), {file: file.stat().st_mtime_ns for file in folder.glob("*.csv")}
        start, error = time.monotonic(), ""
        print(f"{title}: {len(before & set(names))} of {len(names)} runs kept", file=sys.stderr, flush=True)
        try:
            execute(notebook, folder, values)
        except (PapermillExecutionError, RuntimeError, OSError, ValueError) as raised:  # the next can still succeed
            error = _said(raised)
        written = [file.name for file in folder.glob("*.csv") if file.stat().st_mtime_ns != tables.get(file)]
        new, minutes = len(set(kept.read(profile)) - before), f"{(time.monotonic() - start) / 60:.1f}"
        rows.append((notebook.stem, "FAILED" if error else "done", new, minutes, error or " ".join(sorted(written))))
    table = pd.DataFrame(rows, columns=["notebook", "status", "trained", "minutes", "CSV, or why not"])
    print(f"\n{table.to_string(index=False, justify='left')}\nin {paths.shown(folder)}")
    return int((table["status"] == "FAILED").any())


def _said(error: Exception) -> str:
    """An exception in a line: of a notebook's, what and in which cell."""
    if not isinstance(error, PapermillExecutionError):
        return f"{type(error).__name__}: {error}"
    trace = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))
    line = next(iter(re.findall(r"^-+> \d+ (.*)", trace, re.MULTILINE)), "")  # a bare assertion's says more
    return f"{error.ename}: {' '.join((error.evalue or line).split())[:200]} (cell In [{error.exec_count}])"


def execute(notebook: Path, folder: Path, values: dict) -> Path:
    """Execute a notebook; the cleaned result is `folder/<name>`, untouched where it stands there already.

    Raises:
        PapermillExecutionError: a cell failed; the notebook so far is `folder/<name>.failed.ipynb`.
    """
    target, failed = folder / notebook.name, folder / f"{notebook.stem}.failed.ipynb"
    for left in folder.glob(f".{notebook.stem}.*.tmp.ipynb"):  # by a process that was killed
        if not psutil.pid_exists(int(left.name.split(".")[-3])):
            left.unlink(missing_ok=True)
    temporary = folder / f".{notebook.stem}.{os.getpid()}.tmp.ipynb"
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # it warns of its own deprecations
    options = {"kernel_name": "python3", "cwd": paths.NOTEBOOKS, "progress_bar": False, "log_output": False}
    options["extra_arguments"] = ["--log-level=CRITICAL"]  # a kernel's own log goes to this screen
    try:
        with warnings.catch_warnings(action="ignore"), open(folder / "run.log", "a", encoding="utf-8") as log:
            executed = papermill.execute_notebook(notebook, temporary, values, stderr_file=Relay(log), **options)
    except Exception:
        if temporary.is_file():
            temporary.replace(failed)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    text = nbformat.writes(clean(executed)) + "\n"
    if not target.is_file() or target.read_text(encoding="utf-8") != text:
        run_folder.write_text(target, text)
    failed.unlink(missing_ok=True)
    return target


class Relay:
    """What a kernel writes to stderr, to ours and to a log: as it is on a terminal, else redrawn lines once in 30 s."""

    def __init__(self, log: TextIO, seconds: float = 30):
        self.log, self.seconds, self.last, self.line = log, seconds, -seconds, ""

    def write(self, text: str) -> None:
        terminal = sys.stderr.isatty()
        if terminal:
            sys.stderr.write(text)
        for piece in re.findall(r"[^\r\n]*[\r\n]|[^\r\n]+$", text):
            self.line += piece
            if piece[-1] not in "\r\n":
                continue
            line, self.line = self.line.strip(), ""
            if line and (piece[-1] == "\n" or time.monotonic() - self.last >= self.seconds):
                self.last = time.monotonic()
                for file in [self.log] if terminal else [self.log, sys.stderr]:
                    print(line, file=file, flush=True)

    def flush(self) -> None:
        sys.stderr.flush()


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Take out, in place, what differs between executions: times, versions, ids, places and lines of progress."""
    notebook.metadata.pop("papermill", None)
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):  # papermill's, empty
            cell.metadata.pop("tags")
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell["id"] = "injected-parameters"  # papermill draws one
            cell["source"] = PLACE.sub("", cell.source)
        if cell.cell_type != "code":
            continue
        outputs, streams = [], {}
        for output in cell.outputs:  # how a stream falls into pieces is chance
            if output.output_type == "stream" and output.name in streams:
                streams[output.name]["text"] += output.text
                continue
            outputs.append(output)
            if output.output_type == "stream":
                streams[output.name] = output
            if figure := output.get("data", {}).get("image/png"):
                output["data"]["image/png"] = _small(figure)
        for name, stream in streams.items():
            text = _without_progress(stream["text"]) if name == "stderr" else stream["text"]
            stream["text"] = CELL.sub("a cell", text.replace(f"{paths.ROOT}{os.sep}", ""))
        cell["outputs"] = [output for output in outputs if output.output_type != "stream" or output.text]
    return notebook


def _without_progress(text: str) -> str:
    """The lines that were not drawn over: those of progress bars hold carriage returns."""
    lines = [line for line in text.replace("\x1b[A", "\r").split("\n") if "\r" not in line]
    return "\n".join(lines) if "".join(lines).strip() else ""


def _small(figure: str) -> str:
    """A PNG in base64, with a palette of 256 colours: a third of the bytes."""
    file = BytesIO()
    Image.open(BytesIO(base64.b64decode(figure))).convert("RGB").quantize(256).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
