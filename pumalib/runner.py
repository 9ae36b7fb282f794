"""The study by one command: `python -m pumalib run` executes notebooks, several or all, and says what became of each.

An executed notebook appears in `results/<profile>/` only when it succeeded; one that failed is kept beside it as
`<name>.failed.ipynb`.  Runs are cached by `study`, so a command that was stopped goes on when it is called again.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import difflib
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import papermill
import psutil
import yaml

from . import config, paths, planning, plots
from .config import Profile, Run


def main(argv: list[str] | None = None) -> int:
    """Execute or plan the notebooks named: 0 if all succeeded, 1 if one failed, 130 if interrupted.

    Raises:
        ValueError: unknown notebook, profile or parameter, naming near and known ones; nothing was started.
    """
    parser = argparse.ArgumentParser(prog="python -m pumalib run", description=__doc__.split("\n")[0])
    parser.add_argument("notebooks", nargs="*", metavar="notebook", help="03 or 03_components; none: all but tools (9x)")
    parser.add_argument("--profile", default="smoke", help="its name, or a YAML file (default: %(default)s)")
    parser.add_argument("-p", dest="parameters", action="append", default=[], metavar="name=value", help="value in YAML")
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds 0 to N - 1, where a notebook has seeds")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once: workers of a local cluster")
    where.add_argument("--dask", metavar="ADDRESS", help="of a Dask scheduler whose workers train")
    parser.add_argument("--plan", action="store_true", help="say what would be trained and how long; train nothing")
    chosen = parser.parse_intermixed_args(argv)
    for name in ("jobs", "seeds"):
        if getattr(chosen, name) is not None and getattr(chosen, name) < 1:
            raise ValueError(f"--{name} {getattr(chosen, name)}: at least 1")

    notebooks = find(chosen.notebooks)
    profile = config.profile(chosen.profile)
    wanted = settings(notebooks, chosen.profile, chosen.parameters, chosen.seeds)
    if chosen.plan:
        print(planning.plan(wanted, profile))
        return 0
    with contextlib.ExitStack() as stack:
        address = chosen.dask
        if chosen.jobs > 1:
            from . import cluster  # Dask takes a second to import

            address = stack.enter_context(cluster.local(chosen.jobs))
        stack.enter_context(planning.environment(**{"PUMALIB_DASK": address} if address else {}))
        return run(wanted, profile)


def find(names: list[str]) -> list[Path]:
    """Notebooks by stem, file name or beginning ("03"); without names all but the tools, which start with 9."""
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


def settings(notebooks: list[Path], profile: str, assignments: list[str], seeds: int | None) -> dict[Path, dict]:
    """The parameters of each notebook; papermill itself only warns of unknown ones, and trains with the defaults."""
    values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        try:
            values[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"-p {assignment}: the value is no YAML ({' '.join(str(error).split())})") from None
        if not equals:
            raise ValueError(f"-p {assignment}: write name=value")
    if "profile" in values:
        raise ValueError("-p profile: use --profile")
    if "seeds" in values and seeds:
        raise ValueError("-p seeds and --seeds: give one of them")
    with _quiet():
        known = {notebook: set(papermill.inspect_notebook(notebook)) for notebook in notebooks}
    for name in values:
        lacking = [notebook.stem for notebook in notebooks if name not in known[notebook]]
        if lacking:
            near = difflib.get_close_matches(name, set().union(*known.values()) - {name})
            hint = f"did you mean {' or '.join(sorted(near))}? " if near else ""
            common = ", ".join(sorted(set.intersection(*known.values()))) or "none"
            where = ", ".join(lacking)
            raise ValueError(f"parameter {name!r} is not known to {where}; {hint}known to all selected: {common}; "
                             "for all at once put it into a profile, --profile <file>.yaml")  # fmt: skip
    if seeds and not any("seeds" in names for names in known.values()):
        raise ValueError("--seeds: none of the selected notebooks has seeds")
    values = {"profile": profile, **({"seeds": list(range(seeds))} if seeds else {}), **values}
    return {notebook: {name: values[name] for name in values if name in known[notebook]} for notebook in notebooks}


@dataclass
class Outcome:
    """What became of a notebook; `new` and `cached` are numbers of runs, "?" where they could not be planned."""

    name: str
    status: str
    new: int | str
    cached: int | str
    seconds: float
    csv: list[str]
    error: str = ""


def run(wanted: dict[Path, dict], profile: Profile) -> int:
    """Execute notebooks one after another into `results/<profile>/`: a line of progress each, a closing table."""
    folder = paths.RESULTS / profile.name
    outcomes = []
    for number, (notebook, parameters) in enumerate(wanted.items(), 1):
        try:
            outcomes.append(_run_one(notebook, parameters, folder, f"[{number}/{len(wanted)}] {notebook.stem}"))
        except KeyboardInterrupt:
            finished = ", ".join(o.name for o in outcomes if o.status == "done") or "none"
            print(f"\ninterrupted in {notebook.stem}; finished notebooks: {finished}. Finished runs and checkpoints are "
                  "kept: the same command goes on", file=sys.stderr)  # fmt: skip
            break
    rows = [("notebook", "status", "new", "cached", "minutes", "CSV")]
    rows += [(o.name, o.status, o.new, o.cached, f"{o.seconds / 60:.1f}", " ".join(o.csv)) for o in outcomes]
    print(f"\n{planning.aligned(rows, {o.name: o.error for o in outcomes})}\nin {paths.shown(folder)}")
    if len(outcomes) < len(wanted):
        return 130
    return int(any(o.status != "done" for o in outcomes))


def _run_one(notebook: Path, parameters: dict, folder: Path, title: str) -> Outcome:
    runs, _ = planning.runs_of(notebook, parameters)
    before = set(planning.finished(runs))
    tables = {file: file.stat().st_mtime_ns for file in folder.glob("*.csv")}
    start, error = time.monotonic(), ""
    with _progress(title, runs) as say:
        try:
            execute(notebook, folder, parameters)
        except Exception as raised:  # of any kind: the next notebook can still succeed
            kept = f"{notebook.stem}.failed.ipynb"
            error = planning.said(raised) + (f"; see {kept}" if (folder / kept).is_file() else "")
        seconds, after = time.monotonic() - start, set(planning.finished(runs))
        say(f"{'failed' if error else 'done'} after {seconds / 60:.1f} min")
    written = [file.name for file in sorted(folder.glob("*.csv")) if file.stat().st_mtime_ns != tables.get(file)]
    counts = ("?", "?") if runs is None else (len(after - before), len(before))
    return Outcome(notebook.stem, "FAILED" if error else "done", *counts, seconds, written, error)


def execute(notebook: Path, folder: Path, parameters: dict) -> Path:
    """Execute a notebook; the cleaned result is `folder/<name>`, untouched where it stands there already.

    Raises:
        PapermillExecutionError: a cell failed; the notebook so far is `folder/<name>.failed.ipynb`.
    """
    target, failed = folder / notebook.name, folder / f"{notebook.stem}.failed.ipynb"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".{notebook.stem}.*.tmp.ipynb"):  # by a process that was killed
        if not psutil.pid_exists(int(left.name.split(".")[-3])):
            left.unlink(missing_ok=True)
    temporary = folder / f".{notebook.stem}.{os.getpid()}.tmp.ipynb"
    try:
        with _quiet(), planning.environment(PYTHONWARNINGS=NO_WIDGETS):
            executed = papermill.execute_notebook(
                notebook, temporary, parameters, kernel_name="python3", cwd=paths.NOTEBOOKS, progress_bar=False,
                extra_arguments=["--log-level=CRITICAL"],  # a kernel's own log goes to this screen
            )  # fmt: skip
    except Exception:
        if temporary.is_file():
            temporary.replace(failed)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    text = nbformat.writes(clean(executed)) + "\n"
    if not target.is_file() or target.read_text(encoding="utf-8") != text:
        with paths.written_whole(target) as part:
            part.write_text(text, encoding="utf-8")
    failed.unlink(missing_ok=True)
    return target


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Take out, in place, what differs between executions: times, versions, ids, places and progress bars."""
    notebook.metadata.pop("papermill", None)
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):  # papermill's, empty
            cell.metadata.pop("tags")
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell["id"] = "injected-parameters"  # papermill draws one
        if cell.cell_type != "code":
            continue
        outputs, streams = [], {}
        for output in cell.outputs:  # how a stream falls into pieces is chance
            if output.output_type == "stream" and output.name in streams:
                streams[output.name]["text"] += output.text
            else:
                outputs.append(output)
                if output.output_type == "stream":
                    streams[output.name] = output
            figure = output.get("data", {}).get("image/png")
            if figure:
                output["data"]["image/png"] = base64.b64encode(plots.small_png(base64.b64decode(figure))).decode()
        if "stderr" in streams:
            streams["stderr"]["text"] = _without_bars(streams["stderr"]["text"])
        for stream in streams.values():
            stream["text"] = CELL.sub("a cell", stream["text"].replace(f"{paths.ROOT}{os.sep}", ""))
        cell["outputs"] = [output for output in outputs if output.output_type != "stream" or output.text]
    return notebook


NO_WIDGETS = "ignore:IProgress not found"  # tqdm, in a kernel without widgets
CELL = re.compile(r"\S*ipykernel_\d+\S*\.py")  # the file that a warning is said to come from
BAR = re.compile(r".*?(\d%\||\dit ).*?(\[[^\]]*\]|$)")  # tqdm's, with and without a total


def _without_bars(text: str) -> str:
    """Keep what a terminal would still show of lines that were drawn over and over, but for the bar itself."""
    lines = []
    for line in text.replace("\x1b[A", "\r").split("\n"):
        shown = BAR.sub("", line.rpartition("\r")[2], count=1) if "\r" in line else line
        if shown.strip() or "\r" not in line:
            lines.append(shown)
    text = "\n".join(lines)
    return text if text.strip() else ""


@contextlib.contextmanager
def _progress(title: str, runs: dict[Path, Run] | None) -> Iterator:
    """A line on stderr that counts finished runs while a notebook executes; the function given writes its last word."""
    start, live, stop = time.monotonic(), sys.stderr.isatty(), threading.Event()

    def write(word: str, end: str) -> None:
        count = "runs unknown" if runs is None else f"{len(planning.finished(runs))} of {len(runs)} runs"
        clear = "\x1b[K" if live else ""
        print(f"{title}: {count}, {word}{clear}", end=end, file=sys.stderr, flush=True)

    def draw() -> None:
        while live and not stop.wait(1):
            write(f"{time.monotonic() - start:.0f} s", "\r")

    def halt() -> None:
        stop.set()
        thread.join()

    def say(word: str) -> None:
        halt()
        write(word, "\n")

    thread = threading.Thread(target=draw, daemon=True)
    write("started", "\r" if live else "\n")
    thread.start()
    try:
        yield say
    finally:
        halt()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """papermill and its clients warn of their own deprecations; what fails is said by us."""
    logger = logging.getLogger("papermill")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
