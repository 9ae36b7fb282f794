"""Kept runs: a line each, in files that several processes may write.

The lines of finished runs stand in `results/<profile>/kept-*.jsonl`; `repeated.jsonl` has those of
kept runs that were trained again with other numbers, and `failed.jsonl` those of runs without
numbers, as their loss was not finite: such a run is not trained again until it is removed.  While
it trains a run has a folder, `results/<profile>/runs/<name>/`.  A `profile` may be the path of
another folder.
"""

import difflib
import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from filelock import FileLock

from pumalib import models, paths
from pumalib.config import short_hash
from pumalib.training import NonFiniteLoss, run_folder

from .record import FailedRun, FinishedRun, checked_name

MODEL = models.saved.MODEL_FILE
# Lines, at most, that a file is given: 3 MB of `mini`.
FULL = 250
# Bytes with which it is full too: lines of long trainings on many images are longer.
FULL_BYTES = 3_000_000
KEPT = "kept*.jsonl"
REPEATED = "repeated.jsonl"
FAILED = "failed.jsonl"
FILES = (KEPT, REPEATED, FAILED)
# Set where tables and figures are kept: by `python -m puma_study run`, for the kernels it starts.
KEEPS = "PUMA_STUDY_KEEPS"
# The folder of `results/<profile>/` with those of notebooks that are run by hand; git ignores it.
BY_HAND = "lab"
HOW_TO_REMOVE = "`python -m puma_study runs remove {name} --yes`"

# The name of a damaged line, by a digest of its text: "damaged-1a2b3c4d".
DAMAGED = re.compile(r"damaged-[0-9a-f]{8}")
# The name at the beginning of a line, also of one that is damaged further on.
_BEGINNING = re.compile(r'^\{"name": "([^"]+)"')

# A file and its `paths.state`.
State = tuple[Path, int, int, int, int]


class NotKept(FileNotFoundError):  # noqa: N818 - notebooks and their summary call it so
    """Runs or models that are needed are not kept, and are not to be trained now."""


class Failed(RuntimeError):  # noqa: N818 - as NotKept
    """Runs that are needed have no numbers: their loss was not finite when they were trained."""


@dataclass(frozen=True)
class Line:
    """A line of a file: the record of a run, or a damaged one."""

    file: Path
    number: int
    text: str
    name: str  # of the run; of a damaged line "damaged-" and a digest of its text
    begins: str  # the name at its beginning, "" where there is none; of a whole line its name
    record: FinishedRun | FailedRun | None = None  # None: damaged
    problem: str = ""  # why it is damaged

    @property
    def place(self) -> str:
        """Its place, as "kept-1.jsonl, line 3"."""
        return f"{self.file.name}, line {self.number}"


def output_folder(profile: str) -> Path:
    """Where a notebook writes its tables and figures: `results/<profile>/`.

    Run by hand, as in JupyterLab, it writes to `lab/` there, so that to try something changes
    nothing that is kept.
    """
    home = paths.RESULTS / profile
    ipython = sys.modules.get("IPython")
    by_hand = ipython is not None and ipython.get_ipython() is not None
    if by_hand and KEEPS not in os.environ:
        return home / BY_HAND
    return home


def place(name: str, profile: str | Path) -> Path:
    """Where the folder of a run is, or a link to it.

    Raises ValueError where no run may be called so, or the folder of all is a link.
    """
    checked_name(name)
    home = paths.RESULTS / profile
    runs = home / "runs"
    _require_inside(runs, home.parent)
    return runs / name


def _require_inside(folder: Path, around: Path) -> None:
    """Raise ValueError where a link leads from a folder, as it lies in `around`, to another."""
    found = folder.resolve()
    if found != around.resolve() / folder.relative_to(around):
        raise ValueError(
            f"{paths.shown(folder)} is a link, or below one, to {found}: remove it; to have "
            "results on another disk set PUMALIB_RESULTS=<folder>"
        )


def folder(name: str, profile: str | Path) -> Path:
    """`place`, to be written to: where a run trains, and its model is if it was trained here.

    Raises ValueError where no run may be called so, or its folder is a link that leads elsewhere.
    """
    found = place(name, profile)
    if found.resolve() != found.parent.resolve() / name:
        raise ValueError(
            f"{paths.shown(found)} is a link to {found.resolve()}; a run's folder lies in "
            f"{paths.shown(found.parent)}: `python -m puma_study runs remove {name}` drops the link"
        )
    return found


def read(profile: str | Path) -> dict[str, FinishedRun]:
    """The record of each kept run of a profile, by name.

    Warns of lines that are damaged, and of runs whose lines have different numbers: the first line
    counts.
    """
    return dict(_records(states(profile)))


def states(profile: str | Path) -> tuple[State, ...]:
    """What changes when the kept lines of a profile do."""
    return tuple(_state(file) for file in _files(profile, KEPT))


def lines(profile: str | Path, files: str = KEPT) -> list[Line]:
    """All lines of a profile's files `KEPT`, `REPEATED` or `FAILED`, whole and damaged ones."""
    found: list[Line] = []
    for file in _files(profile, files):
        found += _lines_of(file)
    return found


def failures(profile: str | Path) -> dict[str, FailedRun]:
    """The record of each run that failed, by name.

    A run that was kept all the same, from elsewhere, is not among them.
    """
    known = read(profile)
    found = {}
    for line in lines(profile, FAILED):
        if isinstance(line.record, FailedRun) and line.name not in known:
            found[line.name] = line.record
    return found


def require_none_failed(names: Iterable[str], profile: str | Path) -> None:
    """Raise `Failed`, which says what happened and how to try again, where some of these did."""
    known = failures(profile)
    failed = [known[name] for name in names if name in known]
    if not failed:
        return
    summaries = ", ".join(one.summary for one in failed)
    removed = HOW_TO_REMOVE.format(name=failed[0].name)
    raise Failed(
        f"failed, and so without numbers, in profile {Path(profile).name}: {summaries}.  "
        f"Choose other settings; or {removed}, and it is trained again"
    )


def conflicts(found: Iterable[Line]) -> dict[str, list[Line]]:
    """By run its lines, where their numbers differ, as a merge of two branches can leave them."""
    same_name: dict[str, list[Line]] = {}
    for line in found:
        if line.record is not None:
            same_name.setdefault(line.name, []).append(line)
    return {name: same for name, same in same_name.items() if _differ(same)}


def _differ(same: list[Line]) -> bool:
    records = [line.record for line in same if isinstance(line.record, FinishedRun)]
    return any(not records[0].agrees(other) for other in records[1:])


def record(name: str, profile: str | Path) -> FinishedRun:
    """The record of a kept run; raises what `records` raises."""
    return records([name], profile)[name]


def records(names: Iterable[str], profile: str | Path) -> dict[str, FinishedRun]:
    """The records of kept runs, by name: the files are looked at once.

    Raises ValueError, with names that are near, where one is not kept, and `Failed` where it has no
    numbers.
    """
    known = _records(states(profile))
    found = {}
    for name in names:
        if name not in known:
            require_none_failed([name], profile)
            near = ", ".join(difflib.get_close_matches(name, known)) or "none"
            raise ValueError(f"no run {name!r} is kept in profile {str(profile)!r}; near: {near}")
        found[name] = known[name]
    return found


def classes(name: str, profile: str | Path) -> dict[str, np.ndarray]:
    """`FinishedRun.classes` of a kept run; raises what `records` raises."""
    return record(name, profile).classes()


def _files(profile: str | Path, pattern: str) -> list[Path]:
    """The files of a profile; ValueError where one is a pipe, a folder or a lost link."""
    files = sorted((paths.RESULTS / profile).glob(pattern))
    for file in files:
        # To read from a pipe would wait for ever.
        if not file.is_file():
            raise ValueError(f"{paths.shown(file)} is no file of kept runs: move it elsewhere")
    return files


def _state(file: Path) -> State:
    return file, *paths.state(file.stat())


@lru_cache(maxsize=32)
def _records(states: tuple[State, ...]) -> dict[str, FinishedRun]:
    """The records of files by name, of several with one name the first."""
    found: list[Line] = []
    for state in states:
        found += _parsed(*state)
    records: dict[str, FinishedRun] = {}
    for line in found:
        if isinstance(line.record, FinishedRun):
            records.setdefault(line.name, line.record)

    for name, same in conflicts(found).items():
        places = "; ".join(line.place for line in same)
        warnings.warn(
            f"{paths.shown(same[0].file.parent)}: the lines of run {name} have different numbers "
            f"({places}): the first counts; delete all but one",
            stacklevel=2,
        )
    return records


def _lines_of(file: Path) -> tuple[Line, ...]:
    return _parsed(*_state(file))


@lru_cache(maxsize=64)
def _parsed(file: Path, *state: int) -> tuple[Line, ...]:
    """The lines of a file in this state, without blank ones.

    A file without any is a damaged line without text: none is ever written so, but a power loss
    can leave it.
    """
    content = file.read_text(encoding="utf-8", errors="backslashreplace")
    found = []
    # Not by splitlines, for which a line ends at other characters too.
    for number, text in enumerate(content.split("\n"), 1):
        if text.strip():
            found.append(_line(file, number, text))
    if not found:
        name = f"damaged-{short_hash(file.name)}"
        found.append(Line(file, 1, "", name, "", problem="the file is empty"))
    for line in found:
        if line.record is None:
            warnings.warn(
                f"{paths.shown(file)}, line {line.number} ({line.name}) is damaged "
                f"({line.problem}): its run counts as not done; `python -m puma_study runs remove "
                f"{line.name!r}` drops it, `runs verify` checks all",
                stacklevel=2,
            )
    return tuple(found)


def _line(file: Path, number: int, text: str) -> Line:
    """A line of a file; it is damaged unless it is a record of that kind."""
    kind: type[FinishedRun | FailedRun] = FinishedRun
    if file.name == FAILED:
        kind = FailedRun
    try:
        record = kind.read(text)
    except ValueError as error:
        begins = ""
        beginning = _BEGINNING.match(text)
        if beginning:
            begins = beginning[1]
        name = f"damaged-{short_hash(text)}"
        return Line(file, number, text, name, begins, problem=str(error)[:200])
    return Line(file, number, text, record.name, record.name, record)


def add(finished: FinishedRun, profile: str | Path) -> None:
    """Keep a finished run, unless a run of this name is kept already."""
    if finished.name not in read(profile):
        put(finished.name, finished.line(), profile)


def add_repeat(finished: FinishedRun, profile: str | Path) -> None:
    """Keep the record of a kept run that was trained again beside its line, once."""
    text = finished.line()
    with _locked(profile) as home:
        texts = [line.text for line in lines(profile, REPEATED)]
        if text not in texts:
            _write(home / REPEATED, [*texts, text])


def add_failure(failed: FailedRun, profile: str | Path) -> None:
    """Keep the record of a failed run; it replaces an earlier one of the same name."""
    with _locked(profile) as home:
        others = [line.text for line in lines(profile, FAILED) if line.begins != failed.name]
        _write(home / FAILED, sorted([*others, failed.line()]))


def put(name: str, text: str, profile: str | Path) -> None:
    """Write the line of a run, in place of every line that begins with its name.

    Files are written whole, by one process at a time, and sorted by name.
    """
    checked_name(name)
    with _locked(profile) as home:
        by_file = {file: _lines_of(file) for file in _files(profile, KEPT)}
        holding = []
        roomy = []
        for file, found in by_file.items():
            if any(line.begins == name for line in found):
                holding.append(file)
            if len(found) < FULL and file.stat().st_size < FULL_BYTES:
                roomy.append(file)
        numbers = (home / f"kept-{number}.jsonl" for number in itertools.count(1))
        new = next(file for file in numbers if file not in by_file)
        # The file that has the run already, else one with room.
        chosen = [*holding, *roomy, new][0]

        for file in dict.fromkeys([chosen, *holding]):
            # An empty file has a damaged line without text.
            others = [line for line in by_file.get(file, []) if line.begins != name and line.text]
            # Damaged lines without a name at their beginning go by the one they were given.
            name_of = {line.text: line.begins or line.name for line in others}
            if file == chosen:
                name_of[text] = name
            _write(file, sorted(name_of, key=lambda one: name_of[one]))


def drop(name: str, profile: str | Path) -> None:
    """Remove every line called `name`, the name of a run or of a damaged line."""
    with _locked(profile):
        for pattern in FILES:
            for file in _files(profile, pattern):
                found = _lines_of(file)
                others = [line.text for line in found if line.name != name]
                if len(others) < len(found):
                    _write(file, others)


@contextmanager
def held(where: Path) -> Iterator[None]:
    """Lock a run's folder for its training, and keep the finished run.

    Another process that wants the same run waits.  If the run is kept with other numbers, the new
    ones are kept beside them.  If it fails, and has no numbers from before, that is kept.

    Raises `Failed` where it has failed before.
    """
    profile = where.parents[1]
    # Refuses what leads elsewhere.
    folder(where.name, profile)
    with run_folder.held(where):
        # Without its model it is trained again, even where its numbers are there.
        if run_folder.is_finished(where) and not (where / MODEL).is_file():
            (where / run_folder.FINISHED).unlink()
        require_none_failed([where.name], profile)
        try:
            yield
        except NonFiniteLoss as failure:
            if where.name in read(profile):
                raise
            raise _kept_as_failed(where, failure) from failure
        finished = record_in(where)
        add(finished, profile)
        if not record(where.name, profile).agrees(finished):
            add_repeat(finished, profile)


def _kept_as_failed(where: Path, failure: NonFiniteLoss) -> NonFiniteLoss:
    """Keep the failure of the run in this folder; returns the error to raise."""
    settings = json.loads((where / run_folder.SETTINGS).read_text(encoding="utf-8"))
    failed = FailedRun.of(
        {
            "name": where.name,
            "run": settings,
            "environment": failure.environment,
            "where": failure.where,
            "what": failure.what,
        }
    )
    profile = where.parents[1]
    add_failure(failed, profile)
    file = paths.shown(profile / FAILED)
    removed = HOW_TO_REMOVE.format(name=where.name)
    return NonFiniteLoss(
        f"{failure}.  Noted in {file}: this run is not trained again before {removed}"
    )


def record_in(where: Path) -> FinishedRun:
    """The record of the run that finished in the folder `where`; ValueError: it is damaged."""
    content = run_folder.read_record(where)
    try:
        return FinishedRun.rounded({"name": where.name, **content})
    except ValueError as error:
        file = paths.shown(where / run_folder.FINISHED)
        raise ValueError(
            f"{file} is damaged ({error}); remove the folder: where the run is needed it is "
            "trained again"
        ) from error


@contextmanager
def _locked(profile: str | Path) -> Iterator[Path]:
    """The folder of a profile, while no other process writes its lines; ValueError: a link."""
    home = paths.RESULTS / profile
    _require_inside(home, home.parent)
    run_folder.make(home)
    with FileLock(home / ".kept.lock"):
        yield home


def _write(file: Path, texts: list[str]) -> None:
    """Write the lines of a file; without any there is none, as an empty one is damaged."""
    if not texts:
        file.unlink()
        paths.sync_folder(file.parent)
        return
    run_folder.write_text(file, "".join(f"{text}\n" for text in texts))
