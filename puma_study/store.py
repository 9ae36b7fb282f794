"""The runs that were kept: a line for each finished run, see `kept_line`.

The lines stand in `results/<profile>/kept-*.jsonl`; `repeated.jsonl` has those of kept runs that
were trained again with other numbers, and `failed.jsonl` those of runs without numbers, as their
loss was not finite: such a run is not trained again until it is removed.  While it trains a run has
a folder, `results/<profile>/runs/<name>/`.  A `profile` may be the path of another folder.
"""

import difflib
import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from pumalib import evaluation, models, paths
from pumalib.training import NonFiniteLoss, run_folder

from . import kept_line
from .kept_line import Line

MODEL = models.saved.MODEL_FILE
# Lines, at most, that a file is given: 3 MB of `mini`.
FULL = 250
# Bytes with which it is full too: lines of long trainings on many images are longer.
FULL_BYTES = 3_000_000
REPEATED = "repeated.jsonl"
FAILED = "failed.jsonl"
HOW_TO_REMOVE = "`python -m puma_study runs remove {name} --yes`"

# A file and its `paths.state`.
State = tuple[Path, int, int, int, int]


class NotKept(FileNotFoundError):  # noqa: N818 - notebooks and their summary call it so
    """Runs or models that are needed are not kept, and are not to be trained now."""


class Failed(RuntimeError):  # noqa: N818 - as NotKept
    """Runs that are needed have no numbers: their loss was not finite when they were trained."""


@dataclass(frozen=True)
class Repeat:
    """The record of a kept run, that of a later training of it, and whether their numbers agree."""

    kept: dict[str, Any]
    again: dict[str, Any]
    agree: bool

    @property
    def same_hits(self) -> bool:
        """Whether every query finds its class, or does not, as it was kept."""
        return self.kept["hits"] == self.again["hits"]


def place(name: str, profile: str | Path) -> Path:
    """Where the folder of a run is, or a link to it.

    Raises ValueError where no run may be called so, or the folder of all is a link.
    """
    kept_line.checked_name(name)
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


def read(profile: str | Path) -> dict[str, dict[str, Any]]:
    """The record of each kept run of a profile, by name.

    A record has the settings `run`, or of an ensemble its `members`, and numbers.  Warns of lines
    that are damaged, and of runs whose lines have different numbers: the first line counts.
    """
    return dict(_records(states(profile)))


def states(profile: str | Path) -> tuple[State, ...]:
    """What changes when the kept lines of a profile do."""
    return tuple(_state(file) for file in _kept_files(profile))


def lines(profile: str | Path) -> list[Line]:
    """All lines of a profile's kept files, whole and damaged ones."""
    found = []
    for file in _kept_files(profile):
        found += _lines_of(file)
    return found


def repeated(profile: str | Path) -> list[Line]:
    """The lines of kept runs that were trained again with other numbers."""
    return _lines_of(paths.RESULTS / profile / REPEATED)


def failures(profile: str | Path) -> dict[str, dict[str, Any]]:
    """The record of each run that failed, by name: its settings `run`, `where` and `what`.

    A run that was kept all the same, from elsewhere, is not among them.
    """
    known = read(profile)
    found = {}
    for line in failed_lines(profile):
        if line.record is not None and line.name not in known:
            found[line.name] = line.record
    return found


def failed_lines(profile: str | Path) -> list[Line]:
    """The lines of runs that failed."""
    return _lines_of(paths.RESULTS / profile / FAILED)


def require_none_failed(names: Iterable[str], profile: str | Path) -> None:
    """Raise `Failed`, which says what happened and how to try again, where some of these did."""
    known = failures(profile)
    failed = {name: known[name] for name in names if name in known}
    if not failed:
        return
    removed = HOW_TO_REMOVE.format(name=next(iter(failed)))
    raise Failed(
        f"failed, and so without numbers, in profile {Path(profile).name}: {told(failed)}.  "
        f"Choose other settings; or {removed}, and it is trained again"
    )


def told(failed: Mapping[str, dict[str, Any]]) -> str:
    """What happened to runs that failed: "puma-ms-1a2b3c4d (epoch 3, batch 7: the loss is nan)"."""
    parts = [f"{name} ({record['where']}: {record['what']})" for name, record in failed.items()]
    return ", ".join(parts)


def conflicts(found: Iterable[Line]) -> dict[str, list[Line]]:
    """By run its lines, where their numbers differ, as a merge of two branches can leave them."""
    same_name: dict[str, list[Line]] = {}
    for line in found:
        if line.record is not None:
            same_name.setdefault(line.name, []).append(line)
    return {name: same for name, same in same_name.items() if _differ(same)}


def _differ(same: list[Line]) -> bool:
    records = [line.record for line in same if line.record is not None]
    return any(not kept_line.agree(records[0], record) for record in records[1:])


def record(name: str, profile: str | Path) -> dict[str, Any]:
    """The record of a kept run; errors as of `records`."""
    return records([name], profile)[name]


def records(names: Iterable[str], profile: str | Path) -> dict[str, dict[str, Any]]:
    """The records of kept runs, by name: the files are looked at once.

    Raises ValueError, with names that are near, where one is not kept, and `Failed` where it has no
    numbers.
    """
    known = read(profile)
    found = {}
    for name in names:
        if name not in known:
            require_none_failed([name], profile)
            near = ", ".join(difflib.get_close_matches(name, known)) or "none"
            raise ValueError(f"no run {name!r} is kept in profile {str(profile)!r}; near: {near}")
        found[name] = known[name]
    return found


def hits(name: str, profile: str | Path) -> dict[str, np.ndarray]:
    """R@1 (0 or 1) of every query of a kept run, (queries,) per dataset and for "unified"."""
    return unpacked(record(name, profile), "hits")


def classes(name: str, profile: str | Path) -> dict[str, np.ndarray]:
    """A number for the class of every query of a kept run, (queries,) as of `hits`."""
    is_first = unpacked(record(name, profile), "classes")
    return {dataset: first.cumsum() for dataset, first in is_first.items()}


def unpacked(record: dict[str, Any], key: str) -> dict[str, np.ndarray]:
    """What `evaluation.Scores.packed` wrote as `key` of a record: (queries,) 0 or 1 by dataset."""
    counts = {row["dataset"]: row["queries"] for row in record["table"]}
    found = {}
    for dataset, text in record[key].items():
        found[dataset] = evaluation.unpack(text, counts[dataset]).astype(float)
    return found


def _kept_files(profile: str | Path) -> list[Path]:
    """The kept files of a profile; ValueError where one is a pipe, a folder or a lost link."""
    files = sorted((paths.RESULTS / profile).glob("kept*.jsonl"))
    for file in files:
        # To read from a pipe would wait for ever.
        if not file.is_file():
            raise ValueError(f"{paths.shown(file)} is no file of kept runs: move it elsewhere")
    return files


def _state(file: Path) -> State:
    return file, *paths.state(file.stat())


@lru_cache(maxsize=32)
def _records(states: tuple[State, ...]) -> dict[str, dict[str, Any]]:
    """The records of files by name, of several with one name the first."""
    found: list[Line] = []
    for state in states:
        found += _parsed(*state)
    records: dict[str, dict[str, Any]] = {}
    for line in found:
        if line.record is not None:
            records.setdefault(line.name, line.record)

    for name, same in conflicts(found).items():
        places = "; ".join(line.place for line in same)
        warnings.warn(
            f"{paths.shown(same[0].file.parent)}: the lines of run {name} have different numbers "
            f"({places}): the first counts; delete all but one",
            stacklevel=2,
        )
    return records


def _lines_of(file: Path) -> list[Line]:
    if not file.is_file():
        return []
    return list(_parsed(*_state(file)))


@lru_cache(maxsize=64)
def _parsed(file: Path, *state: int) -> tuple[Line, ...]:
    """The lines of a file in this state; blank ones hold nothing.

    A file without any is a damaged line without text: none is ever written so, but a power loss
    can leave it.
    """
    content = file.read_text(encoding="utf-8", errors="backslashreplace")
    check = kept_line.check_finished
    if file.name == FAILED:
        check = kept_line.check_failed
    found = []
    # Not by splitlines, for which a line ends at other characters too.
    for number, text in enumerate(content.split("\n"), 1):
        if text.strip():
            found.append(kept_line.parsed(file, number, text, check))
    if not found:
        found.append(kept_line.emptied(file))
    for line in found:
        if line.record is None:
            warnings.warn(
                f"{paths.shown(file)}, line {line.number} ({line.name}) is damaged "
                f"({line.problem}): its run counts as not done; `python -m puma_study runs remove "
                f"{line.name!r}` drops it, `runs verify` checks all",
                stacklevel=2,
            )
    return tuple(found)


def add(finished: dict[str, Any], profile: str | Path) -> None:
    """Keep the record of a finished run, unless one is kept already; its results are rounded.

    Raises ValueError where it is not the record of a finished run.
    """
    if finished["name"] not in read(profile):
        text = kept_line.written(kept_line.rounded(finished), kept_line.check_finished)
        put(finished["name"], text, profile)


def add_repeat(finished: dict[str, Any], profile: str | Path) -> None:
    """Keep the record of a kept run that was trained again beside its line, once."""
    text = kept_line.written(kept_line.rounded(finished), kept_line.check_finished)
    with _locked(profile) as home:
        texts = [line.text for line in repeated(profile)]
        if text not in texts:
            _write(home / REPEATED, [*texts, text])


def add_failure(failed: dict[str, Any], profile: str | Path) -> None:
    """Keep the record of a run that failed, in place of an earlier one of its name.

    Raises ValueError where it is not the record of such a run.
    """
    text = kept_line.written(kept_line.rounded(failed), kept_line.check_failed)
    with _locked(profile) as home:
        others = [line.text for line in failed_lines(profile) if line.begins != failed["name"]]
        _write(home / FAILED, sorted([*others, text]))


def put(name: str, text: str, profile: str | Path) -> None:
    """Write the line of a run, in place of every line that begins with its name.

    Files are written whole, by one process at a time, and sorted by name.
    """
    kept_line.checked_name(name)
    with _locked(profile) as home:
        by_file = {file: _lines_of(file) for file in _kept_files(profile)}
        holding = []
        roomy = []
        for file, found in by_file.items():
            if any(line.begins == name for line in found):
                holding.append(file)
            if len(found) < FULL and file.stat().st_size < FULL_BYTES:
                roomy.append(file)
        numbers = (home / f"kept-{number}.jsonl" for number in itertools.count(1))
        new = next(file for file in numbers if file not in by_file)
        # Where the run stands already, else where there is room.
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
    """Take out every line called `name`, which may be a run's or that of a damaged line."""
    with _locked(profile) as home:
        for file in [*_kept_files(profile), home / REPEATED, home / FAILED]:
            found = _lines_of(file)
            others = [line.text for line in found if line.name != name]
            if len(others) < len(found):
                _write(file, others)


@contextmanager
def held(where: Path) -> Iterator[None]:
    """Lock a run's folder for its training, and keep the finished run.

    Another process that wants the same run waits.  If the run is kept with other numbers, the new
    ones are kept beside them, see `compare_repeat`.  If it fails, and has no numbers from before,
    that is kept.

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
        finished = _finished(where)
        add(finished, profile)
        if not compare_repeat(where, profile).agree:
            add_repeat(finished, profile)


def _kept_as_failed(where: Path, failure: NonFiniteLoss) -> NonFiniteLoss:
    """Keep what happened to the run of this folder; returns what is to be raised."""
    settings = json.loads((where / run_folder.SETTINGS).read_text(encoding="utf-8"))
    failed = {
        "name": where.name,
        "run": settings,
        "environment": failure.environment,
        "where": failure.where,
        "what": failure.what,
    }
    profile = where.parents[1]
    add_failure(failed, profile)
    file = paths.shown(profile / FAILED)
    removed = HOW_TO_REMOVE.format(name=where.name)
    return NonFiniteLoss(
        f"{failure}.  Noted in {file}: this run is not trained again before {removed}"
    )


def compare_repeat(where: Path, profile: str | Path) -> Repeat:
    """The kept record of the run that trained in the folder `where`, and the folder's own."""
    kept = record(where.name, profile)
    again = _finished(where)
    return Repeat(kept, again, kept_line.agree(kept, again))


def _finished(where: Path) -> dict[str, Any]:
    finished = kept_line.rounded({"name": where.name, **run_folder.read_record(where)})
    try:
        kept_line.check_finished(finished)
    except ValueError as error:
        file = paths.shown(where / run_folder.FINISHED)
        raise ValueError(
            f"{file} is damaged ({error}); remove the folder: where the run is needed it is "
            "trained again"
        ) from error
    return finished


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
