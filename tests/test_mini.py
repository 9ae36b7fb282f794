"""The embedded benchmark: its table, its sheets, and the frozen backbone it was calibrated with."""

import hashlib
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from PIL import Image

from pumalib import data, paths
from pumalib.data import mini
from pumalib.models import backbones

COUNTS = {  # train classes, train images, test classes, test images
    "glyphs": (250, 1250, 250, 1250),
    "garments": (83, 539, 83, 539),
    "birds": (30, 480, 30, 480),
    "digits": (5, 225, 5, 225),
    "vehicles": (14, 168, 14, 168),
    "photos": (12, 120, 12, 120),
    "aircraft": (10, 105, 10, 105),
    "flowers": (8, 76, 8, 96),
}
# Each dataset's share of the train images in Table 1, by the role it plays here
SHARES = dict(zip(COUNTS, (0.42, 0.18, 0.16, 0.075, 0.057, 0.041, 0.035, 0.025)))


@pytest.fixture(scope="module")
def benchmark():
    return data.read("mini")


def test_the_table_has_the_counts_and_the_shares_of_table_1(benchmark):
    images, train = benchmark.images, benchmark.train
    assert benchmark.pixels.shape == (len(images), 32, 32, 3) and benchmark.pixels.dtype == np.uint8
    assert (images["path"] == np.arange(len(images))).all()
    assert images["label"].is_monotonic_increasing and images["label"].nunique() == images["label"].max() + 1
    found = {
        name: tuple(n for side in (rows["split"] == "train", rows["split"] != "train") for n in count(rows[side]))
        for name, rows in images.groupby("dataset", sort=False)
    }
    assert list(found.items()) == list(COUNTS.items())
    for name, share in SHARES.items():
        assert (train["dataset"] == name).mean() == pytest.approx(share, abs=0.01), name


def count(rows):
    return rows["class_name"].nunique(), len(rows)


def test_the_pixels_are_those_of_the_kept_runs(benchmark):
    table = benchmark.images.to_csv(index=False, lineterminator="\n").encode()
    assert (
        hashlib.sha256(table + benchmark.pixels.tobytes()).hexdigest()
        == "81ba18c75c88857407c2c79ce09abc95cd2461773485eb93b80c8cd330546c81"
    )


def test_the_first_half_of_the_class_names_trains(benchmark):
    for name, rows in benchmark.images.groupby("dataset"):
        classes = sorted(set(rows["class_name"]))
        assert set(rows.loc[rows["split"] == "train", "class_name"]) == set(classes[: len(classes) // 2]), name
    splits = benchmark.images.groupby("dataset")["split"].unique().map(set)
    assert splits.pop("garments") == {"train", "query", "gallery"}
    assert all(found == {"train", "test"} for found in splits)
    assert (benchmark.select(["garments"]).test.groupby("label")["split"].nunique() == 2).all()


def test_the_sheets_hold_the_images_of_the_table_and_nothing_else(benchmark):
    rows = pd.read_csv(paths.MINI / "images.csv")
    assert not rows.duplicated(["dataset", "column", "row"]).any()
    assert sum(file.stat().st_size for file in paths.MINI.glob("*.png")) < 14 * 2**20
    assert {file.stem for file in paths.MINI.glob("*.png")} == set(COUNTS)
    for dataset, places in rows.groupby("dataset"):
        sheet = np.array(Image.open(paths.MINI / f"{dataset}.png"))
        assert sheet.shape == (34 * (places["row"].max() + 1), 34 * (places["column"].max() + 1), 3)
        for i, x, y in zip(places.index, 34 * places["column"], 34 * places["row"]):
            np.testing.assert_array_equal(sheet[y : y + 32, x : x + 32], benchmark.pixels[i])
            sheet[y : y + 32, x : x + 32] = 255
        assert (sheet == 255).all()
    assert len(np.unique(benchmark.pixels.reshape(len(rows), -1), axis=0)) == len(rows)  # no image stands twice


@pytest.mark.parametrize("name", ["birds.png", "images.csv"])
def test_a_missing_or_damaged_file_is_named(name, tmp_path, monkeypatch):
    for file in [*paths.MINI.glob("*.png"), paths.MINI / "images.csv"]:
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(paths, "MINI", tmp_path)
    whole = (tmp_path / name).read_bytes()
    for damage in (whole[:100], b"", None):
        (tmp_path / name).unlink() if damage is None else (tmp_path / name).write_bytes(damage)
        mini._read.cache_clear()
        with pytest.raises(ValueError, match=rf"{name} is missing or damaged .*git checkout data/mini"):
            mini.load()
    mini._read.cache_clear()


def test_a_changed_table_does_not_change_the_next(benchmark):
    images = mini.load().images
    images.loc[0, "class_name"] = "mine"
    pd.testing.assert_frame_equal(mini.load().images, benchmark.images)


def test_the_backbone_is_trained_on_other_classes(benchmark, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(paths.MINI / "make")])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import make

    shared = set(make.PRETRAINING) & set(COUNTS)
    assert shared == {"glyphs", "birds", "flowers", "garments", "vehicles", "aircraft"}
    for family in shared:
        counts = np.ones(make.PRETRAINING[family], int)
        ours = set(benchmark.images.loc[benchmark.images["dataset"] == family, "class_name"])
        theirs = set(make._make(family, counts, np.random.default_rng(0), pretraining=True)[1])
        if family != "glyphs":  # less the number: the cell of the chessboard
            ours, theirs = ({name.split(" ", 1)[1] for name in side} for side in (ours, theirs))
        assert len(theirs) == make.PRETRAINING[family] and not ours & theirs, family


def recall(features, rows):
    """Recall@1 by cosine within one dataset (from queries to the gallery where they are apart)."""
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    label, split, similarity = rows["label"].to_numpy(), rows["split"].to_numpy(), features @ features.T
    np.fill_diagonal(similarity, -2)
    similarity[:, split == "query"] = -2
    return (label[similarity.argmax(1)] == label)[split != "gallery"].mean()


def over_chance(features, rows):
    return recall(features, rows) * rows["label"].nunique()  # classes of equal size, about


def colours(pixels):
    """Histogram of the colours (4 x 4 x 4) in the middle of each picture."""
    bins = pixels[:, 8:24, 8:24].astype(int) // 64 @ [16, 4, 1]
    return np.sqrt([np.bincount(b.ravel(), minlength=64) for b in bins])


def outlines(pixels):
    """Strength of the edges on an 11 x 11 grid, without their colour."""
    grey = pixels.astype(float).mean(3)
    edges = np.hypot(np.diff(grey, axis=1)[:, :, :-1], np.diff(grey, axis=2)[:, :-1])
    edges = np.pad(edges, ((0, 0), (1, 1), (1, 1))).reshape(len(grey), 11, 3, 11, 3).mean((2, 4)).reshape(len(grey), -1)
    return edges - edges.mean(1, keepdims=True)


def test_what_tells_classes_apart_conflicts(benchmark):
    """Sec. 3.3: colour tells birds apart and vehicles not at all; outlines the other way round."""
    for name in ("birds", "vehicles", "aircraft"):
        rows = benchmark.select([name]).test
        pixels = benchmark.pixels[rows["path"].to_numpy(int)]
        colour, outline = over_chance(colours(pixels), rows), over_chance(outlines(pixels), rows)
        assert colour > 8 and outline < 2.5 if name == "birds" else colour < 2.5 and outline > 4, (
            name,
            colour,
            outline,
        )


@pytest.mark.parametrize(("name", "mebibytes"), [("mini_vit", 4), ("mini_vit_64", 1)])
def test_the_weights_fit_the_backbone_and_the_repository(name, mebibytes):
    file = paths.MINI / f"{name}.safetensors"
    state = safetensors.torch.load_file(file)
    assert file.stat().st_size <= mebibytes * 2**20
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    backbone = backbones.create(name, "embedded")
    assert all(torch.equal(tensor, state[key].float()) for key, tensor in backbone.state_dict().items())


def test_the_frozen_backbone_finds_every_dataset_neither_trivial_nor_hopeless(benchmark):
    """The rule of calibration: raw Recall@1 in 0.25 .. 0.90 everywhere."""
    model, found = backbones.create("mini_vit", "embedded").eval(), {}
    for name in benchmark.datasets:
        rows = benchmark.select([name]).test
        images = torch.from_numpy(benchmark.pixels[rows["path"].to_numpy(int)]).permute(0, 3, 1, 2)
        with torch.inference_mode():
            embeddings = torch.cat([model(block.float() / 127.5 - 1) for block in images.split(256)])
        found[name] = recall(embeddings.numpy(), rows)
    assert all(0.25 <= r <= 0.90 for r in found.values()), found
    assert max(found.values()) - min(found.values()) > 0.2  # a spread, as in the paper's Table 2
