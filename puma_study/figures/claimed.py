"""Figures of the paper's claims and our measurements: a line per comparison, or per claim."""

import textwrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .row_styles import BLACK, BLUE, DARK_GREY, FALSE, GREY, INDIGO, OURS, TRUE
from .style import PAGE_WIDTH, SMALL, empty_panels, finish, styled

# Letters of 8 points are 9 pixels high where a phone shows a figure of this width, in inches.
PHONE_WIDTH = 4.4


@styled
def claimed_and_measured(table: pd.DataFrame, ours: str, unit: str) -> Figure:
    """Differences of `ours` minus its rivals: measured, with 95 % intervals, and as printed.

    `table` has the columns panel, rival, points, low, high and paper, which may be NaN; rivals are
    drawn in their order from the top.  `unit` labels the axes.  Panels stand one above the other,
    so that a phone shows them at a size that can be read.
    """
    rivals = list(dict.fromkeys(table["rival"]))
    titles = list(dict.fromkeys(table["panel"]))
    figure, axes = empty_panels(len(titles), 1, PHONE_WIDTH, 0.8 + 0.18 * len(rivals))
    for axis, title in zip(axes[:, 0], titles, strict=True):
        own = table[table["panel"] == title].set_index("rival").loc[rivals]
        _draw_differences(axis, own)
        axis.set_title(title, pad=18)
        _name_sides(axis, ours)
    axes[-1, 0].set(xlabel=unit)
    return finish(figure, axes)


def _draw_differences(axis: Axes, table: pd.DataFrame) -> None:
    """Draw a line per rival, the index of `table`: measured and printed difference."""
    places = -np.arange(len(table))
    axis.hlines(places, table["points"], table["paper"], color=GREY, linewidth=0.8, zorder=1)
    spread = [table["points"] - table["low"], table["high"] - table["points"]]
    axis.errorbar(
        table["points"], places, xerr=spread, fmt="o", color=BLUE, label="measured here", zorder=3
    )
    axis.plot(
        table["paper"],
        places,
        "D",
        color=BLACK,
        markerfacecolor="white",
        label="printed in the paper",
        zorder=2,
    )
    axis.axvline(0, color=BLACK, linewidth=1, zorder=1)
    axis.set_yticks(places, table.index)
    axis.set(ylim=(places[-1] - 0.6, 0.6))
    axis.grid(axis="y", visible=False)


def _name_sides(axis: Axes, ours: str) -> None:
    """Write above the panel who is higher on which side of zero."""
    sides = [
        ("← rival", -4, "right", GREY),
        (f"{ours} higher →", 4, "left", OURS.colour),
    ]
    for said, shift, side, colour in sides:
        axis.annotate(
            said,
            (0, 1),
            (shift, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            horizontalalignment=side,
            verticalalignment="bottom",
            color=colour,
        )


# ---- readings of claims

# The colour of each reading; `study.readings` says what they mean.
READINGS = {
    "larger than printed": TRUE,
    "as printed": TRUE,
    "as claimed": TRUE,
    "smaller than printed": INDIGO,
    "too uncertain to say": DARK_GREY,
    "no clear difference, printed effect excluded": BLACK,
    "opposite": FALSE,
}
# Characters in a line of a claim, of its reason, and of a reading.
LETTERS = 62
SMALL_LETTERS = 66
READING_LETTERS = 24
# Inches: the height of a line of a claim and of its note, and the room between the two groups.
LINE_HEIGHT = 0.155
NOTE_HEIGHT = 0.145
BETWEEN = 0.85
# Distances in points from the panel to the two columns of text at its right.
NUMBERS = 6
READING = 120


@styled
def readings(table: pd.DataFrame) -> Figure:
    """The claims that were compared, each with the difference that decides it and its reading.

    `table` is that of `study.readings`.  Claims decided by differences of R@1 come first, those by
    measures below a heading and without a mark; within both in the order of `READINGS`, and within
    these the largest difference first.  A white diamond is what the paper prints, a bar what a
    claim asks of a difference either way (`apart`), whose size is drawn.  Below a claim that is not
    decided stands what would decide it, below one that was not wholly judged the reason.
    """
    table = table.assign(claim=_whole_claims(table["claim"]))
    judged = _by_reading(_sized(table[table["reading"].isin(list(READINGS))]))
    is_drawn = judged["in_points"].to_numpy(bool)
    sentences = [_sentence(one) for one in judged.itertuples()]
    notes = [_note(one) for one in judged.itertuples()]
    heights = []
    for sentence, note, said in zip(sentences, notes, judged["reading"], strict=True):
        at_left = LINE_HEIGHT * _lines(sentence) + NOTE_HEIGHT * _lines(note)
        at_right = LINE_HEIGHT * _lines(_wrapped(said))
        heights.append(0.14 + max(at_left, at_right))
    # Room for the scale of the claims above and for the heading of those below.
    first = int(is_drawn.sum())
    has_both = 0 < first < len(judged)
    if has_both:
        heights.insert(first, BETWEEN)

    figure, axes = empty_panels(1, 2, PAGE_WIDTH, 1.0 + sum(heights))
    axes[0, 0].get_gridspec().set_width_ratios([1.45, 1])
    left, axis = axes[0]
    edges = -np.cumsum([0, *heights])
    tops = np.delete(edges[:-1], first) if has_both else edges[:-1]
    bottoms = np.delete(edges[1:], first) if has_both else edges[1:]
    middles = (tops + bottoms) / 2
    for top, sentence, note in zip(tops, sentences, notes, strict=True):
        left.text(0, top - 0.07, sentence, va="top", fontsize=8, linespacing=1.2)
        below = top - 0.07 - LINE_HEIGHT * _lines(sentence)
        left.text(0, below, note, va="top", fontsize=SMALL, linespacing=1.2, color=DARK_GREY)

    for said, colour in READINGS.items():
        is_so = (judged["reading"] == said).to_numpy()
        _draw_effects(axis, judged[is_so], middles[is_so], colour)
    _draw_print(axis, judged, middles)
    _draw_asked(axis, judged, middles)
    _write_readings(axis, judged, middles)
    axis.set(yticks=[])
    axis.axis("off")
    if first:
        of_points = judged[is_drawn]
        _scale_in_points(axis, of_points[["low", "high", "paper"]].stack(), bottoms[first - 1])
    if has_both:
        heading = "Decided by measures, in units of their own"
        left.text(0, tops[first] + 0.06, heading, va="bottom", fontsize=9, weight="bold")
    for one, ends in ((left, bottoms[:-1]), (axis, bottoms[: max(0, first - 1)])):
        one.set_ylim(edges[-1], 0)
        one.hlines(ends, 0, 1, transform=one.get_yaxis_transform(), color="#dddddd", lw=0.6)
    left.set_xlim(0, 1)
    left.axis("off")
    figure.suptitle(_title(table, judged))
    return figure


def _title(table: pd.DataFrame, judged: pd.DataFrame) -> str:
    others = len(table) - len(judged)
    title = f"The comparison that decides each of {len(judged)} claims, with its 95% interval"
    if others:
        title += f"; of {len(table)}, {others} were not run enough"
    if judged["paper"].notna().any():
        title += "\nwhite diamonds: what the paper prints"
    if judged["apart"].notna().any():
        title += (
            "\nwhere either way counts: the size of the difference, and (bar) the size asked for"
        )
    return title


def _sized(table: pd.DataFrame) -> pd.DataFrame:
    """`table` with the sizes of differences of which the claim asks a size, `apart`, either way."""
    if "apart" not in table:
        table = table.assign(apart=np.nan)
    is_turned = table["apart"].notna() & (table["value"] < 0)
    turned = -table[["value", "high", "low"]].set_axis(["value", "low", "high"], axis=1)
    numbers = table[["value", "low", "high"]].mask(is_turned, turned)
    return table.assign(**{name: numbers[name] for name in numbers})


def _scale_in_points(axis: Axes, values: pd.Series, bottom: float) -> None:
    """Give the claims down to height `bottom` a line at 0 and a scale, wide enough for all values.

    The scale is drawn below these claims, because the panel goes on.
    """
    reach = 1.1 * max(1.0, values.abs().max())
    axis.set(xlim=(-reach, reach))
    axis.plot([0, 0], [0, bottom], color=BLACK, linewidth=1, zorder=1)
    axis.plot([-reach, reach], [bottom, bottom], color=GREY, linewidth=0.8, zorder=1)
    for tick in MaxNLocator(5).tick_values(-reach, reach):
        if abs(tick) < reach:
            axis.plot([tick, tick], [0, bottom], color="#dddddd", linewidth=0.6, zorder=0)
            axis.text(tick, bottom - 0.05, f"{tick:g}", va="top", ha="center", fontsize=8)
    label = "points of R@1 in the comparison that decides"
    axis.text(0, bottom - 0.22, label, va="top", ha="center", fontsize=8)


def _whole_claims(claims_of_card: pd.Series) -> list[str]:
    """Claims in full: one that continues another ("... and ...") is appended to it."""
    whole: list[str] = []
    for claim in claims_of_card:
        if claim.startswith("... "):
            claim = f"{whole[-1]} {claim}"
        whole.append(claim)
    return whole


def _by_reading(table: pd.DataFrame) -> pd.DataFrame:
    """The claims in drawing order: by reading, then by the size of their difference."""
    is_measure = ~table["in_points"].astype(bool)
    order = table["reading"].map(list(READINGS).index)
    size = -table["value"].abs().mask(is_measure, 0)
    in_order = table.assign(is_measure=is_measure, order=order, size=size)
    return in_order.sort_values(["is_measure", "order", "size"], kind="stable")


def _sentence(one: Any) -> str:
    # "l. 53", the line of a digest, stays together.
    section = one.section.replace("l. ", "l.\N{NO-BREAK SPACE}")
    return textwrap.fill(f"{one.claim}  ({section})", LETTERS)


def _note(one: Any) -> str:
    """The verdict of a claim, what would decide it, and why it was not wholly judged."""
    parts = [f"{one.here.capitalize()}."]
    if one.here == "undecided":
        parts[0] = f"Undecided; it would take {one.needs}."
    if one.reason:
        parts.append(f"{one.reason[0].upper()}{one.reason[1:].rstrip('.')}.")
    return textwrap.fill(" ".join(parts), SMALL_LETTERS)


def _wrapped(said: str) -> str:
    return textwrap.fill(said, READING_LETTERS)


def _lines(text: str) -> int:
    return text.count("\n") + 1


def _draw_effects(axis: Axes, part: pd.DataFrame, y: np.ndarray, colour: str) -> None:
    """Draw the deciding differences in accuracy; other measures are only written as numbers."""
    drawn = part["in_points"].to_numpy(bool)
    value = part.loc[drawn, "value"]
    if value.empty:
        return
    spread = np.stack([value - part.loc[drawn, "low"], part.loc[drawn, "high"] - value])
    axis.errorbar(value, y[drawn], xerr=spread, fmt="o", color=colour, zorder=3)


def _draw_print(axis: Axes, table: pd.DataFrame, y: np.ndarray) -> None:
    """Draw what the paper prints, where it does."""
    is_printed = table["paper"].notna().to_numpy()
    if is_printed.any():
        marks: dict[str, Any] = {"color": BLACK, "markerfacecolor": "white", "zorder": 2}
        axis.plot(
            table["paper"][is_printed], y[is_printed], "D", label="printed in the paper", **marks
        )


def _draw_asked(axis: Axes, table: pd.DataFrame, y: np.ndarray) -> None:
    """Draw the size that a claim asks of a difference, where it does."""
    is_asked = (table["apart"].notna() & table["in_points"].astype(bool)).to_numpy()
    marks: dict[str, Any] = {"color": BLACK, "markersize": 9, "zorder": 2}
    axis.plot(table["apart"][is_asked], y[is_asked], "|", label="asked for", **marks)


def _write_readings(axis: Axes, table: pd.DataFrame, middles: np.ndarray) -> None:
    """Write each claim's numbers and its reading at the right."""
    for y, one in zip(middles, table.itertuples(), strict=True):
        beside: dict[str, Any] = {"xycoords": axis.get_yaxis_transform(), "va": "center"}
        colour = READINGS[one.reading]
        _write_at_right(axis, one.ours, y, NUMBERS, color=colour, **beside)
        _write_at_right(axis, _wrapped(one.reading), y, READING, color=colour, **beside)
    above: dict[str, Any] = {"xycoords": "axes fraction", "va": "bottom", "weight": "bold"}
    _write_at_right(axis, "ours", 1, NUMBERS, **above)
    _write_at_right(axis, "reading", 1, READING, **above)


def _write_at_right(axis: Axes, text: str, y: float, away: float, **settings: Any) -> None:
    """Write a text at the right of a panel, `away` points from it."""
    axis.annotate(text, (1, y), (away, 0), textcoords="offset points", fontsize=8, **settings)
