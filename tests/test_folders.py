"""`folders`: any root/<dataset>/<class>/*.jpg as the one table.

And what no benchmark may be, and how any is read, loaded again and checked for equal files.
"""

import dataclasses
import os
import shutil
import socket
import warnings

import pytest
from PIL import Image

from pumalib import config, data
from pumalib.__main__ import main
from pumalib.data import folders, table


@pytest.fixture
def root(tmp_path):
    """Two datasets: `birds` with 5 classes of 2 images, `cars` with 4 classes of 3."""
    for dataset, classes, count in (
        ("birds", [*"abcd", "Ärger mit Leerzeichen"], 2),
        ("cars", "wxyz", 3),
    ):
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
    assert list(splits(images, "birds").items())[1:4] == [
        ("b", "train"),
        ("c", "train"),
        ("d", "test"),
    ]
    assert splits(images, "cars") == {"w": "train", "x": "train", "y": "test", "z": "test"}
    assert images.path[0] == "birds/a/0.png" and images.label.nunique() == 9
    assert list(images.path) == sorted(images.path) and all(
        (root / path).is_file() for path in images.path
    )


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
    assert sorted(images[images.class_name == "w"].path) == [
        "cars/w/0.JPeG",
        "cars/w/1.png",
        "cars/w/2.png",
    ]
    with pytest.raises(ValueError, match="unknown dataset 'planes'; known: birds, cars"):
        data.read("folders", root, ["cars", "planes"])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda root: shutil.rmtree(root),
            "data holds no dataset folder; expected <root>/<dataset>/",
        ),
        (
            lambda root: (root / "cars" / "void").mkdir(),
            r"cars/void holds no image; .*\.jpg.*: fill",
        ),
        (
            lambda root: [shutil.rmtree(root / "cars" / c) for c in "xyz"],
            "'cars': .* 0 in test; at least 2.*: add",
        ),
        (
            lambda root: (root / "cars").rename(root / "unified"),
            "'unified': the name of an overall accuracy; rename",
        ),
        (
            lambda root: [(root / f"cars/{c}/{i}.png").unlink() for c in "yz" for i in (0, 1)],
            "'cars': no query has",
        ),
        (
            lambda root: (root / "cars").rename(os.fsdecode(os.fsencode(root) + b"/\xe4")),
            r"b'\\xe4' is not UTF-8; rename it",
        ),
    ],
)
def test_what_cannot_be_a_benchmark(root, break_it, message):
    break_it(root)
    with pytest.raises(ValueError, match=message):
        data.read("folders", root)


def test_split_per_class(root):
    text = "dataset,class_name,split\nbirds,a,test\nbirds,b,train\n"
    text += "birds,Ärger mit Leerzeichen,train\nbirds,c,test\n"
    (root / "split.csv").write_text(text + "birds,d,test\ncars,w,test\n", encoding="utf-8-sig")
    images = data.read(
        "folders", root, ["birds"]
    ).images  # rows of other datasets may be unfinished
    assert set(images[images.split == "train"].class_name) == {"b", "Ärger mit Leerzeichen"}


def test_a_class_of_a_split_may_be_called_label(root):
    rows = ["split,label,dataset", *(f"train,{name},cars" for name in "wy"), "test,x,cars"]
    (root / "split.csv").write_text("\n".join([*rows, "test,z,cars"]))
    images = data.read("folders", root, ["cars"]).images
    assert set(images[images.split == "train"].class_name) == {"w", "y"}


def per_image(root, split):
    lines = [
        f"cars/{name}/{i}.png,{s}" for name, three in split.items() for i, s in enumerate(three)
    ]
    (root / "split.csv").write_text("\n".join(["path,split", *lines]))
    return data.read("folders", root, ["cars"]).images


def test_split_per_image_with_query_and_gallery(root):
    split = {"w": ["train"] * 3, "x": ["train"] * 3, "y": ["query", "gallery", "gallery"]}
    images = per_image(root, split | {"z": ["gallery", "query", "gallery"]})
    assert list(images[images.class_name == "z"].split) == ["gallery", "query", "gallery"]
    assert list(images[images.class_name == "w"].split) == ["train"] * 3
    with pytest.raises(
        ValueError, match=r"'cars': no query has another image .* \(in the gallery\)"
    ):
        per_image(root, split | {"y": ["query"] * 3, "z": ["gallery"] * 3})
    with pytest.raises(ValueError, match="dataset 'cars': class 'w' is in train and test"):
        per_image(root, split | {"w": ["test", "train", "train"], "z": ["test"] * 3})


def test_bad_rows_are_named_with_file_and_line(root):
    for text, message in (
        (
            "a,b\n1,2\n",
            r"split.csv: columns \['a', 'b'\]; expected dataset,class_name,split \(or label",
        ),
        (
            "path,split\ncars/w/0.png,train\ncars/w/1.png,train,x\n",
            "split.csv, line 3: 3 cells for the 2 columns path, split",
        ),
        ("path,split\ncars/w/9.png,train\n", "line 2: cars/w/9.png,train: no such image"),
        (
            "dataset,class_name,split\ncars,w,query\n",
            "the split of a class must be one of train, val, test",
        ),
        (
            "dataset,class_name,split\ncars,w,train\n\ncars,w,test\n",
            "line 4: cars/w: this class was given before, in line 2",
        ),
        ("dataset,class_name,split\ncars,w,train\ncars,,test\n", "line 3: no class_name"),
        (
            "path,label,split\ncars/w/0.png,w,train\n",
            "the class of an image is its folder: remove the column label",
        ),
        ("path,split\ncars/w/0.png,train\n", "no split for image 'cars/w/1.png'"),
    ):
        (root / "split.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            data.read("folders", root, ["cars"])


def test_a_split_file_elsewhere_chooses_images(root, tmp_path):
    rows = [
        f"cars/{name}/{i}.png,{'train' if name in 'wx' else 'test'}"
        for name in "wxyz"
        for i in range(2)
    ]
    (file := tmp_path / "some.csv").write_text("\n".join(["path,split", *rows]))
    few = data.load(
        config.Data(benchmark="folders", root=str(root), split=str(file), datasets=("cars",))
    )
    assert [f"{path},{split}" for path, split in zip(few.images.path, few.images.split)] == rows


def test_loaded_as_a_run_asks_for_it(root):
    settings = {"benchmark": "folders", "root": str(root)}
    whole = data.load(config.Data(**settings))
    assert data.load(config.Data(**settings), seed=1) is whole  # read once: seeds only draw shots
    half = data.load(config.Data(**settings, datasets=("birds", "cars"), shots=1), seed=0)
    assert len(half.train) == 5 and len(half.test) == len(whole.test)
    assert whole.digest != half.digest != data.load(config.Data(**settings, shots=1), seed=1).digest
    with pytest.raises(
        ValueError, match=r"dataset 'birds': 1 class.* in train, 2 in test; at least 2"
    ):
        data.load(config.Data(**settings, holdout=True))
    with pytest.raises(ValueError, match="needs root="):
        data.load(config.Data(benchmark="folders"))


# ---- a selection, and a benchmark's reader


@pytest.mark.parametrize("benchmark", ["mini", "folders", "paper"])
@pytest.mark.parametrize("nothing", [(), []], ids=["tuple", "list"])
def test_an_empty_selection_is_refused(root, benchmark, nothing):
    with pytest.raises(ValueError, match="names none; name one or more, or give None for all"):
        data.read(benchmark, root, nothing)


def test_without_names_the_commands_take_all_datasets(root, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("pumalib.paths.CACHE", tmp_path / "cache")
    asked = ["--benchmark", "folders", "--root", str(root)]
    assert main(["data", "verify", *asked]) == 0
    assert main(["data", "prepare", *asked]) == 0
    assert len([*(tmp_path / "cache" / "prepared").rglob("*.jpg")]) == 5 * 2 + 4 * 3
    (root / "cars" / "w" / "1.png").write_bytes(b"no image")
    capsys.readouterr()
    assert main(["data", "verify", *asked]) == 1
    assert "cars/w/1.png: cannot be read" in capsys.readouterr().out


def test_an_unknown_benchmark_is_refused():
    with pytest.raises(ValueError, match=r"unknown benchmark 'x'; known: .*mini"):
        data.read("x")


def test_a_reader_of_its_own_is_one_entry(root, monkeypatch):
    def load(root, datasets):
        found = data.read("folders", root, datasets)
        return data.Benchmark("mine", found.images, root=found.root)

    monkeypatch.setitem(data.READERS, "mine", data.Reader(load, needs_root=True))
    assert "mine" in data.list_benchmarks()
    assert data.read("mine", root, ["cars"]).datasets == ["cars"]
    with pytest.raises(ValueError, match="benchmark 'mine' needs root="):
        data.read("mine")


# ---- loaded again in the same process


def add_class(root):
    (root / "cars" / "v").mkdir()
    Image.new("RGB", (4, 4), "red").save(root / "cars" / "v" / "0.png")


def remove_class(root):
    shutil.rmtree(root / "birds" / "b")


def rename_class(root):
    (root / "cars" / "w").rename(root / "cars" / "v")


def add_image(root):
    Image.new("RGB", (4, 4), "red").save(root / "cars" / "w" / "3.png")


def remove_image(root):
    (root / "cars" / "w" / "2.png").unlink()


def replace_image(root):
    Image.new("RGB", (4, 4), "red").save(root / "cars" / "w" / "2.png")


def add_split(root):
    rows = [f"birds,{name},test" for name in "ab"]
    rows += [f"birds,{name},train" for name in ("c", "d", "Ärger mit Leerzeichen")]
    rows += [f"cars,{name},test" for name in "wx"] + [f"cars,{name},train" for name in "yz"]
    text = "\n".join(["dataset,class_name,split", *rows])
    (root / "split.csv").write_text(text, encoding="utf-8")


CHANGES = [add_class, remove_class, rename_class, add_image, remove_image, replace_image, add_split]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_folder_is_loaded_anew(root, change):
    settings = config.Data(benchmark="folders", root=str(root))
    before = data.load(settings)
    digest = before.digest
    assert data.load(settings) is before
    change(root)
    after = data.load(settings)
    assert after.digest != digest
    assert after.digest == data.read("folders", root).digest


def test_files_that_are_unchanged_by_agreement_are_looked_at_once(root, monkeypatch):
    """Telling the names of many runs asks the file system once for each selection of datasets."""
    looked = []
    folders = data.READERS["folders"]

    def counted(*asked):
        looked.append(asked)
        return folders.state(*asked)

    reader = dataclasses.replace(folders, state=counted)
    monkeypatch.setitem(data.READERS, "folders", reader)
    settings = config.Data(benchmark="folders", root=str(root))
    one_dataset = dataclasses.replace(settings, datasets=("birds",))

    with data.unchanged():
        before = data.load(settings)
        with data.unchanged():
            data.load(one_dataset)
        remove_image(root)
        assert data.load(settings) is before
        data.load(one_dataset)
    assert len(looked) == 2

    assert len(data.load(settings).images) == len(before.images) - 1
    assert len(looked) == 3


def test_a_changed_split_file_elsewhere_is_seen(root, tmp_path):
    file = tmp_path / "some.csv"
    rows = [
        f"cars/{name}/{i}.png,{side}"
        for name, side in zip("wxyz", ("train", "train", "test", "test"))
        for i in range(2)
    ]
    file.write_text("\n".join(["path,split", *rows]))
    settings = config.Data(benchmark="folders", root=str(root), split=str(file))
    assert len(data.load(settings).images) == 8
    file.write_text("\n".join(["path,split", *rows, "cars/w/2.png,train"]))
    assert len(data.load(settings).images) == 9


# ---- what looks like an image and is not used


def test_images_in_subfolders_of_a_class_are_counted_and_named(root):
    for place in ("cars/w/more", "cars/w/more/deep", "birds/a/.hidden"):
        (root / place).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(root / place / "x.jpg")
    with pytest.warns(UserWarning, match=r"2 images lie in subfolders .* instance cars/w/more"):
        images = data.read("folders", root).images
    assert len(images) == 5 * 2 + 4 * 3
    with warnings.catch_warnings(action="error"):
        data.read("folders", root, ["birds"])  # datasets that are not loaded cause no warning


def test_jfif_is_an_image(root):
    Image.new("RGB", (4, 4)).save(root / "cars" / "w" / "x.JFIF", "JPEG")
    benchmark = data.read("folders", root, ["cars"])
    assert "cars/w/x.JFIF" in set(benchmark.images.path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes among files")
def test_pipes_and_sockets_called_like_images_are_named_and_do_not_hang(root, monkeypatch):
    os.mkfifo(root / "cars" / "w" / "pipe.jpg")
    monkeypatch.chdir(root / "cars" / "w")  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.jpg")
    with pytest.warns(UserWarning, match=r"2 pipes, sockets .* instance cars/w/pipe.jpg"):
        benchmark = data.read("folders", root)
    assert len(benchmark.images) == 5 * 2 + 4 * 3 and benchmark.digest


def test_one_bad_name_or_link_costs_one_image(root):
    """Training leaves out the same files as the index."""
    folder = root / "cars" / "w"
    (folder / "gone.jpg").symlink_to("nowhere")
    (folder / "itself.jpg").symlink_to("itself.jpg")
    (folder / "phone.HEIC").write_bytes(b"x")
    Image.new("RGB", (4, 4)).save(os.fsencode(folder) + b"/caf\xe9.png")
    with pytest.warns(UserWarning) as caught:
        benchmark = data.read("folders", root)
    assert len(benchmark.images) == 5 * 2 + 4 * 3
    assert len(benchmark.contents) == 5 * 2 + 4 * 3
    said = " ".join(str(one.message) for one in caught)
    assert "2 links lead nowhere and are left out, for instance cars/w/gone.jpg" in said
    assert "1 names are not UTF-8 and are left out, for instance cars/w/caf\\xe9.png" in said
    assert "1 images of formats that are not read are left out, for instance cars/w/phone" in said


def test_a_class_that_is_not_there_is_said(root):
    """Of links to folders of a disk that is not there, by training and by the index."""
    (root / "cars" / "v").symlink_to("/nowhere/v")
    (root / "boats").symlink_to("/nowhere/boats")
    said = "2 links lead nowhere and are left out, for instance boats"
    with pytest.warns(UserWarning, match=said):
        assert data.read("folders", root).datasets == ["birds", "cars"]
    left_out = folders.LeftOut()
    assert len(list(folders.walk(root, left_out))) == 5 * 2 + 4 * 3
    assert left_out.lines() == [said]
    with pytest.warns(UserWarning, match="1 links lead nowhere .* instance cars/v"):
        data.read("folders", root, ["cars"])


def test_images_beside_the_folders_of_classes_are_said(root):
    for place in ("cover.png", "cars/all.png"):
        Image.new("RGB", (4, 4)).save(root / place)
    with pytest.warns(UserWarning, match="2 images lie in no folder of a class .* cars/all.png"):
        assert len(data.read("folders", root).images) == 5 * 2 + 4 * 3


def test_files_without_an_extension_are_said(root):
    """Such files may be images, for example downloaded ones."""
    picture = (root / "cars" / "w" / "0.png").read_bytes()
    for name in ("cars/w/download", "cars/w/scan.pnm", "cars/w/notes.txt", "cars/w/.hidden"):
        (root / name).write_bytes(picture)
    left_out = folders.LeftOut()
    assert len(list(folders.walk(root, left_out))) == 5 * 2 + 4 * 3
    formats, unnamed = left_out.lines()
    assert "1 images of formats that are not read are left out, for instance cars/w/scan.pnm" in (
        formats
    )
    assert "1 files have no extension and are left out, for instance cars/w/download;" in unnamed


def test_training_and_index_take_the_same_images(root, tmp_path):
    """A class that is a link too; a link that leads back ends."""
    (root / "cars" / "z").rename(tmp_path / "elsewhere")
    (root / "cars" / "z").symlink_to(tmp_path / "elsewhere")
    trained = data.read("folders", root).images["path"]
    left_out = folders.LeftOut()
    assert sorted(path for path, _ in folders.walk(root, left_out)) == sorted(trained)
    assert not left_out.lines()

    (root / "cars" / "w" / "back").symlink_to(root)
    assert sorted(path for path, _ in folders.walk(root, left_out)) == sorted(trained)
    said = (
        "1 links lead back to a folder around them and are not followed, for instance cars/w/back"
    )
    assert left_out.lines() == [said]


@pytest.mark.parametrize(
    "names",
    [
        ("train", "test"),
        ("train", "val", "test"),
        ("training", "validation"),
        ("Train", "VAL"),
        ("train2017", "val2017"),
        ("test_images", "train_images"),
    ],
)
@pytest.mark.parametrize("is_same", [True, False])
def test_folders_of_splits_are_no_datasets(tmp_path, names, is_same):
    """ImageFolder's layout: its classes are the same on both sides, or they are not."""
    for name in names:
        for label in "abcd":
            folder = tmp_path / name / (label if is_same else f"{name} {label}")
            folder.mkdir(parents=True)
            for number in range(2):
                Image.new("RGB", (4, 4)).save(folder / f"{number}.png")
    with pytest.raises(ValueError, match="are names of splits, .* and say in <root>/split.csv"):
        data.read("folders", tmp_path)
    assert data.read("folders", tmp_path, list(names)).datasets == list(names)
    # Another folder beside them changes nothing.
    (tmp_path / names[0]).rename(tmp_path / "more")
    if len(names) == 2:
        assert set(data.read("folders", tmp_path).datasets) == {"more", names[1]}
    shutil.copytree(tmp_path / "more", tmp_path / names[0])
    with pytest.raises(ValueError, match="are names of splits"):
        data.read("folders", tmp_path)


@pytest.mark.parametrize("datasets", [None, ["birds"]])
def test_folders_of_splits_are_no_classes(root, datasets):
    """Unless a file of splits names them, as where they are classes of vehicles and exams."""
    for old, new in (("a", "train"), ("b", "test")):
        (root / "birds" / old).rename(root / "birds" / new)
    with pytest.raises(ValueError, match="test and train are .* would be taken for classes of 'bi"):
        data.read("folders", root, datasets)
    lines = [
        f"{folder.parent.name},{folder.name},{'test' if folder.name in ('test', 'c') else 'train'}"
        for folder in root.glob("*/*/")
    ]
    (root / "split.csv").write_text("\n".join(["dataset,class_name,split", *lines]))
    assert set(data.read("folders", root, ["birds"]).test["class_name"]) == {"test", "c"}


def test_a_dataset_may_be_called_test(root):
    (root / "cars").rename(root / "test")
    assert data.read("folders", root).datasets == ["birds", "test"]
    shutil.rmtree(root / "birds")
    assert data.read("folders", root).datasets == ["test"]


# ---- equal files


def test_equal_files_are_counted_and_named(root):
    for number, file in enumerate(sorted(root.rglob("*.png"))):
        Image.new("RGB", (4, 4), (number, number, 0)).save(file)
    none = table.duplicates(data.read("folders", root))
    assert (none.tested, none.ambiguous) == (0, 0)
    shutil.copy(root / "cars" / "w" / "0.png", root / "birds" / "d" / "copy.png")
    shutil.copy(root / "birds" / "a" / "0.png", root / "birds" / "a" / "same class.png")
    shutil.copy(root / "cars" / "y" / "1.png", root / "cars" / "z" / "other.png")
    benchmark = data.read("folders", root)
    found = table.duplicates(benchmark)
    assert (found.tested, found.ambiguous) == (1, 2)
    assert found.tested_example == ("cars/w/0.png", "birds/d/copy.png")
    assert found.ambiguous_example == ("cars/y/1.png", "cars/z/other.png")
    with pytest.warns(UserWarning) as caught:
        table.warn_of_duplicates(benchmark)
    copies, classes = [str(warning.message) for warning in caught]
    assert copies.startswith("1 test images are copies of training images, for instance birds/d")
    assert classes.startswith("2 images stand in two classes or more, for instance cars/y/1.png")


# ---- one dataset alone, and classes to choose settings by


def classes(images, split):
    return sorted(set(images[images["split"] == split]["class_name"]))


def test_a_folder_of_classes_is_one_dataset_named_like_it(root, monkeypatch):
    birds = root / "birds"
    alone = data.read("folders", birds)
    assert alone.datasets == ["birds"]
    assert alone.images["path"][0] == "a/0.png"
    within = data.read("folders", root, ["birds"])
    for column in ("class_name", "dataset", "label", "split"):
        assert alone.images[column].equals(within.images[column])
    assert alone.contents.tolist() == within.contents.tolist()

    assert data.read("folders", birds, ["birds"]).digest == alone.digest
    with pytest.raises(ValueError, match="unknown dataset 'cars'; known: birds"):
        data.read("folders", birds, ["cars"])
    monkeypatch.chdir(birds)
    assert data.read("folders", ".").datasets == ["birds"]


def test_one_dataset_may_have_a_split_of_classes_or_of_images(root):
    cars = root / "cars"
    rows = [f"cars,{name},{'test' if name in 'wx' else 'train'}" for name in "wxyz"]
    (cars / "split.csv").write_text("\n".join(["dataset,class_name,split", *rows]))
    assert classes(data.read("folders", cars).images, "test") == ["w", "x"]
    rows = [
        f"{name}/{i}.png,{'train' if name in 'wy' else 'test'}" for name in "wxyz" for i in "012"
    ]
    (cars / "split.csv").write_text("\n".join(["path,split", *rows]))
    assert classes(data.read("folders", cars).images, "test") == ["x", "z"]


def test_a_changed_image_of_one_dataset_is_seen(root):
    settings = config.Data(benchmark="folders", root=str(root / "cars"), datasets=("cars",))
    before = data.load(settings)
    digest = before.digest
    assert data.load(settings) is before
    replace_image(root)
    assert data.load(settings).digest != digest


def test_a_folder_inside_a_class_makes_it_a_dataset(root):
    (root / "cars" / "x" / "more").mkdir()
    with pytest.raises(ValueError, match="cars/w holds no class folder; .* of one dataset, <root>"):
        data.read("folders", root / "cars")


SPLIT_WITH_VAL = "dataset,class_name,split\n" + "\n".join(
    ["birds,a,train", "birds,b,train", "birds,c,val", "birds,d,val"]
)


@pytest.fixture
def with_val(root):
    (root / "birds" / "e").mkdir()
    for number in range(2):
        Image.new("RGB", (4, 4), (number, 9, 0)).save(root / "birds" / "e" / f"{number}.png")
    rest = "\nbirds,e,test\nbirds,Ärger mit Leerzeichen,test"
    (root / "birds" / "split.csv").write_text(SPLIT_WITH_VAL + rest, encoding="utf-8")
    return config.Data(benchmark="folders", root=str(root / "birds"))


def test_val_is_neither_trained_on_nor_tested_but_is_what_holdout_tests(with_val):
    whole = data.load(with_val)
    assert set(whole.images["split"]) == {"train", "test"}
    assert classes(whole.images, "train") == ["a", "b"]
    assert classes(whole.images, "test") == ["e", "Ärger mit Leerzeichen"]

    chosen = data.load(dataclasses.replace(with_val, holdout=True))
    assert classes(chosen.images, "train") == ["a", "b"]
    assert classes(chosen.images, "test") == ["c", "d"]
    assert len(chosen.images) == 8

    as_it_is = data.read("folders", with_val.root)
    assert classes(as_it_is.test, "val") == []
    assert len(as_it_is.train) + len(as_it_is.test) == len(as_it_is.images) - 4


@pytest.mark.parametrize("side", ["train", "test"])
def test_a_class_of_val_is_on_no_other_side(root, side):
    rows = [f"cars/{n}/{i}.png,{'train' if n in 'wx' else 'test'}" for n in "wxyz" for i in "012"]
    place = 0 if side == "train" else -1
    rows[place] = rows[place].replace(side, "val")
    (root / "split.csv").write_text("\n".join(["path,split", *rows]))
    with pytest.raises(ValueError, match=r"is in (train and val|val and test) \(1 such"):
        data.read("folders", root, ["cars"])
