"""Bring your own: `root/<dataset>/<class>/*.jpg`, or one dataset as `root/<class>/*.jpg`.

The name of one dataset alone is that of its folder.  The first half (rounded up) of a dataset's
sorted classes is train.  A file `root/split.csv` says otherwise of every class (columns
`dataset,class_name,split`, where `label` may stand for `class_name`: train, val or test) or every
image (`path,split`: train, val, test, query or gallery; the path is relative to root) of the
datasets that are loaded.  A file elsewhere that a run names (`Data.split`) chooses too: images that
it does not name are left out.

Classes of `val` are neither trained on nor tested, but with `Data.holdout` they are what is tested,
and with `Training.score_epochs` what is scored after an epoch: to choose without a look at the test
classes.
"""

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from .. import paths
from .cells import check_cells, check_once, read_cells
from .table import COLUMNS, SPLITS, Benchmark, Reader, check_known

EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".jfif",
    ".png",
    ".bmp",
    ".webp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".jp2",
    ".avif",
)
SPLIT_FILE = "split.csv"
# The splits of whole classes.
OF_CLASSES = ("train", "val", "test")


def load(
    root: str | Path, datasets: Sequence[str] | None = None, split: str | Path | None = None
) -> Benchmark:
    """Read the datasets under `root` (None: all), images sorted by class and name.

    `split` is a file like `root/split.csv`, in its place, of those images alone that are to be
    used.  Images in subfolders of a class, and pipes called like images, are left out with a
    warning.  Raises ValueError, which names what is empty or bad.
    """
    root = Path(root).expanduser()
    places = _dataset_places(root)
    found = list(places)
    check_known("dataset", datasets or [], found)
    chosen = found if datasets is None else datasets
    images = _listed(root, {name: places[name] for name in chosen})

    own_split = root / SPLIT_FILE
    if split is not None:
        table = _SplitTable.read(Path(split))
        images["split"] = table.splits(images, found, root)
        images = images.dropna().reset_index(drop=True)
    elif own_split.is_file():
        table = _SplitTable.read(own_split)
        images["split"] = table.splits(images, found, root)
        table.check_complete(images)

    images["label"] = images.groupby(["dataset", "class_name"], sort=False).ngroup()
    if "split" not in images:
        images["split"] = _halves(images)
    return Benchmark("folders", images[COLUMNS], root=root)


def state(root: Path, datasets: Sequence[str] | None, split: Path | None) -> str:
    """A digest of the names of all that `load` would read, and of what changes with its contents.

    Its cost is a question to the file system per image: 20,000 take a tenth of a second.
    """
    root = Path(root).expanduser()
    seen = []
    for file in (root / SPLIT_FILE, split):
        if file is not None and file.is_file():
            seen.append(_noted(str(file), file.stat()))
    seen += [entry.name for entry in _visible(root)]
    for folder in _class_folders(root, datasets):
        seen.append(folder.path)
        for entry in _visible(Path(folder.path)):
            seen.append(_noted(entry.name, _stat(entry)))
    return hashlib.sha256(os.fsencode("\n".join(seen))).hexdigest()


READER = Reader(load, needs_root=True, upright=True, options=("split",), state=state)


def _noted(name: str, stat: os.stat_result) -> str:
    return f"{name} {paths.state(stat)}"


def _stat(entry: os.DirEntry[str]) -> os.stat_result:
    """What is known of a file, or of the link where it leads nowhere."""
    try:
        return entry.stat()
    except OSError:
        return entry.stat(follow_symlinks=False)


# ---- names of folders and files


@dataclass
class _LeftOut:
    """Paths below the root that look like images and are not used."""

    nested: list[str] = field(default_factory=list)  # in a subfolder of a class
    special: list[str] = field(default_factory=list)  # pipes, sockets and devices

    def warn(self, root: Path) -> None:
        if self.nested:
            what = (
                f"{root}: {len(self.nested)} images lie in subfolders of classes and are left out"
            )
            remedy = "move them to <root>/<dataset>/<class>/"
            warnings.warn(f"{what}, for instance {min(self.nested)}; {remedy}", stacklevel=4)
        if self.special:
            what = f"{root}: {len(self.special)} pipes, sockets or devices are called like images"
            text = f"{what} and are left out, for instance {min(self.special)}"
            warnings.warn(text, stacklevel=4)


def _dataset_places(root: Path) -> dict[str, str]:
    """The names of the datasets, and where each lies below `root`: "", or its name and "/"."""
    if _is_one_dataset(root):
        return {root.absolute().name: ""}
    return {name: f"{name}/" for name in _folder_names(root, "dataset folder")}


def _is_one_dataset(root: Path) -> bool:
    """Whether the folders in `root` are classes: none holds a folder, and one holds an image."""
    found = False
    for folder in _visible(root):
        for entry in _visible(Path(folder.path)):
            if entry.is_dir():
                return False
            found = found or _is_image_name(entry.name)
    return found


def _class_folders(root: Path, datasets: Sequence[str] | None) -> list[os.DirEntry[str]]:
    """What lies where the classes of these datasets (None: all) should be, in no order."""
    inside = _visible(root)
    if _is_one_dataset(root):
        return inside
    folders = []
    for dataset in inside:
        if datasets is None or dataset.name in datasets:
            folders += _visible(Path(dataset.path))
    return folders


def _listed(root: Path, places: Mapping[str, str]) -> pd.DataFrame:
    """A row per image of these datasets, whose `places` are known: path, class_name and dataset."""
    left_out = _LeftOut()
    rows = []
    for dataset, place in places.items():
        for name in _folder_names(root / place, "class folder"):
            for file in _image_names(root, f"{place}{name}", left_out):
                rows.append((f"{place}{name}/{file}", name, dataset))
    left_out.warn(root)
    return pd.DataFrame(rows, columns=["path", "class_name", "dataset"])


def _folder_names(folder: Path, what: str) -> list[str]:
    """The sorted names of the folders in a folder, which are to be a `what` each."""
    names = [entry.name for entry in _visible(folder) if entry.is_dir()]
    return _checked_names(folder, names, what)


def _image_names(root: Path, place: str, left_out: _LeftOut) -> list[str]:
    """The sorted names of the images in the folder `place` of a class."""
    names = []
    for entry in _visible(root / place):
        if entry.is_dir():
            left_out.nested.extend(_images_below(root, f"{place}/{entry.name}"))
        elif not _is_image_name(entry.name):
            continue
        # A link that leads nowhere counts as an image: that it cannot be read is said later.
        elif entry.is_file() or not Path(entry.path).exists():
            names.append(entry.name)
        else:
            left_out.special.append(f"{place}/{entry.name}")
    return _checked_names(root / place, names, "image")


def _images_below(root: Path, place: str) -> Iterator[str]:
    """The paths of images in a folder, at any depth."""
    for folder, inner, names in os.walk(root / place):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and _is_image_name(name):
                yield Path(folder, name).relative_to(root).as_posix()


def _is_image_name(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder holds, without hidden and macOS `._*` files; nothing where it is none."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _checked_names(folder: Path, names: list[str], what: str) -> list[str]:
    """These names in order; ValueError where there is none, or one is not UTF-8."""
    names = sorted(names)
    for name in names:
        if name.encode("utf-8", "ignore").decode() != name:
            raise ValueError(f"{folder}: the name {os.fsencode(name)!r} is not UTF-8; rename it")
    if not names:
        layout = "<root>/<dataset>/<class>/<image> or, of one dataset, <root>/<class>/<image>"
        expected = f"{layout} ({', '.join(EXTENSIONS)})"
        remedy = "fill it, remove it or name another root"
        raise ValueError(f"{folder} holds no {what}; expected {expected}: {remedy}")
    return names


# ---- which images are for training


def _halves(images: pd.DataFrame) -> np.ndarray:
    """The split of each image where none is given: a dataset's first half of classes is train."""
    labels = images.groupby("dataset")["label"]
    place = labels.rank("dense")
    half = (labels.transform("nunique") + 1) // 2
    return np.where(place <= half, "train", "test")


@dataclass(frozen=True)
class _SplitTable:
    """The rows of a split file, by class or by image."""

    file: Path
    by_class: bool
    rows: pd.DataFrame  # indexed by the lines of the file

    @classmethod
    def read(cls, file: Path) -> "_SplitTable":
        """Read a file; ValueError where it is no CSV, has other columns or an empty cell."""
        try:
            rows = read_cells(file)
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error})") from None
        if "path" in rows and "label" in rows:
            what = "the class of an image is its folder"
            raise ValueError(f"{file}: columns {list(rows)}; {what}: remove the column label")
        # As `pumalib.evaluate` calls it.
        named = rows.rename(columns={"label": "class_name"})
        by_class = sorted(named) == ["class_name", "dataset", "split"]
        if not by_class and sorted(named) != ["path", "split"]:
            expected = "dataset,class_name,split (or label for class_name), or path,split"
            raise ValueError(f"{file}: columns {list(rows)}; expected {expected}")
        check_cells(file, named, named)
        return cls(file, by_class, named)

    @property
    def what(self) -> str:
        """What a row is about."""
        return "class" if self.by_class else "image"

    def keys(self, table: pd.DataFrame) -> pd.Series:
        """What rows of `table`, be they ours or of the images, are told apart by."""
        if self.by_class:
            return table["dataset"] + "/" + table["class_name"]
        return table["path"]

    def splits(self, images: pd.DataFrame, found: Sequence[str], root: Path) -> pd.Series:
        """The split of each of `images`, NaN where the file has none; ValueError at a bad row.

        Rows of datasets that are `found` under `root` and not among the images are passed over.
        """
        not_loaded = set(found) - set(images["dataset"])
        given = self.keys(self.rows)
        given = given[~given.str.split("/").str[0].isin(not_loaded)]
        split = self.rows["split"][given.index]
        keys = self.keys(images)

        allowed = OF_CLASSES if self.by_class else SPLITS
        problems = {
            f"no such {self.what} under {root}": ~given.isin(keys),
            f"the split of a {self.what} must be one of {', '.join(allowed)}": ~split.isin(allowed),
        }
        for problem, wrong in problems.items():
            if wrong.any():
                line = given.index[wrong][0]
                row = f"{given[line]},{split[line]}"
                raise ValueError(f"{self.file}, line {line}: {row}: {problem}")
        check_once(self.file, given, self.what)
        return keys.map(dict(zip(given, split)))

    def check_complete(self, images: pd.DataFrame) -> None:
        """Raise ValueError where one of `images` has no split."""
        left = self.keys(images)[images["split"].isna()]
        if len(left):
            what = f"no split for {self.what} {left.iloc[0]!r}"
            raise ValueError(f"{self.file}: {what}; add rows or move out what is not meant")
