"""A line of a file of kept runs: what a record must have, how it is written, and read again.

A line is JSON: the run's name, its settings `run` (an ensemble has `members`), its numbers, and a
digest of all that.  The line of a run that failed, as its loss was not finite, says `where` and
`what` in place of numbers; it stands in a file of its own.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pumalib import evaluation, models
from pumalib.config import Run
from pumalib.training import run_folder

# A run's name becomes a path: "puma-proxynca++-1a2b3c4d" may, "..", "a/b" and ".hidden" may not.
NAME = re.compile(r"(?!damaged-)[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
# What a damaged line is called, by a digest of its text: "damaged-1a2b3c4d".
DAMAGED = re.compile(r"damaged-[0-9a-f]{8}")
# The name at the beginning of a line, also of one that is damaged further on.
_BEGINNING = re.compile(r'^\{"name": "([^"]+)"')
# Settings are nested two deep; what goes through them by recursion would not survive a thousand.
_DEEPEST = 20
# Columns of the table that count queries; all others are fractions.
_COUNTS = ("queries", "excluded")
# Numbers of a record that are no fractions, and what all of them are below.
_LIMITED = ("seconds", "images_per_second", "trainable", "total")
_LARGEST = 10**15
# Two fractions that differ by less are equal: kept ones have eight digits.
_ROUNDED = 1e-6

# Raises ValueError where a record is not of a kind: `check_finished` or `check_failed`.
Check = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Line:
    """A line of a file: the record of a run, or what is left of one."""

    file: Path
    number: int
    text: str
    name: str  # of the run; of a damaged line "damaged-" and a digest of its text
    begins: str  # the name at its beginning, "" where there is none; of a whole line its name
    record: dict[str, Any] | None = None  # None: damaged
    problem: str = ""  # why it is damaged

    @property
    def place(self) -> str:
        """Where it stands, as "kept-1.jsonl, line 3"."""
        return f"{self.file.name}, line {self.number}"


def checked_name(name: Any) -> str:
    """Return `name` if a run may be called so, else raise ValueError: it becomes a path."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"{str(name)[:80]!r} cannot be the name of a run: "
            "at most 200 letters, digits and . _ + -, the first a letter or a digit"
        )
    return name


def parsed(file: Path, number: int, text: str, check: Check) -> Line:
    """Line `number` of `file`; what `check`, of finished or of failed runs, refuses is damaged."""
    try:
        record = json.loads(text)
        if record.pop("digest") != run_folder.short_hash(record):
            raise ValueError("its digest is another")
        check(record)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        begins = ""
        beginning = _BEGINNING.match(text)
        if beginning:
            begins = beginning[1]
        name = f"damaged-{run_folder.short_hash(text)}"
        return Line(file, number, text, name, begins, problem=str(error)[:200])
    return Line(file, number, text, record["name"], record["name"], record)


def emptied(file: Path) -> Line:
    """What stands for a file without lines, whose runs are lost."""
    name = f"damaged-{run_folder.short_hash(file.name)}"
    return Line(file, 1, "", name, "", problem="the file is empty")


def written(record: dict[str, Any], check: Check) -> str:
    """The line of a record, without its end; ValueError where `check`, as in `parsed`, refuses."""
    check(record)
    return json.dumps(record | {"digest": run_folder.short_hash(record)})


def rounded(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its name first and 8 digits of every number, but its settings as they are."""
    numbers = {key: value for key, value in record.items() if key != "run"}
    short = json.loads(json.dumps(numbers), parse_float=_eight_digits)
    return {"name": record["name"], **record, **short}


def _eight_digits(text: str) -> float:
    return float(f"{float(text):.8g}")


def agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two records have the same numbers: their accuracies, and the hits of every query.

    Bounds of intervals do not count: they follow from the hits, and from how classes are drawn.
    """
    return _numbers(one) == _numbers(other)


def _numbers(record: dict[str, Any]) -> str:
    table = []
    for row in record["table"]:
        values = {key: row[key] for key in row if not key.endswith(("_low", "_high"))}
        table.append(values)
    # As text, since NaN is not equal to itself.
    return json.dumps([table, record["hits"]], sort_keys=True)


def check_failed(record: dict[str, Any]) -> None:
    """Raise ValueError where a record lacks what that of a failed run has, or has numbers."""
    checked_name(record.get("name"))
    _check_settings(record)
    _need(record, "environment", dict)
    _need(record, "where", str)
    _need(record, "what", str)
    for key in ("table", "hits"):
        if key in record:
            raise ValueError(f"a run that failed has no {key!r}")


def check_finished(record: dict[str, Any]) -> None:
    """Raise ValueError where a record lacks what that of a finished run has."""
    checked_name(record.get("name"))
    if "members" in record:
        _check_members(record)
    else:
        _check_settings(record)
    _need(record, "environment", dict)
    _need(record["environment"], "device", str)
    if not record["environment"]["device"].isprintable():
        raise ValueError("its 'device' holds what is no text")
    _need(record, "parameters", dict)
    _need(record["parameters"], "trainable", int)
    _need(record["parameters"], "total", int)
    _need(record, "seconds", int, float)
    _need(record, "images_per_second", int, float, type(None))
    if "open_loss" in record:
        _need(record, "open_loss", int, float, type(None))
    _check_size(record | record["parameters"])
    _check_table(record)
    check_name_of(record)


def check_name_of(record: dict[str, Any]) -> None:
    """Raise ValueError where the name of a finished run does not follow from what it is.

    Where images were drawn by the seed, or weights or texts are files that may be other ones here,
    its hash cannot be made again: `rows.run_all` and `runs verify` look at those.
    """
    if "members" in record:
        expected = run_folder.ensemble_name(record["members"])
    else:
        expected = _expected_name(record)
    if record["name"] != expected:
        raise ValueError(f"by its settings it would be called {expected}")


def _expected_name(record: dict[str, Any]) -> str:
    """The name of a run by its settings and by the digest of its data."""
    run = Run.from_dict(record["run"])
    environment = record["environment"]
    _need(environment, "data", str)
    digest = environment["data"]
    if run.training.score_epochs:
        _need(environment, "held_out", str)
        digest += environment["held_out"]
    _, _, identity = record["name"].rpartition("-")
    kind = f"{run.method.name}-{run.loss}-{identity}"
    is_of_a_file = run.pretrained not in models.saved.WITHOUT_FILE or "texts" in run.loss_settings
    if run.data.shots or is_of_a_file:
        return kind
    return run_folder.name_by_digests(run, digest, run_folder.weights_digest(run))


def _need(content: dict[str, Any], key: str, *kinds: type) -> None:
    if not isinstance(content.get(key, ...), kinds):
        raise ValueError(f"its {key!r} is missing, or of another kind")


def _check_size(numbers: dict[str, Any]) -> None:
    """Raise ValueError for a number that no run has: 10^400 cannot even be computed with."""
    for key in _LIMITED:
        value = numbers.get(key)
        if value is not None and not 0 <= value < _LARGEST:
            raise ValueError(f"its {key!r} is no number that a run has")


def _check_members(record: dict[str, Any]) -> None:
    _need(record, "members", list)
    if not record["members"]:
        raise ValueError("it is an ensemble without members")
    for member in record["members"]:
        checked_name(member)


def _check_settings(record: dict[str, Any]) -> None:
    _need(record, "run", dict)
    _need(record["run"], "seed", int)
    _check_depth(record["run"])


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise ValueError("its settings are nested too deeply")
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list):
        parts = value
    for part in parts:
        _check_depth(part, depth + 1)


def _check_table(record: dict[str, Any]) -> None:
    """Every row has a dataset and numbers; hits and classes are those of rows, and give its R@1."""
    rows = _rows_of(record)
    for part in ("hits", "classes"):
        _need(record, part, dict)
        for dataset, text in record[part].items():
            if dataset not in rows or not isinstance(text, str):
                raise ValueError(f"its {part!r} of {dataset!r} fit no row of its 'table'")
            bits = _unpacked(part, dataset, text, rows[dataset]["queries"])
            if part == "hits":
                _check_close(rows[dataset], bits.mean(), "its hits")
        # The harmonic mean is that of the datasets, and has none of its own.
        without = rows.keys() - record[part].keys() - {"harmonic"}
        if without:
            raise ValueError(f"its {part!r} lack those of {min(without)!r}")
    own = [row for name, row in rows.items() if name not in evaluation.OVERALL]
    queries = sum(row["queries"] for row in own)
    if rows["unified"]["queries"] != queries:
        raise ValueError(f"its datasets have {queries} queries, and not those of 'unified'")
    mean = float(evaluation.harmonic_mean(np.array([row["R@1"] for row in own])))
    _check_close(rows["harmonic"], mean, "its datasets")


def _rows_of(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of its table by dataset, each once; those of all datasets are among them."""
    _need(record, "table", list)
    rows: dict[str, dict[str, Any]] = {}
    for row in record["table"]:
        if not isinstance(row, dict):
            raise ValueError("a row of its 'table' is of another kind")
        _check_row(row)
        if row["dataset"] in rows:
            raise ValueError(f"its 'table' has {row['dataset']!r} twice")
        rows[row["dataset"]] = row
    for overall in evaluation.OVERALL:
        if overall not in rows:
            raise ValueError(f"its 'table' has no row {overall!r}")
    return rows


def _unpacked(part: str, dataset: str, text: str, count: int) -> np.ndarray:
    try:
        return evaluation.unpack(text, count)
    except ValueError as error:
        raise ValueError(f"its {part!r} of {dataset!r}: {error}") from error


def _check_close(row: dict[str, Any], expected: float, by: str) -> None:
    """Raise ValueError where R@1 of a row is not what follows from the rest of the record."""
    # Not "above": NaN is not close.
    if not abs(expected - row["R@1"]) <= _ROUNDED:
        raise ValueError(f"its R@1 of {row['dataset']!r} is {row['R@1']}, by {by} {expected:.8g}")


def _check_row(row: dict[str, Any]) -> None:
    """A row has a dataset, whole numbers of queries, and fractions, R@1 among them."""
    _need(row, "dataset", str)
    where = f"of {row['dataset']!r}"
    _need(row, "R@1", int, float)
    for key, value in row.items():
        if key == "dataset":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"its {key!r} {where} is no number")
        if key in _COUNTS:
            if not isinstance(value, int) or not 0 <= value < _LARGEST:
                raise ValueError(f"its {key!r} {where} is no number of queries")
        elif not 0 <= value <= 1:
            raise ValueError(f"its {key!r} {where} is no fraction")
    _need(row, "queries", int)
