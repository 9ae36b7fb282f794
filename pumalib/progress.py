"""Progress bars, the same in every room."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from .paths import printable


def bar(items: Iterable | None = None, **options: Any) -> tqdm:
    """A bar of tqdm, with its `options`, over `items` or, without them, to be updated by hand."""
    if "desc" in options:
        # It can hold the name of a folder.
        options["desc"] = printable(options["desc"])
    return tqdm(items, **{**pace(), **options})


def pace() -> dict[str, Any]:
    """Options of tqdm for where bars are shown now.

    On a terminal or in a notebook a bar is drawn over itself, as often as tqdm likes.  In a file
    every state of it stays, so there it is drawn each half minute.
    """
    if _is_of_notebook(sys.stderr) or sys.stderr.isatty():
        return {}
    return {"mininterval": 30.0}


def _is_of_notebook(stream: object) -> bool:
    return type(stream).__module__ == "ipykernel.iostream"
