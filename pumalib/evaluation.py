"""Retrieval accuracy as tables: Recall@k, R-Precision and MAP@R, per dataset, unified and harmonic.

The definitions, for a query with R relevant items (same dataset and same class, the query's own image excluded):

    R@k    1 if one of the k nearest is relevant (Sec. 5.1)
    RP     relevant items among the R nearest, divided by R
    MAP@R  1/R times the sum over i <= R of precision@i x [the i-th nearest is relevant]

RP and MAP@R as in Musgrave et al., "A Metric Learning Reality Check", ECCV 2020.  A query without a relevant
item is left out and counted.  The query is removed by image identity: a duplicate of it stays in the gallery.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

DISTANCES = ("cosine", "euclidean")
SPLITS = ("test", "query", "gallery")
BLOCK = 2**24  # similarities held at once: 8 bytes each, about three times that at the peak

Distance = str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def evaluate(
    embeddings: np.ndarray | torch.Tensor,
    images: pd.DataFrame,
    ks: tuple[int, ...] = (1, 2, 4, 8),
    *,
    distance: Distance = "cosine",
    bootstrap: int = 1000,
    seed: int = 0,
    block: int = BLOCK,
    device: str | torch.device | None = None,
) -> pd.DataFrame:
    """Accuracy of `embeddings` per dataset, over all datasets at once, and their harmonic mean (Sec. 5.1).

    It is the table of their `scores`:

    Args:
        embeddings: (n, D), a row per row of `images`.
        images: the test table (`Benchmark.test`): columns `dataset`, `label`, `split`; split "test" is both
            query and gallery.
        ks: the k of R@k.
        distance: "cosine" (embeddings are L2-normalised here), "euclidean", or a function of (q, D) and (g, D)
            float64 embeddings that returns (q, g) distances; both of these take the embeddings as they are.
        bootstrap: resamples of the queries behind the 95 % percentile intervals; 0: intervals are NaN.
        seed: of the bootstrap.
        block: query-gallery pairs held in memory at once; changes the memory, never the result.
        device: where to search; None: where the embeddings are.

    Returns:
        A row per dataset in the order of `images`, then `unified` (all queries against all galleries) and
        `harmonic` (D / sum of 1/accuracy, 0 where one is 0).  Columns, as fractions: `R@k` for each k, `RP`,
        `MAP@R`, and `<metric>_low`, `<metric>_high`; then `queries` (those that count) and `excluded` (those
        without a relevant item).  For `harmonic` the queries are resampled within each dataset.

    Raises:
        ValueError: lengths that differ, a non-finite embedding, an unknown split or distance, or a dataset
            without gallery or without a query that has a relevant item.
    """
    return scores(embeddings, images, ks, distance=distance, block=block, device=device).table(bootstrap, seed)


@dataclass(frozen=True)
class Scores:
    """What each query scored.

    Attributes:
        metrics: names of the columns of `values`.
        values: (queries, metrics) float64 per dataset, in the order of the table, and for "unified".
        excluded: per key of `values` the number of queries without a relevant item.
    """

    metrics: tuple[str, ...]
    values: dict[str, np.ndarray]
    excluded: dict[str, int]

    def packed(self, metric: str = "R@1") -> dict[str, str]:
        """`metric`, an R@k, of every query, a bit each, as base64 text per key of `values`; see `unpack`."""
        column = self.metrics.index(metric)
        bits = {name: np.packbits(values[:, column].astype(bool)) for name, values in self.values.items()}
        return {name: base64.b64encode(packed.tobytes()).decode() for name, packed in bits.items()}

    def table(self, bootstrap: int = 1000, seed: int = 0) -> pd.DataFrame:
        """The table that `evaluate` returns."""
        rng = np.random.default_rng(seed)
        points = {name: values.mean(0) for name, values in self.values.items()}
        samples = {name: resample(values, bootstrap, rng) for name, values in self.values.items()}
        counts = {name: (len(values), self.excluded[name]) for name, values in self.values.items()}
        names = [name for name in self.values if name != "unified"]
        points["harmonic"] = harmonic_mean(np.stack([points[name] for name in names]))
        samples["harmonic"] = harmonic_mean(np.stack([samples[name] for name in names]))
        counts["harmonic"] = counts["unified"]

        table = pd.DataFrame.from_dict(points, orient="index", columns=list(self.metrics))
        for column, metric in enumerate(self.metrics):
            for side, percentile in (("low", 2.5), ("high", 97.5)):
                table[f"{metric}_{side}"] = [
                    np.percentile(samples[name][:, column], percentile) if bootstrap else np.nan for name in points
                ]
        table[["queries", "excluded"]] = [counts[name] for name in points]
        table.index.name = "dataset"
        return table


def scores(embeddings: np.ndarray | torch.Tensor, images: pd.DataFrame, ks: tuple[int, ...] = (1, 2, 4, 8), *,
           distance: Distance = "cosine", block: int = BLOCK, device: str | torch.device | None = None) -> Scores:  # fmt: skip
    """R@k, RP and MAP@R of every query that has a relevant item; arguments and errors as in `evaluate`."""
    embeddings = _prepare(embeddings, images, distance, device)
    if not ks or min(ks) < 1:
        raise ValueError(f"ks must be positive, not {tuple(ks)}")
    names = list(dict.fromkeys(images["dataset"]))
    if {"unified", "harmonic"} & set(names):
        raise ValueError("a dataset is named unified or harmonic, as are two rows of the result: rename it")
    dataset, split = images["dataset"].to_numpy(), images["split"].to_numpy()
    classes = images.groupby(["dataset", "label"], sort=False).ngroup().to_numpy()
    queries, galleries = np.flatnonzero(split != "gallery"), np.flatnonzero(split != "query")

    # R of each query: its class in the gallery, less the query itself where that stands there too.
    relevant = np.bincount(classes[galleries], minlength=classes.max() + 1)[classes] - (split == "test")
    evaluated = queries[relevant[queries] > 0]
    for name in names:
        if name not in dataset[galleries]:
            raise ValueError(f"dataset {name!r} has no gallery image: no row of its table has split test or gallery")
        if name not in dataset[evaluated]:
            raise ValueError(f"dataset {name!r}: no query has another image of its class in the gallery")

    values, excluded = {}, {}
    for name in [*names, "unified"]:
        mine = np.ones(len(dataset), bool) if name == "unified" else dataset == name
        rows, gallery = evaluated[mine[evaluated]], galleries[mine[galleries]]
        values[name] = _metrics(embeddings, rows, gallery, classes, relevant, ks, distance, block)
        excluded[name] = int(mine[queries].sum()) - len(rows)
    return Scores((*(f"R@{k}" for k in ks), "RP", "MAP@R"), values, excluded)


def unpack(text: str, count: int) -> np.ndarray:
    """(count,) 0 or 1: what `Scores.packed` wrote."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count)


def harmonic_mean(accuracies: np.ndarray, axis: int = 0) -> np.ndarray:
    """D / sum(1 / accuracy) over the D entries of `axis`; 0 where one of them is 0 (Sec. 5.1)."""
    accuracies = np.asarray(accuracies, dtype=float)
    with np.errstate(divide="ignore"):
        return accuracies.shape[axis] / (1 / accuracies).sum(axis)


def neighbours(
    embeddings: np.ndarray | torch.Tensor,
    images: pd.DataFrame,
    query_rows: np.ndarray | list[int],
    k: int = 7,
    within_dataset: bool = True,
    *,
    distance: Distance = "cosine",
    block: int = BLOCK,
    device: str | torch.device | None = None,
) -> np.ndarray:
    """(len(query_rows), k) positions in `images` of each query's k nearest gallery images, nearest first (Fig. 9).

    Args:
        embeddings, images, distance, block, device: as in `evaluate`.
        query_rows: positions of the queries in `images`.
        within_dataset: search the query's own dataset only; False: every gallery.

    Raises:
        ValueError: as `evaluate`, or a gallery of fewer than k images besides the query.
    """
    embeddings = _prepare(embeddings, images, distance, device)
    query_rows = np.asarray(query_rows, dtype=int)
    dataset = images["dataset"].to_numpy()
    galleries = np.flatnonzero(images["split"].to_numpy() != "query")
    found = np.empty((len(query_rows), k), dtype=int)
    for name in dict.fromkeys(dataset[query_rows]) if within_dataset else [None]:
        of_query = np.flatnonzero(dataset[query_rows] == name) if within_dataset else np.arange(len(query_rows))
        gallery = galleries[dataset[galleries] == name] if within_dataset else galleries
        if len(gallery) - np.isin(query_rows[of_query], gallery).any() < k:
            where = f"dataset {name!r}" if within_dataset else "the table"
            raise ValueError(f"{where} has {len(gallery)} gallery images, too few for k={k} besides the query")
        for part, nearest, _ in _search(embeddings, query_rows[of_query], gallery, k, distance, block):
            found[of_query[part]] = gallery[nearest.cpu().numpy()]
    return found


def _prepare(embeddings, images: pd.DataFrame, distance: Distance, device) -> torch.Tensor:
    """Checked (n, D) float64 embeddings on `device`; unit length for "cosine"."""
    if not callable(distance) and distance not in DISTANCES:
        raise ValueError(f"unknown distance {distance!r}; known: {', '.join(DISTANCES)}, or a function")
    if not isinstance(embeddings, torch.Tensor):
        embeddings = torch.tensor(np.asarray(embeddings))
    if embeddings.ndim != 2 or len(embeddings) != len(images) or len(images) == 0:
        raise ValueError(
            f"embeddings of shape {tuple(embeddings.shape)} for a table of {len(images)} images; "
            "they must be (n, D) with a row per image, and n at least 1"
        )
    wrong = set(images["split"]) - set(SPLITS)
    if wrong:
        raise ValueError(f"split {sorted(map(str, wrong))} cannot be evaluated; known: {', '.join(SPLITS)}")
    device = torch.device(device) if device is not None else embeddings.device
    if device.type == "mps":  # has no float64
        device = torch.device("cpu")
    embeddings = embeddings.detach().to(device).double()
    broken = ~embeddings.isfinite().all(1)
    if broken.any():
        row = int(broken.nonzero()[0])
        at = images.iloc[row]
        where = f"dataset {at['dataset']!r}" + (f", path {at['path']!r}" if "path" in images else "")
        raise ValueError(f"{int(broken.sum())} embeddings are not finite, first that of row {row} ({where})")
    return torch.nn.functional.normalize(embeddings, dim=1) if distance == "cosine" else embeddings


def _similarities(queries: torch.Tensor, gallery: torch.Tensor, distance: Distance) -> torch.Tensor:
    """(q, g) float64, larger is nearer.

    The last bits of a product depend on the shapes of its factors, so that two equal similarities could
    come out unequal, and differently for each block size.  Cosines are therefore computed in float64 and
    compared in steps of 2^-30 (finer than float32 near 1), distances in float32.
    """
    if distance == "cosine":
        return (queries @ gallery.T).mul_(2.0**30).round_()
    if distance == "euclidean":  # not through the product: small distances would lose their digits
        found = torch.cdist(queries, gallery, compute_mode="donot_use_mm_for_euclid_dist")
    else:
        found = distance(queries, gallery)
        if found.shape != (len(queries), len(gallery)) or not found.isfinite().all():
            raise ValueError(
                f"distance() must return ({len(queries)}, {len(gallery)}) finite numbers, "
                f"not {tuple(found.shape)} with {int((~found.isfinite()).sum())} that are not finite"
            )
    return -found.float().double()


def _search(
    embeddings: torch.Tensor, rows: np.ndarray, gallery: np.ndarray, k: int | np.ndarray, distance: Distance, block: int
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    """Blocks of the search of `rows` in `gallery` (sorted rows of the table), `k` neighbours each or per query.

    Yields (part, nearest, candidate): positions in `rows`; columns of `gallery` (q, largest k of the block),
    nearest first and ties in gallery order; and False where the gallery had no more to offer.
    """
    k = np.broadcast_to(k, len(rows))
    by_k = np.argsort(k, kind="stable")  # so that no list of a block is much longer than its query needs
    references = embeddings[torch.as_tensor(gallery, device=embeddings.device)]
    step = max(1, block // len(gallery))
    for start in range(0, len(rows), step):
        part = by_k[start : start + step]
        similar = _similarities(embeddings[torch.as_tensor(rows[part], device=embeddings.device)], references, distance)
        own = np.searchsorted(gallery, rows[part])
        inside = np.flatnonzero(gallery[np.minimum(own, len(gallery) - 1)] == rows[part])
        similar[inside, own[inside]] = -torch.inf
        yield part, *_ranked(similar, int(k[part[-1]]))


def _ranked(similar: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, k) columns of the largest of `similar` (q, g), equal ones in order of column; False where none is left."""
    # topk breaks ties as it likes: take its k-th value only, then everything at least as near, in gallery order.
    kth = similar.topk(min(k, similar.shape[1]), dim=1, sorted=False).values.amin(1, keepdim=True)
    query, column = (similar >= kth).nonzero(as_tuple=True)
    value = similar[query, column]
    order = value.argsort(descending=True, stable=True)
    order = order[query[order].argsort(stable=True)]
    query, column, value = query[order], column[order], value[order]
    first = torch.searchsorted(query, torch.arange(len(similar), device=similar.device))
    rank = torch.arange(len(query), device=similar.device) - first[query]
    keep = rank < k
    nearest = torch.zeros(len(similar), k, dtype=torch.long, device=similar.device)
    nearest[query[keep], rank[keep]] = column[keep]
    candidate = torch.zeros(len(similar), k, dtype=torch.bool, device=similar.device)
    candidate[query[keep], rank[keep]] = value[keep] > -torch.inf
    return nearest, candidate


def _metrics(
    embeddings: torch.Tensor,
    rows: np.ndarray,
    gallery: np.ndarray,
    classes: np.ndarray,
    relevant: np.ndarray,
    ks: tuple[int, ...],
    distance: Distance,
    block: int,
) -> np.ndarray:
    """(len(rows), len(ks) + 2) R@k, RP and MAP@R of each query; `classes` and `relevant` (R) per row of the table."""
    own = torch.tensor(classes[rows], device=embeddings.device)
    others = torch.tensor(classes[gallery], device=embeddings.device)
    sizes = torch.tensor(relevant[rows], device=embeddings.device)
    found = np.empty((len(rows), len(ks) + 2))
    longest = np.maximum(relevant[rows], max(ks))
    for part, nearest, candidate in _search(embeddings, rows, gallery, longest, distance, block):
        of = torch.as_tensor(part, device=embeddings.device)
        size = sizes[of]  # (q,)
        hit = candidate & (others[nearest] == own[of, None])  # (q, k)
        rank = torch.arange(1, hit.shape[1] + 1, device=embeddings.device)
        within = (hit & (rank <= size[:, None])).double()  # hits among the R nearest
        precision = within.cumsum(1) / rank
        columns = [hit[:, :k].any(1).double() for k in ks]
        columns += [within.sum(1) / size, (precision * within).sum(1) / size]
        found[part] = torch.stack(columns, dim=1).cpu().numpy()
    return found


def resample(values: np.ndarray, bootstrap: int, rng: np.random.Generator) -> np.ndarray:
    """(bootstrap, columns) means of `values` (queries, columns), queries drawn with replacement."""
    n = len(values)
    means = np.empty((bootstrap, values.shape[1]))
    for sample in means:
        sample[:] = np.bincount(rng.integers(n, size=n), minlength=n) @ values / n
    return means
