"""The runs that were kept: `results/<profile>/kept-*.jsonl` have a line for each finished run, its settings and numbers.
While it trains a run has a folder, `results/<profile>/runs/<name>/`.  A `profile` may be the path of another folder."""

import difflib
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
from filelock import FileLock

from .. import evaluation, models, paths
from ..training import run_folder

MODEL = models.saved.FILE
FULL = 250  # lines of a file: 3 MB of `mini`


class NotKept(FileNotFoundError):
    """Runs, or models, that are needed are not kept, and may not be trained."""


def read(profile: str | Path) -> dict[str, dict]:
    """The record of each kept run of a profile by name: its settings `run`, or an ensemble's `members`, and numbers."""
    return lines(profile)[0]


def lines(profile: str | Path) -> tuple[dict[str, dict], dict[str, str]]:
    """Records and lines by name; a line that is damaged has no record, and a name by what is left of it."""
    parts = [part for _, part in _files(profile)]
    return tuple({name: found for part in parts for name, found in part[which].items()} for which in range(2))


def _files(profile: str | Path) -> list[tuple[Path, tuple[dict, dict]]]:
    found = [(file, file.stat()) for file in sorted((paths.RESULTS / profile).glob("kept*.jsonl"))]
    return [(file, _lines(file, state.st_mtime_ns, state.st_size, state.st_ino)) for file, state in found]


@lru_cache(maxsize=8)
def _lines(file: Path, *state: int) -> tuple[dict[str, dict], dict[str, str]]:
    records, texts = {}, {}
    for number, text in enumerate(file.read_text(encoding="utf-8", errors="backslashreplace").splitlines(), 1):
        try:
            record = json.loads(text)
            if record.pop("digest") != run_folder.short_hash(record):
                raise ValueError("its digest is another")
            records[record["name"]], texts[record["name"]] = record, text
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            name = next(iter(re.findall(r'^\{"name": "([^"]+)"', text)), f"line {number} of {file.name}")
            texts.setdefault(name, text)
            remedy = f"its run counts as not done; `python -m pumalib runs remove {name!r}` drops it, `runs verify` checks all"
            warnings.warn(f"{paths.shown(file)}, line {number} ({name}) is damaged ({error}): {remedy}", stacklevel=2)
    return records, texts


def put(name: str, text: str | None, profile: str | Path) -> None:
    """Write, or with None take out, a run's line; a file is written whole, by one process at a time."""
    home = paths.RESULTS / profile
    run_folder.make(home)
    with FileLock(home / ".kept.lock"):
        files = {file: texts for file, (_, texts) in _files(home)}
        holding = [file for file in files if name in files[file]]
        roomy = [file for file in files if len(files[file]) < FULL] or [home / f"kept-{len(files) + 1}.jsonl"]
        for file in holding or roomy[: bool(text)]:
            texts = {**files.get(file, {}), name: text}
            run_folder.write_text(file, "".join(f"{texts[key]}\n" for key in sorted(texts) if texts[key]))


def add(record: dict, profile: str | Path) -> None:
    """Keep a finished run, unless it is kept already; floats but those of the settings with 8 digits."""
    if record["name"] not in read(profile):
        numbers = {key: value for key, value in record.items() if key != "run"}
        numbers = json.loads(json.dumps(numbers), parse_float=lambda text: float(f"{float(text):.8g}"))
        content = {"name": record["name"], **record, **numbers}
        put(record["name"], json.dumps(content | {"digest": run_folder.short_hash(content)}), profile)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a run's folder for its training, or wait for the process that trains it, and keep the finished run."""
    run_folder.make(folder)
    with FileLock(folder / run_folder.LOCK):
        if not (folder / MODEL).is_file():  # then it is trained again, whatever its numbers
            (folder / run_folder.FINISHED).unlink(missing_ok=True)
        yield
        add({"name": folder.name, **run_folder.read_record(folder)}, folder.parents[1])


def folder(name: str, profile: str | Path) -> Path:
    """Where a run trains, and its model is, if it was not trained elsewhere."""
    return paths.RESULTS / profile / "runs" / name


def record(name: str, profile: str | Path) -> dict:
    """The record of a kept run; a ValueError, where it was not kept, gives near names."""
    if name not in (known := read(profile)):
        near = ", ".join(difflib.get_close_matches(name, known)) or "none"
        raise ValueError(f"no run {name!r} is kept in profile {str(profile)!r}; near: {near}")
    return known[name]


def hits(name: str, profile: str | Path, part: str = "hits") -> dict[str, np.ndarray]:
    """R@1 (0 or 1) of every query of a kept run, (queries,) per dataset and for "unified"."""
    found = record(name, profile)
    counts = {line["dataset"]: line["queries"] for line in found["table"]}
    return {key: evaluation.unpack(text, counts[key]).astype(float) for key, text in found[part].items()}
