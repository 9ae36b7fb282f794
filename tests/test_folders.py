"""`folders`: any root/<dataset>/<class>/*.jpg as the one table."""

import shutil
import time

import pytest
from PIL import Image

from pumalib import data
from pumalib.data import folders


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
    rows = images[images.dataset == dataset]
    return dict(zip(rows.class_name, rows.split))


def test_first_half_of_sorted_classes_is_train(root):
    benchmark = data.load("folders", root)
    images = benchmark.images
    assert benchmark.datasets == ["birds", "cars"] and benchmark.root == root
    assert list(images.columns) == data.COLUMNS and len(images) == 5 * 2 + 4 * 3
    assert splits(images, "birds") == {
        "a": "train", "b": "train", "c": "train", "d": "test", "Ärger mit Leerzeichen": "test"
    }  # fmt: skip
    assert splits(images, "cars") == {"w": "train", "x": "train", "y": "test", "z": "test"}
    assert images.path[0] == "birds/a/0.png" and images.label.nunique() == 9
    assert list(images.path) == sorted(images.path)
    assert all((root / path).is_file() for path in images.path)


def test_only_the_named_datasets_in_their_order(root):
    shutil.rmtree(root / "birds" / "a")
    (root / "birds" / "a").mkdir()  # an error, were it asked for
    assert data.load("folders", root, ["cars"]).datasets == ["cars"]
    with pytest.raises(ValueError, match="unknown dataset 'planes'; known: birds, cars"):
        data.load("folders", root, ["cars", "planes"])


def test_extensions_hidden_and_foreign_files(root):
    folder = root / "cars" / "w"
    (folder / "0.png").rename(folder / "0.JPeG")
    for name in ("._0.png", ".hidden.jpg", "notes.txt", "Thumbs.db"):
        (folder / name).write_bytes(b"x")
    (folder / "folder.jpg").mkdir()
    (root / ".git").mkdir()
    (root / "cars" / ".cache").mkdir()
    (root / "cars" / "readme.md").write_text("x")
    images = data.load("folders", root).images
    assert sorted(images[images.class_name == "w"].path) == ["cars/w/0.JPeG", "cars/w/1.png", "cars/w/2.png"]


@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda root: shutil.rmtree(root), "is not a folder"),
        (lambda root: [shutil.rmtree(root / d) for d in ("birds", "cars")], "holds no dataset folders"),
        (lambda root: (root / "empty").mkdir(), "dataset 'empty': .*holds no class folders"),
        (lambda root: (root / "cars" / "void").mkdir(), r"dataset 'cars': class folder .*void holds no image .*\.jpg"),
        (lambda root: [shutil.rmtree(root / "cars" / c) for c in "wxy"], r"dataset 'cars' has 1 class\(es\)"),
    ],
)
def test_what_cannot_be_a_benchmark(root, break_it, message):
    break_it(root)
    with pytest.raises(ValueError, match=message):
        data.load("folders", root)


def test_split_per_class(root):
    (root / "split.csv").write_text(
        "dataset,class_name,split\nbirds,a,test\nbirds,b,train\nbirds,Ärger mit Leerzeichen,train\nbirds,c,test\n"
        "birds,d,test\ncars,w,test\n", encoding="utf-8-sig"
    )  # fmt: skip
    images = data.load("folders", root, ["birds"]).images  # rows of other datasets may be unfinished
    assert [splits(images, "birds")[c] for c in ("a", "b", "c", "d", "Ärger mit Leerzeichen")] == [
        "test", "train", "test", "test", "train"
    ]  # fmt: skip


def test_split_per_image_with_query_and_gallery(root):
    split = {"w": ["train"] * 3, "x": ["train"] * 3, "y": ["query", "gallery", "gallery"]}
    split["z"] = ["gallery", "query", "gallery"]
    lines = [f"cars/{name}/{i}.png,{s}" for name, three in split.items() for i, s in enumerate(three)]
    (root / "split.csv").write_text("\n".join(["path,split", *lines]))
    images = data.load("folders", root, ["cars"]).images
    assert list(images[images.class_name == "z"].split) == ["gallery", "query", "gallery"]
    assert list(images[images.class_name == "w"].split) == ["train"] * 3


@pytest.mark.parametrize(
    "text, message",
    [
        ("a,b\n1,2\n", r"split.csv: columns \['a', 'b'\]; expected dataset,class_name,split or path,split"),
        ("", "split.csv: columns"),
        ("dataset,class_name,split\ncars,w,train\ncars,x\n", "split.csv, line 3: expected 3 values"),
        ("path,split\ncars/w/0.png,train,x\n", "split.csv, line 2: expected 2 values"),
        ("dataset,class_name,split\nplanes,w,train\n", "line 2: unknown dataset 'planes'; known: birds, cars"),
        ("dataset,class_name,split\ncars,nope,train\n", "line 2: no class 'cars/nope'"),
        ("path,split\ncars/w/9.png,train\n", "line 2: no image 'cars/w/9.png'"),
        ("dataset,class_name,split\ncars,w,valid\n", "line 2: unknown split 'valid'; known: train, test"),
        ("dataset,class_name,split\ncars,w,query\n", "query and gallery are given per image"),
        ("dataset,class_name,split\ncars,w,train\n\ncars,w,test\n", "line 4: .*'cars/w' was given before, on line 2"),
        ("dataset,class_name,split\ncars,w,train\ncars,x,train\n", r"no split for class 'cars/y' \(2 such\)"),
        ("path,split\ncars/w/0.png,train\n", r"no split for image 'cars/w/1.png' \(11 such\)"),
    ],
)
def test_bad_rows_are_named_with_file_and_line(root, text, message):
    (root / "split.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        data.load("folders", root, ["cars"])


def test_class_in_train_and_test_is_refused(root):
    images = data.load("folders", root, ["cars"]).images
    split = ["test" if path == "cars/w/0.png" else s for path, s in zip(images.path, images.split)]
    (root / "split.csv").write_text("\n".join(["path,split", *(f"{p},{s}" for p, s in zip(images.path, split))]))
    with pytest.raises(ValueError, match="dataset 'cars': class 'w' is in train and test"):
        data.load("folders", root, ["cars"])


def test_not_utf8(root):
    (root / "split.csv").write_bytes("path,split\ncars/w/Ä.png,train\n".encode("latin-1"))
    with pytest.raises(ValueError, match="split.csv: not a UTF-8 CSV file"):
        data.load("folders", root, ["cars"])


def test_twenty_thousand_files_in_seconds(tmp_path):
    for i in range(100):
        folder = tmp_path / "many" / f"{i:03d}"
        folder.mkdir(parents=True)
        for j in range(200):
            (folder / f"{j}.jpg").touch()
    start = time.perf_counter()
    assert len(folders.load(tmp_path).images) == 20_000
    assert time.perf_counter() - start < 5.0  # 0.1 s when the machine is free
