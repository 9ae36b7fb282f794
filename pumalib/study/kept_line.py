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

from ..training import run_folder

# A run's name becomes a path: "puma-proxynca++-1a2b3c4d" may, "..", "a/b" and ".hidden" may not.
NAME = re.compile(r"(?!damaged-)[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
# What a damaged line is called, by a digest of its text: "damaged-1a2b3c4d".
DAMAGED = re.compile(r"damaged-[0-9a-f]{8}")
# The name at the beginning of a line, also of one that is damaged further on.
_BEGINNING = re.compile(r'^\{"name": "([^"]+)"')
# Settings are nested two deep; what goes through them by recursion would not survive a thousand.
_DEEPEST = 20

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
    _need(record, "parameters", dict)
    _need(record["parameters"], "trainable", int)
    _need(record["parameters"], "total", int)
    _need(record, "seconds", int, float)
    _need(record, "images_per_second", int, float, type(None))
    if "open_loss" in record:
        _need(record, "open_loss", int, float, type(None))
    _check_table(record)


def _need(content: dict[str, Any], key: str, *kinds: type) -> None:
    if not isinstance(content.get(key, ...), kinds):
        raise ValueError(f"its {key!r} is missing, or of another kind")


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
    """Every row has a dataset and numbers; hits and classes are those of rows."""
    _need(record, "table", list)
    for row in record["table"]:
        if not isinstance(row, dict):
            raise ValueError("a row of its 'table' is of another kind")
        _need(row, "dataset", str)
        _need(row, "queries", int)
        for key, value in row.items():
            if key != "dataset" and not isinstance(value, int | float):
                raise ValueError(f"its {key!r} of {row['dataset']!r} is no number")

    datasets = {row["dataset"] for row in record["table"]}
    for part in ("hits", "classes"):
        _need(record, part, dict)
        for dataset, text in record[part].items():
            if dataset not in datasets or not isinstance(text, str):
                raise ValueError(f"its {part!r} of {dataset!r} fit no row of its 'table'")
