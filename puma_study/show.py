"""Tables as HTML that GitHub and JupyterLab show alike."""

import html
import re
from typing import TYPE_CHECKING, Any

import pandas as pd

from .text import with_interval

if TYPE_CHECKING:
    # It needs jinja2, which is an extra.
    from pandas.io.formats.style import Styler

# Brackets after a number: both of "71.2 [70.1, 72.3] (paper 80.0)".
IN_BRACKETS = re.compile(r" ([\[(].*?[])])")
# The number, once the brackets are on a line below it: "71.2" of "71.2<br><small>[70.1]</small>".
NUMBER = re.compile(r"^[^<]+")
PADDING = {"selector": "td, th", "props": "padding: 0.3em 0.2em"}
# HTML tags of the best and of the second, by rank.
TAGS = {1: "b", 2: "u"}


def marked(table: pd.DataFrame, values: pd.DataFrame) -> "Styler":
    """`table` styled for display: the best of each column bold, the second underlined.

    Rows and columns are called as in figures.  `values` has the columns to rank, as fractions; the
    ranks count its rows that `table` lacks too.  Brackets go below their number.  HTML tags do all
    this, because GitHub drops styles, as does JupyterLab in notebooks that it does not trust.
    """
    texts = table.map(_text).astype(str)
    places = (100 * values).round(1).rank(method="dense", ascending=False).reindex(table.index)
    for name in texts.columns.intersection(values.columns):
        for place, tag in TAGS.items():
            tagged = texts[name].map(lambda text, tag=tag: _tagged(text, tag))
            texts[name] = texts[name].where(places[name] != place, tagged)
    styled = texts.style.set_table_styles([PADDING])
    return styled.format_index(_heading, axis=0).format_index(_heading, axis=1)


def readable(differences: pd.DataFrame) -> pd.DataFrame:
    """`Results.differences` to read: a line for each pair, a column for each average.

    With intervals, and beside them what the paper prints, if it prints any.
    """
    from .figures import shown  # the commands do without matplotlib

    columns = {}
    for name, part in differences.set_index("difference").groupby("of", sort=False):
        texts = [
            with_interval(one.points, one.low, one.high, sign="+") for one in part.itertuples()
        ]
        columns[name] = pd.Series(texts, part.index)
        if "paper" in part and part["paper"].notna().any():
            in_print = part["paper"].map("{:+.1f}".format, na_action="ignore")
            columns[f"paper: {name}"] = in_print.fillna("")
    table = pd.DataFrame(columns)
    table.index = [" minus ".join(map(shown, pair.split(" over "))) for pair in table.index]
    return table


def _heading(name: Any) -> str:
    """What figures call a row or a column, as HTML: names of folders are headings too."""
    from .figures import shown  # the commands do without matplotlib

    return html.escape(shown(name))


def _text(cell: Any) -> str:
    if isinstance(cell, str):
        return IN_BRACKETS.sub(_below, html.escape(cell, quote=False))
    if pd.isna(cell):
        return ""
    if isinstance(cell, float):
        return f"{cell:,.1f}"
    return f"{cell:,}"


def _below(brackets: re.Match) -> str:
    """The brackets as a line of small text that does not break."""
    text = brackets[1].replace(" ", "&nbsp;")
    return f"<br><small>{text}</small>"


def _tagged(text: str, tag: str) -> str:
    return NUMBER.sub(rf"<{tag}>\g<0></{tag}>", text)
