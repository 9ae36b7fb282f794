"""Miniatures of the eight datasets of the paper in their original on-disk formats.

Each has 12 or 13 images of five classes.
"""

import io
import uuid

import numpy as np
from PIL import Image
from scipy.io import savemat

COUNTS = {"train": (7, 3), "test": (5, 2)}  # images and classes
INSHOP = {"train": (7, 3), "query": (2, 2), "gallery": (4, 2)}
SPLITS = ["train"] * 7 + ["test"] * 5
CLASSES = [i % 3 for i in range(7)] + [3 + i % 2 for i in range(5)]  # of each image, from 0


def picture(number):
    """A JPEG of 16 x 12 pixels.

    Every fifth is greyscale, every seventh CMYK, every eleventh a PNG with alpha.
    """
    colour = tuple(np.random.default_rng(number).integers(0, 256, 3).tolist())
    mode = (
        "L"
        if number % 5 == 0
        else "CMYK"
        if number % 7 == 0
        else "RGBA"
        if number % 11 == 0
        else "RGB"
    )
    stream = io.BytesIO()
    Image.new("RGB", (16, 12), colour).convert(mode).save(
        stream, "PNG" if mode == "RGBA" else "JPEG"
    )
    return stream.getvalue()


def _write(root, files):
    for number, file in enumerate(files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(picture(number))


def _text(file, lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _cells(values):
    """A Matlab cell array of strings, one row."""
    cells = np.empty((1, len(values)), object)
    cells[0] = values
    return cells


def annotations(files, labels, name="fname"):
    """A Matlab struct array, as the Cars have it."""
    out = np.empty((1, len(files)), [(name, object), ("class", object)])
    out[name][0], out["class"][0] = files, labels
    return out


def _bird(home, keys, names, files, labels):
    _text(home / "classes.txt", (f"{c} {name}" for c, name in names.items()))
    _text(home / "images.txt", (f"{key} {file}" for key, file in zip(keys, files)))
    _text(home / "image_class_labels.txt", (f"{key} {label}" for key, label in zip(keys, labels)))
    _write(home / "images", files)


def cub(root):
    names = {c + 1: f"{c + 1:03d}.Fancy_Bird_{c + 1}" for c in range(5)}
    files = [f"{names[c + 1]}/Fancy_Bird_{i:04d}_{i * 7}.jpg" for i, c in enumerate(CLASSES)]
    _bird(root / "CUB_200_2011", range(1, 13), names, files, [c + 1 for c in CLASSES])
    (root / "CUB_200_2011" / "images" / names[1] / "._Fancy_Bird_0000_0.jpg").write_bytes(b"macOS")


def nabirds(root):
    keys = [str(uuid.UUID(int=i * 2**100 + 17)) for i in range(12)]
    ids = [c + 998 for c in CLASSES]  # 998, 999, 1000: as text they would sort otherwise
    names = {0: "Birds", 1: "Ducks, Geese, and Swans"} | {
        c: f"Common Bird {c} (Adult male)" for c in sorted(set(ids))
    }
    files = [f"{label:04d}/{key.replace('-', '')}.jpg" for label, key in zip(ids, keys)]
    _bird(root / "nabirds", keys, names, files, ids)


MODELS = _cells([f"Maker Model {c} Sedan 2012" for c in range(5)])


def cars(root):
    files = [f"car_ims/{i:06d}.jpg" for i in range(1, 13)]
    _write(root / "cars", files)
    table = annotations(files, [c + 1 for c in CLASSES], "relative_im_path")
    savemat(root / "cars" / "cars_annos.mat", {"annotations": table, "class_names": MODELS})


def cars_split(root):
    """Cars-196 in its other form."""
    home = root / "stanford_cars"
    (home / "devkit").mkdir(parents=True)
    savemat(home / "devkit" / "cars_meta.mat", {"class_names": MODELS})
    for part, place in (
        ("train", "devkit/cars_train_annos"),
        ("test", "cars_test_annos_withlabels"),
    ):
        files = [f"{i:05d}.jpg" for i in range(1, 7)]
        table = annotations(files, [c + 1 for c in CLASSES[part == "test" :: 2]])
        savemat(home / f"{place}.mat", {"annotations": table})
        _write(home / f"cars_{part}", files)


def sop(root):
    home, kinds = root / "Stanford_Online_Products", ("bicycle", "coffee_maker", "chair")
    files = [f"{kinds[c % 3]}_final/{111_000_000 + c}_{i}.JPG" for i, c in enumerate(CLASSES)]
    lines = [
        f"{i} {c + 1} {c % 3 + 1} {file}" for i, (c, file) in enumerate(zip(CLASSES, files), 1)
    ]
    for split, own in (("train", lines[:7]), ("test", lines[7:])):
        _text(home / f"Ebay_{split}.txt", ["image_id class_id super_class_id path", *own])
    _write(home, files)


def inshop(root):
    home = root / "In-shop Clothes Retrieval Benchmark"
    splits, classes = ["train"] * 7 + ["query"] * 2 + ["gallery"] * 4, [*CLASSES[:9], 3, 4, 3, 4]
    files = [
        f"img/WOMEN/Blouses_Shirts/id_{c + 1:08d}/{i:02d}_1_front.jpg"
        for i, c in enumerate(classes)
    ]
    lines = [f"{file:<70} id_{c + 1:08d} {split}" for file, c, split in zip(files, classes, splits)]
    _text(
        home / "Eval" / "list_eval_partition.txt",
        [13, "image_name item_id evaluation_status", *lines],
    )
    _write(home / "Img", files)


def dogs(root):
    files = [
        f"n{2085620 + c:08d}-Dog_{c}/n{2085620 + c:08d}_{i}.jpg" for i, c in enumerate(CLASSES)
    ]
    _write(root / "dogs" / "Images", files)
    labels = np.array([[c + 1] for c in CLASSES], float)
    savemat(root / "dogs" / "file_list.mat", {"file_list": _cells(files).T, "labels": labels})


def flowers(root):
    home, ids = root / "flowers", np.arange(1, 13, dtype=np.uint16)
    _write(home / "jpg", [f"image_{i:05d}.jpg" for i in ids])
    savemat(home / "imagelabels.mat", {"labels": np.array([[c + 1 for c in CLASSES]], np.uint8)})
    savemat(
        home / "setid.mat",
        {"trnid": ids[None, 2::3], "valid": ids[None, 1::3], "tstid": ids[None, ::3]},
    )


def aircraft(root):
    home, keys = root / "fgvc-aircraft-2013b" / "data", [f"{i * 37:07d}" for i in range(12)]
    lines = [f"{key} DHC-{c} Model B" for key, c in zip(keys, CLASSES)]
    _text(home / "images_variant_trainval.txt", lines[::2])
    _text(home / "images_variant_test.txt", lines[1::2])
    _write(home / "images", [f"{key}.jpg" for key in keys])


def small(root, *names):
    """The named datasets."""
    for name in names:
        globals()[name](root)
    return root
