"""The eight datasets of the paper (Table 1), each from its original distribution exactly as it unpacks.

Each reader only builds a table of paths, classes and splits from the annotation files of one dataset.  Where a
dataset has no split of its own for metric learning, the first half (rounded up) of its sorted classes is train.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from . import COLUMNS, Benchmark, check_known
from .annotations import class_number, matlab, numbered_lines, pairs

STANDARD = ("cub", "cars", "sop", "inshop")  # the four of Table 10

# Flowers-102 is distributed without its class names; these are from its web page, for classes 1 to 102.
_FLOWERS = """
pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily, moon orchid, bird
of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle, yellow iris, globe-flower,
purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire lily, pincushion flower, fritillary, red
ginger, grape hyacinth, corn poppy, prince of wales feathers, stemless gentian, artichoke, sweet william, carnation,
garden phlox, love in the mist, mexican aster, alpine sea holly, ruby-lipped cattleya, cape flower, great masterwort,
siam tulip, lenten rose, barbeton daisy, daffodil, sword lily, poinsettia, bolero deep blue, wallflower, marigold,
buttercup, oxeye daisy, common dandelion, petunia, wild pansy, primula, sunflower, pelargonium, bishop of llandaff,
gaura, geranium, orange dahlia, pink-yellow dahlia?, cautleya spicata, japanese anemone, black-eyed susan, silverbush,
californian poppy, osteospermum, spring crocus, bearded iris, windflower, tree poppy, gazania, azalea, water lily,
rose, thorn apple, morning glory, passion flower, lotus, toad lily, anthurium, frangipani, clematis, hibiscus,
columbine, desert-rose, tree mallow, magnolia, cyclamen, watercress, canna lily, hippeastrum, bee balm, ball moss,
foxglove, bougainvillea, camellia, mallow, mexican petunia, bromelia, blanket flower, trumpet creeper, blackberry lily
""".replace("\n", " ").strip().split(", ")


def _table(rows: list[tuple], halves: bool = True) -> pd.DataFrame:
    """Rows of path, class id, class name and split; with `halves` the split follows from the sorted ids."""
    if halves:
        ids = sorted({row[1] for row in rows})
        train = set(ids[: (len(ids) + 1) // 2])
        rows = [(*row, "train" if row[1] in train else "test") for row in rows]
    return pd.DataFrame(rows, columns=["path", "id", "class_name", "split"])


# ---- the eight -------------------------------------------------------------------------------------------------


def _birds(folder: Path) -> pd.DataFrame:
    """CUB-200-2011 and NABirds: images.txt, image_class_labels.txt and classes.txt, joined by their keys."""
    names = pairs(folder / "classes.txt")
    paths = pairs(folder / "images.txt")
    labels = pairs(folder / "image_class_labels.txt")
    odd = paths.keys() ^ labels.keys()
    if odd:
        raise ValueError(
            f"{folder}: images.txt and image_class_labels.txt differ in {len(odd)} images, for instance {min(odd)!r}; "
            "one of them is cut short or of another release: unpack the dataset again"
        )
    for image, label in labels.items():
        if label not in names or not label.isdecimal():
            file = folder / "image_class_labels.txt"
            raise ValueError(f"{file}: class {label!r} of image {image!r} is not in classes.txt ({len(names)} classes)")
    return _table([(f"images/{path}", int(labels[i]), names[labels[i]]) for i, path in paths.items()])


def _cars(folder: Path) -> pd.DataFrame:
    """Cars-196: cars_annos.mat with car_ims/, or devkit/ with cars_train/ and cars_test/."""
    file = folder / "cars_annos.mat"
    if file.is_file() and ((folder / "car_ims").is_dir() or not (folder / "devkit").is_dir()):
        names = matlab(file, "class_names")
        parts = [(file, "relative_im_path", "")]
    else:
        names = matlab(folder / "devkit" / "cars_meta.mat", "class_names")
        tests = [folder / "devkit", folder]  # it is offered as a file of its own, so it may lie in either
        test = next((d for d in tests if (d / "cars_test_annos_withlabels.mat").is_file()), tests[0])
        parts = [
            (folder / "devkit" / "cars_train_annos.mat", "fname", "cars_train/"),
            (test / "cars_test_annos_withlabels.mat", "fname", "cars_test/"),
        ]
    rows = []
    for file, key, prefix in parts:
        annotations = matlab(file, "annotations")
        if not {"class", key} <= set(annotations.dtype.names or ()):
            raise ValueError(f"{file}: annotations have no 'class' and {key!r}; the file with labels is needed")
        for number, (path, label) in enumerate(zip(annotations[key], annotations["class"]), 1):
            label = class_number(label, len(names), f"{file}, annotation {number}")
            rows.append((f"{prefix}{path}", label, str(names[label - 1])))
    return _table(rows)


def _sop(folder: Path) -> pd.DataFrame:
    """Stanford Online Products: a class is one product for sale, called by its kind and number."""
    rows = []
    for split in ("train", "test"):
        file = folder / f"Ebay_{split}.txt"
        (_, header), *lines = numbered_lines(file) or [(0, "")]
        if header.split() != ["image_id", "class_id", "super_class_id", "path"]:
            raise ValueError(f"{file}, line 1: {header!r}; expected 'image_id class_id super_class_id path'")
        for number, line in lines:
            values = line.split()
            if len(values) != 4:
                raise ValueError(f"{file}, line {number}: {line!r}; expected 4 values")
            label = class_number(values[1], 22_634, f"{file}, line {number}")
            kind = values[3].split("/")[0].removesuffix("_final")
            rows.append((values[3], label, f"{kind} {label}", split))
    return _table(rows, halves=False)


def _inshop(folder: Path) -> pd.DataFrame:
    """In-Shop: Eval/list_eval_partition.txt and Img/img/; queries are searched in the gallery only."""
    file = folder / "Eval" / "list_eval_partition.txt"
    (_, count), *lines = numbered_lines(file) or [(0, "")]
    if [line.split() for _, line in lines[:1]] != [["image_name", "item_id", "evaluation_status"]]:
        raise ValueError(f"{file}, line 2: expected the header 'image_name item_id evaluation_status'")
    if count.strip() != str(len(lines) - 1):
        raise ValueError(f"{file}: line 1 says {count.strip()} images, {len(lines) - 1} follow; unpack it again")
    rows = []
    for number, line in lines[1:]:
        values = line.split()
        if len(values) != 3 or values[2] not in ("train", "query", "gallery"):
            raise ValueError(f"{file}, line {number}: {line!r}; expected image, item and train, query or gallery")
        rows.append((f"Img/{values[0]}", values[1], values[1], values[2]))
    return _table(rows, halves=False)


def _dogs(folder: Path) -> pd.DataFrame:
    """Stanford Dogs: file_list.mat and Images/."""
    file = folder / "file_list.mat"
    paths, labels = matlab(file, "file_list"), matlab(file, "labels")
    if len(paths) != len(labels):
        raise ValueError(f"{file}: {len(paths)} files, {len(labels)} labels; unpack the dataset again")
    rows = []
    for number, (path, label) in enumerate(zip(paths, labels.tolist()), 1):
        rows.append((f"Images/{path}", class_number(label, 120, f"{file}, row {number}"), str(path).split("/")[0]))
    return _table(rows)


def _flowers(folder: Path) -> pd.DataFrame:
    """Flowers-102: imagelabels.mat, setid.mat and jpg/, in the order of the three sets as the authors' code has it."""
    labels = matlab(folder / "imagelabels.mat", "labels").tolist()
    rows = []
    for part in ("trnid", "valid", "tstid"):
        for image in matlab(folder / "setid.mat", part).tolist():
            if not 1 <= image <= len(labels):
                raise ValueError(f"{folder / 'setid.mat'}: {part} names image {image} of {len(labels)}")
            label = class_number(labels[image - 1], 102, f"{folder / 'imagelabels.mat'}, image {image}")
            rows.append((f"jpg/image_{image:05d}.jpg", label, _FLOWERS[label - 1]))
    return _table(rows)


def _aircraft(folder: Path) -> pd.DataFrame:
    """FGVC-Aircraft: classes are variants, sorted by name."""
    rows = []
    for part in ("trainval", "test"):
        for image, variant in pairs(folder / "data" / f"images_variant_{part}.txt").items():
            rows.append((f"data/images/{image}.jpg", variant, variant))
    return _table(rows)


# ---- which is where --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """One of the eight.

    Attributes:
        title: the paper's name.
        read: from the folder to a table of `path`, `id`, `class_name`, `split`.
        folder: how the folder that holds the files is usually called.
        files: annotation files in that folder, by any of which it is known.
        images: the folder of the images in it.
        counts: images and classes of each split (Table 1; of In-Shop's 28,760 test images there are 26,830).
    """

    title: str
    read: Callable[[Path], pd.DataFrame]
    folder: str
    files: tuple[str, ...]
    images: str
    counts: dict[str, tuple[int, int]]


def _counts(train_images: int, train: int, test_images: int, test: int) -> dict[str, tuple[int, int]]:
    return {"train": (train_images, train), "test": (test_images, test)}


_BIRDS = ("images.txt", "image_class_labels.txt", "classes.txt")
DATASETS = {
    "cub": Dataset("CUB-200-2011", _birds, "CUB_200_2011", _BIRDS, "images", _counts(5_864, 100, 5_924, 100)),
    "cars": Dataset(
        "Cars-196", _cars, "cars", ("cars_annos.mat", "devkit/cars_train_annos.mat", "devkit/cars_meta.mat"),
        "car_ims (or cars_train and cars_test)", _counts(8_054, 98, 8_131, 98),
    ),
    "sop": Dataset(
        "Stanford Online Products", _sop, "Stanford_Online_Products", ("Ebay_train.txt", "Ebay_test.txt"),
        "*_final", _counts(59_551, 11_318, 60_502, 11_316),
    ),
    "inshop": Dataset(
        "In-Shop Clothes", _inshop, "inshop", ("Eval/list_eval_partition.txt",), "Img/img",
        {"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)},
    ),
    "nabirds": Dataset("NABirds", _birds, "nabirds", _BIRDS, "images", _counts(22_909, 278, 25_653, 277)),
    "dogs": Dataset("Stanford Dogs", _dogs, "dogs", ("file_list.mat",), "Images", _counts(10_651, 60, 9_929, 60)),
    "flowers": Dataset(
        "Flowers-102", _flowers, "flowers", ("imagelabels.mat", "setid.mat"), "jpg", _counts(3_493, 51, 4_696, 51)
    ),
    "aircraft": Dataset(
        "FGVC-Aircraft", _aircraft, "fgvc-aircraft-2013b",
        ("data/images_variant_trainval.txt", "data/images_variant_test.txt"), "data/images",
        _counts(5_000, 50, 5_000, 50),
    ),
}  # fmt: skip


def find(root: str | Path, name: str) -> Path | None:
    """The folder of dataset `name`: `root` itself or one at most two levels below; None where there is none."""
    for folder in _folders(Path(root), 2):
        here = [folder / file for file in DATASETS[name].files if (folder / file).is_file()]
        if here and (DATASETS[name].read is not _birds or _which_birds(folder, here[0]) == name):
            return folder
    return None


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth and folder.is_dir():
        with os.scandir(folder) as entries:
            below = sorted(e.path for e in entries if not e.name.startswith(".") and e.is_dir())
        for path in below:
            yield from _folders(Path(path), depth - 1)


def _which_birds(folder: Path, file: Path) -> str:
    """CUB and NABirds have the same files; the folder's name tells, or else CUB's "1 001.Name" and plain numbers."""
    if "nabirds" in folder.name.lower():
        return "nabirds"
    if "cub" in folder.name.lower():
        return "cub"
    with open(file, encoding="utf-8", errors="replace") as stream:
        return "cub" if re.match(r"\d+ (\d{3}\.|\d+\s*$)", stream.readline()) else "nabirds"


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
    lost = [name for name, folder in folders.items() if folder is None]
    if lost:
        expected = "\n".join(
            f"  {name}: {root / DATASETS[name].folder}/ with {', '.join(DATASETS[name].files)} and the images in "
            f"{DATASETS[name].images}"
            for name in lost
        )
        raise ValueError(
            f"dataset {', '.join(map(repr, lost))} not found under {root}; expected\n{expected}\n"
            "`python -m pumalib data download` fetches what may be fetched freely and says how to get the others"
        )
    tables = []
    for name, folder in folders.items():
        try:
            tables.append(_checked(name, folder, strict))
        except ValueError as error:
            raise ValueError(f"dataset {name!r}: {error}") from None
        tables[-1]["path"] = folder.relative_to(root).as_posix() + "/" + tables[-1]["path"]
    images = pd.concat(tables, ignore_index=True)
    images["path"] = images["path"].str.removeprefix("./")
    images["label"] = images.groupby(["dataset", "id"], sort=False).ngroup()
    return Benchmark("paper", images[COLUMNS], root=root)


def _checked(name: str, folder: Path, strict: bool) -> pd.DataFrame:
    """The table of one dataset, its paths relative to `folder`, if it is whole."""
    table = DATASETS[name].read(folder)
    twice = table["path"].duplicated()
    if twice.any():
        raise ValueError(f"image {table['path'][twice].iloc[0]!r} stands {twice.sum() + 1} times in the annotations")
    table["dataset"] = name

    there = _exist(folder, table["path"])
    if not there.all():
        lost = table["path"][~there]
        _complain(
            name,
            strict,
            f"{len(lost):,} of {len(table):,} images that the annotations name are missing, for instance "
            f"{folder / lost.iloc[0]} (unpacking not finished?); unpack the dataset again",
        )
        table = table[there].reset_index(drop=True)

    for split, (images, classes) in DATASETS[name].counts.items():
        rows = table[table["split"] == split]
        found = len(rows), rows["id"].nunique()
        if found != (images, classes):
            cause = "unpacking not finished, or annotations cut short" if found < (images, classes) else "files added"
            _complain(
                name,
                strict,
                f"{found[0]:,} {split} images of {found[1]:,} classes in {folder}; Table 1 expects {images:,} of "
                f"{classes:,}. Likely cause: {cause}, another release, or macOS `._` files taken for images. Unpack "
                "the original archive again",
            )
    return table


def _complain(name: str, strict: bool, message: str) -> None:
    if strict:
        raise ValueError(f"{message}, or go on with strict=False")
    warnings.warn(f"dataset {name!r}: {message}", stacklevel=5)


def _exist(folder: Path, paths: pd.Series) -> np.ndarray:
    """Which of `paths` are there; a folder is listed once, since 289,000 single questions take minutes on a disk."""
    listed: dict[str, set[str]] = {}
    there = np.empty(len(paths), bool)
    for row, path in enumerate(paths):
        parent, _, file = path.rpartition("/")
        if parent not in listed:
            try:
                listed[parent] = set(os.listdir(folder / parent))
            except (FileNotFoundError, NotADirectoryError):
                listed[parent] = set()
        there[row] = file in listed[parent]
    return there
