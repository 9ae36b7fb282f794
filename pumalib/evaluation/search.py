"""Exact nearest neighbours: the order of float64, mostly at the speed of float32.

Neighbours are ordered by float64, and ties stand in the order of the table.  On a CPU few cosines
need to be computed in float64 for that, since the error of a float32 product has a bound:

1. faiss finds by float32 products a few more neighbours than are needed.
2. Those that are too near each other to tell their order are scored again in float64.
3. A neighbour is *proven* where nothing that faiss left out can be above it.  A query with too few
   proven neighbours (duplicates, collapsed embeddings) is searched in float64 as a whole.

Threads share the queries and never a step: on a busy machine each of many small shared steps waits
for the thread that is not running, and the search takes several times as long.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import faiss
import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..data import check_known

# "cosine", or a function of float64 (q, D) and (g, D) that returns distances (q, g).
Distance = str | Callable[[Tensor, Tensor], Tensor]

# Queries that share a list length: for each faiss finds as many neighbours as one of them needs.
QUERIES = 4096
# A thread gives to faiss at once so many numbers (queries x dimensions), and so many queries at
# least.  With fewer numbers than 128,000 faiss 1.15 uses no matrix products.
LEAST_NUMBERS = 2**17
LEAST_QUERIES = 256
# Of a query that needs more neighbours nearly all are too near each other for float32: it is
# searched in float64 at once, with few similarities held, as each is followed by many neighbours.
DEEP = 1500
DEEP_BLOCK = 2**22
# Neighbours that faiss finds beyond those needed.
SPARE = 8
# Pairs that are scored again at once: their vectors should fit a processor's cache.
PAIRS = 512
# Similarities held at once: 8 bytes each, about three times that at the peak.
BLOCK = 2**24

# A key holds how near an image of the gallery is, and which one it is, in one int64.
# A larger key is nearer, and among equally near images the first of the table has the largest key:
#
#     bit 63                            32 31                             0
#        +--------------------------------+--------------------------------+
#        | similarity: a signed integer   | 2**32 - 1 - row of the table   |
#        +--------------------------------+--------------------------------+
#
# The similarity is a cosine in steps of 2**-30, or the reversed order of a float32 distance: the
# last bits of a float64 product depend on the shapes of its factors, and duplicates must tie.
# The order of keys is the order of neighbours, so that any sort and any top-k is exact.
LAST_ROW = 2**32 - 1
STEPS = 2.0**30
# The similarity of a query to itself, which is no neighbour: below all others.
ITSELF = -(2**31)


@dataclass(frozen=True)
class Space:
    """Embeddings, and how they are compared."""

    embeddings: Tensor  # (n, D) float64; of unit length for "cosine"
    distance: Distance


@dataclass(frozen=True)
class Found:
    """The neighbours of some of the queries of a search."""

    queries: np.ndarray  # (q,) positions in the queries that were asked for
    rows: np.ndarray  # (q, m) rows of the table, nearest first, ties in the order of the table
    proven: np.ndarray  # (q, m) True for the first ones, which surely stand in their place


def neighbours(
    embeddings: Any,
    images: pd.DataFrame,
    queries: Any,
    k: int = 7,
    within_dataset: bool = True,
    *,
    distance: Distance = "cosine",
    device: Any = None,
) -> np.ndarray:
    """Positions in `images` of each query's k nearest gallery images, nearest first (Fig. 9).

    `queries` are positions too; the result is (len(queries), k).  `within_dataset` searches the
    query's own dataset only, else every gallery.  Everything else is as of `metrics.scores`.
    Raises ValueError also where fewer than k images are there besides the query.
    """
    space = make_space(embeddings, images, distance, device)
    queries = np.asarray(queries)
    if queries.dtype.kind not in "iu":
        raise ValueError(f"queries are {queries.dtype}; positions are needed, as of np.flatnonzero")
    if len(np.unique(queries)) < len(queries):
        # Mostly they are zeros and ones that stand for False and True.
        what = "queries name a position more than once"
        raise ValueError(f"{what}; give each once, as np.flatnonzero does")
    dataset = np.full(len(images), "all")
    if within_dataset:
        dataset = images["dataset"].to_numpy()
    in_gallery = images["split"].to_numpy() != "query"

    nearest = np.empty((len(queries), k), dtype=int)
    for name in dict.fromkeys(dataset[queries]):
        mine = np.flatnonzero(dataset[queries] == name)
        gallery = np.flatnonzero((dataset == name) & in_gallery)
        without_query = len(gallery) - np.isin(queries[mine], gallery).any()
        if without_query < k:
            raise ValueError(
                f"dataset {name!r} has {len(gallery)} gallery images, "
                f"too few for k={k} besides the query"
            )
        for found in search(space, queries[mine], gallery, np.full(len(mine), k)):
            nearest[mine[found.queries]] = found.rows[:, :k]
    return nearest


def make_space(embeddings: Any, images: pd.DataFrame, distance: Distance, device: Any) -> Space:
    """The embeddings as they are compared.

    `embeddings` (n, D), an array or a tensor, have a row per row of `images`.  `device`: where to
    search; None: where the embeddings are.  Raises ValueError, which names what does not fit.
    """
    if isinstance(distance, str):
        check_known("distance", [distance], ("cosine", "a function"))
    check_known("split", images["split"].unique(), ("test", "query", "gallery"))
    vectors = as_vectors(embeddings)
    if vectors.ndim != 2 or len(vectors) == 0 or len(vectors) != len(images):
        shape = tuple(vectors.shape)
        raise ValueError(
            f"embeddings of shape {shape} for a table of {len(images)} images; a row each is needed"
        )

    device = torch.device(device or vectors.device)
    if device.type == "mps":
        # It has no float64.
        device = torch.device("cpu")
    vectors = vectors.to(device)
    _require_finite(vectors, images)
    vectors = vectors.double()
    if distance == "cosine":
        vectors = torch.nn.functional.normalize(_of_usual_size(vectors), dim=1)
    return Space(vectors, distance)


def _of_usual_size(vectors: Tensor) -> Tensor:
    """Rows in their directions, so large that `normalize` does not take them for zero.

    Nor may the squares of huge ones be infinite.  All other rows stay as they are, to the last bit.
    """
    largest = torch.linalg.vector_norm(vectors, torch.inf, dim=1, keepdim=True)
    outside = ((largest < 1e-12) & (largest > 0)) | (largest > 1e100)
    if not outside.any():
        return vectors
    return vectors / largest.where(outside, 1)


def as_vectors(embeddings: Any) -> Tensor:
    """Embeddings of any kind as a tensor; ValueError where they are no real numbers."""
    if isinstance(embeddings, Tensor):
        vectors = embeddings.detach()
    else:
        try:
            array = np.asarray(embeddings)
        except (ValueError, TypeError) as error:
            what = f"embeddings are no array of numbers ({error})"
            raise ValueError(f"{what}; vectors of one length are needed") from None
        if array.dtype.kind not in "fiu":
            raise ValueError(f"embeddings are {array.dtype}; real numbers are needed")
        vectors = torch.tensor(array)
    if vectors.is_complex():
        raise ValueError(f"embeddings are {vectors.dtype}; real numbers are needed")
    return vectors


def _require_finite(vectors: Tensor, images: pd.DataFrame) -> None:
    broken = (~vectors.isfinite().all(1)).nonzero()[:, 0].tolist()
    if broken:
        first = f"first that of row {broken[0]}: {images.iloc[broken[0]].to_dict()}"
        raise ValueError(f"{len(broken)} embeddings are not finite, {first}")


def search(
    space: Space, queries: np.ndarray, gallery: np.ndarray, k: np.ndarray
) -> Iterator[Found]:
    """Search `queries` in `gallery`, both rows of the table, for `k` (len(queries),) neighbours.

    Yields every query once, in blocks.  Of each, k neighbours are proven, or all there are.
    """
    if len(queries) == 0:
        return
    k = np.minimum(k, len(gallery) - np.isin(queries, gallery))
    # By k, so that no list of a block is much longer than its query needs.
    queue = np.argsort(k, kind="stable")

    if space.distance == "cosine" and space.embeddings.device.type == "cpu":
        is_deep = k[queue] > DEEP
        deep = queue[is_deep]
        unproven = [queue[:0]]
        for found in _by_float32(space, queries, gallery, k, queue[~is_deep]):
            enough = found.proven.sum(axis=1) >= k[found.queries]
            yield Found(found.queries[enough], found.rows[enough], found.proven[enough])
            unproven.append(found.queries[~enough])
        queue = np.concatenate(unproven)
        yield from _in_float64(space, queries, gallery, k, deep, similarities=DEEP_BLOCK)
    yield from _in_float64(space, queries, gallery, k, queue, similarities=BLOCK)


def _in_float64(
    space: Space,
    queries: np.ndarray,
    gallery: np.ndarray,
    k: np.ndarray,
    queue: np.ndarray,
    *,
    similarities: int,
) -> Iterator[Found]:
    """What float64 finds for the queries of `queue`, in which k grows, in blocks of so many."""
    if len(queue) == 0:
        return
    rows = torch.as_tensor(gallery, device=space.embeddings.device)
    # Once for all blocks: they may be a gigabyte.
    references = space.embeddings[rows]
    for part in _blocks(queue, max(1, similarities // len(gallery))):
        found, proven = _by_float64(space, queries[part], rows, references, int(k[part[-1]]))
        yield Found(part, found, proven)


def _blocks(array: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(array), size):
        yield array[start : start + size]


def _by_float32(
    space: Space, queries: np.ndarray, gallery: np.ndarray, k: np.ndarray, queue: np.ndarray
) -> Iterator[Found]:
    """What float32 finds for the queries of `queue`, in which k grows, and what it proves."""
    vectors = space.embeddings.numpy()
    references = vectors[gallery].astype(np.float32)
    size = max(LEAST_QUERIES, LEAST_NUMBERS // vectors.shape[1])
    tasks = []
    for block in _blocks(queue, QUERIES):
        count = min(int(k[block[-1]]) + 1 + SPARE, len(gallery))
        parts = np.array_split(block, max(1, len(block) // size))
        tasks += [(part, count) for part in parts]

    def find(task: tuple[np.ndarray, int]) -> Found:
        part, count = task
        rows, proven = _nearest(vectors, queries[part], gallery, references, count)
        return Found(part, rows, proven)

    # Each thread has its own queries, and faiss shares none of its steps among threads.
    threads = faiss.omp_get_max_threads()
    alone = partial(faiss.omp_set_num_threads, 1)
    with ThreadPoolExecutor(threads, initializer=alone) as pool:
        yield from pool.map(find, tasks)


def _nearest(
    vectors: np.ndarray,
    queries: np.ndarray,
    gallery: np.ndarray,
    references: np.ndarray,
    count: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The (q, count) nearest rows by float32, in the order of float64; and which are proven.

    `references` are the `vectors` of the gallery in float32.
    """
    rounded = vectors[queries].astype(np.float32)
    found, columns = faiss.knn(rounded, references, count, metric=faiss.METRIC_INNER_PRODUCT)
    products = found.astype(np.float64)
    rows = gallery[columns]
    error = _error(vectors.shape[1])

    cosines = _ordered(vectors, queries, rows, products, error)
    similarity = np.rint(cosines * STEPS).astype(np.int64)
    similarity[rows == queries[:, None]] = ITSELF
    keys = np.sort(_key(similarity, rows), axis=1)[:, ::-1]

    similarity = _similarity(keys)
    proven = similarity > ITSELF
    if count < len(gallery):
        # No cosine that faiss left out is above this.
        highest = products[:, -1:] + error
        proven = similarity > np.ceil(highest * STEPS)
    return _row(keys), proven


def _error(dim: int) -> float:
    """The most by which a float32 product of unit vectors, rounded to float32, is off.

    Higham, Accuracy and Stability of Numerical Algorithms, Sec. 3.1.
    """
    return 1.01 * (dim + 2) * 2.0**-24


def _ordered(
    vectors: np.ndarray, queries: np.ndarray, rows: np.ndarray, products: np.ndarray, error: float
) -> np.ndarray:
    """`products` (q, m), descending along a line, but cosines by float64 where it matters.

    It matters where two neighbours are so near each other that float32 cannot tell their order.
    Everywhere else a product, as its cosine, is at least a step from what else is in its line, and
    from the most that a cosine beyond the last can be.
    """
    apart = 2 * error + 2 / STEPS
    close = products[:, :-1] - products[:, 1:] <= apart
    unsure = np.zeros(products.shape, dtype=bool)
    unsure[:, :-1] |= close
    unsure[:, 1:] |= close

    line, place = np.nonzero(unsure)
    cosines = products.copy()
    cosines[line, place] = _cosines(vectors, queries[line], rows[line, place])
    return cosines


def _cosines(vectors: np.ndarray, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The cosine of each pair of rows, (pairs,), by float64.

    einsum adds in one order whatever the shapes are, so that duplicates have the same.
    """
    found = [np.empty(0)]
    for pairs in _blocks(np.arange(len(rows)), PAIRS):
        found.append(np.einsum("pd,pd->p", vectors[queries[pairs]], vectors[rows[pairs]]))
    return np.concatenate(found)


def _by_float64(
    space: Space, queries: np.ndarray, rows: Tensor, references: Tensor, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The (q, count) nearest of `rows`, and which are neighbours: all but a query itself.

    `references` are the vectors of `rows`.
    """
    own = torch.as_tensor(queries, device=rows.device)
    vectors = space.embeddings[own]
    if isinstance(space.distance, str):
        similarity = (vectors @ references.mT).mul_(STEPS).round_().long()
    else:
        similarity = _reversed_order(_distances(space.distance, vectors, references))
    similarity = similarity.masked_fill_(own[:, None] == rows, ITSELF)
    nearest = _key(similarity, rows).topk(count).values.cpu().numpy()
    return _row(nearest), _similarity(nearest) > ITSELF


def _distances(distance: Callable, queries: Tensor, references: Tensor) -> Tensor:
    """What the function returns; a ValueError says what is wrong with it."""
    found = distance(queries, references)
    expected = (len(queries), len(references))
    if found.shape != expected or not found.isfinite().all():
        broken = int((~found.isfinite()).sum())
        raise ValueError(
            f"distance() must return {expected} finite numbers, "
            f"not {tuple(found.shape)} with {broken} that are not finite"
        )
    return found


def _reversed_order(distances: Tensor) -> Tensor:
    """Integers of 32 bits that are larger where a distance, in float32, is smaller."""
    # Adding 0.0 makes 0.0 of -0.0.
    bits = (distances.float() + 0.0).view(torch.int32).long()
    # The bits of positive floats are in their order, those of negative ones in the reversed order.
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return -ascending


def _key(similarity: Any, rows: Any) -> Any:
    """Keys of arrays or tensors of int64."""
    return (similarity << 32) + (LAST_ROW - rows)


def _similarity(keys: np.ndarray) -> np.ndarray:
    return keys >> 32


def _row(keys: np.ndarray) -> np.ndarray:
    return LAST_ROW - (keys & LAST_ROW)
