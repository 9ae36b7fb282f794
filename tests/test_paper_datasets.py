"""The paper's datasets: miniatures in each original format, and the real annotation files."""

import csv
import shutil
import warnings
from dataclasses import replace

import fake_datasets
import numpy as np
import pytest
from scipy.io import loadmat, savemat

import puma_study as study
from pumalib import config, data, paths
from pumalib.data import paper
from pumalib.data.images import unreadable

METADATA = paths.ROOT.parent / "shared" / "metadata"
real = pytest.mark.skipif(
    not METADATA.is_dir(), reason="needs the real annotation files in ../shared/metadata"
)
INSHOP = "In-shop Clothes Retrieval Benchmark/Eval/list_eval_partition.txt"
SOP, CUB = "Stanford_Online_Products", "CUB_200_2011"


def load(root, *names):
    """Miniatures differ from Table 1: load them all the same, without that warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Table 1 expects.*")
        return data.read("paper", root, list(names), strict=False)


def counts(table):
    return {
        split: (len(rows), rows["class_name"].nunique()) for split, rows in table.groupby("split")
    }


def test_miniatures_of_each_format(tmp_path):
    root = fake_datasets.small(tmp_path, *paper.all_datasets())
    benchmark = load(root, *paper.all_datasets())
    images = benchmark.images
    assert benchmark.datasets == list(paper.all_datasets()) and list(images.columns) == data.COLUMNS
    for name, rows in images.groupby("dataset"):
        assert counts(rows) == (fake_datasets.INSHOP if name == "inshop" else fake_datasets.COUNTS)
    assert sorted(set(images.label)) == list(
        range(images.groupby(["dataset", "class_name"]).ngroups)
    )
    assert all((root / path).is_file() for path in images.path)
    assert unreadable(benchmark) == {}  # greyscale, CMYK and alpha images included
    names = {
        name: dict(zip(rows["class_name"], rows["split"]))
        for name, rows in images.groupby("dataset")
    }
    assert (
        names["cub"]["001.Fancy_Bird_1"] == "train" and names["cub"]["005.Fancy_Bird_5"] == "test"
    )
    assert names["cars"]["Maker Model 0 Sedan 2012"] == "train"  # labels are 1-based
    assert (
        names["nabirds"]["Common Bird 1000 (Adult male)"] == "train"
    )  # ids sort as numbers: 998, 999, 1000 first
    assert names["nabirds"]["Common Bird 1001 (Adult male)"] == "test"
    assert (
        names["aircraft"]["DHC-2 Model B"] == "train"
        and names["aircraft"]["DHC-3 Model B"] == "test"
    )
    first_five = {
        "pink primrose",
        "hard-leaved pocket orchid",
        "canterbury bells",
        "sweet pea",
        "english marigold",
    }
    assert set(names["flowers"]) == first_five and names["flowers"]["canterbury bells"] == "train"
    shop = images[images.dataset == "inshop"]
    assert set(shop[shop.split == "query"].class_name) == set(
        shop[shop.split == "gallery"].class_name
    )
    shutil.rmtree(root / "dogs")
    assert load(root, "sop", "cub").datasets == ["sop", "cub"]  # only these must be there
    with pytest.raises(
        ValueError, match=r"(?s)not found under .*data download.*dogs: dogs/ with file_list\.mat"
    ):
        load(root, "cub", "dogs")
    with pytest.raises(ValueError, match="unknown dataset 'dog'; known: cub, cars, sop"):
        load(root, "dog")


def test_the_laptop_profile_trains_on_those_that_download_freely(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    tiny = {
        "root": str(tmp_path),
        "pretrained": "random",
        "image_size": 32,
        "epochs": 1,
        "batch_size": 8,
        "workers": 0,
    }
    profile = config.profile("laptop", seeds=[0], **tiny)
    fake_datasets.small(tmp_path, *profile.data.datasets)
    use_miniatures(monkeypatch, *profile.data.datasets)
    assert study.run_all({"PUMA": profile.run("puma")}, profile).wide().shape == (1, 5 + 2)


def use_miniatures(monkeypatch, *names):
    """Let miniatures be complete."""
    for name in names:
        miniature = replace(paper.all_datasets()[name], counts=fake_datasets.COUNTS)
        monkeypatch.setitem(paper.all_datasets(), name, miniature)


def test_every_dataset_is_described_with_a_reader_and_a_way_to_get_it():
    for name, dataset in paper.all_datasets().items():
        assert dataset.name == name and dataset.format in paper._FORMATS
        assert bool(dataset.archives) != bool(dataset.by_hand)


def test_what_is_expected_needs_no_files():
    table = data.expected(config.Data(benchmark="paper", datasets=("inshop", "cub")))
    found = table.set_index(["dataset", "split"])[["images", "classes"]]
    assert found.index.tolist()[0] == ("cub", "train")
    assert found.loc[("cub", "test")].tolist() == [5924, 100]
    assert found.loc["inshop"].index.tolist() == ["train", "query", "gallery"]
    assert data.expected(config.Data()) is None


def test_changed_annotations_are_seen_by_the_same_process(tmp_path, monkeypatch):
    use_miniatures(monkeypatch, "cub")
    fake_datasets.small(tmp_path, "cub")
    settings = config.Data(benchmark="paper", root=str(tmp_path), datasets=("cub",))
    before = data.load(settings)
    assert data.load(settings) is before
    file = tmp_path / CUB / "classes.txt"
    file.write_text(file.read_text().replace("Fancy_Bird_1", "Plain_Bird_1"))
    assert data.load(settings).digest != before.digest


def test_the_other_form_of_cars(tmp_path):
    fake_datasets.cars_split(tmp_path)
    images = load(tmp_path, "cars").images
    assert counts(images) == fake_datasets.COUNTS
    assert (
        images.path.str.contains("cars_train/").sum() == 6
        and images.path.str.contains("cars_test/").sum() == 6
    )
    devkit, name = tmp_path / "stanford_cars" / "devkit", "cars_test_annos_withlabels.mat"
    (devkit.parent / name).rename(devkit / name)
    assert len(load(tmp_path, "cars").images) == 12


def test_root_may_be_the_dataset_itself_or_a_folder_around_it(tmp_path):
    around = fake_datasets.small(tmp_path / "around", "cub", "nabirds")
    shutil.copytree(
        around / CUB, around / ".unpacking" / CUB
    )  # an interrupted unpacking is not taken for it
    for root in (tmp_path, around, around / CUB):
        assert all(
            (root / path).is_file() and ".unpack" not in path
            for path in load(root, "cub").images.path
        )
    (around / "nabirds").rename(around / "a")
    (around / CUB).rename(around / "b")
    assert paper.find(tmp_path, "cub").name == "b" and paper.find(tmp_path, "nabirds").name == "a"


def test_counts_are_checked_and_missing_images_named(tmp_path):
    root = fake_datasets.small(tmp_path, "cub")
    with pytest.raises(
        ValueError,
        match=r"dataset 'cub': .* 7 images of 3 classes in train, .*expects 5,864.* of 100",
    ):
        data.read("paper", root, ["cub"])
    shutil.rmtree(root / CUB / "images" / "002.Fancy_Bird_2")
    with pytest.raises(
        ValueError, match=r"dataset 'cub': 2 of 12 images.*002.Fancy_Bird_2.*unpack"
    ):
        data.read("paper", root, ["cub"])
    with pytest.warns(UserWarning, match="are missing"):
        images = data.read("paper", root, ["cub"], strict=False).images
    assert len(images) == 10
    assert set(images[images.split == "train"].class_name) == {
        "001.Fancy_Bird_1",
        "003.Fancy_Bird_3",
    }


@pytest.mark.parametrize(
    ("name", "file", "change", "message"),
    [
        ("cub", f"{CUB}/image_class_labels.txt", None, "No such file .*/image_class_labels.txt"),
        ("cub", f"{CUB}/images.txt", ("2 ", "1 "), "differ in 1 images, as '2'"),
        (
            "cub",
            f"{CUB}/classes.txt",
            ("1 001.Fancy_Bird_1", "1"),
            r"classes.txt, line 1: \['1'\]; expected 2 values",
        ),
        ("sop", f"{SOP}/Ebay_train.txt", ("image_id", "id"), "Ebay_train.txt: no header 'image_id"),
        ("inshop", INSHOP, ("query", "val"), "unknown split 'val'; known: train, query, gallery"),
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
    with pytest.raises(
        ValueError, match=f"dataset '{name}': .*{message}.*; unpack the dataset again"
    ):
        load(tmp_path, name)


def test_damaged_matlab_files_and_images_named_twice(tmp_path):
    root = fake_datasets.small(tmp_path, "cars", "flowers")
    flowers, cars = root / "flowers", root / "cars" / "cars_annos.mat"
    sets = loadmat(flowers / "setid.mat")

    def refused(name, message):
        with pytest.raises(ValueError, match=f"dataset '{name}': .*{message}"):
            load(root, name)

    savemat(flowers / "setid.mat", dict.fromkeys(("trnid", "valid", "tstid"), sets["trnid"]))
    refused("flowers", "image 'flowers/jpg/image_00003.jpg' stands twice")
    savemat(flowers / "imagelabels.mat", {"labels": np.array([[1, 1, 103, 1, 1, 1] * 2], np.uint8)})
    refused("flowers", "imagelabels.mat: class 103 is not in 1 to 102")
    cars.write_bytes(cars.read_bytes()[: cars.stat().st_size // 2])
    refused("cars", "annotation files in .*/cars are missing or damaged")


def matches(name, folder):
    table = paper.annotations(name, folder)
    found = {split: (len(rows), rows.id.nunique()) for split, rows in table.groupby("split")}
    assert found == paper.all_datasets()[name].counts
    return table


@real
def test_real_birds_and_flowers(tmp_path):
    matches("nabirds", METADATA / "nabirds")
    matches("flowers", METADATA / "flowers")
    for name in ("classes.txt", "image_class_labels.txt"):
        shutil.copy(METADATA / "cub" / name, tmp_path)
    known = (METADATA / "cub" / "subset_classes_1_50" / "images.txt").read_text().splitlines()
    labels = [
        line.split()
        for line in (METADATA / "cub" / "image_class_labels.txt").read_text().splitlines()
    ]
    unknown = [
        f"{i} {label}/made_up_{i}.jpg" for i, label in labels[len(known) :]
    ]  # its list ends at class 50
    (tmp_path / "images.txt").write_text("\n".join(known + unknown))
    table = matches("cub", tmp_path)[: len(known)]
    assert (table.path.str.split("/").str[1] == table.class_name).all()


@real
def test_real_cars_and_aircraft(tmp_path):
    (tmp_path / "devkit").mkdir()
    for name in ("cars_train_annos.mat", "cars_meta.mat"):
        shutil.copy(METADATA / "cars" / name, tmp_path / "devkit")
    rows = list(
        csv.reader((METADATA / "cars" / "anno_test.csv").open())
    )  # the test half is there in this form only
    annotations = fake_datasets.annotations([row[0] for row in rows], [int(row[5]) for row in rows])
    savemat(tmp_path / "cars_test_annos_withlabels.mat", {"annotations": annotations})
    train = list(csv.reader((METADATA / "cars" / "anno_train.csv").open()))
    assert matches("cars", tmp_path).id[:8144].tolist() == [int(row[5]) for row in train]
    shutil.copy(
        METADATA / "cars" / "cars_test_annos.mat", tmp_path / "cars_test_annos_withlabels.mat"
    )
    with pytest.raises(ValueError, match="have no 'class'"):
        paper.annotations("cars", tmp_path)
    (tmp_path / "data").mkdir()
    for part, name in (("trainval", "train"), ("test", "test")):
        lines = (METADATA / "aircraft" / f"mmal_{name}.txt").read_text().splitlines()
        keys = [line.split() for line in lines]  # this source has numbers for the variants
        text = "".join(f"{file.removesuffix('.jpg')} Variant {int(c):03d}\n" for file, c in keys)
        (tmp_path / "data" / f"images_variant_{part}.txt").write_text(text)
    matches("aircraft", tmp_path)
