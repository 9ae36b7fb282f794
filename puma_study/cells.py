"""What the cells of notebooks have in common: where they begin, which rows, what they write."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from pumalib import config, paths, training
from pumalib.config import Profile
from pumalib.data import check_known

from . import figures, store

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def begin(profile: str, overrides: Mapping[str, Any]) -> tuple[Profile, Path]:
    """A profile with its changes, and the folder that is written to (`store.output_folder`).

    Sets the style of figures and tables, and prints torch's version and the device.
    """
    figures.use_style()
    print(f"torch {torch.__version__}, device {training.choose_device('auto')}")
    chosen = config.profile(profile, **overrides)
    return chosen, store.output_folder(chosen.name)


def chosen(
    kind: str,
    asked: Collection[str] | None,
    known: Collection[str],
    profile: Profile,
    *,
    smoke: Collection[str],
) -> list[str]:
    """The names that are asked for; else all that are known, in "smoke" a few.

    ValueError names the unknown ones, which are of a `kind` as "method".
    """
    if asked:
        names = list(asked)
    elif profile.name == "smoke":
        names = list(smoke)
    else:
        names = list(known)
    check_known(kind, names, known)
    return names


def save_table(
    table: pd.DataFrame, file: Path, digits: str | None = None, *, index: bool = False
) -> None:
    """Write a table as CSV, its floats as `digits` says ("%.5f") or whole, and print where."""
    with paths.written_whole(file) as temporary:
        table.to_csv(temporary, index=index, float_format=digits)
    print("table", paths.shown(file))


def show_figure(figure: "Figure", file: Path) -> None:
    """Write a figure, as `figures.save` does, and show it below the cell."""
    from IPython.display import display  # the commands do without it

    figures.save(figure, file)
    display(figure)
