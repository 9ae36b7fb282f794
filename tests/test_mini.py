"""The embedded benchmark: its table, its sheets, and the frozen backbone that comes with it."""

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

# Each dataset's share of the train images in Table 1, by the role it plays here
SHARES = {"glyphs": 0.42, "garments": 0.18, "birds": 0.16, "digits": 0.075}
SHARES |= {"vehicles": 0.057, "photos": 0.041, "aircraft": 0.035, "flowers": 0.025}


@pytest.fixture(scope="module")
def benchmark():
    return data.read("mini")


def test_the_table_has_the_shares_of_table_1(benchmark):
    images, train = benchmark.images, benchmark.train
    assert len(benchmark.pixels) == len(images) and benchmark.pixels.dtype == np.uint8
    assert (images["path"] == np.arange(len(images))).all() and benchmark.datasets == list(SHARES)
    assert images["label"].is_monotonic_increasing and images["label"].nunique() == images["label"].max() + 1
    for name, share in SHARES.items():
        assert (train["dataset"] == name).mean() == pytest.approx(share, abs=0.01), name
    splits = images.groupby("dataset")["split"].unique().map(set)
    assert splits.pop("garments") == {"train", "query", "gallery"} and all(s == {"train", "test"} for s in splits)
    assert (benchmark.select(["garments"]).test.groupby("label")["split"].nunique() == 2).all()


def test_the_pixels_are_those_of_the_kept_runs(benchmark):
    contents = benchmark.images.to_csv(index=False, lineterminator="\n").encode() + benchmark.pixels.tobytes()
    expected = "81ba18c75c88857407c2c79ce09abc95cd2461773485eb93b80c8cd330546c81"
    assert hashlib.sha256(contents).hexdigest() == expected
    images = mini.load().images
    images.loc[0, "class_name"] = "mine"  # a changed table does not change the next
    pd.testing.assert_frame_equal(mini.load().images, benchmark.images)


def test_the_sheets_hold_the_images_of_the_table_and_nothing_else(benchmark):
    rows, side = pd.read_csv(paths.MINI / "images.csv"), benchmark.pixels.shape[1]
    cell = side + mini.GAP
    assert not rows.duplicated(["dataset", "column", "row"]).any()
    assert sum(file.stat().st_size for file in paths.MINI.glob("*.png")) < 15 * 2**20
    assert {file.stem for file in paths.MINI.glob("*.png")} == set(SHARES)
    for dataset, places in rows.groupby("dataset"):
        sheet = np.array(Image.open(paths.MINI / f"{dataset}.png").convert("RGB"))
        assert sheet.shape == (cell * (places["row"].max() + 1), cell * (places["column"].max() + 1), 3)
        for i, x, y in zip(places.index, cell * places["column"], cell * places["row"]):
            np.testing.assert_array_equal(sheet[y : y + side, x : x + side], benchmark.pixels[i])
            sheet[y : y + side, x : x + side] = 255
        assert (sheet == 255).all()
    assert len(np.unique(benchmark.pixels.reshape(len(rows), -1), axis=0)) == len(rows)  # no image stands twice


@pytest.mark.parametrize("name", ["birds.png", "images.csv"])
def test_a_missing_or_damaged_file_is_named(name, tmp_path, monkeypatch):
    shutil.copytree(paths.MINI, tmp_path, ignore=shutil.ignore_patterns("make"), dirs_exist_ok=True)
    monkeypatch.setattr(paths, "MINI", tmp_path)
    whole = (tmp_path / name).read_bytes()
    for damage in (whole[:100], b"", None):
        (tmp_path / name).unlink() if damage is None else (tmp_path / name).write_bytes(damage)
        mini._read.cache_clear()
        with pytest.raises(ValueError, match=rf"{name} is missing or damaged .*git checkout data/mini"):
            mini.load()
    mini._read.cache_clear()


def test_the_backbone_is_trained_on_other_classes(benchmark, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(paths.MINI / "make")])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import make

    for family in set(make.PRETRAINING) & set(SHARES):
        counts = np.ones(make.PRETRAINING[family], int)
        ours = set(benchmark.images.loc[benchmark.images["dataset"] == family, "class_name"])
        theirs = set(make._make(family, counts, np.random.default_rng(0), pretraining=True)[1])
        if family != "glyphs":  # less the number: the cell of the chessboard
            ours, theirs = ({name.split(" ", 1)[1] for name in side} for side in (ours, theirs))
        assert len(theirs) == make.PRETRAINING[family] and not ours & theirs, family


@pytest.mark.parametrize(("name", "mebibytes"), [("mini_vit", 4), ("mini_vit_64", 1)])
def test_the_weights_fit_the_backbone_and_the_repository(name, mebibytes):
    file = paths.MINI / f"{name}.safetensors"
    state = safetensors.torch.load_file(file)
    assert file.stat().st_size <= mebibytes * 2**20
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    backbone = backbones.create(name, "embedded")
    assert all(torch.equal(tensor, state[key].float()) for key, tensor in backbone.state_dict().items())
