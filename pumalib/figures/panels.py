"""Numbers with their intervals, in panels: dots, lines with bands, and differences in pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from ..data import check_known
from ..evaluation import OVERALL
from .looks import BLACK, FALSE, GREY, TRUE, Look, looks_of
from .style import PAGE_WIDTH, empty_panels, finish, styled

# The markers of PUMA and of the frozen backbone: larger, and above all others.
PROMINENT = ("*", "_")


@styled
def intervals(
    table: pd.DataFrame,
    ylabel: str | Mapping[str, str],
    title: str = "",
    *,
    joined: bool = False,
    zero: bool = False,
    xlabel: str = "",
) -> Figure:
    """Numbers with their intervals, side by side at each place, or `joined` by a line with a band.

    `table` has the columns place, row, value, low and high, and where needed panel (then `ylabel`
    may be a dict by panel) and printed, the paper's number, drawn hollow.  `zero` draws a line
    there.
    """
    table = table.reset_index(drop=True)
    if "panel" not in table:
        table = table.assign(panel="")
    panels = table.groupby("panel", sort=False)
    look = looks_of(table["row"])

    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    fills_page = columns > 1 or table["place"].nunique() > 4
    width = 5.5
    if fills_page:
        width = PAGE_WIDTH
    height = 3.2
    if columns == 4:
        height = 2.4
    figure, axes = empty_panels(rows, columns, width, height, extra=0.6)
    for axis, (panel, part) in zip(axes.flat, panels, strict=False):
        places = _places(part)
        _draw_rows(axis, part, places, look, joined)
        _shade_overall(axis, places)
        if zero:
            axis.axhline(0, color=GREY, linewidth=1)
        unit = ylabel if isinstance(ylabel, str) else ylabel[panel]
        axis.set(xlim=(-0.5, len(places) - 0.5), title=panel, xlabel=xlabel, ylabel=unit)
        _name_places(axis, places, columns)
        axis.grid(axis="x", visible=False)
    return finish(figure, axes, title)


def _places(part: pd.DataFrame) -> list:
    """The places of a panel from left to right: as they come, the overall accuracies last."""
    places = list(part["place"].unique())
    overall = [place for place in OVERALL if place in places]
    single = [place for place in places if place not in OVERALL]
    return [*single, *overall]


def _draw_rows(
    axis: Axes, part: pd.DataFrame, places: list, look: Mapping[str, Look], joined: bool
) -> None:
    """Every row of a panel, beside the others where several have a number at one place."""
    rows = list(part["row"].unique())
    distance = 0.0
    if not joined and part["place"].duplicated().any():
        distance = 0.8 / len(rows)

    for number, row in enumerate(rows):
        mine = part[part["row"] == row]
        shift = distance * (number - (len(rows) - 1) / 2)
        x = mine["place"].map(places.index) + shift
        # A band of one point has no width.
        if joined and len(mine) > 1:
            _draw_line(axis, x, mine, row, look[row])
        else:
            _draw_dots(axis, x, mine, row, look[row])
        if "printed" in mine:
            _draw_hollow(axis, x, mine["printed"], look[row])


def _shade_overall(axis: Axes, places: list) -> None:
    for number, place in enumerate(places):
        if place in OVERALL:
            axis.axvspan(number - 0.5, number + 0.5, color="#f2f2f2", zorder=0)


def _name_places(axis: Axes, places: list, columns: int) -> None:
    """The names of the places below a panel, tilted where they would overlap."""
    widths = [max(map(len, str(place).split("\n"))) for place in places]
    # About a hundred characters stand side by side in a page.
    if sum(widths) > 100 / columns:
        axis.set_xticks(range(len(places)), places, rotation=40, ha="right")
    else:
        axis.set_xticks(range(len(places)), places, rotation=0, ha="center")


def curves(
    tidy: pd.DataFrame,
    x: Mapping[str, tuple[str, float]],
    xlabel: str,
    columns: Sequence[str] = OVERALL,
    metric: str = "R@1",
) -> Figure:
    """`metric` over a number, a panel per column and a line per method, with 95 % bands.

    `tidy` as of `study.Results.tidy`; `x` gives a row its line and its place,
    {"PUMA 4": ("PUMA", 4)}, and other rows are not drawn (Figs. 6 to 8).  ValueError: an unknown
    `metric`.
    """
    drawn = tidy["row"].isin(list(x)) & tidy["dataset"].isin(columns)
    table = _in_percent(tidy[drawn], metric)
    table["place"] = [x[row][1] for row in table["row"]]
    table["row"] = [x[row][0] for row in table["row"]]
    table["panel"] = pd.Categorical(table["dataset"], columns)
    table = table.sort_values(["panel", "place"], kind="stable")
    table["panel"] = table["panel"].astype(str)
    table["place"] = table["place"].map("{:g}".format)
    return intervals(table, f"{metric} (%)", joined=True, xlabel=xlabel)


@styled
def against(
    panels: Mapping[str, pd.DataFrame],
    xlabel: str,
    ylabel: str,
    log: str = "",
    joined: bool = False,
) -> Figure:
    """Values over numbers, a panel per table with the columns row, x, value, low and high.

    Points with their intervals, or `joined` by a line, with a band where there are low and high.
    A row without an x is a horizontal line.  `log` is "", "x" or "xy": these axes are logarithmic.
    """
    look = looks_of([row for table in panels.values() for row in table["row"]])
    width = PAGE_WIDTH if len(panels) > 1 else 7
    figure, axes = empty_panels(1, len(panels), width, 4 + 0.07 * len(look))
    for axis, (title, table) in zip(axes.flat, panels.items(), strict=True):
        for row, part in table.groupby("row", sort=False):
            if part["x"].isna().any():
                level = part["value"].item()
                axis.axhline(level, color=GREY, linestyle="--", linewidth=1, label=row)
            elif joined:
                _draw_line(axis, part["x"], part, row, look[row])
            else:
                _draw_dots(axis, part["x"], part, row, look[row])
        axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
        if "x" in log:
            axis.set_xscale("log")
            _write_plain_numbers(axis.xaxis)
        if "y" in log:
            axis.set_yscale("log")
            _write_plain_numbers(axis.yaxis)
    return finish(figure, axes)


def _write_plain_numbers(side: Axis) -> None:
    """1,000 for 10 to the 3rd, and numbers between powers of ten where there is room."""
    side.set_major_formatter("{x:,g}")
    side.set_minor_formatter(LogFormatter())


def accuracy_against_parameters(tidy: pd.DataFrame, trainable: Mapping[str, int]) -> Figure:
    """Harmonic and unified R@1 against each method's number of trainable parameters (Fig. 2).

    `trainable` is a dict or a Series by row; a row that trains none is a horizontal line.
    """
    table = _in_percent(tidy, "R@1")
    millions = table["row"].map(lambda row: trainable[row] / 1e6)
    # A logarithmic axis has no zero.
    table["x"] = millions.where(millions > 0)
    panels = {name: table[table["dataset"] == name] for name in ("harmonic", "unified")}
    xlabel = "trainable parameters (millions): up and to the left is better"
    return against(panels, xlabel, "R@1 (%)", log="x")


@styled
def gains(differences: pd.DataFrame, title: str = "") -> Figure:
    """Differences in pairs with their 95 % intervals, a panel per column.

    `differences` as of `study.Results.differences`: difference, of, points, low and high, and if
    known p and paper.  Hollow: printed.  Grey: across zero, or of one seed (p is NaN).
    """
    names = list(differences["difference"].unique())[::-1]
    panels = differences.groupby("of", sort=False)
    height = 1.4 + 0.22 * len(names)
    figure, axes = empty_panels(1, max(1, len(panels)), PAGE_WIDTH, height)
    for axis, (panel, part) in zip(axes.flat, panels, strict=False):
        y = part["difference"].map(names.index)
        _draw_gains(axis, part, y)
        if "paper" in part and part["paper"].notna().any():
            axis.plot(part["paper"], y, "D", color=BLACK, markerfacecolor="none", label="printed")
        axis.axvline(0, color=GREY, linewidth=1)
        axis.set(xlabel="points of R@1", title=panel, ylim=(-0.6, len(names) - 0.4))
        axis.set_yticks(range(len(names)))
        axis.set_yticklabels(names if axis is axes[0, 0] else [])
    return finish(figure, axes, title)


def _draw_gains(axis: Axes, part: pd.DataFrame, y: pd.Series) -> None:
    """The intervals of a panel at the heights `y`, in three colours."""
    # One seed has no p, and says nothing about others.
    several_seeds = pd.Series(False, part.index)
    if "p" in part:
        several_seeds = part["p"].notna()
    above = (part["low"] > 0) & several_seeds
    below = (part["high"] < 0) & several_seeds

    x = part["points"]
    spread = np.stack([x - part["low"], part["high"] - x])
    kinds = [
        ("interval above 0", TRUE, above),
        ("below 0", FALSE, below),
        ("across 0, or one seed", GREY, ~(above | below)),
    ]
    for name, colour, mine in kinds:
        # What does not occur is not in the legend.
        label = name if mine.any() else None
        axis.errorbar(x[mine], y[mine], xerr=spread[:, mine], fmt="o", color=colour, label=label)


def _in_percent(tidy: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows of `tidy` of one metric, its shares as percentages; ValueError: it is unknown."""
    check_known("metric", [metric], tidy["metric"].unique())
    table = tidy[tidy["metric"] == metric].copy()
    for part in ("value", "low", "high"):
        table[part] = 100 * table[part]
    return table


def _style_of(look: Look, label: str) -> dict[str, Any]:
    """What dots and lines of a row have in common."""
    style: dict[str, Any] = {"color": look.colour, "label": label, "zorder": 2}
    if look.marker in PROMINENT:
        style["markersize"] = 9
        style["zorder"] = 3
    return style


def _draw_line(axis: Axes, x: pd.Series, rows: pd.DataFrame, label: str, look: Look) -> None:
    """The values of `rows` at `x` as a line with about eight markers, and their band if known."""
    every = -(-len(rows) // 8)
    axis.plot(x, rows["value"], marker=look.marker, markevery=every, **_style_of(look, label))
    if "low" in rows:
        low = rows["low"]
        high = rows["high"]
        axis.fill_between(x, low, high, color=look.colour, alpha=0.15, linewidth=0)


def _draw_dots(axis: Axes, x: pd.Series, rows: pd.DataFrame, label: str, look: Look) -> None:
    """The values of `rows` at `x` as markers with the bars of their intervals."""
    below = rows["value"] - rows["low"]
    above = rows["high"] - rows["value"]
    spread = np.stack([below, above]).astype(float).clip(0)
    axis.errorbar(
        x,
        rows["value"],
        spread,
        fmt=look.marker,
        elinewidth=1.2,
        ecolor=(look.colour, 0.6),
        **_style_of(look, label),
    )


def _draw_hollow(axis: Axes, x: pd.Series, values: pd.Series, look: Look) -> None:
    """The paper's numbers: a row's marker, larger and empty."""
    axis.plot(x, values, look.marker, color=look.colour, markerfacecolor="none", markersize=8)
