"""The blocks of docs/own-images.md, run unchanged and in order, in a reader's folder."""

import re

import faiss
import own_images_page
import pytest

from pumalib import paths
from pumalib.models import backbones

PAGE = own_images_page.PAGE


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A folder with images and nothing else, as after installing the wheel, and a hub at hand."""
    home = tmp_path / "home"
    own_images_page.make_images(home)
    monkeypatch.chdir(home)
    monkeypatch.setattr(paths, "ROOT", home)
    monkeypatch.setattr(paths, "RESULTS", home / "results")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(backbones, "_from_timm", own_images_page.hub_at_hand())
    return home


@pytest.mark.filterwarnings("ignore:the frozen backbone finds")
@pytest.mark.filterwarnings("ignore:no epoch finds more than the model that it began from")
def test_every_block_of_the_page_runs_as_it_stands(reader, capsys):
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    found = own_images_page.blocks()
    assert len(found) == PAGE.read_text(encoding="utf-8").count("```") / 2 >= 10
    names = {}
    kinds = []
    for kind, text in found:
        kinds.append(kind)
        own_images_page.run_block(kind, text, names)
    assert {"python", "yaml", ""} == set(kinds)

    said = capsys.readouterr().out
    assert "{'missing.jpg'" not in said and "{1: 'there is no such file'}" in said
    assert names["vectors"].shape == (2, 192)
    page = (reader / "page.html").read_text()
    assert page.count("<img ") == 6
    assert names["table"].at["all", "queries"] == 30
    assert sorted(file.name for file in (reader / "models").iterdir()) == [
        "first",
        "mine",
        "mine.onnx",
    ]
    assert names["second"] != names["folder"]


def test_the_page_says_what_a_class_folder_is_called(reader):
    """The dataset of a split file, as the page has it."""
    from pumalib import data

    rows = [f"photos,{name},test" for name in ("cups", "hats", "keys")]
    rows += [f"photos,{name},train" for name in ("mugs", "pens", "toys")]
    (reader / "photos" / "split.csv").write_text("\n".join(["dataset,class_name,split", *rows]))
    assert data.read("folders", reader / "photos").train["class_name"].unique().tolist() == [
        "mugs",
        "pens",
        "toys",
    ]


def test_the_sizes_and_names_on_the_page_are_right():
    text = PAGE.read_text(encoding="utf-8")
    assert "{" + "RECALL" not in text and "{" + "EVALUATE" not in text
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (PAGE.parent / link).exists(), link


def test_bytes_of_a_hundred_million_vectors_are_those_of_faiss():
    """Of IVF a code and a number of eight bytes; of the graph two links of four bytes per M."""
    text = PAGE.with_name("many-images.md").read_text(encoding="utf-8")
    row = re.compile(r"^\| `([\w,]+)` \| ([^|]+) \| ([\d.]+) GB \|", re.MULTILINE)
    found = row.findall(text)
    assert len(found) == 7
    for kind, formula, gigabytes in found:
        built = faiss.index_factory(128, kind.replace("IVF", "IVF4"), faiss.METRIC_INNER_PRODUCT)
        expected = 4 * 128
        if kind.startswith("IVF"):
            expected = built.code_size + 8
        elif kind.startswith("HNSW"):
            expected += 4 * built.hnsw.nb_neighbors(0)
        said = int(re.findall(r"\d+", formula)[-1])
        assert said == expected, kind
        assert float(gigabytes) == pytest.approx(expected / 10, rel=0.03), kind
