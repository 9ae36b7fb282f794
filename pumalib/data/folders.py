"""Bring your own: `root/<dataset>/<class>/*.jpg` becomes the one table.

The first half (rounded up) of a dataset's sorted classes are train, the others test, as the paper does with CUB
and Cars (Sec. 5.1).  A file `root/split.csv` says otherwise, either per class, with the columns
`dataset,class_name,split` (train or test), or per image, with the columns `path,split` (train, test, query or
gallery; the path is relative to root).  It then speaks for every class or image of the datasets that are loaded.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pandas as pd

from . import COLUMNS, SPLITS, Benchmark, check_known

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif")


def load(root: str | Path, datasets: list[str] | None = None) -> Benchmark:
    """The datasets under `root`, sorted by dataset, class and file name; hidden and macOS `._*` files are ignored.

    Args:
        root: the folder that holds one folder per dataset.
        datasets: only these, in this order; None: every folder under `root`.

    Raises:
        ValueError: no such root, an unknown dataset, a dataset without class folders or with too few of them,
            a class folder without images, a name that is not UTF-8, or a bad row of split.csv.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; root= is the folder that holds <dataset>/<class>/*.jpg")
    found = _subfolders(root)
    if not found:
        raise ValueError(f"{root} holds no dataset folders; expected {root}/<dataset>/<class>/*.jpg")
    if datasets is not None:
        check_known("dataset", datasets, found)
    names = found if datasets is None else list(datasets)
    rows = [row for name in names for row in _dataset_rows(root, name)]
    images = pd.DataFrame(rows, columns=["path", "class_name", "dataset"])
    images.insert(1, "label", images.groupby(["dataset", "class_name"], sort=False).ngroup())
    split_file = root / "split.csv"
    images["split"] = _split_from(split_file, images, found, names) if split_file.is_file() else _halves(images)
    return Benchmark("folders", images[COLUMNS], root=root)


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(_utf8(folder, e.name) for e in entries if not e.name.startswith(".") and e.is_dir())


def _utf8(folder: Path, name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{folder}: the name {os.fsencode(name)!r} is not UTF-8; rename it") from None
    return name


def _dataset_rows(root: Path, dataset: str) -> list[tuple[str, str, str]]:
    """(path, class_name, dataset) of every image."""
    classes = _subfolders(root / dataset)
    if not classes:
        raise ValueError(
            f"dataset {dataset!r}: {root / dataset} holds no class folders; expected {root}/<dataset>/<class>/*.jpg. "
            "If the root is itself one dataset, give the folder above it; else leave it out with datasets=[...]"
        )
    rows = []
    for name in classes:
        folder = root / dataset / name
        with os.scandir(folder) as entries:
            files = sorted(
                _utf8(folder, e.name)
                for e in entries
                if e.name.lower().endswith(EXTENSIONS) and not e.name.startswith(".") and e.is_file()
            )
        if not files:
            raise ValueError(
                f"dataset {dataset!r}: class folder {folder} holds no image ({', '.join(EXTENSIONS)}); "
                "fill it or remove it"
            )
        rows += [(f"{dataset}/{name}/{file}", name, dataset) for file in files]
    return rows


def _halves(images: pd.DataFrame) -> pd.Series:
    """The first half of each dataset's classes, rounded up, is train."""
    split = pd.Series("test", index=images.index)
    for dataset, rows in images.groupby("dataset", sort=False):
        classes = list(dict.fromkeys(rows["class_name"]))
        if len(classes) < 4:
            raise ValueError(
                f"dataset {dataset!r} has {len(classes)} class(es); train and test need at least 2 each, so 4 in all. "
                "Add classes, or leave it out with datasets=[...]"
            )
        split[rows.index[rows["class_name"].isin(classes[: (len(classes) + 1) // 2])]] = "train"
    return split


def _split_from(file: Path, images: pd.DataFrame, found: list[str], names: list[str]) -> pd.Series:
    """The split column as `file` gives it; `found` are the datasets on disk, `names` those that are loaded."""
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            header = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = header
            lines = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file}: not a UTF-8 CSV file ({error})") from None
    if set(header) == {"dataset", "class_name", "split"}:
        what, allowed = "class", SPLITS[:2]
        on_disk = dict.fromkeys(zip(images["dataset"], images["class_name"]))
        hint = "; query and gallery are given per image, with the columns path,split"
    elif set(header) == {"path", "split"}:
        what, allowed, hint = "image", SPLITS, ""
        on_disk = dict.fromkeys(images["path"])
    else:
        raise ValueError(f"{file}: columns {header}; expected dataset,class_name,split or path,split")

    given, first_line = {}, {}
    for line, row in lines:
        if None in row or None in row.values():
            raise ValueError(f"{file}, line {line}: expected {len(header)} values, one for each of {header}")
        dataset = row["dataset"] if what == "class" else row["path"].split("/")[0]
        if dataset not in found:
            raise ValueError(f"{file}, line {line}: unknown dataset {dataset!r}; known: {', '.join(found)}")
        if dataset not in names:
            continue
        key = (dataset, row["class_name"]) if what == "class" else row["path"]
        shown = key if what == "image" else "/".join(key)
        if key not in on_disk:
            raise ValueError(f"{file}, line {line}: no {what} {shown!r} under {file.parent}")
        if row["split"] not in allowed:
            raise ValueError(f"{file}, line {line}: unknown split {row['split']!r}; known: {', '.join(allowed)}{hint}")
        if key in given:
            raise ValueError(f"{file}, line {line}: {what} {shown!r} was given before, on line {first_line[key]}")
        given[key], first_line[key] = row["split"], line
    left = [key for key in on_disk if key not in given]
    if left:
        shown = left[0] if what == "image" else "/".join(left[0])
        raise ValueError(f"{file}: no split for {what} {shown!r} ({len(left)} such); add rows or move them out")
    keys = images["path"] if what == "image" else zip(images["dataset"], images["class_name"])
    return pd.Series([given[key] for key in keys], index=images.index)
