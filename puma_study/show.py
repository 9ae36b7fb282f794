"""Numbers with intervals as text, and tables as HTML that GitHub and JupyterLab show alike."""

import html
import re
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    # It needs jinja2, which is an extra.
    from pandas.io.formats.style import Styler

# What stands in brackets behind a number: both of "71.2 [70.1, 72.3] (paper 80.0)".
IN_BRACKETS = re.compile(r" ([\[(].*?[])])")
# The number before that, once it stands below: "71.2" of "71.2<br><small>[70.1]</small>".
NUMBER = re.compile(r"^[^<]+")
# What Markdown makes something of.
MARKS = re.compile(r"[\\`*_\[\]$|~#]")
PADDING = {"selector": "td, th", "props": "padding: 0.3em 0.2em"}
# The tag of the best, and of the second.
TAGS = {1: "b", 2: "u"}


def marked(table: pd.DataFrame, values: pd.DataFrame) -> "Styler":
    """`table` to be shown, with the best of each column bold and the second underlined.

    `values` are the columns of fractions by which they are ranked, also over rows that `table`
    lacks.  What is in brackets stands below its number.  All that is done by tags: GitHub drops
    styles, as Lab does in notebooks that it does not trust.
    """
    texts = table.map(_text).astype(str)
    places = (100 * values).round(1).rank(method="dense", ascending=False).reindex(table.index)
    for name in texts.columns.intersection(values.columns):
        for place, tag in TAGS.items():
            tagged = texts[name].map(lambda text, tag=tag: _tagged(text, tag))
            texts[name] = texts[name].where(places[name] != place, tagged)
    shown = texts.style.set_table_styles([PADDING])
    # Names of folders are headings.
    return shown.format_index(escape="html", axis=0).format_index(escape="html", axis=1)


def with_interval(value: float, low: float, high: float, *, sign: str = "") -> str:
    """As "71.2 [70.1, 72.3]"; a difference has `sign` "+"."""
    return f"{value:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def plain(name: str) -> str:
    """The name of a dataset as Markdown shows it: no tag, line or formatting, whatever it holds."""
    in_one_line = " ".join(name.split())
    return MARKS.sub(r"\\\g<0>", html.escape(in_one_line, quote=False))


def _text(cell: Any) -> str:
    if isinstance(cell, str):
        return IN_BRACKETS.sub(_below, html.escape(cell, quote=False))
    if pd.isna(cell):
        return ""
    if isinstance(cell, float):
        return f"{cell:,.1f}"
    return f"{cell:,}"


def _below(brackets: re.Match) -> str:
    """One line of small text, which does not break."""
    text = brackets[1].replace(" ", "&nbsp;")
    return f"<br><small>{text}</small>"


def _tagged(text: str, tag: str) -> str:
    return NUMBER.sub(rf"<{tag}>\g<0></{tag}>", text)
