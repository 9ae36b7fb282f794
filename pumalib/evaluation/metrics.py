"""Retrieval accuracy as tables: Recall@k, R-Precision and MAP@R, per dataset, unified and harmonic.

For a query with R relevant images (same dataset and same class, the query itself excluded):

    R@k    1 if one of the k nearest is relevant (Sec. 5.1)
    RP     relevant images among the R nearest, divided by R
    MAP@R  1/R times the sum over i <= R of precision@i x [the i-th nearest is relevant]

RP and MAP@R as in Musgrave et al., "A Metric Learning Reality Check", ECCV 2020.  A query without
a relevant image is left out and counted.  The query is removed by its row: a duplicate of it stays
in the gallery.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..progress import bar
from .search import Distance, Found, Space, make_space, search
from .statistics import OVERALL, resampled

# Of R@k in the paper's tables.
KS = (1, 2, 4, 8, 10, 20, 100)
# Most queries have a hit among so many neighbours; only the others need a larger k of R@k.
SHALLOW = 8
# A search that takes longer, in seconds, shows how far it is.
BAR_AFTER = 10
# The rank of a first hit that was not found.
NEVER = 2**32


@dataclass(frozen=True)
class Scores:
    """What each query scored: per dataset, in the order of the table, and for "unified"."""

    metrics: tuple[str, ...]  # the columns of `values`
    values: dict[str, np.ndarray]  # (queries, metrics) float64, a class's queries side by side
    classes: dict[str, np.ndarray]  # (queries,) a number for the class of each
    excluded: dict[str, int]  # number of queries without a relevant image

    def packed(self) -> dict[str, dict[str, str]]:
        """By dataset, and as `pack` writes them: `hits`, the R@1 of each query, and `classes`.

        A query has a 1 in `classes` where it is the first of its class.
        """
        r_at_1 = self.metrics.index("R@1")
        hits = {name: pack(values[:, r_at_1]) for name, values in self.values.items()}
        first = {
            name: pack(np.diff(numbers, prepend=-1) != 0) for name, numbers in self.classes.items()
        }
        return {"hits": hits, "classes": first}

    def table(self, bootstrap: int = 1000, seed: int = 0) -> pd.DataFrame:
        """Means, as fractions, and 95 % percentile intervals of `bootstrap` resampled classes.

        A row per dataset, `unified` (all queries against all galleries) and `harmonic` (Sec. 5.1).
        Columns: the metrics, `<metric>_low`, `<metric>_high` (NaN where `bootstrap` is 0),
        `queries` (those that count) and `excluded` (the others).
        """
        samples = resampled(self.values, self.classes, bootstrap, seed)
        # (rows, 1 + bootstrap, metrics)
        means = np.stack(list(samples.values()))
        table = pd.DataFrame(means[:, 0], list(samples), list(self.metrics))
        table = table.rename_axis("dataset")

        bounds = np.full((2, *table.shape), np.nan)
        if bootstrap:
            bounds = np.percentile(means[:, 1:], (2.5, 97.5), axis=1)
        for column, metric in enumerate(self.metrics):
            table[f"{metric}_low"] = bounds[0][:, column]
            table[f"{metric}_high"] = bounds[1][:, column]

        counts = {name: (len(values), self.excluded[name]) for name, values in self.values.items()}
        # The last row is `harmonic`, which is over the same queries as `unified`.
        table[["queries", "excluded"]] = [*counts.values(), counts["unified"]]
        return table


def pack(bits: np.ndarray) -> str:
    """0 or 1 of every query, a bit each, as base64 text."""
    return base64.b64encode(np.packbits(np.asarray(bits, bool)).tobytes()).decode()


def unpack(text: str, count: int) -> np.ndarray:
    """(count,) 0 or 1: what `pack` wrote; ValueError where it is not of so many."""
    packed = base64.b64decode(text, validate=True)
    if len(packed) != -(-count // 8):
        # Of fewer bits numpy would make the rest of what the memory held before.
        raise ValueError(f"{len(packed)} bytes are not the bits of {count:,} queries")
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count)


def scores(
    embeddings: Any,
    images: pd.DataFrame,
    ks: Sequence[int] = (1, 2, 4, 8),
    *,
    distance: Distance = "cosine",
    device: Any = None,
) -> Scores:
    """R@k, RP and MAP@R of every query that has a relevant image.

    `embeddings` (n, D) have a row per row of the test table `images`: `dataset`, `label`, `split`,
    "test" being query and gallery.  `distance` is "cosine" (embeddings are L2-normalised here) or a
    function of float64 (q, D) and (g, D) as they are that returns distances (q, g).  `device`:
    where to search; None: where the embeddings are.

    Raises ValueError, which names what of the arguments does not fit.
    """
    space = make_space(embeddings, images, distance, device)
    if not ks or min(ks) < 1:
        raise ValueError(f"ks must be positive, not {tuple(ks)}")
    _require_names(images)
    split = images["split"].to_numpy()
    queries = np.flatnonzero(split != "gallery")
    gallery = np.flatnonzero(split != "query")
    dataset, names = pd.factorize(images["dataset"])
    classes = images.groupby(["dataset", "label"], sort=False).ngroup().to_numpy()
    labels = Labels(dataset, classes, relevant_count(classes, split))

    counted = _that_count(queries, labels)
    _require_all(names, dataset[counted])

    unified, own = _accuracies(space, labels, counted, gallery, ks)
    values = {}
    numbers = {}
    excluded = {}
    for code, name in enumerate(names):
        mine = dataset[counted] == code
        # Those of whose nearest in all datasets too few were of their own.
        missing = np.flatnonzero(mine & np.isnan(own[:, 0]))
        own_gallery = gallery[dataset[gallery] == code]
        own[missing] = _accuracies(space, labels, counted[missing], own_gallery, ks)[1]
        values[name] = own[mine]
        numbers[name] = classes[counted[mine]]
        excluded[name] = int((dataset[queries] == code).sum() - mine.sum())
    values["unified"] = unified
    numbers["unified"] = classes[counted]
    excluded["unified"] = len(queries) - len(counted)
    metrics = (*(f"R@{k}" for k in ks), "RP", "MAP@R")
    return Scores(metrics, values, numbers, excluded)


def _require_names(images: pd.DataFrame) -> None:
    """Raise ValueError where a dataset or label is missing, or called like an overall accuracy."""
    for column in ("dataset", "label"):
        is_empty = images[column].isna() | (images[column] == "")
        missing = np.flatnonzero(is_empty)
        if len(missing):
            count = f"{len(missing)} of {len(images)} images have no {column}"
            raise ValueError(
                f"{count}, first that of row {missing[0]}; give it one, or leave it out"
            )
    for name in OVERALL:
        if (images["dataset"] == name).any():
            raise ValueError(
                f"dataset {name!r}: the name of an overall accuracy; rename the dataset"
            )


@dataclass(frozen=True)
class Labels:
    """What is known of each row of the test table, (n,) each."""

    dataset: np.ndarray  # a number
    classes: np.ndarray  # a number, unlike for classes of different datasets
    relevant: np.ndarray  # R, as a query


def relevant_count(classes: np.ndarray, split: np.ndarray) -> np.ndarray:
    """R of each row as a query: the gallery's images of its class without the query itself.

    `classes` (n,) are numbers, unlike for classes of different datasets.
    """
    in_gallery = split != "query"
    of_class = np.bincount(classes[in_gallery], minlength=classes.max() + 1)
    itself = split == "test"
    return of_class[classes] - itself


def _that_count(queries: np.ndarray, labels: Labels) -> np.ndarray:
    """Queries with a relevant image: datasets, and in them classes, in the order they first come.

    The queries of a class are in the order of the table.
    """
    counted = queries[labels.relevant[queries] > 0]
    order = np.lexsort((labels.classes[counted], labels.dataset[counted]))
    return counted[order]


def _require_all(names: pd.Index, counted: np.ndarray) -> None:
    """Raise ValueError unless every dataset, a number of `names`, is among the `counted`."""
    alone = np.setdiff1d(np.arange(len(names)), counted)
    if len(alone):
        name = min(names[alone])
        raise ValueError(
            f"dataset {name!r}: no query has another image of its class in the gallery"
        )


@dataclass(frozen=True)
class Ranked:
    """The neighbours of q queries, nearest first.

    Some of the m do not count, of another dataset or not proven: these are no hits, and do not
    raise the rank.
    """

    rank: np.ndarray  # (q, m) the place of each among those that count, from 1
    hit: np.ndarray  # (q, m) whether it counts and is relevant
    relevant: np.ndarray  # (q,) R

    def tells(self, deepest: int) -> np.ndarray:
        """(q,) whether they are enough for RP, MAP@R and R@k to k = `deepest`."""
        count = self.rank[:, -1]
        all_recalls = self.hit.any(axis=1) | (count >= deepest)
        return (count >= self.relevant) & all_recalls


def first_hit(ranked: Ranked) -> np.ndarray:
    """(q,) the rank of the first hit: R@k is whether it is at most k."""
    return np.where(ranked.hit, ranked.rank, NEVER).min(axis=1)


def r_precision(ranked: Ranked) -> np.ndarray:
    """(q,) RP: hits among the R nearest, divided by R."""
    within = ranked.hit & (ranked.rank <= ranked.relevant[:, None])
    return within.sum(axis=1) / ranked.relevant


def map_at_r(ranked: Ranked) -> np.ndarray:
    """(q,) MAP@R: the precision at each hit among the R nearest, summed and divided by R."""
    within = ranked.hit & (ranked.rank <= ranked.relevant[:, None])
    precision = within.cumsum(axis=1) / np.maximum(ranked.rank, 1)
    # Added by torch: numpy adds in another order, which changes last bits of what is kept.
    total = torch.from_numpy(precision * within).sum(1).numpy()
    return total / ranked.relevant


def _accuracies(
    space: Space, labels: Labels, queries: np.ndarray, gallery: np.ndarray, ks: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """R@k, RP and MAP@R, (queries, ks + 2): in all of `gallery`, and in each query's own dataset.

    The second is NaN where too few of the neighbours that were found are of the query's dataset.
    """
    unified = np.full((len(queries), len(ks) + 2), np.nan)
    own = unified.copy()
    deepest = max(ks)
    for least in sorted({min(SHALLOW, deepest), deepest}):
        todo = np.flatnonzero(np.isnan(unified[:, 0]))
        k = np.maximum(labels.relevant[queries[todo]], least)
        # Most evaluations end before it is shown.
        with bar(total=len(todo), desc="searching", unit="query", delay=BAR_AFTER) as progress:
            for found in search(space, queries[todo], gallery, k):
                rows = todo[found.queries]
                among_all, among_own = _ranked(found, queries[rows], labels)
                unified[rows] = _measured(among_all, ks)
                own[rows] = _measured(among_own, ks)
                progress.update(len(rows))
    return unified, own


def _ranked(found: Found, queries: np.ndarray, labels: Labels) -> tuple[Ranked, Ranked]:
    """What was found for `queries`: among all images, and among those of their own dataset."""
    hit = found.proven & (labels.classes[found.rows] == labels.classes[queries, None])
    same_dataset = labels.dataset[found.rows] == labels.dataset[queries, None]
    relevant = labels.relevant[queries]
    among_all = Ranked(found.proven.cumsum(axis=1), hit, relevant)
    among_own = Ranked((found.proven & same_dataset).cumsum(axis=1), hit, relevant)
    return among_all, among_own


def _measured(ranked: Ranked, ks: Sequence[int]) -> np.ndarray:
    """(q, ks + 2) R@k, RP and MAP@R; NaN for a query of which too few neighbours are known."""
    first = first_hit(ranked)
    columns = [first <= k for k in ks]
    columns += [r_precision(ranked), map_at_r(ranked)]
    measured = np.stack(columns, axis=1).astype(np.float64)
    measured[~ranked.tells(max(ks))] = np.nan
    return measured
