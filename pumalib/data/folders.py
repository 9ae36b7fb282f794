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

import numpy as np
import pandas as pd

from .table import COLUMNS, SPLITS, Benchmark, check_known

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
    found = _names(root)
    if not found:
        raise ValueError(f"{root} holds no dataset folders; expected {root}/<dataset>/<class>/*.jpg")
    names = found if datasets is None else list(datasets)
    check_known("dataset", names, found)
    rows = []
    for dataset in names:
        classes = _names(root / dataset)
        if not classes:
            raise ValueError(
                f"dataset {dataset!r}: {root / dataset} holds no class folders; expected {root}/<dataset>/<class>/*.jpg."
                " If the root is itself one dataset, give the folder above it; else leave it out with datasets=[...]"
            )
        for name in classes:
            files = _names(root / dataset / name, EXTENSIONS)
            if not files:
                raise ValueError(
                    f"dataset {dataset!r}: class folder {root / dataset / name} holds no image "
                    f"({', '.join(EXTENSIONS)}); fill it or remove it"
                )
            rows += [(f"{dataset}/{name}/{file}", name, dataset) for file in files]
    images = pd.DataFrame(rows, columns=["path", "class_name", "dataset"])
    images["label"] = images.groupby(["dataset", "class_name"], sort=False).ngroup()
    file = root / "split.csv"
    images["split"] = _split_from(file, images, found) if file.is_file() else _halves(images)
    return Benchmark("folders", images[COLUMNS], root=root)


def _names(folder: Path, extensions: tuple[str, ...] = ()) -> list[str]:
    """The sorted names of the folders in a folder, or of its files with one of `extensions`."""
    with os.scandir(folder) as entries:
        entries = [e for e in entries if not e.name.startswith(".")]
        if extensions:
            names = [e.name for e in entries if e.name.lower().endswith(extensions) and e.is_file()]
        else:
            names = [e.name for e in entries if e.is_dir()]
    for name in names:
        if name.encode("utf-8", "ignore").decode() != name:
            raise ValueError(f"{folder}: the name {os.fsencode(name)!r} is not UTF-8; rename it")
    return sorted(names)


def _halves(images: pd.DataFrame) -> np.ndarray:
    """The first half of each dataset's classes, rounded up, is train."""
    for dataset, count in images.groupby("dataset", sort=False)["label"].nunique().items():
        if count < 4:
            raise ValueError(
                f"dataset {dataset!r} has {count} class(es); train and test need at least 2 each, so 4 in all. "
                "Add classes, or leave it out with datasets=[...]"
            )
    labels = images.groupby("dataset")["label"]
    return np.where(labels.rank("dense") <= (labels.transform("nunique") + 1) // 2, "train", "test")


def _split_from(file: Path, images: pd.DataFrame, found: list[str]) -> pd.Series:
    """The split column as `file` gives it; `found` are the datasets on disk, which may be more than those loaded."""
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            header = [name.strip() for name in next(reader, [])]
            lines = [(f"{file}, line {reader.line_num}", row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file}: not a UTF-8 CSV file ({error})") from None
    by_class = sorted(header) == ["class_name", "dataset", "split"]
    if not by_class and sorted(header) != ["path", "split"]:
        raise ValueError(f"{file}: columns {header}; expected dataset,class_name,split or path,split")
    what, allowed = ("class", SPLITS[:2]) if by_class else ("image", SPLITS)
    keys = images["dataset"] + "/" + images["class_name"] if by_class else images["path"]
    known, loaded, given = set(keys), set(images["dataset"]), {}
    for where, values in lines:
        if len(values) != len(header):
            raise ValueError(f"{where}: expected {len(header)} values, one for each of {header}")
        row = dict(zip(header, values))
        key = f"{row['dataset']}/{row['class_name']}" if by_class else row["path"]
        dataset = key.split("/")[0]
        if dataset not in found:
            raise ValueError(f"{where}: unknown dataset {dataset!r}; known: {', '.join(found)}")
        if dataset not in loaded:
            continue
        if key not in known:
            raise ValueError(f"{where}: no {what} {key!r} under {file.parent}")
        if row["split"] not in allowed:
            hint = "; query and gallery are given per image, with the columns path,split" if by_class else ""
            raise ValueError(f"{where}: unknown split {row['split']!r}; known: {', '.join(allowed)}{hint}")
        if key in given:
            raise ValueError(f"{where}: {what} {key!r} was given before, on {given[key][1].rsplit(', ')[-1]}")
        given[key] = row["split"], where
    left = [key for key in dict.fromkeys(keys) if key not in given]
    if left:
        raise ValueError(f"{file}: no split for {what} {left[0]!r} ({len(left)} such); add rows or move them out")
    return keys.map({key: split for key, (split, _) in given.items()})
