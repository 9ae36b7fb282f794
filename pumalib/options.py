"""Options and arguments that both command lines share, `python -m pumalib` and `puma_study`."""

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import paths

if TYPE_CHECKING:
    from .config import Run


def assigned(context: click.Context, option: click.Parameter, pairs: tuple[str, ...]) -> dict:
    """Parse "name=value" pairs into {"name": value}, with the values as YAML."""
    if not pairs:
        return {}
    from . import config

    values = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise click.BadParameter(f"{pair!r}: write name=value, the value in YAML")
        if name in values:
            raise click.BadParameter(f"{name} is given twice")
        if not _is_unicode(text):
            raise click.BadParameter(f"{pair!r} is not UTF-8: set PYTHONUTF8=1, or a UTF-8 locale")
        try:
            values[name] = config.read_yaml(text)
        except ValueError as error:
            message = f"{pair!r}: write name=value, the value in YAML ({error})"
            raise click.BadParameter(message) from None
        if not _is_plain(values[name]):
            raise click.BadParameter(
                f"{pair!r}: write a finite number, a text, true or false, or a list or mapping of "
                f"these; a date is a text in quotes: {name}='\"2020-01-31\"'"
            )
    return values


def _is_plain(value: Any) -> bool:
    """Whether a value is plain data: YAML also has dates and infinity, which are refused."""
    if isinstance(value, dict):
        return all(_is_plain(part) for part in [*value, *value.values()])
    if isinstance(value, list):
        return all(_is_plain(part) for part in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def _is_unicode(text: str) -> bool:
    """Whether an argument was valid text in the locale's encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


profile_option = click.option(
    "--profile", default="smoke", show_default=True, help="its name, or a YAML file"
)
values_option = click.option(
    "-p",
    "values",
    multiple=True,
    metavar="NAME=VALUE",
    callback=assigned,
    help="a change; the value in YAML",
)

loss_option = click.option("--loss", show_default="curricularface", help="a name of pumalib.losses")
seed_option = click.option(
    "--seed", type=click.IntRange(0), show_default="0", help="of all that is random"
)
settings_option = click.option(
    "-s",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    callback=assigned,
    help="a setting of the method",
)

# Fields of a profile that do not apply to one run.
OF_SEVERAL = ("seeds", "side_seeds", "further_seeds", "jobs", "dask", "train")


@dataclass(frozen=True)
class AskedRun:
    """A run as METHOD and the options of a command describe it."""

    method: str
    profile: str
    values: dict[str, Any]
    loss: str | None
    seed: int | None
    settings: dict[str, Any]

    @property
    def has_changes(self) -> bool:
        """Whether an option other than the profile was given."""
        has_values = bool(self.values or self.settings)
        return has_values or self.loss is not None or self.seed is not None

    def run(self) -> tuple["Run", Path]:
        """The run, and the folder of its profile's results.

        Raises ValueError or click.UsageError if an option is wrong.
        """
        for name in OF_SEVERAL:
            if name in self.values:
                raise click.UsageError(f"-p {name} is for several runs; this is one, see --seed")
        from . import config, models

        config.require_values(self.values)
        chosen = config.profile(profile_name(self.profile), **from_shell(self.values))
        own = models.with_own_settings(self.method, self.settings)
        config.method(self.method, **own)  # raises ValueError for unknown settings
        run = chosen.run(self.method, loss=self.loss, seed=self.seed, **own)
        return run, paths.RESULTS / chosen.name


def of_one_run(command: Callable[[AskedRun], Any]) -> Callable:
    """Give a command METHOD and the options of one run: it is called with an `AskedRun`."""

    @functools.wraps(command)
    def with_options(**given: Any) -> Any:
        return command(AskedRun(**given))

    for option in (settings_option, seed_option, loss_option, values_option, profile_option):
        with_options = option(with_options)
    return click.argument("method")(with_options)


def profile_name(name: str) -> str:
    """A profile's name, or the full path of its file if that is in the current folder."""
    near = absolute(name)
    if name.endswith((".yaml", ".yml")) and near.is_file() and near != paths.resolve(name):
        return str(near)
    return name


def from_shell(values: dict[str, Any]) -> dict[str, Any]:
    """Make the paths among a profile's changes absolute if they exist from the current folder.

    Other paths are relative to the project and stay as given.
    """
    changed = dict(values)
    for name in ("root", "split", "pretrained"):
        given = values.get(name)
        if not isinstance(given, str) or given in ("hub", "embedded", "random"):
            continue
        near = absolute(given)
        if near.exists() and near != paths.resolve(given):
            changed[name] = str(near)
    return changed


def here(context: click.Context, parameter: click.Parameter, path: str | None) -> Path | None:
    """The absolute path of an argument that is relative to the current folder."""
    if path is None:
        return None
    return absolute(path)


def absolute(path: str) -> Path:
    """The absolute path without "..", with links unresolved: a folder keeps its given name."""
    return Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100


def known_path(path: str) -> Path:
    """The path from the current folder if it exists, else from the project."""
    near = absolute(path)
    return near if near.exists() else paths.resolve(path)
