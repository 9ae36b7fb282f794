"""What trained models see: nearest images, maps of the embedding space, weights of prompts (Figs. 4, 9, 10).

Each needs models and takes a while, so its table is kept in `results/<profile>/derived/` under a name that ends in
a hash of the runs and arguments it depends on: a fresh clone, which has the numbers of runs but not their models,
only reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.manifold import TSNE

from . import evaluation, paths, study, training
from .config import Data


def nearest(models_of: Mapping[str, Path | Mapping[str, Path]], data: Data, queries: list[int], k: int = 7) -> dict[str, np.ndarray]:
    """For each model the k nearest test images of each query, (len(queries), k) positions in the test table (Fig. 9).

    Args:
        models_of: per name a run's folder, which searches the union; or a folder per dataset, of which a query's
            own searches its own dataset, as dataset-specific models do.
        data: the union.
        queries: positions in the test table.
    """
    flat = [f for part in models_of.values() for f in (part.values() if isinstance(part, Mapping) else [part])]

    def compute() -> pd.DataFrame:
        lines = []
        for name, part in models_of.items():
            own = isinstance(part, Mapping)
            for folder in part.values() if own else [part]:
                vectors, images = study.embeddings(folder, data)
                dataset = images["dataset"].iloc[queries].to_numpy()
                mine = [q for q, d in zip(queries, dataset, strict=True) if not own or part[d] == folder]
                if not mine:
                    continue
                found = evaluation.neighbours(vectors, images, mine, k, within_dataset=own, distance=study.loss_of(study.read_run(folder)).metric)
                lines += [(name, query, *row) for query, row in zip(mine, found, strict=True)]
        return pd.DataFrame(lines, columns=["model", "query", *range(1, k + 1)])

    table = derived("nearest", flat[0].parents[1], compute, flat, names=list(models_of), queries=[int(q) for q in queries], k=k)
    table = table.set_index(["model", "query"])
    return {name: table.loc[name].loc[queries].to_numpy() for name in models_of}


def tsne(folder: Path, split: str = "test", most: int = 2000) -> pd.DataFrame:
    """A t-SNE of `most` images of a split ("train" or "test"), drawn evenly: x, y, dataset, label (Fig. 10)."""

    def compute() -> pd.DataFrame:
        benchmark = training.load_data(study.read_run(folder).data)
        images = benchmark.train if split == "train" else benchmark.test
        images = images.iloc[np.sort(np.random.default_rng(0).permutation(len(images))[:most])].reset_index(drop=True)
        vectors = study.embed(folder, images)
        points = TSNE(init="pca", perplexity=min(30, len(images) // 4), random_state=0).fit_transform(vectors)
        return images[["dataset", "label"]].assign(x=points[:, 0], y=points[:, 1])

    return derived("tsne", folder.parents[1], compute, [folder], split=split, most=most)


def prompt_weights(folder: Path) -> pd.DataFrame:
    """Weights of the prompt pool over the test images of each dataset: dataset, prompt, mean, var, images (Fig. 4).

    `var` is the variance over the dataset's images (of the population); prompts count from 1.
    """

    def compute() -> pd.DataFrame:
        images = training.load_data(study.read_run(folder).data).test.reset_index(drop=True)
        _, weights = study.embed(folder, images, prompt_weights=True)
        frame = pd.DataFrame(weights, columns=range(1, weights.shape[1] + 1)).assign(dataset=images["dataset"])
        long = frame.melt("dataset", var_name="prompt")
        groups = long.groupby(["dataset", "prompt"], sort=False)["value"]
        return groups.agg(mean="mean", var=lambda v: v.var(ddof=0), images="size").reset_index()

    return derived("prompt-weights", folder.parents[1], compute, [folder])


def derived(name: str, where: Path, compute: Callable[[], pd.DataFrame], runs: list[Path] | None = None, **settings) -> pd.DataFrame:
    """The table that `compute` makes, or made before: `<where>/derived/<name>-<hash>.csv`.

    Args:
        name: of the file.
        where: `results/<profile>`.
        runs: folders of the runs it depends on.
        settings: whatever else it depends on.
    """
    key = study.short_hash([[folder.name for folder in runs or []], settings])
    file = where / "derived" / f"{name}-{key}.csv"
    if not file.is_file():
        table = compute()
        with paths.written_whole(file) as temporary:
            table.to_csv(temporary, index=False, float_format="%.5g")
    return pd.read_csv(file)
