"""The runs that were kept: `results/<profile>/kept-*.jsonl` have a line for each finished run, its settings and numbers.
While it trains a run has a folder, `results/<profile>/runs/<name>/`.  A `profile` may be the path of another folder."""

import difflib
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
from filelock import FileLock

from .. import data, evaluation, losses, models, paths
from ..config import Run
from ..training import run_folder

MODEL = models.saved.FILE
FULL = 250  # lines of a file: 3 MB of `mini`
COLUMNS = ["profile", "method", "loss", "seed", "epochs", "members", "trainable"]
COLUMNS += ["unified", "harmonic", "seconds", "device"]
ALWAYS = [*COLUMNS, "images_per_second", "method.name", "training.epochs", "backbone", "data.image_size"]


class NotKept(FileNotFoundError):
    """Runs, or models, that are needed are not kept, and may not be trained."""


class NotTestable(ValueError):
    """Runs cannot be compared; or a table, row or column that a claim needs is missing, or cannot answer."""


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


def _put(name: str, text: str | None, profile: str | Path) -> None:
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
        _put(record["name"], json.dumps(content | {"digest": run_folder.short_hash(content)}), profile)


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


def run_name(run: Run) -> str:
    """The name of a run; a ValueError or OSError says which data or weights are not on this machine."""
    weights = models.backbones.weights_digest(run.backbone, run.pretrained)
    weights += losses.texts.digest(run.loss_settings.get("texts", ""))
    return run_folder.name(run, data.load(run.data).digest, weights)


def record(name: str, profile: str | Path) -> dict:
    """The record of a kept run; a ValueError, where it was not kept, gives near names."""
    if name not in (known := read(profile)):
        near = ", ".join(difflib.get_close_matches(name, known)) or "none"
        raise ValueError(f"no run {name!r} is kept in profile {str(profile)!r}; near: {near}")
    return known[name]


def run_of(name: str, profile: str) -> Run:
    """The settings of a kept run; a ValueError says whether it is an ensemble, or not kept."""
    found = record(name, profile)
    if "members" in found:
        raise ValueError(f"{name} is an ensemble of {', '.join(found['members'])}: name one of them")
    return Run.from_dict(found["run"])


def hits(name: str, profile: str | Path, part: str = "hits") -> dict[str, np.ndarray]:
    """R@1 (0 or 1) of every query of a kept run, (queries,) per dataset and for "unified"."""
    found = record(name, profile)
    counts = {line["dataset"]: line["queries"] for line in found["table"]}
    return {key: evaluation.unpack(text, counts[key]).astype(float) for key, text in found[part].items()}


def difference(ours: list[str], theirs: list[str], profile, large=(), other=None) -> pd.DataFrame:
    """R@1 of a row minus another's, seed by seed, by `evaluation.paired_difference`.

    Each row is the names of its runs, of `profile`, the second of the profile `other` if that is
    given.  Runs are paired by their seed, those whose seed both rows have; of two rows of one run
    each, these two.

    Raises NotTestable: the rows were tested on other queries, or have no seed in common.
    """
    home = other or profile
    if len(ours) == 1 and len(theirs) == 1:
        mine = {0: hits(ours[0], profile)}
        others = {0: hits(theirs[0], home)}
    else:
        mine = _hits_by_seed(ours, profile)
        others = _hits_by_seed(theirs, home)
    if _query_counts(mine) != _query_counts(others):
        raise NotTestable(
            f"{ours[0]} and {theirs[0]} were tested on other queries: `runs list` shows their data"
        )
    common = [seed for seed in mine if seed in others]
    if not common:
        raise NotTestable(
            f"{ours[0]} and {theirs[0]} have no seed in common: {sorted(mine)} and {sorted(others)}"
        )
    mine = {seed: mine[seed] for seed in common}
    others = {seed: others[seed] for seed in common}
    # Of each query, whether it is the first of its class.
    begins = hits(ours[0], profile, "classes")
    classes = {name: first.cumsum() for name, first in begins.items()}
    return evaluation.paired_difference(mine, others, classes, large)


def _hits_by_seed(names: list[str], profile: str | Path) -> dict[int, dict[str, np.ndarray]]:
    found: dict[int, dict[str, np.ndarray]] = {}
    for name in names:
        seed = _seed(name, profile)
        if seed in found:
            raise NotTestable(f"{name} is the second run of its row with seed {seed}")
        found[seed] = hits(name, profile)
    return found


def _seed(name: str, profile: str | Path) -> int:
    """The seed of a kept run; of an ensemble that of its first member, as of the others."""
    settings = record(name, profile)
    if "members" in settings:
        settings = record(settings["members"][0], profile)
    return settings["run"]["seed"]


def _query_counts(found: dict[int, dict[str, np.ndarray]]) -> dict[str, int]:
    """Of the first run: those of a row have the same queries."""
    first = next(iter(found.values()))
    return {name: len(hit) for name, hit in first.items()}


def runs(profile: str | None = None) -> pd.DataFrame:
    """A row per run kept of a profile (None: of all); the index is its name.
    Columns: `ALWAYS`, unified and harmonic being R@1 in percent, and each setting under its dotted name, `training.lr`."""
    found = []
    for home in sorted(path for path in paths.RESULTS.glob(profile or "*") if path.is_dir()):
        records = read(home)
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
    known = {(name, home.name) for home in paths.RESULTS.glob("*/") for name in lines(home)[1]}
    known |= {(path.name, path.parents[1].name) for path in paths.RESULTS.glob("*/runs/[!.]*/")}
    fit = [(name, profile) for name, profile in sorted(known) if label in (name, f"{profile}/{name}")]
    if len(fit) != 1:
        near = [f"{profile}/{name}" for name, profile in fit] or difflib.get_close_matches(label, dict(known))
        said = "several runs are" if fit else "no run is"
        raise ValueError(f"{said} called {label!r}; near: {', '.join(near) or 'none'}")
    return fit[0]


def remove(name: str, profile: str) -> None:
    """Remove a run, its line and its folder; filelock's Timeout: a running process holds it."""
    place = folder(name, profile)
    if place.is_dir():
        with FileLock(place / run_folder.LOCK).acquire(timeout=0):
            (place / run_folder.FINISHED).unlink(missing_ok=True)  # first: what is half removed must not look finished
            shutil.rmtree(place)
    _put(name, None, profile)


def compare(first: str, second: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The settings in which two runs differ; and their R@1 in percent, with the second minus the first in pairs."""
    labels, (one, two) = [first, second], (find(first), find(second))
    numbers = [column for column in COLUMNS if column not in ("loss", "seed")]
    settings = pd.concat([runs(profile).loc[name].drop(numbers) for name, profile in (one, two)], axis=1, keys=labels)
    tables = [pd.DataFrame(record(*place)["table"]).set_index("dataset") for place in (one, two)]
    gains = difference([two[0]], [one[0]], two[1], other=one[1])
    gains[["value", "low", "high"]] *= 100
    table = 100 * pd.concat([table["R@1"] for table in tables], axis=1, keys=labels)
    return settings[settings.astype(str).nunique(axis=1) > 1], table.join(gains)


def problems(profile: str | None = None) -> Iterator[str]:
    """What is wrong with kept runs: damaged lines, other names today, models that do not load."""
    for home in sorted(paths.RESULTS.glob(profile or "*")):
        for name in lines(home)[1]:
            try:
                found = _problem(name, home)
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:  # go on
                found = f"{type(error).__name__}: {error}"
            if found:
                yield f"{home.name}/{name}: {found}"


def _problem(name: str, home: Path) -> str:
    if not (kept := read(home).get(name)):
        return "damaged line; `runs remove` drops it, `run` trains the run again"
    run, today = None if "members" in kept else Run.from_dict(kept["run"]), name
    if lost := set(kept.get("members", ())) - read(home).keys():
        return f"its members {', '.join(sorted(lost))} are not kept"
    with suppress(OSError, ValueError):  # data or weights are not on this machine
        today = run_name(run) if run else run_folder.ensemble_name(kept["members"])
    if (folder(name, home) / MODEL).is_file():
        models.load(folder(name, home))
    return f"outdated: today's data, weights, code or a changed setting would call it {today}" * (today != name)
