"""The embedded benchmark: its table, its pixels, and the frozen backbone it was calibrated with."""

from __future__ import annotations

import hashlib

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch

from pumalib import data, evaluation, paths
from pumalib.data import drawing, mini
from pumalib.models import backbones

TRAIN_SHARES = {  # Table 1: each dataset's share of the train images, by the role it plays here
    "glyphs": 0.42, "garments": 0.18, "birds": 0.16, "digits": 0.075,
    "vehicles": 0.057, "photos": 0.041, "aircraft": 0.035, "flowers": 0.025,
}  # fmt: skip


@pytest.fixture(scope="module")
def benchmark():
    return data.load("mini")


def test_the_table_keeps_the_contract_and_the_sizes_of_table_1(benchmark):
    images, train = benchmark.images, benchmark.train
    assert benchmark.datasets == list(TRAIN_SHARES)
    assert benchmark.pixels.shape == (len(images), 32, 32, 3) and benchmark.pixels.dtype == np.uint8
    assert (images["path"] == np.arange(len(images))).all()
    assert 2900 <= len(train) <= 3100 and 2900 <= len(benchmark.test) <= 3100
    shares = train["dataset"].value_counts() / len(train)
    for name, share in TRAIN_SHARES.items():
        assert shares[name] == pytest.approx(share, abs=0.01), name
    per_class = train.groupby("dataset")["label"].value_counts().groupby("dataset").agg(["size", "mean"])
    assert per_class.loc["glyphs", "size"] >= 200 and per_class.loc["glyphs", "mean"] == 5
    assert per_class.loc["digits", "size"] == 5 and per_class.loc["garments", "mean"] == pytest.approx(6.5, abs=0.1)


def test_the_first_half_of_the_class_names_trains(benchmark):
    for name, rows in benchmark.images.groupby("dataset"):
        classes = sorted(set(rows["class_name"]))
        train = set(rows.loc[rows["split"] == "train", "class_name"])
        assert train == set(classes[: len(classes) // 2]), name


def test_garments_has_queries_and_gallery_of_the_same_classes(benchmark):
    splits = benchmark.images.groupby("dataset")["split"].unique().map(set)
    assert splits.pop("garments") == {"train", "query", "gallery"}
    assert all(found == {"train", "test"} for found in splits)
    rows = benchmark.select(["garments"]).test
    assert (rows.groupby("label")["split"].nunique() == 2).all()


def test_no_image_stands_twice(benchmark):
    assert len(np.unique(benchmark.pixels.reshape(len(benchmark.pixels), -1), axis=0)) == len(benchmark.pixels)


@pytest.mark.parametrize("dataset", ["digits", "photos", "aircraft", "flowers"])
def test_a_dataset_made_alone_has_the_same_pixels_as_among_all(benchmark, dataset):
    rows = benchmark.select([dataset]).images
    counts = rows.groupby("label", sort=False).size().to_numpy()
    images, names = mini._make(dataset, counts, mini._rng(dataset))
    assert names == list(dict.fromkeys(rows["class_name"]))
    np.testing.assert_array_equal(images, benchmark.pixels[rows["path"].to_numpy(int)])


def test_a_damaged_cache_is_built_again(tmp_path, monkeypatch):
    table = pd.DataFrame({"path": [0, 1], "label": [0, 1], "class_name": ["a", "b"], "dataset": "x", "split": "train"})
    pixels, builds = np.arange(6144, dtype=np.uint8).reshape(2, 32, 32, 3), []
    monkeypatch.setattr(paths, "CACHE", tmp_path / "new")
    monkeypatch.setattr(mini, "build", lambda: builds.append(1) or (table, pixels))
    for damage in (None, None, lambda whole: whole[:-100], lambda whole: b"", lambda whole: b"no archive"):
        if damage:
            mini.cache_file().write_bytes(damage(mini.cache_file().read_bytes()))
        loaded = mini.load()
        pd.testing.assert_frame_equal(loaded.images, table)
        np.testing.assert_array_equal(loaded.pixels, pixels)
    assert len(builds) == 4  # the second call alone found a whole file
    assert [file.name for file in mini.cache_file().parent.iterdir()] == [mini.cache_file().name]


def test_an_unwritable_cache_costs_nothing_but_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "file")
    table = pd.DataFrame({"path": [0], "label": [0], "class_name": ["a"], "dataset": "x", "split": "train"})
    monkeypatch.setattr(mini, "build", lambda: (table, np.zeros((1, 32, 32, 3), np.uint8)))
    assert len(mini.load().images) == 1


def test_the_backbone_is_trained_on_other_classes(benchmark):
    _, labels, names = mini.pretraining_images(per_class=1)
    assert len(names) == len(set(names)) == len(labels)
    assert not {"digits", "photos"} & set(mini.PRETRAINING)
    shared = set(mini.PRETRAINING) & set(benchmark.datasets)
    assert shared == {"glyphs", "birds", "flowers", "garments", "vehicles", "aircraft"}
    for family in shared:
        ours = set(benchmark.images.loc[benchmark.images["dataset"] == family, "class_name"])
        theirs = {name.removeprefix(f"{family}: ") for name in names if name.startswith(f"{family}: ")}
        if family != "glyphs":  # less the number: the cell
            ours, theirs = ({name.split(" ", 1)[1] for name in side} for side in (ours, theirs))
            white, black = ({tuple(cell) for cell in mini.cells(family, side)} for side in (False, True))
            assert not white & black
            assert len(white | black) == np.prod([len(words) for words in mini.TRAITS[family].values()])
        assert len(theirs) == mini.PRETRAINING[family] and not ours & theirs, family


def test_no_two_characters_are_one_shape():
    kept = mini.characters()
    assert "A" in kept and "\N{GREEK CAPITAL LETTER ALPHA}" not in kept and "\N{CYRILLIC CAPITAL LETTER A}" not in kept
    digits = "0123456789O\N{LATIN SMALL LETTER TONE FIVE}\N{CYRILLIC CAPITAL LETTER ZE}"  # their shapes, that is
    assert not set(digits) & set(kept)
    assert len(kept) == len(set(kept))


def _nearest_is_right(features, rows):
    """Recall@1 of a plain nearest neighbour by cosine within one dataset, over chance."""
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    label, similarity = rows["label"].to_numpy(), features @ features.T
    np.fill_diagonal(similarity, -2)
    same = label[:, None] == label
    return (label[similarity.argmax(1)] == label).mean() / ((same.sum() - len(label)) / (len(label) * (len(label) - 1)))


def _colours(pixels):
    """Histogram of the colours (4 x 4 x 4) in the middle of each picture."""
    bins = pixels[:, 8:24, 8:24].astype(int) // 64 @ [16, 4, 1]
    return np.sqrt([np.bincount(b.ravel(), minlength=64) for b in bins])


def _outlines(pixels):
    """Strength of the edges on an 11 x 11 grid, without their colour."""
    grey = pixels.astype(float).mean(3)
    edges = np.hypot(np.diff(grey, axis=1)[:, :, :-1], np.diff(grey, axis=2)[:, :-1])
    edges = np.pad(edges, ((0, 0), (1, 1), (1, 1))).reshape(len(grey), 11, 3, 11, 3).mean((2, 4)).reshape(len(grey), -1)
    return edges - edges.mean(1, keepdims=True)


def test_what_tells_classes_apart_conflicts(benchmark):
    """Sec. 3.3: colour tells birds apart and vehicles not at all; outlines the other way round (in units of chance)."""
    colour, outline = {}, {}
    for name in ("birds", "vehicles", "aircraft"):
        rows = benchmark.select([name]).test
        pixels = benchmark.pixels[rows["path"].to_numpy(int)]
        colour[name] = _nearest_is_right(_colours(pixels), rows)
        outline[name] = _nearest_is_right(_outlines(pixels), rows)
    assert colour["birds"] > 8 and outline["birds"] < 2
    for name in ("vehicles", "aircraft"):
        assert colour[name] < 2 and outline[name] > 4, name


@pytest.mark.parametrize(("name", "mebibytes"), [("mini_vit", 4), ("mini_vit_64", 1)])
def test_the_weights_fit_the_backbone_and_the_repository(name, mebibytes):
    file = backbones.embedded_weights(name)
    state = safetensors.torch.load_file(file)
    assert file.stat().st_size <= mebibytes * 2**20
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    backbone = backbones.create(name, "embedded")
    assert backbone.embed_dim == backbones.EMBEDDED[name] and backbone.blocks[0].attn.head_dim == 32
    assert all(torch.equal(tensor, state[key].float()) for key, tensor in backbone.state_dict().items())
    assert backbones.weights_digest(name, "embedded") == hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_frozen_backbone_finds_every_dataset_neither_trivial_nor_hopeless(benchmark):
    """The rule of calibration: raw Recall@1 in 0.25 .. 0.90 everywhere."""
    model = backbones.create("mini_vit", "embedded").eval()
    pixels = benchmark.pixels[benchmark.test["path"].to_numpy(int)]
    with torch.no_grad():
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        embeddings = torch.cat([model(block.float() / 127.5 - 1) for block in images.split(256)])
    recall = evaluation.evaluate(embeddings, benchmark.test, ks=(1,), bootstrap=0).loc[benchmark.datasets, "R@1"]
    assert recall.between(0.25, 0.90).all(), recall.round(3).to_dict()
    assert recall.max() - recall.min() > 0.2  # a spread, as in the paper's Table 2


def test_shapes_have_the_distances_of_geometry():
    at = lambda x, y: (np.float32([x]), np.float32([y]))  # noqa: E731
    assert drawing.ellipse(*at(2, 0), 1, 1)[0] == pytest.approx(1)
    assert drawing.box(*at(4, 5), 1, 1)[0] == pytest.approx(5)  # 3-4-5
    assert drawing.box(*at(0.5, 0), 1, 1)[0] == pytest.approx(-0.5)
    assert drawing.capsule(*at(0, 3), (-1, 0), (1, 0), 0.5, 0.5)[0] == pytest.approx(2.5)
    square = [(-1, -1), (1, -1), (1, 1), (-1, 1)]
    for point in [(4, 5), (0.5, 0), (0, -3), (0.9, 0.9)]:
        expected = drawing.box(*at(*point), 1, 1)[0]
        assert drawing.polygon(*at(*point), *square)[0] == pytest.approx(expected, abs=1e-6)


def test_a_disc_covers_its_area():
    canvas = drawing.Canvas(np.random.default_rng(0), 3, turn=0, zoom=(1, 1), shift=0)
    canvas.paint(np.hypot(canvas.x, canvas.y) - 0.5, np.float32([1, 0, 0]))
    red, green, _ = canvas.image.mean((0, 1, 2))
    assert red == pytest.approx(np.pi / 16, rel=0.005) and green == 0  # pi r^2 of a square of side 2
