"""Numbers with intervals, and names, as text."""

import html
import re

# Characters that format in Markdown.
MARKS = re.compile(r"[\\`*_\[\]$|~#]")


def with_interval(value: float, low: float, high: float, *, sign: str = "", digits: int = 1) -> str:
    """A number with its interval, "71.2 [70.1, 72.3]"; `sign` is "+" for a difference."""
    form = f"{sign}.{digits}f"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def plain(name: str) -> str:
    """A dataset's name escaped for Markdown: without tags, line breaks or formatting."""
    in_one_line = " ".join(name.split())
    return MARKS.sub(r"\\\g<0>", html.escape(in_one_line, quote=False))
