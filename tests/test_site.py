"""The site: its gathered sources, its contents, and that no page loads anything from elsewhere.

Where playwright and a browser are, also how its pages and those of `search --html` look in one:
`pip install playwright`, then `playwright install chromium` or PUMALIB_BROWSER=/path/of/chromium.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from PIL import Image

from pumalib import paths, search_page
from tools import pages

FOLDER = paths.ROOT / "docs" / "site"
RESULTS = paths.ROOT / "results"
CONTENTS = re.compile(r"^```\{toctree\}\n(.*?)^```|^\.\. toctree::\n((?:\n| .*\n?)*)", re.M | re.S)


def load(name):
    """A program of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


gather = load("gather")
check = load("check")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Everything that Sphinx reads, of the kept results and of no report."""
    folder = tmp_path_factory.mktemp("site")
    gather.gather(RESULTS, folder / "no-report", folder / "gathered")
    return folder / "gathered"


def named_below(page, site):
    """The pages that the contents of a page name, and those below them."""
    found = []
    for fenced, directive in CONTENTS.findall(page.read_text(encoding="utf-8")):
        for line in (fenced or directive).splitlines():
            entry = line.strip()
            if not entry or entry.startswith(":"):
                continue
            name = re.sub(r".*<(.*)>", r"\1", entry)
            below = (page.parent / name).resolve()
            assert below.is_file(), f"{page.name} names {name}"
            found += [below.relative_to(site.resolve()).as_posix(), *named_below(below, site)]
    return found


def test_the_contents_name_every_executed_notebook_docs_page_and_room(site):
    named = named_below(site / "index.md", site)
    assert len(named) == len(set(named)), "a page stands in two places"

    executed = [file.relative_to(paths.ROOT).as_posix() for file in RESULTS.glob("*/*.ipynb")]
    assert len(executed) > 30 and {"photos", "mini"} <= {
        Path(name).parent.name for name in executed
    }
    docs = [f"docs/{file.name}" for file in (paths.ROOT / "docs").glob("*.md")]
    assert "docs/results.md" in docs
    templates = {file.name for file in paths.NOTEBOOKS.glob("*.ipynb")}
    assert templates == {Path(name).name for name in named if name.endswith(".ipynb")}
    rooms = {
        f"api/pumalib.{name}.rst" for name in ("api", "config", "losses", "models", "training")
    }
    for wanted in (set(executed), set(docs), rooms):
        assert wanted <= set(named), wanted - set(named)

    made = {file.relative_to(site).as_posix() for file in site.rglob("*.ipynb")}
    assert made <= set(named), made - set(named)


def test_home_and_the_page_below_it_are_the_readme(site):
    home = (site / "index.md").read_text(encoding="utf-8")
    overview = (site / "overview.md").read_text(encoding="utf-8")
    readme = pages.without_markers((paths.ROOT / "README.md").read_text(encoding="utf-8"))
    finding = re.search(r"- \*\*PUMA beat full fine-tuning only.*", readme)[0]
    assert finding in home
    rows = [line for line in readme.splitlines() if line.startswith("| Adapters do more than")]
    assert rows and rows[0] in overview
    assert "<!--" not in home + overview

    first, *others = re.findall(r"^## .*", readme, re.MULTILINE)
    assert first in home and re.findall(r"^## .*", overview, re.MULTILINE) == others
    for heading in others:
        title = heading.removeprefix("## ")
        assert f"[{title}](overview.md#{pages.anchor(title)})" in home


def test_the_report_links_to_pages_of_the_site(tmp_path):
    place = gather.Place(tmp_path, gather.list_notebooks(RESULTS))
    here = paths.ROOT / "build"
    text = (
        '<a href="../docs/protocol.md#order">a</a> <a href="../LICENSE">b</a> <a href="#c">c</a>'
        '<a\nhref="../results/photos/17_claims.ipynb" title="x">d</a>'
    )
    assert gather.with_site_links(text, here, place) == (
        '<a href="../docs/protocol.html#order">a</a> b <a href="#c">c</a>'
        '<a href="../results/photos/17_claims.html">d</a>'
    )


def test_executed_notebooks_say_their_profile_and_fold_their_code(site):
    names = gather.list_notebooks(RESULTS)
    for name in names:
        notebook = json.loads((site / name).read_text(encoding="utf-8"))
        nbformat.validate(notebook)
        profile = name.split("/")[1]
        first = notebook["cells"][0]["source"].splitlines()
        assert first[0].endswith(f" · {profile}")
        assert first[2].startswith(f"*Executed on [{profile}](")
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert code and all("hide-input" in cell["metadata"]["tags"] for cell in code)

    # What shows nothing, as parameters, stands with the code that follows; none of it is lost.
    name = "results/photos/06_adaptation_methods.ipynb"
    before = nbformat.read(names[name], as_version=4).cells
    after = nbformat.read(site / name, as_version=4).cells
    lines = [line for cell in after if cell.cell_type == "code" for line in cell.source.split("\n")]
    for cell in before:
        if cell.cell_type == "code":
            assert set(cell.source.split("\n")) <= set(lines)
    assert 'profile = "photos"' in lines[1]
    assert after[1].source.startswith("## What we found\n")
    assert (site / "results" / "photos" / "adaptation_methods_gains.png").is_file()


def test_a_link_leads_to_the_copy_of_the_same_profile(tmp_path):
    place = gather.Place(tmp_path, gather.list_notebooks(RESULTS))
    here = "results/photos/02_main_results.ipynb"
    for text, leads in (
        ("[a](17_claims.ipynb)", "[a](17_claims.ipynb)"),
        ("[a](05_puma_with_losses.ipynb)", "[a](../photos-8/05_puma_with_losses.ipynb)"),
        ("[a](92_speed.ipynb)", "[a](../../notebooks/92_speed.ipynb)"),
        ("[a](../../README.md#x)", "[a](../../index.md#x)"),
        ("[a](../../notebooks/profiles)", "a"),
        ("[a](https://arxiv.org/abs/1)", "[a](https://arxiv.org/abs/1)"),
        (
            "[`b`](../../pumalib/models/puma.py)",
            '<a href="../../_modules/pumalib/models/puma.html">`b`</a>',
        ),
    ):
        assert gather.with_links(text, here, place) == leads
    assert not list(tmp_path.iterdir())
    shown = gather.with_links("![a](claims.png)", here, place)
    assert shown == "![a](claims.png)" and (tmp_path / "results/photos/claims.png").is_file()
    with pytest.raises(FileNotFoundError, match=r"no-such\.csv"):
        gather.with_links("[a](no-such.csv)", here, place)


def test_what_a_page_loads_and_where_it_does_not_lead_is_found(tmp_path):
    page = tmp_path / "a.html"
    page.write_text(
        '<p id="here"><a href="#here">1</a> <a href="#gone">2</a> <a href="b.html">3</a>'
        '<a href="https://example.org/x.js">4</a><link rel="canonical" href="https://example.org">'
        '<link rel="stylesheet" href="//example.org/1.css"><img src="https://example.org/2.png">'
        '<script src="http://example.org/3.js"></script>'
        '<script>load("https://example.org/4.mjs"); say("https://example.org")</script>'
        "<style>@import 'https://example.org/5'; a { color: red }</style><img src='data:x'>"
    )
    (tmp_path / "a.css").write_text('a { src: url("https://example.org/6.woff2") } b { }')
    found = check.problems(tmp_path)
    assert found == [
        "a.html loads //example.org/1.css",
        "a.html loads https://example.org/2.png",
        "a.html loads http://example.org/3.js",
        "a.html loads https://example.org/4.mjs",
        "a.html loads https://example.org/5",
        "a.html links to #gone, which is not there",
        "a.html links to b.html, which is not there",
        "a.css loads https://example.org/6.woff2",
    ]


def test_a_built_page_folds_code_draws_formulas_and_loads_nothing(tmp_path):
    """One notebook and one room, with the settings of the whole site."""
    pytest.importorskip("sphinx_book_theme")
    pytest.importorskip("pypandoc")
    results = tmp_path / "results"
    (results / "mine").mkdir(parents=True)
    shown = nbformat.v4.new_output("stream", text="found it")
    cells = [
        nbformat.v4.new_markdown_cell("# A title\n\nFor $\\alpha < 1$:\n\n$$x^2$$"),
        nbformat.v4.new_code_cell("hidden = 1", id="first"),
        nbformat.v4.new_code_cell("print(hidden)", outputs=[shown]),
    ]
    metadata = {"language_info": {"name": "python"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.write(notebook, results / "mine" / "01_one.ipynb")

    folder = tmp_path / "site"
    place = gather.Place(folder, gather.list_notebooks(results))
    (name,) = place.notebooks
    place.write(name, gather.executed(place.notebooks[name], name, place))
    place.write("docs/findings/mine.md", "# Mine\n")
    place.write("api.rst", gather._room("pumalib.progress"))
    below = [name, "docs/findings/mine.md", "api.rst"]
    place.write("index.md", "# Home\n" + gather._contents(below, "index.md"))
    gather.copy_settings(place)
    (folder / "_extra").mkdir()
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
    subprocess.run([*command, str(folder), str(folder / "_build")], check=True)

    built = folder / "_build"
    assert check.problems(built) == []
    page = (built / "results" / "mine" / "01_one.html").read_text(encoding="utf-8")
    assert re.search(r"A title · mine", page) and "found it" in page
    assert page.count("<math") == 2 and "MathJax" not in page
    folded = re.search(r"<details.*?</details>", page.partition("<article")[2], re.DOTALL)[0]
    assert "hidden" in folded and "print" in folded and "found it" not in folded
    assert 'id="pumalib.progress' in (built / "api.html").read_text(encoding="utf-8")


# ---- in a browser

# The laptop and the phone that pages are made for.
SCREENS = {1280: 900, 390: 844}
SEEN = (
    "index.html",
    "overview.html",
    "results/mini/24_search_your_images.html",
    "results/photos-8/02_main_results.html",
    "results/photos-8/17_claims.html",
    "docs/results.html",
    "api/index.html",
    "api/pumalib.config.html",
    "genindex.html",
)
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The background that is seen behind an element, as "rgb(1, 2, 3)".
BACKGROUND = """element => {
  for (let behind = element; behind; behind = behind.parentElement) {
    const colour = getComputedStyle(behind).backgroundColor;
    if (colour !== "rgba(0, 0, 0, 0)") return colour;
  }
}"""


@pytest.fixture(scope="module")
def browser():
    """A browser without a window; the test is skipped where none is."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        program = os.environ.get("PUMALIB_BROWSER")
        program = program or next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None and not Path(started.chromium.executable_path).is_file():
            pytest.skip("no browser: `playwright install chromium`, or PUMALIB_BROWSER")
        # Containers run as root, for whom there is no sandbox; the pages are our own.
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def built(browser, site, tmp_path_factory):
    """The whole site, which takes a minute: it is built only where a browser is."""
    pytest.importorskip("sphinx_book_theme")
    pytest.importorskip("pypandoc")
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "sphinx", "-q", "-d", str(folder / "read" / "doctrees")]
    subprocess.run([*command, str(site), str(folder / "pages")], check=True)
    return folder / "pages"


def look(browser, address, width, mode="light"):
    """A page opened at this width, and what it logged as an error or could not load."""
    screen = {"width": width, "height": SCREENS[width]}
    page = browser.new_page(viewport=screen, color_scheme=mode)
    faults = []

    def note(message):
        if message.type == "error":
            faults.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("requestfailed", lambda request: faults.append(request.url))
    page.goto(address)
    return page, faults


def width_of(page):
    """The width in px that a page has with what would have to be scrolled to."""
    return page.evaluate("document.documentElement.scrollWidth")


@pytest.mark.parametrize("width", SCREENS)
@pytest.mark.parametrize("name", SEEN)
def test_a_page_logs_no_error_and_is_no_wider_than_the_screen(built, browser, name, width):
    page, faults = look(browser, (built / name).as_uri(), width)
    assert faults == []
    assert width_of(page) == width
    page.close()


def test_home_is_one_screen(built, browser):
    page, _ = look(browser, (built / "index.html").as_uri(), 1280)
    last = page.query_selector_all("article a")[-1]
    assert "overview.html#" in last.get_attribute("href")
    place = last.bounding_box()
    assert place["y"] + place["height"] <= SCREENS[1280]
    page.close()


@pytest.mark.parametrize("name", [name for name in SEEN if name.startswith("results/")])
def test_tables_of_notebooks_are_dark_in_dark_mode(built, browser, name):
    for mode, dark in (("light", False), ("dark", True)):
        page, _ = look(browser, (built / name).as_uri(), 1280, mode)
        tables = page.query_selector_all(".cell_output table")
        assert tables
        for table in tables:
            colour = table.evaluate(BACKGROUND)
            lightest = max(map(int, re.findall(r"\d+", colour)[:3]))
            assert (lightest < 128) == dark, f"{mode}: {colour}"
        page.close()


@pytest.mark.parametrize(
    "asked, name",
    [
        ("own images", "docs/own-images.html"),
        ("protocol", "docs/protocol.html"),
        ("costs", "docs/costs.html"),
    ],
)
def test_search_finds_the_page_that_the_words_name_first(built, browser, asked, name):
    page, faults = look(browser, f"{(built / 'search.html').as_uri()}?q={asked}", 390)
    page.get_by_text("Search finished").wait_for()
    first = page.query_selector("#search-results li a").evaluate("link => link.href")
    assert first.partition("?")[0] == (built / name).as_uri()
    assert faults == []
    assert width_of(page) == 390
    page.close()


@pytest.mark.parametrize("width", SCREENS)
def test_a_page_of_found_images_is_no_wider_than_the_screen(browser, tmp_path, width):
    long = "a_folder_of_photographs_of_one_summer_with_a_long_name_and_no_space.png"
    Image.new("RGB", (600, 200), "teal").save(tmp_path / long)
    found = pd.DataFrame({"path": [long] * 5, "cosine": [0.9, 0.8, 0.7, 0.6, 0.5]})
    answers = [search_page.Answer(tmp_path / long, found)] * 2
    search_page.write(answers, tmp_path, tmp_path / "page.html", f"2 images like {long}")

    page, faults = look(browser, (tmp_path / "page.html").as_uri(), width)
    assert faults == []
    assert width_of(page) == width
    sizes = page.eval_on_selector_all("img", "all => all.map(one => one.naturalWidth)")
    assert sizes == [search_page.SIDE] * 12
    page.close()
