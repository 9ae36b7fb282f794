"""The eight datasets of the paper in their original on-disk formats, made up: of any number of images."""

import io
import uuid

import numpy as np
from PIL import Image
from scipy.io import savemat

NAMES = ("cub", "cars", "sop", "nabirds", "dogs", "flowers", "aircraft")
SMALL = {name: {"train": (7, 3), "test": (5, 2)} for name in NAMES}
SMALL["inshop"] = {"train": (7, 3), "query": (2, 2), "gallery": (4, 2)}


def picture(number):
    """A JPEG of 16 x 12 pixels; every fifth is greyscale, every seventh CMYK, every eleventh a PNG with alpha."""
    colour = tuple(np.random.default_rng(number).integers(0, 256, 3).tolist())
    mode = "L" if number % 5 == 0 else "CMYK" if number % 7 == 0 else "RGBA" if number % 11 == 0 else "RGB"
    stream = io.BytesIO()
    Image.new("RGB", (16, 12), colour).convert(mode).save(stream, "PNG" if mode == "RGBA" else "JPEG")
    return stream.getvalue()


def _spread(counts):
    """(class from 0, split) of every image: each split's images dealt out over its classes in turn."""
    rows, first = [], 0
    for split, (images, classes) in counts.items():
        first -= classes if split == "gallery" else 0  # the same classes as the queries
        rows += [(first + i % classes, split) for i in range(images)]
        first += classes
    return rows


def _write(root, files, content):
    for folder in {file.rpartition("/")[0] for file in files}:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        (root / file).write_bytes(content(number))


def _text(file, lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _cells(values):
    """A Matlab cell array of strings, one row."""
    cells = np.empty((1, len(values)), object)
    cells[0] = values
    return cells


def _annotations(**fields):
    out = np.empty((1, len(fields["class"])), [(name, object) for name in fields])
    for name, values in fields.items():
        out[name][0] = values
    return out


def _bird(home, keys, names, files, labels, content):
    _text(home / "classes.txt", (f"{c} {name}" for c, name in names.items()))
    _text(home / "images.txt", (f"{key} {file}" for key, file in zip(keys, files)))
    _text(home / "image_class_labels.txt", (f"{key} {label}" for key, label in zip(keys, labels)))
    _write(home / "images", files, content)


def cub(root, counts, content):
    rows, home = _spread(counts), root / "CUB_200_2011"
    names = {c + 1: f"{c + 1:03d}.Fancy_Bird_{c + 1}" for c in sorted({c for c, _ in rows})}
    files = [f"{names[c + 1]}/Fancy_Bird_{i:04d}_{i * 7}.jpg" for i, (c, _) in enumerate(rows)]
    _bird(home, range(1, len(rows) + 1), names, files, [c + 1 for c, _ in rows], content)
    _write(home / "images", [f"{names[1]}/._{files[0].split('/')[1]}"], lambda _: b"macOS")


def nabirds(root, counts, content):
    rows = _spread(counts)
    keys = [str(uuid.UUID(int=i * 2**100 + 17)) for i in range(len(rows))]
    ids = [c + 998 for c, _ in rows]  # 998, 999, 1000: as text they would sort otherwise
    names = {0: "Birds", 1: "Ducks, Geese, and Swans"} | {c: f"Common Bird {c} (Adult male)" for c in sorted(set(ids))}
    files = [f"{label:04d}/{key.replace('-', '')}.jpg" for label, key in zip(ids, keys)]
    _bird(root / "nabirds", keys, names, files, ids, content)


def _models(rows):
    return _cells([f"Maker Model {c} Sedan 2012" for c in range(max(c for c, _ in rows) + 1)])


def cars(root, counts, content):
    rows, home = _spread(counts), root / "cars"
    files = [f"car_ims/{i:06d}.jpg" for i in range(1, len(rows) + 1)]
    annotations = _annotations(
        **{"relative_im_path": files, "bbox_x1": [1] * len(rows), "class": [c + 1 for c, _ in rows]}
    )
    _write(home, files, content)
    savemat(home / "cars_annos.mat", {"annotations": annotations, "class_names": _models(rows)})


def cars_split(root, counts, content):
    """Cars-196 in its other form."""
    rows, home = _spread(counts), root / "stanford_cars"
    (home / "devkit").mkdir(parents=True)
    savemat(home / "devkit" / "cars_meta.mat", {"class_names": _models(rows)})
    for part, place in (("train", "devkit/cars_train_annos"), ("test", "cars_test_annos_withlabels")):
        own = [c + 1 for c, _ in rows[part == "test" :: 2]]
        files = [f"{i:05d}.jpg" for i in range(1, len(own) + 1)]
        savemat(home / f"{place}.mat", {"annotations": _annotations(**{"class": own, "fname": files})})
        _write(home / f"cars_{part}", files, content)


def sop(root, counts, content):
    rows, home, kinds = _spread(counts), root / "Stanford_Online_Products", ("bicycle", "coffee_maker", "chair")
    files = [f"{kinds[c % 3]}_final/{111_000_000 + c}_{i}.JPG" for i, (c, _) in enumerate(rows)]
    for split in ("train", "test"):
        own = [(i, c, file) for i, ((c, s), file) in enumerate(zip(rows, files), 1) if s == split]
        lines = [f"{i} {c + 1} {c % 3 + 1} {file}" for i, c, file in own]
        _text(home / f"Ebay_{split}.txt", ["image_id class_id super_class_id path", *lines])
    _write(home, files, content)


def inshop(root, counts, content):
    rows, home = _spread(counts), root / "In-shop Clothes Retrieval Benchmark"
    files = [f"img/WOMEN/Blouses_Shirts/id_{c + 1:08d}/{i:02d}_1_front.jpg" for i, (c, _) in enumerate(rows)]
    lines = [f"{file:<70} id_{c + 1:08d} {split}" for (c, split), file in zip(rows, files)]
    _text(home / "Eval" / "list_eval_partition.txt", [len(rows), "image_name item_id evaluation_status", *lines])
    _write(home / "Img", files, content)


def dogs(root, counts, content):
    rows, home = _spread(counts), root / "dogs"
    files = [f"n{2085620 + c:08d}-Dog_{c}/n{2085620 + c:08d}_{i}.jpg" for i, (c, _) in enumerate(rows)]
    _write(home / "Images", files, content)
    labels = np.array([[c + 1] for c, _ in rows], float)
    savemat(home / "file_list.mat", {"file_list": _cells(files).T, "labels": labels})


def flowers(root, counts, content):
    rows, home = _spread(counts), root / "flowers"
    ids = np.arange(1, len(rows) + 1, dtype=np.uint16)
    _write(home / "jpg", [f"image_{i:05d}.jpg" for i in ids], content)
    savemat(home / "imagelabels.mat", {"labels": np.array([[c + 1 for c, _ in rows]], np.uint8)})
    savemat(home / "setid.mat", {"trnid": ids[None, 2::3], "valid": ids[None, 1::3], "tstid": ids[None, ::3]})


def aircraft(root, counts, content):
    rows, home = _spread(counts), root / "fgvc-aircraft-2013b" / "data"
    keys = [f"{i * 37 % 10**7:07d}" for i in range(len(rows))]
    names = sorted([f"DHC-{c} Model B" for c in range(max(c for c, _ in rows) + 1)])
    lines = [f"{key} {names[c]}" for key, (c, _) in zip(keys, rows)]
    _text(home / "images_variant_trainval.txt", lines[::2])
    _text(home / "images_variant_test.txt", lines[1::2])
    _write(home / "images", [f"{key}.jpg" for key in keys], content)


def small(root, *names):
    """The named datasets (all eight) with five classes each."""
    for name in names or SMALL:
        globals()[name](root, SMALL[name], picture)
    return root
