"""Progress bars, the same in every module."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from .paths import printable


def bar(items: Iterable | None = None, **options: Any) -> tqdm:
    """A tqdm bar with tqdm's `options`, over `items` or, without them, updated by hand."""
    if "desc" in options:
        # It may contain the name of a folder.
        options["desc"] = printable(options["desc"])
    return tqdm(items, **{**pace(), **options})


def pace() -> dict[str, Any]:
    """The tqdm options that suit the present output.

    On a terminal or in a notebook a bar overwrites itself, as often as tqdm chooses.  In a file
    every state stays, so there a bar is drawn only each half minute.
    """
    if _is_of_notebook(sys.stderr) or sys.stderr.isatty():
        return {}
    return {"mininterval": 30.0}


def _is_of_notebook(stream: object) -> bool:
    return type(stream).__module__ == "ipykernel.iostream"
