"""The eight datasets of the paper: miniatures in each original format, and the real annotation files."""

import csv
import os
import shutil
import warnings
from pathlib import Path

import fake_datasets
import numpy as np
import pytest
from scipy.io import loadmat, savemat

from pumalib import data
from pumalib.data import decoding, paper

METADATA = Path(__file__).resolve().parents[2] / "shared" / "metadata"
real = pytest.mark.skipif(not METADATA.is_dir(), reason="needs the real annotation files in ../shared/metadata")


INSHOP = "In-shop Clothes Retrieval Benchmark/Eval/list_eval_partition.txt"


def load(root, *names):
    """Miniatures differ from Table 1: load them all the same, without that warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Table 1 expects.*")
        return data.load("paper", root, list(names), strict=False)


def counts(images):
    grouped = images.groupby("split").agg(n=("path", "size"), c=("class_name", "nunique"))
    return {split: (row.n, row.c) for split, row in grouped.iterrows()}


@pytest.mark.parametrize("name", paper.DATASETS)
def test_miniature_of_each_format(tmp_path, name):
    root = fake_datasets.small(tmp_path, name)
    benchmark = load(root, name)
    images = benchmark.images
    assert counts(images) == fake_datasets.SMALL[name]
    assert list(images.columns) == data.COLUMNS and set(images.dataset) == {name}
    assert sorted(set(images.label)) == list(range(images.label.nunique()))
    assert images.groupby("label").class_name.nunique().max() == 1
    assert all((root / path).is_file() for path in images.path)
    assert decoding.unreadable(benchmark) == {}  # greyscale, CMYK and alpha images included


def test_all_eight_together_and_only_what_is_asked_for(tmp_path):
    root = fake_datasets.small(tmp_path)
    images = load(root, *paper.DATASETS).images
    assert list(dict.fromkeys(images.dataset)) == list(paper.DATASETS)
    assert images.label.nunique() == images.groupby(["dataset", "class_name"]).ngroups
    shutil.rmtree(root / "dogs")
    assert load(root, "sop", "cub").datasets == ["sop", "cub"]
    with pytest.raises(ValueError, match=r"(?s)'dogs' not found under .*dogs/ with file_list\.mat.*data download"):
        load(root, "cub", "dogs")
    with pytest.raises(ValueError, match="unknown dataset 'dog'; known: cub, cars, sop"):
        load(root, "dog")


def test_class_names_and_splits(tmp_path):
    root = fake_datasets.small(tmp_path)
    images = load(root, *paper.DATASETS).images
    classes = images.drop_duplicates("label")
    names = {name: rows.set_index("class_name").split for name, rows in classes.groupby("dataset")}
    assert names["cub"]["001.Fancy_Bird_1"] == "train" and names["cub"]["005.Fancy_Bird_5"] == "test"
    assert names["cars"]["Maker Model 0 Sedan 2012"] == "train"  # labels are 1-based
    assert names["nabirds"]["Common Bird 1000 (Adult male)"] == "train"  # ids sort as numbers: 998, 999, 1000 first
    assert names["nabirds"]["Common Bird 1001 (Adult male)"] == "test"
    assert names["aircraft"]["DHC-2 Model B"] == "train" and names["aircraft"]["DHC-3 Model B"] == "test"
    assert names["dogs"]["n02085620-Dog_0"] == "train"
    first_five = {"pink primrose", "hard-leaved pocket orchid", "canterbury bells", "sweet pea", "english marigold"}
    assert set(names["flowers"].index) == first_five and names["flowers"]["canterbury bells"] == "train"
    shop = images[images.dataset == "inshop"]
    assert set(shop[shop.split == "query"].class_name) == set(shop[shop.split == "gallery"].class_name)


def test_the_other_form_of_cars(tmp_path):
    fake_datasets.cars_split(tmp_path, fake_datasets.SMALL["cars"], fake_datasets.picture)
    images = load(tmp_path, "cars").images
    assert counts(images) == fake_datasets.SMALL["cars"]
    assert images.path.str.contains("cars_train/").sum() == 6 and images.path.str.contains("cars_test/").sum() == 6
    home = tmp_path / "stanford_cars"
    (home / "cars_test_annos_withlabels.mat").rename(home / "devkit" / "cars_test_annos_withlabels.mat")
    assert len(load(tmp_path, "cars").images) == 12
    annotations = np.array([("00001.jpg",)], [("fname", object)])  # as in the devkit's cars_test_annos.mat
    savemat(home / "devkit" / "cars_test_annos_withlabels.mat", {"annotations": annotations})
    with pytest.raises(ValueError, match="dataset 'cars': .*withlabels.mat: annotations have no 'class'.*with labels"):
        load(tmp_path, "cars")


def test_root_may_be_the_dataset_itself_or_a_folder_around_it(tmp_path):
    fake_datasets.small(tmp_path / "around", "cub", "nabirds")
    for root in (tmp_path, tmp_path / "around", tmp_path / "around" / "CUB_200_2011"):
        assert all((root / path).is_file() for path in load(root, "cub").images.path)
    (tmp_path / "around" / "nabirds").rename(tmp_path / "around" / "a")
    (tmp_path / "around" / "CUB_200_2011").rename(tmp_path / "around" / "b")
    assert paper.find(tmp_path, "cub").name == "b" and paper.find(tmp_path, "nabirds").name == "a"


# ---- bad input


@pytest.mark.filterwarnings("ignore:.*Table 1 expects")
def test_counts_are_checked(tmp_path):
    root = fake_datasets.small(tmp_path, "cub")
    with pytest.raises(ValueError, match=r"dataset 'cub': 7 train images of 3 classes .*expects 5,864 of 100.*cause"):
        data.load("paper", root, ["cub"])
    with pytest.warns(UserWarning, match="dataset 'cub': 7 train images"):
        data.load("paper", root, ["cub"], strict=False)


@pytest.mark.filterwarnings("ignore:.*Table 1 expects")
def test_missing_images_are_counted_and_named(tmp_path):
    root = fake_datasets.small(tmp_path, "cub")
    lost = sorted((root / "CUB_200_2011" / "images" / "002.Fancy_Bird_2").glob("*.jpg"))
    for file in lost:
        file.unlink()
    with pytest.raises(ValueError, match=rf"dataset 'cub': {len(lost)} of 12 images.*002.Fancy_Bird_2.*unpacking"):
        data.load("paper", root, ["cub"])
    with pytest.warns(UserWarning, match="are missing"):
        images = data.load("paper", root, ["cub"], strict=False).images
    assert len(images) == 12 - len(lost)
    assert set(images[images.split == "train"].class_name) == {"001.Fancy_Bird_1", "003.Fancy_Bird_3"}  # as before


@pytest.mark.parametrize(
    "name, file, change, message",
    [
        ("cub", "CUB_200_2011/image_class_labels.txt", None, "image_class_labels.txt is missing"),
        ("cub", "CUB_200_2011/image_class_labels.txt", ("1 1\n", "1 6\n"), "'6' of image '1' is not in classes"),
        ("cub", "CUB_200_2011/images.txt", ("2 ", "1 "), r"images.txt, line 2: '1' is given twice"),
        ("cub", "CUB_200_2011/image_class_labels.txt", ("12 4\n", ""), "differ in 1 images, for instance '12'"),
        ("cub", "CUB_200_2011/classes.txt", ("1 001.Fancy_Bird_1", "1"), "classes.txt, line 1: '1'; expected two"),
        ("sop", "Stanford_Online_Products/Ebay_test.txt", None, "Ebay_test.txt is missing"),
        ("sop", "Stanford_Online_Products/Ebay_train.txt", ("image_id", "id"), "Ebay_train.txt, line 1: .*expected"),
        ("sop", "Stanford_Online_Products/Ebay_train.txt", ("1 1 1", "1 99999 1"), "line 2: class 99999 is not in"),
        ("sop", "Stanford_Online_Products/Ebay_train.txt", (" 1 bicycle", " bicycle"), "line 2: .*expected 4 values"),
        ("inshop", INSHOP, ("13", "14"), "line 1 says 14"),
        ("inshop", INSHOP, ("query", "val"), "line .*train, q"),
        ("nabirds", "nabirds/classes.txt", None, "classes.txt is missing"),
        ("aircraft", "fgvc-aircraft-2013b/data/images_variant_test.txt", None, "images_variant_test.txt is missing"),
    ],
)
def test_damaged_annotations(tmp_path, name, file, change, message):
    file = fake_datasets.small(tmp_path, name) / file
    if change is None:
        file.unlink()
    else:
        text = file.read_text()
        assert change[0] in text
        file.write_text(text.replace(*change, 1))
    with pytest.raises(ValueError, match=f"dataset '{name}': .*{message}"):
        load(tmp_path, name)


def test_damaged_matlab_files(tmp_path):
    root = fake_datasets.small(tmp_path, "cars", "dogs", "flowers")
    stored = loadmat(root / "dogs" / "file_list.mat")
    savemat(root / "dogs" / "file_list.mat", {"file_list": stored["file_list"], "labels": stored["labels"] + 118})
    with pytest.raises(ValueError, match="dataset 'dogs': .*file_list.mat, row 3: class 121.0 is not in 1 to 120"):
        load(root, "dogs")
    savemat(root / "dogs" / "file_list.mat", {"labels": stored["labels"]})
    with pytest.raises(ValueError, match="no readable variable 'file_list'"):
        load(root, "dogs")
    savemat(root / "flowers" / "imagelabels.mat", {"labels": np.array([[1] * 11 + [103]], np.uint8)})
    with pytest.raises(ValueError, match="imagelabels.mat, image 12: class 103 is not in 1 to 102"):
        load(root, "flowers")
    (root / "flowers" / "setid.mat").unlink()
    with pytest.raises(ValueError, match="setid.mat is missing"):
        load(root, "flowers")
    whole = (root / "cars" / "cars_annos.mat").read_bytes()
    (root / "cars" / "cars_annos.mat").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="dataset 'cars': .*cars_annos.mat: no readable variable"):
        load(root, "cars")


def test_duplicate_rows(tmp_path):
    root = fake_datasets.small(tmp_path, "aircraft", "flowers")
    home = root / "fgvc-aircraft-2013b" / "data"
    (home / "images_variant_test.txt").write_text((home / "images_variant_trainval.txt").read_text())
    with pytest.raises(ValueError, match="dataset 'aircraft': image 'data/images/0000000.jpg' stands"):
        load(root, "aircraft")
    stored = loadmat(root / "flowers" / "setid.mat")
    savemat(root / "flowers" / "setid.mat", {k: stored["trnid"] for k in ("trnid", "valid", "tstid")})
    with pytest.raises(ValueError, match="dataset 'flowers': image 'jpg/image_00003.jpg' stands"):
        load(root, "flowers")


# ---- the real annotation files


def matches(table, name):
    found = {split: (len(rows), rows.id.nunique()) for split, rows in table.groupby("split")}
    assert found == paper.DATASETS[name].counts


@real
def test_real_nabirds_and_flowers():
    matches(paper.DATASETS["nabirds"].read(METADATA / "nabirds"), "nabirds")
    matches(paper.DATASETS["flowers"].read(METADATA / "flowers"), "flowers")


@real
def test_real_cub(tmp_path):
    for name in ("classes.txt", "image_class_labels.txt"):
        shutil.copy(METADATA / "cub" / name, tmp_path)
    known = (METADATA / "cub" / "subset_classes_1_50" / "images.txt").read_text().splitlines()
    labels = [line.split() for line in (METADATA / "cub" / "image_class_labels.txt").read_text().splitlines()]
    unknown = [f"{i} {label}/made_up_{i}.jpg" for i, label in labels[len(known) :]]  # its list ends at class 50
    (tmp_path / "images.txt").write_text("\n".join(known + unknown))
    table = paper.DATASETS["cub"].read(tmp_path)
    matches(table, "cub")
    folders = table.path[: len(known)].str.split("/").str[1]
    assert (folders == table.class_name[: len(known)]).all()


@real
def test_real_cars(tmp_path):
    (tmp_path / "devkit").mkdir()
    for name in ("cars_train_annos.mat", "cars_meta.mat"):
        shutil.copy(METADATA / "cars" / name, tmp_path / "devkit")
    with open(METADATA / "cars" / "anno_test.csv") as stream:  # of the test half only this form is there
        rows = list(csv.reader(stream))
    annotations = np.empty((1, len(rows)), [("class", object), ("fname", object)])
    annotations["class"][0] = [int(row[5]) for row in rows]
    annotations["fname"][0] = [row[0] for row in rows]
    savemat(tmp_path / "cars_test_annos_withlabels.mat", {"annotations": annotations})
    table = paper.DATASETS["cars"].read(tmp_path)
    matches(table, "cars")
    with open(METADATA / "cars" / "anno_train.csv") as stream:
        assert table.id[:8144].tolist() == [int(row[5]) for row in csv.reader(stream)]
    shutil.copy(METADATA / "cars" / "cars_test_annos.mat", tmp_path / "cars_test_annos_withlabels.mat")
    with pytest.raises(ValueError, match="have no 'class'"):
        paper.DATASETS["cars"].read(tmp_path)


@real
def test_real_aircraft(tmp_path):
    (tmp_path / "data").mkdir()
    for part, name in (("trainval", "train"), ("test", "test")):
        lines = (METADATA / "aircraft" / f"mmal_{name}.txt").read_text().splitlines()
        keys = [line.split() for line in lines]  # this source has numbers for the variants
        text = "".join(f"{file.removesuffix('.jpg')} Variant {int(c):03d}\n" for file, c in keys)
        (tmp_path / "data" / f"images_variant_{part}.txt").write_text(text)
    matches(paper.DATASETS["aircraft"].read(tmp_path), "aircraft")


@pytest.mark.skipif("PUMALIB_FULL_SCALE" not in os.environ, reason="writes 289,000 files; set PUMALIB_FULL_SCALE=1")
def test_full_scale(tmp_path):
    tiny = fake_datasets.picture(1)
    for name, write in fake_datasets.WRITERS.items():
        write(tmp_path, paper.DATASETS[name].counts, lambda _: tiny)
    assert len(data.load("paper", tmp_path).images) == 141_404 + 146_665
