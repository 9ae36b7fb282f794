"""What all figures share: the style, empty panels, the legend and the file.

Importing it changes nothing: the style holds while a figure is made or saved (`styled`).
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

# Inches: of a figure that fills the page.
PAGE_WIDTH = 9.5
# Any: the type of matplotlib's settings takes only names that it can read in the code.
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
    "lines.markersize": 5,
    # A dataset may be called "$x$": names are no formulas.
    "text.parse_math": False,
}


def use_style() -> None:
    """Draw in the style of these figures from here on, and show pandas' tables whole.

    For the first cell of a notebook: it shows a figure after the function that made it has ended.
    """
    plt.rcParams.update(STYLE)
    pd.set_option("display.max_colwidth", None, "display.max_rows", 200)


@contextmanager
def _in_style() -> Iterator[None]:
    """`STYLE` inside, and what its settings were before outside.

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
    """`function`, run in the style; the settings are afterwards what they were before."""

    @functools.wraps(function)
    def inside(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Output:
        with _in_style():
            return function(*args, **kwargs)

    return inside


# With a date, or with names drawn by chance, the same figure would give other bytes.
VECTOR: dict[str, dict[str, Any]] = {
    ".svg": {"format": "svg", "metadata": {"Date": None}},
    ".pdf": {"format": "pdf", "metadata": {"CreationDate": None}},
}
# SVG with letters as outlines, so that it looks alike wherever it is shown; PDF with its fonts.
VECTOR_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "pumalib",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}


@styled
def save(figure: Figure, path: str | Path) -> Path:
    """Write `figure` whole as a PNG of 256 colours, with an SVG and a PDF beside it, for print.

    A path that ends in .svg or .pdf: that alone.  Returns the path.  The same figure gives the same
    bytes.  OSError: it cannot be written, with the remedy.
    """
    path = Path(path)
    if path.suffix in VECTOR:
        _save_vector(figure, path)
        return path
    with paths.written_whole(path) as temporary:
        _save_png(figure, temporary)
    for ending in VECTOR:
        _save_vector(figure, path.with_suffix(ending))
    return path


def _save_png(figure: Figure, path: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    small = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(path, "PNG", optimize=True)


def _save_vector(figure: Figure, path: Path) -> None:
    with paths.written_whole(path) as temporary, plt.rc_context(VECTOR_STYLE):
        figure.savefig(temporary, **VECTOR[path.suffix])


def empty_panels(
    rows: int, columns: int, width: float, height: float, extra: float = 0
) -> tuple[Figure, np.ndarray]:
    """A figure and its axes (rows, columns).

    `width` is the figure's, `height` that of a row, `extra` is added for title and legend, in
    inches.
    """
    figsize = (width, rows * height + extra)
    figure, axes = plt.subplots(rows, columns, figsize=figsize, squeeze=False)
    # A notebook would show what pyplot keeps a second time.
    plt.close(figure)
    return figure, axes


def finish(
    figure: Figure, axes: np.ndarray, title: str = "", *, named: bool = True, **legend: Any
) -> Figure:
    """Give `figure` its title and one legend for all panels, and hide panels without data.

    A single name needs no legend, nor do names that stand in a panel: `named` is false.  `legend`:
    further settings of it.
    """
    handles_of: dict[str, Any] = {}
    for axis in axes.flat:
        if not axis.has_data():
            axis.axis("off")
        handles, labels = axis.get_legend_handles_labels()
        handles_of.update(zip(labels, handles, strict=True))

    if named and len(handles_of) > 1:
        longest = max(map(len, handles_of))
        # About 15 characters stand in an inch, and a handle takes the room of six.
        room = round(15 * figure.get_figwidth())
        columns = max(1, min(len(handles_of), 6, room // (6 + longest)))
        figure.legend(
            handles_of.values(), handles_of, loc="outside lower center", ncols=columns, **legend
        )
    figure.suptitle(title)
    return figure


class _BetweenPowers(LogFormatter):
    """Numbers between powers of ten, where matplotlib finds room for them."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return _plain(x) if super().__call__(x, pos) else ""


def _plain(x: float) -> str:
    """1,000 or 0.25, and 3e-5 for what is small."""
    if 0 < abs(x) < 0.001:
        return f"{x:.0e}".replace("e-0", "e-")
    return f"{x:,g}"


def write_plain_numbers(side: Axis) -> None:
    """Write the numbers of a logarithmic side as they are, without powers."""
    side.set_major_formatter(lambda x, _: _plain(x))
    side.set_minor_formatter(_BetweenPowers())


def one_scale(axes: Iterable[Axes], which: str) -> None:
    """Give panels one scale, the widest of theirs; `which` is "x" or "y"."""
    axes = list(axes)
    ranges = [getattr(axis, f"get_{which}lim")() for axis in axes]
    low = min([low for low, _ in ranges], default=0.0)
    high = max([high for _, high in ranges], default=1.0)
    for axis in axes:
        axis.set(**{f"{which}lim": (low, high)})
