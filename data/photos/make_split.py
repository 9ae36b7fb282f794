"""Writes split.csv, the images of the profiles `photos` and `photos-96`.

The folders it reads are described in docs/photos.md.  Of each dataset the first half of the sorted
classes is for training.  Of either half as many classes as given below are taken, evenly spaced,
and of each class the first images by name.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from pumalib.data import folders

# dataset: (classes of each half, images of each class); None: all
CHOSEN = {
    "birds_cub50": (None, None),
    "cars_196": (None, 24),
    "characters_omniglot": (300, None),
    "emoji_emojione": (500, None),
    "animals_tinyimagenet": (None, 40),
}


def choose(images: pd.DataFrame) -> pd.DataFrame:
    """The rows of `folders.load` that are taken."""
    taken = []
    for (dataset, _), half in images.groupby(["dataset", "split"], sort=False):
        classes, most = CHOSEN[dataset]
        names = half["class_name"].unique()
        names = names[
            np.linspace(0, len(names) - 1, min(classes or len(names), len(names)))
            .round()
            .astype(int)
        ]
        taken.append(
            half[half["class_name"].isin(names)].groupby("class_name").head(most or len(half))
        )
    return pd.concat(taken)


if __name__ == "__main__":
    root, file = Path(sys.argv[1]), Path(__file__).with_name("split.csv")
    choose(folders.load(root, list(CHOSEN)).images)[["path", "split"]].to_csv(
        file, index=False, lineterminator="\n"
    )
