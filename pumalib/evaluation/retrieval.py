"""Retrieval accuracy as tables: Recall@k, R-Precision and MAP@R, per dataset, unified and harmonic.

The definitions, for a query with R relevant items (same dataset and same class, the query's own image excluded):

    R@k    1 if one of the k nearest is relevant (Sec. 5.1)
    RP     relevant items among the R nearest, divided by R
    MAP@R  1/R times the sum over i <= R of precision@i x [the i-th nearest is relevant]

RP and MAP@R as in Musgrave et al., "A Metric Learning Reality Check", ECCV 2020.  A query without a relevant
item is left out and counted.  The query is removed by image identity: a duplicate of it stays in the gallery.

Ranks are those of float64.  On a CPU faiss finds some more neighbours than needed in float32, which are compared
again in float64; a query whose last one is too near to rule out all that was not found is searched in float64 alone.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import faiss
import numpy as np
import pandas as pd
import torch
from torch import Tensor

from .statistics import harmonic_mean, resample

SPLITS = ("test", "query", "gallery")
QUERIES = 4096  # given to faiss at once
SPARE = 8  # neighbours it finds beyond those needed
SHALLOW = 8  # most queries have a hit among so many neighbours; only the others need a larger k of R@k
BLOCK = 2**24  # similarities held at once: 8 bytes each, about three times that at the peak
ROW = 2**32 - 1  # the bits of a key that are a row of the table
NONE = -(2**63)  # the key of no neighbour

Array = np.ndarray | Tensor
Distance = str | Callable[[Tensor, Tensor], Tensor]


def evaluate(
    embeddings: Array, images: pd.DataFrame, ks: Sequence[int] = (1, 2, 4, 8), *, bootstrap=1000, seed=0, **search
) -> pd.DataFrame:
    """The `Scores.table` of `scores`, whose arguments and errors it shares."""
    return scores(embeddings, images, ks, **search).table(bootstrap, seed)


@dataclass(frozen=True)
class Scores:
    """What each query scored: per dataset, in the order of the table, and for "unified"."""

    metrics: tuple[str, ...]  # the columns of `values`
    values: dict[str, np.ndarray]  # (queries, metrics) float64
    excluded: dict[str, int]  # number of queries without a relevant item

    def packed(self, metric: str = "R@1") -> dict[str, str]:
        """`metric`, an R@k, of every query, a bit each, as base64 text per key of `values`; see `unpack`."""
        column = self.metrics.index(metric)
        bits = {name: np.packbits(values[:, column].astype(bool)) for name, values in self.values.items()}
        return {name: base64.b64encode(packed.tobytes()).decode() for name, packed in bits.items()}

    def table(self, bootstrap: int = 1000, seed: int = 0) -> pd.DataFrame:
        """Means, as fractions, and 95 % percentile intervals of `bootstrap` resamples of the queries (0: NaN).

        A row per dataset, then `unified` (all queries against all galleries) and `harmonic` (`harmonic_mean`, its
        queries resampled within each dataset; Sec. 5.1).  Columns: the metrics, `<metric>_low`, `<metric>_high`;
        then `queries` (those that count) and `excluded` (those without a relevant item).
        """
        rng = np.random.default_rng(seed)
        points = {name: values.mean(0) for name, values in self.values.items()}
        samples = {name: resample(values, bootstrap, rng) for name, values in self.values.items()}
        counts = {name: (len(values), self.excluded[name]) for name, values in self.values.items()}
        for means in (points, samples):
            means["harmonic"] = harmonic_mean(np.stack([means[name] for name in self.values if name != "unified"]))
        counts["harmonic"] = counts["unified"]
        table = pd.DataFrame.from_dict(points, orient="index", columns=list(self.metrics)).rename_axis("dataset")
        for column, metric in enumerate(self.metrics):
            for side, percentile in (("low", 2.5), ("high", 97.5)):
                bounds = [np.percentile(samples[name][:, column], percentile) for name in points if bootstrap]
                table[f"{metric}_{side}"] = bounds or np.nan
        table[["queries", "excluded"]] = [counts[name] for name in points]
        return table


def unpack(text: str, count: int) -> np.ndarray:
    """(count,) 0 or 1: what `Scores.packed` wrote."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count)


def scores(
    embeddings: Array, images: pd.DataFrame, ks: Sequence[int] = (1, 2, 4, 8), *, distance="cosine", device=None
) -> Scores:
    """R@k, RP and MAP@R of every query that has a relevant item.

    Args:
        embeddings: (n, D), a row per row of `images`.
        images: the test table: columns `dataset`, `label`, `split`; split "test" is both query and gallery.
        ks: the k of R@k.
        distance: "cosine" (embeddings are L2-normalised here), "euclidean", or a function of (q, D) and (g, D)
            float64 embeddings that returns (q, g) distances; both of these take the embeddings as they are.
        device: where to search; None: where the embeddings are.

    Raises:
        ValueError: lengths that differ, a non-finite embedding, an unknown split or distance, or a dataset
            without gallery or without a query that has a relevant item.
    """
    embeddings = _prepared(embeddings, images, distance, device)
    if not ks or min(ks) < 1:
        raise ValueError(f"ks must be positive, not {tuple(ks)}")
    dataset, names = pd.factorize(images["dataset"])
    if {"unified", "harmonic"} & set(names):
        raise ValueError("a dataset is named unified or harmonic, as are two rows of the result: rename it")
    classes = images.groupby(["dataset", "label"], sort=False).ngroup().to_numpy()
    split = images["split"].to_numpy()
    queries, gallery = np.flatnonzero(split != "gallery"), np.flatnonzero(split != "query")

    # R of each query: its class in the gallery, less the query itself where that stands there too.
    relevant = np.bincount(classes[gallery], minlength=classes.max() + 1)[classes] - (split == "test")
    rows = queries[relevant[queries] > 0]
    for code, name in enumerate(names):
        if code not in dataset[gallery]:
            raise ValueError(f"dataset {name!r} has no gallery image: no row of its table has split test or gallery")
        if code not in dataset[rows]:
            raise ValueError(f"dataset {name!r}: no query has another image of its class in the gallery")
    search = partial(_search, embeddings, distance)
    labels = torch.tensor(np.stack([dataset, classes, relevant]), device=embeddings.device)
    unified, own = _accuracies(search, rows, gallery, labels, ks)
    values, excluded = {}, {}
    for code, name in enumerate(names):
        mine = dataset[rows] == code
        missing = np.flatnonzero(mine & np.isnan(own[:, 0]))
        own[missing] = _accuracies(search, rows[missing], gallery[dataset[gallery] == code], labels, ks)[1]
        values[name], excluded[name] = own[mine], int((dataset[queries] == code).sum() - mine.sum())
    values["unified"], excluded["unified"] = unified, len(queries) - len(rows)
    return Scores((*(f"R@{k}" for k in ks), "RP", "MAP@R"), values, excluded)


def neighbours(
    embeddings: Array, images: pd.DataFrame, query_rows, k=7, within_dataset=True, *, distance="cosine", device=None
) -> np.ndarray:
    """(len(query_rows), k) positions in `images` of each query's k nearest gallery images, nearest first (Fig. 9).

    `query_rows` are positions in `images`; `within_dataset` searches the query's own dataset only, else every
    gallery.  The rest, and the errors, as `scores`; ValueError too for fewer than k images besides the query.
    """
    embeddings = _prepared(embeddings, images, distance, device)
    query_rows = np.asarray(query_rows, dtype=int)
    dataset = images["dataset"].to_numpy() if within_dataset else np.zeros(len(images))
    galleries = np.flatnonzero(images["split"].to_numpy() != "query")
    found = np.empty((len(query_rows), k), dtype=int)
    for name in dict.fromkeys(dataset[query_rows]):
        mine, gallery = np.flatnonzero(dataset[query_rows] == name), galleries[dataset[galleries] == name]
        if len(gallery) - np.isin(query_rows[mine], gallery).any() < k:
            where = f"dataset {name!r}" if within_dataset else "the table"
            raise ValueError(f"{where} has {len(gallery)} gallery images, too few for k={k} besides the query")
        for part, nearest, _ in _search(embeddings, distance, query_rows[mine], gallery, np.full(len(mine), k)):
            found[mine[part]] = nearest[:, :k].cpu()
    return found


def _prepared(embeddings: Array, images: pd.DataFrame, distance: Distance, device) -> Tensor:
    """Checked (n, D) float64 embeddings on `device`; unit length for "cosine"."""
    if not callable(distance) and distance not in ("cosine", "euclidean"):
        raise ValueError(f"unknown distance {distance!r}; known: cosine, euclidean, or a function")
    embeddings = embeddings.detach() if isinstance(embeddings, Tensor) else torch.tensor(np.asarray(embeddings))
    if embeddings.ndim != 2 or len(embeddings) != len(images) or len(images) == 0:
        given = f"embeddings of shape {tuple(embeddings.shape)} for a table of {len(images)} images"
        raise ValueError(f"{given}; they must be (n, D) with a row per image, and n at least 1")
    wrong = set(images["split"]) - set(SPLITS)
    if wrong:
        raise ValueError(f"split {sorted(map(str, wrong))} cannot be evaluated; known: {', '.join(SPLITS)}")
    device = torch.device(device or embeddings.device)
    embeddings = embeddings.to("cpu" if device.type == "mps" else device).double()  # MPS has no float64
    broken = (~embeddings.isfinite().all(1)).nonzero()[:, 0].tolist()
    if broken:
        at = images.iloc[broken[0]]
        where = f"dataset {at['dataset']!r}" + (f", path {at['path']!r}" if "path" in images else "")
        raise ValueError(f"{len(broken)} embeddings are not finite, first that of row {broken[0]} ({where})")
    return torch.nn.functional.normalize(embeddings, dim=1) if distance == "cosine" else embeddings


def _search(embeddings: Tensor, distance: Distance, rows: np.ndarray, gallery: np.ndarray, k: np.ndarray) -> Iterator:
    """Blocks of the search of `rows` in `gallery`, both rows of the table, for `k` (len(rows),) neighbours.

    Yields (part, nearest, proven): positions in `rows`; rows of the table (q, m), nearest first and ties in the
    table's order; and True for those that surely stand in their place: the first k at least, or all there are.
    """
    k = np.minimum(k, len(gallery) - np.isin(rows, gallery))
    queue = np.argsort(k, kind="stable")  # so that no list of a block is much longer than its query needs
    rows, gallery = (torch.as_tensor(array, device=embeddings.device) for array in (rows, gallery))
    references = embeddings[gallery]
    if not callable(distance) and embeddings.device.type == "cpu":
        left, right, greatest = _factors(embeddings[rows], references, distance)
        unproven = [queue[:0]]
        for start in range(0, len(queue), QUERIES):
            part = queue[start : start + QUERIES]
            depth = min(int(k[part[-1]]) + 1 + SPARE, len(gallery))
            products, column = faiss.knn(left[part], right, depth, metric=faiss.METRIC_INNER_PRODUCT)
            nearest = gallery[column]
            step = max(1, BLOCK // 16 // (depth * embeddings.shape[1]))
            blocks = zip(embeddings[rows[part]][:, None].split(step), nearest.split(step))
            similar = torch.cat([_similarities(query, embeddings[near], distance) for query, near in blocks])
            keys = _keys(similar[:, 0], rows[part], nearest).sort(descending=True).values
            proven = keys > (greatest(products[:, -1:]) << 32 if depth < len(gallery) else NONE)
            done = proven.sum(1).numpy() >= k[part]
            yield part[done], keys[done].neg() & ROW, proven[done]
            unproven.append(part[~done])
        queue = np.concatenate(unproven)
    step = max(1, BLOCK // len(gallery))
    for start in range(0, len(queue), step):
        part = queue[start : start + step]
        similar = _similarities(embeddings[rows[part]], references, distance)
        keys = _keys(similar, rows[part], gallery).topk(int(k[part[-1]])).values
        yield part, keys.neg() & ROW, keys > NONE


def _factors(queries: Tensor, gallery: Tensor, distance: str) -> tuple[np.ndarray, np.ndarray, Callable]:
    """(q, E) and (g, E) float32 whose inner products are the cosines, or -d^2 / 2 of distances in units of `scale`.

    The third is what `_similarities` can be at most where the float32 product is at most that given.
    """
    if distance == "euclidean":  # lengths of at most 1 around the mean have the least error
        queries, gallery = queries - gallery.mean(0), gallery - gallery.mean(0)
        scale = max(float(x.norm(dim=1).max()) for x in (queries, gallery)) or 1.0
        x, y = queries / scale, gallery / scale
        xx, yy = -x.square().sum(1, True) / 2, -y.square().sum(1, True) / 2
        queries = torch.cat([x, xx, torch.ones_like(xx)], dim=1)
        gallery = torch.cat([y, torch.ones_like(yy), yy], dim=1)
    # Factors, terms and partial sums are each rounded once (Higham, Accuracy and Stability, Sec. 3.1).
    error = 1.01 * (queries.shape[1] + 2) * 2.0**-24 * float(queries.norm(dim=1).max() * gallery.norm(dim=1).max())

    def greatest(products: np.ndarray) -> Tensor:
        bound = torch.from_numpy(products).double() + error
        if distance == "cosine":
            return (bound * 2.0**30).ceil().long()
        return -_ordered(scale * (-2 * bound).clamp_min(0).sqrt())

    return queries.float().numpy(), gallery.float().numpy(), greatest


def _similarities(queries: Tensor, gallery: Tensor, distance: Distance) -> Tensor:
    """(..., q, g) integers of queries (..., q, D) and gallery (..., g, D), larger is nearer.

    The last bits of a product depend on the shapes of its factors, so that two equal similarities could
    come out unequal, and differently for each block size.  Cosines are therefore computed in float64 and
    compared in steps of 2^-30 (finer than float32 near 1), distances in float32.
    """
    if distance == "cosine":
        return (queries @ gallery.mT).mul_(2.0**30).round_().long()
    if distance == "euclidean":  # not through the product: small distances would lose their digits
        return -_ordered(torch.cdist(queries, gallery, compute_mode="donot_use_mm_for_euclid_dist"))
    found = distance(queries, gallery)
    if found.shape != (len(queries), len(gallery)) or not found.isfinite().all():
        given = f"{tuple(found.shape)} with {int((~found.isfinite()).sum())} that are not finite"
        raise ValueError(f"distance() must return ({len(queries)}, {len(gallery)}) finite numbers, not {given}")
    return -_ordered(found)


def _ordered(numbers: Tensor) -> Tensor:
    """int64 in the order of `numbers` as float32: their bits, whose order is reversed where the sign is set."""
    bits = (numbers.float() + 0.0).view(torch.int32).long()  # + 0.0: -0.0 is 0.0
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def _keys(similar: Tensor, rows: Tensor, gallery: Tensor) -> Tensor:
    """Similarities (q, g) of `rows` (q,) made unequal: ties in the order of `gallery` ((g,) or (q, g)), itself last."""
    return ((similar << 32) - gallery).masked_fill_(rows[:, None] == gallery, NONE)


def _accuracies(search: Callable, rows: np.ndarray, gallery: np.ndarray, labels: Tensor, ks) -> np.ndarray:
    """(2, len(rows), len(ks) + 2) R@k, RP and MAP@R of queries `rows` in `gallery`, and in their own dataset's part.

    `labels` are dataset, class and R of every row of the table.  NaN in the second: the nearest of the whole gallery
    do not have enough of the own dataset to tell.
    """
    dataset, classes, relevant = labels
    found = np.full((2, len(rows), len(ks) + 2), np.nan)
    for least in (min(SHALLOW, max(ks)), max(ks)):
        todo = np.flatnonzero(np.isnan(found[0, :, 0]))
        wanted = relevant[rows[todo]].clamp_min(least).cpu().numpy()
        for part, nearest, proven in search(rows[todo], gallery, wanted) if len(todo) else ():
            query = rows[todo[part]]
            size = relevant[query, None]
            hit = proven & (classes[nearest] == classes[query, None])
            for side, counted in enumerate((proven, proven & (dataset[nearest] == dataset[query, None]))):
                rank = counted.cumsum(1)
                first = rank.masked_fill(~hit, ROW).amin(1, keepdim=True)
                within = (hit & (rank <= size)).double()  # hits among the R nearest
                precision = within.cumsum(1) / rank.clamp_min(1)
                columns = [first <= k for k in ks]
                columns += [within.sum(1, True) / size, (precision * within).sum(1, True) / size]
                enough = (rank[:, -1:] >= size) & ((first < ROW) | (rank[:, -1:] >= max(ks)))
                found[side, todo[part]] = torch.cat(columns, dim=1).where(enough, torch.nan).cpu()
    return found
