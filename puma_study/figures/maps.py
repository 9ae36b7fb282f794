"""Figures of tables and planes: heat maps, waffle charts, maps of images, vector fields."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .labels import Name, name_clusters
from .row_styles import COLOURS, DARK_GREY, GREY, MARKERS, shown, styles_of
from .style import PAGE_WIDTH, empty_panels, finish, styled

# How far around an image an embedding map counts its neighbours, as a share of the map's width.
NEAR = 0.1

# From negative to positive through white, in the colours of differences below and above 0.
SIGNED = sns.diverging_palette(35, 245, s=85, l=50, as_cmap=True)


@styled
def heatmap(
    table: pd.DataFrame,
    title: str,
    label: str,
    fmt: str = "",
    *,
    signed: bool = False,
    limit: float = 1,
) -> Figure:
    """A heat map of a table; NaN cells are grey (Fig. 4).

    `label` names the colour scale.  `fmt`, such as ".1f", writes the numbers into the cells.
    `signed` gives a scale from -`limit` to `limit` with white at 0.
    """
    table = table.rename(index=shown, columns=shown)
    cell_width = 0.6 if fmt else 0.25
    longest_row = max(len(str(name)) for name in table.index)
    longest_column = max(len(str(name)) for name in table.columns)
    width = 2.5 + 0.06 * longest_row + cell_width * table.shape[1]
    # The title must fit into the figure.
    width = max(4.5, width, 2 + 0.085 * len(title))
    scale: dict[str, Any] = {"cmap": "Blues"}
    numbers: dict[str, Any] = {"size": 8}
    if signed:
        scale = {"cmap": SIGNED, "vmin": -limit, "vmax": limit}
        # Seaborn's white is not read on tan; black is on all of this scale.
        numbers["color"] = "black"
    bar: dict[str, Any] = {"label": label, "pad": 0.02}
    values = np.unique(table.to_numpy()[table.notna().to_numpy()])
    if len(values) <= 3:
        bar["ticks"] = values

    figure, axes = empty_panels(1, 1, width, 1.5 + 0.3 * len(table))
    # Cells with NaN show this background, which is no colour of the scale.
    axes[0, 0].set_facecolor("#dddddd")
    axis = sns.heatmap(
        table,
        ax=axes[0, 0],
        annot=bool(fmt),
        fmt=fmt,
        yticklabels=True,
        linewidths=0.4,
        annot_kws=numbers,
        cbar_kws=bar,
        **scale,
    )
    axis.grid(visible=False)
    axis.set(xlabel=table.columns.name or "", ylabel="", title=title)
    plt.setp(axis.get_yticklabels(), rotation=0)
    if longest_column > 3:
        plt.setp(axis.get_xticklabels(), rotation=40, ha="right")
    else:
        plt.setp(axis.get_xticklabels(), rotation=0)
    return figure


@styled
def waffle(counts: pd.Series, title: str, total: int | None = None, lines: int = 12) -> Figure:
    """A waffle chart, filled column by column: each name has its number in `counts` of squares.

    With `total` its share of so many squares, and the legend has the number and the share.  The
    sum of the squares must be a multiple of `lines`; single numbers may be fractions.
    """
    in_squares = counts
    if total is not None:
        in_squares = total * counts / counts.sum()
    ends = in_squares.cumsum().round().astype(int)
    squares = ends.diff().fillna(ends.iloc[0]).astype(int)
    styles = styles_of(counts.index)
    places = np.arange(ends.iloc[-1])
    across = places // lines
    down = places % lines

    columns = across.max() + 1
    side = PAGE_WIDTH / columns
    figure, axes = empty_panels(1, 1, PAGE_WIDTH, lines * side, extra=0.9)
    axis = axes[0, 0]
    # Squares with a gap between them: an inch has 72 points.
    area = (0.82 * 72 * side) ** 2
    for name, end in ends.items():
        mine = slice(end - squares[name], end)
        label = f"{shown(name)} {squares[name]}"
        if total is not None:
            label = f"{shown(name)}: {counts[name]:,} ({counts[name] / counts.sum():.0%})"
        axis.scatter(
            across[mine], down[mine], s=area, marker="s", color=styles[name].colour, label=label
        )
    axis.set(xlim=(-0.6, columns - 0.4), ylim=(lines - 0.4, -0.6), aspect="equal")
    axis.axis("off")
    return finish(figure, axes, title, markerscale=6 / area**0.5)


@styled
def embedding_map(maps: Mapping[str, pd.DataFrame], of: str) -> Figure:
    """Maps of images: on the left by dataset, on the right classes of dataset `of` (Fig. 10).

    `maps` has, by title, a table with the columns x, y, dataset and label, and a row per image.
    More classes than there are colours could not be told apart: those of most images are coloured.
    """
    figure, axes = empty_panels(len(maps), 2, PAGE_WIDTH, 4.4, extra=0.5)
    for (left, right), (title, points) in zip(axes, maps.items(), strict=True):
        size = _point_size(points)
        _draw_datasets(left, points, size)
        left.set(xticks=[], yticks=[], title=f"{shown(title)}, by dataset")
        _name_datasets(left, points)
        coloured, classes = _draw_classes(right, points, of, size)
        others = " (dark grey)" if coloured < classes else ""
        in_classes = f"{shown(of)}{others}, {coloured} of {classes:,} classes coloured"
        right.set(xticks=[], yticks=[], title=f"{shown(title)}: {in_classes}")
    # A legend of the datasets would seem to name the classes, which have the same colours.
    title = "t-SNE of the images: neighbours are alike, the axes have no unit; "
    title += "light grey: other datasets"
    return finish(figure, axes, title, named=False)


def _point_size(points: pd.DataFrame) -> float:
    """The area of a point, smaller if there are more points."""
    return float(np.clip(12000 / len(points), 1.5, 14))


def _draw_datasets(axis: Axes, points: pd.DataFrame, size: float) -> None:
    for name, style in styles_of(points["dataset"]).items():
        mine = points[points["dataset"] == name]
        axis.scatter("x", "y", data=mine, color=style.colour, s=size, linewidths=0)


def _name_datasets(axis: Axes, points: pd.DataFrame) -> None:
    """Write each dataset's name onto its images: colour alone would carry it otherwise."""
    names = []
    clusters = []
    for name, style in styles_of(points["dataset"]).items():
        mine = points.loc[points["dataset"] == name, ["x", "y"]]
        names.append(Name(shown(name), style.colour, np.nan, np.nan))
        clusters.append(_densest(mine.to_numpy(float), NEAR * np.ptp(points["x"])))
    name_clusters(axis, names, clusters)


def _densest(points: np.ndarray, near: float) -> np.ndarray:
    """Of points (n, 2) the one with most others within `near`, and those: of several clusters one.

    Between clusters, where all points have their middle, lie images of other datasets.
    """
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    are_near = distances <= near
    return points[are_near[are_near.sum(1).argmax()]]


def _draw_classes(axis: Axes, points: pd.DataFrame, dataset: str, size: float) -> tuple[int, int]:
    """Draw the images of `dataset`, its largest classes in colours, over the others in grey.

    Returns how many classes are coloured, and how many there are.
    """
    axis.scatter(points["x"], points["y"], color="#e4e4e4", s=size, linewidths=0)
    mine = points[points["dataset"] == dataset]
    axis.scatter(mine["x"], mine["y"], color=GREY, s=size, linewidths=0)
    sizes = mine["label"].value_counts()
    largest = list(sizes.index[: len(COLOURS)])
    for number, label in enumerate(largest):
        of_class = mine[mine["label"] == label]
        marker = MARKERS[number % len(MARKERS)]
        look: dict[str, Any] = {"color": COLOURS[number], "marker": marker, "linewidths": 0}
        axis.scatter(of_class["x"], of_class["y"], s=5 * size, **look)
    return len(largest), len(sizes)


@styled
def field(
    panels: Mapping[str, Mapping[str, Any]],
    title: str,
    columns: int = 4,
    meanings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Figure:
    """Vector fields in the plane, a panel per name.

    A panel has `at` (n, 2), the starts of arrows, `move` (n, 2), their vectors, and `colours`, n or
    one; optionally `dots`, [(points (m, 2), colour, size, marker)], and `line`, (X, Y, Z), whose
    contour Z = 0 is drawn.  `meanings`, by text, are settings of `Line2D` for the legend.
    """
    rows = -(-len(panels) // columns)
    figure, axes = empty_panels(rows, columns, PAGE_WIDTH, PAGE_WIDTH / columns, extra=0.8)
    farthest = 1.05 * max(_reach(panel) for panel in panels.values())
    limits = (-farthest, farthest)
    for axis, (name, panel) in zip(axes.flat, panels.items(), strict=False):
        _draw_field(axis, panel)
        axis.set(xlim=limits, ylim=limits, aspect="equal", title=name)
        axis.axis("off")
    handles = [Line2D([], [], label=text, **look) for text, look in (meanings or {}).items()]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return finish(figure, axes, title)


def _reach(panel: Mapping[str, Any]) -> float:
    """How far from the origin something of a panel lies, across or along."""
    starts = np.asarray(panel["at"])
    ends = starts + np.asarray(panel["move"])
    places = [starts, ends, *(np.asarray(points) for points, *_ in panel.get("dots", ()))]
    return max(np.abs(part).max(initial=0) for part in places)


def _draw_field(axis: Axes, panel: Mapping[str, Any]) -> None:
    if "line" in panel:
        axis.contour(*panel["line"], [0], colors=DARK_GREY)
    x, y = np.transpose(panel["at"])
    right, up = np.transpose(panel["move"])
    axis.quiver(
        x,
        y,
        right,
        up,
        color=panel["colours"],
        width=0.01,
        # In data units, so that an arrow ends at `at` + `move`.
        angles="xy",
        scale_units="xy",
        scale=1,
    )
    for points, colour, size, marker in panel.get("dots", ()):
        across, along = np.transpose(points)
        axis.scatter(across, along, s=size, c=colour, marker=marker, zorder=3)
