"""Figures of the trial alone: accuracy over the learning rate, and where PUMA wins."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from .labels import Name, places_of, write_names
from .row_styles import BLACK, DARK_GREY, DASHED, OURS, RowStyle, shown, styles_of
from .style import PAGE_WIDTH, SMALL, empty_panels, finish, one_scale, styled, write_plain_numbers

# The scale of the curves ends this many points of R@1 below the frozen backbone.
DEPTH = 15
# Characters in a line below the large panel of `where_it_wins`.
LETTERS = 68
# What the hyperparameter of a row is called in a title.
HYPERPARAMETERS = {
    "adapter_scale": "adapter's scale",
    "lora_scale": "LoRA's scale",
    "loss_lr_factor": "rate of the loss, times",
    "new_lr_factor": "rate of new parts, times",
}
# Line styles of a hyperparameter's first and second value.
LINES: tuple[Any, Any] = ("-", (0, (1, 1.2)))


@styled
def tuning_curves(tuned: pd.DataFrame, frozen: float, epochs: int) -> Figure:
    """Harmonic R@1 over the learning rate, a panel per row, all on one scale.

    `tuned` is a table of `search.table`.  `frozen` is the frozen backbone's harmonic R@1 as a
    fraction, or NaN if unknown.  `epochs` is the length of the search: its runs are lines, longer
    ones crosses.  Values far below the frozen backbone are drawn at the lower edge, with a number.
    """
    drawn = tuned.assign(percent=100 * tuned["harmonic"])
    rows = list(drawn["row"].unique())
    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    figure, axes = empty_panels(lines, columns, PAGE_WIDTH, 3, extra=0.7)

    bottom, top = _scale(drawn["percent"], 100 * frozen)
    styles = styles_of(rows)
    for axis, row in zip(axes.flat, rows, strict=False):
        part = drawn[drawn["row"] == row]
        _draw_search(axis, part, styles[row], epochs, bottom)
        if np.isfinite(frozen):
            axis.axhline(100 * frozen, color=DARK_GREY, linestyle=DASHED, linewidth=1.2)
        axis.set_xscale("log")
        axis.set(ylim=(bottom, top), xlim=_room_around(drawn["rate"]))
        hyperparameter = part["hyperparameter"].iloc[0]
        title = (
            f"{shown(row)}\n{HYPERPARAMETERS.get(hyperparameter, hyperparameter)}\n{_values(part)}"
        )
        axis.set_title(title, fontsize=8)
        write_plain_numbers(axis.xaxis)
        axis.minorticks_off()
    _only_outer_labels(axes, "base learning rate", "harmonic R@1 (%)")
    finish(figure, axes, "Harmonic R@1 on held-out classes over the learning rate")
    handles = _meanings(drawn, epochs)
    if (drawn["percent"] < bottom).any():
        lower = Line2D([], [], color=BLACK, linestyle="none", marker="v", label="lower: its value")
        handles.append(lower)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _draw_search(
    axis: Axes, part: pd.DataFrame, style: RowStyle, epochs: int, bottom: float
) -> None:
    is_usual = part["epochs"] == epochs
    mirrored = part.loc[is_usual & (part["seed"] == 0), "mirrored"].iloc[0]
    is_alike = part["mirrored"] == mirrored
    for value, line in zip(part["value"].unique(), LINES, strict=False):
        mine = part[(part["value"] == value) & is_alike].sort_values("rate")
        first = mine[(mine["seed"] == 0) & (mine["epochs"] == epochs)]
        second = mine[(mine["seed"] == 1) & (mine["epochs"] == epochs)]
        longer = mine[(mine["seed"] == 0) & (mine["epochs"] != epochs)]
        axis.plot(first["rate"], first["percent"], color=style.colour, linestyle=line, marker=".")
        hollow: dict[str, Any] = {
            "color": style.colour,
            "markerfacecolor": "white",
            "markersize": 5,
        }
        axis.plot(second["rate"], second["percent"], "o", zorder=3, **hollow)
        for _, one in longer.groupby("epochs"):
            axis.plot(
                one["rate"], one["percent"], "x", color=style.colour, linewidth=1, markersize=5
            )

    best = part[part["chosen"]]
    if len(best):
        ring: dict[str, Any] = {"markerfacecolor": "none", "color": BLACK, "markersize": 11}
        axis.plot(best["rate"].iloc[0], best["percent"].mean(), "o", **ring)
    _draw_what_is_below(axis, part, style, bottom)


def _draw_what_is_below(axis: Axes, part: pd.DataFrame, style: RowStyle, bottom: float) -> None:
    """Draw an arrow at each rate with values below the scale, labelled with the lowest."""
    for rate, lowest in part[part["percent"] < bottom].groupby("rate")["percent"].min().items():
        axis.plot(rate, bottom + 0.8, "v", color=style.colour, markersize=4)
        beside: dict[str, Any] = {
            # Beside the arrow: lines come down to it.
            "xytext": (3, 0),
            "textcoords": "offset points",
            "va": "center",
            "fontsize": SMALL,
            "path_effects": [withStroke(linewidth=2, foreground="white")],
        }
        axis.annotate(f"{lowest:.0f}", (rate, bottom + 0.8), **beside)


def _scale(percent: pd.Series, frozen: float) -> tuple[float, float]:
    """Limits from the lowest value, at most `DEPTH` below the frozen backbone, to the highest."""
    low, high = percent.min(), percent.max()
    if np.isfinite(frozen):
        low = max(min(low, frozen), frozen - DEPTH)
        high = max(high, frozen)
    return low - 1, high + 2


def _room_around(rates: pd.Series) -> tuple[float, float]:
    return rates.min() / 1.6, rates.max() * 1.6


def _values(part: pd.DataFrame) -> str:
    """The values of a row's hyperparameter, in the order of its lines."""
    values = [f"{value:,g}" for value in part["value"].unique()]
    if len(values) == 1:
        return values[0]
    return f"{values[0]} (dotted: {', '.join(values[1:])})"


def _only_outer_labels(axes: np.ndarray, xlabel: str, ylabel: str) -> None:
    """Label the y axis of the leftmost panels alone, and the x axis of every panel with data."""
    for line in axes:
        line[0].set_ylabel(ylabel)
        for axis in line[1:]:
            axis.tick_params(labelleft=False)
    for axis in axes.flat:
        if axis.has_data():
            axis.set_xlabel(xlabel, fontsize=8)


def _meanings(tuned: pd.DataFrame, epochs: int) -> list[Line2D]:
    ring: dict[str, Any] = {"markerfacecolor": "none", "linestyle": "none"}
    handles = [
        Line2D([], [], color=BLACK, linestyle=LINES[0], marker=".", label="first value"),
        Line2D([], [], color=BLACK, linestyle=LINES[1], marker=".", label="second value"),
        Line2D([], [], color=DARK_GREY, linestyle=DASHED, linewidth=1.2, label="Frozen backbone"),
    ]
    # The legend leaves out markers that do not occur.
    if (tuned["seed"] == 1).any():
        handles.append(Line2D([], [], color=BLACK, marker="o", **ring, label="second seed"))
    if tuned["chosen"].any():
        large = {"markersize": 11, **ring}
        handles.append(
            Line2D([], [], color=BLACK, marker="o", **large, label="chosen: mean of its seeds")
        )
    if (tuned["epochs"] != epochs).any():
        handles.append(Line2D([], [], color=BLACK, linestyle="none", marker="x", label="longer"))
    return handles


@styled
def where_it_wins(
    by_dataset: pd.DataFrame, panels: Mapping[str, pd.DataFrame], note: str = ""
) -> Figure:
    """PUMA minus full fine-tuning: by dataset over the frozen backbone, and in four small panels.

    `by_dataset` has a row per benchmark and dataset: benchmark, dataset, frozen (percent),
    points, low, high and seeds.  `panels` has, by title, tables with benchmark, place (in order),
    points (NaN without a run), low, high, seeds, and `aside`: true for runs of another training
    recipe, drawn hollow and not joined.  `note` is written into the large panel.
    """
    figure = plt.figure(figsize=(PAGE_WIDTH, 7))
    # A notebook would show a figure that pyplot keeps a second time.
    plt.close(figure)
    grid = figure.add_gridspec(2, 4, width_ratios=[1.3, 1.3, 1, 1])
    large = figure.add_subplot(grid[:, :2])
    small = [figure.add_subplot(grid[line, column]) for line in (0, 1) for column in (2, 3)]
    benchmarks = [by_dataset["benchmark"], *(panel["benchmark"] for panel in panels.values())]
    styles = styles_of(pd.concat(benchmarks).dropna())

    _draw_datasets(large, by_dataset, styles)
    # Room for the names of the sides.
    large.margins(y=0.1)
    _shade_sides(large)
    _name_datasets(large, by_dataset, styles)
    _name_sides(large)
    large.text(0.98, 0.02, note, transform=large.transAxes, ha="right", va="bottom", fontsize=8)
    for axis, (title, panel) in zip(small, panels.items(), strict=True):
        _draw_places(axis, panel, styles)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8)
    one_scale(small, "y")
    _shade_alike(small)
    for axis in small[::2]:
        axis.set_ylabel("PUMA minus full fine-tuning,\nharmonic R@1 (points)", fontsize=8)
    title = "PUMA minus full fine-tuning, in pairs, with 95% intervals"
    return finish(figure, np.array([[large, *small]]), title)


def _draw_datasets(axis: Axes, table: pd.DataFrame, styles: Mapping[str, RowStyle]) -> None:
    for benchmark, part in table.groupby("benchmark", sort=False):
        own = styles[str(benchmark)]
        _draw_points(axis, part["frozen"], part, own, label=str(benchmark))
    if len(table):
        axis.set_xscale("log")
        # Room for the names at the right.
        axis.set_xlim(table["frozen"].min() / 1.2, table["frozen"].max() * 1.35)
        axis.set_xticks([5, 10, 20, 40, 80], ["5", "10", "20", "40", "80"])
        axis.minorticks_off()
    axis.set_xlabel("R@1 (%) of the frozen backbone (low: far from its pretraining)")
    axis.set_ylabel("PUMA minus full fine-tuning, R@1 (points)")
    axis.set_title("By dataset, all training images", fontsize=9)


def _name_datasets(axis: Axes, table: pd.DataFrame, styles: Mapping[str, RowStyle]) -> None:
    """Label the points by dataset, and say below which have no room; the scale must be final."""
    names = []
    for one in table.itertuples():
        colour = styles[str(one.benchmark)].colour
        x, y, low, high = map(float, (one.frozen, one.points, one.low, one.high))
        names.append(Name(shown(one.dataset), colour, x, y, low, high))
    places, left_out = places_of(axis, names)
    write_names(axis, places)
    if left_out:
        unnamed = ", ".join(one.text for one in left_out)
        said = textwrap.fill(f"no room for the names of: {unnamed}", LETTERS)
        axis.set_xlabel(f"{axis.get_xlabel()}\n{said}")


def _draw_places(axis: Axes, panel: pd.DataFrame, styles: Mapping[str, RowStyle]) -> None:
    """Draw differences at named places; a line joins the points of a benchmark."""
    places = list(panel["place"].unique())
    panel = panel.reset_index(drop=True)
    kept = panel.groupby("place", sort=False)["points"].count()
    empty = [number for number, place in enumerate(places) if kept[place] == 0]
    of_benchmarks = panel.dropna(subset=["points"]).groupby("benchmark", sort=False)
    for number, (benchmark, part) in enumerate(of_benchmarks):
        own = styles[str(benchmark)]
        # Side by side: intervals would hide each other.
        x = part["place"].map(places.index) + 0.12 * (number - (len(of_benchmarks) - 1) / 2)
        aside = part["aside"]
        # No line passes a place without a run.
        for _, piece in part[~aside].groupby(np.searchsorted(empty, x[~aside])):
            axis.plot(x[piece.index], piece["points"], color=own.colour, linewidth=1)
        _draw_points(axis, x[~aside], part[~aside], own)
        _draw_points(axis, x[aside], part[aside], own, hollow=True)
    for number in empty:
        axis.text(number, 0, "not run", ha="center", va="bottom", fontsize=SMALL, color=DARK_GREY)
    axis.set_xlim(-0.5, len(places) - 0.5)
    axis.set_xticks(range(len(places)), places)
    axis.grid(axis="x", visible=False)


def _draw_points(
    axis: Axes,
    x: pd.Series,
    part: pd.DataFrame,
    style: RowStyle,
    *,
    label: str = "",
    hollow: bool = False,
) -> None:
    """Draw differences with intervals; one seed, or `hollow`, gives empty markers."""
    kinds = {"": part["seeds"] > 1, ", one seed": part["seeds"] == 1}
    for kind, mine in kinds.items():
        if not mine.any():
            continue
        y = part["points"][mine]
        spread = np.stack([y - part["low"][mine], part["high"][mine] - y])
        settings: dict[str, Any] = {
            "elinewidth": 1,
            "ecolor": (style.colour, 0.5),
            "markersize": 5.5,
        }
        if hollow or kind:
            settings["markerfacecolor"] = "white"
        if label:
            settings["label"] = label + kind
        axis.errorbar(x[mine], y, spread, fmt=style.marker, color=style.colour, **settings)


def _shade_sides(axis: Axes) -> None:
    """Shade a panel with PUMA's hue above zero and grey below; its scale shows both sides."""
    low, high = axis.get_ylim()
    low = min(low, -0.1 * abs(high))
    high = max(high, 0.1 * abs(low))
    axis.axhspan(0, high, color=OURS.colour, alpha=0.06, linewidth=0)
    axis.axhspan(low, 0, color=BLACK, alpha=0.05, linewidth=0)
    axis.axhline(0, color=BLACK, linewidth=1)
    axis.set_ylim(low, high)


def _name_sides(axis: Axes) -> None:
    low, high = axis.get_ylim()
    beside: dict[str, Any] = {"transform": axis.get_yaxis_transform(), "weight": "bold"}
    inset = 0.02 * (high - low)
    axis.text(0.02, high - inset, "PUMA is ahead", color=OURS.colour, va="top", **beside)
    below = low + inset
    axis.text(0.02, below, "Full fine-tuning is ahead", color=BLACK, va="bottom", **beside)


def _shade_alike(axes: Sequence[Axes]) -> None:
    """Shade panels that share one scale, and keep its numbers at the leftmost of each line."""
    for number, axis in enumerate(axes):
        _shade_sides(axis)
        if number % 2:
            axis.tick_params(labelleft=False)
