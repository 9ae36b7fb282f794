"""The folder of a run: its name, its lock, its files."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from .. import data, losses, models, paths
from ..config import Run, short_hash

FINISHED = "metrics.json"  # written last: a folder that has it is complete, and only read
SETTINGS = "run.json"  # written first
LOCK = ".lock"  # held by the one process that writes to the folder; a finished run is read without
CHECKPOINTS = ("checkpoint.pt", "checkpoint.previous.pt")


def run_name(run: Run) -> str:
    """The name of a run: method, loss, and a hash of all that can change its numbers.

    Raises ValueError or OSError if data or weights are not on this machine.
    """
    weights = weights_digest(run)
    contents = data.load(run.data).digest
    if run.training.score_epochs:
        # The held-out classes choose the epoch of the final model.
        contents += data.held_out(run.data).digest
    return name_by_digests(run, contents, weights)


def weights_digest(run: Run) -> str:
    """A digest of a run's initial weights and of its loss's texts.

    Raises ValueError or OSError if they are not on this machine.
    """
    weights = models.backbones.weights_digest(run.backbone, run.pretrained)
    return weights + losses.texts.digest(run.loss_settings.get("texts", ""))


def name_by_digests(run: Run, data_digest: str, weights_digest: str) -> str:
    """The name of a run with these digests of data and weights."""
    more = losses.implicit_defaults(run.loss, run.loss_settings)
    of_part = models.part_settings(run.method)
    if of_part:
        more["part"] = of_part
    fingerprint = run.fingerprint(data_digest, weights_digest, more)
    return f"{run.method.name}-{run.loss}-{fingerprint}"


def ensemble_name(members: list[str]) -> str:
    """The name of an ensemble, from the names of its members: method, loss, and a hash."""
    method_and_loss, _, _ = members[0].rpartition("-")
    return f"{method_and_loss}-ensemble-{short_hash(members)}"


def make(folder: Path) -> None:
    """Make the folder, and remove old temporary files of dead processes from it.

    The message of an OSError says how to write elsewhere.
    """
    try:
        paths.make_folder(folder)
    except OSError as error:
        why = f"cannot make {folder}: {error.strerror}; {paths.remedy(folder, error)}"
        raise OSError(error.errno, why) from error
    paths.sweep(folder)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a run's folder: another process with the same run waits, then finds it finished."""
    make(folder)
    with FileLock(folder / LOCK):
        yield


def write_text(file: Path, text: str) -> None:
    """Write a whole text file or nothing."""
    with paths.written_whole(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the record of a finished run, with its digest."""
    text = json.dumps(record | {"digest": short_hash(record)})
    write_text(folder / FINISHED, text)


def is_finished(folder: Path) -> bool:
    """Whether a run has finished here.

    A damaged record, such as an empty file after a power loss, is removed with a warning: the run
    resumes from its checkpoint, or starts again.  Raises ValueError where the file cannot be read,
    or is a whole record that this version does not understand.
    """
    file = folder / FINISHED
    if not file.is_file():
        return False
    try:
        read_record(folder)
    except ValueError as error:
        # It may be whole all the same: unreadable for now, or of a newer version.
        if isinstance(error.__cause__, OSError) or _has_its_digest(file):
            raise
        warnings.warn(f"{error}; the record is removed, and the run goes on", stacklevel=3)
        file.unlink(missing_ok=True)
        return False
    return True


def _has_its_digest(file: Path) -> bool:
    """Whether a record is as it was written."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return record.pop("digest") == short_hash(record)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def require_same_settings(run: Run, folder: Path) -> None:
    """Raise ValueError if the folder holds another run, finished or not."""
    try:
        there = Run.from_dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
    except (OSError, ValueError):  # nothing was begun here, or its settings are damaged
        return
    if there.fingerprint("", "") != run.fingerprint("", ""):
        what = f"{paths.shown(folder)} holds another run ({there.method.name}, {there.loss}"
        remedy = "name another folder, or remove this one"
        raise ValueError(f"{what}, seed {there.seed}, or other settings): {remedy}")


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a finished run; ValueError, with the remedy, if it is missing or damaged."""
    file = folder / FINISHED
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        # Old records have no digest.
        digest = record.pop("digest", None)
        if digest is not None and digest != short_hash(record):
            raise ValueError("it was changed after it was written")
        Run.from_dict(record["run"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        shown = paths.shown(folder)
        remedy = f"remove the folder {shown}: where the run is needed it is trained again"
        raise ValueError(
            f"{paths.shown(file)} is damaged or missing ({error}); {remedy}"
        ) from error
    return record


def accuracies(record: Mapping[str, Any]) -> str:
    """R@1 of every dataset, unified and harmonic: "cars 0.712, unified 0.712, harmonic 0.712"."""
    return ", ".join(f"{row['dataset']} {row['R@1']:.3f}" for row in record["table"])
