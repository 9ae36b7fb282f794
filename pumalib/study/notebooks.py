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
from io import BytesIO
from pathlib import Path

import nbformat
import pandas as pd
import papermill
from nbclient import NotebookClient
from papermill.exceptions import PapermillExecutionError
from PIL import Image

from .. import config, data, paths
from ..training import run_folder
from . import store

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
    known, found = {file.stem: file for file in sorted(paths.NOTEBOOKS.glob("*.ipynb"))}, []
    for name in names or [stem for stem in known if not stem.startswith("9")]:
        stem = Path(name).name.removesuffix(".ipynb")
        fit = [stem] if stem in known else [other for other in known if stem and other.startswith(stem)]
        data.check_known("notebook", [] if len(fit) == 1 else [name], known)
        found.append(known[fit[0]])
    return list(dict.fromkeys(found))


def parameters(notebooks: list[Path], profile: str, values: dict) -> dict[Path, dict]:
    """The parameters of each notebook: of `values` its own, and as `overrides` what changes a field of the profile."""
    if {"profile", "overrides"} & values.keys():
        raise ValueError("profile and overrides: use --profile, and -p with the name of a field of the profile")
    found = {}
    for notebook in notebooks:
        own = list(papermill.inspect_notebook(notebook))
        known = own + (config.overridable() if "overrides" in own else [])
        data.check_known(f"parameter of {notebook.stem}", values, known)
        overrides = {name: value for name, value in values.items() if name not in own}
        config.profile(profile, **overrides)
        given = {"profile": profile, "overrides": overrides, **values}
        found[notebook] = {name: given[name] for name in own if name in given}
    return found


def plan(wanted: dict[Path, dict]) -> str:
    """What each notebook would train that none before it does, and how long that takes, as text; trains nothing.
    The cells of all notebooks up to their cells `rows` are executed as one notebook, in one kernel."""
    parts = {}
    for notebook, values in wanted.items():
        cells = nbformat.read(notebook, as_version=4).cells
        first, *cells = [cell for cell in cells if cell.cell_type == "code"]
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
        start, before, status, why = time.time(), len(store.read(profile)), "done", ""
        print(f"[{number}/{len(wanted)}] {notebook.stem}", file=sys.stderr, flush=True)
        try:
            execute(notebook, folder, values)
        except PapermillExecutionError as error:
            status = "left out" if error.ename == store.NotKept.__name__ else "FAILED"
            why = f"{error.ename}: {' '.join(error.evalue.split())[:200]} (cell In [{error.exec_count}])"
        except (OSError, ValueError, RuntimeError) as error:  # the next can still succeed
            status, why = "FAILED", f"{type(error).__name__}: {error}"
        written = " ".join(sorted(file.name for file in folder.glob("*.csv") if file.stat().st_mtime >= start))
        new, minutes = len(store.read(profile)) - before, f"{(time.time() - start) / 60:.1f}"
        rows.append((notebook.stem, status, new, minutes, why or written))
    table = pd.DataFrame(rows, columns=["notebook", "status", "trained", "minutes", "CSV, or why not"])
    print(f"\n{table.to_string(index=False, justify='left')}\nin {paths.shown(folder)}")
    return int((table["status"] == "FAILED").any())


def execute(notebook: Path, folder: Path, values: dict) -> None:
    """Execute a notebook into `folder`; where a cell fails, what there is so far is `<name>.failed.ipynb`."""
    failed = folder / f"{notebook.stem}.failed.ipynb"
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # it warns of its own deprecations
    options = {"kernel_name": "python3", "cwd": paths.NOTEBOOKS, "progress_bar": False, "extra_arguments": QUIET}
    options |= {"stdout_file": sys.stdout, "stderr_file": sys.stderr}
    with paths.written_whole(folder / notebook.name) as temporary, warnings.catch_warnings(action="ignore"):
        try:
            executed = papermill.execute_notebook(notebook, temporary, values, **options)
        except Exception as error:
            if temporary.is_file() and getattr(error, "ename", "") != store.NotKept.__name__:
                temporary.replace(failed)
            raise
        nbformat.write(clean(executed), temporary)
    failed.unlink(missing_ok=True)


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
            elif "Styler" in (plain := output.get("data", {}).get("text/plain", "")):
                html = re.sub(r"T_[0-9a-f]{5}", f"T_{cell.id}_{len(outputs)}", "".join(output["data"]["text/html"]))
                output["data"] |= {"text/plain": plain.split(" at 0x")[0], "text/html": html}
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
