"""`folders`: any root/<dataset>/<class>/*.jpg as the one table; and what no benchmark may be."""

import os
import shutil

import pytest
from PIL import Image

from pumalib import config, data


@pytest.fixture
def root(tmp_path):
    """Two datasets: `birds` with 5 classes of 2 images, `cars` with 4 classes of 3."""
    for dataset, classes, count in (("birds", [*"abcd", "Ärger mit Leerzeichen"], 2), ("cars", "wxyz", 3)):
        for name in classes:
            folder = tmp_path / "data" / dataset / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (4, 4), (i, 0, 0)).save(folder / f"{i}.png")
    return tmp_path / "data"


def splits(images, dataset):
    return images[images.dataset == dataset].set_index("class_name")["split"].to_dict()


def test_first_half_of_sorted_classes_is_train(root):
    benchmark = data.read("folders", root)
    images = benchmark.images
    assert benchmark.datasets == ["birds", "cars"] and benchmark.root == root
    assert list(images.columns) == data.COLUMNS and len(images) == 5 * 2 + 4 * 3
    assert list(splits(images, "birds").items())[1:4] == [("b", "train"), ("c", "train"), ("d", "test")]
    assert splits(images, "cars") == {"w": "train", "x": "train", "y": "test", "z": "test"}
    assert images.path[0] == "birds/a/0.png" and images.label.nunique() == 9
    assert list(images.path) == sorted(images.path) and all((root / path).is_file() for path in images.path)


def test_only_images_of_the_named_datasets(root):
    (root / "birds" / "empty").mkdir()  # an error, were it asked for
    folder = root / "cars" / "w"
    (folder / "0.png").rename(folder / "0.JPeG")
    for name in ("._0.png", ".hidden.jpg", "notes.txt", "Thumbs.db"):
        (folder / name).write_bytes(b"x")
    for name in ("folder.jpg", "../.cache", "../../.git"):
        (folder / name).mkdir()
    images = data.read("folders", root, ["cars"]).images
    assert set(images.dataset) == {"cars"}
    assert sorted(images[images.class_name == "w"].path) == ["cars/w/0.JPeG", "cars/w/1.png", "cars/w/2.png"]
    with pytest.raises(ValueError, match="unknown dataset 'planes'; known: birds, cars"):
        data.read("folders", root, ["cars", "planes"])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda root: shutil.rmtree(root), "data holds no dataset folder; expected <root>/<dataset>/"),
        (lambda root: (root / "cars" / "void").mkdir(), r"cars/void holds no image; .*\.jpg.*: fill"),
        (lambda root: [shutil.rmtree(root / "cars" / c) for c in "xyz"], "'cars': .* 0 in test; at least 2.*: add"),
        (lambda root: (root / "cars").rename(root / "unified"), "'unified': the name of an overall accuracy; rename"),
        (lambda root: [(root / f"cars/{c}/{i}.png").unlink() for c in "yz" for i in (0, 1)], "'cars': no query has"),
        (lambda root: os.rename(root / "cars", os.fsencode(root) + b"/\xe4"), r"b'\\xe4' is not UTF-8; rename it"),
    ],
)
def test_what_cannot_be_a_benchmark(root, break_it, message):
    break_it(root)
    with pytest.raises(ValueError, match=message):
        data.read("folders", root)


def test_split_per_class(root):
    text = "dataset,class_name,split\nbirds,a,test\nbirds,b,train\nbirds,Ärger mit Leerzeichen,train\nbirds,c,test\n"
    (root / "split.csv").write_text(text + "birds,d,test\ncars,w,test\n", encoding="utf-8-sig")
    images = data.read("folders", root, ["birds"]).images  # rows of other datasets may be unfinished
    assert set(images[images.split == "train"].class_name) == {"b", "Ärger mit Leerzeichen"}


def per_image(root, split):
    lines = [f"cars/{name}/{i}.png,{s}" for name, three in split.items() for i, s in enumerate(three)]
    (root / "split.csv").write_text("\n".join(["path,split", *lines]))
    return data.read("folders", root, ["cars"]).images


def test_split_per_image_with_query_and_gallery(root):
    split = {"w": ["train"] * 3, "x": ["train"] * 3, "y": ["query", "gallery", "gallery"]}
    images = per_image(root, split | {"z": ["gallery", "query", "gallery"]})
    assert list(images[images.class_name == "z"].split) == ["gallery", "query", "gallery"]
    assert list(images[images.class_name == "w"].split) == ["train"] * 3
    with pytest.raises(ValueError, match=r"'cars': no query has another image .* \(in the gallery\)"):
        per_image(root, split | {"y": ["query"] * 3, "z": ["gallery"] * 3})
    with pytest.raises(ValueError, match="dataset 'cars': class 'w' is in train and test"):
        per_image(root, split | {"w": ["test", "train", "train"], "z": ["test"] * 3})


def test_bad_rows_are_named_with_file_and_line(root):
    for text, message in (
        ("a,b\n1,2\n", r"split.csv: columns \['a', 'b'\]; expected dataset,class_name,split or path,split"),
        ("path,split\ncars/w/0.png,train\ncars/w/1.png,train,x\n", "split.csv: .*Expected 2 fields in line 3, saw 3"),
        ("path,split\ncars/w/9.png,train\n", "line 2: cars/w/9.png,train: no such image"),
        ("dataset,class_name,split\ncars,w,query\n", "the split of a class must be one of train, test"),
        ("dataset,class_name,split\ncars,w,train\n\ncars,w,test\n", "line 4: cars/w,test: this class was given before"),
        ("path,split\ncars/w/0.png,train\n", "no split for image 'cars/w/1.png'"),
    ):
        (root / "split.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            data.read("folders", root, ["cars"])


def test_a_split_file_elsewhere_chooses_images(root, tmp_path):
    rows = [f"cars/{name}/{i}.png,{'train' if name in 'wx' else 'test'}" for name in "wxyz" for i in range(2)]
    (file := tmp_path / "some.csv").write_text("\n".join(["path,split", *rows]))
    few = data.load(config.Data(benchmark="folders", root=str(root), split=str(file), datasets=("cars",)))
    assert [f"{path},{split}" for path, split in zip(few.images.path, few.images.split)] == rows


def test_loaded_as_a_run_asks_for_it(root):
    settings = {"benchmark": "folders", "root": str(root)}
    whole = data.load(config.Data(**settings))
    assert data.load(config.Data(**settings), seed=1) is whole  # read once: seeds only draw shots
    half = data.load(config.Data(**settings, datasets=("birds", "cars"), shots=1), seed=0)
    assert len(half.train) == 5 and len(half.test) == len(whole.test)
    assert whole.digest != half.digest != data.load(config.Data(**settings, shots=1), seed=1).digest
    with pytest.raises(ValueError, match="dataset 'birds': 1 class.* in train, 2 in test; at least 2"):
        data.load(config.Data(**settings, holdout=True))
    with pytest.raises(ValueError, match="needs root="):
        data.load(config.Data(benchmark="folders"))
