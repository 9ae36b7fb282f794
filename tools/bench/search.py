"""Time of all metrics of a test set, against faiss and pytorch-metric-learning."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import faiss
import numpy as np
import pandas as pd
import torch

from pumalib import evaluation

from .clock import Clock, library

# Test images and classes of the eight datasets (Table 1).
EIGHT_DATASETS = {
    "cub": (5_924, 100),
    "cars": (8_131, 98),
    "sop": (60_502, 11_316),
    "inshop": (26_830, 3_985),
    "nabirds": (25_653, 277),
    "dogs": (9_929, 60),
    "flowers": (4_696, 51),
    "aircraft": (5_000, 50),
}


def embeddings_of(
    sizes: Mapping[str, tuple[int, int]], dim: int = 128
) -> tuple[np.ndarray, pd.DataFrame]:
    """Noisy unit vectors around class centres, and the table of their images.

    `sizes` has (images, classes) by dataset.  Returns (n, dim) float32, and a table with the
    columns dataset, label and split, which is "test"; the same in every call.
    """
    rng = np.random.default_rng(0)
    vectors = []
    tables = []
    first_label = 0
    for name, (images, classes) in sizes.items():
        of_class = np.arange(images) % classes
        centres = rng.standard_normal((classes, dim), np.float32)
        noise = rng.standard_normal((images, dim), np.float32)
        vectors.append(centres[of_class] + 1.5 * noise)
        labels = first_label + of_class
        tables.append(pd.DataFrame({"dataset": name, "label": labels, "split": "test"}))
        first_label += classes
    joined = np.concatenate(vectors)
    lengths = np.linalg.norm(joined, axis=1, keepdims=True)
    return joined / lengths, pd.concat(tables, ignore_index=True)


def search_times(sizes: Mapping[str, tuple[int, int]], clock: Clock) -> pd.DataFrame:
    """Time all metrics of a test set against one faiss search and pytorch-metric-learning.

    `sizes` as in `embeddings_of`.  Returns the columns search, rows, seconds (of the best turn),
    beside_faiss and beside_library.  Raises ImportError without pytorch-metric-learning.
    """
    vectors, images = embeddings_of(sizes)
    tensor = torch.from_numpy(vectors)
    labels = torch.from_numpy(images["label"].to_numpy(copy=True))
    calculator = library("utils.accuracy_calculator").AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r"),
        k="max_bin_count",
        device=torch.device("cpu"),
    )

    def five_nearest() -> None:
        index: Any = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        index.search(vectors, 5)

    def metrics(ks: Sequence[int]) -> Callable[[], object]:
        return lambda: evaluation.scores(vectors, images, ks, device=clock.device)

    spent = clock.interleaved(
        {
            "faiss IndexFlatIP, 5 nearest": five_nearest,
            "pumalib.evaluation, R@1 to R@8, RP, MAP@R": metrics((1, 2, 4, 8)),
            "pumalib.evaluation, R@1 to R@100, RP, MAP@R": metrics(evaluation.KS),
            "pytorch-metric-learning, P@1, RP, MAP@R": lambda: calculator.get_accuracy(
                tensor, labels
            ),
        }
    )
    rows = [(name, len(images), turns.min()) for name, turns in spent.items()]
    table = pd.DataFrame(rows, columns=["search", "rows", "seconds"])
    faiss_seconds = table["seconds"].iloc[0]
    library_seconds = table["seconds"].iloc[-1]
    return table.assign(
        beside_faiss=table["seconds"] / faiss_seconds,
        beside_library=table["seconds"] / library_seconds,
    )


def search_of_eight(device: torch.device) -> pd.DataFrame:
    """Time all metrics of all eight test sets together, once: a row of search, rows, seconds."""
    vectors, images = embeddings_of(EIGHT_DATASETS)
    start = time.perf_counter()
    evaluation.scores(vectors, images, evaluation.KS, device=device)
    seconds = time.perf_counter() - start
    name = "pumalib.evaluation, eight datasets"
    return pd.DataFrame([{"search": name, "rows": len(images), "seconds": seconds}])
