"""Your own images: `root/<dataset>/<class>/*.jpg`, or one dataset as `root/<class>/*.jpg`.

One dataset alone is named after its folder.  By default the first half (rounded up) of a dataset's
sorted classes is train, the rest test.  A file `root/split.csv` overrides this, for every class
(columns `dataset,class_name,split`, or `label` for `class_name`; train, val or test) or for every
image (`path,split`; train, val, test, query or gallery; the path is relative to root) of the
datasets that are loaded.  A split file elsewhere, named by a run (`Data.split`), also selects:
images that it does not list are left out.

Classes of `val` are neither trained on nor tested.  They serve to choose settings without looking
at the test classes: `Data.holdout` tests on them, and `Training.score_epochs` scores epochs on
them.
"""

import hashlib
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
# Other image formats of cameras and programs: such files are not read, and a message says so.
OTHER_EXTENSIONS = (
    ".heic",
    ".heif",
    ".hif",
    ".jpe",
    ".jxl",
    ".j2k",
    ".jpx",
    ".pbm",
    ".pnm",
    ".apng",
    ".tga",
    ".psd",
    ".xcf",
    ".svg",
    ".eps",
    ".ico",
    ".pcx",
    ".dds",
    ".exr",
    ".hdr",
    ".dcm",
    ".dng",
    ".raw",
    ".crw",
    ".cr2",
    ".cr3",
    ".nef",
    ".arw",
    ".srw",
    ".pef",
    ".x3f",
    ".orf",
    ".raf",
    ".rw2",
)
SPLIT_FILE = "split.csv"
# Words that mark a folder's name as a split, not a dataset.
_SPLIT_NAMES = frozenset(
    {"train", "training", "val", "valid", "validation", "dev", "test", "testing", "query"}
    | {"gallery"}
)
# The splits that a whole class can have.
OF_CLASSES = ("train", "val", "test")


def load(
    root: str | Path, datasets: Sequence[str] | None = None, split: str | Path | None = None
) -> Benchmark:
    """Read the `datasets` (None: all) under `root`, images sorted by class and name.

    `split` is a file like `root/split.csv`, used in its place; images that it does not list are
    left out.  Images outside a class folder or in its subfolders are left out with a warning, as
    are the files that `look` leaves out.  Raises ValueError, which names what is empty or bad.
    """
    root = Path(root).expanduser()
    left_out = LeftOut()
    places = _dataset_places(root, left_out)
    found = list(places)
    chosen = found
    if datasets is None:
        _refuse_splits(root, found)
    else:
        check_known("dataset", datasets, found)
        chosen = list(datasets)
        # No warnings about datasets that are not loaded.
        left_out = LeftOut()
    images = _listed(root, {name: places[name] for name in chosen}, left_out)
    left_out.warn(root)

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
        _refuse_split_classes(root, images)
        images["split"] = _halves(images)
    return Benchmark("folders", images[COLUMNS], root=root)


def state(root: Path, datasets: Sequence[str] | None, split: Path | None) -> str:
    """A digest of the names and the `paths.state` of all files that `load` would read.

    It asks the file system once per image: a tenth of a second for 20,000 images.
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
            # For a broken link, the state of the link itself.
            known = _state(entry) or entry.stat(follow_symlinks=False)
            seen.append(_noted(entry.name, known))
    return hashlib.sha256(os.fsencode("\n".join(seen))).hexdigest()


READER = Reader(load, needs_root=True, upright=True, options=("split",), state=state)


def _noted(name: str, state: os.stat_result) -> str:
    return f"{name} {paths.state(state)}"


# ---- listing a folder: for training, embedding and indexing


@dataclass
class LeftOut:
    """Paths below a folder that look like images and are not used, by reason."""

    nested: list[str] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)
    dangling: list[str] = field(default_factory=list)
    not_utf8: list[str] = field(default_factory=list)
    other_format: list[str] = field(default_factory=list)
    without_extension: list[str] = field(default_factory=list)
    looping: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """A sentence for each reason that applies, with the number of paths and an example."""
        kinds = {
            "images lie in subfolders of classes and are left out": self.nested,
            "images lie in no folder of a class and are left out": self.loose,
            "pipes, sockets or devices are called like images and are left out": self.special,
            "links lead nowhere and are left out": self.dangling,
            "names are not UTF-8 and are left out": self.not_utf8,
            "images of formats that are not read are left out": self.other_format,
            "files have no extension and are left out": self.without_extension,
            "links lead back to a folder around them and are not followed": self.looping,
            "folders may not be read and are left out": self.closed,
        }
        remedies = {
            "nested": "; move them to <root>/<dataset>/<class>/",
            "loose": "; move them to <root>/<dataset>/<class>/",
            "not_utf8": "; rename them",
            "other_format": f"; save them as one of {', '.join(EXTENSIONS)}",
            "without_extension": "; name them <name>.jpg or the like where they are images",
        }
        lines = []
        for (what, found), name in zip(kinds.items(), vars(self)):
            if found:
                example = paths.printable(min(found))
                lines.append(
                    f"{len(found):,} {what}, for instance {example}{remedies.get(name, '')}"
                )
        return lines

    def warn(self, root: Path) -> None:
        """Warn once for each reason that applies to paths below `root`."""
        for line in self.lines():
            warnings.warn(f"{root}: {line}", stacklevel=4)


@dataclass(frozen=True)
class Level:
    """The contents of one folder, not of its subfolders."""

    images: dict[str, os.stat_result]  # by name
    folders: list[str]  # their names; a link to a folder is one


def read_level(folder: Path, place: str, left_out: LeftOut) -> Level:
    """The images and folders in a folder; `place` is its path in `left_out` (ending in "/", or "").

    Hidden files and macOS' `._*` are ignored.  Pipes, broken links, names that are not UTF-8, files
    of other formats or without an extension, and a folder that may not be read are added to
    `left_out`.
    """
    images = {}
    folders = []
    try:
        entries = _visible(folder)
    except PermissionError:
        left_out.closed.append(place)
        return Level({}, [])
    for entry in entries:
        path = f"{place}{entry.name}"
        state = _state(entry)
        is_folder = state is not None and stat.S_ISDIR(state.st_mode)
        is_image = _is_image_name(entry.name)
        # A broken link may have led to a folder, so its name need not be an image's.
        is_dangling = state is None and entry.is_symlink()
        if entry.name.lower().endswith(OTHER_EXTENSIONS) and not is_folder:
            left_out.other_format.append(path)
        elif not is_image and not is_folder and not is_dangling:
            if "." not in entry.name and entry.is_file():
                left_out.without_extension.append(path)
        elif not _is_utf8(entry.name):
            left_out.not_utf8.append(path)
        elif state is None:
            left_out.dangling.append(path)
        elif is_folder:
            folders.append(entry.name)
        elif stat.S_ISREG(state.st_mode):
            images[entry.name] = state
        else:
            left_out.special.append(path)
    return Level(images, folders)


def walk(folder: Path, left_out: LeftOut) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and the file state of each image in a folder and its subfolders.

    Links to folders are followed, except one that leads back to a folder around it.
    """
    yield from _walk(folder, "", (), left_out)


def _walk(
    folder: Path, place: str, around: tuple[tuple[int, int], ...], left_out: LeftOut
) -> Iterator[tuple[str, os.stat_result]]:
    state = folder.stat()
    inode = (state.st_dev, state.st_ino)
    if inode in around:
        left_out.looping.append(place.rstrip("/"))
        return
    level = read_level(folder, place, left_out)
    for name, image in level.images.items():
        yield f"{place}{name}", image
    for name in level.folders:
        yield from _walk(folder / name, f"{place}{name}/", (*around, inode), left_out)


def _state(entry: os.DirEntry[str]) -> os.stat_result | None:
    """The state of a file, or of a link's target; None for a broken link."""
    try:
        return entry.stat()
    except OSError:
        return None


def _is_utf8(name: str) -> bool:
    return name.encode("utf-8", "ignore").decode() == name


# ---- names of folders and files


def called_like_splits(names: Iterable[str], *, wholly: bool = False) -> list[str]:
    """The folder names that look like splits ("train", "test2017", "val_images"), sorted.

    `wholly`: those without another word, as classes may be called "bullet train" and "test tube".
    Empty if only one does: its name may mean anything.
    """
    found = []
    for name in sorted(names):
        words = set(re.findall("[a-z]+", name.lower()))
        of_splits = words & _SPLIT_NAMES
        if of_splits and (not wholly or of_splits == words):
            found.append(name)
    return found if len(found) > 1 else []


def _refuse_splits(root: Path, found: Sequence[str]) -> None:
    """Raise ValueError if folders have names of splits: they are no datasets."""
    splits = called_like_splits(found)
    if not splits:
        return
    names = " and ".join(splits)
    what = f"{root}: {names} are names of splits, and would be taken for datasets"
    why = "a class is either trained on or tested here"
    remedy = (
        f"put all classes into one folder, <root>/<class>/, and say in <root>/{SPLIT_FILE} "
        "(dataset,class_name,split) which is which"
    )
    raise ValueError(f"{what}; {why}: {remedy}; or, if they are datasets, name them in `datasets`")


def _refuse_split_classes(root: Path, images: pd.DataFrame) -> None:
    """Raise ValueError if classes of a dataset have names of splits, and no file says otherwise."""
    for dataset, names in images.groupby("dataset")["class_name"].unique().items():
        splits = called_like_splits(names, wholly=True)
        if splits:
            what = f"{root}: the folders {' and '.join(splits)} are called like splits"
            why = f"and would be taken for classes of {dataset!r}"
            remedy = (
                f"give each class one folder, or, if they are classes, name them in "
                f"<root>/{SPLIT_FILE} (dataset,class_name,split)"
            )
            raise ValueError(f"{what}, {why}; {remedy}")


def _dataset_places(root: Path, left_out: LeftOut) -> dict[str, str]:
    """The datasets by name, with the place of each below `root`: "", or its name and "/"."""
    if _is_one_dataset(root):
        return {root.absolute().name: ""}
    return {name: f"{name}/" for name in _folder_names(root, "", "dataset folder", left_out)}


def _is_one_dataset(root: Path) -> bool:
    """Whether the folders in `root` are classes: none has a subfolder, and one holds an image."""
    found = False
    for folder in _visible(root):
        for entry in _visible(Path(folder.path)):
            if _is_folder(entry):
                return False
            found = found or _is_image_name(entry.name)
    return found


def _class_folders(root: Path, datasets: Sequence[str] | None) -> list[os.DirEntry[str]]:
    """The entries where the class folders of these datasets (None: all) should be, unordered."""
    inside = _visible(root)
    if _is_one_dataset(root):
        return inside
    folders = []
    for dataset in inside:
        if datasets is None or dataset.name in datasets:
            folders += _visible(Path(dataset.path))
    return folders


def _listed(root: Path, places: Mapping[str, str], left_out: LeftOut) -> pd.DataFrame:
    """A row per image of the datasets in `places`: path, class_name and dataset."""
    rows = []
    for dataset, place in places.items():
        for name in _folder_names(root, place, "class folder", left_out):
            for file in _image_names(root, f"{place}{name}", left_out):
                rows.append((f"{place}{name}/{file}", name, dataset))
    return pd.DataFrame(rows, columns=["path", "class_name", "dataset"])


def _folder_names(root: Path, place: str, what: str, left_out: LeftOut) -> list[str]:
    """The sorted names of the folders in the folder `place`; errors call each a `what`."""
    level = read_level(root / place, place, left_out)
    left_out.loose.extend(f"{place}{name}" for name in level.images)
    # Not `level.folders`: a folder whose name is not UTF-8 is an error here, not left out.
    names = [entry.name for entry in _visible(root / place) if _is_folder(entry)]
    return _checked_names(root / place, names, what)


def _image_names(root: Path, place: str, left_out: LeftOut) -> list[str]:
    """The sorted names of the images in the class folder `place`."""
    level = read_level(root / place, f"{place}/", left_out)
    for name in level.folders:
        inside = f"{place}/{name}"
        # One warning, that images are nested, is enough for all that is in subfolders.
        nested = walk(root / inside, LeftOut())
        left_out.nested.extend(f"{inside}/{path}" for path, _ in nested)
    return _checked_names(root / place, list(level.images), "image")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    state = _state(entry)
    return state is not None and stat.S_ISDIR(state.st_mode)


def _is_image_name(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder without hidden and macOS `._*` files; [] if it is no folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _checked_names(folder: Path, names: list[str], what: str) -> list[str]:
    """The `names`, sorted; ValueError if there are none, or one is not UTF-8."""
    names = sorted(names)
    for name in names:
        if not _is_utf8(name):
            raise ValueError(f"{folder}: the name {os.fsencode(name)!r} is not UTF-8; rename it")
    if not names:
        layout = "<root>/<dataset>/<class>/<image> or, of one dataset, <root>/<class>/<image>"
        expected = f"{layout} ({', '.join(EXTENSIONS)})"
        remedy = "fill it, remove it or name another root"
        raise ValueError(f"{folder} holds no {what}; expected {expected}: {remedy}")
    return names


# ---- which images are for training


def _halves(images: pd.DataFrame) -> np.ndarray:
    """The default split of each image: the first half of a dataset's classes is train."""
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
        """Read a split file; ValueError if it is no CSV, has other columns or an empty cell."""
        try:
            rows = read_cells(file)
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error})") from None
        if "path" in rows and "label" in rows:
            what = "the class of an image is its folder"
            raise ValueError(f"{file}: columns {list(rows)}; {what}: remove the column label")
        # `pumalib.evaluate` calls the class `label`.
        named = rows.rename(columns={"label": "class_name"})
        by_class = sorted(named) == ["class_name", "dataset", "split"]
        if not by_class and sorted(named) != ["path", "split"]:
            expected = "dataset,class_name,split (or label for class_name), or path,split"
            raise ValueError(f"{file}: columns {list(rows)}; expected {expected}")
        check_cells(file, named, named)
        return cls(file, by_class, named)

    @property
    def what(self) -> str:
        """Whether a row is about a "class" or an "image"."""
        return "class" if self.by_class else "image"

    def keys(self, table: pd.DataFrame) -> pd.Series:
        """The key of each row of `table`: "dataset/class" or, for images, its path."""
        if self.by_class:
            return table["dataset"] + "/" + table["class_name"]
        return table["path"]

    def splits(self, images: pd.DataFrame, found: Sequence[str], root: Path) -> pd.Series:
        """The split of each of `images`, NaN where the file has none; ValueError at a bad row.

        Rows about datasets that are `found` under `root`, but not among the images, are ignored.
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
        """Raise ValueError if one of `images` has no split."""
        left = self.keys(images)[images["split"].isna()]
        if len(left):
            what = f"no split for {self.what} {left.iloc[0]!r}"
            raise ValueError(f"{self.file}: {what}; add rows or move out what is not meant")
