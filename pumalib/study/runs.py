"""Kept runs listed, compared, checked and removed."""

import difflib
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pandas as pd
from filelock import FileLock

from .. import evaluation, models, paths
from ..config import Run
from ..training import run_folder
from . import store


class NotTestable(ValueError):
    """Runs cannot be compared; or a table, row or column that a claim needs is missing, or cannot answer."""


COLUMNS = ["profile", "method", "loss", "seed", "epochs", "members", "trainable"]
COLUMNS += ["unified", "harmonic", "seconds", "device"]
ALWAYS = [*COLUMNS, "images_per_second", "method.name", "training.epochs", "backbone", "data.image_size"]


def run_of(name: str, profile: str) -> Run:
    """The settings of a kept run; a ValueError says whether it is an ensemble, or not kept."""
    found = store.record(name, profile)
    if "members" in found:
        raise ValueError(f"{name} is an ensemble of {', '.join(found['members'])}: name one of them")
    return Run.from_dict(found["run"])


def difference(ours: list[str], theirs: list[str], profile, large=(), other=None) -> pd.DataFrame:
    """`evaluation.paired_difference` of a row and another (of the profile `other`, if it is another), each the names of its
    runs by seed; NotTestable: other queries."""
    sides = [[store.hits(name, home) for name in names] for names, home in ((ours, profile), (theirs, other or profile))]
    mine, others = ({key: len(hit) for key, hit in side[0].items()} for side in sides)
    if mine != others:
        raise NotTestable(f"{ours[0]} and {theirs[0]} were tested on other queries: `runs list` shows their data")
    begins = store.hits(ours[0], profile, "classes")  # of each query, whether it is the first of its class
    return evaluation.paired_difference(*sides, {key: first.cumsum() for key, first in begins.items()}, large)


def list_runs(profile: str | None = None) -> pd.DataFrame:
    """A row per run kept of a profile (None: of all); the index is its name.
    Columns: `ALWAYS`, unified and harmonic being R@1 in percent, and each setting under its dotted name, `training.lr`."""
    found = []
    for home in sorted(path for path in paths.RESULTS.glob(profile or "*") if path.is_dir()):
        records = store.read(home)
        for name, kept in records.items():
            members = kept.get("members", ())
            line = {"name": name, "profile": home.name, "members": len(members)}
            line |= {row["dataset"]: 100 * row["R@1"] for row in kept["table"][-2:]}  # unified and harmonic
            line |= {"trainable": kept["parameters"]["trainable"], "device": kept["environment"]["device"]}
            line |= {key: kept[key] for key in ("seconds", "images_per_second")}
            found.append(line | (records.get(members[0], {}) if members else kept).get("run", {}))
    table = pd.json_normalize(found)
    table = table.reindex(columns=list(dict.fromkeys(["name", *ALWAYS, *table]))).astype({"images_per_second": float})
    return table.assign(method=table["method.name"], epochs=table["training.epochs"]).set_index("name")


def find(label: str) -> tuple[str, str]:
    """(name, profile) of the one run called `name` or `profile/name`, also if damaged or unfinished, or a ValueError."""
    known = {(name, home.name) for home in paths.RESULTS.glob("*/") for name in store.lines(home)[1]}
    known |= {(path.name, path.parents[1].name) for path in paths.RESULTS.glob("*/runs/[!.]*/")}
    fit = [(name, profile) for name, profile in sorted(known) if label in (name, f"{profile}/{name}")]
    if len(fit) != 1:
        near = [f"{profile}/{name}" for name, profile in fit] or difflib.get_close_matches(label, dict(known))
        said = "several runs are" if fit else "no run is"
        raise ValueError(f"{said} called {label!r}; near: {', '.join(near) or 'none'}")
    return fit[0]


def remove(name: str, profile: str) -> None:
    """Remove a run, its line and its folder; filelock's Timeout: a running process holds it."""
    place = store.folder(name, profile)
    if place.is_dir():
        with FileLock(place / run_folder.LOCK).acquire(timeout=0):
            (place / run_folder.FINISHED).unlink(missing_ok=True)  # first: what is half removed must not look finished
            shutil.rmtree(place)
    store.put(name, None, profile)


def compare(first: str, second: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The settings in which two runs differ; and their R@1 in percent, with the second minus the first in pairs."""
    labels, (one, two) = [first, second], (find(first), find(second))
    numbers = [column for column in COLUMNS if column not in ("loss", "seed")]
    settings = pd.concat([list_runs(profile).loc[name].drop(numbers) for name, profile in (one, two)], axis=1, keys=labels)
    tables = [pd.DataFrame(store.record(*place)["table"]).set_index("dataset") for place in (one, two)]
    gains = difference([two[0]], [one[0]], two[1], other=one[1])
    gains[["value", "low", "high"]] *= 100
    table = 100 * pd.concat([table["R@1"] for table in tables], axis=1, keys=labels)
    return settings[settings.astype(str).nunique(axis=1) > 1], table.join(gains)


def problems(profile: str | None = None) -> Iterator[str]:
    """What is wrong with kept runs: damaged lines, other names today, models that do not load."""
    for home in sorted(paths.RESULTS.glob(profile or "*")):
        for name in store.lines(home)[1]:
            try:
                found = _problem(name, home)
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:  # go on
                found = f"{type(error).__name__}: {error}"
            if found:
                yield f"{home.name}/{name}: {found}"


def _problem(name: str, home: Path) -> str:
    if not (kept := store.read(home).get(name)):
        return "damaged line; `runs remove` drops it, `run` trains the run again"
    run, today = None if "members" in kept else Run.from_dict(kept["run"]), name
    if lost := set(kept.get("members", ())) - store.read(home).keys():
        return f"its members {', '.join(sorted(lost))} are not kept"
    with suppress(OSError, ValueError):  # data or weights are not on this machine
        today = run_folder.run_name(run) if run else run_folder.ensemble_name(kept["members"])
    if (store.folder(name, home) / store.MODEL).is_file():
        models.load_model(store.folder(name, home))
    return f"outdated: today's data, weights, code or a changed setting would call it {today}" * (today != name)
