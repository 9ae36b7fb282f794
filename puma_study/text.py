"""Numbers with intervals, and names, as text."""

import html
import re

import pandas as pd

# Characters that format in Markdown.
MARKS = re.compile(r"[\\`*_\[\]$|~#]")


def with_interval(value: float, low: float, high: float, *, sign: str = "", digits: int = 1) -> str:
    """A number with its interval, "71.2 [70.1, 72.3]"; `sign` is "+" for a difference."""
    form = f"{sign}.{digits}f"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def excluding_zero(differences: pd.DataFrame, above: str, below: str) -> str:
    """Which differences have an interval above 0, in a line, and which below 0, in the next.

    `differences` is a table of `Results.differences`; `above` and `below` begin the lines: "gains".
    """
    names = differences["difference"] + ", " + differences["of"]
    lines = []
    for word, is_sure in {above: differences["low"] > 0, below: differences["high"] < 0}.items():
        which = names[is_sure]
        lines.append(
            f"{word}, by an interval that excludes 0, in {len(which)} of {len(names)}: "
            f"{'; '.join(which) or 'none'}"
        )
    return "\n".join(lines)


def plain(name: str) -> str:
    """A dataset's name escaped for Markdown: without tags, line breaks or formatting."""
    in_one_line = " ".join(name.split())
    return MARKS.sub(r"\\\g<0>", html.escape(in_one_line, quote=False))
