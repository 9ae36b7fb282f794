"""The report: built whole, alone in its file, of the same sections as the docs pages."""

import re

import pytest

from pumalib import paths
from tools import pages, report

SOURCE = (paths.ROOT / report.PAGE).read_text(encoding="utf-8")
BIBLIOGRAPHY = (paths.ROOT / "docs" / "report" / "references.bib").read_text(encoding="utf-8")
RESULTS_PAGE = (paths.ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("pypandoc")
    pytest.importorskip("typst")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", paths.ROOT / "results")
        return report.build(tmp_path_factory.mktemp("report"))


def test_html_stands_alone_with_its_pictures_formulas_and_sections(built):
    text = built[0].read_text(encoding="utf-8")
    loaded = re.findall(r'(?:src|<link[^>]*href)="([^"]{1,40})', text)
    assert loaded
    assert all(address.startswith("data:") for address in loaded)
    assert text.count("<figcaption") == 3
    assert text.count("<caption") == len(re.findall(r"\{#tbl-", SOURCE))
    assert text.count("<math") > 10
    assert "<!-- " not in text and "Section: [" not in text
    puma = re.search(r"<td[^>]*>PUMA</td>\s*<td[^>]*>[\d./ M]+</td>\s*<td[^>]*>([\d.]+) \[", text)
    assert f" M | {puma[1]} [" in RESULTS_PAGE


def test_pdf_is_whole_and_short(built):
    content = built[1].read_bytes()
    assert content.startswith(b"%PDF-")
    assert content.rstrip().endswith(b"%%EOF")
    pages_of_pdf = re.findall(rb"/Type\s*/Page\b(?!s)", content)
    assert 8 <= len(pages_of_pdf) <= 12


def test_links_of_the_report_lead_to_files(built):
    text = built[0].read_text(encoding="utf-8")
    targets = re.findall(r'<a\s+href="([^"#][^"]*)"', text)
    files = [target.partition("#")[0] for target in targets if "://" not in target]
    assert len(files) > 15
    for file in files:
        assert (built[0].parent / file).exists(), file


def test_a_section_is_that_of_its_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n\n## First part\n\nText.\n\n### Below\n\nMore.\n\n## Other\n\nElse.\n")
    assert report.section(page, "first-part") == "# First part\n\nText.\n\n## Below\n\nMore."
    with pytest.raises(ValueError, match="has no section 'none'"):
        report.section(page, "none")


def test_the_abstract_is_short_and_has_numbers():
    abstract = SOURCE.partition("abstract: |")[2].partition("---")[0]
    assert len(abstract.split()) <= 160
    assert len(re.findall(r"\d\.\d", abstract)) >= 3


def test_every_citation_has_a_reference_and_every_reference_is_cited():
    cited = set(re.findall(r"@([a-z]+\d{4}[a-z]*)", SOURCE))
    assert cited == set(re.findall(r"@\w+\{(\w+),", BIBLIOGRAPHY))


def test_the_tables_that_the_text_numbers_are_those():
    order = re.findall(r"^: .*\{#(tbl-\w+)\}$", SOURCE, flags=re.MULTILINE)
    named = re.findall(r"\[Table (\d+)\]\(#(tbl-\w+)\)", SOURCE)
    assert named
    assert {mark: order.index(mark) + 1 for _, mark in named} == {
        mark: int(number) for number, mark in named
    }


def test_own_tables_have_captions():
    own = pages.without_markers(SOURCE)
    tables = re.findall(r"^\|[-:|]+\|$", own, flags=re.MULTILINE)
    assert len(tables) == len(re.findall(r"\{#tbl-", own))


def test_without_its_tools_the_report_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "typst", None)
    with pytest.raises(RuntimeError, match=r"pip install -e '.\[report\]'"):
        report.build(tmp_path)
