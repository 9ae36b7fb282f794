"""The eight datasets of the paper in their original on-disk formats, made up: small for tests, or at full scale.

At full scale (289,000 tiny files with the true counts), into a folder that does not exist yet:

    python tests/fake_datasets.py FOLDER
"""

from __future__ import annotations

import io
import sys
import time
import uuid
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

SMALL = {
    name: {"train": (7, 3), "test": (5, 2)} for name in ("cub", "cars", "sop", "nabirds", "dogs", "flowers", "aircraft")
} | {"inshop": {"train": (7, 3), "query": (2, 2), "gallery": (4, 2)}}


def picture(number: int) -> bytes:
    """A JPEG of 16 x 12 pixels; every fifth is greyscale, every seventh CMYK, every eleventh a PNG with alpha."""
    colour = tuple(np.random.default_rng(number).integers(0, 256, 3).tolist())
    image, form = Image.new("RGB", (16, 12), colour), "JPEG"
    if number % 5 == 0:
        image = image.convert("L")
    elif number % 7 == 0:
        image = image.convert("CMYK")
    elif number % 11 == 0:
        image, form = image.convert("RGBA"), "PNG"
    stream = io.BytesIO()
    image.save(stream, form)
    return stream.getvalue()


def _spread(counts: dict[str, tuple[int, int]]) -> list[tuple[int, str]]:
    """(class from 0, split) of every image: each split's images dealt out over its classes in turn."""
    rows, first = [], 0
    for split, (images, classes) in counts.items():
        if split == "gallery":  # the same classes as the queries
            first -= classes
        rows += [(first + i % classes, split) for i in range(images)]
        first += classes
    return rows


def _write(root: Path, files: list[str], content) -> None:
    for folder in {file.rpartition("/")[0] for file in files}:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        with open(f"{root}/{file}", "wb") as stream:
            stream.write(content(number))


def _text(file: Path, lines) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _cells(values) -> np.ndarray:
    """A Matlab cell array of strings, one row."""
    cells = np.empty((1, len(values)), object)
    cells[0] = values
    return cells


def cub(root, counts, content):
    rows, home = _spread(counts), root / "CUB_200_2011"
    names = [f"{c + 1:03d}.Fancy_Bird_{c + 1}" for c in range(max(c for c, _ in rows) + 1)]
    files = [f"{names[c]}/Fancy_Bird_{i:04d}_{i * 7}.jpg" for i, (c, _) in enumerate(rows)]
    _text(home / "classes.txt", (f"{c} {name}" for c, name in enumerate(names, 1)))
    _text(home / "images.txt", (f"{i} {file}" for i, file in enumerate(files, 1)))
    _text(home / "image_class_labels.txt", (f"{i} {c + 1}" for i, (c, _) in enumerate(rows, 1)))
    _write(home / "images", files, content)
    _write(home / "images", [f"{names[0]}/._{files[0].split('/')[1]}"], lambda _: b"macOS")


def nabirds(root, counts, content):
    rows, home = _spread(counts), root / "nabirds"
    keys = [str(uuid.UUID(int=i * 2**100 + 17)) for i in range(len(rows))]
    ids = [c + 998 for c, _ in rows]  # 998, 999, 1000: as text they would sort otherwise
    files = [f"{label:04d}/{key.replace('-', '')}.jpg" for label, key in zip(ids, keys)]
    parents = ["0 Birds", "1 Ducks, Geese, and Swans"]
    _text(home / "classes.txt", [*parents, *(f"{c} Common Bird {c} (Adult male)" for c in sorted(set(ids)))])
    _text(home / "images.txt", (f"{key} {file}" for key, file in zip(keys, files)))
    _text(home / "image_class_labels.txt", (f"{key} {label}" for key, label in zip(keys, ids)))
    _write(home / "images", files, content)


def _annotations(**fields) -> np.ndarray:
    out = np.empty((1, len(fields["class"])), [(name, object) for name in fields])
    for name, values in fields.items():
        out[name][0] = values
    return out


def cars(root, counts, content):
    rows, home = _spread(counts), root / "cars"
    files = [f"car_ims/{i:06d}.jpg" for i in range(1, len(rows) + 1)]
    names = _cells([f"Maker Model {c} Sedan 2012" for c in range(max(c for c, _ in rows) + 1)])
    fields = {"relative_im_path": files, "bbox_x1": [1] * len(rows), "class": [c + 1 for c, _ in rows]}
    home.mkdir(parents=True)
    annotations = _annotations(**fields, test=[i % 2 for i in range(len(rows))])
    savemat(home / "cars_annos.mat", {"annotations": annotations, "class_names": names})
    _write(home, files, content)


def cars_split(root, counts, content):
    """Cars-196 in its other form."""
    rows, home = _spread(counts), root / "stanford_cars"
    (home / "devkit").mkdir(parents=True)
    names = _cells([f"Maker Model {c} Sedan 2012" for c in range(max(c for c, _ in rows) + 1)])
    savemat(home / "devkit" / "cars_meta.mat", {"class_names": names})
    for part, place in (("train", "devkit/cars_train_annos"), ("test", "cars_test_annos_withlabels")):
        own = [c + 1 for c, _ in rows[part == "test" :: 2]]
        files = [f"{i:05d}.jpg" for i in range(1, len(own) + 1)]
        savemat(home / f"{place}.mat", {"annotations": _annotations(**{"class": own, "fname": files})})
        _write(home / f"cars_{part}", files, content)


def sop(root, counts, content):
    home, number = root / "Stanford_Online_Products", 0
    rows = _spread(counts)
    kinds = ("bicycle", "coffee_maker", "chair")
    files = [f"{kinds[c % 3]}_final/{111_000_000 + c}_{i}.JPG" for i, (c, _) in enumerate(rows)]
    for split in ("train", "test"):
        lines = ["image_id class_id super_class_id path"]
        for (c, own), file in zip(rows, files):
            if own == split:
                number += 1
                lines.append(f"{number} {c + 1} {c % 3 + 1} {file}")
        _text(home / f"Ebay_{split}.txt", lines)
    _write(home, files, content)


def inshop(root, counts, content):
    rows, home = _spread(counts), root / "In-shop Clothes Retrieval Benchmark"
    files = [f"img/WOMEN/Blouses_Shirts/id_{c + 1:08d}/{i:02d}_1_front.jpg" for i, (c, _) in enumerate(rows)]
    head = [str(len(rows)), "image_name item_id evaluation_status"]
    lines = [f"{file:<70} id_{c + 1:08d} {split}" for (c, split), file in zip(rows, files)]
    _text(home / "Eval" / "list_eval_partition.txt", head + lines)
    _write(home / "Img", files, content)


def dogs(root, counts, content):
    rows, home = _spread(counts), root / "dogs"
    home.mkdir(parents=True)
    files = [f"n{2085620 + c:08d}-Dog_{c}/n{2085620 + c:08d}_{i}.jpg" for i, (c, _) in enumerate(rows)]
    labels = np.array([[c + 1] for c, _ in rows], float)
    savemat(home / "file_list.mat", {"file_list": _cells(files).T, "labels": labels})
    _write(home / "Images", files, content)


def flowers(root, counts, content):
    rows, home = _spread(counts), root / "flowers"
    home.mkdir(parents=True)
    ids = np.arange(1, len(rows) + 1, dtype=np.uint16)
    savemat(home / "imagelabels.mat", {"labels": np.array([[c + 1 for c, _ in rows]], np.uint8)})
    savemat(home / "setid.mat", {"trnid": ids[None, 2::3], "valid": ids[None, 1::3], "tstid": ids[None, ::3]})
    _write(home / "jpg", [f"image_{i:05d}.jpg" for i in ids], content)


def aircraft(root, counts, content):
    rows, home = _spread(counts), root / "fgvc-aircraft-2013b" / "data"
    keys = [f"{i * 37 % 10**7:07d}" for i in range(len(rows))]
    names = sorted([f"DHC-{c} Model B" for c in range(max(c for c, _ in rows) + 1)])
    lines = [f"{key} {names[c]}" for key, (c, _) in zip(keys, rows)]
    _text(home / "images_variant_trainval.txt", lines[::2])
    _text(home / "images_variant_test.txt", lines[1::2])
    _write(home / "images", [f"{key}.jpg" for key in keys], content)


WRITERS = dict(
    cub=cub, cars=cars, sop=sop, inshop=inshop, nabirds=nabirds, dogs=dogs, flowers=flowers, aircraft=aircraft
)


def small(root: Path, *names: str) -> Path:
    """The named datasets (all eight) with five classes each."""
    for name in names or WRITERS:
        WRITERS[name](root, SMALL[name], picture)
    return root


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import resource

    from pumalib import data
    from pumalib.data import paper

    target, tiny, start = Path(sys.argv[1]), picture(1), time.perf_counter()
    target.mkdir(parents=True)
    for dataset, write in WRITERS.items():
        write(target, paper.DATASETS[dataset].counts, lambda _: tiny)
    print(f"written in {time.perf_counter() - start:.0f} s")
    start = time.perf_counter()
    images = data.load("paper", target).images
    seconds, memory = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{len(images):,} images loaded in {seconds:.1f} s, {memory:.2f} GiB at most")
    print(images.groupby(["dataset", "split"], sort=False).agg(images=("path", "size"), classes=("label", "nunique")))
