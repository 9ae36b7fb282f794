"""The folder of a run: its name, its lock, its files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pandas as pd
import psutil
from filelock import FileLock

from .. import paths
from ..config import Run

FINISHED = "metrics.json"  # written last: a folder that has it is complete, and only read
CHECKPOINTS = ("checkpoint.pt", "checkpoint.previous.pt")


def name(run: Run, data_digest: str, weights_digest: str) -> str:
    """A readable name that ends in a hash of everything that can change the run's numbers."""
    return f"{run.method.name}-{run.loss}-{run.identity(data_digest, weights_digest)[:8]}"


def ensemble_name(members: list[str]) -> str:
    """The name of an ensemble by those of its members: their method and loss, and a hash of theirs."""
    return f"{members[0].rsplit('-', 1)[0]}-ensemble-{short_hash(members)}"


def short_hash(content) -> str:
    """Eight hexadecimal digits that tell JSON contents apart."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def make(folder: Path) -> None:
    """Make the folder, or raise an OSError that says how to write elsewhere; sweep what dead processes left in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "name another place with PUMALIB_RESULTS=<folder>"
        raise OSError(error.errno, f"cannot make {folder}: {error.strerror}; {remedy}") from error
    for left in folder.glob(".*.tmp"):  # .<name>.<process>.tmp of paths.written_whole
        process = left.name.split(".")[-2]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            left.unlink(missing_ok=True)


def lock(folder: Path) -> FileLock:
    """Held by the one process that writes to `folder`; a finished run is read without."""
    return FileLock(folder / ".lock")


def write_text(file: Path, text: str) -> None:
    """Write a whole text file or nothing."""
    with paths.written_whole(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_record(folder: Path) -> dict:
    """A finished run as JSON can hold it: its run.json, environment.json, metrics.json, and log, a dict per epoch.

    Raises:
        ValueError: a file is missing or damaged; the message names it and the remedy.
    """
    record, file = {}, folder
    try:
        for key in ("environment", "metrics", "run"):
            file = folder / f"{key}.json"
            record[key] = json.loads(file.read_text(encoding="utf-8"))
            if lacking := {"metrics": {"table", "hits"}}.get(key, set()) - record[key].keys():
                raise ValueError(f"it lacks {min(lacking)}")
        if "members" not in record["run"]:
            Run.from_json(json.dumps(record["run"]))
        file = folder / "log.csv"
        record["log"] = pd.read_csv(file).to_dict("records") if file.is_file() else []
    except (OSError, ValueError, AttributeError) as error:
        remedy = f"remove the folder {paths.shown(folder)}: where the run is needed it is trained again"
        raise ValueError(f"{paths.shown(file)} is damaged or missing ({error}); {remedy}") from error
    return record
