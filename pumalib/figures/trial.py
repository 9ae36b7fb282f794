"""The trial's own figures: every row's curve over the rate, and where PUMA wins."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .looks import BLACK, GREY, Look, looks_of
from .style import PAGE_WIDTH, empty_panels, finish, styled

# Points of R@1 below the frozen backbone at which the scale of the curves ends.
DEPTH = 15
# How the values of a knob are drawn, the first and the second.
LINES: tuple[Any, Any] = ("-", (0, (4, 2)))


@styled
def tuning_curves(tuned: pd.DataFrame, frozen: float, epochs: int) -> Figure:
    """Harmonic R@1 over the rate, a panel per row, on one scale.

    `tuned` as of `study.tuning.table`.  `frozen` is the frozen backbone's, a fraction; `epochs` is
    the length of the search, whose curves are lines; longer trials are dotted.  What ends far below
    the frozen backbone is drawn at the lower edge, with its number.
    """
    drawn = tuned.assign(percent=100 * tuned["harmonic"])
    rows = list(drawn["row"].unique())
    columns = min(5, len(rows))
    lines = -(-len(rows) // columns)
    height = 2.3
    figure, axes = empty_panels(lines, columns, PAGE_WIDTH, height, extra=0.7)

    bottom = max(drawn["percent"].min(), 100 * frozen - DEPTH) - 1
    top = max(drawn["percent"].max(), 100 * frozen) + 2
    look = looks_of(rows)
    for axis, row in zip(axes.flat, rows, strict=False):
        part = drawn[drawn["row"] == row]
        _draw_search(axis, part, look[row], epochs, bottom)
        axis.axhline(100 * frozen, color=GREY, linestyle="-.", linewidth=1)
        axis.set_xscale("log")
        axis.set(ylim=(bottom, top), xlim=_room_around(drawn["rate"]))
        axis.set_title(f"{row}\n{part['knob'].iloc[0]}: {_values(part)}", fontsize=8)
        axis.minorticks_off()
    _only_outer_labels(axes, "base learning rate", "harmonic R@1 (%)")
    finish(figure, axes)
    handles = _meanings(drawn, epochs)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _draw_search(axis: Axes, part: pd.DataFrame, look: Look, epochs: int, bottom: float) -> None:
    is_usual = part["epochs"] == epochs
    mirrored = part.loc[is_usual & (part["seed"] == 0), "mirrored"].iloc[0]
    is_alike = part["mirrored"] == mirrored
    for value, line in zip(part["value"].unique(), LINES, strict=False):
        mine = part[(part["value"] == value) & is_alike].sort_values("rate")
        first = mine[(mine["seed"] == 0) & (mine["epochs"] == epochs)]
        second = mine[(mine["seed"] == 1) & (mine["epochs"] == epochs)]
        longer = mine[(mine["seed"] == 0) & (mine["epochs"] != epochs)]
        axis.plot(first["rate"], first["percent"], color=look.colour, linestyle=line, marker=".")
        hollow: dict[str, Any] = {"color": look.colour, "markerfacecolor": "white", "markersize": 5}
        axis.plot(second["rate"], second["percent"], "o", zorder=3, **hollow)
        for _, one in longer.groupby("epochs"):
            axis.plot(one["rate"], one["percent"], ":", color=look.colour, linewidth=1)

    best = part[part["chosen"]]
    if len(best):
        ring: dict[str, Any] = {"markerfacecolor": "none", "color": BLACK, "markersize": 11}
        axis.plot(best["rate"].iloc[0], best["percent"].mean(), "o", **ring)
    _draw_what_is_below(axis, part, look, bottom)


def _draw_what_is_below(axis: Axes, part: pd.DataFrame, look: Look, bottom: float) -> None:
    """An arrow at each rate with numbers below the scale, and the lowest of them."""
    for rate, lowest in part[part["percent"] < bottom].groupby("rate")["percent"].min().items():
        axis.plot(rate, bottom + 0.8, "v", color=look.colour, markersize=4)
        above: dict[str, Any] = {
            "xytext": (0, 4),
            "textcoords": "offset points",
            "ha": "center",
            "fontsize": 6.5,
        }
        axis.annotate(f"{lowest:.0f}", (rate, bottom + 0.8), **above)


def _room_around(rates: pd.Series) -> tuple[float, float]:
    return rates.min() / 1.6, rates.max() * 1.6


def _values(part: pd.DataFrame) -> str:
    """The values of a row's knob in the order of its lines."""
    return ", ".join(f"{value:g}" for value in part["value"].unique())


def _only_outer_labels(axes: np.ndarray, xlabel: str, ylabel: str) -> None:
    """Labels at the left and below: what all panels share is written once a line."""
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
        Line2D([], [], color=BLACK, linestyle=LINES[0], marker=".", label="knob's default"),
        Line2D([], [], color=BLACK, linestyle=LINES[1], marker=".", label="its second value"),
        Line2D([], [], color=BLACK, marker="o", **ring, label="second seed"),
        Line2D([], [], color=BLACK, marker="o", markersize=11, **ring, label="chosen"),
        Line2D([], [], color=GREY, linestyle="-.", linewidth=1, label="frozen backbone"),
    ]
    if (tuned["epochs"] != epochs).any():
        handles.append(Line2D([], [], color=BLACK, linestyle=":", linewidth=1, label="longer"))
    return handles
