"""The embedded benchmark: its table, its sheets, and the frozen backbone that comes with it."""

import hashlib
import sys

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from PIL import Image

from pumalib import config, data, embedder, evaluation, models, paths
from pumalib.data import mini

# Each dataset's share of the train images in Table 1, by the role it plays here; and its classes
# in train and test
SHARES = {"glyphs": 0.42, "garments": 0.18, "birds": 0.16, "digits": 0.075}
SHARES |= {"vehicles": 0.057, "photos": 0.041, "aircraft": 0.035, "flowers": 0.025}
CLASSES = ((400, 200), (170, 90), (60, 50), (50, 50), (44, 50), (42, 45), (40, 48), (24, 48))


@pytest.fixture(scope="module")
def benchmark():
    return data.read("mini")


def test_the_table_has_the_shares_of_table_1(benchmark):
    images, train = benchmark.images, benchmark.train
    assert len(benchmark.pixels) == len(images) and benchmark.pixels.dtype == np.uint8
    assert (images["path"] == np.arange(len(images))).all() and benchmark.datasets == list(SHARES)
    assert (
        images["label"].is_monotonic_increasing
        and images["label"].nunique() == images["label"].max() + 1
    )
    for name, share in SHARES.items():
        assert (train["dataset"] == name).mean() == pytest.approx(share, abs=0.01), name
    for rows, counts in ((train, 0), (benchmark.test, 1)):
        found = rows.groupby("dataset", sort=False)["class_name"].nunique()
        assert found.to_dict() == dict(zip(SHARES, (both[counts] for both in CLASSES)))
    splits = images.groupby("dataset")["split"].unique().map(set)
    assert splits.pop("garments") == {"train", "query", "gallery"} and all(
        s == {"train", "test"} for s in splits
    )
    assert (benchmark.select(["garments"]).test.groupby("label")["split"].nunique() == 2).all()


def test_the_pixels_are_those_of_the_kept_runs(benchmark):
    contents = (
        benchmark.images.to_csv(index=False, lineterminator="\n").encode()
        + benchmark.pixels.tobytes()
    )
    expected = "e8a91dfbafa7d180a38170a5cea99da7a70473ea728574be068c9b3346b7bb1a"
    assert hashlib.sha256(contents).hexdigest() == expected
    images = mini.load().images
    images.loc[0, "class_name"] = "mine"  # a changed table does not change the next
    pd.testing.assert_frame_equal(mini.load().images, benchmark.images)


def test_without_the_checkout_it_says_so(tmp_path, monkeypatch):
    mini._read.cache_clear()
    monkeypatch.setattr(paths, "MINI", tmp_path / "data" / "mini")
    with pytest.raises(ValueError, match=r"'mini' needs the checkout.*PUMALIB_ROOT"):
        data.read("mini")


def test_the_sheets_hold_the_images_of_the_table_and_nothing_else(benchmark):
    rows, side = pd.read_csv(paths.MINI / "images.csv"), benchmark.pixels.shape[1]
    cell = side + mini.GAP
    assert not rows.duplicated(["dataset", "column", "row"]).any()
    assert sum(file.stat().st_size for file in paths.MINI.glob("*.png")) < 15 * 2**20
    assert {file.stem for file in paths.MINI.glob("*.png")} == set(SHARES)
    for dataset, places in rows.groupby("dataset"):
        sheet = np.array(Image.open(paths.MINI / f"{dataset}.png").convert("RGB"))
        assert sheet.shape == (
            cell * (places["row"].max() + 1),
            cell * (places["column"].max() + 1),
            3,
        )
        for i, x, y in zip(places.index, cell * places["column"], cell * places["row"]):
            np.testing.assert_array_equal(sheet[y : y + side, x : x + side], benchmark.pixels[i])
            sheet[y : y + side, x : x + side] = 255
        assert (sheet == 255).all()
    assert len(np.unique(benchmark.pixels.reshape(len(rows), -1), axis=0)) == len(
        rows
    )  # no image stands twice


def test_the_backbone_is_trained_on_other_families(benchmark, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(paths.MINI / "make")])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import world

    assert not {*world.FAMILIES, "leaves"} & set(benchmark.datasets)
    pixels, labels, names = world.pretraining_images(2, 2)
    assert (
        pixels.shape == (60, 48, 48, 3)
        and len(names) == 30
        and (labels == np.repeat(np.arange(30), 2)).all()
    )


@pytest.mark.parametrize(("name", "mebibytes"), [("mini_vit", 4), ("mini_vit_64", 1)])
def test_the_frozen_backbone_is_small_and_finds_every_dataset_neither_trivially_nor_hopelessly(
    name, mebibytes
):
    """The rule of calibration, on held-out training classes.

    Raw Recall@1 is in 0.05 .. 0.85 everywhere, and has a spread.
    """
    file, settings = paths.MINI / f"{name}.safetensors", config.Data(image_size=48, holdout=True)
    benchmark, model = (
        data.load(settings),
        models.build("pretrained", name, pretrained="embedded", image_size=48),
    )
    stored = safetensors.torch.load_file(file)
    assert file.stat().st_size <= mebibytes * 2**20 and {
        tensor.dtype for tensor in stored.values()
    } == {torch.float16}
    assert all(
        torch.equal(tensor, stored[key].float())
        for key, tensor in model.backbone.state_dict().items()
    )
    embeddings = embedder.embed_rows(model, benchmark, benchmark.test, settings)
    table = evaluation.scores(embeddings, benchmark.test, (1,)).table()
    found = table.loc[list(SHARES), "R@1"]
    assert found.between(0.05, 0.85).all() and found.max() - found.min() > 0.2, found
