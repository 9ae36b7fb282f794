"""The runs that were kept: each folder of `results/<profile>/runs` as a value, found and filtered."""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from . import config, paths, training
from .config import Run


@dataclass(frozen=True, eq=False)
class Kept:
    """A run's folder, finished or not.

    Attributes:
        runs: the run; of an ensemble its members' runs; () where they cannot be read.
        members: folder names of an ensemble's members, else ().
        damage: what is wrong with run.json, or "".
    """

    folder: Path
    runs: tuple[Run, ...]
    members: tuple[str, ...] = ()
    damage: str = ""

    @property
    def label(self) -> str:
        return f"{self.profile}/{self.folder.name}"

    @property
    def profile(self) -> str:
        return self.folder.parents[1].name

    @property
    def finished(self) -> bool:
        return (self.folder / training.FINISHED).is_file()

    def read(self, file: str) -> dict:
        return json.loads((self.folder / file).read_text(encoding="utf-8"))

    @cached_property
    def settings(self) -> dict[str, object]:
        """Dotted name -> value; those of an ensemble are its first member's, on the datasets of all."""
        if not self.runs:
            return {}
        flat = {"members": len(self.members)}
        for key, value in dataclasses.asdict(self.runs[0]).items():
            flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        if self.members:
            flat["data.datasets"] = tuple(name for run in self.runs for name in run.data.datasets or ())
        return flat


def find(profile: str | None = None) -> list[Kept]:
    """Every run of a profile (None: of all), by profile, method in the paper's order, loss and settings, seeds together."""
    folders = paths.RESULTS.glob(f"{profile or '*'}/runs/*")
    kept = [_open(f) for f in folders if f.is_dir() and not f.name.startswith(".")]  # hidden: being removed
    methods = list(config.METHODS)

    def order(k: Kept):
        s = {"seed": -1, "method.name": "", "loss": ""} | k.settings
        name, seed = s["method.name"], s.pop("seed")
        place = methods.index(name) if name in methods else len(methods)
        return k.profile, place, name, s["loss"], len(k.members), json.dumps(s), seed, k.folder.name

    return sorted(kept, key=order)


def _open(folder: Path) -> Kept:
    try:
        text = (folder / "run.json").read_text(encoding="utf-8")
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it holds no settings")
        if "members" not in content:
            return Kept(folder, (Run.from_json(text),))
        members = [_open(folder.with_name(name)) for name in content["members"]]
        return Kept(folder, tuple(run for m in members for run in m.runs), tuple(m.folder.name for m in members))
    except FileNotFoundError:
        return Kept(folder, (), damage="no run.json")
    except (ValueError, TypeError) as error:
        return Kept(folder, (), damage=f"run.json cannot be read ({error})")


def select(kept: list[Kept], patterns: list[str] = (), where: list[str] = ()) -> list[Kept]:
    """Those whose folder name matches one of the shell `patterns`, in their order, and every `field=value` of `where`.

    Raises:
        ValueError: a pattern without a match, an unknown field, or a value of the wrong kind; near names are given.
    """
    for pattern in patterns:
        if kept and not any(fnmatchcase(k.folder.name, pattern) for k in kept):
            near = difflib.get_close_matches(pattern, [k.folder.name for k in kept], 3)
            raise ValueError(f"no run is called {pattern!r}; {'near: ' + ', '.join(near) if near else '`runs list` names them'}")
    if patterns:
        kept = list(dict.fromkeys(k for p in patterns for k in kept if fnmatchcase(k.folder.name, p)))
    defaults = Kept(Path(), (Run(),)).settings
    known = [*defaults, *{key for k in kept for key in k.settings if key.startswith("loss_settings.")}]
    short = {key.rsplit(".", 1)[-1]: key for key in known} | {"method": "method.name"} | {key: key for key in known}
    for text in where:
        field, equals, wanted = text.partition("=")
        if not equals:
            raise ValueError(f"-w {text}: give field=value, such as -w method=puma or -w data.datasets=birds,digits")
        if field not in short:
            near = difflib.get_close_matches(field, short, 3)
            raise ValueError(f"-w {text}: unknown setting {field!r}; {'near' if near else 'known'}: {', '.join(near or known)}")
        kept = [k for k in kept if short[field] in (s := k.settings) and _is(s[short[field]], wanted)]
        kind = type(defaults.get(short[field]))
        if (kind is bool and wanted.lower() not in ("true", "false")) or (kind in (int, float) and _number(wanted) is None):
            raise ValueError(f"-w {text}: {short[field]} is {'true or false' if kind is bool else 'a number'}")
    return kept


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is(value, wanted: str) -> bool:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value == _number(wanted)
    return fnmatchcase(shown(value).lower(), wanted.lower())


def shown(value) -> str:
    """A setting as text: "all" for None (datasets, layers), names with commas."""
    return "all" if value is None else ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def differing(settings: list[dict]) -> list[str]:
    """The settings in which they are not all equal, or that some lack."""
    keys = dict.fromkeys(key for s in settings for key in s)
    return [key for key in keys if len({repr(s.get(key, ())) for s in settings}) > 1]
