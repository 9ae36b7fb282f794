"""Figures of images in lines: contact sheets, and queries with their nearest images."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image, ImageOps

from pumalib.data import Benchmark
from pumalib.data.images import decode

from .row_styles import BLACK, FALSE, TRUE, shown
from .style import PAGE_WIDTH, SMALL, empty_panels, styled

# The side of a picture in pixels.
SIDE = 96

# The unit of lengths below is the side of a picture.
PICTURE_WIDTH = 1.1
TEXT_WIDTH = 1.8
GAP = 0.2
TEXT_LINE = 0.22


@dataclass(frozen=True)
class Picture:
    """A picture, cut to a square, with a text below and a frame."""

    image: Image.Image
    text: str = ""
    # The frame's colour; "none" is no frame.
    frame: str = "none"
    dashed: bool = False
    width: float = PICTURE_WIDTH


@dataclass(frozen=True)
class Text:
    """A text in place of a picture."""

    text: str
    width: float = TEXT_WIDTH


@dataclass(frozen=True)
class Gap:
    """Space between pictures; `Gap(PICTURE_WIDTH)` is as wide as a picture."""

    width: float = GAP


Cell = Picture | Text | Gap


@styled
def picture_grid(lines: Sequence[Sequence[Cell]], title: str = "") -> Figure:
    """Lines of pictures, texts and gaps, from left to right; an empty line is a gap too."""
    lefts = [_left_edges(line) for line in lines]
    tops = _top_edges(lines)
    width = max(edges[-1] for edges in lefts)
    height = tops[-1]

    figure, axes = empty_panels(1, 1, PAGE_WIDTH, PAGE_WIDTH * height / width, extra=0.45)
    axis = axes[0, 0]
    axis.set(xlim=(-0.05, width), ylim=(height, -0.05), aspect="equal", title=title)
    axis.axis("off")
    for line, edges, top in zip(lines, lefts, tops):
        for cell, left in zip(line, edges):
            if isinstance(cell, Picture):
                _draw_picture(axis, cell, left, top)
            elif isinstance(cell, Text):
                _draw_text(axis, cell, left, top)
    return figure


def _left_edges(line: Sequence[Cell]) -> np.ndarray:
    """Where each cell begins, and where the last one ends: (cells + 1,)."""
    return np.cumsum([0, *(cell.width for cell in line)])


def _top_edges(lines: Sequence[Sequence[Cell]]) -> np.ndarray:
    """Where each line begins, and where the last one ends: (lines + 1,)."""
    cells = [cell for line in lines for cell in line]
    texts = [cell.text.splitlines() for cell in cells if isinstance(cell, Picture)]
    below = max(map(len, texts), default=0)
    edges = [0.0]
    for line in lines:
        height = GAP
        if line:
            height = PICTURE_WIDTH + TEXT_LINE * below
        edges.append(edges[-1] + height)
    return np.array(edges)


def _draw_picture(axis: Axes, cell: Picture, left: float, top: float) -> None:
    axis.imshow(_square(cell.image), extent=(left, left + 1, top + 1, top))
    axis.text(left + 0.5, top + 1.04, cell.text, ha="center", va="top", fontsize=SMALL)
    frame = Rectangle((left, top), 1, 1, fill=False, edgecolor=cell.frame, linewidth=2.5)
    if cell.dashed:
        frame.set_linestyle((0, (2, 1)))
    axis.add_patch(frame)


def _draw_text(axis: Axes, cell: Text, left: float, top: float) -> None:
    """Write a text in place of a picture: right-aligned at the start of a line, else left."""
    if left == 0:
        axis.text(cell.width - 0.1, top + 0.5, cell.text, ha="right", va="center")
    else:
        axis.text(left + 0.1, top + 0.5, cell.text, ha="left", va="center")


def _square(picture: Image.Image) -> Image.Image:
    """The central square of a picture; BOX averages large ones and keeps small pixels sharp."""
    return ImageOps.fit(picture, (SIDE, SIDE), Image.Resampling.BOX)


def contact_sheet(benchmark: Benchmark, per_dataset: int = 12) -> Figure:
    """A line of `per_dataset` pictures for each dataset, in pairs of one class.

    Each line begins with the numbers of classes and images.
    """
    lines: list[list[Cell]] = []
    for name, images in benchmark.images.groupby("dataset", sort=False):
        classes = images["label"].nunique()
        line: list[Cell] = [Text(f"{shown(name)}\n{classes:,} classes\n{len(images):,} images")]
        for place, image in enumerate(_pairs_of_a_class(images, per_dataset).itertuples()):
            if place % 2 == 0:
                line.append(Gap())
            line.append(Picture(_decoded(benchmark, image)))
        lines.append(line)
    return picture_grid(lines, "The datasets: neighbouring pairs are of one class")


def _pairs_of_a_class(images: pd.DataFrame, count: int) -> pd.DataFrame:
    """`count` images, two per class, of classes drawn at random with a fixed seed."""
    mixed = images.sample(frac=1, random_state=0)
    classes = mixed["label"].unique()[: (count + 1) // 2]
    shown = mixed[mixed["label"].isin(classes)].groupby("label").head(2)
    return shown.sort_values("label")[:count]


def retrieval_grid(
    benchmark: Benchmark, queries: Sequence[int], found: Mapping[str, np.ndarray]
) -> Figure:
    """Queries at the left, followed by their nearest images, a line per method (Fig. 9).

    Both are positions in `benchmark.test`; `found` has an array (len(queries), k) per method.
    Images of the query's class are framed green, others orange and dashed.
    """
    images = benchmark.test
    lines: list[list[Cell]] = []
    for number, query in enumerate(images.iloc[list(queries)].itertuples()):
        class_name = textwrap.fill(str(query.class_name).replace("_", " "), 18)
        lead: list[Cell] = [
            Text(f"{shown(query.dataset)}\n{class_name}"),
            Picture(_decoded(benchmark, query), frame=BLACK),
            Gap(),
        ]
        for name, rows in found.items():
            nearest = images.iloc[rows[number]].itertuples()
            answers = [_answer(benchmark, query, image) for image in nearest]
            lines.append([*lead, *answers, Text(textwrap.fill(shown(name), 18))])
            # Only the first line of a query shows it.
            lead = [Text(""), Gap(PICTURE_WIDTH), Gap()]
        if number < len(queries) - 1:
            lines.append([])
    title = "Query (left) and its nearest: same class green, another class orange and dashed"
    return picture_grid(lines, title)


def _answer(benchmark: Benchmark, query: Any, image: Any) -> Picture:
    """A found image, its frame green if it is of the query's class, else orange and dashed."""
    picture = _decoded(benchmark, image)
    if image.label == query.label:
        return Picture(picture, frame=TRUE)
    return Picture(picture, frame=FALSE, dashed=True)


def _decoded(benchmark: Benchmark, image: Any) -> Image.Image:
    """The picture of a row of the table, reduced to `SIDE` pixels.

    Reduced at once, because a photograph takes 36 MB, and a figure has hundreds.
    """
    if benchmark.pixels is not None:
        return _square(Image.fromarray(benchmark.pixels[int(image.path)]))
    if benchmark.root is None:
        raise ValueError(f"benchmark {benchmark.name!r} has neither pixels nor a root")
    return _square(decode(benchmark.root / image.path))
