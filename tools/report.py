"""Build the report, docs/report/report.md with sections of docs/results.md, as HTML and PDF.

A line "Section: [title](../page.md#anchor)" of the report stands for that section of a docs page,
so that a sentence has one source.  pandoc reads the Markdown and writes HTML and Typst source,
which typst compiles to PDF.  Both are Python packages that contain the programs and need no
network.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from puma_study import figures
from pumalib import paths

from . import page_rows, pages

PAGE = "docs/report/report.md"
SOURCE = (paths.ROOT / PAGE).parent
# pandoc squeezes tables wider than this into equal columns.
COLUMNS = 1000
# Of the width of the text: what stands in results.md is wide enough for a phone.
PICTURE = "{width=46%}"

SECTION = re.compile(r"^Section: \[[^\]]+\]\((?P<page>[^)#]+)#(?P<anchor>[^)]+)\)$", re.MULTILINE)
HEADING = re.compile(r"^(?P<level>#+) (?P<title>.+)$", re.MULTILINE)
LINK = re.compile(
    r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)"
    r"(?P<width>\{width=[^}]*\})?"
)
ELSEWHERE = re.compile(r"[a-z]+:")


def build(folder: Path) -> list[Path]:
    """Write the report to a folder, and return report.html and report.pdf.

    Raises RuntimeError, with the remedy, where pandoc or typst is not installed; ValueError where
    the report names a section that its page does not have.
    """
    pandoc, typst = _tools()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True)

    source = whole(folder)
    shared = ["--citeproc", "--number-sections", f"--columns={COLUMNS}", "--standalone"]
    shared += [f"--resource-path={folder}", f"--bibliography={folder / 'references.bib'}"]
    shared.append(f"--metadata=date:{_revision()}")
    reader = "markdown-implicit_header_references"

    html = folder / "report.html"
    own = ["--mathml", "--embed-resources", "--toc", "--toc-depth=1"]
    own.append(f"--css={folder / 'report.css'}")
    pandoc.convert_text(source, "html", reader, outputfile=html, extra_args=shared + own)

    typeset = folder / "report.typ"
    own = [f"--include-in-header={folder / 'style.typ'}"]
    pandoc.convert_text(source, "typst", reader, outputfile=typeset, extra_args=shared + own)
    pdf = folder / "report.pdf"
    typst.compile(typeset, output=pdf, root=folder)
    return [html, pdf]


def _tools() -> tuple:
    try:
        import pypandoc
        import typst
    except ImportError as error:
        remedy = "python -m pip install -e '.[report]'"
        raise RuntimeError(f"the report needs pandoc and typst ({error}): {remedy}") from error
    return pypandoc, typst


def _revision() -> str:
    """The date and the commit of the checkout; nothing where it is no repository."""
    command = ["git", "-C", str(paths.ROOT), "log", "-1", "--format=%cs, commit %h"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said.stdout.strip()


# ---- the text


def whole(folder: Path) -> str:
    """The report's Markdown with its sections; pictures are copied into the folder."""
    text = (paths.ROOT / PAGE).read_text(encoding="utf-8")

    def included(found: re.Match) -> str:
        page = (SOURCE / found["page"]).resolve()
        part = section(page, found["anchor"])
        return _with_links(part, page.parent, folder)

    own = SECTION.split(text)
    # split gives text, page, anchor, text, ...
    linked = [_with_links(part, SOURCE, folder) for part in own[::3]]
    sections = [included(found) for found in SECTION.finditer(text)]
    parts = [linked[0]]
    for one, other in zip(sections, linked[1:], strict=True):
        parts += [one, other]
    # A comment between a table and its caption would separate them.
    return pages.without_markers("".join(parts))


def section(page: Path, anchor: str) -> str:
    """A section of a page, under a heading one level higher; ValueError where there is none."""
    text = page.read_text(encoding="utf-8")
    headings = list(HEADING.finditer(text))
    anchors = [pages.anchor(found["title"]) for found in headings]
    if anchor not in anchors:
        raise ValueError(f"{PAGE}: {paths.shown(page)} has no section {anchor!r}")
    place = anchors.index(anchor)
    start = headings[place]
    ends = [
        one.start() for one in headings[place + 1 :] if len(one["level"]) <= len(start["level"])
    ]
    part = text[start.start() : min(ends, default=len(text))].strip()
    return HEADING.sub(lambda one: one[0].removeprefix("#"), part)


def _with_links(text: str, source: Path, folder: Path) -> str:
    """Markdown of a folder with links that lead from the report, and its pictures beside it."""

    def led(found: re.Match) -> str:
        target, hash_, part = found["target"].partition("#")
        if ELSEWHERE.match(target):
            return found[0]
        if not target:
            # A heading of the page, which need not be in the report; the report's own have marks.
            return found[0] if part.startswith(("tbl-", "fig-")) else found["text"]
        file = source / target
        if found["picture"]:
            return f"![{found['text']}]({_copied(file, folder)}){found['width'] or PICTURE}"
        return f"[{found['text']}]({os.path.relpath(file, folder)}{hash_}{part})"

    return LINK.sub(led, text)


def _copied(picture: Path, folder: Path) -> str:
    """A picture's place in the folder, to which it is copied, as SVG where there is one."""
    drawn = picture.with_suffix(".svg")
    file = drawn if drawn.is_file() else picture
    (folder / "figures").mkdir(exist_ok=True)
    shutil.copy(file, folder / "figures" / file.name)
    return f"figures/{file.name}"


# ---- the figure of README.md


def draw_for_readme(kept: page_rows.Kept) -> list[Path]:
    """Draw README.md's figure in results/<profile>, with its numbers, and return its files."""
    table = page_rows.claimed(kept)
    file = paths.RESULTS / kept.main_profile / "claimed_and_measured.csv"
    with paths.written_whole(file) as temporary:
        table.to_csv(temporary, index=False)
    unit = "PUMA minus the rival (points of R@1)"
    figure = figures.claimed_and_measured(table, "PUMA", unit)
    pictures = [figures.save(figure, file.with_suffix(ending)) for ending in (".png", ".svg")]
    return [file, *pictures]
