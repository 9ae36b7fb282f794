"""Plan and execute notebooks, and clean them of all that differs between executions.

A notebook that succeeds is written to `results/<profile>/`, one that fails to the same folder as
`<name>.failed.ipynb`.  The executed copy has its values in its cell of parameters, and what was
found as Markdown below its title.
"""

import ast
import base64
import json
import logging
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import papermill
import torch
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError
from papermill.translators import PythonTranslator
from PIL import Image

from pumalib import config, data, paths
from pumalib.training import run_folder

from . import findings, needs, planning, store

Parameters = dict[str, Any]

# Executed after a notebook's rows are known: prints as JSON the runs that they would train.
PLANNING = """
import puma_study as _study
if rows is None:
    print("[]")
else:
    _plan = _study.plan(rows, p, side or (), {images_per_second})
    print(_plan.reset_index().to_json(orient="records"))
"""
# The columns of each run in that answer.
_PLANNED = ["name", *planning.COLUMNS]
# Kernels log to this terminal: let them show critical messages alone.
QUIET = ["--log-level=CRITICAL"]

# Metadata of a cell that stay: its tags, and whether JupyterLab folds its code.
KEPT_METADATA = ("tags", "jupyter")

# The file name in a warning from a cell: "/tmp/ipykernel_123/45.py".
CELL = re.compile(r"\S*ipykernel_\d+\S*\.py")
# A line of progress, drawn again and again: " 10%|#   |\r 20%|##  |\n".
REDRAWN = re.compile(r"[^\n]*(\r|\x1b\[A)[^\n]*\n?")
# Fields of a profile that say where and whether runs are trained, and change no number.
PLACE = ("dask", "jobs", "train")
# The random id that pandas gives a styled table: "T_1a2b3".
STYLED = re.compile(r"T_[0-9a-f]{5}")
# The number of a notebook: the "03_" of "03_components".
NUMBER = re.compile(r"^\d+_")


# ---- which notebooks, with which parameters


def find(names: list[str]) -> list[Path]:
    """Files of notebooks given by stem, file name or beginning ("03"); without names, all but 9x.

    Raises ValueError, listing the known notebooks, for another name.  The index has no number, and
    is not one of them.
    """
    known = {file.stem: file for file in sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))}
    if not names:
        names = [stem for stem in known if not stem.startswith("9")]
    found = []
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        fitting = [stem]
        if stem not in known:
            fitting = [other for other in known if stem and other.startswith(stem)]
        if len(fitting) != 1:
            data.check_known("notebook", [name], known)
        found.append(known[fitting[0]])
    return list(dict.fromkeys(found))


def title(notebook: Path) -> str:
    """A notebook's name without its number; the names of its results begin with it."""
    return NUMBER.sub("", notebook.stem)


def parameters(
    notebooks: list[Path], profile: str, values: Mapping[str, Any]
) -> dict[Path, Parameters]:
    """The parameters to execute each notebook with, from `values` given by the user.

    Values that a notebook has no parameter for become `overrides` of the profile.  Raises
    ValueError for a name that is neither a parameter nor a field of a profile, and for a bad value.
    """
    if "profile" in values or "overrides" in values:
        raise ValueError(
            "profile and overrides: use --profile, and -p with the name of a field of the profile"
        )
    found = {}
    for notebook in notebooks:
        own = list(papermill.inspect_notebook(notebook))
        known = [name for name in own if name != "notebook"]
        if "overrides" in own:
            known += config.overridable()
        data.check_known(f"parameter of {notebook.stem}", values, known)
        overrides = {name: value for name, value in values.items() if name not in own}
        config.require_values(overrides)
        config.profile(profile, **overrides)

        given = {
            "profile": profile,
            "overrides": overrides,
            # A copy that still has the name of its original does not write over its results.
            "notebook": title(notebook),
            **values,
        }
        found[notebook] = {name: given[name] for name in own if name in given}
    return found


def with_values(source: str, values: Mapping[str, Any]) -> str:
    """A cell of parameters that assigns `values`; its comments and its other values stay."""
    text = source.encode()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    # From the last on: what is put in moves all that follows.
    for statement in reversed(ast.parse(source).body):
        if not isinstance(statement, ast.Assign):
            continue
        name = ast.unparse(statement.targets[0])
        if name not in values:
            continue
        old = statement.value
        assert old.end_lineno is not None and old.end_col_offset is not None  # as it was parsed
        begin = starts[old.lineno - 1] + old.col_offset
        end = starts[old.end_lineno - 1] + old.end_col_offset
        new = PythonTranslator.translate(values[name]).encode()
        text = text[:begin] + new + text[end:]
    return text.decode()


def _set_parameters(notebook: NotebookNode, values: Mapping[str, Any]) -> None:
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell["source"] = with_values(cell.source, values)


# ---- planned


def plan(
    chosen: Mapping[Path, Parameters], images_per_second: float = needs.STATED_SPEED
) -> tuple[str, bool]:
    """Estimate the runs that notebooks would train, their memory and hours.

    Returns a text, and whether all notebooks could be planned and no data or weights are missing.
    Trains nothing: the cells of all notebooks up to their cells `rows` are executed as one
    notebook, in one kernel.  For `images_per_second` see `planning.plan`.
    """
    _warn_of_another_python()
    parts = {
        notebook: _planning_cells(notebook, values, images_per_second)
        for notebook, values in chosen.items()
    }
    _execute_together([cell for part in parts.values() for cell in part])

    tables = {}
    lost = []
    for notebook, part in parts.items():
        error = _error_of(part)
        if error:
            lost.append(f"{notebook.stem} cannot be planned: {error}")
        else:
            tables[notebook.stem] = _planned(part[-1])
    if not tables:
        return "\n".join([*lost, "Nothing was trained."]), False
    whole = pd.concat(list(tables.values()))
    missing = _missing(whole)
    notes = _notes(whole, images_per_second)
    text = "\n".join([_summary(tables).to_string(), *lost, *missing, *notes])
    return text, not lost and not missing


def _summary(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """A row per notebook, and one for all; `new` counts runs that no notebook above needs."""
    lines = {}
    seen: set[str] = set()
    all_new = []
    for notebook, table in tables.items():
        left = table[~table["kept"].astype(bool)]
        new = left[~left["name"].isin(seen)]
        seen |= set(table["name"])
        all_new.append(new)
        lines[notebook] = [len(table), *_costs(left), *_costs(new)[:2], *_states(table)]
    if all_new:
        new = pd.concat(all_new)
        every = pd.concat(tables.values())
        lines["all, shared once"] = [len(seen), *_costs(new), *_costs(new)[:2], *_states(every)]
    columns = ["runs", "left", "hours", "GPU GB", "new", "new hours", "data", "weights"]
    return pd.DataFrame.from_dict(lines, orient="index", columns=columns)


def _costs(runs: pd.DataFrame) -> list[Any]:
    """The number of runs, their hours, and the memory of the run that needs most."""
    memory = "-"
    if runs["images"].sum():
        most = runs["memory"].max(skipna=False)
        memory = "unknown" if pd.isna(most) else f"{most:.1f}"
    return [len(runs), f"{runs['hours'].sum():.2f}", memory]


def _states(runs: pd.DataFrame) -> list[str]:
    """Whether the data and the weights of runs are "there" or "missing"; "-" without runs."""
    if runs.empty:
        return ["-", "-"]
    return ["missing" if (runs[kind] != "").any() else "there" for kind in ("data", "weights")]


def _missing(runs: pd.DataFrame) -> list[str]:
    """Lines that name missing data and weights once each, with the command that fetches them."""
    missing = [line for text in [*runs["data"], *runs["weights"]] for line in text.splitlines()]
    if not missing:
        return []
    return ["Missing, without which nothing of it is trained:", *dict.fromkeys(missing)]


def _notes(runs: pd.DataFrame, images_per_second: float) -> list[str]:
    """Lines that explain how hours and memory were estimated."""
    left = runs[~runs["kept"].astype(bool)].drop_duplicates("name")
    trained = left[left["images"] > 0]
    measured = int(trained["measured"].sum())
    stated = len(trained) - measured
    notes = [
        "left, hours, GPU GB: of a notebook by itself; new: what no notebook above it has already."
    ]
    if measured:
        notes.append(f"Hours of {measured} runs: by the speed of kept runs alike on this device.")
    if stated:
        notes.append(
            f"Hours of {stated} runs: by {images_per_second:,.0f} images/s of a ViT-S at 224 px, "
            "stated and not measured (--images-per-second says another; "
            f"{needs.STATED_SPEED:,.0f} is assumed of a GPU of an A100's class)."
        )
    notes += _limits(trained)
    notes.append(
        "An estimate, of training alone, one run after another. GPU GB: the most that a run needs, "
        "by arithmetic; micro_batch and recompute lower it. Nothing was trained."
    )
    return notes


def _limits(trained: pd.DataFrame) -> list[str]:
    """Lines about disk, GPU and cores of this machine, for the runs that are to be trained."""
    if trained.empty:
        return []
    models = trained["disk"].sum()
    in_checkpoints = trained["disk"].max() * needs.IN_CHECKPOINTS / needs.SAVED
    folders = [paths.RESULTS, *paths.RESULTS.parents]
    existing = next(folder for folder in folders if folder.exists())
    free = shutil.disk_usage(existing).free / 1e9
    lines = [
        f"Disk: {models:.1f} GB of models at most, {in_checkpoints:.1f} GB of checkpoints of a run "
        f"that trains; {free:.0f} GB are free."
    ]
    # A CPU trains slower than it decodes.
    if not torch.cuda.is_available():
        return lines
    there = torch.cuda.mem_get_info()[0] / 1e9
    most = trained["memory"].max()
    if most > there:
        lines.append(
            f"A run needs {most:.0f} GB of the GPU, and {there:.0f} are free: "
            "-p micro_batch=auto takes as many images at once as fit, for the same gradient."
        )
    from_files = trained[trained["files"].astype(bool)]
    if len(from_files):
        speed = (from_files["images"] / from_files["hours"]).max() / 3600
        has = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            has = len(os.sched_getaffinity(0))
        needed = needs.cores(speed)
        if needed > has:
            lines.append(
                f"Cores: {speed:,.0f} images/s need {needed} that do nothing else, of photographs "
                f"500 px wide (smaller ones need fewer), and there are {has}: training would wait "
                "for images (docs/gpu.md)."
            )
    return lines


def _planning_cells(
    notebook: Path, values: Parameters, images_per_second: float
) -> list[NotebookNode]:
    """The cells that make a notebook's rows, and last one that prints the runs of these rows."""
    cells = nbformat.read(notebook, as_version=4).cells
    first, *others = [cell for cell in cells if cell.cell_type == "code"]
    needed = []
    sources = []
    for cell in others:
        sources.append(cell.source)
        if "rows" in cell.metadata.get("tags", []):
            # A notebook without a cell `rows` has no runs: none of its cells is executed.
            needed = list(sources)
            break
    given = [f"{name} = {value!r}" for name, value in values.items()]
    beginning = "%reset -f\nrows, side = None, ()"
    asking = PLANNING.format(images_per_second=images_per_second)
    whole = [beginning, first.source, *given, *needed, asking]
    return [nbformat.v4.new_code_cell(source) for source in whole]


def _execute_together(cells: list[NotebookNode]) -> None:
    joined = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(joined, allow_errors=True, kernel_name="python3", timeout=None)
    client.extra_arguments = QUIET
    _lead_to_this_package()
    _silence_widgets()
    client.execute(cwd=str(paths.NOTEBOOKS))


def _error_of(cells: list[NotebookNode]) -> str:
    """The first error of executed cells as one line; "" if there is none."""
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "error":
                return f"{output.ename}: {' '.join(output.evalue.split())}"
    return ""


def _planned(cell: NotebookNode) -> pd.DataFrame:
    """The table of runs, with the columns `_PLANNED`, that a cell of `PLANNING` printed."""
    printed = [output.text for output in cell.outputs if output.get("name") == "stdout"]
    table = pd.DataFrame(json.loads("".join(printed)), columns=_PLANNED)
    return table.astype({"images": int, "hours": float, "memory": float, "disk": float})


# ---- executed


@dataclass
class Outcome:
    """How the execution of a notebook ended, and the tables it wrote."""

    notebook: str
    status: str  # done, left out (runs are not kept and may not be trained), or FAILED
    kept: int  # runs that it added to the kept ones
    minutes: float
    written: str = ""  # names of the tables that it wrote
    why: str = ""  # the reason, if it was left out or failed


def run(chosen: Mapping[Path, Parameters], profile: str) -> int:
    """Execute notebooks into `results/<profile>/` and print a summary; returns 1 if one failed."""
    _warn_of_another_python()
    folder = paths.RESULTS / profile
    run_folder.make(folder)
    outcomes = []
    for number, (notebook, values) in enumerate(chosen.items(), 1):
        print(f"[{number}/{len(chosen)}] {notebook.stem}", file=sys.stderr, flush=True)
        outcomes.append(_run_one(notebook, folder, values))
    _print_outcomes(outcomes, folder)
    return int(any(outcome.status == "FAILED" for outcome in outcomes))


def _run_one(notebook: Path, folder: Path, values: Parameters) -> Outcome:
    start = time.time()
    before = len(store.read(folder.name))
    status = "done"
    why = ""
    try:
        execute(notebook, folder, values)
    except PapermillExecutionError as error:
        status = "FAILED"
        if error.ename == store.NotKept.__name__:
            status = "left out"
        message = " ".join(error.evalue.split())
        why = f"{error.ename}: {message} (cell In [{error.exec_count}])"
    except (OSError, ValueError, RuntimeError) as error:
        # The next notebook can still succeed.
        status = "FAILED"
        why = f"{type(error).__name__}: {error}"
    # Only tables that carry its name: another notebook may be running at the same time.
    own = notebook.stem.split("_", 1)[-1]
    tables = [file.name for file in folder.glob(f"{own}*.csv") if file.stat().st_mtime >= start]
    return Outcome(
        notebook=notebook.stem,
        status=status,
        kept=len(store.read(folder.name)) - before,
        minutes=(time.time() - start) / 60,
        written=" ".join(sorted(tables)),
        why=why,
    )


def _print_outcomes(outcomes: list[Outcome], folder: Path) -> None:
    """Print a table of outcomes, and below it the full reason of each that is not "done"."""
    lines = []
    for outcome in outcomes:
        minutes = f"{outcome.minutes:.1f}"
        lines.append((outcome.notebook, outcome.status, outcome.kept, minutes, outcome.written))
    table = pd.DataFrame(lines, columns=["notebook", "status", "newly kept", "minutes", "CSV"])
    print(f"\n{table.to_string(index=False, justify='left')}\nin {paths.shown(folder)}")
    for outcome in outcomes:
        if outcome.why:
            print(f"{outcome.notebook}: {outcome.status}: {outcome.why}")


def execute(notebook: Path, folder: Path, values: Parameters) -> None:
    """Execute a notebook into `folder`; if it fails, keep it as `<name>.failed.ipynb`.

    Raises the error that stopped it.  After `store.NotKept` nothing is written.
    """
    failed = folder / f"{notebook.stem}.failed.ipynb"
    _lead_to_this_package()
    _silence_widgets()
    os.environ[store.KEEPS] = "yes"
    filled = nbformat.read(notebook, as_version=4)
    _set_parameters(filled, values)
    # papermill warns of its own deprecations.
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    with (
        paths.written_whole(folder / notebook.name) as temporary,
        warnings.catch_warnings(action="ignore"),
    ):
        try:
            executed = papermill.execute_notebook(
                filled,
                temporary,
                kernel_name="python3",
                cwd=paths.NOTEBOOKS,
                progress_bar=False,
                extra_arguments=QUIET,
                stdout_file=sys.stdout,
                stderr_file=sys.stderr,
            )
        except Exception as error:
            was_left_out = getattr(error, "ename", "") == store.NotKept.__name__
            if temporary.is_file() and not was_left_out:
                temporary.replace(failed)
            raise
        nbformat.write(_as_kept(executed, folder, values), temporary)
    failed.unlink(missing_ok=True)


def _warn_of_another_python() -> None:
    """Warn if kernels start another Python, which has other packages."""
    python = Path(KernelSpecManager().get_kernel_spec("python3").argv[0])
    # Jupyter starts a bare "python" as this Python.
    if not python.is_absolute():
        return
    # Compare folders: the executables of two environments may be links to one file.
    if python.parent.resolve() != Path(sys.executable).parent.resolve():
        what = f"the kernel python3 is {python}, not this {sys.executable}"
        remedy = "set JUPYTER_PREFER_ENV_PATH=1, or remove it: jupyter kernelspec remove python3"
        warnings.warn(f"{what}: notebooks run with its packages; {remedy}", stacklevel=3)


def _lead_to_this_package() -> None:
    """Put this checkout first on PYTHONPATH, so that kernels import its packages.

    Where two checkouts share an environment, the installed one would otherwise train and keep runs.
    """
    around = Path(paths.__file__).resolve().parent.parent
    if not (around / "pyproject.toml").is_file():
        return  # it is among other packages, where kernels find it too
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folders[0] != str(around):
        others = [folder for folder in folders if folder]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(around), *others])


def _silence_widgets() -> None:
    """Silence tqdm's warning, in kernels that start from here, that it has no widgets."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")


# ---- as it is kept


def _as_kept(executed: NotebookNode, folder: Path, values: Parameters) -> NotebookNode:
    """An executed notebook, changed in place to what is kept of it in `folder`."""
    kept = dict(values)
    if "overrides" in kept:
        overrides = kept["overrides"].items()
        kept["overrides"] = {name: value for name, value in overrides if name not in PLACE}
    _set_parameters(executed, kept)
    open_with_finding(executed, folder.name)
    return clean(executed)


def open_with_finding(notebook: NotebookNode, profile: str) -> None:
    """Put what a cell tagged `found` has shown below the title, as Markdown in its place.

    Its pictures are those of `results/<profile>`, where the notebook is kept.  A cell that has
    shown nothing stays.
    """
    for cell in notebook.cells:
        if "found" in cell.metadata.get("tags", []) and cell.outputs:
            text = cell.outputs[0].data["text/markdown"]
            text = text.replace(f"]({findings.RESULTS}/{profile}/", "](")
            finding = nbformat.v4.new_markdown_cell(text, id=cell.id, metadata={"tags": ["found"]})
            notebook.cells.remove(cell)
            notebook.cells.insert(1, finding)
            return


def clean(notebook: NotebookNode) -> NotebookNode:
    """Remove, in place, all that differs between executions: times, versions, ids, paths, bars."""
    notebook.metadata.pop("papermill", None)
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        _clean_metadata(cell)
        if cell.cell_type == "code":
            _clean_outputs(cell)
    return notebook


def _clean_metadata(cell: NotebookNode) -> None:
    kept = {name: cell.metadata[name] for name in KEPT_METADATA if cell.metadata.get(name)}
    cell["metadata"] = NotebookNode(kept)


def _clean_outputs(cell: NotebookNode) -> None:
    cell["outputs"] = _with_joined_streams(cell.get("outputs", []))
    for place, output in enumerate(cell.outputs):
        if output.output_type == "stream":
            output["text"] = _without_progress(output.text)
            continue
        content = output.get("data", {})
        if "Styler" in content.get("text/plain", ""):
            _clean_styled_table(content, f"T_{cell.id}_{place}")
        elif "image/png" in content:
            content["image/png"] = _with_fewer_colours(content["image/png"])
    cell["outputs"] = [
        output for output in cell.outputs if output.output_type != "stream" or output.text
    ]


def _with_joined_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs with each stream in one piece: where a kernel splits a stream is chance."""
    joined = []
    streams: dict[str, NotebookNode] = {}
    for output in outputs:
        if output.output_type == "stream" and output.name in streams:
            streams[output.name]["text"] += output.text
            continue
        if output.output_type == "stream":
            streams[output.name] = output
        joined.append(output)
    return joined


def _without_progress(text: str) -> str:
    """A stream's text without progress bars and without paths of this machine."""
    left = REDRAWN.sub("", text).replace(f"{paths.ROOT}{os.sep}", "")
    if not left.strip():
        return ""
    return CELL.sub("a cell", left)


def _clean_styled_table(content: dict[str, Any], name: str) -> None:
    """Give a styled table the same id in every execution."""
    html = "".join(content["text/html"])
    content["text/html"] = STYLED.sub(name, html)
    content["text/plain"] = content["text/plain"].split(" at 0x")[0]


def _with_fewer_colours(figure: str) -> str:
    """A PNG (base64) reduced to 256 colours, which takes a third of the bytes."""
    picture = Image.open(BytesIO(base64.b64decode(figure))).convert("RGB")
    file = BytesIO()
    picture.quantize(256).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
