"""Figures of the paper's claims and our measurements: a line per comparison, or per claim."""

import textwrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..text import with_interval
from .row_styles import BLACK, BLUE, FALSE, GREY, OURS, TRUE
from .style import PAGE_WIDTH, empty_panels, finish, styled

# Letters are still read where a phone shows a figure of this width.
PHONE_WIDTH = 4.6


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


# ---- verdicts on claims

# The colour of each verdict.
VERDICTS = {"contradicted": FALSE, "supported": TRUE, "undecided": GREY}
# Characters of a claim in a line.
LETTERS = 66
# Distances in points from the panel to the two columns of text at its right.
NUMBERS = 6
IN_PRINT = 104


@styled
def verdicts(card: pd.DataFrame) -> Figure:
    """The judged claims, each with the difference that decides it and its interval.

    `card` is the table of `study.scorecard`, with the columns section, claim, print, here, pairs,
    and value, low, high and in_points of the deciding difference.  Contradicted claims come first,
    then supported and undecided ones, and within these the largest difference first.  If the paper
    prints the rows of a claim, the verdict by its own tables is written at the right.
    """
    card = card.assign(claim=_whole_claims(card["claim"]))
    judged = _by_weight(card[card["pairs"] > 0])
    sentences = [_sentence(one) for one in judged.itertuples()]
    lines = [text.count("\n") + 1 for text in sentences]
    heights = [0.14 + 0.155 * count for count in lines]
    figure, axes = empty_panels(1, 2, PAGE_WIDTH, 1.2 + sum(heights))
    axes[0, 0].get_gridspec().set_width_ratios([1.15, 1])
    left, axis = axes[0]

    tops = -np.cumsum([0, *heights])
    middles = tops[:-1] - np.array(heights) / 2
    for y, text in zip(middles, sentences, strict=True):
        left.text(0, y, text, va="center", fontsize=8, linespacing=1.2)
    for verdict, colour in VERDICTS.items():
        is_so = (judged["here"] == verdict).to_numpy()
        _draw_effects(axis, judged[is_so], middles[is_so], colour, verdict)
    _write_effects(axis, judged, middles)
    axis.set(yticks=[])
    if judged["in_points"].any():
        _scale_in_points(axis, judged.loc[judged["in_points"], "value"])
    else:
        axis.set(xticks=[], xlabel="decided by measures, in units of their own: see the numbers")
    for one in (left, axis):
        one.set_ylim(tops[-1], 0)
        one.hlines(tops[1:-1], 0, 1, transform=one.get_yaxis_transform(), color="#dddddd", lw=0.6)
    left.set_xlim(0, 1)
    left.axis("off")
    finish(figure, axes[:, 1:])
    others = len(card) - len(judged)
    claims = "claim was" if len(judged) == 1 else "claims were"
    figure.suptitle(f"{len(judged)} {claims} judged; {others} more cannot be by these runs")
    return figure


def _scale_in_points(axis: Axes, values: pd.Series) -> None:
    """Give a panel a line at 0 and a symmetric scale, wide enough for all values."""
    axis.axvline(0, color=BLACK, linewidth=1, zorder=1)
    reach = 1.5 * max(1.0, values.abs().max())
    axis.set(xlim=(-reach, reach), xlabel="points of R@1 in the comparison that decides")


def _whole_claims(claims_of_card: pd.Series) -> list[str]:
    """Claims in full: one that continues another ("... and ...") is appended to it."""
    whole: list[str] = []
    for claim in claims_of_card:
        if claim.startswith("... "):
            claim = f"{whole[-1]} {claim}"
        whole.append(claim)
    return whole


def _by_weight(card: pd.DataFrame) -> pd.DataFrame:
    """The claims in drawing order: by verdict, then by the size of their difference."""
    order = card["here"].map(list(VERDICTS).index)
    size = -card["value"].abs().where(card["in_points"], 0)
    return card.assign(order=order, size=size).sort_values(["order", "size"], kind="stable")


def _sentence(one: Any) -> str:
    return textwrap.fill(f"{one.claim}  ({one.section})", LETTERS)


def _draw_effects(axis: Axes, part: pd.DataFrame, y: np.ndarray, colour: str, verdict: str) -> None:
    """Draw the deciding differences in accuracy; other measures are only written as numbers."""
    if part.empty:
        return
    drawn = part["in_points"].to_numpy(bool)
    value = part.loc[drawn, "value"]
    spread = np.stack([value - part.loc[drawn, "low"], part.loc[drawn, "high"] - value])
    axis.errorbar(value, y[drawn], xerr=spread, fmt="o", color=colour, label=verdict)


def _write_effects(axis: Axes, card: pd.DataFrame, middles: np.ndarray) -> None:
    """Write each claim's numbers at the right, and the verdict by the paper's tables if any."""
    is_printed = (card["print"] != "not printed").any()
    for y, one in zip(middles, card.itertuples(), strict=True):
        digits = 1 if one.in_points else 2
        numbers = with_interval(one.value, one.low, one.high, sign="+", digits=digits)
        beside: dict[str, Any] = {"xycoords": axis.get_yaxis_transform(), "va": "center"}
        _write_at_right(axis, numbers, y, NUMBERS, color=VERDICTS[one.here], **beside)
        if is_printed:
            _write_at_right(axis, one.print, y, IN_PRINT, **beside)
    above: dict[str, Any] = {"xycoords": "axes fraction", "va": "bottom", "weight": "bold"}
    _write_at_right(axis, "decides", 1, NUMBERS, **above)
    if is_printed:
        _write_at_right(axis, "in print", 1, IN_PRINT, **above)


def _write_at_right(axis: Axes, text: str, y: float, away: float, **settings: Any) -> None:
    """Write a text at the right of a panel, `away` points from it."""
    axis.annotate(text, (1, y), (away, 0), textcoords="offset points", fontsize=8, **settings)
