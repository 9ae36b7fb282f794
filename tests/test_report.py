"""The report: built whole, alone in its file, and its captions numbered as the text has them."""

import re

import pytest

from puma_study import findings
from pumalib import paths
from tools import report

SOURCE = (paths.ROOT / "docs" / "report" / "report.md").read_text(encoding="utf-8")
BIBLIOGRAPHY = (paths.ROOT / "docs" / "report" / "references.bib").read_text(encoding="utf-8")
READ = findings.without_markers(SOURCE)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("pypandoc")
    pytest.importorskip("typst")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", paths.ROOT / "results")
        return report.build(tmp_path_factory.mktemp("report"))


def test_html_stands_alone_with_its_pictures_and_formulas(built):
    text = built[0].read_text(encoding="utf-8")
    loaded = re.findall(r'(?:src|<link[^>]*href)="([^"]{1,40})', text)
    assert loaded
    assert all(address.startswith("data:") for address in loaded)
    captions = text.count("<figcaption")
    assert captions == len(re.findall(r"\{#fig-", SOURCE)) == len(report.FIGURES) + 1
    assert text.count("<caption") == len(re.findall(r"\{#tbl-", SOURCE))
    assert text.count("<math") > 10
    assert "<!-- " not in READ
    puma = re.search(r"<td[^>]*>PUMA</td>\s*<td[^>]*>([\d.]+) \[", text)
    readme = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| PUMA | {puma[1]} |" in readme


def test_pdf_is_whole(built):
    content = built[1].read_bytes()
    assert content.startswith(b"%PDF-")
    assert content.rstrip().endswith(b"%%EOF")
    pages_of_pdf = re.findall(rb"/Type\s*/Page\b(?!s)", content)
    assert 12 <= len(pages_of_pdf) <= 18


def test_every_citation_has_a_reference_and_every_reference_is_cited():
    cited = set(re.findall(r"@([a-z]+\d{4}[a-z]*)", READ))
    assert cited == set(re.findall(r"@\w+\{(\w+),", BIBLIOGRAPHY))


@pytest.mark.parametrize(("word", "mark"), [("Figure", "fig")])
def test_pictures_are_spoken_of_in_their_order(word, mark):
    """The text says numbers, which the captions get by their order."""
    count = len(re.findall(rf"\{{#{mark}-", READ))
    first_named = dict.fromkeys(int(number) for number in re.findall(rf"{word} (\d+)", READ))
    assert list(first_named) == list(range(1, count + 1))


def test_the_tables_that_the_text_numbers_are_those():
    order = re.findall(r"^: .*\{#(tbl-\w+)\}$", READ, flags=re.MULTILINE)
    named = re.findall(r"\[Table (\d+)\]\(#(tbl-\w+)\)", READ)
    assert len(named) > 3
    assert {mark: order.index(mark) + 1 for _, mark in named} == {
        mark: int(number) for number, mark in named
    }


def test_every_table_has_a_caption_and_so_a_number():
    tables = re.findall(r"^\|[-:|]+\|$", READ, flags=re.MULTILINE)
    assert len(tables) == len(re.findall(r"\{#tbl-", READ))


def test_without_its_tools_the_report_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "typst", None)
    with pytest.raises(RuntimeError, match=r"pip install -e '.\[report\]'"):
        report.build(tmp_path)
