"""The study's figures, each a function from tables to a matplotlib Figure; those of images stand in `pictures`.

Accuracies come as the tidy table the notebooks write: a row per (row, dataset, metric) with `value`, `low` and
`high` as fractions, where `row` names the method and `dataset` may be "unified" or "harmonic".  A figure is
closed for pyplot when it is returned: a notebook shows it once, as the value of its cell.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, NullLocator
from PIL import Image
from scipy.optimize import isotonic_regression

from . import paths
from .data import Benchmark

COLOURS = sns.color_palette("colorblind", 10).as_hex()
MARKERS = "osD^vPX<>"  # 9 and 10: no pair of colour and marker returns before the 90th method
INK, FAINT = "#222222", "#dddddd"
STYLE = {
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
}
DPI = 150
OVERALL = ("unified", "harmonic")


def save(figure: Figure, path: str | Path) -> Path:
    """Write `figure` as PNG by write-then-rename, the same bytes for the same figure; returns the path."""
    path, drawn = Path(path), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    with paths.written_whole(path) as temporary:
        temporary.write_bytes(small_png(drawn.getvalue()))
    return path


def small_png(content: bytes) -> bytes:
    """The PNG with a palette of 256 colours: a quarter of the size, where there are photographs."""
    drawn, result = Image.open(io.BytesIO(content)).convert("RGB"), io.BytesIO()
    drawn.quantize(256, dither=Image.Dither.NONE).save(result, "PNG", optimize=True)
    return result.getvalue()


@plt.rc_context(STYLE)
def class_sizes(benchmark: Benchmark) -> Figure:
    """Images per class of each dataset, largest class first, for training and test (Fig. 5)."""
    figure, axes = new_figure(1, 2, (9.5, 3.6), sharey=True)
    for axis, part, title in zip(axes, (benchmark.train, benchmark.test), ("Training", "Test"), strict=True):
        for number, name in enumerate(benchmark.datasets):
            sizes = part[part["dataset"] == name]["label"].value_counts().to_numpy()
            rank = np.arange(1, len(sizes) + 1)
            colour, marker = _look(number)
            label = f"{name}: {len(sizes):,} classes, {sizes.sum():,} images"
            axis.plot(rank, sizes, color=colour, marker=marker, markevery=[-1], markersize=5, label=label)
        axis.set(xscale="log", yscale="log", xlabel="class, by size", title=title)
        _plain_log(axis.xaxis)
        _plain_log(axis.yaxis)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=7)
    axes[0].set_ylabel("images of the class")
    figure.suptitle("How unequal the datasets are: each line ends at the dataset's number of classes", fontsize=10)
    return figure


@plt.rc_context(STYLE)
def accuracy_bars(table: pd.DataFrame, metric: str = "R@1") -> Figure:
    """`metric` of each method (tidy `table`) on each dataset, unified and harmonic, with 95 % intervals (Table 2)."""
    table = _of_metric(table, metric)
    methods, names = list(dict.fromkeys(table["row"])), list(dict.fromkeys(table["dataset"]))
    names = [name for name in names if name not in OVERALL] + [name for name in OVERALL if name in names]
    figure, axis = new_figure(1, 1, (9.5, 3.8))
    for place, name in enumerate(names):
        if name in OVERALL:
            axis.axvspan(place - 0.5, place + 0.5, color="#f2f2f2", zorder=0)
    for number, method in enumerate(methods):
        rows = table[table["row"] == method].set_index("dataset").reindex(names)
        offset = (number - (len(methods) - 1) / 2) * 0.8 / len(methods)
        _dots(axis, np.arange(len(names)) + offset, rows, number, method)
    axis.set(xticks=range(len(names)), xticklabels=names, xlim=(-0.5, len(names) - 0.5), ylabel=f"{metric} (%)")
    axis.grid(axis="x", visible=False)
    axis.set_title(f"{metric} on each dataset and overall; bars are 95 % intervals")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=min(6, len(methods)))
    return figure


@plt.rc_context(STYLE)
def accuracy_against_parameters(
    table: pd.DataFrame, trainable: Mapping[str, int], metric: str = "R@1", groups: Mapping[str, str] | None = None
) -> Figure:
    """Harmonic and unified `metric` (tidy `table`) against each method's number of trainable parameters (Fig. 2).

    Args:
        trainable: dict or Series by method.
        groups: a group by method, for its colour; a method's name loses the group's name before it.
    """
    table = _of_metric(table, metric)
    methods = list(dict.fromkeys(table["row"]))
    missing = [method for method in methods if method not in trainable]
    if missing:
        raise ValueError(f"trainable lacks the number of parameters of {', '.join(map(repr, missing))}")
    groups, methods = groups or {}, [method for method in methods if trainable[method] > 0]  # the axis has no zero
    looks = {group: number for number, group in enumerate(dict.fromkeys(groups.get(m, m) for m in methods))}
    many = len(methods) > 9
    figure, axes = new_figure(*((2, 1, (9.5, 8.4)) if many else (1, 2, (9.5, 3.6))))
    for axis, name in zip(axes, ("harmonic", "unified"), strict=True):
        marks = []
        for method in methods:
            rows, group = table[(table["row"] == method) & (table["dataset"] == name)], groups.get(method, method)
            _dots(axis, np.full(len(rows), trainable[method] / 1e6), rows, looks[group], group)
            marks += [(method.removeprefix(f"{group} "), trainable[method] / 1e6, 100 * value) for value in rows["value"]]
        axis.set(xscale="log", xlabel="trainable parameters (millions)", ylabel=f"{metric} (%)", title=name)
        _plain_log(axis.xaxis)
        axis.margins(0.08)
        for bars in (container.lines[2] for container in axis.containers if many):
            bars[0].set_alpha(0.3)
        if marks:
            _name(axis, marks, [container.lines[0].get_color() for container in axis.containers])
    if groups:
        handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    figure.suptitle(f"{metric} against what is trained: up and to the left is better", fontsize=10)
    return figure


@plt.rc_context(STYLE)
def curves(
    table: pd.DataFrame, x: Mapping[str, tuple[str, float]], xlabel: str, columns: Sequence[str] = OVERALL,
    metric: str = "R@1", log2: bool = False,
) -> Figure:  # fmt: skip
    """`metric` (tidy `table`) over a number, a panel per column and a line per method, with 95 % bands (Figs. 6 to 8).

    Args:
        x: for each row its line and its place on the axis, {"PUMA 4": ("PUMA", 4)}; rows that are not in both `x` and
            `table` are not drawn.
        columns: datasets, "unified" or "harmonic".
        log2: an axis of powers of two, on which 0 has its place left of the smallest number.
    """
    table = _of_metric(table, metric)
    table = table[table["row"].isin(list(x))]
    table = table.assign(line=[x[row][0] for row in table["row"]], x=[x[row][1] for row in table["row"]]).sort_values("x")
    unknown = [name for name in columns if name not in set(table["dataset"])]
    if unknown:
        known = ", ".join(sorted(set(table["dataset"]))) or "none: no row of the table is in x"
        raise ValueError(f"no column {unknown[0]!r}; known: {known}")
    wide = min(4, len(columns))
    tall = -(-len(columns) // wide)
    figure, axes = new_figure(tall, wide, (max(5.0, min(9.5, 4.0 * wide)), 0.6 + (3 if wide < 3 else 2.2) * tall), squeeze=False)
    lines = [line for line in dict.fromkeys(line for line, _ in x.values()) if line in set(table["line"])]
    ticks = sorted(set(table["x"]))
    for axis, name in zip(axes.flat, columns, strict=False):
        for number, line in enumerate(lines):
            rows = table[(table["line"] == line) & (table["dataset"] == name)]
            if len(rows) == 1:  # a band would have no width
                _dots(axis, rows["x"].to_numpy(float), rows, number, line)
                continue
            colour, marker = _look(number)
            axis.plot(rows["x"], 100 * rows["value"], color=colour, marker=marker, markersize=5, label=line)
            axis.fill_between(rows["x"], 100 * rows["low"], 100 * rows["high"], color=colour, alpha=0.15, linewidth=0)
        if log2:
            axis.set_xscale("symlog", base=2, linscale=0.5, linthresh=min((t for t in ticks if t > 0), default=1))
        axis.set(title=name, xlabel=xlabel, xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
    for axis in axes[:, 0]:
        axis.set_ylabel(f"{metric} (%)")
    for axis in axes.flat[len(columns):]:
        axis.axis("off")
    if len(lines) > 1:
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=min(6, len(lines)))
    return figure


@plt.rc_context(STYLE)
def embedding_map(points: np.ndarray, images: pd.DataFrame, title: str = "t-SNE of the embedding space") -> Figure:
    """A map (n, 2) of the rows of `images`, coloured by dataset and by class (Fig. 10)."""
    points = np.asarray(points)
    if points.shape != (len(images), 2):
        raise ValueError(f"points have shape {points.shape}, the table {len(images)} images: they must be (n, 2)")
    figure, (by_dataset, by_class) = new_figure(1, 2, (9.5, 4.9))
    names = list(dict.fromkeys(images["dataset"]))
    dataset, size = images["dataset"].to_numpy(), float(np.clip(12000 / len(images), 1.5, 14))
    for number, name in enumerate(names):
        mine = dataset == name
        colour, marker = _look(number)
        by_dataset.scatter(*points[mine].T, s=size, color=colour, marker=marker, linewidths=0, label=name)
    codes = pd.factorize(images["label"])[0]
    hues = np.asarray(sns.husl_palette(32, l=0.55))[codes * 13 % 32]  # classes that follow each other differ
    by_class.scatter(*points.T, s=size, c=hues, linewidths=0)
    for axis, what in ((by_dataset, "by dataset"), (by_class, f"by class ({codes.max() + 1:,}; hues repeat)")):
        axis.set(xticks=[], yticks=[], title=what)
    handles, labels = by_dataset.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names), markerscale=6 / size**0.5)
    figure.suptitle(title, fontsize=10)
    return figure


@plt.rc_context(STYLE)
def training_curves(logs: Mapping[str, pd.DataFrame]) -> Figure:
    """Loss per epoch of each run; `logs` are by name, with columns `epoch` and `loss`."""
    figure, axis = new_figure(1, 1, (7, 3.4))
    for number, (name, log) in enumerate(logs.items()):
        colour, marker = _look(number)
        every = max(1, len(log) // 8)
        axis.plot(log["epoch"], log["loss"], color=colour, marker=marker, markevery=every, markersize=4, label=name)
    axis.set(xlabel="epoch", ylabel="training loss, mean of the epoch", title="Training loss of each run")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@plt.rc_context(STYLE)
def prompt_heatmap(similarities: pd.DataFrame) -> Figure:
    """Mean cosine of the queries of each dataset (rows) with each prompt's key (columns) (Fig. 4, Eq. 8)."""
    rows, columns = similarities.shape
    figure, axis = new_figure(1, 1, (max(4.5, 1.8 + 0.38 * columns), 1.2 + 0.33 * rows))
    axis.grid(visible=False)
    bar = {"label": "mean cosine", "pad": 0.02}
    sns.heatmap(similarities, ax=axis, cmap="viridis", linewidths=0.4, linecolor="white", cbar_kws=bar)
    axis.set(xlabel="prompt", ylabel="", title="How much each dataset draws on each prompt")
    axis.tick_params(axis="both", length=0, rotation=0)
    return figure


def new_figure(rows: int, columns: int, size: tuple[float, float], **subplots) -> tuple[Figure, np.ndarray]:
    figure, axes = plt.subplots(rows, columns, figsize=size, **subplots)
    plt.close(figure)  # else a notebook shows it twice
    return figure, axes


def _look(number: int) -> tuple[str, str]:
    return COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]


def _of_metric(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows of `metric` in a tidy table, one per method and dataset."""
    missing = {"row", "dataset", "metric", "value", "low", "high"} - set(table)
    if missing:
        raise ValueError(f"the table of accuracies lacks {', '.join(sorted(missing))}")
    chosen = table[table["metric"] == metric]
    if chosen.empty:
        raise ValueError(f"no row of metric {metric!r}; known: {', '.join(dict.fromkeys(table['metric']))}")
    twice = chosen[chosen.duplicated(["row", "dataset"])]
    if len(twice):
        at = twice.iloc[0]
        raise ValueError(f"{metric} of {at['row']!r} on {at['dataset']!r} stands twice: average the seeds first")
    return chosen


def _dots(axis, x: np.ndarray, rows: pd.DataFrame, number: int, label: str) -> None:
    """Percentages with their intervals; a missing interval is not drawn."""
    value = 100 * rows["value"].to_numpy(float)
    spread = 100 * np.stack([rows["value"] - rows["low"], rows["high"] - rows["value"]]).astype(float)
    colour, marker = _look(number)
    axis.errorbar(x, value, np.maximum(spread, 0), fmt=marker, color=colour, markersize=5, elinewidth=1.2, label=label)


def _name(axis, marks: list[tuple[str, float, float]], colours: list[str]) -> None:
    """Write names beside points (name, x, y) of a logarithmic x; where they crowd, spread the names, with lines to them."""
    box = axis.get_position()
    inches = (0.2 + 0.06 * max(len(mark[0]) for mark in marks), 0.15)  # of a name, with its distance
    width, height = np.array(inches) / (box.width, box.height) / axis.figure.get_size_inches()
    left, right = axis.get_xlim()
    axis.set_xlim(left, right * (right / left) ** (width / (1 - width)))
    at = (axis.transData + axis.transAxes.inverted()).transform([mark[1:] for mark in marks])  # (n, 2), fractions
    order = np.argsort(at[:, 0], kind="stable")
    columns = np.split(order, np.flatnonzero(np.diff(at[order, 0]) > 0.03) + 1)
    for left, right in itertools.pairwise(range(len(columns))):
        near = at[columns[right], 0].min() - at[columns[left], 0].max() < width
        if near and np.abs(np.subtract.outer(at[columns[left], 1], at[columns[right], 1])).min() < 2 * height:
            columns[left], columns[right] = [], np.concatenate([columns[left], columns[right]])  # names right of both
    for column in (column for column in columns if len(column)):
        column = column[np.argsort(at[column, 1], kind="stable")]
        steps = height * np.arange(len(column))
        # The heights nearest to the points' own that are a name's height apart.
        places = isotonic_regression(at[column, 1] - steps).x.clip(0.02, max(0.02, 0.98 - steps[-1])) + steps
        for number, place in zip(column, places, strict=True):
            name, *point = marks[number]
            ours = name.lower() == "puma"
            axis.annotate(
                name, point, (at[column, 0].max() + 0.025, place), textcoords="axes fraction", va="center", color=colours[number],
                fontsize=10 if ours else 7.5, fontweight="bold" if ours else "normal",
                arrowprops=dict(arrowstyle="-", color=colours[number], linewidth=0.5, shrinkA=1, shrinkB=3, relpos=(0, 0.5)),
            )  # fmt: skip


def _plain_log(axis) -> None:
    """Tick labels of a logarithmic axis as 0.1, 1, 10, 1,000."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(LogFormatter())  # labels those between the powers of ten where there is room
