"""Figures of numbers with intervals: dots, lines with bands, and paired differences."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas.api.types import is_numeric_dtype

from pumalib.data import check_known
from pumalib.evaluation import OVERALL

from .labels import Name, moved_apart, name_ends, places_of, write_names
from .row_styles import (
    ABOVE,
    BELOW,
    BLACK,
    DARK_GREY,
    DASHED,
    GREY,
    LEVEL,
    MEAN,
    RowStyle,
    capital,
    dashes_of,
    shown,
    styles_of,
)
from .style import PAGE_WIDTH, empty_panels, finish, one_scale, styled, write_plain_numbers

# The markers of PUMA and of the frozen backbone: larger, and drawn over all others.
PROMINENT = ("*", LEVEL)
# Up to these numbers lines and points are labelled directly; more get a legend.
LINES_NAMED = 7
POINTS_NAMED = 12
# Lines in more panels get a legend: names at the last one are far from the first.
PANELS_NAMED = 1
# Up to this number of lines bands do not hide each other; more get error bars.
BANDS = 2
# Up to this number of tried values a logarithmic axis has its ticks there.
TRIED_NAMED = 8


@styled
def intervals(
    table: pd.DataFrame,
    ylabel: str | Mapping[str, str],
    title: str = "",
    *,
    joined: bool = False,
    zero: bool = False,
    xlabel: str = "",
    log: bool = False,
) -> Figure:
    """Numbers with intervals over named places: side by side, or `joined` by lines.

    One or two lines of a panel have bands, more have error bars beside each other.

    `table` has the columns place, row, value, low and high, and optionally panel (then `ylabel` may
    be a dict by panel) and printed, the paper's number, drawn hollow.  `zero` draws a line at 0.
    Panels called unified and harmonic share one scale.  Places that are numbers, the lowest first,
    stand to scale, a logarithmic one with `log`.
    """
    table = table.reset_index(drop=True)
    table = table.assign(row=table["row"].map(shown))
    if not is_numeric_dtype(table["place"]):
        table["place"] = table["place"].map(shown)
    if "panel" not in table:
        table = table.assign(panel="")
    panels = table.groupby("panel", sort=False)
    styles = styles_of(table["row"])

    columns = _columns(len(panels))
    rows = -(-len(panels) // columns)
    fills_page = columns > 1 or table["place"].nunique() > 4
    width = 5.5
    if fills_page:
        width = PAGE_WIDTH
    height = 3.2
    if columns == 4:
        height = 2.4
    figure, axes = empty_panels(rows, columns, width, height, extra=0.6)
    drawn = {}
    for axis, (panel, part) in zip(axes.flat, panels, strict=False):
        places = _places(part)
        x_of = _x_of(places, log)
        part = part.assign(x=part["place"].map(x_of), panel=panel)
        _draw_rows(axis, part, styles, joined=joined)
        _shade_overall(axis, places)
        if zero:
            axis.axhline(0, color=GREY, linewidth=1)
        unit = ylabel if isinstance(ylabel, str) else ylabel[panel]
        # Names of lines stand at the right of the panel, and their leaders should be short.
        beside = 0.22 if joined else 0.5
        axis.set(xlim=(-beside, len(places) - 1 + beside))
        axis.set(title=shown(panel), xlabel=xlabel, ylabel=unit)
        _name_places(axis, x_of, columns)
        axis.grid(axis="x", visible=False)
        drawn[axis] = part

    one_scale([axis for axis, part in drawn.items() if part["panel"].iloc[0] in OVERALL], "y")
    named = joined and _name_lines(drawn, styles)
    return finish(figure, axes, title, named=not named)


def _columns(panels: int) -> int:
    """Panels in a line: at most four, and no gap in the last line where three or two leave none."""
    fitting = [count for count in (4, 3, 2) if panels % count == 0]
    if panels <= 4 or not fitting:
        return min(4, panels)
    return fitting[0]


def _name_lines(drawn: Mapping[Axes, pd.DataFrame], styles: Mapping[str, RowStyle]) -> bool:
    """Label the ends of the lines in the last panel, if it has all rows and they are few.

    `drawn` has each panel's table with the columns row, x and value.  Returns whether it did: not
    for more than `PANELS_NAMED` panels, nor where a line ends before the panel does, because its
    leader would look like data.
    """
    if not 1 <= len(drawn) <= PANELS_NAMED:
        return False
    axis, table = list(drawn.items())[-1]
    if set(table["row"]) != set(styles) or not 1 < len(styles) <= LINES_NAMED:
        return False
    farthest = table["x"].max()
    right = axis.get_xlim()[1]
    names = []
    for row, part in table.groupby("row", sort=False):
        # A line without an x goes through the whole panel.
        last = part.fillna({"x": right}).sort_values("x").iloc[-1]
        if last["x"] < farthest:
            return False
        names.append(Name(str(row), styles[str(row)].colour, last["x"], last["value"]))
    name_ends(axis, names)
    return True


def _places(part: pd.DataFrame) -> list:
    """The places of a panel from left to right: in order of appearance, overall accuracies last."""
    places = list(part["place"].unique())
    overall = [place for place in OVERALL if place in places]
    single = [place for place in places if place not in OVERALL]
    return [*single, *overall]


def _x_of(places: list, log: bool) -> dict[Any, float]:
    """The x of each place: 0, 1, ..., and of numbers to scale between the first and the last."""
    x = np.arange(len(places), dtype=float)
    if isinstance(places[0], str):
        return dict(zip(places, x, strict=True))
    numbers = np.log(places) if log else np.array(places, float)
    return dict(zip(places, np.interp(numbers, numbers[[0, -1]], x[[0, -1]]), strict=True))


def _draw_rows(
    axis: Axes, part: pd.DataFrame, styles: Mapping[str, RowStyle], *, joined: bool
) -> None:
    """Draw the rows of a panel, side by side where several have a number at one place."""
    dashes = dashes_of(styles)
    rows = []
    for row, mine in part.groupby("row", sort=False):
        if joined and styles[row].marker == LEVEL and mine["value"].nunique() == 1:
            _draw_level(axis, mine, row, styles[row])
        else:
            rows.append(row)
    has_bands = joined and len(rows) <= BANDS
    distance = 0.0
    if len(rows) > 1 and part["place"].duplicated().any() and not has_bands:
        # Lines moved far would seem to cross.
        distance = (0.12 if joined else 0.8) / len(rows)

    for number, row in enumerate(rows):
        mine = part[part["row"] == row]
        shift = distance * (number - (len(rows) - 1) / 2)
        x = mine["x"] + shift
        # A band of one point has no width.
        if has_bands and len(mine) > 1:
            _draw_line(axis, x, mine, row, styles[row], dashes=dashes[row])
        elif joined:
            _draw_dots(axis, x, mine, row, styles[row], dashes=dashes[row])
        else:
            _draw_dots(axis, x, mine, row, styles[row])
        if "printed" in mine:
            _draw_hollow(axis, x, mine["printed"], styles[row])


def _draw_level(axis: Axes, part: pd.DataFrame, label: str, style: RowStyle) -> None:
    """Draw a row that has one value everywhere, as the frozen backbone: a line, and its band."""
    first = part.iloc[0]
    axis.axhline(first["value"], color=style.colour, linestyle=DASHED, linewidth=1.2, label=label)
    axis.axhspan(first["low"], first["high"], color=style.colour, alpha=0.1, linewidth=0)


def _shade_overall(axis: Axes, places: list) -> None:
    for number, place in enumerate(places):
        if place in OVERALL:
            axis.axvspan(number - 0.5, number + 0.5, color="#f2f2f2", zorder=0)


def _name_places(axis: Axes, x_of: Mapping[Any, float], columns: int) -> None:
    """Write the names of the places below a panel, tilted if they would overlap."""
    x = list(x_of.values())
    names = [place if isinstance(place, str) else f"{place:g}" for place in x_of]
    widths = [max(map(len, name.split("\n"))) for name in names]
    # About a hundred characters fit side by side on a page.
    if sum(widths) > 100 / columns:
        axis.set_xticks(x, names, rotation=40, ha="right")
    else:
        axis.set_xticks(x, names, rotation=0, ha="center")


def curves(
    tidy: pd.DataFrame,
    x: Mapping[str, tuple[str, float]],
    xlabel: str,
    columns: Sequence[str] = OVERALL,
    metric: str = "R@1",
    *,
    title: str = "",
) -> Figure:
    """`metric` over a number (Figs. 6 to 8): a panel per column, a line with a band per method.

    `tidy` is a table of `study.Results.tidy`.  `x` gives rows their line and its x, such as
    {"PUMA 4": ("PUMA", 4)}, on a logarithmic scale; other rows are not drawn.  Raises ValueError
    for an unknown `metric`.
    """
    drawn = tidy["row"].isin(list(x)) & tidy["dataset"].isin(columns)
    table = _in_percent(tidy[drawn], metric)
    table["place"] = [x[row][1] for row in table["row"]]
    table["row"] = [x[row][0] for row in table["row"]]
    table["panel"] = pd.Categorical(table["dataset"], columns)
    table = table.sort_values(["panel", "place"], kind="stable")
    table["panel"] = table["panel"].astype(str)
    return intervals(table, f"{metric} (%)", title, joined=True, xlabel=xlabel, log=True)


@styled
def against(
    panels: Mapping[str, pd.DataFrame],
    xlabel: str | Mapping[str, str],
    ylabel: str | Mapping[str, str],
    log: str = "",
    title: str = "",
    *,
    joined: bool = False,
    zero: bool = False,
    columns: int | None = None,
) -> Figure:
    """Values over numbers, a panel per table with the columns row, x, value, low and high.

    Rows are points with intervals, or lines if `joined`, with a band if there are low and high.  A
    row without an x is a horizontal line.  `xlabel` and `ylabel` may be dicts by panel.  `log`
    names the logarithmic axes: "", "x" or "xy"; few x of lines have a tick each there.  `title` is
    the figure's: it says what the intervals are.  `zero` draws a line at 0.  Few lines or points
    are labelled by their row if there is room, or points by a column `point_label`; else there is a
    legend.  Panels called unified and harmonic share one scale.  `columns` is the number of panels
    in a line, all if None.
    """
    panels = {panel: one.assign(row=one["row"].map(shown)) for panel, one in panels.items()}
    styles = styles_of([row for table in panels.values() for row in table["row"]])
    width = PAGE_WIDTH if len(panels) > 1 else 7
    columns = columns or len(panels)
    lines = -(-len(panels) // columns)
    figure, axes = empty_panels(lines, columns, width, 4 if lines == 1 else 3)
    drawn = dict(zip(axes.flat, panels.values(), strict=False))
    for axis, (panel, table) in zip(axes.flat, panels.items(), strict=False):
        if "x" in log:
            axis.set_xscale("log")
        _draw_over_numbers(axis, table, styles, joined)
        if zero:
            axis.axhline(0, color=GREY, linewidth=1)
        across = xlabel if isinstance(xlabel, str) else xlabel[panel]
        along = ylabel if isinstance(ylabel, str) else ylabel[panel]
        axis.set(xlabel=across, ylabel=along, title=panel)
        if "x" in log:
            write_plain_numbers(axis.xaxis)
            tried = table["x"].dropna().unique()
            if joined and len(tried) <= TRIED_NAMED:
                axis.set_xticks(sorted(tried))
                axis.minorticks_off()
        elif (table["x"].dropna() % 1 == 0).all():
            # Whole numbers, such as epochs, get no ticks between them.
            axis.xaxis.get_major_locator().set_params(integer=True)
        if "y" in log:
            axis.set_yscale("log")
            write_plain_numbers(axis.yaxis)

    one_scale([axis for axis in drawn if axis.get_title().split(":")[0] in OVERALL], "y")
    named = _name_lines(drawn, styles) if joined else _name_each_point(drawn, styles)
    # Handles long enough for a dash and a dot beside the marker.
    return finish(figure, axes, title, named=not named, handlelength=4.5)


def _draw_over_numbers(
    axis: Axes, table: pd.DataFrame, styles: Mapping[str, RowStyle], joined: bool
) -> None:
    """Draw the rows of a panel of `against`; a row without an x is a horizontal line.

    A single point among lines is drawn large over them, and its interval beside those at its x.
    """
    dashes = dashes_of(styles)
    beside = 0
    for row, part in table.groupby("row", sort=False):
        if part["x"].isna().any():
            level = part["value"].item()
            look: dict[str, Any] = {"color": styles[row].colour, "linestyle": dashes[row]}
            axis.axhline(level, linewidth=1.2, label=row, **look)
        elif joined and len(part) > 1:
            _draw_line(axis, part["x"], part, row, styles[row], dashes=dashes[row])
        elif joined:
            x = part["x"]
            if "low" in part and (table["x"] == x.item()).sum() > 1:
                beside += 1
                x = _to_the_left(axis, x, table["x"], 0.02 * beside)
            large: dict[str, Any] = {"markersize": 8, "zorder": 4}
            _draw_dots(axis, x, part, row, styles[row], **large)
        else:
            _draw_dots(axis, part["x"], part, row, styles[row])


def _to_the_left(axis: Axes, x: pd.Series, of_all: pd.Series, share: float) -> pd.Series:
    """`x` less a share of the range that `of_all` has on the axis, which may be logarithmic."""
    scale = axis.xaxis.get_transform()
    low, high = scale.transform(np.array([of_all.min(), of_all.max()]))
    moved = scale.transform(x.to_numpy(float)) - share * (high - low)
    return pd.Series(scale.inverted().transform(moved), x.index)


@styled
def over_settings(
    panels: Mapping[str, pd.DataFrame], defaults: Mapping[str, float], ylabel: str
) -> Figure:
    """Lines with bands over the values of a setting, a panel per setting, all on one y scale.

    `panels` has tables with the columns of `against`.  Only the tried values of x get ticks, on a
    logarithmic axis if all are positive.  A dotted line marks the setting's default.
    """
    panels = {title: one.assign(row=one["row"].map(shown)) for title, one in panels.items()}
    styles = styles_of([row for table in panels.values() for row in table["row"]])
    columns = _columns(len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = empty_panels(lines, columns, PAGE_WIDTH, 2.3, extra=0.5)
    drawn = axes.flat[: len(panels)]
    for axis, (title, table) in zip(drawn, panels.items(), strict=True):
        values = sorted(table["x"].dropna().unique())
        if values[0] > 0:
            axis.set_xscale("log")
        _draw_over_numbers(axis, table, styles, joined=True)
        default: dict[str, Any] = {"color": GREY, "linestyle": ":", "label": "the default"}
        axis.axvline(defaults[title], linewidth=1.2, zorder=1, **default)
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.minorticks_off()
        axis.set(title=title)
    for line in axes:
        line[0].set_ylabel(ylabel)
    one_scale(drawn, "y")
    return finish(figure, axes, f"{capital(ylabel)} over one setting of a loss, with 95% bands")


def _name_each_point(drawn: Mapping[Axes, pd.DataFrame], styles: Mapping[str, RowStyle]) -> bool:
    """Label points by a column `point_label`, or by their rows if these are few with a point each.

    Rows' names are written if all have room, `point_label` where there is room.  Returns whether
    the labels are the rows' names, so that no legend is needed.
    """
    tables = list(drawn.values())
    is_labelled = any("point_label" in table for table in tables)
    is_few = all(len(table) <= POINTS_NAMED for table in tables)
    is_single = all(table["row"].is_unique for table in tables)
    if not is_labelled and not (is_few and is_single and len(styles) > 1):
        return False
    found = {}
    for axis, table in drawn.items():
        names: list[Name] = []
        levels: list[Name] = []
        for one in table.itertuples():
            text = str(one.point_label if is_labelled else one.row)
            name = Name(text, styles[one.row].colour, one.x, one.value, one.low, one.high)
            kind = levels if np.isnan(one.x) else names
            if text:
                kind.append(name)
        found[axis], left_out = places_of(axis, names, levels)
        if left_out and not is_labelled:
            return False
    for axis, places in found.items():
        write_names(axis, places)
    return not is_labelled


def accuracy_against_parameters(tidy: pd.DataFrame, trainable: Mapping[str, int]) -> Figure:
    """Unified and harmonic R@1 over the number of trainable parameters, by method (Fig. 2).

    `trainable` has these numbers by row; a row that trains none is a horizontal line.
    """
    table = _in_percent(tidy, "R@1")
    millions = table["row"].map(lambda row: trainable[row] / 1e6)
    # A logarithmic axis has no zero.
    table["x"] = millions.where(millions > 0)
    table["x"] = _moved_apart(table)
    xlabel = (
        "trainable parameters (millions)\nnearly equal ones are moved apart; up and left is better"
    )
    panels = {name: table[table["dataset"] == name] for name in OVERALL}
    title = "R@1 over trainable parameters, with 95% intervals"
    return against(panels, xlabel, "R@1 (%)", "x", title)


def _moved_apart(table: pd.DataFrame) -> pd.Series:
    """The x of each row, larger by an eighth than the next smaller one at least."""
    x = table.dropna(subset=["x"]).groupby("row", sort=False)["x"].first()
    moved = np.exp(moved_apart(list(np.log(x)), np.log(1.125)))
    return table["row"].map(dict(zip(x.index, moved, strict=True)))


@styled
def gains(differences: pd.DataFrame, title: str = "") -> Figure:
    """Paired differences with their 95% intervals, a panel per column, all on one scale.

    `differences` is a table of `study.Results.differences`: difference, of, points, low and high,
    optionally p and paper.  Differences that share a row are grouped under a heading; a column
    `group` sets other headings.  The paper's differences are hollow diamonds.  Grey are intervals
    that contain zero, and hollow those of one seed (p is NaN).
    """
    table = _with_groups(differences)
    lines = _lines_of_groups(table)
    table["y"] = [-lines.index(line) for line in _keys(table)]
    table["kind"] = _kinds(table)
    # What is only printed has no kind.
    occurring = set(table.loc[table["points"].notna(), "kind"])
    panels = table.groupby("of", sort=False)
    height = 1.3 + 0.21 * len(lines)
    figure, axes = empty_panels(1, max(1, len(panels)), PAGE_WIDTH, height)
    drawn = []
    for axis, (panel, part) in zip(axes.flat, panels, strict=False):
        # All panels draw all kinds that occur, so that the legend has them in one order.
        for kind, style in KINDS.items():
            if kind in occurring:
                _draw_gains(axis, part[part["kind"] == kind], kind, style)
        if "paper" in part and part["paper"].notna().any():
            hollow: dict[str, Any] = {"color": BLACK, "markerfacecolor": "none"}
            # Over the dots, which would hide them.
            hollow |= {"markersize": 7, "zorder": 4}
            axis.plot(part["paper"], part["y"], "D", label="printed in the paper", **hollow)
        axis.axvline(0, color=GREY, linewidth=1)
        axis.set(xlabel="difference of R@1 (points)", title=panel, ylim=(0.4 - len(lines), 0.6))
        axis.locator_params(axis="x", nbins=min(6, 18 // len(panels)))
        _name_lines_of_groups(axis, lines, named=axis is axes[0, 0])
        drawn.append(axis)
    one_scale(drawn, "x")
    title = f"{title or 'Differences of R@1'}, with 95% intervals"
    return finish(figure, axes, title, fewest=1)


@styled
def gains_over_length(table: pd.DataFrame, ours: str, without: str) -> Figure:
    """`ours` minus each rival over the length of training: of all datasets, and without one.

    `table` has the columns rival, epochs, is_without, points, low, high and seeds; a rival has a
    line in each of the two panels, where it has numbers.  `without` is the name of the dataset left
    out.
    """
    table = table.assign(rival=table["rival"].map(shown))
    styles = styles_of(table["rival"])
    rivals = list(table["rival"].unique())
    most_seeds = table.groupby("epochs")["seeds"].max()
    lengths = list(most_seeds.index)
    ticks = []
    for epochs, seeds in most_seeds.items():
        note = "\none seed" if seeds == 1 else ""
        ticks.append(f"{epochs:g}{note}")
    figure, axes = empty_panels(1, 2, 8, 4)
    left, right = axes[0]
    right.sharey(left)
    left.set_ylabel(f"{shown(ours)} minus rival, harmonic R@1 (points)")
    left.set_title("all datasets")
    right.set_title(f"without {shown(without)}")
    for (rival, is_without), part in table.groupby(["rival", "is_without"], sort=False):
        style = styles[rival]
        part = part.sort_values("epochs")
        shift = 0.08 * (rivals.index(rival) - (len(rivals) - 1) / 2)
        x = part["epochs"].map(lengths.index) + shift
        spread = np.stack([part["points"] - part["low"], part["high"] - part["points"]])
        axis = right if is_without else left
        axis.errorbar(
            x,
            part["points"],
            spread,
            color=style.colour,
            marker=style.marker,
            markersize=7,
            linestyle="-",
            label=rival,
        )
    for axis in (left, right):
        axis.axhline(0, color=BLACK, linewidth=1)
        axis.set_xticks(range(len(lengths)), ticks)
        axis.set(xlim=(-0.5, len(lengths) - 0.5), xlabel="epochs of training")
        axis.grid(axis="x", visible=False)
    _name_halves(left, ours)
    title = f"{shown(ours)} minus each rival over the length of training, with 95% intervals"
    return finish(figure, axes, title)


def _name_halves(axis: Axes, ours: str) -> None:
    """Write who is higher above and below zero, both of which the scale shows."""
    # The words stand above and below all bars.
    axis.margins(y=0.12)
    low, high = axis.get_ylim()
    least = 0.15 * (high - low)
    axis.set_ylim(min(low, -least), max(high, least))
    texts = [(f"{shown(ours)} higher", 1.0, "top"), ("rival higher", 0.0, "bottom")]
    for text, y, side in texts:
        axis.annotate(
            text,
            (1, y),
            (-4, -3 if side == "top" else 3),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            va=side,
            weight="bold",
            color=DARK_GREY,
        )


# A heading alone, or below it the name of a difference
Line = tuple[str, str]
# The heading of differences that share no row with others
ALONE = "Other differences"


def _with_groups(differences: pd.DataFrame) -> pd.DataFrame:
    """`differences` with two more columns: group, a heading or "", and name, the line below it."""
    if "group" in differences:
        return differences.assign(name=differences["difference"].map(shown))
    parts = {}
    for difference in differences["difference"].unique():
        row, _, other = difference.partition(" over ")
        parts[difference] = (shown(row), shown(other))
    of_row = pd.Series([row for row, other in parts.values() if other]).value_counts()
    to_other = pd.Series([other for _, other in parts.values() if other]).value_counts()

    groups = {}
    names = {}
    for difference, (row, other) in parts.items():
        if not other:
            groups[difference], names[difference] = "", row
        elif of_row[row] >= to_other[other]:
            groups[difference], names[difference] = f"{row} minus ...", other
        else:
            groups[difference], names[difference] = f"... minus {other}", row
    members = pd.Series(groups.values()).value_counts()
    for difference, group in groups.items():
        if group and members[group] == 1:
            # One line needs no heading of its own.
            row, other = parts[difference]
            groups[difference], names[difference] = ALONE, f"{row} minus {other}"
    if set(groups.values()) == {ALONE}:
        groups = dict.fromkeys(groups, "")
    of = differences["difference"]
    return differences.assign(group=of.map(groups), name=of.map(names))


def _keys(table: pd.DataFrame) -> list[Line]:
    return list(zip(table["group"], table["name"], strict=True))


def _lines_of_groups(table: pd.DataFrame) -> list[Line]:
    """Lines from top to bottom: each heading, (group, ""), followed by its (group, name)."""
    keys = list(dict.fromkeys(_keys(table)))
    lines: list[Line] = []
    for group in dict.fromkeys(group for group, _ in keys):
        if group:
            lines.append((group, ""))
        lines += [key for key in keys if key[0] == group]
    return lines


def _name_lines_of_groups(axis: Axes, lines: Sequence[Line], *, named: bool) -> None:
    """Write bold headings and the names below them at the left of a panel, if `named`."""
    axis.set_yticks([-number for number in range(len(lines))])
    axis.set_yticklabels([name or group for group, name in lines] if named else [])
    for (_, name), label in zip(lines, axis.get_yticklabels(), strict=False):
        if not name:
            label.set_fontweight("bold")


# Differences by what their interval says, and how they are drawn, in the order of the legend
KINDS: dict[str, dict[str, Any]] = {
    "interval above 0": {"color": ABOVE},
    "interval below 0": {"color": BELOW},
    "interval across 0": {"color": GREY},
    # It allows no conclusion about other seeds.
    "one seed": {"color": GREY, "markerfacecolor": "white"},
}


def _kinds(table: pd.DataFrame) -> np.ndarray:
    """The kind, a key of `KINDS`, of each difference; one of one seed has no p."""
    several_seeds = pd.Series(False, table.index)
    if "p" in table:
        several_seeds = table["p"].notna()
    return np.select(
        [~several_seeds, table["low"] > 0, table["high"] < 0],
        ["one seed", "interval above 0", "interval below 0"],
        "interval across 0",
    )


def _draw_gains(axis: Axes, part: pd.DataFrame, label: str, style: dict[str, Any]) -> None:
    """Draw the intervals of one kind at their heights y."""
    x = part["points"]
    spread = np.stack([x - part["low"], part["high"] - x])
    axis.errorbar(x, part["y"], xerr=spread, fmt="o", label=label, **style)


def _in_percent(tidy: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows of one metric in `tidy`, in percent; raises ValueError for an unknown metric.

    Intervals of few seeds may go below 0 or above 100%: they are clipped.
    """
    check_known("metric", [metric], tidy["metric"].unique())
    table = tidy[tidy["metric"] == metric].copy()
    for part in ("value", "low", "high"):
        table[part] = (100 * table[part]).clip(0, 100)
    return table


def _settings_of(style: RowStyle, label: str) -> dict[str, Any]:
    """Settings of matplotlib that the dots and the line of a row share."""
    settings: dict[str, Any] = {"color": style.colour, "label": label, "zorder": 2}
    if style.marker in PROMINENT:
        settings["markersize"] = 9
        settings["zorder"] = 3
    if style.marker == MEAN:
        settings["linewidth"] = 3.5
        settings["zorder"] = 1
    return settings


def _draw_line(
    axis: Axes, x: pd.Series, rows: pd.DataFrame, label: str, style: RowStyle, *, dashes: Any
) -> None:
    """Draw the values of `rows` over `x` as a line with about eight markers, and their band."""
    every = -(-len(rows) // 8)
    settings = {**_settings_of(style, label), "linestyle": dashes}
    axis.plot(x, rows["value"], marker=style.marker, markevery=every, **settings)
    if "low" in rows:
        low = rows["low"]
        high = rows["high"]
        axis.fill_between(x, low, high, color=style.colour, alpha=0.15, linewidth=0)


def _draw_dots(
    axis: Axes,
    x: pd.Series,
    rows: pd.DataFrame,
    label: str,
    style: RowStyle,
    *,
    dashes: Any = "none",
    **more: Any,
) -> None:
    """Draw the values of `rows` at `x` as markers with error bars, joined by a line of `dashes`.

    `more` are settings of matplotlib in place of the row's own.
    """
    spread = None
    if "low" in rows:
        below = rows["value"] - rows["low"]
        above = rows["high"] - rows["value"]
        spread = np.stack([below, above]).astype(float).clip(0)
    settings = {**_settings_of(style, label), **more}
    axis.errorbar(
        x,
        rows["value"],
        spread,
        marker=style.marker,
        # One point has no line, in the legend too.
        linestyle=dashes if len(rows) > 1 else "none",
        elinewidth=1.2,
        ecolor=(style.colour, 0.6),
        **settings,
    )


def _draw_hollow(axis: Axes, x: pd.Series, values: pd.Series, style: RowStyle) -> None:
    """Draw the paper's numbers as the row's marker, larger and hollow."""
    look: dict[str, Any] = {"color": style.colour, "markerfacecolor": "none", "markersize": 8}
    # Over the dots, which would hide them.
    axis.plot(x, values, style.marker, zorder=4, **look)
