"""The parts that all figures share: style, empty panels, legend, number formats and files.

Importing it changes no setting: the style applies while a figure is made or saved (`styled`).
"""

import functools
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from PIL import Image

from pumalib import paths

from .row_styles import GREY

Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")

# The width in inches of a figure that fills the page.
PAGE_WIDTH = 9.5
# The smallest letters in points: 9 pixels where GitHub shows such a figure 830 pixels wide.
SMALL = 7.5
# Any, because matplotlib's type of settings accepts literal names only.
STYLE: dict[Any, Any] = {
    **sns.axes_style("whitegrid"),
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 10,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    # Long enough for dashes and dots.
    "legend.handlelength": 3,
    "lines.markersize": 5,
    # Names are no formulas: a dataset may be called "$x$".
    "text.parse_math": False,
}


def use_style() -> None:
    """Use the style of these figures from now on, and show pandas' tables whole.

    For the first cell of a notebook, which displays a figure after the function that made it ended.
    """
    plt.rcParams.update(STYLE)
    pd.set_option("display.max_colwidth", None, "display.max_rows", 200)


@contextmanager
def _in_style() -> Iterator[None]:
    """Apply `STYLE` within the block, and restore its settings' previous values afterwards.

    Unlike `plt.rc_context` it leaves all other settings: pyplot loads its backend with the first
    figure, and what the backend sets, such as interactive mode in a notebook, must stay.
    """
    before = {name: plt.rcParams[name] for name in STYLE}
    plt.rcParams.update(STYLE)
    try:
        yield
    finally:
        plt.rcParams.update(before)


def styled(function: Callable[Inputs, Output]) -> Callable[Inputs, Output]:
    """Decorate a function to run in the style, and to restore the settings afterwards."""

    @functools.wraps(function)
    def inside(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Output:
        with _in_style():
            return function(*args, **kwargs)

    return inside


# A date or random ids would give the same figure different bytes.
VECTOR: dict[str, dict[str, Any]] = {
    ".svg": {"format": "svg", "metadata": {"Date": None}},
    ".pdf": {"format": "pdf", "metadata": {"CreationDate": None}},
}
# SVG has letters as outlines, so that every viewer shows them alike; PDF embeds its fonts.
VECTOR_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "pumalib",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}


@styled
def save(figure: Figure, path: str | Path) -> Path:
    """Write `figure` as a PNG of 256 colours, or for print as SVG or PDF, by the ending of `path`.

    Returns the path.  The same figure always gives the same bytes.  Raises OSError, with the
    remedy, if the file cannot be written.
    """
    path = Path(path)
    with paths.written_whole(path) as temporary:
        if path.suffix in VECTOR:
            with plt.rc_context(VECTOR_STYLE):
                figure.savefig(temporary, **VECTOR[path.suffix])
        else:
            _save_png(figure, temporary)
    return path


def _save_png(figure: Figure, path: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    small = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(path, "PNG", optimize=True)


def empty_panels(
    rows: int, columns: int, width: float, height: float, extra: float = 0
) -> tuple[Figure, np.ndarray]:
    """A figure and its axes (rows, columns).

    In inches: `width` of the figure, `height` of a row of panels, and `extra` for title and legend.
    """
    figsize = (width, rows * height + extra)
    figure, axes = plt.subplots(rows, columns, figsize=figsize, squeeze=False)
    # A notebook would show a figure that pyplot keeps a second time.
    plt.close(figure)
    return figure, axes


def finish(
    figure: Figure,
    axes: np.ndarray,
    title: str = "",
    *,
    named: bool = True,
    fewest: int = 2,
    **legend: Any,
) -> Figure:
    """Give `figure` its title and one legend for all panels, and hide panels without data.

    Less than `fewest` names get no legend.  `named` is false if labels in the panels replace it;
    `legend` has further settings for it.
    """
    handles_of: dict[str, Any] = {}
    for axis in axes.flat:
        if not axis.has_data():
            axis.axis("off")
        handles, labels = axis.get_legend_handles_labels()
        handles_of.update(zip(labels, handles, strict=True))

    if named and len(handles_of) >= fewest:
        longest = max(map(len, handles_of))
        # About 15 characters fit into an inch, and a legend handle is as wide as eight.
        room = round(15 * figure.get_figwidth())
        columns = max(1, min(len(handles_of), 6, room // (8 + longest)))
        # Matplotlib fills column by column, and lines are read from left to right.
        names = list(handles_of)
        names = [name for column in range(columns) for name in names[column::columns]]
        handles = [handles_of[name] for name in names]
        figure.legend(handles, names, loc="outside lower center", ncols=columns, **legend)
    figure.suptitle(title)
    return figure


class _BetweenPowers(LogFormatter):
    """Labels 3, 30, ... where an axis has few powers of ten, and more within one power."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        assert self.axis is not None
        low, high = self.axis.get_view_interval()
        is_short = high < 10 * low
        is_three = f"{x:e}".startswith("3.0") and high < 10**2.5 * low
        has_room = super().__call__(x, pos) if is_short else is_three
        return _plain(x) if has_room else ""


def _plain(x: float) -> str:
    """A number as text: 1,000 or 0.25, but 3e-5 below 0.01."""
    if 0 < abs(x) < 0.01:
        return f"{x:.0e}".replace("e-0", "e-")
    return f"{x:,g}"


def write_plain_numbers(side: Axis) -> None:
    """Label a logarithmic axis with plain numbers in place of powers of ten, and mark its ticks."""
    side.set_major_formatter(lambda x, _: _plain(x))
    side.set_minor_formatter(_BetweenPowers())
    # All marks are as long: labels would stand at two distances from the axis else.
    where = side.get_label_position()
    marks: dict[str, Any] = {"length": 3, "pad": 3, "color": GREY, where: True}
    side.set_tick_params(which="both", **marks)


def one_scale(axes: Iterable[Axes], which: str) -> None:
    """Give panels one scale that covers all of theirs; `which` is "x" or "y"."""
    axes = list(axes)
    ranges = [getattr(axis, f"get_{which}lim")() for axis in axes]
    low = min([low for low, _ in ranges], default=0.0)
    high = max([high for _, high in ranges], default=1.0)
    for axis in axes:
        axis.set(**{f"{which}lim": (low, high)})
