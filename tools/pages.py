"""Pages with tables of kept runs: README.md, docs and the report.

A page is Markdown with markers, which are comments and not shown.  What stands between a marker and
its end is written anew from kept runs:

    <!-- differences:
    pairs: [puma - full, puma - lora]
    -->
    <!-- end -->

The marker names a function of `BLOCKS` and its arguments, as YAML.  A row is a key of
`page_rows.ROWS`, or `file/row` of a table of results/<profile>.  What the sentences between the
tables say is checked by tests/test_sentences.py.
"""

import functools
import re
from pathlib import Path

import yaml

from pumalib import paths

from . import page_parts
from .page_rows import MAIN_PROFILE, Kept

# The pages, and the profile that each one's markers mean where they name none.
PAGES = {
    "README.md": MAIN_PROFILE,
    "docs/results.md": MAIN_PROFILE,
    "docs/results-photos.md": "photos",
    "docs/results-mini.md": "mini",
    "docs/results-digest.md": "photos-21k",
    "docs/which-method.md": MAIN_PROFILE,
    "docs/report/report.md": MAIN_PROFILE,
}
# The page with the table of all models on images of other kinds.
OWN_IMAGES = "docs/own-images.md"
BLOCKS = page_parts.BLOCKS

# The content of a marker ends at the next comment, which must be its end.
OPENING = r"<!-- (?P<kind>[a-z-]+):(?P<said>(?:(?!-->).)*)-->"
CONTENT = r"(?:(?!<!--).)*"
MARKER = re.compile(rf"(?P<start>{OPENING}){CONTENT}(?P<end><!-- end -->)", re.DOTALL)


def write() -> list[Path]:
    """Write all pages anew, and return the changed ones; raises what `written` raises."""
    asked = functools.cache(Kept)
    changed = []
    for name, profile in PAGES.items():
        path = paths.ROOT / name
        before = path.read_text(encoding="utf-8")
        after = written(before, asked(profile), name)
        if after != before:
            with paths.written_whole(path) as temporary:
                temporary.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed


def written(text: str, kept: Kept, page: str = "the page") -> str:
    """The text of a page with its tables filled.

    Raises ValueError, which names the page and the marker, where a marker cannot be read or asks
    for what is not kept.
    """

    def fill(found: re.Match) -> str:
        try:
            arguments = yaml.safe_load(found["said"]) or {}
            table = BLOCKS[found["kind"]](kept, **arguments)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{_place(page, found['start'])}: {error}") from error
        return f"{found['start']}\n\n{table}\n\n{found['end']}"

    _check_markers(text, page)
    return MARKER.sub(fill, text)


def without_markers(text: str) -> str:
    """A page without its comments, which not every reader of Markdown hides."""
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def anchor(heading: str) -> str:
    """The name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _place(page: str, marker: str) -> str:
    return f"{page}, {' '.join(marker.split())}"


def _check_markers(text: str, page: str) -> None:
    """Raise ValueError unless markers are known and closed."""
    starts = {found.start() for found in MARKER.finditer(text)}
    for found in re.finditer(OPENING, text, re.DOTALL):
        place = _place(page, found[0])
        if found["kind"] not in BLOCKS:
            raise ValueError(f"{place}: no kind of marker; known: {', '.join(BLOCKS)}")
        if found.start() not in starts:
            raise ValueError(f"{place}: no <!-- end --> follows it")


def rows_elsewhere(name: str) -> str:
    """R@1 on images of other kinds, in Markdown: of the frozen backbone, and of one kept model.

    What a model's card shows; the page that has all models is `OWN_IMAGES`.
    """
    text = (paths.ROOT / OWN_IMAGES).read_text(encoding="utf-8")
    start = text.index("| | signs |")
    table, _, _ = text[start:].partition("\n\n")
    head, line, *rows = table.splitlines()
    shown = [row for row in rows if row.startswith(("| frozen,", f"| `{name}` |"))]
    return "\n".join([head, line, *shown])
