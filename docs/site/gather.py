"""Gather the sources of the site, each page under the path that it has in the project.

    python docs/site/gather.py results build build/site

takes the executed notebooks of `results`, the report of `build` if it exists, and the project's
docs and modules.  README.md up to its second heading is the home page, one screen; what follows is
the page below it.  `python -m tools pages` writes all their numbers from kept runs.
"""

import ast
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pumalib import paths
from tools import pages
from tools.page_rows import MAIN_PROFILE

HERE = Path(__file__).parent

# The order of the docs pages; a page that is not named here comes last.
FOUND = [
    "docs/results.md",
    "docs/results-photos.md",
    "docs/results-mini.md",
    "docs/results-digest.md",
    "docs/questions.md",
    "docs/protocol.md",
    "docs/protocol-changes.md",
    "docs/deviations.md",
]
USE = [
    "docs/own-images.md",
    "docs/many-images.md",
    "docs/running.md",
    "docs/photos.md",
    "docs/other-profiles.md",
    "docs/gpu.md",
]
OTHERS = ["CHANGELOG.md", "data/mini/README.md"]
CARDS = "pumalib/kept/*/README.md"
# Pages that this script writes, each an overview of other pages.
HOME = "index.md"
OVERVIEW = "overview.md"
REPORT = "report/index.md"
INDEX = "notebooks/index.ipynb"
TEMPLATES = "notebooks/templates.md"
API = "api/index.rst"
# The report is a page of its own, without the site's navigation.
BACK = '<p><a href="index.html">Back to the site</a></p>'

# A link or picture in Markdown, "[text](target)", or in HTML, ` src="target"`.
LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^()\s]+)\)")
PICTURE = re.compile(r'(?<=src=")(?P<target>[^"]+)')
ELSEWHERE = re.compile(r"[a-z]+:|#")
HEADING = re.compile(r"^## (?P<stem>\d+_\w+)$", re.MULTILINE)
# Above a page that has no contents at its right.
WITHOUT_CONTENTS = "---\nhtml_theme.sidebar_secondary.remove: true\n---"
SECTION = re.compile(r"^## ", re.MULTILINE)


def main() -> None:
    """Gather, from the folders that the command names."""
    results, report, site = (Path(argument).resolve() for argument in sys.argv[1:])
    gather(results, report, site)


def gather(results: Path, report: Path, site: Path) -> None:
    """Write all that Sphinx reads to an empty folder."""
    place = Place(site, list_notebooks(results))

    copy_settings(place)
    for name, file in place.notebooks.items():
        place.write(name, executed(file, name, place))
    for name in place.templates:
        place.write(name, template(name, place))
    for name in list_docs():
        text = (paths.ROOT / name).read_text(encoding="utf-8")
        place.write(name, page(text, name, place))

    write_profiles(place)
    write_report(report, place)
    write_api(place)
    write_home(place)


def copy_settings(place: "Place") -> None:
    """Copy Sphinx's settings, the search and the site's style."""
    place.copy(HERE / "conf.py", "conf.py")
    place.copy(HERE / "search.js", "search.js")
    place.copy(HERE / "_static" / "site.css", "_static/site.css")


# ---- what there is


def list_notebooks(results: Path) -> dict[str, Path]:
    """Files of executed notebooks, by path such as `results/photos/03_components.ipynb`.

    Notebooks of the profile `MAIN_PROFILE` come first: a link that names no profile leads to these.
    """
    folders = sorted(folder for folder in results.iterdir() if folder.is_dir())
    folders.sort(key=lambda folder: folder.name != MAIN_PROFILE)
    found = {}
    for folder in folders:
        for file in sorted(folder.glob("[0-9]*.ipynb")):
            if not file.name.endswith(".failed.ipynb"):
                found[f"results/{folder.name}/{file.name}"] = file
    return found


def list_templates(notebooks: Iterable[str]) -> list[str]:
    """The notebooks that are kept executed nowhere."""
    names = {Path(name).name for name in notebooks}
    files = sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))
    return [f"notebooks/{file.name}" for file in files if file.name not in names]


def list_docs() -> list[str]:
    """The docs pages, in the order of the site's contents; cards of models and findings last."""
    named = [*FOUND, *USE]
    rest = [name for name in _files("docs/*.md") if name not in named]
    return [*named, *rest, *OTHERS, *_files(CARDS), *_files("docs/findings/*.md")]


def _files(pattern: str) -> list[str]:
    found = sorted(paths.ROOT.glob(pattern))
    return [file.relative_to(paths.ROOT).as_posix() for file in found]


@dataclass
class Place:
    """The folder that is written, and where in it a link leads."""

    site: Path
    notebooks: Mapping[str, Path]

    def __post_init__(self) -> None:
        """Note which pages there will be."""
        self.templates = list_templates(self.notebooks)
        overviews = map(overview, self.profiles)
        self.pages = {*self.notebooks, *self.templates, *list_docs(), *overviews, INDEX}

    @property
    def profiles(self) -> list[str]:
        """The profiles with executed notebooks, the stage first."""
        return list(dict.fromkeys(name.split("/")[1] for name in self.notebooks))

    def write(self, name: str, text: str) -> None:
        """Write a page."""
        file = self.site / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def copy(self, source: Path, name: str) -> None:
        """Copy a file that a page shows or offers."""
        file = self.site / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, file)

    def executed(self, name: str, profile: str | None = None) -> str | None:
        """The executed copy of a notebook, of this profile where there is one."""
        stem = Path(name).name
        copies = [copy for copy in self.notebooks if Path(copy).name == stem]
        copies.sort(key=lambda copy: copy.split("/")[1] != profile)
        return copies[0] if copies else None


# ---- links


def with_links(text: str, name: str, place: Place) -> str:
    """A page's Markdown with links to the site's pages; files that it links to are copied."""

    def linked(found: re.Match) -> str:
        target = found["target"]
        if ELSEWHERE.match(target):
            return found[0]
        path, hash_, part = target.partition("#")
        wanted = _in_project(name, path)
        if wanted.startswith(("pumalib/", "puma_study/")) and wanted.endswith(".py"):
            address = _relative(name, f"_modules/{wanted.removesuffix('.py')}.html")
            return f'<a href="{address}">{found["text"][1:-1]}</a>'
        address = _address(wanted, name, place)
        if address is None:
            return found["text"][1:-1]
        return f"{found['text']}({address}{hash_}{part})"

    def shown(found: re.Match) -> str:
        if ELSEWHERE.match(found["target"]):
            return found[0]
        wanted = _in_project(name, found["target"])
        place.copy(paths.ROOT / wanted, wanted)
        return _relative(name, wanted)

    return PICTURE.sub(shown, LINK.sub(linked, text))


def _address(wanted: str, name: str, place: Place) -> str | None:
    """Where a link to a file of the project leads; None for a folder, which has no page."""
    if wanted == "README.md":
        return _relative(name, HOME)
    if wanted == "docs/report/report.md":
        return _relative(name, REPORT)
    if wanted.endswith(".ipynb") and wanted not in place.pages:
        profile = None
        if name in place.notebooks:
            profile = name.split("/")[1]
        copy = place.executed(wanted, profile)
        wanted = copy or f"notebooks/{Path(wanted).name}"
    if wanted in place.pages:
        return _relative(name, wanted)
    file = paths.ROOT / wanted
    if file.is_dir():
        return None
    place.copy(file, wanted)
    return _relative(name, wanted)


def _in_project(name: str, target: str) -> str:
    """A link's target as a path from the project's folder."""
    return os.path.normpath(Path(name).parent / target)


def _relative(name: str, wanted: str) -> str:
    return os.path.relpath(wanted, Path(name).parent)


# ---- pages


def page(text: str, name: str, place: Place) -> str:
    """A docs page: without its markers, with its links; findings lead to their notebooks."""
    text = pages.without_markers(text)
    if name.startswith("docs/findings/"):
        profile = Path(name).stem

        def titled(found: re.Match) -> str:
            file = f"results/{profile}/{found['stem']}.ipynb"
            if file not in place.notebooks:
                return found[0]
            return f"## [{found['stem']}]({_relative(name, file)})"

        text = HEADING.sub(titled, text)
    return with_links(text, name, place)


def executed(file: Path, name: str, place: Place) -> str:
    """An executed notebook whose title says its profile, its code behind a click."""
    notebook = _read(file)
    profile = name.split("/")[1]
    said = f"Executed on [{profile}]({_relative(name, overview(profile))})"
    for other in place.profiles:
        copy = f"results/{other}/{Path(name).name}"
        if other != profile and copy in place.notebooks:
            said += f", also on [{other}]({_relative(name, copy)})"

    title, _, rest = _source(notebook["cells"][0]).partition("\n")
    notebook["cells"][0]["source"] = f"{title} · {profile}\n\n*{said}.*\n{rest}"
    notebook["cells"] = joined(notebook["cells"])
    for cell in notebook["cells"]:
        _prepare(cell, name, place)
    return json.dumps(notebook)


def joined(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells, code that shows nothing joined to the code that follows: one click for both."""
    found: list[dict[str, Any]] = []
    for cell in cells:
        before = found[-1] if found else None
        if before and cell["cell_type"] == before["cell_type"] == "code" and not before["outputs"]:
            cell["source"] = f"{_source(before).rstrip()}\n\n{_source(cell)}"
            found.pop()
        found.append(cell)
    return found


def template(name: str, place: Place) -> str:
    """A notebook that is kept executed nowhere, to be read."""
    notebook = _read(paths.ROOT / name)
    title, _, rest = _source(notebook["cells"][0]).partition("\n")
    note = "*A template: its runs are not kept, so it has no outputs here.*"
    notebook["cells"][0]["source"] = f"{title}\n\n{note}\n{rest}"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            _prepare(cell, name, place)
    return json.dumps(notebook)


def _prepare(cell: dict[str, Any], name: str, place: Place) -> None:
    """Fold a cell's code, and make the links of its Markdown lead to the site's pages."""
    if cell["cell_type"] == "markdown":
        text = pages.without_markers(_source(cell))
        cell["source"] = with_links(text, name, place)
        return
    tags = cell["metadata"].setdefault("tags", [])
    tags.append("hide-input")
    for output in cell.get("outputs", []):
        shown = output.get("data", {})
        if "text/markdown" in shown:
            text = "".join(shown["text/markdown"])
            shown["text/markdown"] = with_links(text, name, place)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _source(cell: Mapping[str, Any]) -> str:
    return "".join(cell["source"])


# ---- the pages that are made here


def write_profiles(place: Place) -> None:
    """Write a page per profile, its findings and notebooks, the templates' page, and the index."""
    for profile in place.profiles:
        name = overview(profile)
        text = f"# Executed on `{profile}`\n"
        if (place.site / name).is_file():
            text = (place.site / name).read_text(encoding="utf-8")
        below = [copy for copy in place.notebooks if copy.split("/")[1] == profile]
        place.write(name, text + _contents(below, name))

    text = "# Templates\n\nNotebooks whose runs are not kept: `make lab` opens them.\n"
    place.write(TEMPLATES, text + _contents(place.templates, TEMPLATES))

    index = _read(paths.ROOT / INDEX)
    for cell in index["cells"]:
        _prepare(cell, INDEX, place)
    place.write(INDEX, json.dumps(index))


def overview(profile: str) -> str:
    """The page with a profile's findings, above its executed notebooks in the contents."""
    return f"docs/findings/{profile}.md"


def write_report(report: Path, place: Place) -> None:
    """The report's abstract, and the report itself where it was built."""
    source = (paths.ROOT / "docs" / "report" / "report.md").read_text(encoding="utf-8")
    header = yaml.safe_load(source.split("---\n")[1])
    links = []
    for file, label in (("report.html", "Read it as a page"), ("report.pdf", "as a PDF")):
        # Sphinx copies files in _extra next to the built pages.
        if (report / file).is_file():
            place.copy(report / file, f"_extra/report/{file}")
            if file.endswith(".html"):
                page = place.site / "_extra" / "report" / file
                text = with_site_links(page.read_text(encoding="utf-8"), report, place)
                text = text.replace("<body>", f"<body>\n{BACK}", 1)
                page.write_text(text, encoding="utf-8")
            links.append(f'<a href="{file}">{label}</a>')
    said = " · ".join(links) or "It was not built for this site: `make report`, then `make site`."
    (place.site / "_extra").mkdir(exist_ok=True)
    parts = ["# The report", f"**{header['title']}.** {header['subtitle']}.", said]
    parts += ["## Abstract", header["abstract"]]
    place.write(REPORT, "\n\n".join(parts))


def with_site_links(text: str, report: Path, place: Place) -> str:
    """The built report with links to the site's pages; without links to files that it lacks."""

    def led(found: re.Match) -> str:
        target, hash_, part = found["target"].partition("#")
        if not target or ELSEWHERE.match(target):
            return found[0]
        wanted = os.path.relpath(os.path.normpath(report / target), paths.ROOT)
        if wanted not in place.pages:
            return found["text"]
        address = _relative(REPORT, str(Path(wanted).with_suffix(".html")))
        return f'<a href="{address}{hash_}{part}">{found["text"]}</a>'

    return re.sub(
        r'<a\s+href="(?P<target>[^"]+)"[^>]*>(?P<text>.*?)</a>', led, text, flags=re.DOTALL
    )


def write_api(place: Place) -> None:
    """A page for each room of the library and the study, from its docstrings."""
    below = []
    lines = ["API reference", "=============", ""]
    lines += ["From the docstrings; ``import pumalib`` gives the functions of ``pumalib.api``.", ""]
    for room in list_rooms():
        name = f"api/{room}.rst"
        place.write(name, _room(room))
        below.append(name)
        lines += [f":doc:`{room}`", f"    {_summary(room)}", ""]
    lines += [".. toctree::", "   :hidden:", ""]
    lines += [f"   {Path(name).stem} <{Path(name).stem}.rst>" for name in below]
    place.write(API, "\n".join(lines))


def list_rooms() -> list[str]:
    """The modules and packages of pumalib, its public functions first, then of puma_study."""
    rooms = []
    for package in ("pumalib", "puma_study"):
        folder = paths.ROOT / package
        names = [file.stem for file in folder.glob("*.py") if not file.name.startswith("__")]
        names += [file.parent.name for file in folder.glob("*/__init__.py")]
        names.sort(key=lambda name: (name != "api", name))
        rooms += [f"{package}.{name}" for name in names]
    return rooms


def _room(room: str) -> str:
    """A page with the docstrings of a package, and then of its modules."""
    lines = [room, "=" * len(room), "", f".. automodule:: {room}", "   :members:"]
    folder = _file(room).parent
    if _file(room).name == "__init__.py":
        # Names that a package imports from its modules are described with these.
        lines.append("   :ignore-module-all:")
        for file in sorted(folder.glob("[!_]*.py")):
            module = f"{room}.{file.stem}"
            lines += ["", module, "-" * len(module), ""]
            lines += [f".. automodule:: {module}", "   :members:"]
    return "\n".join([*lines, ""])


def _summary(room: str) -> str:
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(_file(room).read_text(encoding="utf-8")))
    return (docstring or "").partition("\n")[0]


def _file(room: str) -> Path:
    whole = paths.ROOT.joinpath(*room.split("."))
    package = whole / "__init__.py"
    return package if package.is_file() else whole.with_suffix(".py")


def write_home(place: Place) -> None:
    """README.md on two pages, home and overview, and the contents of the whole site."""
    readme = page((paths.ROOT / "README.md").read_text(encoding="utf-8"), "README.md", place)
    home, overview_ = home_and_overview(readme)
    place.write(OVERVIEW, overview_)
    parts = [home]
    for caption, names in contents(place).items():
        parts.append(_contents(names, HOME, caption))
    place.write(HOME, "\n".join(parts))


def home_and_overview(readme: str) -> tuple[str, str]:
    """README's Markdown as a page of one screen, and a page of the sections that follow.

    Home has the introduction, the first section in two columns where there is room, and links to
    the other sections.
    """
    introduction, first, *others = SECTION.split(readme)
    heading, _, found = first.partition("\n")
    links = []
    for section in others:
        title = section.partition("\n")[0]
        links.append(f"[{title}]({OVERVIEW}#{pages.anchor(title)})")
    home = [
        WITHOUT_CONTENTS,
        introduction,
        f"## {heading}",
        f"````{{container}} found\n{found}\n````",
        " · ".join(links),
    ]
    overview_ = ["# Overview", *(f"## {section}" for section in others)]
    return "\n\n".join(home), "\n\n".join(overview_)


def contents(place: Place) -> dict[str, list[str]]:
    """The pages below home, by caption, without pages that belong to a profile or to the API."""
    findings = [name for name in list_docs() if name.startswith("docs/findings/")]
    # Findings of profiles that have notebooks first, then all others.
    overviews = list(dict.fromkeys([*map(overview, place.profiles), *findings]))
    rest = [name for name in list_docs() if name not in FOUND and name not in findings]
    return {
        "Start": [OVERVIEW],
        "What was found": [REPORT, *FOUND],
        "The notebooks": [INDEX, *overviews, TEMPLATES],
        "To use it": rest,
        "Reference": [API],
    }


def _contents(names: Iterable[str], below: str, caption: str = "") -> str:
    """Contents that the sidebar shows, and not the page."""
    lines = []
    for name in names:
        line = _relative(below, name)
        short = _short_title(name)
        if short:
            line = f"{short} <{line}>"
        lines.append(line)
    head = ["", "```{toctree}", ":hidden:"]
    if caption:
        head.append(f":caption: {caption}")
    return "\n".join([*head, "", *lines, "```", ""])


def _short_title(name: str) -> str:
    """The sidebar's name of a page whose own title is too long or too short; otherwise ""."""
    path = Path(name)
    if path.suffix == ".ipynb" and path.stem != "index":
        return path.stem
    if name in _files(CARDS):
        return f"Trained model: {path.parent.name}"
    return ""


if __name__ == "__main__":
    main()
