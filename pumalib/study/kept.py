"""The runs that were kept: `results/<profile>/kept.jsonl` has a line for each finished run, its settings and numbers.

While it trains, a run has its folder `results/<profile>/runs/<name>/`; the line is what tables and a fresh clone read.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
from filelock import FileLock

from .. import data, evaluation, models, paths, training
from ..config import Run
from ..training import run_folder

MODEL = "model.safetensors"
COLUMNS = [
    "profile",
    "finished",
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
FIELDS = ("name", "environment", "parameters", "seconds", "images_per_second", "table", "hits", "log")


def read(profile: str) -> dict[str, dict]:
    """The record of each kept run of a profile by name: `FIELDS`, and its settings `run` or an ensemble's `members`."""
    return lines(paths.RESULTS / profile)[0]


def lines(home: Path) -> tuple[dict[str, dict], dict[str, str]]:
    """Records of `home/kept.jsonl` by name, and all its lines by name; by what is left of it where one is damaged."""
    try:
        state = (home / "kept.jsonl").stat()
    except (FileNotFoundError, NotADirectoryError):
        return {}, {}
    return _lines(home / "kept.jsonl", state.st_mtime_ns, state.st_size, state.st_ino)


@lru_cache(maxsize=8)
def _lines(file: Path, *state: int) -> tuple[dict[str, dict], dict[str, str]]:
    records, texts = {}, {}
    for number, text in enumerate(file.read_text(encoding="utf-8", errors="backslashreplace").split("\n"), 1):
        try:
            record = json.loads(text or "null")
            if record is None:
                continue
            lacking = {*FIELDS, "members" if "members" in record else "run"} - record.keys()
            if lacking:
                raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
            records[record["name"]] = record
            texts[record["name"]] = text
        except (ValueError, TypeError, AttributeError) as error:
            named = re.match(r'\{"name": "([^"]+)"', text)
            name = named[1] if named else f"line {number}"
            texts.setdefault(name, text)
            remedy = f"its run counts as not done; `python -m pumalib runs verify` checks all, `runs remove {name!r}` drops it"
            warnings.warn(f"{paths.shown(file)}, line {number} ({name}) is damaged ({error}): {remedy}", stacklevel=2)
    return records, texts


def change(home: Path, edit: Callable[[dict[str, str]], None]) -> None:
    """Let `edit` change the lines by name, and write the file whole; one process at a time."""
    run_folder.make(home)
    with FileLock(home / ".kept.lock"):
        texts = dict(lines(home)[1])
        edit(texts)
        run_folder.write_text(home / "kept.jsonl", "".join(f"{texts[name]}\n" for name in sorted(texts)))


def add(home: Path, record: dict) -> None:
    """Keep a finished run, unless it is kept already; floats but those of the settings with 8 digits."""
    if record["name"] in lines(home)[0]:
        return
    numbers = {key: value for key, value in record.items() if key != "run"}
    numbers = json.loads(json.dumps(numbers), parse_float=lambda text: float(f"{float(text):.8g}"))
    text = json.dumps({"name": record["name"], **record, **numbers})
    change(home, lambda texts: texts.update({record["name"]: text}))


def add_folder(folder: Path) -> None:
    """Keep the finished run of a folder."""
    found = run_folder.read_record(folder)
    add(folder.parents[1], {"name": folder.name, **found, **found.pop("metrics")})


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make and lock the folder of a run for its training, and keep the run if it is finished afterwards."""
    run_folder.make(folder)
    with run_folder.lock(folder):
        if not (folder / MODEL).is_file():  # then it is trained again, whatever its numbers
            (folder / training.FINISHED).unlink(missing_ok=True)
        yield
        add_folder(folder)


def folder(name: str, profile: str) -> Path:
    """Where a run trains, and its model is, if it was not trained elsewhere."""
    return paths.RESULTS / profile / "runs" / name


def run_name(run: Run) -> str:
    """The name of a run, which ends in a hash of everything that can change its numbers, its images included.

    Raises:
        ValueError, OSError: data or weights are not on this machine.
    """
    weights = models.backbones.weights_digest(run.backbone, run.pretrained)
    return run_folder.name(run, data.load(run.data).digest(), weights)


def record(name: str, profile: str) -> dict:
    """The record of a kept run.

    Raises:
        ValueError: it was not kept; near names are given.
    """
    known = read(profile)
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        raise ValueError(f"no run {name!r} is kept in profile {profile!r}; near: {', '.join(near) or 'none'}")
    return known[name]


def run_of(name: str, profile: str) -> Run:
    """The settings of a kept run.

    Raises:
        ValueError: it is an ensemble, or not kept.
    """
    found = record(name, profile)
    if "members" in found:
        raise ValueError(f"{name} is an ensemble of {', '.join(found['members'])}: name one of them")
    return Run.from_dict(found["run"])


def members(name: str, profile: str) -> dict[str, str]:
    """Per dataset the name of an ensemble's member."""
    return {run_of(member, profile).data.datasets[0]: member for member in record(name, profile)["members"]}


def hits(name: str, profile: str) -> dict[str, np.ndarray]:
    """R@1 (0 or 1) of every query of a kept run, (queries,) per dataset and for "unified"."""
    return hits_of(record(name, profile))


def hits_of(found: dict) -> dict[str, np.ndarray]:
    """The same of a record."""
    counts = {line["dataset"]: line["queries"] for line in found["table"]}
    return {key: evaluation.unpack(text, counts[key]).astype(float) for key, text in found["hits"].items()}


def runs(profile: str | None = None) -> pd.DataFrame:
    """A row per run of a profile (None: of all), kept or with an unfinished folder; the index is its name.

    Columns: `COLUMNS`, unified and harmonic being R@1 in percent, and each setting under its dotted name
    (`method.name`, `data.benchmark`, `training.lr`, ...).
    """
    found = []
    for home in sorted(path for path in paths.RESULTS.glob(profile or "*") if path.is_dir()):
        records = lines(home)[0]
        for name, kept in records.items():
            r1 = {line["dataset"]: 100 * line["R@1"] for line in kept["table"]}
            line = {"name": name, "profile": home.name, "finished": True, "members": len(kept.get("members", ()))}
            line |= {"trainable": kept["parameters"]["trainable"], "unified": r1["unified"], "harmonic": r1["harmonic"]}
            line |= {"seconds": kept["seconds"], "device": kept["environment"]["device"]}
            found.append(line | (records.get(kept["members"][0], {}) if "members" in kept else kept).get("run", {}))
        for file in home.glob("runs/*/run.json"):
            if file.parent.name not in records:
                unfinished = json.loads(file.read_text(encoding="utf-8"))
                found.append(dict(name=file.parent.name, profile=home.name, finished=False, **unfinished))
    table = pd.json_normalize(found)
    table = table.reindex(columns=list(dict.fromkeys(["name", *COLUMNS, "method.name", "training.epochs", *table])))
    return table.assign(method=table["method.name"], epochs=table["training.epochs"]).set_index("name")


def find(label: str) -> tuple[str, str]:
    """(profile, name) of a run called `name` or `profile/name`, also if its line is damaged or it is not finished.

    Raises:
        ValueError: there is none, or more than one.
    """
    known = {f"{home.name}/{name}" for home in paths.RESULTS.glob("*/") for name in lines(home)[1]}
    known |= {f"{path.parents[1].name}/{path.name}" for path in paths.RESULTS.glob("*/runs/[!.]*/")}
    fit = [other for other in sorted(known) if label in (other, other.partition("/")[2])]
    if len(fit) != 1:
        near = ", ".join(
            fit or difflib.get_close_matches(label, [n for other in known for n in (other, other.partition("/")[2])])
        )
        raise ValueError(f"{'several runs are' if fit else 'no run is'} called {label!r}; near: {near or 'none'}")
    return tuple(fit[0].split("/"))


def remove(name: str, profile: str) -> None:
    """Remove a run, its line and its folder.

    Raises:
        Timeout: a running process holds it.
    """
    place = folder(name, profile)
    if place.is_dir():
        with run_folder.lock(place).acquire(timeout=0):
            (place / training.FINISHED).unlink(missing_ok=True)  # first: what is half removed must not look finished
            shutil.rmtree(place)
    change(paths.RESULTS / profile, lambda texts: texts.pop(name, None))


def compare(first: str, second: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The settings in which two runs differ; and their R@1 in percent, with the second minus the first in pairs.

    Raises:
        ValueError: they were not tested on the same queries.
    """
    places = [find(label) for label in (first, second)]
    no_settings = [column for column in COLUMNS if column not in ("loss", "seed")]
    settings = [runs(profile).loc[name].drop(no_settings) for profile, name in places]
    settings = pd.concat(settings, axis=1, keys=[first, second])
    found = [record(name, profile) for profile, name in places]
    tables = [pd.DataFrame(r["table"]).set_index("dataset") for r in found]
    if not tables[0]["queries"].equals(tables[1]["queries"]):
        said = "; ".join(", ".join(f"{name} ({n})" for name, n in table["queries"].items()) for table in tables)
        raise ValueError(f"{first} and {second} were not tested on the same queries: {said}")
    table = 100 * pd.concat([table["R@1"] for table in tables], axis=1, keys=[first, second])
    gains = evaluation.paired_difference(*([hits_of(r)] for r in reversed(found)))
    gains[["value", "low", "high"]] *= 100
    return settings[settings.astype(str).nunique(axis=1) > 1], table.join(gains)


def problems(profile: str | None = None) -> Iterator[str]:
    """What is wrong with kept runs: lines, numbers that hits do not give, other names today, models that do not load."""
    for home in sorted(file.parent for file in paths.RESULTS.glob(f"{profile or '*'}/kept.jsonl")):
        records, texts = lines(home)
        for name in texts:
            try:
                if name not in records:
                    yield f"{home.name}/{name}: damaged line; `runs remove` drops it, `run` trains the run again"
                else:
                    yield from (f"{home.name}/{name}: {problem}" for problem in _problems(records[name], home, records))
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:  # go on
                yield f"{home.name}/{name}: {type(error).__name__}: {error}"


def _problems(kept: dict, home: Path, records: dict[str, dict]) -> Iterator[str]:
    r1 = {line["dataset"]: line["R@1"] for line in kept["table"]}
    given = {name: float(values.mean()) for name, values in hits_of(kept).items()}
    own = np.array([value for name, value in given.items() if name != "unified"])
    given["harmonic"] = float(evaluation.harmonic_mean(own))
    for name in r1.keys() | given.keys():
        if not abs(r1.get(name, np.nan) - given.get(name, np.nan)) < 1e-6:
            yield f"R@1 of {name} is {r1.get(name)}, its stored hits give {given.get(name)}"
    if lost := set(kept.get("members", ())) - records.keys():
        yield f"its members {', '.join(sorted(lost))} are not kept"
    run = None if "members" in kept else Run.from_dict(kept["run"])
    with suppress(OSError, ValueError):  # data or weights are not on this machine
        today = run_name(run) if run else run_folder.ensemble_name(kept["members"])
        if today != kept["name"]:
            yield f"outdated: today's data, weights and code, or a changed setting, would call it {today}"
    if (home / "runs" / kept["name"] / MODEL).is_file():
        models.load(home / "runs" / kept["name"])
