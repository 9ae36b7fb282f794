"""Pages with numbers of kept runs: README.md, docs/results.md and the report.

A page is Markdown with markers, which are comments and not shown.  Read `write` first.  What stands
between a marker and its end is written anew from kept runs, in a line or as a table,

    PUMA is <!-- gap: puma - full -->5.7 points below<!-- end --> full fine-tuning.

    <!-- differences:
    pairs: [puma - full, puma - lora]
    -->
    <!-- end -->

and what a marker `holds` says is checked: `<!-- holds: puma < full; puma ~ stochastic -->` means
that one difference's interval lies below 0 and the other's has 0 in it.

A row is a key of `rows` in docs/pages.yaml, or `file/row` of a table of results/<profile>.  In a
line the column (unified where none is said) and the profile (the stage) follow after commas:
`gap: puma - full, harmonic, mini`.
"""

import functools
import re
from pathlib import Path

import yaml

from pumalib import evaluation, paths

from . import page_methods, page_parts
from .page_parts import IN_LINE
from .page_rows import SETTINGS, Kept

# The page with the table of all models on images of other kinds.
OWN_IMAGES = "docs/own-images.md"
BLOCKS = page_parts.BLOCKS | page_methods.BLOCKS
KINDS = (*IN_LINE, *BLOCKS)

# The content of a marker ends at the next comment, which must be its end.
OPENING = r"<!-- (?!holds:)(?P<kind>[a-z-]+):(?P<said>(?:(?!-->).)*)-->"
CONTENT = r"(?:(?!<!--).)*"
MARKER = re.compile(rf"(?P<start>{OPENING}){CONTENT}(?P<end><!-- end -->)", re.DOTALL)
CHECK = re.compile(r"<!-- holds: (?P<said>(?:(?!-->).)*) -->", re.DOTALL)

COMPARISON = re.compile(r"\s*(?P<row>.+?) (?P<sign>[<~>]) (?P<other>.+?)\s*")


def list_pages() -> dict[str, str]:
    """The pages that are written, and the profile that each one's markers mean."""
    settings = yaml.safe_load((paths.ROOT / SETTINGS).read_text(encoding="utf-8"))
    return settings["pages"]


def write() -> list[Path]:
    """Write all pages anew, and return the changed ones; raises what `written` raises."""
    asked = functools.cache(Kept)
    changed = []
    for name, profile in list_pages().items():
        path = paths.ROOT / name
        before = path.read_text(encoding="utf-8")
        after = written(before, asked(profile), name)
        if after != before:
            with paths.written_whole(path) as temporary:
                temporary.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed


def written(text: str, kept: Kept, page: str = "the page") -> str:
    """The text of a page with its markers filled.

    Raises ValueError, which names the page and the marker, where a marker cannot be read, asks for
    what is not kept, or says what does not hold.
    """

    def fill(found: re.Match) -> str:
        with _named(page, found["start"]):
            return found["start"] + _content(found["kind"], found["said"], kept) + found["end"]

    _check_markers(text, page)
    for found in CHECK.finditer(text):
        with _named(page, found[0]):
            check(found["said"], kept)
    return MARKER.sub(fill, text)


class _named:  # noqa: N801 - read as a word: with _named(...)
    """Adds the page and the marker to the message of a ValueError."""

    def __init__(self, page: str, marker: str) -> None:
        self.marker = f"{page}, {' '.join(marker.split())}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | KeyError | TypeError):
            raise ValueError(f"{self.marker}: {error}") from error


def _check_markers(text: str, page: str) -> None:
    """Raise ValueError unless markers are known, closed, and where Markdown hides them."""
    filled = list(MARKER.finditer(text))
    starts = {found.start() for found in filled}
    for found in re.finditer(OPENING, text, re.DOTALL):
        marker = f"{page}, {' '.join(found[0].split())}"
        if found["kind"] not in KINDS:
            raise ValueError(f"{marker}: no kind of marker; known: holds, {', '.join(KINDS)}")
        if found.start() not in starts:
            raise ValueError(f"{marker}: no <!-- end --> follows it")
    for found in filled:
        begins_line = text[: found.start()].rpartition("\n")[2].strip(" -*") == ""
        if begins_line and found["kind"] in IN_LINE:
            marker = f"{page}, {' '.join(found['start'].split())}"
            raise ValueError(f"{marker}: a line that begins with a comment is not Markdown")


def _content(kind: str, said: str, kept: Kept) -> str:
    if kind in IN_LINE:
        return IN_LINE[kind](kept, *_parts(said))
    arguments = yaml.safe_load(said) or {}
    return f"\n\n{BLOCKS[kind](kept, **arguments)}\n\n"


def _parts(said: str) -> list[str]:
    return [part.strip() for part in said.split(",")]


def check(said: str, kept: Kept) -> None:
    """Raise ValueError where a comparison, `puma < full, harmonic, mini; ...`, does not hold.

    Both overall columns are meant where none is said.
    """
    for one in said.split(";"):
        comparison, *rest = _parts(one)
        columns: tuple[str, ...] = evaluation.OVERALL
        profile = kept.stage
        if rest and rest[0]:
            columns = (rest[0],)
        if len(rest) > 1:
            profile = kept.profile(rest[1])
        found = COMPARISON.fullmatch(comparison)
        if found is None:
            raise ValueError(f"{comparison!r}: write row < other, row ~ other or row > other")
        for column in columns:
            difference = kept.difference(found["row"], found["other"], profile, column)
            if difference.sign != found["sign"]:
                raise ValueError(
                    f"{comparison} does not hold on {profile}: {column} {difference.text}"
                )


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
