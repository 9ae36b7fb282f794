"""Figures of images: contact sheets of datasets, and queries with what is retrieved for them."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image, ImageOps

from . import plots
from .data import Benchmark

TRUE, FALSE = "#009e73", "#d55e00"  # green and red that a colour-blind reader tells apart (Okabe and Ito)
THUMBNAIL = 96  # pixels


@plt.rc_context(plots.STYLE)
def contact_sheet(benchmark: Benchmark, per_dataset: int = 12, seed: int = 0) -> Figure:
    """A row of `per_dataset` pictures per dataset, two by two of one class, with the numbers of classes and images.

    A class of one image takes one place, and a dataset with too few classes a shorter row.
    """
    rng = np.random.default_rng(seed)
    names = benchmark.datasets
    figure, axes = plots.new_figure(len(names), 1, (9.5, 0.25 + 0.85 * len(names)), squeeze=False)
    for axis, name in zip(axes[:, 0], names, strict=True):
        images = benchmark.images[benchmark.images["dataset"] == name]
        classes = rng.permutation(images["label"].unique())[: (per_dataset + 1) // 2]
        left, shown = 0.0, 0
        for label in classes:
            rows = images[images["label"] == label]
            for row in rng.permutation(len(rows))[: min(2, per_dataset - shown)]:
                axis.imshow(_thumbnail(benchmark, rows.iloc[row]), extent=(left, left + 1, 0, 1))
                left, shown = left + 1.03, shown + 1
            left += 0.12
        axis.set(xlim=(0, 1.03 * per_dataset + 0.12 * ((per_dataset + 1) // 2)), ylim=(0, 1))
        axis.axis("off")
        count = f"{name}\n{images['label'].nunique():,} classes\n{len(images):,} images"
        axis.text(-0.15, 0.5, count, ha="right", va="center", linespacing=1.4)
    figure.suptitle("The datasets: neighbouring pairs are of one class", fontsize=10)
    return figure


@plt.rc_context(plots.STYLE)
def retrieval_grid(
    benchmark: Benchmark,
    query_rows: np.ndarray | list[int],
    neighbour_rows: np.ndarray | Mapping[str, np.ndarray],
) -> Figure:
    """Queries at the left, their nearest images beside them, true matches green and false ones red (Fig. 9).

    Args:
        query_rows: positions in `benchmark.test`.
        neighbour_rows: (len(query_rows), k) positions in `benchmark.test`, as `evaluation.neighbours` returns
            them; or several such arrays by method name, whose rows are stacked under each query.
    """
    methods = neighbour_rows if isinstance(neighbour_rows, Mapping) else {"": neighbour_rows}
    methods = {name: np.asarray(rows) for name, rows in methods.items()}
    images = benchmark.test
    for name, rows in methods.items():
        if rows.ndim != 2 or len(rows) != len(query_rows):
            raise ValueError(
                f"neighbour_rows {name!r} has shape {rows.shape}; it needs ({len(query_rows)}, k)"
            )
    k = max(rows.shape[1] for rows in methods.values())
    tall = len(query_rows) * (len(methods) * 1.08 + 0.12)
    figure, axis = plots.new_figure(1, 1, (9.5, 0.4 + tall * 8 / (k + 3.5)))
    top = 0.0
    for number, row in enumerate(query_rows):
        query = images.iloc[row]
        lead = top + (len(methods) - 1) * 1.08 / 2
        _picture(axis, benchmark, query, 0, lead, plots.INK)
        axis.text(-0.15, lead + 0.5, f"{query['dataset']}\n{_short(str(query['class_name']))}", ha="right", va="center")
        for name, rows in methods.items():
            for place, other in enumerate(rows[number]):
                match = images.iloc[other]
                same = match["dataset"] == query["dataset"] and match["label"] == query["label"]
                _picture(axis, benchmark, match, 1.35 + 1.08 * place, top, TRUE if same else FALSE, dashed=not same)
            axis.text(1.4 + 1.08 * k, top + 0.5, name, ha="left", va="center")
            top += 1.08
        top += 0.12
    right = 1.4 + 1.08 * k + (1.6 if any(methods) else 0)
    axis.set(xlim=(-1.9, right), ylim=(top, -0.1), aspect="equal")
    axis.axis("off")
    axis.set_title(f"Query (left) and its {k} nearest: same class green, another class red and dashed")
    return figure


def _short(text: str, length: int = 16) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _thumbnail(benchmark: Benchmark, image: pd.Series) -> np.ndarray:
    """(THUMBNAIL, THUMBNAIL, 3) uint8, the centre of a row of the table; small pixels stay square."""
    if benchmark.pixels is not None:
        picture = Image.fromarray(benchmark.pixels[int(image["path"])])
    else:
        with Image.open(benchmark.root / image["path"]) as file:
            picture = file.convert("RGB")
    whole = picture.width == picture.height and THUMBNAIL % picture.width == 0
    resampling = Image.Resampling.NEAREST if whole else Image.Resampling.BICUBIC
    return np.asarray(ImageOps.fit(picture, (THUMBNAIL, THUMBNAIL), resampling))


def _picture(axis, benchmark: Benchmark, image: pd.Series, left: float, top: float, edge: str, dashed=False) -> None:
    axis.imshow(_thumbnail(benchmark, image), extent=(left, left + 1, top + 1, top))
    line = (0, (2, 1)) if dashed else "solid"
    axis.add_patch(Rectangle((left, top), 1, 1, fill=False, edgecolor=edge, linewidth=2.5, linestyle=line))
