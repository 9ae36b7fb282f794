"""Labels in a panel, next to the line or point they name and in its colour: no legend needed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patheffects import withStroke

# Points, 72 to an inch.
SIZE = 8
LINE = 1.35 * SIZE
# The mean width of a letter.
LETTER = 0.55 * SIZE
# The distance from a marker to its name.
NEAR = 6.0
# The height kept free around a level line.
THIN = 2.0


@dataclass(frozen=True)
class Name:
    """A name, its colour, and the position of the point it names, in data coordinates.

    `low` and `high` are the ends of the point's error bar.
    """

    text: str
    colour: str
    x: float
    y: float
    low: float = np.nan
    high: float = np.nan


def name_ends(axis: Axes, names: Sequence[Name]) -> None:
    """Write names at the right of a panel, at the heights of the line ends, without overlap.

    The panel's limits and scales must be final.  A thin line joins each name to its line's end.
    """
    _, height = _size(axis)
    heights = [_in_panel(axis, one)[1] * height for one in names]
    for one, placed in zip(names, moved_apart(heights, LINE), strict=True):
        inside = min(max(_in_panel(axis, one)[0], 0.0), 1.0)
        axis.annotate(
            one.text,
            (inside, _in_panel(axis, one)[1]),
            (1.03, placed / height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=_ink(one.colour),
            fontsize=SIZE,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": one.colour,
                "linewidth": 0.6,
                "alpha": 0.6,
                # Towards the first letter: a leader to the middle would cross other names.
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )


@dataclass(frozen=True)
class Place:
    """Where a name goes: its offset in points from what it names, and the side of its text."""

    name: Name
    right: float
    up: float
    side: str
    is_level: bool = False


def places_of(
    axis: Axes, names: Sequence[Name], levels: Sequence[Name] = ()
) -> tuple[list[Place], list[Name]]:
    """Places next to points and along horizontal lines, and the names that have no free one.

    Of `levels`, the horizontal lines, only y is used.  The panel's limits and scales must be final.
    """
    width, height = _size(axis)
    points = [(x * width, y * height) for x, y in (_in_panel(axis, one) for one in names)]
    # A level's own x may be nan.
    left = axis.get_xlim()[0]
    heights = [_in_panel(axis, replace(one, x=left))[1] * height for one in levels]
    taken = [_box(x, y, 0.0, "center", NEAR) for x, y in points]
    taken += [_bar(axis, one, width, height) for one in names if np.isfinite(one.low)]
    lines = list(heights)
    low, high = axis.get_ylim()
    if low < 0 < high and axis.get_yscale() == "linear":
        # A name on the line at zero would be struck through.
        lines.append(-low / (high - low) * height)
    taken += [_box(0.0, y, width, "left", THIN) for y in lines]

    found: list[Place] = []
    left_out: list[Name] = []
    for number, (one, (x, y)) in enumerate(zip(names, points, strict=True)):
        offset = _free_place(one, number, points, taken, (width, height))
        if offset is None:
            left_out.append(one)
            continue
        right, up = offset
        side = "left" if right > 0 else "right"
        taken.append(_box(x + right, y + up, _length(one), side, LINE))
        found.append(Place(one, right, up, side))

    for one, y in zip(levels, heights, strict=True):
        right, up = _free_place_along(one, y, taken, width)
        taken.append(_box(right, y + up, _length(one), "left", LINE))
        found.append(Place(one, right, up, "left", is_level=True))
    return found, left_out


def write_names(axis: Axes, places: Sequence[Place]) -> None:
    """Write names at the places of `places_of`."""
    for place in places:
        one = place.name
        at = (0.0, one.y) if place.is_level else (one.x, one.y)
        axis.annotate(
            one.text,
            at,
            (place.right, place.up),
            xycoords=axis.get_yaxis_transform() if place.is_level else "data",
            textcoords="offset points",
            color=_ink(one.colour),
            fontsize=SIZE,
            ha=place.side,
            va="center",
        )


def name_clusters(axis: Axes, names: Sequence[Name], clusters: Sequence[np.ndarray]) -> None:
    """Write names onto clusters, each near the middle of its points (n, 2), without overlap.

    Of `names` only the text is used: letters in a cluster's own colour would not be read on it.
    The panel's limits must be final.
    """
    width, height = _size(axis)
    taken: list[Box] = []
    for one, points in zip(names, clusters, strict=True):
        from_middle = np.linalg.norm(points - np.median(points, axis=0), axis=1)
        in_order = points[np.argsort(from_middle, kind="stable")]
        boxes = []
        for x, y in in_order:
            across, along = _in_panel(axis, replace(one, x=x, y=y))
            left = across * width - _length(one) / 2
            boxes.append(_box(left, along * height, _length(one), "left", LINE))
        free = [not any(_overlap(box, other) for other in taken) for box in boxes]
        chosen = int(np.argmax(free))
        taken.append(boxes[chosen])
        x, y = in_order[chosen]
        text = axis.text(x, y, one.text, color="black", size=SIZE, ha="center", va="center")
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


def _ink(colour: str) -> tuple[float, float, float]:
    """A colour, darker: letters are thinner than markers."""
    red, green, blue = (0.75 * part for part in to_rgb(colour))
    return red, green, blue


def _length(one: Name) -> float:
    return len(one.text) * LETTER


Box = tuple[float, float, float, float]


# Offsets of a name from its point, the nearest first: lines up or down.
STEPS = (0.0, 1.0, -1.0, 2.0, -2.0)


def _free_place(
    one: Name,
    number: int,
    points: Sequence[tuple[float, float]],
    taken: Sequence[Box],
    size: tuple[float, float],
) -> tuple[float, float] | None:
    """The offset of a name from its point, a `number` of `points`, to the nearest free place.

    It begins nearer to its point than to any other, whose name it would seem to be.  None if there
    is no such place in the panel.
    """
    x, y = points[number]
    long = _length(one)
    width, height = size
    for step in STEPS:
        up = step * LINE
        for right, side in ((NEAR, "left"), (-NEAR, "right")):
            box = _box(x + right, y + up, long, side, LINE)
            is_inside = box[0] >= 0 and box[1] <= width and box[2] >= 0 and box[3] <= height
            begin = (x + right, y + up)
            nearest = min(math.dist(begin, point) for point in points)
            is_own = math.dist(begin, (x, y)) <= nearest
            if is_inside and is_own and not any(_overlap(box, other) for other in taken):
                return right, up
    return None


def _bar(axis: Axes, one: Name, width: float, height: float) -> Box:
    """The box of a point's error bar."""
    x, low = _in_panel(axis, replace(one, y=one.low))
    _, high = _in_panel(axis, replace(one, y=one.high))
    return x * width - THIN, x * width + THIN, low * height, high * height


def _free_place_along(
    one: Name, y: float, taken: Sequence[Box], width: float
) -> tuple[float, float]:
    """The offset of a name from a horizontal line's left end: below if free, else above it."""
    long = _length(one)
    last = width - NEAR - long
    away = 0.7 * LINE
    for up in (-away, away):
        for right in (NEAR, last / 2, last):
            box = _box(right, y + up, long, "left", SIZE)
            if not any(_overlap(box, other) for other in taken):
                return right, up
    return NEAR, -away


def _box(x: float, y: float, long: float, side: str, high: float) -> Box:
    """Left, right, lower and upper edge of a box that has its left, right or center at x."""
    left = {"left": x, "right": x - long, "center": x - high / 2}[side]
    right = left + (high if side == "center" else long)
    return left, right, y - high / 2, y + high / 2


def _overlap(one: Box, other: Box) -> bool:
    across = one[0] < other[1] and other[0] < one[1]
    along = one[2] < other[3] and other[2] < one[3]
    return across and along


def moved_apart(numbers: Sequence[float], least: float) -> list[float]:
    """`numbers`, moved as little as needed to be at least `least` apart, in the same order.

    A nan stays one.
    """
    given = np.array(numbers, float)
    order = np.argsort(given, kind="stable")
    placed = given[order]
    # Neighbours that are too near become a group around their mean, and groups may meet.
    groups: list[list[float]] = []
    for number in placed:
        groups.append([number])
        while len(groups) > 1 and _ends(groups[-2], least)[1] + least > _ends(groups[-1], least)[0]:
            last = groups.pop()
            groups[-1].extend(last)
    moved = np.empty(len(placed))
    start = 0
    for group in groups:
        first, _ = _ends(group, least)
        moved[start : start + len(group)] = first + least * np.arange(len(group))
        start += len(group)
    in_order = np.empty(len(placed))
    in_order[order] = moved
    return [float(one) for one in in_order]


def _ends(group: Sequence[float], least: float) -> tuple[float, float]:
    """First and last position of a group, spaced by `least` around its mean."""
    middle = float(np.mean(group))
    half = least * (len(group) - 1) / 2
    return middle - half, middle + half


def _in_panel(axis: Axes, one: Name) -> tuple[float, float]:
    """The position of a name's point as fractions of the panel."""
    display = axis.transData.transform((one.x, one.y))
    x, y = axis.transAxes.inverted().transform(display)
    return float(x), float(y)


def _size(axis: Axes) -> tuple[float, float]:
    """Width and height of a panel in points, with room made for titles and axis labels."""
    figure = axis.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    box = axis.get_window_extent()
    return 72 * box.width / figure.dpi, 72 * box.height / figure.dpi
