"""Retrieval accuracy as tables: Recall@k, R-Precision and MAP@R, per dataset, unified and harmonic.
For a query with R relevant items (same dataset and same class, the query's own image excluded):
    R@k    1 if one of the k nearest is relevant (Sec. 5.1)
    RP     relevant items among the R nearest, divided by R
    MAP@R  1/R times the sum over i <= R of precision@i x [the i-th nearest is relevant]
RP and MAP@R as in Musgrave et al., "A Metric Learning Reality Check", ECCV 2020.  A query without a relevant item is
left out and counted.  The query is removed by its row: a duplicate of it stays in the gallery."""

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import faiss
import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..data import check_known
from .statistics import resampled

QUERIES = 4096  # given to faiss at once
SPARE = 8  # neighbours it finds beyond those needed
SHALLOW = 8  # most queries have a hit among so many neighbours; only the others need a larger k of R@k
BLOCK = 2**24  # similarities held at once: 8 bytes each, about three times that at the peak
ROW = 2**32 - 1  # the bits of a key that are a row of the table
NONE = -(2**63)  # the key of no neighbour


@dataclass(frozen=True)
class Scores:
    """What each query scored: per dataset, in the order of the table, and for "unified"."""

    metrics: tuple[str, ...]  # the columns of `values`
    values: dict[str, np.ndarray]  # (queries, metrics) float64, the queries of a class one after another
    classes: dict[str, np.ndarray]  # (queries,) a number for the class of each
    excluded: dict[str, int]  # number of queries without a relevant item

    def packed(self) -> dict[str, dict[str, str]]:
        """`hits`, R@1 of every query, and `classes`, whether it is the first of its class, each by `pack`."""
        hits = {name: pack(values[:, self.metrics.index("R@1")]) for name, values in self.values.items()}
        first = {name: pack(np.diff(numbers, prepend=-1) != 0) for name, numbers in self.classes.items()}
        return {"hits": hits, "classes": first}

    def table(self, bootstrap: int = 1000, seed: int = 0) -> pd.DataFrame:
        """Means, as fractions, and 95 % percentile intervals of `bootstrap` resamples of the classes (0: NaN).
        A row per dataset, `unified` (all queries against all galleries), `harmonic` (Sec. 5.1).  Columns: the metrics,
        `<metric>_low`, `<metric>_high`, `queries` (those that count) and `excluded` (the others)."""
        samples = resampled(self.values, self.classes, bootstrap, seed)
        means = np.stack(list(samples.values()))  # (rows, 1 + bootstrap, metrics)
        table = pd.DataFrame(means[:, 0], list(samples), list(self.metrics)).rename_axis("dataset")
        bounds = np.percentile(means[:, 1:], (2.5, 97.5), axis=1) if bootstrap else np.full((2, *table.shape), np.nan)
        for column, metric in enumerate(self.metrics):
            table[f"{metric}_low"], table[f"{metric}_high"] = bounds[..., column]
        counts = {name: (len(values), self.excluded[name]) for name, values in self.values.items()}
        table[["queries", "excluded"]] = [*counts.values(), counts["unified"]]
        return table


def pack(bits: np.ndarray) -> str:
    """0 or 1 of every query, a bit each, as base64 text."""
    return base64.b64encode(np.packbits(np.asarray(bits, bool))).decode()


def unpack(text: str, count: int) -> np.ndarray:
    """(count,) 0 or 1: what `pack` wrote."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count)


def scores(embeddings, images: pd.DataFrame, ks=(1, 2, 4, 8), *, distance="cosine", device=None) -> Scores:
    """R@k, RP and MAP@R of every query that has a relevant item; a ValueError names what of the arguments does not fit.
    `embeddings` (n, D) have a row per row of the test table `images`: `dataset`, `label`, `split`, "test" being query
    and gallery.  `distance` is "cosine" (embeddings are L2-normalised here) or a function of float64 (q, D) and (g, D)
    as they are that returns distances (q, g).  `device`: where to search; None: where the embeddings are."""
    embeddings = _prepared(embeddings, images, distance, device)
    if not ks or min(ks) < 1:
        raise ValueError(f"ks must be positive, not {tuple(ks)}")
    dataset, names = pd.factorize(images["dataset"])
    classes = images.groupby(["dataset", "label"], sort=False).ngroup().to_numpy()
    split = images["split"].to_numpy()
    queries, gallery = np.flatnonzero(split != "gallery"), np.flatnonzero(split != "query")
    # R of each query: its class in the gallery, less the query itself where it stands there too.
    relevant = np.bincount(classes[gallery], minlength=classes.max() + 1)[classes] - (split == "test")
    rows = queries[relevant[queries] > 0]
    rows = rows[np.lexsort((classes[rows], dataset[rows]))]  # stable: datasets and classes as they first come
    if alone := set(names) - set(names[dataset[rows]]):
        raise ValueError(f"dataset {min(alone)!r}: no query has another image of its class in the gallery")
    search = partial(_search, embeddings, distance)
    labels = torch.tensor(np.stack([dataset, classes, relevant]), device=embeddings.device)
    unified, own = _accuracies(search, rows, gallery, labels, ks)
    values, numbers, excluded = {}, {}, {}
    for code, name in enumerate(names):
        mine = dataset[rows] == code
        missing = np.flatnonzero(mine & np.isnan(own[:, 0]))
        own[missing] = _accuracies(search, rows[missing], gallery[dataset[gallery] == code], labels, ks)[1]
        values[name], numbers[name] = own[mine], classes[rows[mine]]
        excluded[name] = int((dataset[queries] == code).sum() - mine.sum())
    values["unified"], numbers["unified"], excluded["unified"] = unified, classes[rows], len(queries) - len(rows)
    return Scores((*(f"R@{k}" for k in ks), "RP", "MAP@R"), values, numbers, excluded)


def neighbours(embeddings, images, queries, k=7, within_dataset=True, *, distance="cosine", device=None) -> np.ndarray:
    """(len(queries), k) positions in `images` of each query's k nearest gallery images, nearest first (Fig. 9).
    `queries` are positions too; `within_dataset` searches the query's own dataset only, else every gallery.  The rest,
    and the errors, as `scores`; a ValueError too where fewer than k images are there besides the query."""
    embeddings, queries = _prepared(embeddings, images, distance, device), np.asarray(queries, dtype=int)
    dataset = images["dataset"].to_numpy() if within_dataset else np.full(len(images), "all")
    found = np.empty((len(queries), k), dtype=int)
    for name in dict.fromkeys(dataset[queries]):
        mine = np.flatnonzero(dataset[queries] == name)
        gallery = np.flatnonzero((dataset == name) & (images["split"] != "query"))
        if len(gallery) - np.isin(queries[mine], gallery).any() < k:
            raise ValueError(f"dataset {name!r} has {len(gallery)} gallery images, too few for k={k} besides the query")
        for part, nearest, _ in _search(embeddings, distance, queries[mine], gallery, np.full(len(mine), k)):
            found[mine[part]] = nearest[:, :k].cpu()
    return found


def _prepared(embeddings, images: pd.DataFrame, distance, device) -> Tensor:
    check_known("distance", [] if callable(distance) else [distance], ("cosine", "a function"))
    check_known("split", images["split"].unique(), ("test", "query", "gallery"))
    embeddings = embeddings.detach() if isinstance(embeddings, Tensor) else torch.tensor(np.asarray(embeddings))
    if embeddings.ndim != 2 or not 0 < len(embeddings) == len(images):
        shape = tuple(embeddings.shape)
        raise ValueError(f"embeddings of shape {shape} for a table of {len(images)} images; a row each is needed")
    device = torch.device(device or embeddings.device)
    embeddings = embeddings.to("cpu" if device.type == "mps" else device).double()  # MPS has no float64
    if broken := (~embeddings.isfinite().all(1)).nonzero()[:, 0].tolist():
        first = f"first that of row {broken[0]}: {images.iloc[broken[0]].to_dict()}"
        raise ValueError(f"{len(broken)} embeddings are not finite, {first}")
    return torch.nn.functional.normalize(embeddings, dim=1) if distance == "cosine" else embeddings


def _search(embeddings: Tensor, distance, rows: np.ndarray, gallery: np.ndarray, k: np.ndarray) -> Iterator:
    """Search `rows` in `gallery`, both rows of the table, for `k` (len(rows),) neighbours, by float64, in blocks.
    Yields (part, nearest, proven): positions in `rows`; (q, m) rows of the table, nearest first and ties in its order;
    and True for those that surely stand in their place: the first k at least, or all there are.
    On a CPU faiss finds some more by float32 cosines; a query whose last is too near to call is searched in float64."""
    k = np.minimum(k, len(gallery) - np.isin(rows, gallery))
    queue = np.argsort(k, kind="stable")  # so that no list of a block is much longer than its query needs
    rows, gallery = (torch.as_tensor(array, device=embeddings.device) for array in (rows, gallery))
    if distance == "cosine" and embeddings.device.type == "cpu":
        error = 1.01 * (embeddings.shape[1] + 2) * 2.0**-24  # of float32 products (Higham, Accuracy, Sec. 3.1)
        references, unproven = embeddings[gallery].float().numpy(), [queue[:0]]
        for start in range(0, len(queue), QUERIES):
            part = queue[start : start + QUERIES]
            depth = min(int(k[part[-1]]) + 1 + SPARE, len(gallery))
            queries = embeddings[rows[part]].float().numpy()
            products, column = faiss.knn(queries, references, depth, metric=faiss.METRIC_INNER_PRODUCT)
            blocks = zip(rows[part].split(64), gallery[column].split(64))  # (64, depth, D) float64 at once
            keys = torch.cat([_keys(embeddings, distance, *block) for block in blocks]).sort(descending=True).values
            rest = torch.from_numpy(products[:, -1:]).double() + error  # no cosine that was not found is above it
            proven = keys > ((rest * 2.0**30).ceil().long() << 32 if depth < len(gallery) else NONE)
            done = proven.sum(1).numpy() >= k[part]
            yield part[done], keys[done].neg() & ROW, proven[done]
            unproven.append(part[~done])
        queue = np.concatenate(unproven)
    step = max(1, BLOCK // len(gallery))
    for start in range(0, len(queue), step):
        part = queue[start : start + step]
        keys = _keys(embeddings, distance, rows[part], gallery).topk(int(k[part[-1]])).values
        yield part, keys.neg() & ROW, keys > NONE


def _keys(embeddings: Tensor, distance, rows: Tensor, gallery: Tensor) -> Tensor:
    """(q, g) int64 of `rows` (q,) and `gallery`, (g,) or (q, g): larger is nearer; ties in table order, itself NONE.
    As the last bits of a product depend on the shapes of its factors, cosines are compared in steps of 2^-30 (finer
    than float32 near 1), distances in float32."""
    queries, references = embeddings[rows], embeddings[gallery]
    if distance == "cosine":
        cosines = queries @ references.mT if gallery.ndim == 1 else (queries[:, None] @ references.mT)[:, 0]
        similar = cosines.mul_(2.0**30).round_().long()
    else:
        found = distance(queries, references)
        if found.shape != (len(rows), len(gallery)) or not found.isfinite().all():
            given = f"{tuple(found.shape)} with {int((~found.isfinite()).sum())} that are not finite"
            raise ValueError(f"distance() must return ({len(rows)}, {len(gallery)}) finite numbers, not {given}")
        bits = (found.float() + 0.0).view(torch.int32).long()  # + 0.0: -0.0 is 0.0
        similar = -(bits ^ (bits >> 31 & 0x7FFFFFFF))  # in the order of the numbers, also where the sign is set
    return ((similar << 32) - gallery).masked_fill_(rows[:, None] == gallery, NONE)


def _accuracies(search: Callable, rows: np.ndarray, gallery: np.ndarray, labels: Tensor, ks) -> np.ndarray:
    """(2, len(rows), len(ks) + 2) R@k, RP and MAP@R of queries `rows` in `gallery`, and in their own dataset's part.
    The latter is NaN where those found are too few to tell.  `labels`: dataset, class and R of every row."""
    dataset, classes, relevant = labels
    found = np.full((2, len(rows), len(ks) + 2), np.nan)
    for least in (min(SHALLOW, max(ks)), max(ks)):
        todo = np.flatnonzero(np.isnan(found[0, :, 0]))
        wanted = relevant[rows[todo]].clamp_min(least).cpu().numpy()
        for part, nearest, proven in search(rows[todo], gallery, wanted):
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
