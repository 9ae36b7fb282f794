"""Every executed notebook shows its findings at the top, and the index links to all of them."""

import ast
import re

import nbformat
import pandas as pd
import pytest

import puma_study as study
from puma_study import findings, notebooks
from pumalib import config, paths

RESULTS = paths.ROOT / "results"
PROFILES = sorted(file.stem for file in (paths.ROOT / findings.FOLDER).glob("*.md"))
EXECUTED = [
    (profile, file.stem)
    for profile in PROFILES
    for file in sorted((RESULTS / profile).glob("[0-9]*.ipynb"))
    if not file.name.endswith(".failed.ipynb")
]
TEMPLATES = sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))
KEPT_STEMS = {stem for _, stem in EXECUTED}
INDEX = paths.NOTEBOOKS / "index.ipynb"
# It measures speeds anew, so it is executed again when the machine does nothing else.
MEASURES = "24_search_your_images"
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
PICTURE = re.compile(r"\n\n!\[\w[^]]*\]\((?P<file>\S+)\)")


def markdown(file):
    notebook = nbformat.read(file, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


# ---- what was found


def test_each_page_is_of_a_profile():
    assert {"mini", "photos"} <= set(PROFILES)
    for profile in PROFILES:
        config.profile(profile)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_executed_notebook_has_its_finding_and_no_other(profile):
    page = (paths.ROOT / findings.FOLDER / f"{profile}.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert headings == [stem for of, stem in EXECUTED if of == profile]
    told = findings.read(profile)
    assert list(told) == [findings_name(heading) for heading in headings]


def findings_name(stem):
    return notebooks.title(paths.NOTEBOOKS / f"{stem}.ipynb")


@pytest.mark.parametrize(("profile", "stem"), EXECUTED)
def test_a_finding_is_short_and_has_a_caveat(profile, stem):
    text = findings.read(profile)[findings_name(stem)]
    assert text.startswith("**") and "<!--" not in text
    assert text.count("The caveat:") == 1
    words = PICTURE.sub("", text).split()
    assert len(words) <= 110


@pytest.mark.parametrize("profile", PROFILES)
def test_the_picture_of_a_finding_is_last_and_kept_with_its_notebook(profile):
    told = findings.read(profile)
    shown = {name: PICTURE.findall(text) for name, text in told.items()}
    assert any(shown.values())
    for name, files in shown.items():
        assert len(files) == told[name].count("](../") <= 1
        for file in files:
            assert told[name].endswith(f"({file})")
            place = paths.ROOT / findings.FOLDER / file
            assert place.is_file() and place.resolve().parent == RESULTS / profile


@pytest.mark.parametrize("profile", [profile for profile, stem in EXECUTED if stem == "17_claims"])
def test_the_finding_of_the_scorecard_counts_as_the_scorecard(profile):
    counts = pd.read_csv(RESULTS / profile / "claims.csv")["here"].value_counts()
    text = findings.read(profile)["claims"]
    said = re.match(
        r"\*\*Of 37 claims (\d+) (?:is|are) supported .*?, (\d+) (?:are )?contradicted and (\d+) ",
        text,
    )
    verdicts = ("supported", "contradicted", "undecided")
    assert [int(number) for number in said.groups()] == [counts.get(one, 0) for one in verdicts]


def test_what_is_shown_is_of_the_profile():
    found = study.found("components", "photos")
    assert found is not None
    shown = found.data
    assert shown.startswith("## What we found\n\n**")
    text = PICTURE.sub("", findings.read("photos")["components"])
    assert text in shown
    assert PICTURE.sub("", findings.read("mini")["components"]) not in shown
    (picture,) = PICTURE.findall(shown)
    assert (paths.NOTEBOOKS / picture).is_file(), "as notebooks/ sees it, where it is opened"


@pytest.mark.parametrize(
    ("notebook", "profile"),
    [("components", "smoke"), ("my_copy", "mini"), ("backbones", "photos"), ("tuning", "mini")],
)
def test_where_nothing_is_kept_nothing_is_shown(notebook, profile):
    assert study.found(notebook, profile) is None


# ---- notebooks


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
def test_a_notebook_opens_with_its_finding_and_ends_with_it(file):
    cells = nbformat.read(file, as_version=4).cells
    title, parameters, found, what = cells[:4]
    assert re.fullmatch(r"# .+\n\n.+\?", title.source), "a title, and one line that asks"
    assert parameters.metadata["tags"] == ["parameters"]
    if file.stem not in KEPT_STEMS:
        # A copy brings its original's cell along, which tells nothing there.
        return
    assert found.metadata["tags"] == ["found"]
    assert found.source == "import puma_study as study\n\nstudy.found(notebook, profile)"
    assert what.cell_type == "markdown"
    end = cells[-1].source
    assert end.startswith("## What to take away\n")
    assert "*What we found*, at the top, has the numbers" in end


def executed(profile, stem):
    return nbformat.read(RESULTS / profile / f"{stem}.ipynb", as_version=4).cells


@pytest.mark.parametrize(("profile", "stem"), EXECUTED)
def test_an_executed_notebook_says_below_its_title_what_is_found_now(profile, stem):
    """... or is executed again: python -m puma_study run <notebook> --profile <profile> --kept."""
    cells = executed(profile, stem)
    text = findings.read(profile)[findings_name(stem)]
    there = text.replace(f"](../../results/{profile}/", "](")
    assert cells[1].cell_type == "markdown"
    assert cells[1].source.startswith(f"## What we found\n\n{there}\n")
    assert not [cell for cell in cells if "study.found(" in cell.source]


@pytest.mark.parametrize(("profile", "stem"), EXECUTED)
def test_an_executed_notebook_is_its_source_with_values_in_its_parameters(profile, stem):
    """... or is executed again, as above."""
    source = nbformat.read(paths.NOTEBOOKS / f"{stem}.ipynb", as_version=4).cells
    cells = executed(profile, stem)
    assert [cell.id for cell in cells] == [
        source[place].id for place in (0, 2, 1, *range(3, len(source)))
    ]
    own = {cell.id: cell for cell in source}
    for cell in cells:
        tags = cell.metadata.get("tags", [])
        if "parameters" in tags:
            used = dict(values(cell.source))
            assert used["profile"] == profile
            default = dict(values(own[cell.id].source))
            given = {name: value for name, value in used.items() if value != default[name]}
            assert cell.source == notebooks.with_values(own[cell.id].source, given)
        elif "found" not in tags and stem != MEASURES:
            assert cell.source == own[cell.id].source, cell.id


def values(source):
    for statement in ast.parse(source).body:
        yield statement.targets[0].id, ast.literal_eval(statement.value)


@pytest.mark.parametrize("file", [*TEMPLATES, INDEX], ids=lambda file: file.stem)
def test_links_of_notebooks_lead_somewhere(file):
    targets = [found["target"] for text in markdown(file) for found in LINK.finditer(text)]
    for target in targets:
        assert "://" in target or (file.parent / target).is_file(), target
    named = re.findall(r"`(\d\d_[a-z_]+)`", "\n".join(markdown(file)))
    assert not {findings_name(name) for name in named} - {findings_name(file.stem)}, (
        "link other notebooks: [03_components](03_components.ipynb)"
    )


def test_the_index_has_every_notebook_once_and_no_code():
    notebook = nbformat.read(INDEX, as_version=4)
    assert {cell.cell_type for cell in notebook.cells} == {"markdown"}
    text = "\n".join(markdown(INDEX))
    linked = re.findall(r"\[(\d\d_[a-z_]+)\]\(\1\.ipynb\): \w", text)
    assert sorted(linked) == [file.stem for file in TEMPLATES]
    assert len(re.findall(r"^## ", text, re.MULTILINE)) == 4


def test_the_index_links_to_every_executed_copy():
    text = "\n".join(markdown(INDEX))
    linked = re.findall(r"\]\(\.\./results/([\w-]+)/(\d\d_\w+)\.ipynb\)", text)
    assert sorted(linked) == sorted(EXECUTED)
    for line in text.splitlines():
        named = re.findall(r"(\d\d_\w+)\.ipynb", line)
        assert len(set(named)) <= 1, line


def test_every_notebook_that_is_kept_has_its_picture_in_the_index():
    text = "\n".join(markdown(INDEX))
    pictures = dict(
        re.findall(r'^\| <img src="([^"]+)" width="160" alt="(\w+)"> \|', text, re.MULTILINE)
    )
    assert set(pictures.values()) == KEPT_STEMS
    assert text.count("<img") == len(pictures)
    for picture, stem in pictures.items():
        assert (INDEX.parent / picture).is_file(), picture
        assert paths.ROOT.joinpath("notebooks", picture).stem.startswith(findings_name(stem))


def test_the_index_is_no_notebook_to_be_run():
    assert INDEX not in notebooks.find([])
    with pytest.raises(ValueError, match="unknown notebook 'index'"):
        notebooks.find(["index"])
