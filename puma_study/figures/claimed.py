"""Figures of the paper's claims and our measurements: a line per comparison, or per claim."""

import re
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pumalib.evaluation import OVERALL

from ..text import with_interval
from .row_styles import (
    BLACK,
    BLUE,
    DARK_GREY,
    DOTTED,
    FALSE,
    GREY,
    INDIGO,
    OURS,
    TRUE,
    capital,
    shown,
)
from .style import PAGE_WIDTH, SMALL, empty_panels, finish, styled

# Letters of 8 points are 9 pixels high where a phone shows a figure of this width, in inches.
PHONE_WIDTH = 4.4
# Of lines between claims.
PALE = "#dddddd"


@styled
def claimed_and_measured(table: pd.DataFrame, ours: str, unit: str) -> Figure:
    """Differences of `ours` minus its rivals: measured, with 95 % intervals, and as printed.

    `table` has the columns panel, rival, points, low, high and paper, which may be NaN; rivals are
    drawn in their order from the top.  `unit` labels the axes.  Panels stand one above the other,
    so that a phone shows them at a size that can be read.
    """
    rivals = list(dict.fromkeys(table["rival"]))
    titles = list(dict.fromkeys(table["panel"]))
    figure, axes = empty_panels(len(titles), 1, PHONE_WIDTH, 1.05 + 0.18 * len(rivals))
    for axis, title in zip(axes[:, 0], titles, strict=True):
        own = table[table["panel"] == title].set_index("rival").loc[rivals]
        _draw_differences(axis, own)
        axis.set_title(title, pad=18)
        axis.set(xlabel=unit)
        _name_sides(axis, ours)
    return finish(figure, axes)


def _draw_differences(axis: Axes, table: pd.DataFrame) -> None:
    """Draw a line per rival, the index of `table`: measured and printed difference."""
    places = -np.arange(len(table))
    # Dotted and light, to be no part of an interval.
    joins: dict[str, Any] = {"color": GREY, "linestyle": DOTTED, "linewidth": 0.8}
    axis.hlines(places, table["points"], table["paper"], zorder=1, **joins)
    spread = [table["points"] - table["low"], table["high"] - table["points"]]
    axis.errorbar(
        table["points"],
        places,
        xerr=spread,
        fmt="o",
        color=BLUE,
        label="measured here, with 95% interval",
        zorder=3,
    )
    axis.plot(
        table["paper"],
        places,
        "D",
        color=BLACK,
        markerfacecolor="none",
        label="printed in the paper",
        zorder=4,
    )
    axis.axvline(0, color=BLACK, linewidth=1, zorder=1)
    axis.set_yticks(places, table.index)
    axis.set(ylim=(places[-1] - 0.6, 0.6))
    axis.grid(axis="y", visible=False)


def _name_sides(axis: Axes, ours: str) -> None:
    """Write above the panel who is higher on which side of zero."""
    sides = [
        ("← rival higher", -4, "right", DARK_GREY),
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
# What a deciding number is of, by its column; of any other column it is R@1.
QUANTITIES = {
    "harmonic_map": "harmonic MAP@R",
    "harmonic_rp": "harmonic R-precision",
    "violated": "% of the triplets",
    "picked": "% of the triplets",
    "count": "triplets in a batch",
    "exponent, images per class": "difference of exponents",
    "exponent, classes": "difference of exponents",
    "share of a training step": "% of a training step",
}
# A bound that a claim sets, in the place of a row.
NUMBER = re.compile(r"\d+(\.\d+)?")
# Measures of which the logarithms are compared, so that their difference is a ratio.
RATIOS = {
    "log ms": "times as long",
    "log ms, images per class": "times as long",
    "log images": "times as many images",
}
# Characters in a line of a claim, of its reason, and of a reading; measures leave the panel free.
LETTERS = 62
SMALL_LETTERS = 66
WIDE_LETTERS = 102
READING_LETTERS = 24
# Inches: the height of a line of a claim and of its note, and the room between the two groups.
LINE_HEIGHT = 0.155
NOTE_HEIGHT = 0.145
BETWEEN = 0.85
# Distances in points from the panel to the two columns of text at its right, and above it.
NUMBERS = 6
READING = 126
SIDES = 15


@styled
def readings(table: pd.DataFrame) -> Figure:
    """The claims that were compared, each with the difference that decides it and its reading.

    `table` is that of `study.readings`.  Claims decided by differences of accuracy come first,
    those by measures below a heading and without a mark; within both in the order of `READINGS`,
    and within these the largest difference first.  A hollow diamond is what the paper prints, a bar
    what a claim asks of a difference either way (`apart`), whose size is drawn and written.  Below
    a claim that is not decided stands what would decide it, below one that was not wholly judged
    the reason.
    """
    table = table.assign(claim=_whole_claims(table["claim"]))
    judged = _by_reading(_sized(table[table["reading"].isin(list(READINGS))]))
    is_drawn = judged["in_points"].to_numpy(bool)
    sentences = [_sentence(one) for one in judged.itertuples()]
    notes = [_note(one) for one in judged.itertuples()]
    quantities = [_quantity(one) for one in judged.itertuples()]
    heights = []
    for sentence, note, quantity in zip(sentences, notes, quantities, strict=True):
        at_left = LINE_HEIGHT * _lines(sentence) + NOTE_HEIGHT * _lines(note)
        at_right = LINE_HEIGHT + NOTE_HEIGHT * _lines(quantity)
        heights.append(0.14 + max(at_left, at_right))
    # Room for the scale of the claims above and for the heading of those below.
    first = int(is_drawn.sum())
    has_both = 0 < first < len(judged)
    if has_both:
        heights.insert(first, BETWEEN)

    figure, axes = empty_panels(1, 2, PAGE_WIDTH, 1.2 + sum(heights))
    axes[0, 0].get_gridspec().set_width_ratios([1.45, 1])
    left, axis = axes[0]
    edges = -np.cumsum([0, *heights])
    tops = np.delete(edges[:-1], first) if has_both else edges[:-1]
    bottoms = np.delete(edges[1:], first) if has_both else edges[1:]
    middles = (tops + bottoms) / 2
    for top, sentence, note in zip(tops, sentences, notes, strict=True):
        _write_at_left(left, top - 0.07, sentence, fontsize=8)
        below = top - 0.07 - LINE_HEIGHT * _lines(sentence)
        _write_at_left(left, below, note, fontsize=SMALL, color=DARK_GREY)

    for said, colour in READINGS.items():
        is_so = (judged["reading"] == said).to_numpy()
        _draw_effects(axis, judged[is_so], middles[is_so], colour)
    _draw_print(axis, judged, middles)
    _draw_asked(axis, judged, middles)
    _write_readings(axis, judged, quantities, middles)
    axis.set(yticks=[])
    axis.axis("off")
    if first:
        of_points = judged[is_drawn]
        _scale_in_points(axis, of_points[["low", "high", "paper"]].stack(), bottoms[first - 1])
    if has_both:
        heading = "Decided by measures other than accuracy: by how much, for the claim"
        left.text(0, tops[first] + 0.06, heading, va="bottom", fontsize=9, weight="bold")
    for one in (left, axis):
        one.set_ylim(edges[-1], 0)
        one.hlines(bottoms[:-1], 0, 1, transform=one.get_yaxis_transform(), color=PALE, lw=0.6)
    left.set_xlim(0, 1)
    left.axis("off")
    figure.suptitle(_title(table, judged))
    return figure


def _title(table: pd.DataFrame, judged: pd.DataFrame) -> str:
    others = len(table) - len(judged)
    title = f"The comparison that decides each of {len(judged)} claims, with its 95% interval"
    if others:
        title += f"; of {len(table)}, {others} were not run enough"
    title += (
        "\nreading: by this interval alone; verdict: by all its comparisons, "
        f"corrected for {len(table)} claims"
    )
    if judged["paper"].notna().any():
        title += "\nhollow diamonds: what the paper prints"
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

    The scale is drawn above and below these claims, because the panel goes on.
    """
    reach = 1.1 * max(1.0, values.abs().max())
    axis.set(xlim=(-reach, reach))
    axis.plot([0, 0], [0, bottom], color=BLACK, linewidth=1, zorder=1)
    axis.plot([-reach, reach], [bottom, bottom], color=GREY, linewidth=0.8, zorder=1)
    for tick in MaxNLocator(5).tick_values(-reach, reach):
        if abs(tick) < reach:
            axis.plot([tick, tick], [0, bottom], color=PALE, linewidth=0.6, zorder=0)
            axis.text(tick, bottom - 0.05, f"{tick:g}", va="top", ha="center", fontsize=8)
            axis.text(tick, 0.04, f"{tick:g}", va="bottom", ha="center", fontsize=8)
    label = "points, in the comparison that decides"
    axis.text(0, bottom - 0.22, label, va="top", ha="center", fontsize=8)
    sides = [("← against the claim", -4, "right", FALSE), ("for it →", 4, "left", TRUE)]
    for said, shift, side, colour in sides:
        axis.annotate(
            said,
            (0, 1),
            xycoords=("data", "axes fraction"),
            xytext=(shift, SIDES),
            textcoords="offset points",
            ha=side,
            va="bottom",
            fontsize=8,
            color=colour,
        )


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


# ---- its words


def _sentence(one: Any) -> str:
    # "l. 53", the line of a digest, stays together.
    section = one.section.replace("l. ", "l.\N{NO-BREAK SPACE}")
    return textwrap.fill(f"{one.claim}  ({section})", LETTERS if one.in_points else WIDE_LETTERS)


def _note(one: Any) -> str:
    """The verdict of a claim, what would decide it, and why it was not wholly judged."""
    parts = [f"Verdict: {one.here}."]
    if one.here == "undecided":
        # Where data are missing they come first.
        rows, which, rest = one.needs.partition(", which ")
        if which:
            rows = _named(rows)
        parts[0] = f"Verdict: undecided; it would take {rows}{which}{rest}."
    if one.print == "fails":
        parts.append("The paper's own numbers fail it.")
    if one.reason:
        for part in one.reason.split("; "):
            parts.append(f"{capital(_with_names(part)).rstrip('.')}.")
    return textwrap.fill(" ".join(parts), SMALL_LETTERS if one.in_points else WIDE_LETTERS + 6)


# What a reason says of rows, or of datasets, that follow it; and what it says of a row before it.
OF_ROWS = ("not run here", "below the frozen backbone", "not in this benchmark")
COLLAPSED = " collapsed"
# Models that are named by their loss alone.
MODELS = {
    "specific": "a model per dataset",
    "universal": "full fine-tuning",
    "full,": "full fine-tuning",
}


def _with_names(part: str) -> str:
    """A part of a reason with the names of the figures in place of those of rows."""
    begin, colon, rest = part.partition(": ")
    if begin in OF_ROWS:
        return f"{begin}: {_named(rest)}"
    if begin.endswith(COLLAPSED):
        return f"{_named(begin.removesuffix(COLLAPSED))}{COLLAPSED}{colon}{rest}"
    return part


def _named(rows: str) -> str:
    """The names of a list of rows, those of one kind of model together: "specific PA, VPT"."""
    found: dict[str, list[str]] = {}
    for model, row in re.findall(r"(?:(specific|universal|full,) )?([^,]+)(?:, |$)", rows):
        found.setdefault(model, []).append(_name_of(row))
    said = []
    for model, names in found.items():
        with_model = f"{MODELS[model]} with " if model else ""
        said.append(with_model + ", ".join(names))
    return "; ".join(said)


def _name_of(row: str) -> str:
    """The name of a row, with its setting or its number of images: "linear 8", "ms (base = 1)"."""
    all_losses = re.fullmatch(r"\* \((\d+ of \d+)\)", row)
    if all_losses:
        return f"{all_losses[1]} losses"
    shots = re.fullmatch(r"(PUMA|linear|full) (\d+)", row)
    if shots:
        return f"{shown(shots[1])} (images a class: {shots[2]})"
    name, bracket, setting = row.partition(" (")
    setting = setting.replace("neg_", "negative ").replace("_", " ")
    # The setting and its value stay together.
    setting = setting.replace(" = ", "\N{NO-BREAK SPACE}")
    return shown(name) + bracket + setting


def _numbers(one: Any) -> str:
    """A claim's number with its interval; of an interval without a width the number alone."""
    numbers = np.array([one.value, one.low, one.high], float)
    if one.in_points:
        return with_interval(*numbers, sign="+")
    if one.column in RATIOS:
        value, low, high = (f"{number:#.3g}" for number in np.exp(numbers))
    else:
        scale = 100 if _quantity(one).startswith("%") else 1
        value, low, high = (f"{number:+#.3g}" for number in scale * numbers)
    if low == high:
        return value
    return f"{value} [{low}, {high}]"


def quantity_of(column: str) -> str:
    """What a claim's number is of, by its column: "harmonic R@1", "R@1, cars", "harmonic MAP@R"."""
    if column in QUANTITIES:
        return QUANTITIES[column]
    if column in RATIOS:
        return RATIOS[column]
    # "cars (its subset cars_196)": what follows a name says how the claim was made to fit here.
    of = column.split(" (")[0].replace(" - ", " minus ")
    return f"{of} R@1" if of in OVERALL else f"R@1, {shown(of)}"


def _quantity(one: Any) -> str:
    """What the number of a claim is of, and in a second line what the paper prints."""
    quantity = quantity_of(one.column)
    row, _, rival = one.pair.partition(" over ")
    if one.column.startswith("exponent") and NUMBER.fullmatch(row):
        quantity = f"{row} minus the exponent"
    elif one.column.startswith("exponent") and NUMBER.fullmatch(rival):
        quantity = f"the exponent minus {rival}"
    elif quantity.startswith("%") and NUMBER.fullmatch(rival):
        quantity = f"{quantity}, minus {100 * float(rival):g}"
    if np.isfinite(one.apart):
        quantity = f"size, {quantity}"
    if np.isfinite(one.paper):
        quantity += f"\nprinted: {one.paper:+.1f}"
    return quantity


def _wrapped(said: str) -> str:
    return textwrap.fill(said, READING_LETTERS)


def _lines(text: str) -> int:
    return text.count("\n") + 1


# ---- its marks


def _draw_effects(axis: Axes, part: pd.DataFrame, y: np.ndarray, colour: str) -> None:
    """Draw the deciding differences in accuracy; other measures are only written as numbers."""
    drawn = part["in_points"].to_numpy(bool)
    value = part.loc[drawn, "value"]
    if value.empty:
        return
    spread = np.stack([value - part.loc[drawn, "low"], part.loc[drawn, "high"] - value])
    axis.errorbar(value, y[drawn], xerr=spread, fmt="o", color=colour, markersize=4, zorder=3)


def _draw_print(axis: Axes, table: pd.DataFrame, y: np.ndarray) -> None:
    """Draw what the paper prints, where it does."""
    is_printed = table["paper"].notna().to_numpy()
    if is_printed.any():
        marks: dict[str, Any] = {"color": BLACK, "markerfacecolor": "none", "zorder": 4}
        axis.plot(
            table["paper"][is_printed], y[is_printed], "D", label="printed in the paper", **marks
        )


def _draw_asked(axis: Axes, table: pd.DataFrame, y: np.ndarray) -> None:
    """Draw the size that a claim asks of a difference, where it does."""
    is_asked = (table["apart"].notna() & table["in_points"].astype(bool)).to_numpy()
    marks: dict[str, Any] = {"color": BLACK, "markersize": 9, "zorder": 2}
    axis.plot(table["apart"][is_asked], y[is_asked], "|", label="asked for", **marks)


def _write_at_left(axis: Axes, y: float, text: str, **settings: Any) -> None:
    """Write a text in the left column; that of a measure goes on over the panel beside it."""
    written = axis.text(0, y, text, va="top", linespacing=1.2, **settings)
    written.set_in_layout(False)


def _write_readings(
    axis: Axes, table: pd.DataFrame, quantities: Sequence[str], middles: np.ndarray
) -> None:
    """Write each claim's numbers, what they are of, and its reading at the right."""
    for y, one, quantity in zip(middles, table.itertuples(), quantities, strict=True):
        beside: dict[str, Any] = {"xycoords": axis.get_yaxis_transform()}
        colour = READINGS[one.reading]
        _write_at_right(axis, _numbers(one), y + 0.02, NUMBERS, color=colour, va="bottom", **beside)
        small: dict[str, Any] = {"fontsize": SMALL, "color": DARK_GREY, "va": "top"}
        _write_at_right(axis, quantity, y, NUMBERS, **small, **beside)
        said = _wrapped(one.reading)
        _write_at_right(axis, said, y, READING, color=colour, va="center", **beside)
    above: dict[str, Any] = {"xycoords": "axes fraction", "va": "bottom", "weight": "bold"}
    _write_at_right(axis, "ours", 1, NUMBERS, **above)
    _write_at_right(axis, "reading", 1, READING, **above)


def _write_at_right(
    axis: Axes, text: str, y: float, away: float, *, fontsize: float = 8, **settings: Any
) -> None:
    """Write a text at the right of a panel, `away` points from it."""
    place: dict[str, Any] = {"xytext": (away, 0), "textcoords": "offset points"}
    axis.annotate(text, (1, y), fontsize=fontsize, **place, **settings)
