"""What trained models see (Figs. 9, 10), as tables that are kept: a fresh clone has no models to make them."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from sklearn.manifold import TSNE

from .. import data, evaluation, paths
from ..config import Data
from ..training import run_folder
from .run_all import embed_kept, embeddings, loss_of
from .runs import run_of


def nearest(models_of: Mapping, profile: str, union: Data, queries: Sequence[int], k: int = 7, train=False) -> dict:
    """For each model the k nearest test images of each query, (queries, k) positions in the test table of `union`
    (Fig. 9).  `models_of` has per title a run, which searches the union; or a run per dataset, of
    which a query's own searches its own dataset, as dataset-specific models do."""
    parts = {title: part if isinstance(part, Mapping) else {None: part} for title, part in models_of.items()}
    parts = [(title, own, name) for title, part in parts.items() for own, name in part.items()]

    def compute() -> pd.DataFrame:
        lines = []
        for title, own, name in parts:
            vectors, images = embeddings(name, profile, union, train)
            mine = [query for query in queries if own in (None, images["dataset"].iloc[query])]
            how = {"within_dataset": own is not None, "distance": loss_of(run_of(name, profile)).metric}
            found = evaluation.neighbours(vectors, images, mine, k, **how)
            lines += [(title, query, *row) for query, row in zip(mine, found, strict=True)]
        return pd.DataFrame(lines, columns=["model", "query", *range(1, k + 1)])

    settings = {"titles": list(models_of), "queries": queries, "k": k}
    table = derived("nearest", profile, compute, [name for *_, name in parts], **settings)
    table = table.set_index(["model", "query"])
    return {title: table.loc[title].loc[queries].to_numpy() for title in models_of}


def tsne(name: str, profile: str, split: str = "test", most: int = 2000, train: bool = False) -> pd.DataFrame:
    """A t-SNE of `most` images of a split ("train" or "test"), drawn evenly: x, y, dataset, label (Fig. 10)."""

    def compute() -> pd.DataFrame:
        images = getattr(data.load(run_of(name, profile).data), split)
        images = images.iloc[np.sort(np.random.default_rng(0).permutation(len(images))[:most])].reset_index(drop=True)
        vectors = embed_kept(name, profile, images, train=train)
        points = TSNE(init="pca", perplexity=min(30, len(images) // 4), random_state=0).fit_transform(vectors)
        return images[["dataset", "label"]].assign(x=points[:, 0], y=points[:, 1])

    return derived("tsne", profile, compute, [name], split=split, most=most)


def derived(title: str, profile: str, compute: Callable[[], pd.DataFrame], names: Sequence[str] = (), **settings):
    """What `compute` makes of the runs `names` and `settings`, or made: `results/<profile>/derived/<title>-<hash>.csv`."""
    key = run_folder.short_hash([list(names), settings])
    file = paths.RESULTS / profile / "derived" / f"{title}-{key}.csv"
    if not file.is_file():
        table = compute()
        with paths.written_whole(file) as temporary:
            table.to_csv(temporary, index=False, float_format="%.5g")
    return pd.read_csv(file)
