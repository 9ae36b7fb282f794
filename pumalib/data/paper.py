"""The eight datasets of the paper (Table 1), each from its original distribution exactly as it unpacks.
Where one has no split of its own for metric learning, the first half (rounded up) of its sorted classes is train."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import yaml
from scipy.io import loadmat

from .. import paths
from .table import COLUMNS, Benchmark, check_known


def _records(file: Path, columns: int, header: str = "") -> list[list[str]]:
    """The values of each line below `header`, one of the first two lines; the last value may hold spaces."""
    lines = [line.strip().split(None, columns - 1) for line in file.read_text("utf-8-sig").splitlines()]
    if header and header.split() not in lines[:2]:
        raise ValueError(f"{file}: no header {header!r}")
    start = lines.index(header.split()) + 1 if header else 0
    for number, values in enumerate(lines[start:], start + 1):
        if len(values) not in (0, columns):
            raise ValueError(f"{file}, line {number}: {values}; expected {columns} values")
    return [values for values in lines[start:] if values]


def _matlab(file: Path, name: str) -> np.ndarray:
    with open(file, "rb") as stream:
        return np.atleast_1d(loadmat(stream, squeeze_me=True, variable_names=[name])[name])


def _named(label, names: list[str] | np.ndarray, file: Path) -> tuple[int, str]:
    """A class number from 1 on, of any type in which Matlab stores numbers, as an int and with its name."""
    if str(label).removesuffix(".0").isdecimal() and 1 <= label <= len(names):
        return int(label), str(names[int(label) - 1])
    raise ValueError(f"{file}: class {label} is not in 1 to {len(names)}")


def _birds(folder: Path) -> Iterator[tuple]:
    files = "images.txt", "image_class_labels.txt", "classes.txt"
    images, labels, names = (dict(_records(folder / file, 2)) for file in files)
    if odd := images.keys() ^ labels.keys():
        raise ValueError(f"images.txt and image_class_labels.txt differ in {len(odd)} images, as {min(odd)!r}")
    return ((f"images/{path}", int(labels[image]), names[labels[image]]) for image, path in images.items())


def _cars(folder: Path) -> Iterator[tuple]:
    """Cars-196: cars_annos.mat with car_ims/, or devkit/ with cars_train/ and cars_test/."""
    one, devkit = folder / "cars_annos.mat", folder / "devkit"
    if one.is_file() and ((folder / "car_ims").is_dir() or not devkit.is_dir()):
        names, parts = _matlab(one, "class_names"), [(one, "relative_im_path", "")]
    else:
        names, test = _matlab(devkit / "cars_meta.mat", "class_names"), "cars_test_annos_withlabels.mat"
        test = folder / test if (folder / test).is_file() else devkit / test  # offered as a file of its own
        parts = [(devkit / "cars_train_annos.mat", "fname", "cars_train/"), (test, "fname", "cars_test/")]
    for file, key, prefix in parts:
        annotations = _matlab(file, "annotations")
        if not {"class", key} <= set(annotations.dtype.names or ()):
            raise ValueError(f"{file}: annotations have no 'class' and {key!r}; the file with labels is needed")
        for path, label in zip(annotations[key], annotations["class"]):
            yield f"{prefix}{path}", *_named(label, names, file)


def _sop(folder: Path) -> Iterator[tuple]:
    """Stanford Online Products: a class is one product for sale, called by its kind and number."""
    for split in ("train", "test"):
        for _, label, _, path in _records(folder / f"Ebay_{split}.txt", 4, "image_id class_id super_class_id path"):
            yield path, label, f"{path.split('/')[0].removesuffix('_final')} {label}", split


def _inshop(folder: Path) -> Iterator[tuple]:
    """In-Shop: Eval/list_eval_partition.txt and Img/img/; queries are searched in the gallery only."""
    header = "image_name item_id evaluation_status"
    for path, item, split in _records(folder / "Eval" / "list_eval_partition.txt", 3, header):
        check_known("split", [split], DATASETS["inshop"].counts)
        yield f"Img/{path}", item, item, split


def _dogs(folder: Path) -> Iterator[tuple]:
    images, labels = (_matlab(folder / "file_list.mat", name) for name in ("file_list", "labels"))
    for path, label in zip(images, labels.tolist(), strict=True):
        yield f"Images/{path}", label, str(path).split("/")[0]


def _flowers(folder: Path) -> Iterator[tuple]:
    """Flowers-102: imagelabels.mat, setid.mat and jpg/, in the order of the three sets as the authors' code has it."""
    names = (paths.PAPER / "flowers.txt").read_text("utf-8").splitlines()  # from its web page: it comes without
    file, sets = folder / "imagelabels.mat", [_matlab(folder / "setid.mat", s) for s in ("trnid", "valid", "tstid")]
    labels = _matlab(file, "labels").tolist()
    for image in np.concatenate(sets).tolist():
        yield f"jpg/image_{image:05d}.jpg", *_named(labels[image - 1], names, file)


def _aircraft(folder: Path) -> Iterator[tuple]:
    for part in ("trainval", "test"):
        for image, name in _records(folder / "data" / f"images_variant_{part}.txt", 2):
            yield f"data/images/{image}.jpg", name, name


_YAML = yaml.safe_load((paths.PAPER / "datasets.yaml").read_text("utf-8"))  # explained there
DATASETS = {name: SimpleNamespace(**described) for name, described in _YAML.items()}
# What reads each: path, class id, class name and, where the dataset has its own, split of every image
_READERS = dict(zip(DATASETS, (_birds, _cars, _sop, _inshop, _birds, _dogs, _flowers, _aircraft)))


def annotations(name: str, folder: Path) -> pd.DataFrame:
    """The table of `path`, `id`, `class_name` and `split` that the annotation files in `folder` give."""
    try:
        rows = list(_READERS[name](folder))
        table = pd.DataFrame(rows, columns=["path", "id", "class_name", "split"][: len(rows[0])])
    except Exception as error:  # damaged files raise nearly anything
        what = f"dataset {name!r}: annotation files in {folder} are missing or damaged"
        raise ValueError(f"{what} ({type(error).__name__}: {error}); unpack the dataset again") from error
    if "split" not in table:
        place = table["id"].rank(method="dense")
        table["split"] = np.where(place <= (place.max() + 1) // 2, "train", "test")
    return table


def find(root: Path, name: str) -> Path | None:
    """The folder of dataset `name`: `root` itself or one at most two levels below; None where there is none."""
    for folder in [root, *sorted(root.glob("[!.]*/")), *sorted(root.glob("[!.]*/[!.]*/"))]:
        here = [folder / file for file in DATASETS[name].files if (folder / file).is_file()]
        if here and _READERS[name] is _birds:  # two datasets have these files; the keys of NABirds are UUIDs
            here = ("-" in here[0].read_text("utf-8", "replace")[:9]) == (name == "nabirds")
        if here:
            return folder
    return None


def load(root: str | Path, datasets: list[str] | None = None, strict: bool = True) -> Benchmark:
    """The paper's datasets under `root`, all eight or those named; ValueError: one is not there, or is damaged.
    If `strict`, else it warns, also for missing images (they are left out) or other counts than in Table 1."""
    root, names = Path(root).expanduser(), list(DATASETS) if datasets is None else datasets
    check_known("dataset", names, DATASETS)
    folders = {name: find(root, name) for name in names}
    if lost := {name: DATASETS[name] for name, folder in folders.items() if folder is None}:
        expected = [f"{name}: {d.folder}/ with {', '.join(d.files)}; images in {d.images}" for name, d in lost.items()]
        remedy = "`python -m pumalib data download` fetches them or says how to get them"
        raise ValueError("\n  ".join([f"not found under {root}; {remedy}", *expected]))
    images = pd.concat([_whole(root, folder, name, strict) for name, folder in folders.items()], ignore_index=True)
    images["label"] = images.groupby(["dataset", "id"], sort=False).ngroup()
    return Benchmark("paper", images[COLUMNS], root=root)


def _whole(root: Path, folder: Path, name: str, strict: bool) -> pd.DataFrame:
    table, problems = annotations(name, folder), []
    places = table["path"].str.rpartition("/")  # a folder is listed once: 289,000 questions would take minutes
    listed = {p: set(os.listdir(folder / p)) if (folder / p).is_dir() else () for p in places[0].unique()}
    there = np.array([file in listed[parent] for parent, file in zip(places[0], places[2])])
    if not there.all():
        lost, example = f"{(~there).sum():,} of {len(table):,} images", folder / table["path"][~there].iloc[0]
        problems.append(f"{lost} are missing, for instance {example}; unpack the original archive again")
        table = table[there].reset_index(drop=True)
    for split, expected in DATASETS[name].counts.items():
        rows = table[table["split"] == split]
        found = [len(rows), rows["id"].nunique()]
        if found != expected:
            here, printed = ("{:,} images of {:,} classes".format(*counts) for counts in (found, expected))
            problems.append(f"{folder}: {here} in {split}, Table 1 expects {printed}; unpack the archive again")
    for problem in problems:
        if strict:
            raise ValueError(f"dataset {name!r}: {problem}, or go on with strict=False")
        warnings.warn(f"dataset {name!r}: {problem}", stacklevel=4)
    prefix = f"{folder.relative_to(root).as_posix()}/".removeprefix("./")
    return table.assign(dataset=name, path=prefix + table["path"])
