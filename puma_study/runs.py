"""Kept runs listed, compared, checked and removed: `python -m puma_study runs`."""

import ast
import difflib
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock

from pumalib import evaluation, models, paths
from pumalib.config import NOT_IN_FINGERPRINT, Run
from pumalib.training import run_folder

from . import contrasts, store
from .record import FailedRun, FinishedRun

COLUMNS = [
    "profile",
    "method",
    "loss",
    "seed",
    "epochs",
    "members",
    "trainable",
    "unified",
    "harmonic",
    "seconds",
    "device",
]
# Columns that a training gives, not the settings.
RESULTS = [
    "trainable",
    "unified",
    "harmonic",
    "seconds",
    "device",
    "images_per_second",
    "open_loss",
]
# Settings that another column shows, or that change no number.
UNSHOWN = ["method.name", "training.epochs", "data.root", "data.split"]
UNSHOWN += [f"training.{name}" for name in NOT_IN_FINGERPRINT]
# Settings that are asked first whether they tell lines apart.
FIRST = ["dim", "training.lr", "data.datasets", "data.shots", "data.holdout"]
# Columns of `list_runs` also where no run has them.
ALWAYS = [
    *COLUMNS,
    "images_per_second",
    "open_loss",
    "method.name",
    "training.epochs",
    "backbone",
    "data.image_size",
]

# Of runs that failed, as `list_failures` has them.
FAILED_COLUMNS = ["profile", "method", "loss", "seed", "epochs", "where", "what"]


def run_of(name: str, profile: str | Path) -> Run:
    """The settings of a kept run; ValueError where it is an ensemble, or is not kept."""
    return store.record(name, profile).settings


def list_runs(profile: str | None = None) -> pd.DataFrame:
    """A row per kept run of a profile (None: all profiles), indexed by its name.

    Columns: `ALWAYS`, unified and harmonic being R@1 in percent, and each setting under its dotted
    name, as `training.lr`.  `open_loss` is that of `training.loop.open_loss`, NaN of runs from
    before it was kept.
    """
    rows = []
    for home in _homes(profile):
        records = store.read(home)
        for kept in records.values():
            rows.append(_settings_of(kept, records) | _summary(home.name, kept))
    return _by_name(rows)


def profiles_of(name: str) -> list[str]:
    """The profiles in which a run of this name is kept."""
    return [home.name for home in _homes(None) if name in store.read(home)]


def shown_columns(table: pd.DataFrame) -> list[str]:
    """`COLUMNS`, and those settings without which two lines of `list_runs` would look alike."""
    # A setting of None is a value like any other.
    texts = table.astype(object).map(str)
    settings = [name for name in COLUMNS if name not in RESULTS]
    others = [name for name in table if name not in (*COLUMNS, *RESULTS) and name not in UNSHOWN]
    distinguishing: list[str] = []
    for name in sorted(others, key=lambda one: (one not in FIRST, one)):
        alike = texts.groupby([*settings, *distinguishing], sort=False)
        if alike[name].nunique().max() > 1:
            distinguishing.append(name)
    place = COLUMNS.index("unified")
    return [*COLUMNS[:place], *distinguishing, *COLUMNS[place:]]


def select(table: pd.DataFrame, query: str) -> pd.DataFrame:
    """The rows of `list_runs` that a query of pandas asks for, which is compared and never run.

    It has names, numbers, texts, lists and what compares and joins them.  Raises ValueError for
    all else, calls among it, and for what pandas does not take.
    """
    _require_comparison(query)
    try:
        found = table.query(query)
    except Exception as error:  # pandas raises nearly anything
        raise ValueError(f"{error}; columns: {', '.join(table)}") from error
    if not isinstance(found, pd.DataFrame):
        raise ValueError("it asks for no rows")
    return found


# The characters of a name in backticks, and the syntax that a query may use.
_QUOTED = re.compile(r"`([^`]*)`")
_PLAIN = re.compile(r"[\w. +-]+")
_COMPARISON = (
    ast.Expression,
    ast.BoolOp,
    ast.boolop,
    ast.BinOp,
    ast.operator,
    ast.UnaryOp,
    ast.unaryop,
    ast.Compare,
    ast.cmpop,
    ast.Name,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.expr_context,
)


def _require_comparison(query: str) -> None:
    """Raise ValueError for a query that is more than a comparison: pandas would run code in it."""
    refused = (
        "write a comparison of columns: no @, no call, no attribute (`training.lr` in backticks)"
    )
    if not all(_PLAIN.fullmatch(name) for name in _QUOTED.findall(query)):
        raise ValueError(refused)
    try:
        tree = ast.parse(_QUOTED.sub("quoted", query).strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(refused) from None
    for node in ast.walk(tree):
        if not isinstance(node, _COMPARISON) or isinstance(node, ast.MatMult):
            raise ValueError(refused)


def list_failures(profile: str | None = None) -> pd.DataFrame:
    """A row per failed run, with the columns of `list_runs`; its results are empty.

    `where` and `what` say what happened.
    """
    rows = []
    for home in _homes(profile):
        for name, failed in store.failures(home).items():
            happened = {"where": failed.where, "what": failed.what}
            rows.append(failed.run | {"name": name, "profile": home.name} | happened)
    return _by_name(rows)


def _by_name(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Settings and what else is said of runs, as a table."""
    table = pd.json_normalize(rows)
    columns = list(dict.fromkeys(["name", *ALWAYS, *table]))
    table = table.reindex(columns=columns)
    table = table.astype({"images_per_second": float, "open_loss": float})
    table = table.assign(method=table["method.name"], epochs=table["training.epochs"])
    return table.set_index("name")


def _homes(profile: str | None) -> list[Path]:
    """The folders of all profiles, or of the one that is named."""
    folders = sorted(folder for folder in paths.RESULTS.glob("*") if folder.is_dir())
    return [folder for folder in folders if profile is None or fnmatch(folder.name, profile)]


def _kept_homes(profile: str | None) -> list[Path]:
    """The folders of `_homes`; ValueError if nothing is kept in the named profile."""
    homes = _homes(profile)
    if profile is not None and not homes:
        known = ", ".join(home.name for home in _homes(None))
        raise ValueError(f"nothing is kept of a profile {profile!r}; there are: {known or 'none'}")
    return homes


def _settings_of(kept: FinishedRun, records: Mapping[str, FinishedRun]) -> dict[str, Any]:
    """The settings of a run, or of the first member of an ensemble if that is kept."""
    if kept.members is not None:
        first = records.get(kept.members[0])
        if first is None:
            return {}
        kept = first
    return kept.run or {}


def _summary(profile: str, kept: FinishedRun) -> dict[str, Any]:
    row = {
        "name": kept.name,
        "profile": profile,
        "members": len(kept.members or ()),
        "trainable": kept.parameters.trainable,
        "device": kept.environment.device,
        "seconds": kept.seconds,
        "images_per_second": kept.images_per_second,
        "open_loss": kept.open_loss,
    }
    for overall in evaluation.OVERALL:
        row[overall] = 100 * kept.accuracy(overall)
    return row


def find(label: str) -> tuple[str, str]:
    """(name, profile) of the only run called `name` or `profile/name`, finished or not.

    A damaged line goes by its own name, as `runs verify` prints it.  Raises ValueError where there
    is none, or several.
    """
    known = set()
    for home in _homes(None):
        found = [line for files in store.FILES for line in store.lines(home, files)]
        known |= {(line.name, home.name) for line in found}
        folders = [path for path in home.glob("runs/[!.]*") if path.is_symlink() or path.is_dir()]
        known |= {(folder.name, home.name) for folder in folders}
    fit = []
    for name, profile in sorted(known):
        if label in (name, f"{profile}/{name}"):
            fit.append((name, profile))
    if len(fit) == 1:
        return fit[0]

    problem = "no run is"
    near = difflib.get_close_matches(label, [name for name, _ in known])
    if fit:
        problem = "several runs are"
        near = [f"{profile}/{name}" for name, profile in fit]
    raise ValueError(f"{problem} called {label!r}; near: {', '.join(near) or 'none'}")


def remove(name: str, profile: str) -> None:
    """Remove a run, its lines and its folder, or a damaged line; one that failed can then be tried.

    Raises filelock's Timeout where a running process holds the run.
    """
    if not store.DAMAGED.fullmatch(name):
        _remove_folder(store.place(name, profile))
    store.drop(name, profile)


def _remove_folder(place: Path) -> None:
    """Remove a folder, of a link to one the link alone."""
    if place.is_symlink():
        place.unlink()
    elif place.is_dir():
        with FileLock(place / run_folder.LOCK).acquire(timeout=0):
            # First: a half-removed run must not look finished.
            (place / run_folder.FINISHED).unlink(missing_ok=True)
            shutil.rmtree(place)


def compare(first: str, second: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The settings in which two runs differ; and R@1 of both with their difference.

    R@1 is in percent.  The runs are paired query by query, whatever their seeds.
    """
    one = find(first)
    two = find(second)
    accuracies = [store.record(*run).scores()["R@1"] for run in (one, two)]
    settings = [_compared_settings(*one), _compared_settings(*two)]

    beside = pd.concat(settings, axis=1, keys=[first, second])
    unequal = beside[beside.astype(str).nunique(axis=1) > 1]
    difference = 100 * contrasts.of_runs(two, one)[["value", "low", "high"]]
    table = 100 * pd.concat(accuracies, axis=1, keys=[first, second])
    return unequal, table.join(difference)


def _compared_settings(name: str, profile: str) -> pd.Series:
    results = {*COLUMNS, *RESULTS} - {"loss", "seed"}
    return list_runs(profile).loc[name].drop(list(results))


def problems(profile: str | None = None) -> Iterator[str]:
    """The problems of kept runs, each with its remedy.

    That is: damaged lines, lines of one run with different numbers, names that today's data,
    weights or code would not give, lost members, and models that do not load.  ValueError where
    nothing is kept of the profile, as of one whose name is mistyped: that is not "no problem".
    """
    for home in _kept_homes(profile):
        kept = store.lines(home)
        for line in kept:
            if line.record is None:
                yield f"{home.name}/{line.name}: {_damage(line)}, `run` trains the run again"
        for line in store.lines(home, store.REPEATED):
            if line.record is None:
                yield f"{home.name}/{line.name}: {_damage(line)}"
        for name, same in store.conflicts(kept).items():
            places = " and ".join(line.place for line in same)
            yield (
                f"{home.name}/{name}: different numbers in {places}; delete all but one, or "
                "`runs remove` drops all and `run` trains the run again"
            )
        for name, record in store.read(home).items():
            found = _problem(record, home)
            if found:
                yield f"{home.name}/{name}: {found}"
        for problem in _problems_of_failed(home):
            yield f"{home.name}/{problem}"


def _problems_of_failed(home: Path) -> Iterator[str]:
    """The problems of the lines of failed runs, each with the name of its run."""
    kept = store.read(home)
    for line in store.lines(home, store.FAILED):
        if line.record is None:
            yield f"{line.name}: {_damage(line)}"
        elif line.name in kept:
            yield f"{line.name}: kept, and failed elsewhere; delete {line.place}"
        else:
            outdated = _outdated(line.record)
            if outdated:
                yield f"{line.name}: failed; {outdated}"


def _damage(line: store.Line) -> str:
    begins = ""
    if line.begins:
        begins = f" it begins as {line.begins[:80]!r};"
    return f"damaged line ({line.place}: {line.problem});{begins} `runs remove` drops it"


def _problem(kept: FinishedRun, home: Path) -> str:
    """The problem of a kept run, or an empty text."""
    try:
        lost = _lost_members(kept, home)
        if lost:
            return lost
        _load_model(kept.name, home)
        return _outdated(kept)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def _lost_members(kept: FinishedRun, home: Path) -> str:
    lost = set(kept.members or ()) - store.read(home).keys()
    if lost:
        return f"its members {', '.join(sorted(lost))} are not kept"
    return ""


def _load_model(name: str, home: Path) -> None:
    """Load the model, if there is one; raises an error if it is damaged."""
    folder = store.folder(name, home)
    if (folder / store.MODEL).is_file():
        models.load_model(folder)


def _outdated(kept: FinishedRun | FailedRun) -> str:
    """The name that the run would have today if it is another one, or an empty text."""
    if isinstance(kept, FinishedRun) and kept.members:
        today = run_folder.ensemble_name(kept.members)
    else:
        settings = kept.settings
        today = kept.name
        # Data or weights may not be on this machine.
        with suppress(OSError, ValueError):
            today = run_folder.run_name(settings)
    if today != kept.name:
        return f"outdated: today's data, weights, code or a changed setting would call it {today}"
    return ""
