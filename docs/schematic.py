"""Draw docs/schematic.png and .svg, the picture of README.md, of notebook 20 and the report.

    .venv/bin/python docs/schematic.py

The units of all coordinates are inches, from the lower left corner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Route

from puma_study.figures import COLOURS, save, use_style
from puma_study.figures.row_styles import AMBER, BLACK

WIDTH = 7.2
HEIGHT = 7.9
INK = "#24384c"
TRAINED = "#f2b84b"
FROZEN = "#bfd0e2"
OUTLINE = "#9ab"
MODEL = "#e9eff5"

# The lower edges of the two layers of a block, and the middle of its residual stream
MSA_LAYER = 3.9
MLP_LAYER = 5.3
STREAM = 3.8
ADAPTER = 5.5
GATE = 4.8

# The columns of the prompt pool
ATTENTION = 2.22
KEY = 2.9
WEIGHT = 3.55
PROMPT = 4.2
POOL_BOTTOM = 0.71
POOL_STEP = 0.21

# One marker and one colour per dataset of the paper, and the middle of the space they share
DATASETS = "os^DvPXp"
# Amber is too close to `TRAINED`.
DATASET_COLOURS = [BLACK if colour == AMBER else colour for colour in COLOURS]
SPACE = (0.87, 6.05)


@dataclass(frozen=True)
class Box:
    """A box with round corners and a text in its middle; without a size it is the text alone."""

    x: float
    y: float
    width: float = 0
    height: float = 0
    text: str = ""


# A corner on the way of an arrow
Point = tuple[float, float]


def schematic() -> Figure:
    """PUMA as a picture (Figs. 1 and 3).

    One model for eight datasets, with its frozen and its trained parts.
    """
    figure, axis = plt.subplots(figsize=(WIDTH, HEIGHT))
    draw_zoom(axis)
    draw_datasets(axis)
    draw_boxes(axis, outlined_boxes(), face="w", edge=OUTLINE)
    draw_boxes(axis, frozen_boxes(), face=FROZEN, edge=FROZEN)
    draw_boxes(axis, trained_boxes(), face=TRAINED, edge=TRAINED)
    draw_boxes(axis, texts(), face="none", edge="none")
    for way in arrows():
        draw_arrow(axis, way)
    axis.add_patch(Circle(SPACE, 0.68, facecolor="none", edgecolor=INK))
    draw_weights(axis)
    draw_image(axis)
    axis.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), xticks=[], yticks=[], frame_on=False)
    return figure


def outlined_boxes() -> list[Box]:
    """What holds other boxes, and what has no weights."""
    boxes = [
        # The tokens, the blocks and the prompt pool
        Box(2.08, 2.93, 4.84, 0.64),
        Box(2.08, 3.74, 4.84, 3.26),
        Box(2.08, 0.25, 2.75, 2.2),
    ]
    for low in (MSA_LAYER, MLP_LAYER):
        boxes.append(Box(3.67, low + 1.02, 0.26, 0.26, "+"))
        boxes.append(Box(GATE, low + 1, 1.7, 0.3, r"$\gamma$ ~ Bernoulli($p$)"))
    for number in range(len(DATASETS)):
        x, y = dataset_tile(number)
        boxes.append(Box(x - 0.13, y - 0.16, 0.64, 0.32))
    return boxes


def frozen_boxes() -> list[Box]:
    """The backbone."""
    boxes = [
        Box(0.27, 3.3, 1.2, 1.3, "one\nmodel"),
        Box(0.37, 0.6, 1, 0.3, "frozen"),
        Box(2.15, 3, 0.8, 0.5, "class\ntoken"),
        Box(5.1, 1.78, 1.8, 0.38, "patch embedding"),
        Box(4.65, 3, 2.2, 0.5, "patches $E$"),
    ]
    # A block, Eq. 5
    for low, branch in ((MSA_LAYER, "MSA"), (MLP_LAYER, "MLP")):
        boxes.append(Box(3.5, low + 0.08, 0.6, 0.24, "LN"))
        boxes.append(Box(2.95, low + 0.54, 1.7, 0.36, branch))
    return boxes


def trained_boxes() -> list[Box]:
    """The parts that PUMA adds and trains."""
    boxes = [
        # The small part that is added to the one model at the left
        Box(1.28, 3.5, 0.1, 0.9),
        Box(0.42, 3.39, 0.7, 0.1),
        Box(0.37, 0.2, 1, 0.3, "trained"),
        Box(3, 3, 1.6, 0.5, r"prompt $\hat P$"),
        Box(2.95, 7.2, 1.7, 0.4, "linear head"),
    ]
    for x in (ATTENTION, KEY, PROMPT):
        for number in range(4):
            boxes.append(Box(x, POOL_BOTTOM + POOL_STEP * number, 0.5, 0.14))
    for low in (MSA_LAYER, MLP_LAYER):
        boxes.append(Box(5.0, low + 0.54, 1, 0.36, "adapter"))
    return boxes


def texts() -> list[Box]:
    """The texts without a box."""
    return [
        Box(0.87, 2.83, text="eight datasets"),
        Box(0.87, 7.12, text="one embedding\nspace"),
        Box(6, 0.37, text="image"),
        Box(5.75, 7.4, text="embedding"),
        Box(2.9, 6.78, text="$L$ blocks"),
        Box(3.46, 2.25, text="prompt pool"),
        Box(4.6, 2.7, text=r"$\hat P=\sum_m\,\alpha_m P_m$"),
        Box(3.46, 1.97, text=r"query $q=$ avg $E+$ max $E$"),
        Box(3.46, 0.48, text=r"$\alpha_m=\cos(q\odot A_m,\,K_m)$"),
        Box(2.47, 1.65, text="$A_m$"),
        Box(3.15, 1.65, text="$K_m$"),
        Box(3.8, 1.65, text=r"$\alpha_m$"),
        Box(4.45, 1.65, text="$P_m$"),
    ]


def arrows() -> list[list[Point]]:
    """What flows where."""
    ways: list[list[Point]] = [
        # The prompt; the image, its patches, and the query that they are
        [(STREAM, 2.45), (STREAM, 3)],
        [(6, 1.57), (6, 1.78)],
        [(6, 2.16), (6, 3)],
        [(5.1, 1.97), (4.83, 1.97)],
        # Out of the blocks, and of the head
        [(STREAM, 6.58), (STREAM, 7.2)],
        [(4.65, 7.4), (5.2, 7.4)],
        # From the datasets through the one model into the one space
        [(0.87, 3), (0.87, 3.3)],
        [(0.87, 4.6), (0.87, 5.35)],
    ]
    ways += layer_arrows(MSA_LAYER, start=3.57)
    ways += layer_arrows(MLP_LAYER, start=5.18)
    return ways


def layer_arrows(low: float, start: float) -> list[list[Point]]:
    """The ways through the layer whose lower edge is `low`, from `start` below it (Eq. 5)."""
    inside: list[list[Point]] = [
        # Through the branch of the backbone, and beside it through the adapter
        [(STREAM, 0.32), (STREAM, 0.54)],
        [(STREAM, 0.42), (ADAPTER, 0.42), (ADAPTER, 0.54)],
        # Both are added to the stream, the adapter's through its gate
        [(STREAM, 0.9), (STREAM, 1.02)],
        [(ADAPTER, 0.9), (ADAPTER, 1.0)],
        [(GATE, 1.15), (3.93, 1.15)],
        # The residual connection
        [(STREAM, -0.03), (2.5, -0.03), (2.5, 1.15), (3.67, 1.15)],
    ]
    ways: list[list[Point]] = [[(STREAM, start), (STREAM, low + 0.08)]]
    for way in inside:
        ways.append([(x, y + low) for x, y in way])
    return ways


def dataset_tile(number: int) -> Point:
    """Where the first of the three points of a dataset's tile lies: two tiles in a line."""
    return 0.28 + 0.74 * (number % 2), 1.3 + 0.4 * (number // 2)


def draw_zoom(axis: Axes) -> None:
    """The shadow by which the small model at the left becomes the large one at the right."""
    x = [1.47, 1.95, 7.1, 7.1, 1.95, 1.47]
    y = [3.3, 0.1, 0.1, 7.8, 7.8, 4.6]
    axis.fill(x, y, color=MODEL, linewidth=0)


def draw_datasets(axis: Axes) -> None:
    """A dataset is three points in a tile below and a cluster in the space above."""
    rng = np.random.default_rng(1)
    for number, marker in enumerate(DATASETS):
        turn = number * np.pi / 4
        centre = [[SPACE[0] + 0.44 * np.cos(turn)], [SPACE[1] + 0.44 * np.sin(turn)]]
        cluster = rng.normal(centre, 0.05, (2, 6))
        x, y = dataset_tile(number)
        tile = [[x, x + 0.19, x + 0.38], [y, y, y]]
        points = np.concatenate([cluster, tile], axis=1)
        axis.plot(
            points[0], points[1], marker, color=DATASET_COLOURS[number], ms=5, mew=0, zorder=2
        )


def draw_boxes(axis: Axes, boxes: Sequence[Box], face: str, edge: str, ink: str = INK) -> None:
    """Boxes of one colour, with their texts in `ink`."""
    corners = "round,pad=0,rounding_size=0.05"
    font = {"size": 13, "ha": "center", "va": "center_baseline", "linespacing": 1.1}
    for box in boxes:
        corner = (box.x, box.y)
        shape = FancyBboxPatch(
            corner, box.width, box.height, corners, facecolor=face, edgecolor=edge
        )
        axis.add_patch(shape)
        x = box.x + box.width / 2
        y = box.y + box.height / 2
        # Formulas, which other figures have not.
        axis.text(x, y, box.text, font, color=ink, parse_math=True)


def draw_arrow(axis: Axes, way: Sequence[Point]) -> None:
    """An arrow with square corners, along `way`."""
    arrow = FancyArrowPatch(path=Route(way), arrowstyle="-|>", mutation_scale=9, color=INK)
    axis.add_patch(arrow)


def draw_weights(axis: Axes) -> None:
    """How much of each prompt of the pool is taken."""
    heights = [0.78, 0.99, 1.2, 1.41]
    axis.barh(heights, [0.2, 0.35, 0.1, 0.5], 0.14, left=WEIGHT, color=INK)


def draw_image(axis: Axes) -> None:
    """A flower, cut into patches."""
    x, y = np.mgrid[-1:1:96j, -1:1:96j]
    radius = np.hypot(x, y)
    petals = radius < 0.65 + 0.2 * np.cos(6 * np.arctan2(y, x))
    middle = radius < 0.2
    flower = petals + 1.0 * middle
    # The lines between the patches
    flower[::24] = np.nan
    flower[:, ::24] = np.nan
    axis.imshow(flower, cmap="cividis", extent=(5.5, 6.5, 0.55, 1.55), zorder=2)


if __name__ == "__main__":
    use_style()
    for ending in (".png", ".svg"):
        save(schematic(), Path(__file__).with_suffix(ending))
