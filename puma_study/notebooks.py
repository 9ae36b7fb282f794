"""Notebooks executed: planned, with progress, cleaned of what differs between executions.

One that succeeded appears in `results/<profile>/`, one that failed as `<name>.failed.ipynb`.
"""

import base64
import json
import logging
import os
import re
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
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError
from PIL import Image

from pumalib import config, data, paths
from pumalib.training import run_folder

from . import needs, planning, store

Parameters = dict[str, Any]

# Asks, where a notebook's rows are known, what they would train (`plan`).
PLANNING = """
import puma_study as _study
if rows is None:
    print("[]")
else:
    _plan = _study.plan(rows, p, side or (), {images_per_second})
    print(_plan.reset_index().to_json(orient="records"))
"""
# What it answers of each run.
_PLANNED = ["name", *planning.COLUMNS]
# A kernel's own log goes to this screen.
QUIET = ["--log-level=CRITICAL"]

# What a cell says of itself: what it is for, and that JupyterLab folds its code.
KEPT_METADATA = ("tags", "jupyter")
FOLDED = {"source_hidden": True}

# The file that a warning is said to come from: "/tmp/ipykernel_123/45.py".
CELL = re.compile(r"\S*ipykernel_\d+\S*\.py")
# A line of progress, drawn again and again: " 10%|#   |\r 20%|##  |\n".
REDRAWN = re.compile(r"[^\n]*(\r|\x1b\[A)[^\n]*\n?")
# Where and whether runs were trained: the `, "jobs": 2` of `overrides = {"seeds": [0], "jobs": 2}`.
PLACE = re.compile(r'(, )?"(dask|jobs|train)": ("[^"]*"|\d+|False)(?(1)|(, )?)')
# The id that pandas draws for a styled table: "T_1a2b3".
STYLED = re.compile(r"T_[0-9a-f]{5}")
# What stands before a notebook's name: the "03_" of "03_components".
NUMBER = re.compile(r"^\d+_")


# ---- which notebooks, with which parameters


def find(names: list[str]) -> list[Path]:
    """Notebooks by stem, file name or beginning ("03"); without names all but the tools (9x).

    Raises ValueError with the known ones, of which the index, which has no number, is none.
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
    """A notebook's name without its number, after which it names what it writes."""
    return NUMBER.sub("", notebook.stem)


def parameters(
    notebooks: list[Path], profile: str, values: Mapping[str, Any]
) -> dict[Path, Parameters]:
    """The parameters of each notebook: of `values` its own, others as `overrides` of the profile.

    Raises ValueError for what is no parameter of a notebook and no field of a profile, or is bad.
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


# ---- planned


def plan(
    wanted: Mapping[Path, Parameters], images_per_second: float = needs.STATED_SPEED
) -> tuple[str, bool]:
    """What each notebook would train, what that needs and how long it takes.

    Returns a text; and whether all could be planned, and all data and weights are there.  Trains
    nothing: the cells of all notebooks up to their cells `rows` are executed as one notebook, in
    one kernel.  `images_per_second` is that of `planning.plan`.
    """
    _warn_of_another_python()
    parts = {
        notebook: _planning_cells(notebook, values, images_per_second)
        for notebook, values in wanted.items()
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
    """A line for each notebook by itself, and what is new in it, which no line above it has."""
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
    """How many runs, their hours, and the memory of the one that needs most."""
    memory = "-"
    if runs["images"].sum():
        most = runs["memory"].max(skipna=False)
        memory = "unknown" if pd.isna(most) else f"{most:.1f}"
    return [len(runs), f"{runs['hours'].sum():.2f}", memory]


def _states(runs: pd.DataFrame) -> list[str]:
    """Whether the data and the weights of a table's runs are there."""
    if runs.empty:
        return ["-", "-"]
    return ["missing" if (runs[kind] != "").any() else "there" for kind in ("data", "weights")]


def _missing(runs: pd.DataFrame) -> list[str]:
    """What is not on this machine, each thing once, with the command that gets it."""
    said = [line for text in [*runs["data"], *runs["weights"]] for line in text.splitlines()]
    if not said:
        return []
    return ["Missing, without which nothing of it is trained:", *dict.fromkeys(said)]


def _notes(runs: pd.DataFrame, images_per_second: float) -> list[str]:
    """By what the numbers were reckoned."""
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
    notes.append(
        "An estimate, of training alone, one run after another. GPU GB: the most that a run needs, "
        "by arithmetic; micro_batch and recompute lower it. Nothing was trained."
    )
    return notes


def _planning_cells(
    notebook: Path, values: Parameters, images_per_second: float
) -> list[NotebookNode]:
    """The cells that make a notebook's rows, and one that prints what they would train."""
    cells = nbformat.read(notebook, as_version=4).cells
    first, *others = [cell for cell in cells if cell.cell_type == "code"]
    needed = []
    sources = []
    for cell in others:
        sources.append(cell.source)
        if "rows" in cell.metadata.get("tags", []):
            # Without a cell `rows` a notebook has no runs, and nothing of it is needed.
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
    """The first error of executed cells on one line, or nothing."""
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "error":
                return f"{output.ename}: {' '.join(output.evalue.split())}"
    return ""


def _planned(cell: NotebookNode) -> pd.DataFrame:
    """What the cell of PLANNING printed."""
    printed = [output.text for output in cell.outputs if output.get("name") == "stdout"]
    table = pd.DataFrame(json.loads("".join(printed)), columns=_PLANNED)
    return table.astype({"images": int, "hours": float, "memory": float})


# ---- executed


@dataclass
class Outcome:
    """What became of a notebook."""

    notebook: str
    status: str  # done, left out (runs are not kept and may not be trained), or FAILED
    kept: int  # runs that were not kept before it
    minutes: float
    written: str = ""  # the tables that it wrote
    why: str = ""  # it was left out, or failed


def run(wanted: Mapping[Path, Parameters], profile: str) -> int:
    """Execute notebooks into `results/<profile>/` and say what became of each; 1 if one failed."""
    _warn_of_another_python()
    folder = paths.RESULTS / profile
    run_folder.make(folder)
    outcomes = []
    for number, (notebook, values) in enumerate(wanted.items(), 1):
        print(f"[{number}/{len(wanted)}] {notebook.stem}", file=sys.stderr, flush=True)
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
    # By its own name, since another notebook may be executed at the same time.
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
    """A table of what became of the notebooks; below it, unshortened, why some did not come out."""
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
    """Execute a notebook into `folder`, or as far as it goes as `<name>.failed.ipynb`."""
    failed = folder / f"{notebook.stem}.failed.ipynb"
    _lead_to_this_package()
    _silence_widgets()
    # It warns of its own deprecations.
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    with (
        paths.written_whole(folder / notebook.name) as temporary,
        warnings.catch_warnings(action="ignore"),
    ):
        try:
            executed = papermill.execute_notebook(
                notebook,
                temporary,
                values,
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
        nbformat.write(clean(executed), temporary)
    failed.unlink(missing_ok=True)


def _warn_of_another_python() -> None:
    """Warn where kernels start with another Python, whose packages are others."""
    python = Path(KernelSpecManager().get_kernel_spec("python3").argv[0])
    # By its name alone it is this one.
    if not python.is_absolute():
        return
    # Links of two environments may lead to one Python.
    if python.parent.resolve() != Path(sys.executable).parent.resolve():
        what = f"the kernel python3 is {python}, not this {sys.executable}"
        remedy = "set JUPYTER_PREFER_ENV_PATH=1, or remove it: jupyter kernelspec remove python3"
        warnings.warn(f"{what}: notebooks run with its packages; {remedy}", stacklevel=3)


def _lead_to_this_package() -> None:
    """Let kernels that start from here import this pumalib, and not that of another checkout.

    Where two share an environment, the one installed there would train, and keep the runs.
    """
    around = Path(paths.__file__).resolve().parent.parent
    if not (around / "pyproject.toml").is_file():
        return  # it is among other packages, where kernels find it too
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folders[0] != str(around):
        others = [folder for folder in folders if folder]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(around), *others])


def _silence_widgets() -> None:
    """Let kernels that start from here not warn that tqdm has no widgets."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")


# ---- cleaned


def clean(notebook: NotebookNode) -> NotebookNode:
    """Take out, in place, what differs between executions: times, versions, ids, places, bars."""
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
    if "injected-parameters" in kept.get("tags", []):
        # papermill draws an id.
        cell["id"] = "injected-parameters"
        cell["source"] = PLACE.sub("", cell.source)
        cell["metadata"]["jupyter"] = dict(FOLDED)


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
    """Each stream as one output: how it falls into pieces is chance."""
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
    """A stream's text without lines of progress and places of this machine."""
    left = REDRAWN.sub("", text).replace(f"{paths.ROOT}{os.sep}", "")
    if not left.strip():
        return ""
    return CELL.sub("a cell", left)


def _clean_styled_table(content: dict[str, Any], name: str) -> None:
    """Give a styled table an id that does not change."""
    html = "".join(content["text/html"])
    content["text/html"] = STYLED.sub(name, html)
    content["text/plain"] = content["text/plain"].split(" at 0x")[0]


def _with_fewer_colours(figure: str) -> str:
    """A PNG of 256 colours, as base64: a third of the bytes."""
    picture = Image.open(BytesIO(base64.b64decode(figure))).convert("RGB")
    file = BytesIO()
    picture.quantize(256).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
