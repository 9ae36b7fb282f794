"""The eight datasets of the paper (Table 1), each from its original distribution exactly as it unpacks.

Each reader only builds a table of paths, classes and splits from the annotation files of one dataset.  Where a
dataset has no split of its own for metric learning, the first half (rounded up) of its sorted classes is train.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from scipy.io import loadmat

from .. import paths
from .table import COLUMNS, Benchmark, check_known

# ---- annotation files; every error names file, line and remedy --------------------------------------------------


def _records(file: Path, columns: int, header: str | None = None, first: int = 1) -> Iterator[tuple[str, list[str]]]:
    """Place and values of each line after `header`, which stands on line `first`; the last value may hold spaces."""
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except FileNotFoundError:
        raise ValueError(f"annotation file {file} is missing; unpack the dataset again") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not a text file ({error}); unpack the dataset again") from None
    if header and (len(lines) < first or lines[first - 1].split() != header.split()):
        raise ValueError(f"{file}, line {first}: expected the header {header!r}")
    for number, line in enumerate(lines[first if header else 0 :], first + 1 if header else 1):
        values = line.strip().split(None, columns - 1)
        if len(values) == columns:
            yield f"{file}, line {number}", values
        elif values:
            raise ValueError(f"{file}, line {number}: {line!r}; expected {columns} values")


def _pairs(file: Path) -> dict[str, str]:
    """Lines "key value"."""
    found: dict[str, str] = {}
    for where, (key, value) in _records(file, 2):
        if key in found:
            raise ValueError(f"{where}: {key!r} is given twice")
        found[key] = value
    return found


def _matlab(file: Path, name: str) -> np.ndarray:
    """Variable `name` of a Matlab file, one-dimensional."""
    if not file.is_file():
        raise ValueError(f"annotation file {file} is missing; unpack the dataset again")
    try:
        return np.atleast_1d(loadmat(file, squeeze_me=True, variable_names=[name])[name])
    except Exception as error:  # a damaged file raises many things, one without the variable a KeyError
        raise ValueError(f"{file}: no readable variable {name!r} ({error}); unpack the dataset again") from error


def _number(value, count: int, where: str) -> int:
    """A class number from 1 to `count`; text, or of any type in which Matlab stores numbers."""
    if str(value).removesuffix(".0").isdecimal() and 1 <= float(value) <= count:
        return int(float(value))
    raise ValueError(f"{where}: class {value} is not in 1 to {count}")


# ---- the eight: rows of path, class id, class name and, where the dataset has its own, split --------------------


def _birds(folder: Path) -> list[tuple]:
    """CUB-200-2011 and NABirds: images.txt, image_class_labels.txt and classes.txt, joined by their keys."""
    file = folder / "image_class_labels.txt"
    names, images, labels = _pairs(folder / "classes.txt"), _pairs(folder / "images.txt"), _pairs(file)
    if odd := images.keys() ^ labels.keys():
        raise ValueError(
            f"{folder}: images.txt and image_class_labels.txt differ in {len(odd)} images, for instance {min(odd)!r}; "
            "one of them is cut short or of another release: unpack the dataset again"
        )
    for image, label in labels.items():
        if label not in names or not label.isdecimal():
            raise ValueError(f"{file}: class {label!r} of image {image!r} is not in classes.txt ({len(names)} classes)")
    return [(f"images/{path}", int(labels[image]), names[labels[image]]) for image, path in images.items()]


def _cars(folder: Path) -> list[tuple]:
    """Cars-196: cars_annos.mat with car_ims/, or devkit/ with cars_train/ and cars_test/."""
    one, devkit = folder / "cars_annos.mat", folder / "devkit"
    if one.is_file() and ((folder / "car_ims").is_dir() or not devkit.is_dir()):
        names, parts = _matlab(one, "class_names"), [(one, "relative_im_path", "")]
    else:
        names, test = _matlab(devkit / "cars_meta.mat", "class_names"), "cars_test_annos_withlabels.mat"
        test = folder / test if (folder / test).is_file() else devkit / test  # offered as a file of its own
        parts = [(devkit / "cars_train_annos.mat", "fname", "cars_train/"), (test, "fname", "cars_test/")]
    rows = []
    for file, key, prefix in parts:
        annotations = _matlab(file, "annotations")
        if not {"class", key} <= set(annotations.dtype.names or ()):
            raise ValueError(f"{file}: annotations have no 'class' and {key!r}; the file with labels is needed")
        for number, (path, label) in enumerate(zip(annotations[key], annotations["class"]), 1):
            label = _number(label, len(names), f"{file}, annotation {number}")
            rows.append((f"{prefix}{path}", label, str(names[label - 1])))
    return rows


def _sop(folder: Path) -> list[tuple]:
    """Stanford Online Products: a class is one product for sale, called by its kind and number."""
    rows, header = [], "image_id class_id super_class_id path"
    for split in ("train", "test"):
        for where, (_, label, _, path) in _records(folder / f"Ebay_{split}.txt", 4, header):
            label, kind = _number(label, 22_634, where), path.split("/")[0].removesuffix("_final")
            rows.append((path, label, f"{kind} {label}", split))
    return rows


def _inshop(folder: Path) -> list[tuple]:
    """In-Shop: Eval/list_eval_partition.txt and Img/img/; queries are searched in the gallery only."""
    file, rows = folder / "Eval" / "list_eval_partition.txt", []
    for where, (path, item, split) in _records(file, 3, "image_name item_id evaluation_status", first=2):
        if split not in ("train", "query", "gallery"):
            raise ValueError(f"{where}: {split!r}; expected train, query or gallery")
        rows.append((f"Img/{path}", item, item, split))
    count = file.read_text("utf-8-sig").split(None, 1)[0]
    if count != str(len(rows)):
        raise ValueError(f"{file}: line 1 says {count} images, {len(rows)} follow; unpack the dataset again")
    return rows


def _dogs(folder: Path) -> list[tuple]:
    """Stanford Dogs: file_list.mat and Images/."""
    file = folder / "file_list.mat"
    images, labels = _matlab(file, "file_list"), _matlab(file, "labels")
    if len(images) != len(labels):
        raise ValueError(f"{file}: {len(images)} files, {len(labels)} labels; unpack the dataset again")
    labels = [_number(label, 120, f"{file}, row {row}") for row, label in enumerate(labels.tolist(), 1)]
    return [(f"Images/{path}", label, str(path).split("/")[0]) for path, label in zip(images, labels)]


def _flowers(folder: Path) -> list[tuple]:
    """Flowers-102: imagelabels.mat, setid.mat and jpg/, in the order of the three sets as the authors' code has it."""
    names = (paths.PAPER / "flowers.txt").read_text("utf-8").splitlines()  # from its web page: it comes without
    file, sets, rows = folder / "imagelabels.mat", folder / "setid.mat", []
    labels = _matlab(file, "labels").tolist()
    for image in np.concatenate([_matlab(sets, part) for part in ("trnid", "valid", "tstid")]).tolist():
        if not 1 <= image <= len(labels):
            raise ValueError(f"{sets}: names image {image} of {len(labels)}; unpack the dataset again")
        label = _number(labels[image - 1], len(names), f"{file}, image {image}")
        rows.append((f"jpg/image_{image:05d}.jpg", label, names[label - 1]))
    return rows


def _aircraft(folder: Path) -> list[tuple]:
    """FGVC-Aircraft: classes are variants, sorted by name."""
    parts = [_pairs(folder / "data" / f"images_variant_{part}.txt") for part in ("trainval", "test")]
    return [(f"data/images/{image}.jpg", name, name) for part in parts for image, name in part.items()]


# ---- which is where --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """One of the eight, as data/paper/datasets.yaml describes it."""

    folder: str  # how the folder that holds it is usually called
    files: list[str]  # annotation files in that folder, by any of which it is known
    images: str  # the folder of its images
    counts: dict[str, list[int]]  # images and classes of each split (Table 1)
    source: list[tuple[str, str, str]] | str  # archives: address, MD5, folder to unpack into; or what to do by hand


DATASETS = {
    name: Dataset(**described)
    for name, described in yaml.safe_load((paths.PAPER / "datasets.yaml").read_text("utf-8")).items()
}
_READERS = {
    "cub": _birds,
    "cars": _cars,
    "sop": _sop,
    "inshop": _inshop,
    "nabirds": _birds,
    "dogs": _dogs,
    "flowers": _flowers,
    "aircraft": _aircraft,
}


def annotations(name: str, folder: Path) -> pd.DataFrame:
    """The table of `path`, `id`, `class_name` and `split` that the annotation files in `folder` give."""
    rows = _READERS[name](folder)
    if not rows:
        raise ValueError(f"the annotation files in {folder} name no image; unpack the dataset again")
    table = pd.DataFrame(rows, columns=["path", "id", "class_name", "split"][: len(rows[0])])
    if "split" not in table:
        ids = sorted(set(table["id"]))
        table["split"] = np.where(table["id"].isin(ids[: (len(ids) + 1) // 2]), "train", "test")
    return table


def find(root: str | Path, name: str) -> Path | None:
    """The folder of dataset `name`: `root` itself or one at most two levels below; None where there is none."""
    root = Path(root)
    for below in ("", "*/", "*/*/"):
        for folder in sorted(root.glob(below)) if below else [root]:
            if any(part.startswith(".") for part in folder.relative_to(root).parts):
                continue
            here = [folder / file for file in DATASETS[name].files if (folder / file).is_file()]
            if here and (_READERS[name] is not _birds or _has_uuids(here[0]) == (name == "nabirds")):
                return folder
    return None


def _has_uuids(file: Path) -> bool:
    """CUB and NABirds have the same files, but CUB's keys are plain numbers."""
    with open(file, encoding="utf-8", errors="replace") as stream:
        return "-" in stream.readline().split(" ")[0]


def load(root: str | Path, datasets: list[str] | None = None, strict: bool = True) -> Benchmark:
    """The paper's datasets under `root`, all eight or those named; only these must exist.

    Args:
        root: the folder in which the archives were unpacked, each in a folder of its own or not.
        strict: False: missing images are left out and wrong counts accepted, each with a warning.

    Raises:
        ValueError: a dataset is not found, an annotation file is missing or damaged, images are missing, or the
            counts differ from Table 1.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; root= is the folder that holds the unpacked datasets")
    names = list(DATASETS) if datasets is None else list(datasets)
    check_known("dataset", names, DATASETS)
    folders = {name: find(root, name) for name in names}
    if lost := [name for name, folder in folders.items() if folder is None]:
        raise ValueError(
            f"dataset {', '.join(map(repr, lost))} not found under {root}; expected\n"
            + "".join(
                f"  {d.folder}/ with {', '.join(d.files)}; images in {d.images}\n" for d in map(DATASETS.get, lost)
            )
            + "`python -m pumalib data download` fetches what may be fetched freely and says how to get the others"
        )
    tables = []
    for name, folder in folders.items():
        try:
            table = _checked(name, folder, strict)
        except ValueError as error:
            raise ValueError(f"dataset {name!r}: {error}") from None
        prefix = "" if folder == root else folder.relative_to(root).as_posix() + "/"
        tables.append(table.assign(dataset=name, path=prefix + table["path"]))
    images = pd.concat(tables, ignore_index=True)
    images["label"] = images.groupby(["dataset", "id"], sort=False).ngroup()
    return Benchmark("paper", images[COLUMNS], root=root)


def _checked(name: str, folder: Path, strict: bool) -> pd.DataFrame:
    """The table of one dataset, its paths relative to `folder`, if it is whole."""
    table, problems = annotations(name, folder), []
    twice = table["path"].duplicated()
    if twice.any():
        raise ValueError(f"image {table['path'][twice].iloc[0]!r} stands {twice.sum() + 1} times in the annotations")
    # A folder is listed once, since 289,000 single questions take minutes on a disk.
    places = table["path"].str.rpartition("/")
    listed = {p: set(os.listdir(folder / p)) if (folder / p).is_dir() else () for p in places[0].unique()}
    there = np.array([file in listed[parent] for parent, file in zip(places[0], places[2])])
    if not there.all():
        lost = table["path"][~there]
        problems.append(
            f"{len(lost):,} of {len(table):,} images that the annotations name are missing, for instance "
            f"{folder / lost.iloc[0]} (unpacking not finished?); unpack the dataset again"
        )
        table = table[there].reset_index(drop=True)
    for split, (images, classes) in DATASETS[name].counts.items():
        rows = table[table["split"] == split]
        found = [len(rows), rows["id"].nunique()]
        if found != [images, classes]:
            cause = "unpacking not finished, or annotations cut short" if found < [images, classes] else "files added"
            problems.append(
                f"{found[0]:,} {split} images of {found[1]:,} classes in {folder}; Table 1 expects {images:,} of "
                f"{classes:,}. Likely cause: {cause}, another release, or macOS `._` files taken for images. Unpack "
                "the original archive again"
            )
    for problem in problems:
        if strict:
            raise ValueError(f"{problem}, or go on with strict=False")
        warnings.warn(f"dataset {name!r}: {problem}", stacklevel=4)
    return table
