"""Exact nearest neighbours: the order of float64, mostly at the speed of float32.

Neighbours are ordered by float64 similarity, ties by their row of the table.  On a CPU only a few
cosines must be computed in float64, since the error of a float32 product is bounded:

1. faiss finds a few more neighbours than needed, by float32 products.
2. Neighbours that are too close for float32 to order are scored again in float64.
3. A neighbour is *proven* if no image that faiss left out can be nearer.  A query with too few
   proven neighbours (duplicates, collapsed embeddings) is searched again, all in float64.

Each thread works on its own queries.  If threads shared the many small steps of one query, each
step would wait, on a busy machine, for a thread that is not running, and the search would take
several times as long.
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

# Queries per block: faiss finds for each as many neighbours as the largest k of its block needs.
QUERIES = 4096
# A call of faiss gets at least this many numbers (queries x dimensions), and at least this many
# queries.  With fewer numbers than 128,000 faiss 1.15 uses no matrix products.
LEAST_NUMBERS = 2**17
LEAST_QUERIES = 256
# A query that needs more neighbours than this is searched in float64 at once: float32 could order
# only few of them.  Its blocks hold fewer similarities, as the many neighbours need memory too.
DEEP = 1500
DEEP_BLOCK = 2**22
# Extra neighbours that faiss finds beyond the needed ones.
SPARE = 8
# Pairs scored again at a time: their vectors should fit into a processor's cache.
PAIRS = 512
# Similarities in memory at once: 8 bytes each, about three times that at the peak.
BLOCK = 2**24

# A key packs the similarity of a gallery image and its row of the table into one int64.  A larger
# key is nearer, and among equally near images the first of the table has the largest key:
#
#     bit 63                            32 31                             0
#        +--------------------------------+--------------------------------+
#        | similarity: a signed integer   | 2**32 - 1 - row of the table   |
#        +--------------------------------+--------------------------------+
#
# The similarity is a cosine in steps of 2**-30, or the reversed order of a float32 distance.  It is
# rounded so that duplicates tie: the last bits of a float64 product depend on its factors' shapes.
# The order of keys is the order of neighbours, so that any sort and any top-k is exact.
LAST_ROW = 2**32 - 1
STEPS = 2.0**30
# The similarity of a query to itself, below all others: a query is not its own neighbour.
ITSELF = -(2**31)


@dataclass(frozen=True)
class Space:
    """Embeddings and the distance that compares them."""

    embeddings: Tensor  # (n, D) float64; of unit length for "cosine"
    distance: Distance


@dataclass(frozen=True)
class Found:
    """The neighbours of some of the queries of a search."""

    queries: np.ndarray  # (q,) positions in the queries of the search
    rows: np.ndarray  # (q, m) rows of the table, nearest first, ties in the order of the table
    proven: np.ndarray  # (q, m) True for the first ones, whose order is certain


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

    `queries` are positions too; the result is (len(queries), k).  `within_dataset`: search only the
    query's own dataset, not all datasets.  The other arguments and errors are those of
    `metrics.scores`.  Also raises ValueError if there are fewer than k images besides the query.
    """
    space = make_space(embeddings, images, distance, device)
    queries = np.asarray(queries)
    if queries.dtype.kind not in "iu":
        raise ValueError(f"queries are {queries.dtype}; positions are needed, as of np.flatnonzero")
    if len(np.unique(queries)) < len(queries):
        # Usually these are zeros and ones that mean False and True.
        what = "queries name a position more than once"
        raise ValueError(f"{what}; give each once, as np.flatnonzero does")
    if len(queries) and not 0 <= queries.min() <= queries.max() < len(images):
        raise ValueError(f"queries must be positions from 0 to {len(images) - 1}")
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
    """Check the embeddings and prepare them for comparison.

    `embeddings` (n, D), an array or a tensor, have a row for each row of `images`.  `device`: where
    to search; None: where the embeddings are.  Raises ValueError, which names what does not fit.
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
        # MPS has no float64.
        device = torch.device("cpu")
    vectors = vectors.to(device)
    _require_finite(vectors, images)
    vectors = vectors.double()
    if distance == "cosine":
        vectors = torch.nn.functional.normalize(_of_usual_size(vectors), dim=1)
    return Space(vectors, distance)


def _of_usual_size(vectors: Tensor) -> Tensor:
    """Rescale tiny and huge rows, so that `normalize` neither zeroes nor overflows them.

    All other rows stay as they are, to the last bit.
    """
    largest = torch.linalg.vector_norm(vectors, torch.inf, dim=1, keepdim=True)
    outside = ((largest < 1e-12) & (largest > 0)) | (largest > 1e100)
    if not outside.any():
        return vectors
    return vectors / largest.where(outside, 1)


def as_vectors(embeddings: Any) -> Tensor:
    """Convert embeddings of any kind to a tensor; ValueError if they are no real numbers."""
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
    """Find the `k` (len(queries),) nearest neighbours of `queries` in `gallery`, both table rows.

    Yields every query once, in blocks.  For each, at least k neighbours are proven, or all that
    exist.
    """
    if len(queries) == 0:
        return
    k = np.minimum(k, len(gallery) - np.isin(queries, gallery))
    # Sorted by k, so that no query of a block finds many more neighbours than it needs.
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
    """Search the queries of `queue`, sorted by k, in float64, `similarities` at a time."""
    if len(queue) == 0:
        return
    rows = torch.as_tensor(gallery, device=space.embeddings.device)
    # Selected once for all blocks: it may be a gigabyte.
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
    """Search the queries of `queue`, sorted by k, in float32, and mark the proven neighbours."""
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
    """The (q, count) nearest rows by float32, ordered by float64, and which are proven.

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
        # No image that faiss left out has a larger cosine than this.
        highest = products[:, -1:] + error
        proven = similarity > np.ceil(highest * STEPS)
    return _row(keys), proven


def _error(dim: int) -> float:
    """The largest error of a float32 product of unit vectors that are rounded to float32.

    Higham, Accuracy and Stability of Numerical Algorithms, Sec. 3.1.
    """
    return 1.01 * (dim + 2) * 2.0**-24


def _ordered(
    vectors: np.ndarray, queries: np.ndarray, rows: np.ndarray, products: np.ndarray, error: float
) -> np.ndarray:
    """Replace `products` (q, m), sorted descending in each row, by float64 cosines where needed.

    That is where two neighbours are too close for float32 to order them.  Every other product, and
    its cosine, differs by at least a step from the others of its row, and from the largest cosine
    that an image beyond the last one can have.
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
    """The float64 cosine of each pair of rows, (pairs,).

    einsum adds in the same order for all shapes, so that duplicates have equal cosines.
    """
    found = [np.empty(0)]
    for pairs in _blocks(np.arange(len(rows)), PAIRS):
        found.append(np.einsum("pd,pd->p", vectors[queries[pairs]], vectors[rows[pairs]]))
    return np.concatenate(found)


def _by_float64(
    space: Space, queries: np.ndarray, rows: Tensor, references: Tensor, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The (q, count) nearest of `rows`, and which are neighbours: all except the query itself.

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
    """Call the distance function and check its result; ValueError for a wrong shape or value."""
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
    """32-bit integers that reverse the order of the distances in float32."""
    # Adding 0.0 turns -0.0 into 0.0.
    bits = (distances.float() + 0.0).view(torch.int32).long()
    # As integers, the bits of positive floats sort like the floats, of negative ones in reverse.
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return -ascending


def _key(similarity: Any, rows: Any) -> Any:
    """The keys of int64 arrays or tensors."""
    return (similarity << 32) + (LAST_ROW - rows)


def _similarity(keys: np.ndarray) -> np.ndarray:
    return keys >> 32


def _row(keys: np.ndarray) -> np.ndarray:
    return LAST_ROW - (keys & LAST_ROW)
