"""Draws docs/schematic.png, the first picture of README.md and of notebook 20: `.venv/bin/python docs/schematic.py`."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Route

from pumalib.figures import COLOURS, OURS, save


def schematic():
    """PUMA as a picture (Figs. 1 and 3): one model for eight datasets, and what in it is frozen and what is trained."""
    figure, axis = plt.subplots(figsize=(7.2, 7.9))  # coordinates are inches; a box is x, y, width, height, text
    new, old, ink, round_box = OURS[0], "#bfd0e2", "#24384c", "round,pad=0,rounding_size=0.05"
    font, rng = {"size": 12, "ha": "center", "va": "center_baseline", "linespacing": 1.1}, np.random.default_rng(1)
    frozen = [(0.27, 3.3, 1.2, 1.3, "one\nmodel"), (0.37, 0.6, 1, 0.3, "frozen"), (2.15, 3, 0.8, 0.5, "class\ntoken")]
    frozen += [(5.1, 1.78, 1.8, 0.38, "patch embedding"), (4.65, 3, 2.2, 0.5, "patches $E$")]
    trained = [(1.28, 3.5, 0.1, 0.9, ""), (0.42, 3.39, 0.7, 0.1, ""), (0.37, 0.2, 1, 0.3, "trained")]
    trained += [(3, 3, 1.6, 0.5, r"prompt $\hat P$"), (2.95, 7.2, 1.7, 0.4, "linear head")]
    trained += [(x, 0.71 + 0.21 * n, 0.5, 0.14, "") for x in (2.22, 2.9, 4.2) for n in range(4)]
    plain = [(2.08, 2.93, 4.84, 0.64, ""), (2.08, 3.74, 4.84, 3.26, ""), (2.08, 0.25, 2.75, 2.2, "")]
    texts = [(0.87, 2.83, 0, 0, "eight datasets"), (0.87, 7.12, 0, 0, "one embedding\nspace"), (6, 0.37, 0, 0, "image")]
    texts += [(5.75, 7.4, 0, 0, "embedding"), (2.9, 6.78, 0, 0, "$L$ blocks"), (3.46, 2.25, 0, 0, "prompt pool")]
    texts += [(4.6, 2.7, 0, 0, r"$\hat P=\sum_m\,\alpha_m P_m$"), (3.46, 1.97, 0, 0, r"query $q=$ avg $E+$ max $E$")]
    texts += [(3.46, 0.48, 0, 0, r"$\alpha_m=\cos(q\odot A_m,\,K_m)$"), (2.47, 1.65, 0, 0, "$A_m$")]
    texts += [(3.15, 1.65, 0, 0, "$K_m$"), (3.8, 1.65, 0, 0, r"$\alpha_m$"), (4.45, 1.65, 0, 0, "$P_m$")]
    arrows = [[3.8, 2.45, 3.8, 3], [6, 1.57, 6, 1.78], [6, 2.16, 6, 3], [5.1, 1.97, 4.83, 1.97]]
    arrows += [[3.8, 6.58, 3.8, 7.2], [4.65, 7.4, 5.2, 7.4], [0.87, 3, 0.87, 3.3], [0.87, 4.6, 0.87, 5.35]]
    inside = [[3.8, 0.32, 3.8, 0.54], [3.8, 0.42, 5.5, 0.42, 5.5, 0.54], [3.8, 0.9, 3.8, 1.02], [5.5, 0.9, 5.5, 1.0]]
    inside += [[4.8, 1.15, 3.93, 1.15], [3.8, -0.03, 2.5, -0.03, 2.5, 1.15, 3.67, 1.15]]
    for low, start, branch in ((3.9, 3.57, "MSA"), (5.3, 5.18, "MLP")):  # Eq. 5
        frozen += [(3.5, low + 0.08, 0.6, 0.24, "LN"), (2.95, low + 0.54, 1.7, 0.36, branch)]
        plain += [(3.67, low + 1.02, 0.26, 0.26, "+"), (4.8, low + 1, 1.7, 0.3, r"$\gamma$ ~ Bernoulli($p$)")]
        trained += [(5.0, low + 0.54, 1, 0.36, "adapter")]
        arrows += [[3.8, start, 3.8, low + 0.08], *(np.add(each, [0, low] * (len(each) // 2)) for each in inside)]
    axis.fill([1.47, 1.95, 7.1, 7.1, 1.95, 1.47], [3.3, 0.1, 0.1, 7.8, 7.8, 4.6], color="#e9eff5", linewidth=0)
    for n, marker in enumerate("os^DvPXp"):  # a dataset is a tile below and a cluster in the space above
        x, y, turn = 0.28 + 0.74 * (n % 2), 1.3 + 0.4 * (n // 2), n * np.pi / 4
        plain += [(x - 0.13, y - 0.16, 0.64, 0.32, "")]
        cluster = rng.normal([[0.87 + 0.44 * np.cos(turn)], [6.05 + 0.44 * np.sin(turn)]], 0.05, (2, 6))
        axis.plot(*np.c_[cluster, [[x, x + 0.19, x + 0.38], [y] * 3]], marker, color=COLOURS[n], ms=5, mew=0, zorder=2)
    for fill, edge, boxes in (("w", "#9ab", plain), (old, old, frozen), (new, new, trained), ("none", "none", texts)):
        for x, y, width, height, text in boxes:
            axis.add_patch(FancyBboxPatch((x, y), width, height, round_box, facecolor=fill, edgecolor=edge))
            axis.text(x + width / 2, y + height / 2, text, font, color="white" if fill == new else ink)
    for route in (Route(np.reshape(arrow, (-1, 2))) for arrow in arrows):
        axis.add_patch(FancyArrowPatch(path=route, arrowstyle="-|>", mutation_scale=9, color=ink))
    axis.add_patch(Circle((0.87, 6.05), 0.68, facecolor="none", edgecolor=ink))
    axis.barh([0.78, 0.99, 1.2, 1.41], [0.2, 0.35, 0.1, 0.5], 0.14, left=3.55, color=ink)
    x, y = np.mgrid[-1:1:96j, -1:1:96j]  # the image: a flower
    flower = (np.hypot(x, y) < 0.65 + 0.2 * np.cos(6 * np.arctan2(y, x))) + 1.0 * (np.hypot(x, y) < 0.2)
    flower[::24] = flower[:, ::24] = np.nan  # between patches
    axis.imshow(flower, cmap="summer", extent=(5.5, 6.5, 0.55, 1.55), zorder=2)
    axis.set(xlim=(0, 7.2), ylim=(0, 7.9), xticks=[], yticks=[], frame_on=False)
    return figure


if __name__ == "__main__":
    save(schematic(), Path(__file__).with_suffix(".png"))
