"""The eight datasets of the paper (Table 1), read from their original archives, unpacked.

For a dataset without a metric-learning split of its own, the first half (rounded up) of its sorted
classes is train.  `paper_datasets.yaml` lists the source and the sizes of each.
"""

import functools
import os
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from .. import paths
from .table import COLUMNS, Benchmark, Reader, check_known

# The folder of the datasets for `python -m pumalib data`, relative to the project.
DEFAULT_ROOT = "data/raw"


class Archive(NamedTuple):
    """An archive that can be downloaded freely."""

    url: str
    md5: str
    into: str  # the folder under the root to unpack into


@dataclass(frozen=True)
class Dataset:
    """One dataset, as `paper_datasets.yaml` describes it."""

    name: str
    format: str  # the format of its annotations, a key of `_FORMATS`
    folder: str  # the usual name of its folder
    files: tuple[str, ...]  # annotation files; any of them identifies the dataset
    images: str  # the folder of its images
    counts: dict[str, tuple[int, int]]  # images and classes of each split (Table 1)
    archives: tuple[Archive, ...] = ()  # empty where it has to be fetched by hand
    by_hand: str = ""  # instructions where there are no archives
    uuid_keys: bool = False  # True for NABirds, whose image keys are UUIDs; CUB has the same files


@functools.cache
def all_datasets() -> dict[str, Dataset]:
    """The eight datasets by name, in the order of Table 1."""
    content = yaml.safe_load(_package_file("paper_datasets.yaml"))
    return {name: _described(name, entry) for name, entry in content.items()}


def _described(name: str, entry: dict[str, Any]) -> Dataset:
    archives = tuple(Archive(*archive) for archive in entry.pop("archives", ()))
    files = tuple(entry.pop("files"))
    counts = {split: tuple(both) for split, both in entry.pop("counts").items()}
    return Dataset(name=name, archives=archives, files=files, counts=counts, **entry)


def _package_file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def expected() -> pd.DataFrame:
    """Table 1: a row per dataset and split, with its numbers of images and classes."""
    rows = []
    for dataset in all_datasets().values():
        for split, (images, classes) in dataset.counts.items():
            rows.append((dataset.name, split, images, classes))
    return pd.DataFrame(rows, columns=["dataset", "split", "images", "classes"])


def load(root: str | Path, datasets: Sequence[str] | None = None, strict: bool = True) -> Benchmark:
    """Read the named datasets of the paper (None: all eight) under `root`.

    Raises ValueError where one is missing or damaged.  Missing images, or counts that differ from
    Table 1, raise ValueError if `strict`; otherwise they are warnings, and missing images are left
    out.
    """
    root = Path(root).expanduser()
    known = all_datasets()
    names = list(known) if datasets is None else list(datasets)
    check_known("dataset", names, known)
    parts = []
    for name, folder in _folders(root, names).items():
        parts.append(_read_dataset(root, folder, known[name], strict))
    images = pd.concat(parts, ignore_index=True)
    images["label"] = images.groupby(["dataset", "id"], sort=False).ngroup()
    return Benchmark("paper", images[COLUMNS], root=root)


def state(root: Path, datasets: Sequence[str] | None, split: Path | None) -> str:
    """Sizes and modification times of the annotation files.

    Not of the 289,000 images: on a network disk that would take minutes.
    """
    root = Path(root).expanduser()
    seen = []
    for name, dataset in all_datasets().items():
        if datasets is not None and name not in datasets:
            continue
        folder = find(root, name)
        for path in dataset.files:
            if folder is not None and (folder / path).is_file():
                stat = (folder / path).stat()
                seen.append(f"{folder / path} {stat.st_size} {stat.st_mtime_ns}")
    return "\n".join(seen)


READER = Reader(load, needs_root=True, options=("strict",), state=state, expected=expected)


# ---- where a dataset lies


def find(root: Path, name: str) -> Path | None:
    """The folder of dataset `name`: `root` itself or a folder at most two levels below it.

    None where it is not found.
    """
    dataset = all_datasets()[name]
    below = [*sorted(root.glob("[!.]*/")), *sorted(root.glob("[!.]*/[!.]*/"))]
    for folder in [root, *below]:
        if _is_folder_of(dataset, folder):
            return folder
    return None


def _is_folder_of(dataset: Dataset, folder: Path) -> bool:
    files = [folder / file for file in dataset.files if (folder / file).is_file()]
    if not files:
        return False
    if dataset.format == "birds":
        return _has_uuids(files[0]) == dataset.uuid_keys
    return True


def _has_uuids(file: Path) -> bool:
    """Whether the keys in the first column are UUIDs: a dash follows their first eight letters."""
    return "-" in file.read_text("utf-8", "replace")[:9]


def _folders(root: Path, names: list[str]) -> dict[str, Path]:
    """The folder of each named dataset; ValueError if one is not found."""
    folders = {}
    lost = []
    for name in names:
        folder = find(root, name)
        if folder is None:
            dataset = all_datasets()[name]
            files = ", ".join(dataset.files)
            lost.append(f"{name}: {dataset.folder}/ with {files}; images in {dataset.images}")
        else:
            folders[name] = folder
    if lost:
        remedy = f"`{download_command(root)}` fetches them or says how to get them"
        raise ValueError("\n  ".join([f"not found under {root}; {remedy}", *lost]))
    return folders


def download_command(root: Path) -> str:
    """The command that fetches datasets into `root`, or says how to get them."""
    words = ["python", "-m", "pumalib", "data", "download"]
    if root.resolve() != paths.resolve(DEFAULT_ROOT).resolve():
        words += ["--root", str(root)]
    return shlex.join(words)


# ---- a dataset as a table


def annotations(name: str, folder: Path) -> pd.DataFrame:
    """Read the annotation files in `folder`: a table of `path`, `id`, `class_name` and `split`.

    Raises ValueError where they are missing or damaged.
    """
    try:
        rows = list(_FORMATS[all_datasets()[name].format](folder))
        if not rows:
            raise ValueError("they name no image")
    except ImportError:
        raise
    # Damaged files raise nearly anything.
    except Exception as error:
        what = f"dataset {name!r}: annotation files in {folder} are missing or damaged"
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{what} ({why}); unpack the dataset again") from error
    table = pd.DataFrame(rows, columns=_Row._fields)
    if table["split"].isna().all():
        place = table["id"].rank(method="dense")
        table["split"] = np.where(place <= (place.max() + 1) // 2, "train", "test")
    return table


def _read_dataset(root: Path, folder: Path, dataset: Dataset, strict: bool) -> pd.DataFrame:
    """Read a dataset's rows; missing images are a ValueError or, if not `strict`, warnings."""
    table = annotations(dataset.name, folder)
    problems = []
    there = _are_there(folder, table["path"])
    if not there.all():
        lost = table["path"][~there]
        what = f"{len(lost):,} of {len(table):,} images are missing"
        example = f"for instance {folder / lost.iloc[0]}"
        problems.append(f"{what}, {example}; unpack the original archive again")
        table = table[there].reset_index(drop=True)
    problems += _wrong_counts(folder, table, dataset)
    for problem in problems:
        if strict:
            raise ValueError(f"dataset {dataset.name!r}: {problem}, or go on with strict=False")
        warnings.warn(f"dataset {dataset.name!r}: {problem}", stacklevel=4)
    prefix = f"{folder.relative_to(root).as_posix()}/".removeprefix("./")
    return table.assign(dataset=dataset.name, path=prefix + table["path"])


def _are_there(folder: Path, files: pd.Series) -> np.ndarray:
    """Whether each file exists.

    Each folder is listed once: 289,000 single checks would take minutes.
    """
    places = files.str.rpartition("/")
    listed: dict[str, set[str]] = {}
    for parent in places[0].unique():
        listed[parent] = set()
        if (folder / parent).is_dir():
            with os.scandir(folder / parent) as entries:
                listed[parent] = {entry.name for entry in entries}
    return np.array([name in listed[parent] for parent, name in zip(places[0], places[2])])


def _wrong_counts(folder: Path, table: pd.DataFrame, dataset: Dataset) -> list[str]:
    """A sentence for each split whose counts differ from Table 1."""
    problems = []
    for split, printed in dataset.counts.items():
        rows = table[table["split"] == split]
        found = (len(rows), rows["id"].nunique())
        if found != printed:
            here = "{:,} images of {:,} classes".format(*found)
            there = "{:,} images of {:,} classes".format(*printed)
            what = f"{folder}: {here} in {split}, Table 1 expects {there}"
            problems.append(f"{what}; unpack the archive again")
    return problems


# ---- the original formats


class _Row(NamedTuple):
    """The annotation of an image."""

    path: str
    id: int | str  # the id of its class; classes are sorted by it
    class_name: str
    split: str | None = None  # where the dataset has its own


def _birds(folder: Path) -> Iterator[_Row]:
    """Read CUB-200-2011 or NABirds."""
    images = dict(_records(folder / "images.txt", 2))
    labels = dict(_records(folder / "image_class_labels.txt", 2))
    names = dict(_records(folder / "classes.txt", 2))
    odd = images.keys() ^ labels.keys()
    if odd:
        count = f"{len(odd)} images, as {min(odd)!r}"
        raise ValueError(f"images.txt and image_class_labels.txt differ in {count}")
    for image, path in images.items():
        label = labels[image]
        yield _Row(f"images/{path}", int(label), names[label])


def _cars(folder: Path) -> Iterator[_Row]:
    """Read Cars-196 in either form.

    cars_annos.mat with car_ims/, or devkit/ with cars_train/ and cars_test/.
    """
    one_file = (folder / "cars_annos.mat").is_file()
    one_folder = (folder / "car_ims").is_dir()
    devkit = (folder / "devkit").is_dir()
    if one_file and (one_folder or not devkit):
        return _cars_of_one_file(folder)
    return _cars_of_devkit(folder)


def _cars_of_one_file(folder: Path) -> Iterator[_Row]:
    file = folder / "cars_annos.mat"
    names = _matlab(file, "class_names")
    return _cars_of(file, "relative_im_path", "", names)


def _cars_of_devkit(folder: Path) -> Iterator[_Row]:
    devkit = folder / "devkit"
    names = _matlab(devkit / "cars_meta.mat", "class_names")
    yield from _cars_of(devkit / "cars_train_annos.mat", "fname", "cars_train/", names)
    # The labels of the test images are distributed as a separate file.
    test = folder / "cars_test_annos_withlabels.mat"
    if not test.is_file():
        test = devkit / test.name
    yield from _cars_of(test, "fname", "cars_test/", names)


def _cars_of(file: Path, key: str, prefix: str, names: np.ndarray) -> Iterator[_Row]:
    """Yield the images of one annotation file, which has their paths in the field `key`."""
    annotations = _matlab(file, "annotations")
    if not {"class", key} <= set(annotations.dtype.names or ()):
        what = f"{file}: annotations have no 'class' and {key!r}"
        raise ValueError(f"{what}; the file with labels is needed")
    for path, label in zip(annotations[key], annotations["class"]):
        yield _Row(f"{prefix}{path}", *_numbered(label, names, file))


def _sop(folder: Path) -> Iterator[_Row]:
    """Read Stanford Online Products: a class is one product, named by its kind and number."""
    header = "image_id class_id super_class_id path"
    for split in ("train", "test"):
        for _, label, _, path in _records(folder / f"Ebay_{split}.txt", 4, header):
            kind = path.split("/")[0].removesuffix("_final")
            yield _Row(path, label, f"{kind} {label}", split)


def _inshop(folder: Path) -> Iterator[_Row]:
    """Read In-Shop: Eval/list_eval_partition.txt and Img/img/, with queries and a gallery."""
    file = folder / "Eval" / "list_eval_partition.txt"
    splits = all_datasets()["inshop"].counts
    for path, item, split in _records(file, 3, "image_name item_id evaluation_status"):
        check_known("split", [split], splits)
        yield _Row(f"Img/{path}", item, item, split)


def _dogs(folder: Path) -> Iterator[_Row]:
    """Read Stanford Dogs."""
    images = _matlab(folder / "file_list.mat", "file_list")
    labels = _matlab(folder / "file_list.mat", "labels")
    for path, label in zip(images, labels.tolist(), strict=True):
        yield _Row(f"Images/{path}", label, str(path).split("/")[0])


def _flowers(folder: Path) -> Iterator[_Row]:
    """Read Flowers-102: imagelabels.mat, setid.mat and jpg/.

    Images are in the order of the three sets, as in the authors' code.  The archive has no class
    names; flowers_classes.txt has them from the dataset's web page.
    """
    names = _package_file("flowers_classes.txt").splitlines()
    file = folder / "imagelabels.mat"
    labels = _matlab(file, "labels").tolist()
    sets = [_matlab(folder / "setid.mat", name) for name in ("trnid", "valid", "tstid")]
    for image in np.concatenate(sets).tolist():
        yield _Row(f"jpg/image_{image:05d}.jpg", *_numbered(labels[image - 1], names, file))


def _aircraft(folder: Path) -> Iterator[_Row]:
    """Read FGVC-Aircraft."""
    for part in ("trainval", "test"):
        for image, name in _records(folder / "data" / f"images_variant_{part}.txt", 2):
            yield _Row(f"data/images/{image}.jpg", name, name)


_FORMATS: dict[str, Callable[[Path], Iterator[_Row]]] = {
    "birds": _birds,
    "cars": _cars,
    "sop": _sop,
    "inshop": _inshop,
    "dogs": _dogs,
    "flowers": _flowers,
    "aircraft": _aircraft,
}


def _records(file: Path, columns: int, header: str = "") -> list[list[str]]:
    """The values of each line below `header`, one of the first two lines.

    The last value of a line may hold spaces.
    """
    text = file.read_text("utf-8-sig")
    lines = [line.strip().split(None, columns - 1) for line in text.splitlines()]
    start = 0
    if header:
        if header.split() not in lines[:2]:
            raise ValueError(f"{file}: no header {header!r}")
        start = lines.index(header.split()) + 1
    for number, values in enumerate(lines[start:], start + 1):
        if len(values) not in (0, columns):
            raise ValueError(f"{file}, line {number}: {values}; expected {columns} values")
    return [values for values in lines[start:] if values]


def _matlab(file: Path, name: str) -> np.ndarray:
    """The variable `name` of a Matlab file, as an array of one dimension or more."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ImportError(f"{file} is read by scipy: pip install scipy") from error
    with file.open("rb") as stream:
        return np.atleast_1d(loadmat(stream, squeeze_me=True, variable_names=[name])[name])


def _numbered(label: Any, names: Sequence[str] | np.ndarray, file: Path) -> tuple[int, str]:
    """The class number, from 1 on, as an int, and the class's name.

    Matlab stores numbers in many types.  ValueError if there is no such class.
    """
    if str(label).removesuffix(".0").isdecimal() and 1 <= label <= len(names):
        return int(label), str(names[int(label) - 1])
    raise ValueError(f"{file}: class {label} is not in 1 to {len(names)}")
