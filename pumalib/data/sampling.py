"""Which images form a batch: pure functions of (seed, epoch), so that any batch can be told without the ones before."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

_ORDER, _SHOTS = 1, 3  # keep the random streams apart, also from the augmentation's in `loading`


def random_batches(count: int, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """A fresh permutation of `range(count)` per epoch, cut into batches.

    The last batch is dropped where it is incomplete, unless it is the only one.
    """
    if count < 1 or batch_size < 1:
        raise ValueError(f"{count} images in batches of {batch_size}; both must be at least 1")
    order = np.random.default_rng((_ORDER, seed, epoch)).permutation(count)
    if count < batch_size:
        return [order]
    return [order[at : at + batch_size] for at in range(0, count - batch_size + 1, batch_size)]


def class_batches(
    labels: Sequence[int], classes_per_batch: int, images_per_class: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """Batches of P classes x K images, class by class, for the pair-based losses (Appendix A: 180 x 4).

    Classes are drawn without replacement within a batch, and all classes come once before one comes again;
    images are drawn without replacement, except that a class with fewer than K images repeats some of them.
    With fewer than P classes every batch holds all of them.  An epoch has as many batches as fit into the number
    of images, and at least so many that every class comes once.
    """
    if len(labels) < 1 or classes_per_batch < 1 or images_per_class < 1:
        raise ValueError(f"{len(labels)} images, {classes_per_batch} classes x {images_per_class}; all at least 1")
    rng = np.random.default_rng((_ORDER, seed, epoch))
    members = _members(labels)
    width = min(classes_per_batch, len(members))
    count = max(len(labels) // (width * images_per_class), math.ceil(len(members) / width))
    batches, queue = [], []
    for _ in range(count):
        chosen, queue = queue[:width], queue[width:]
        if len(chosen) < width:
            fresh = rng.permutation(len(members)).tolist()
            taken = set(chosen)
            new = [c for c in fresh if c not in taken][: width - len(chosen)]
            drawn = set(new)
            chosen, queue = chosen + new, [c for c in fresh if c not in drawn]
        batches.append(np.concatenate([_draw(rng, members[c], images_per_class) for c in chosen]))
    return batches


def _members(labels: Sequence[int]) -> list[np.ndarray]:
    """The positions of each class, in the order of the labels."""
    labels = np.asarray(labels)
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _draw(rng: np.random.Generator, members: np.ndarray, count: int) -> np.ndarray:
    """`count` of `members`, each at most once unless there are too few (then each at least once)."""
    picked = rng.permutation(members)[:count]
    return np.concatenate([picked, rng.choice(members, count - len(picked))])


def few_shot(images: pd.DataFrame, shots: int, seed: int) -> pd.DataFrame:
    """`shots` train rows of each class of `images`; a row comes twice only where a class has fewer.

    With the same seed, fewer shots are a part of more shots.
    """
    train = images[images["split"] == "train"]
    members = _members(train["label"])
    rows = [_draw(np.random.default_rng((_SHOTS, seed, number)), rows, shots) for number, rows in enumerate(members)]
    return train.iloc[np.concatenate(rows)].reset_index(drop=True)


def ordered_batches(count: int, batch_size: int) -> list[np.ndarray]:
    """`range(count)` in order, the last batch shorter: for embedding a whole table."""
    return [np.arange(at, min(at + batch_size, count)) for at in range(0, count, batch_size)]
