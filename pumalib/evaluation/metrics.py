"""Retrieval accuracy as tables: Recall@k, R-Precision and MAP@R, per dataset, unified and harmonic.

For a query with R relevant images (same dataset and same class, the query itself excluded):

    R@k    1 if one of the k nearest is relevant (Sec. 5.1)
    RP     relevant images among the R nearest, divided by R
    MAP@R  1/R times the sum over i <= R of precision@i x [the i-th nearest is relevant]

RP and MAP@R as in Musgrave et al., "A Metric Learning Reality Check", ECCV 2020.  Queries without a
relevant image are excluded and counted.  Only the query's own row is removed from the gallery: a
duplicate of it stays there.
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

# The k of R@k in the paper's tables.
KS = (1, 2, 4, 8, 10, 20, 100)
# First look at this many neighbours: most queries have a relevant one among them, and only the
# others need as many as the largest k of R@k.
SHALLOW = 8
# Seconds after which a search shows a progress bar.
BAR_AFTER = 10
# The rank of the first hit where none was found.
NEVER = 2**32


@dataclass(frozen=True)
class Scores:
    """The scores of each query, by dataset in the order of the table, and for "unified"."""

    metrics: tuple[str, ...]  # the columns of `values`
    values: dict[str, np.ndarray]  # (queries, metrics) float64, grouped by class
    classes: dict[str, np.ndarray]  # (queries,) the class of each as a number
    excluded: dict[str, int]  # number of queries without a relevant image

    def packed(self) -> dict[str, dict[str, str]]:
        """`hits`, the R@1 of each query, and `classes`, by dataset, each as text by `pack`.

        In `classes` the first query of each class has a 1, the others a 0.
        """
        r_at_1 = self.metrics.index("R@1")
        hits = {name: pack(values[:, r_at_1]) for name, values in self.values.items()}
        first = {
            name: pack(np.diff(numbers, prepend=-1) != 0) for name, numbers in self.classes.items()
        }
        return {"hits": hits, "classes": first}

    def table(self, bootstrap: int = 1000, seed: int = 0) -> pd.DataFrame:
        """Mean scores as fractions, with 95 % percentile intervals of `bootstrap` class resamples.

        A row per dataset, `unified` (all queries against all galleries) and `harmonic` (Sec. 5.1).
        Columns: the metrics, `<metric>_low`, `<metric>_high` (NaN if `bootstrap` is 0), `queries`
        (the number scored) and `excluded` (the number without a relevant image).
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
        # The last row is `harmonic`, which has the same queries as `unified`.
        table[["queries", "excluded"]] = [*counts.values(), counts["unified"]]
        return table


def pack(bits: np.ndarray) -> str:
    """Pack the 0 or 1 of every query into bits, as base64 text."""
    return base64.b64encode(np.packbits(np.asarray(bits, bool)).tobytes()).decode()


def unpack(text: str, count: int) -> np.ndarray:
    """Unpack text from `pack`: (count,) 0 or 1; ValueError if it has another length."""
    packed = base64.b64decode(text, validate=True)
    if len(packed) != -(-count // 8):
        # NumPy would fill missing bits with whatever was in memory.
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

    `embeddings` (n, D) have a row for each row of the test table `images`, with the columns
    `dataset`, `label` and `split` ("test" is query and gallery).  `distance` is "cosine", which
    L2-normalises the embeddings, or a function of float64 (q, D) and (g, D), not normalised, that
    returns distances (q, g).  `device`: where to search; None: where the embeddings are.

    Raises ValueError, which names the argument that does not fit.
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
        # Queries with too few neighbours of their own dataset among the nearest of all datasets.
        missing = np.flatnonzero(mine & np.isnan(own[:, 0]))
        own_gallery = gallery[dataset[gallery] == code]
        own[missing] = _accuracies(space, labels, counted[missing], own_gallery, ks)[1]
        values[name] = own[mine]
        numbers[name] = classes[counted[mine]]
        excluded[name] = int((dataset[queries] == code).sum() - mine.sum())
    values["unified"] = unified
    # Numbered dataset by dataset, as `resampled` draws them, wherever their first rows are.
    is_first = np.diff(classes[counted], prepend=-1) != 0
    numbers["unified"] = is_first.cumsum()
    excluded["unified"] = len(queries) - len(counted)
    metrics = (*(f"R@{k}" for k in ks), "RP", "MAP@R")
    return Scores(metrics, values, numbers, excluded)


def _require_names(images: pd.DataFrame) -> None:
    """Raise ValueError if a dataset or label is missing, or named like an overall accuracy."""
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
    """Dataset, class and R of each row of the test table, (n,) each."""

    dataset: np.ndarray  # the dataset as a number
    classes: np.ndarray  # the class as a number, unique over all datasets
    relevant: np.ndarray  # R of the row as a query


def relevant_count(classes: np.ndarray, split: np.ndarray) -> np.ndarray:
    """R of each row as a query: the gallery images of its class, without the query itself.

    `classes` (n,) are numbers, unique over all datasets.
    """
    in_gallery = split != "query"
    of_class = np.bincount(classes[in_gallery], minlength=classes.max() + 1)
    itself = split == "test"
    return of_class[classes] - itself


def _that_count(queries: np.ndarray, labels: Labels) -> np.ndarray:
    """The queries with a relevant image, grouped by dataset, then by class.

    Datasets and classes are in the order of their first rows, the queries of a class in the order
    of the table.
    """
    counted = queries[labels.relevant[queries] > 0]
    order = np.lexsort((labels.classes[counted], labels.dataset[counted]))
    return counted[order]


def _require_all(names: pd.Index, counted: np.ndarray) -> None:
    """Raise ValueError unless each dataset of `names` is in `counted`, by number."""
    alone = np.setdiff1d(np.arange(len(names)), counted)
    if len(alone):
        name = min(names[alone])
        raise ValueError(
            f"dataset {name!r}: no query has another image of its class in the gallery"
        )


@dataclass(frozen=True)
class Ranked:
    """The m neighbours of each of q queries, nearest first.

    Some neighbours do not count (another dataset, or not proven): they are no hits and do not
    raise the rank.
    """

    rank: np.ndarray  # (q, m) the place of each among the neighbours that count, from 1
    hit: np.ndarray  # (q, m) whether it counts and is relevant
    relevant: np.ndarray  # (q,) R

    def tells(self, deepest: int) -> np.ndarray:
        """(q,) whether the neighbours suffice for RP, MAP@R and R@k up to k = `deepest`."""
        count = self.rank[:, -1]
        all_recalls = self.hit.any(axis=1) | (count >= deepest)
        return (count >= self.relevant) & all_recalls


def first_hit(ranked: Ranked) -> np.ndarray:
    """(q,) the rank of the first hit; R@k is 1 if it is at most k."""
    return np.where(ranked.hit, ranked.rank, NEVER).min(axis=1)


def r_precision(ranked: Ranked) -> np.ndarray:
    """(q,) RP: hits among the R nearest, divided by R."""
    within = ranked.hit & (ranked.rank <= ranked.relevant[:, None])
    return within.sum(axis=1) / ranked.relevant


def map_at_r(ranked: Ranked) -> np.ndarray:
    """(q,) MAP@R: the precision at each hit among the R nearest, summed and divided by R."""
    within = ranked.hit & (ranked.rank <= ranked.relevant[:, None])
    precision = within.cumsum(axis=1) / np.maximum(ranked.rank, 1)
    # Added by torch: NumPy's order of addition would change the last bits of kept results.
    total = torch.from_numpy(precision * within).sum(1).numpy()
    return total / ranked.relevant


def _accuracies(
    space: Space, labels: Labels, queries: np.ndarray, gallery: np.ndarray, ks: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """R@k, RP and MAP@R, (queries, ks + 2): in all of `gallery`, and in each query's own dataset.

    The second is NaN for queries with too few neighbours of their own dataset among those found.
    """
    unified = np.full((len(queries), len(ks) + 2), np.nan)
    own = unified.copy()
    deepest = max(ks)
    for least in sorted({min(SHALLOW, deepest), deepest}):
        todo = np.flatnonzero(np.isnan(unified[:, 0]))
        k = np.maximum(labels.relevant[queries[todo]], least)
        # Most evaluations end before the bar is shown.
        with bar(total=len(todo), desc="searching", unit="query", delay=BAR_AFTER) as progress:
            for found in search(space, queries[todo], gallery, k):
                rows = todo[found.queries]
                among_all, among_own = _ranked(found, queries[rows], labels)
                unified[rows] = _measured(among_all, ks)
                own[rows] = _measured(among_own, ks)
                progress.update(len(rows))
    return unified, own


def _ranked(found: Found, queries: np.ndarray, labels: Labels) -> tuple[Ranked, Ranked]:
    """Rank what was found for `queries`: among all images, and within their own dataset."""
    hit = found.proven & (labels.classes[found.rows] == labels.classes[queries, None])
    same_dataset = labels.dataset[found.rows] == labels.dataset[queries, None]
    relevant = labels.relevant[queries]
    among_all = Ranked(found.proven.cumsum(axis=1), hit, relevant)
    among_own = Ranked((found.proven & same_dataset).cumsum(axis=1), hit, relevant)
    return among_all, among_own


def _measured(ranked: Ranked, ks: Sequence[int]) -> np.ndarray:
    """(q, ks + 2) R@k, RP and MAP@R; NaN for a query with too few known neighbours."""
    first = first_hit(ranked)
    columns = [first <= k for k in ks]
    columns += [r_precision(ranked), map_at_r(ranked)]
    measured = np.stack(columns, axis=1).astype(np.float64)
    measured[~ranked.tells(max(ks))] = np.nan
    return measured
