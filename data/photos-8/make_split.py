"""Writes the image lists of the profiles `photos-8` and `photos-8-*`.

    python data/photos-8/make_split.py data/raw/photos-8

Eight datasets of photographs, `<root>/<dataset>/<class>/<image>`.  Of each dataset the first half
of the sorted classes (rounded up) is for training, the rest for testing, in the first three lists;
Caltech-101's `BACKGROUND_Google`, which is no class, is left out.  All classes of a half are used,
so these three differ in images alone, not in classes:

    split.csv            8,000 training images in the proportions of the paper's Table 1 (17 to 1)
    split-balanced.csv   8,000: half of them for the four large datasets, half for the four small
    split-reversed.csv   8,000: the large ones have what the small ones had, the small ones theirs

Three further lists have the proportions of the first and other classes: those for training are
drawn by the seed in the name, so that a result does not rest on one split of the classes:

    split-classes-1.csv, split-classes-2.csv, split-classes-3.csv

No dataset can give more images than it has.  Only cars can give the 3,369 of the largest part.  The
four large ones are chosen so that the four small ones hold enough images to change places with
them: 7,609, where 6,732 are needed.  Faces have 200 images and flowers 720; where their part would
be larger, the other three of their four give the rest, so that each four keeps its sum.

The test images are the same in the first three lists: 8,000, equally many from each dataset as far
as it has them.  So a claim about small datasets does not rest on a few hundred queries, and no
dataset decides unified accuracy alone.  The paper's test sets are as unequal as its training sets.

Within a dataset the images are spread over its classes as evenly as possible.  The SHA-256 of
their paths decides which images of a class are taken: if one list has fewer images of a class than
another, they are a subset of the other's.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from pumalib.data import folders

# Training images of the paper's Table 1: SOP, In-Shop, NABirds, Dogs; Cars, CUB, Aircraft, Flowers.
PAPER_LARGE = [59_551, 25_882, 22_909, 10_651]
PAPER_SMALL = [8_054, 5_864, 5_000, 3_493]

# The datasets that play these parts, in that order.
LARGE = ["cars_196", "groceries", "birds_cub50", "flowers_17"]
SMALL = ["objects_caltech", "animals_tinyimagenet", "clothes", "faces_orl"]

IMAGES = 8_000
NO_CLASS = "BACKGROUND_Google"
SEEDS_OF_CLASSES = [1, 2, 3]


def shared_out(total: int, weights: list[float], most: list[int]) -> list[int]:
    """Parts of `total` in proportion to `weights`, none above its `most`.

    If a part reaches its `most`, the others share the rest in proportion to their weights.
    """
    parts = [0.0] * len(weights)
    open_places = list(range(len(weights)))
    while open_places:
        left = total - sum(parts[place] for place in range(len(parts)) if place not in open_places)
        weight = sum(weights[place] for place in open_places)
        for place in open_places:
            parts[place] = left * weights[place] / weight
        full = [place for place in open_places if parts[place] > most[place]]
        if not full:
            break
        for place in full:
            parts[place] = most[place]
            open_places.remove(place)
    return to_whole(parts, min(total, sum(most)))


def to_whole(parts: list[float], total: int) -> list[int]:
    """Whole numbers with the sum `total`: rounded down, then 1 more for the largest remainders."""
    whole = [int(part) for part in parts]
    by_loss = sorted(range(len(parts)), key=lambda place: whole[place] - parts[place])
    for place in by_loss[: total - sum(whole)]:
        whole[place] += 1
    return whole


def training_images(most: dict[str, int]) -> dict[str, dict[str, int]]:
    """Numbers of training images by list and dataset; `most` is the number that a dataset has."""
    paper = sum(PAPER_LARGE) + sum(PAPER_SMALL)
    large = round(IMAGES * sum(PAPER_LARGE) / paper)
    small = IMAGES - large

    def give(names: list[str], total: int, weights: list[int]) -> dict[str, int]:
        counts = shared_out(total, weights, [most[name] for name in names])
        return dict(zip(names, counts, strict=True))

    as_printed = give(LARGE, large, PAPER_LARGE) | give(SMALL, small, PAPER_SMALL)
    equal = [1, 1, 1, 1]
    balanced = give(LARGE, IMAGES // 2, equal) | give(SMALL, IMAGES // 2, equal)
    # The order within each four is reversed too: the largest dataset becomes the smallest.
    turned = give(LARGE, small, PAPER_SMALL[::-1]) | give(SMALL, large, PAPER_LARGE[::-1])
    return {"split": as_printed, "split-balanced": balanced, "split-reversed": turned}


def choose(half: pd.DataFrame, count: int) -> pd.DataFrame:
    """`count` rows of one half of a dataset, spread over its classes, in the order of the table."""
    order = half["path"].map(lambda path: hashlib.sha256(path.encode()).hexdigest())
    rank = order.groupby(half["class_name"]).rank(method="first")
    # The first image of every class, then the second of every class, and so on.
    by_turns = half.assign(rank=rank).sort_values(["rank", "class_name"])
    return half.loc[sorted(by_turns.index[:count])]


def main(root: Path) -> None:
    """Write the lists beside this file."""
    images = folders.load(root, LARGE + SMALL).images
    images = images[images["class_name"] != NO_CLASS]
    by_dataset = dict(iter(images.groupby("dataset", sort=False)))
    halved = {dataset: halve(rows) for dataset, rows in by_dataset.items()}
    for name, counts in training_images(most_of(halved)).items():
        write(name, halved, counts)
    for seed in SEEDS_OF_CLASSES:
        random = np.random.default_rng(seed)
        drawn = {dataset: halve(rows, random) for dataset, rows in by_dataset.items()}
        write(f"split-classes-{seed}", drawn, training_images(most_of(drawn))["split"])


def halve(
    rows: pd.DataFrame, random: np.random.Generator | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of half of a dataset's classes, rounded up, and the others.

    The half is the first of the sorted classes; with `random` it is drawn from them.
    """
    classes = sorted(rows["class_name"].unique())
    if random is not None:
        classes = random.permutation(classes).tolist()
    in_half = rows["class_name"].isin(classes[: (len(classes) + 1) // 2])
    return rows[in_half], rows[~in_half]


def most_of(halved: dict[str, tuple[pd.DataFrame, pd.DataFrame]]) -> dict[str, int]:
    """The number of training images that each dataset has."""
    return {dataset: len(train) for dataset, (train, _) in halved.items()}


def write(
    name: str, halved: dict[str, tuple[pd.DataFrame, pd.DataFrame]], counts: dict[str, int]
) -> None:
    """Write a list: `counts` training images of each dataset, and `IMAGES` test images of all."""
    test_most = [len(test) for _, test in halved.values()]
    test_counts = dict(zip(halved, shared_out(IMAGES, [1.0] * len(halved), test_most), strict=True))
    parts = []
    for dataset, (train, test) in sorted(halved.items()):
        parts.append(choose(train, counts[dataset]).assign(split="train"))
        parts.append(choose(test, test_counts[dataset]).assign(split="test"))
    chosen = pd.concat(parts)[["path", "split"]]
    file = Path(__file__).with_name(f"{name}.csv")
    chosen.to_csv(file, index=False, lineterminator="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
