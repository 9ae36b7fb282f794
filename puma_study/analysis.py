"""Nearest images and t-SNE maps of trained models (Figs. 9, 10), as cached tables.

The tables are in git, because a fresh clone has no models to compute them with.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.manifold import TSNE

from pumalib import data, evaluation, paths
from pumalib.config import Data
from pumalib.training import run_folder

from .record import checked_name
from .rows import embed_kept, embeddings, loss_of
from .runs import run_of
from .store import NotKept


class Searcher(NamedTuple):
    """A run whose model searches the union of all datasets, or its `own` dataset alone."""

    title: str
    own: str | None
    run: str


def nearest(
    models_of: Mapping[str, str | Mapping[str, str]],
    profile: str,
    union: Data,
    queries: Sequence[int],
    *,
    k: int = 7,
    train: bool = False,
) -> dict[str, np.ndarray]:
    """The k nearest test images of each query, by title of a model (Fig. 9).

    Returns arrays (queries, k) of positions in the test table of `union`; `queries` are positions
    there too.  `models_of` has, by title, the name of a run, which searches the union; or names by
    dataset, for dataset-specific models: the run of a query's dataset searches that dataset alone.
    """
    searchers = _searchers(models_of)

    def compute() -> pd.DataFrame:
        lines = []
        for searcher in searchers:
            vectors, images = embeddings(searcher.run, profile, union, train)
            metric = loss_of(run_of(searcher.run, profile)).metric
            lines += _found_by(searcher, vectors, images, queries, k=k, distance=metric)
        return pd.DataFrame(lines, columns=["model", "query", *range(1, k + 1)])

    table = cached_table(
        "nearest",
        profile,
        compute,
        [searcher.run for searcher in searchers],
        searchers=[(searcher.title, searcher.own) for searcher in searchers],
        union=data.load(union).digest,
        queries=list(queries),
        k=k,
    )
    table = table.set_index(["model", "query"])
    return {title: table.loc[title].loc[list(queries)].to_numpy() for title in models_of}


def _searchers(models_of: Mapping[str, str | Mapping[str, str]]) -> list[Searcher]:
    searchers = []
    for title, run in models_of.items():
        if isinstance(run, Mapping):
            searchers += [Searcher(title, own, name) for own, name in run.items()]
        else:
            searchers.append(Searcher(title, None, run))
    return searchers


def _found_by(
    searcher: Searcher,
    vectors: np.ndarray,
    images: pd.DataFrame,
    queries: Sequence[int],
    **options: Any,
) -> list[tuple]:
    """Rows (title, query, positions of its nearest images) of the queries that are its own."""
    mine = list(queries)
    if searcher.own is not None:
        mine = [query for query in queries if images["dataset"].iloc[query] == searcher.own]
    within = searcher.own is not None
    # A dataset may have no queries: an empty list alone would give an array of floats.
    positions = np.array(mine, dtype=int)
    found = evaluation.neighbours(vectors, images, positions, within_dataset=within, **options)
    return [(searcher.title, query, *row) for query, row in zip(mine, found, strict=True)]


def tsne(
    name: str, profile: str, split: str = "test", most: int = 2000, train: bool = False
) -> pd.DataFrame:
    """A t-SNE of at most `most` images of a split ("train" or "test"), drawn at random (Fig. 10).

    Columns: x, y, dataset, label.
    """

    def compute() -> pd.DataFrame:
        images = getattr(data.load(run_of(name, profile).data), split)
        drawn = np.random.default_rng(0).permutation(len(images))[:most]
        images = images.iloc[np.sort(drawn)].reset_index(drop=True)
        vectors = embed_kept(name, profile, images, train=train)
        perplexity = min(30, len(images) // 4)
        made = TSNE(init="pca", perplexity=perplexity, random_state=0)
        points = made.fit_transform(vectors)
        return images[["dataset", "label"]].assign(x=points[:, 0], y=points[:, 1])

    return cached_table("tsne", profile, compute, [name], split=split, most=most)


def cached_table(
    title: str,
    profile: str,
    compute: Callable[[], pd.DataFrame],
    names: Sequence[str] = (),
    *,
    may_compute: bool = True,
    **settings: Any,
) -> pd.DataFrame:
    """The cached table `results/<profile>/derived/<title>-<hash>.csv`, computed if it is missing.

    The hash is of the runs `names` and of `settings`, which together must determine the table: with
    data other than the runs' own, `settings` need its digest.  Raises NotKept if the table is
    missing and not `may_compute`, as where computing would train and nothing may be trained.
    """
    for name in names:
        checked_name(name)
    key = run_folder.short_hash([list(names), settings])
    file = paths.RESULTS / profile / "derived" / f"{checked_name(title)}-{key}.csv"
    if not file.is_file():
        if not may_compute:
            raise NotKept(f"{paths.shown(file)} is not kept, and nothing is to be trained")
        table = compute()
        with paths.written_whole(file) as temporary:
            table.to_csv(temporary, index=False, float_format="%.5g")
    return pd.read_csv(file)
