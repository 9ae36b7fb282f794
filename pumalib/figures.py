"""The study's figures, each a function from tables, such as `study.Results.tidy`, to a matplotlib Figure.
A method has one colour and one marker in all of them (`looks`), and PUMA is drawn on top."""

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogFormatter
from PIL import Image, ImageOps

from . import config, paths
from .data import Benchmark, check_known
from .data.batches import decode
from . import evaluation
from .study import printed

TRUE, FALSE, GREY = "#009e73", "#d55e00", "#888888"  # a colour-blind reader tells them apart
STYLE = sns.axes_style("whitegrid", {"font.sans-serif": ["DejaVu Sans"], "grid.color": "#dddddd"})
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888", "legend.frameon": False}
STYLE |= {"font.size": 9, "axes.titlesize": 10, "figure.titlesize": 10, "legend.fontsize": 8, "lines.markersize": 5}
pd.set_option("display.max_colwidth", None, "display.max_rows", 200)  # what a notebook shows is whole
plt.rcParams.update(STYLE | {"figure.constrained_layout.use": True, "grid.linewidth": 0.6})  # a notebook's own too

COLOURS = sns.color_palette("colorblind", 10).as_hex()
OURS = COLOURS.pop(3), "*"  # no other method has PUMA's colour
KINDS = {"specific ": "o", "universal ": "s", "": "8"}  # full fine-tuning with nine losses (Table 2); any method
LOSSES = [name for name in printed.LOSSES if name not in ("SupCon", "ProxyNCA++")]
LOOKS = {kind + loss: (COLOURS[n], marker) for kind, marker in KINDS.items() for n, loss in enumerate(LOSSES)}
LOOKS |= {name: (COLOURS[n % 9], "D^v<>"[n % 5]) for n, name in enumerate(config.METHODS)}
LOOKS |= dict.fromkeys(("full", "full fine-tuning", "universal CurricularFace"), ("#222222", "s")) | {"puma": OURS}
LOOKS |= {name: LOOKS[method] for name, method in printed.METHOD_OF_ROW.items()} | {"universal PUMA": OURS}
LOOKS |= dict.fromkeys(("frozen", "pretrained"), ("#555555", "_"))  # a dash, what the others start from


def looks(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each name: a method of the paper has its own everywhere, others take the next of a cycle."""
    others = [name for name in dict.fromkeys(names) if name not in LOOKS]
    cycle = {name: (COLOURS[n % 9], "XPdph"[n % 5]) for n, name in enumerate(others)}
    return {name: LOOKS[name] for name in names if name in LOOKS} | cycle


def save(figure: Figure, path: str | Path) -> Path:
    """Write `figure` whole as a PNG of 256 colours, the same bytes for the same figure; returns the path."""
    figure.savefig(drawn := io.BytesIO(), dpi=150)
    small = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    with paths.written_whole(Path(path)) as temporary:
        small.save(temporary, "PNG", optimize=True)
    return Path(path)


def intervals(table: pd.DataFrame, ylabel: str | Mapping, title="", joined=False, zero=False, xlabel="") -> Figure:
    """Numbers with their intervals, side by side at each place, or `joined` by a line with a band.  `table` has place,
    row, value, low, high, and if need be panel (then `ylabel` may be by panel) and printed, the paper's, drawn hollow."""
    table = table.reset_index(drop=True)
    panels = table.groupby(table.get("panel", pd.Series("", table.index)), sort=False)
    look, wide = looks(table["row"]), min(4, len(panels))
    width = 9.5 if max(table["place"].nunique(), 3 * wide) > 4 else 5.5
    figure, axes = _figure(-(-len(panels) // wide), wide, width, 3.2 if wide < 4 else 2.4, extra=0.6)
    for axis, (panel, part) in zip(axes.flat, panels, strict=False):
        rows, places = list(dict.fromkeys(part["row"])), list(dict.fromkeys(part["place"]))
        places.sort(key=lambda place: {"unified": 1, "harmonic": 2}.get(place, 0))
        beside = 0.0 if joined or not part["place"].duplicated().any() else 0.8 / len(rows)
        for number, row in enumerate(rows):
            mine = part[part["row"] == row]
            x = mine["place"].map(places.index) + beside * (number - (len(rows) - 1) / 2)
            _dots(axis, x, mine, row, look[row], joined and len(mine) > 1)  # a band of one point has no width
            if "printed" in mine:
                axis.plot(x, mine["printed"], look[row][1], color=look[row][0], markerfacecolor="none", markersize=8)
        for place in set(places) & set(evaluation.OVERALL):
            axis.axvspan(places.index(place) - 0.5, places.index(place) + 0.5, color="#f2f2f2", zorder=0)
        if zero:
            axis.axhline(0, color=GREY, linewidth=1)
        unit = ylabel if isinstance(ylabel, str) else ylabel[panel]
        axis.set(xlim=(-0.5, len(places) - 0.5), title=panel, xlabel=xlabel, ylabel=unit)
        crowded = sum(max(map(len, str(place).split("\n"))) for place in places) > 100 / wide
        axis.set_xticks(range(len(places)), places, rotation=40 * crowded, ha="right" if crowded else "center")
        axis.grid(axis="x", visible=False)
    return _finished(figure, axes, title)


def curves(tidy: pd.DataFrame, x: Mapping, xlabel: str, columns=evaluation.OVERALL, metric: str = "R@1") -> Figure:
    """`metric` over a number, a panel per column and a line per method, with 95 % bands (Figs. 6 to 8).
    `x` gives a row its line and its place, {"PUMA 4": ("PUMA", 4)}; other rows are not drawn."""
    table = _of_metric(tidy[tidy["row"].isin(list(x)) & tidy["dataset"].isin(columns)], metric)
    table[["row", "place"]] = [x[row] for row in table["row"]]
    table["panel"] = pd.Categorical(table["dataset"], columns)
    table = table.sort_values(["panel", "place"], kind="stable").astype({"panel": str})
    return intervals(table.assign(place=table["place"].map("{:g}".format)), f"{metric} (%)", joined=True, xlabel=xlabel)


def against(panels: Mapping[str, pd.DataFrame], xlabel: str, ylabel: str, log="", joined=False) -> Figure:
    """Values over numbers, a panel per table with the columns row, x, value, low and high; `log` is "x" or "xy".
    Points with their intervals, or `joined` by a line without; a row without an x is a horizontal line."""
    look = looks([row for table in panels.values() for row in table["row"]])
    figure, axes = _figure(1, len(panels), 9.5 if len(panels) > 1 else 7, 4 + 0.07 * len(look))
    for axis, (head, table) in zip(axes.flat, panels.items(), strict=True):
        for row, part in table.groupby("row", sort=False):
            if part["x"].isna().any():
                axis.axhline(part["value"].item(), color=GREY, linestyle="--", linewidth=1, label=row)
            else:
                _dots(axis, part["x"], part, row, look[row], joined)
        axis.set(xlabel=xlabel, ylabel=ylabel, title=head, **{f"{side}scale": "log" for side in log})
        for side in [axis.xaxis, axis.yaxis][: len(log)]:
            side.set_major_formatter("{x:,g}")
            side.set_minor_formatter(LogFormatter())  # those between powers of ten, where there is room
    return _finished(figure, axes)


def accuracy_against_parameters(tidy: pd.DataFrame, trainable: Mapping[str, int]) -> Figure:
    """Harmonic and unified R@1 against each method's number of trainable parameters, a dict or Series (Fig. 2)."""
    table = _of_metric(tidy, "R@1")
    table["x"] = [trainable[row] / 1e6 or np.nan for row in table["row"]]  # the axis has no zero
    panels = {name: table[table["dataset"] == name] for name in ("harmonic", "unified")}
    return against(panels, "trainable parameters (millions): up and to the left is better", "R@1 (%)", log="x")


def heatmap(table: pd.DataFrame, title: str, label: str, fmt: str = "", signed: bool = False) -> Figure:
    """Rows by columns as colours (Fig. 4), NaN left out; `fmt` writes the numbers, `signed` is a scale from -1 to 1."""
    width = 2.5 + 0.06 * max(map(len, map(str, table.index))) + (0.6 if fmt else 0.25) * table.shape[1]
    figure, axes = _figure(1, 1, max(4.5, width), 1.5 + 0.3 * len(table))
    look = {"cmap": "vlag_r", "vmin": -1, "vmax": 1} if signed else {"cmap": "viridis"}
    look |= {"linewidths": 0.4, "annot_kws": {"size": 7}, "cbar_kws": {"label": label, "pad": 0.02}}
    axis = sns.heatmap(table, ax=axes[0, 0], annot=bool(fmt), fmt=fmt, yticklabels=True, **look)
    axis.grid(visible=False)
    axis.set(xlabel=table.columns.name or "", ylabel="", title=title)
    plt.setp(axis.get_yticklabels(), rotation=0)
    tilt = {"rotation": 40, "ha": "right"} if max(map(len, map(str, table))) > 3 else {"rotation": 0}
    plt.setp(axis.get_xticklabels(), **tilt)
    return figure


def embedding_map(maps: Mapping[str, pd.DataFrame], of: str) -> Figure:
    """Maps of images (columns x, y, dataset, label) by title, coloured by dataset and, dataset `of`, by class (Fig. 10)."""
    figure, axes = _figure(len(maps), 2, 9.5, 4.4, extra=0.5)
    for (left, right), (title, points) in zip(axes, maps.items(), strict=True):
        style = {"s": float(np.clip(12000 / len(points), 1.5, 14)), "linewidths": 0}
        for name, (colour, _) in looks(points["dataset"]).items():
            left.scatter("x", "y", data=points[points["dataset"] == name], color=colour, label=name, **style)
        one = points[points["dataset"] == of]
        codes, classes = pd.factorize(one["label"])
        right.scatter(points["x"], points["y"], color="#e4e4e4", **style)
        hues = np.asarray(sns.husl_palette(32, l=0.55))[codes * 13 % 32]  # classes that follow each other differ
        right.scatter(one["x"], one["y"], c=hues, **style)
        left.set(xticks=[], yticks=[], title=f"{title}, by dataset")
        right.set(xticks=[], yticks=[], title=f"{of} by class ({len(classes):,}; hues repeat)")
    return _finished(figure, axes, markerscale=6 / style["s"] ** 0.5)


def gains(differences: pd.DataFrame, title: str = "") -> Figure:
    """Differences in pairs, of `Results.differences`, with 95 % intervals, a panel per column; hollow: printed; grey: one seed."""
    names, panels = list(dict.fromkeys(differences["difference"]))[::-1], differences.groupby("of", sort=False)
    figure, axes = _figure(1, max(1, len(panels)), 9.5, 1.4 + 0.22 * len(names))
    for axis, (panel, part) in zip(axes.flat, panels, strict=False):
        x, y = part["points"], part["difference"].map(names.index)
        seeds = part["p"].notna() if "p" in part else False
        up, down = (part["low"] > 0) & seeds, (part["high"] < 0) & seeds
        kinds = ("interval above 0", TRUE, up), ("below 0", FALSE, down), ("across 0, or one seed", GREY, ~(up | down))
        for said, colour, mine in kinds:
            spread = np.stack([x - part["low"], part["high"] - x])[:, mine]
            axis.errorbar(x[mine], y[mine], xerr=spread, fmt="o", color=colour, label=said if mine.any() else None)
        if "paper" in part and part["paper"].notna().any():
            axis.plot(part["paper"], y, "D", color="#222222", markerfacecolor="none", label="printed")
        axis.axvline(0, color=GREY, linewidth=1)
        axis.set(ylim=(-0.6, len(names) - 0.4), xlabel="points of R@1", title=panel, yticks=range(len(names)))
        axis.set_yticklabels(names if axis is axes[0, 0] else [])
    return _finished(figure, axes, title)


def verdicts(card: pd.DataFrame) -> Figure:
    """Claims of `study.scorecard` by section: whether each holds in the print, and what is said of it here."""
    card = card.sort_values("section", kind="stable").iloc[::-1]
    figure, axes = _figure(1, 1, 9.5, 1 + 0.2 * len(card))
    axis, fills = axes[0, 0], {"holds, supported": TRUE, "fails, contradicted": FALSE, "undecided": GREY}
    for said, fill in (fills | {"not printed, not testable": "none"}).items():
        for x, column in enumerate(("print", "here")):
            y = np.flatnonzero(card[column].isin(said.split(", ")))
            axis.scatter(np.full(len(y), x), y, s=60, marker="s", color=fill, edgecolors=GREY, label=said)
    labels = [textwrap.shorten(f"{section}  {claim}", 90) for section, claim in zip(card["section"], card["claim"])]
    axis.set(xlim=(-0.6, 1.6), ylim=(-0.8, len(card) - 0.2), xticks=[0, 1], xticklabels=["print", "here"])
    axis.set_yticks(range(len(card)), labels)
    for place in np.flatnonzero(card["section"].to_numpy()[1:] != card["section"].to_numpy()[:-1]):
        axis.axhline(place + 0.5, color="#222222", linewidth=0.6)
    return _finished(figure, axes)


def field(panels: Mapping[str, Mapping], columns: int = 4) -> Figure:
    """Vector fields in the plane, a panel per title: `at` (n, 2), `move` (n, 2) drawn as arrows of those lengths, `colours`
    (n,) or one; optional `dots` [(points (m, 2), colour, size, marker)] and `line` (X, Y, Z), Z's contour at zero."""
    figure, axes = _figure(-(-len(panels) // columns), columns, 9.5, 9.5 / columns, extra=0.3)
    limits = np.array([-1.5, 1.5]) * max(np.abs(np.asarray(of["at"])).max() for of in panels.values())
    for axis, (title, of) in zip(axes.flat, panels.items(), strict=False):
        if "line" in of:
            axis.contour(*of["line"], [0], colors=GREY)
        style = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.007}
        axis.quiver(*np.transpose(of["at"]), *np.transpose(of["move"]), color=of["colours"], **style)
        for dots, colour, size, marker in of.get("dots", ()):
            axis.scatter(*np.transpose(dots), size, colour, marker, zorder=3)
        axis.set(xlim=limits, ylim=limits, aspect="equal", title=title)
        axis.axis("off")
    return _finished(figure, axes)


def picture_grid(lines: Sequence[Sequence], title: str = "") -> Figure:
    """Lines of pictures: in a line stand (PIL image or None, text below, colour of a frame), a text by itself, or None for a
    gap; an empty line is a gap too."""
    wide = {tuple: 1.1, str: 1.8, type(None): 0.2}
    lefts = [np.cumsum([0, *(wide[type(cell)] for cell in line)]) for line in lines]
    below = max(len(cell[1].splitlines()) for line in lines for cell in line if type(cell) is tuple)
    tops = np.cumsum([0, *(1.1 + 0.2 * below if line else 0.2 for line in lines)])
    width = max(left[-1] for left in lefts)
    figure, ((axis,),) = _figure(1, 1, 9.5, 9.5 * tops[-1] / width, extra=0.3)
    axis.set(xlim=(-0.05, width), ylim=(tops[-1], -0.05), aspect="equal", title=title)
    axis.axis("off")
    for line, left, top in zip(lines, lefts, tops):
        for x, cell in zip(left, line):
            if isinstance(cell, str):
                axis.text(x + (0.1 if x else 1.7), top + 0.5, cell, ha="left" if x else "right", va="center")
            elif cell and cell[0]:  # BOX averages the pixels of large pictures and keeps those of small ones square
                picture, text, edge = cell
                centre = ImageOps.fit(picture, (96, 96), Image.Resampling.BOX)
                axis.imshow(centre, extent=(x, x + 1, top + 1, top))
                axis.text(x + 0.5, top + 1.04, text, ha="center", va="top", fontsize=6.5)
                frame = {"edgecolor": edge, "linewidth": 2.5, "linestyle": (0, (2, 1)) if edge == FALSE else "-"}
                axis.add_patch(Rectangle((x, top), 1, 1, fill=False, **frame))
    return figure


def contact_sheet(benchmark: Benchmark, per_dataset: int = 12) -> Figure:
    """A row of `per_dataset` pictures per dataset, two by two of one class, with the numbers of classes and images."""
    lines = []
    for name, images in benchmark.images.groupby("dataset", sort=False):
        mixed = images.sample(frac=1, random_state=0)
        shown = mixed[mixed["label"].isin(mixed["label"].unique()[: (per_dataset + 1) // 2])]
        shown = shown.groupby("label").head(2).sort_values("label")[:per_dataset]
        lines.append([f"{name}\n{images['label'].nunique():,} classes\n{len(images):,} images"])
        for place, image in enumerate(shown.itertuples()):
            lines[-1] += [None] * (place % 2 == 0) + [(_decoded(benchmark, image), "", "none")]
    return picture_grid(lines, "The datasets: neighbouring pairs are of one class")


def retrieval_grid(benchmark: Benchmark, queries: Sequence[int], found: Mapping[str, np.ndarray]) -> Figure:
    """Queries at the left, their nearest images beside them, true matches green, false ones orange and dashed (Fig. 9).
    Both are positions in `benchmark.test`; `found` has (len(queries), k) of them by method name."""
    images, lines = benchmark.test, []
    for number, query in enumerate(images.iloc[list(queries)].itertuples()):
        named = textwrap.fill(str(query.class_name), 18)
        lead = f"{query.dataset}\n{named}", (_decoded(benchmark, query), "", "#222222"), None
        for name, rows in found.items():
            others = images.iloc[rows[number]].itertuples()
            edges = ((_decoded(benchmark, one), "", TRUE if one.label == query.label else FALSE) for one in others)
            lines.append([*lead, *edges, name])
            lead = "", (None, "", ""), None
        lines.append([])
    return picture_grid(lines, "Query (left) and its nearest: same class green, another class orange and dashed")


def _figure(rows: int, columns: int, width: float, height: float, extra: float = 0) -> tuple[Figure, np.ndarray]:
    figure, axes = plt.subplots(rows, columns, figsize=(width, rows * height + extra), squeeze=False)
    plt.close(figure)  # else a notebook shows it twice
    return figure, axes


def _finished(figure: Figure, axes: np.ndarray, title: str = "", **style) -> Figure:
    """Title above and one legend below all panels, where there is more than one name; panels without data go."""
    named = {}
    for axis in axes.flat:
        axis.axis("on" if axis.has_data() and axis.axison else "off")
        named |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    if len(named) > 1:
        style |= {"loc": "outside lower center", "ncols": min(len(named), 6, 140 // (6 + max(map(len, named))))}
        figure.legend(named.values(), named, **style)
    figure.suptitle(title)
    return figure


def _of_metric(tidy: pd.DataFrame, metric: str) -> pd.DataFrame:
    check_known("metric", [metric], tidy["metric"].unique())
    table = tidy[tidy["metric"] == metric]
    return table.assign(**{part: 100 * table[part] for part in ("value", "low", "high")})


def _dots(axis, x, rows: pd.DataFrame, label: str, look: tuple[str, str], joined: bool = False) -> None:
    style = {"color": look[0], "label": label} | ({"markersize": 9, "zorder": 3} if look[1] in "*_" else {"zorder": 2})
    if joined:
        axis.plot(x, rows["value"], marker=look[1], markevery=-(-len(rows) // 8), **style)
        if "low" in rows:
            axis.fill_between(x, rows["low"], rows["high"], color=look[0], alpha=0.15, linewidth=0)
    else:
        spread = np.stack([rows["value"] - rows["low"], rows["high"] - rows["value"]]).astype(float).clip(0)
        axis.errorbar(x, rows["value"], spread, fmt=look[1], elinewidth=1.2, ecolor=(look[0], 0.6), **style)


def _decoded(benchmark: Benchmark, image) -> Image.Image:
    at, pixels = image.path, benchmark.pixels
    picture = decode(benchmark.root / at) if pixels is None else Image.fromarray(pixels[int(at)])
    return ImageOps.fit(picture, (96, 96), Image.Resampling.BOX)  # now: a photograph takes 36 MB, a figure has hundreds
