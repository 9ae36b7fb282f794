"""What a paper claims beside what was measured: one panel, a line per comparison."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .looks import BLACK, BLUE, GREY
from .style import empty_panels, finish, styled

# Inches: of a figure that GitHub shows without making it smaller.
WIDTH = 7.5


@styled
def claimed_and_measured(table: pd.DataFrame, ours: str, unit: str) -> Figure:
    """Differences of `ours` and its rivals: measured, with 95 % intervals, and as claimed.

    `table` has the columns rival, points, low, high and paper, which may be NaN; the first line
    stands on top.  `unit` is what is counted, for the axis.
    """
    table = table.reset_index(drop=True)
    figure, axes = empty_panels(1, 1, WIDTH, 1.3 + 0.27 * len(table))
    axis = axes[0, 0]
    places = -table.index.to_numpy()

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
    axis.set_yticks(places, table["rival"])
    axis.set(xlabel=unit, ylim=(places[-1] - 0.6, 0.6))
    axis.grid(axis="y", visible=False)
    _name_sides(axis, ours)
    return finish(figure, axes)


def _name_sides(axis: Axes, ours: str) -> None:
    """Who is higher on which side of zero, above the panel."""
    sides = [("← rival higher", -8, "right"), (f"{ours} higher →", 8, "left")]
    for said, shift, side in sides:
        axis.annotate(
            said,
            (0, 1),
            (shift, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            horizontalalignment=side,
            verticalalignment="bottom",
            color=GREY,
        )
