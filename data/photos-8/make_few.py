"""Writes lists of few images, like those that a user with a few folders would have.

    python data/photos-8/make_few.py data/raw/photos-8 <folder>

Each list has three datasets with eight classes of 40 images, four to train and four to test.  A
seed draws classes, among those that `split.csv` trains on and that have 40 images, and images:

    choice-<seed>.csv    animals, birds and cars, by which a recipe may be chosen
    check-<seed>.csv     groceries, things and flowers, which choose nothing

A list is used as `python -m pumalib train whitened --profile folders -p root=data/raw/photos-8
-p split=<folder>/choice-0.csv`.  The classes that the trial tests are in none of them.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from pumalib.data import folders

SETS = {
    "choice": ["animals_tinyimagenet", "birds_cub50", "cars_196"],
    "check": ["groceries", "objects_caltech", "flowers_17"],
}
SEEDS = range(3)
CLASSES = {"train": 4, "test": 4}
IMAGES = 40


def images_of(root: Path, datasets: list[str]) -> pd.DataFrame:
    """All images of the datasets in classes that the trial trains on and that have enough."""
    listed = pd.read_csv(Path(__file__).with_name("split.csv"))
    of_train = listed["path"][listed["split"] == "train"].str.rpartition("/")[0].unique()
    images = folders.load(root, datasets).images
    images = images[images["path"].str.rpartition("/")[0].isin(of_train)]
    enough = images.groupby("label")["path"].transform("size") >= IMAGES
    return images[enough]


def few(images: pd.DataFrame, seed: int) -> pd.DataFrame:
    """A list `path,split` of a dataset's classes and images, drawn by the seed."""
    rng = np.random.default_rng(seed)
    splits = np.repeat(list(CLASSES), list(CLASSES.values()))
    labels = images["label"].unique()
    drawn = np.sort(rng.choice(labels, len(splits), replace=False))
    parts = []
    for label, split in zip(drawn, splits, strict=True):
        paths = images["path"][images["label"] == label].to_numpy()
        chosen = np.sort(rng.choice(paths, IMAGES, replace=False))
        parts.append(pd.DataFrame({"path": chosen, "split": split}))
    return pd.concat(parts)


def main(root: str, to: str) -> None:
    """Write the lists."""
    Path(to).mkdir(parents=True, exist_ok=True)
    for name, datasets in SETS.items():
        images = images_of(Path(root), datasets)
        for seed in SEEDS:
            lists = [few(images[images["dataset"] == dataset], seed) for dataset in datasets]
            pd.concat(lists).to_csv(Path(to) / f"{name}-{seed}.csv", index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
