"""Bring your own: `root/<dataset>/<class>/*.jpg`; the first half (rounded up) of a dataset's sorted classes is train.
A file `root/split.csv` says otherwise of every class (columns `dataset,class_name,split`: train or test) or every
image (`path,split`: train, test, query or gallery; the path is relative to root) of the datasets that are loaded.  A
file elsewhere that a run names (`Data.split`) chooses too: images that it does not name are left out."""

import os
from pathlib import Path

import numpy as np
import pandas as pd

from .table import COLUMNS, SPLITS, Benchmark, check_known

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif")


def load(root: str | Path, datasets: list[str] | None = None, split: str | Path | None = None) -> Benchmark:
    """The datasets under `root` (None: all), images sorted by class and name; ValueError names what is empty or bad.
    `split` is a file like `root/split.csv`, in its place, of those images alone that are to be used."""
    root = Path(root).expanduser()
    found = _names(root, "dataset folder")
    check_known("dataset", datasets or [], found)
    rows = [
        (f"{dataset}/{name}/{file}", name, dataset)
        for dataset in (found if datasets is None else datasets)
        for name in _names(root / dataset, "class folder")
        for file in _names(root / dataset / name, "image")
    ]
    images = pd.DataFrame(rows, columns=["path", "class_name", "dataset"])
    if chosen := split or (root / "split.csv").is_file():
        images["split"] = _split_from(Path(split or root / "split.csv"), images, found, root, split is not None)
        images = images.dropna().reset_index(drop=True)
    images["label"] = images.groupby(["dataset", "class_name"], sort=False).ngroup()
    if not chosen:
        labels = images.groupby("dataset")["label"]
        images["split"] = np.where(labels.rank("dense") <= (labels.transform("nunique") + 1) // 2, "train", "test")
    return Benchmark("folders", images[COLUMNS], root=root)


def _names(folder: Path, what: str) -> list[str]:
    """The sorted names of the images or folders in a folder; hidden and macOS `._*` files are ignored."""
    entries = [entry for entry in os.scandir(folder) if entry.name[0] != "."] if folder.is_dir() else []
    if what == "image":
        entries = [entry for entry in entries if entry.name.lower().endswith(EXTENSIONS)]
    names = sorted(entry.name for entry in entries if entry.is_dir() != (what == "image"))
    for name in names:
        if name.encode("utf-8", "ignore").decode() != name:
            raise ValueError(f"{folder}: the name {os.fsencode(name)!r} is not UTF-8; rename it")
    if not names:
        expected = f"<root>/<dataset>/<class>/<image> ({', '.join(EXTENSIONS)})"
        raise ValueError(f"{folder} holds no {what}; expected {expected}: fill it, remove it or name another root")
    return names


def _split_from(file: Path, images: pd.DataFrame, found: list[str], root: Path, chooses: bool) -> pd.Series:
    try:
        rows = pd.read_csv(file, dtype=str, keep_default_na=False, encoding="utf-8-sig", skip_blank_lines=False)
    except (ValueError, OSError) as error:  # pandas' own are ValueErrors
        raise ValueError(f"{file}: no file of UTF-8 CSV ({error})") from None
    by_class = set(rows) == {"dataset", "class_name", "split"}
    if not by_class and set(rows) != {"path", "split"}:
        raise ValueError(f"{file}: columns {list(rows)}; expected dataset,class_name,split or path,split")
    what, allowed = ("class", SPLITS[:2]) if by_class else ("image", SPLITS)
    rows.index = range(2, len(rows) + 2)  # the lines of the file
    rows = rows[rows.ne("").any(axis=1)]
    keys, given = (t["dataset"] + "/" + t["class_name"] if by_class else t["path"] for t in (images, rows))
    given = given[~given.str.split("/").str[0].isin({*found} - {*images["dataset"]})]  # the others are not loaded
    split = rows["split"][given.index]
    problems = {
        f"no such {what} under {root}": ~given.isin(keys),
        f"the split of a {what} must be one of {', '.join(allowed)}": ~split.isin(allowed),
        f"this {what} was given before": given.duplicated(),
    }
    for problem, wrong in problems.items():
        for line in given.index[wrong]:
            raise ValueError(f"{file}, line {line}: {given[line]},{split[line]}: {problem}")
    for left in () if chooses else keys[~keys.isin(given)]:
        raise ValueError(f"{file}: no split for {what} {left!r}; add rows or move out what is not meant")
    return keys.map(dict(zip(given, split)))
