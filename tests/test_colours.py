"""What one figure draws in different colours stays apart for colour-blind readers too.

The three kinds of colour blindness are simulated as complete (Machado, Oliveira and Fernandes 2009,
"A physiologically-based model for simulation of color vision deficiency", severity 1).  Colours are
compared in CIE L*a*b* (CIE76), where 2.3 is just noticeable.
"""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from puma_study import figures, printed, survey
from puma_study.figures import claimed, row_styles
from pumalib.config import METHODS
from pumalib.data.paper import expected
from pumalib.losses import list_losses

# The least difference between two colours that mean different things in one figure.
LEAST = 20

# Of linear red, green and blue (Machado et al. 2009, Table 1, severity 1).
VISIONS = {
    "all three cones": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# From linear red, green and blue to XYZ (IEC 61966-2-1, white D65).
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
WHITE = TO_XYZ.sum(axis=1)


def linear(colour):
    """Red, green and blue (3,) of a colour of matplotlib, proportional to light."""
    coded = np.array(to_rgb(colour))
    return np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)


def lab(light):
    """L*, a* and b* (3,) of linear red, green and blue (3,)."""
    x, y, z = TO_XYZ @ light.clip(0, 1) / WHITE
    x, y, z = (
        part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z)
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(one, other):
    """The difference of two colours in the vision that tells them apart worst."""
    differences = []
    for matrix in VISIONS.values():
        seen = [lab(np.array(matrix) @ linear(colour)) for colour in (one, other)]
        differences.append(np.linalg.norm(seen[0] - seen[1]))
    return min(differences)


def too_near(styles):
    """The pairs of a figure's names that neither colour nor marker tells apart."""
    found = []
    for (one, its), (other, that) in itertools.combinations(styles.items(), 2):
        if its.marker == that.marker and difference(its.colour, that.colour) < LEAST:
            found.append((one, other))
    return found


def test_differences_are_those_of_the_standard():
    assert lab(linear("white")) == pytest.approx([100, 0, 0], abs=0.01)
    # Bruce Lindbloom's calculator, sRGB and D65
    assert lab(linear("#ff0000")) == pytest.approx([53.24, 80.09, 67.20], abs=0.02)
    assert lab(linear("#0000ff")) == pytest.approx([32.30, 79.19, -107.86], abs=0.02)
    # A pair that readers without one kind of cone confuse, though it is wide apart for others.
    seen = [lab(linear(colour)) for colour in (figures.OURS.colour, figures.TRUE)]
    assert np.linalg.norm(seen[0] - seen[1]) > 100
    assert difference(figures.OURS.colour, figures.TRUE) < 10


@pytest.mark.parametrize("colour", [*figures.COLOURS, figures.OURS.colour])
def test_every_colour_of_rows_is_apart_from_every_other_and_from_the_page(colour):
    others = {*figures.COLOURS, figures.OURS.colour, row_styles.BLACK} - {colour}
    near = {other: difference(colour, other) for other in others}
    assert min(near.values()) >= LEAST, near
    assert difference(colour, "white") >= LEAST


@pytest.mark.parametrize(
    "colours",
    [
        set(claimed.READINGS.values()),
        {row_styles.ABOVE, row_styles.BELOW, figures.GREY, row_styles.BLACK},
        {figures.TRUE, figures.FALSE, row_styles.BLACK},
    ],
    ids=["readings", "differences", "retrieval"],
)
def test_colours_with_a_meaning_are_apart_within_their_figures(colours):
    assert len(colours) >= 3
    for one, other in itertools.combinations(colours, 2):
        assert difference(one, other) >= LEAST, (one, other)


# Names that stand in one figure.
TOGETHER = {
    **{f"table {number}": list(printed.table(number).index) for number in (2, 3, 5, 7, 8)},
    "methods": list(METHODS),
    "losses": list_losses(),
    "survey": list(survey.LOSSES),
    "seeds": [f"seed {number}" for number in range(5)],
}


@pytest.mark.parametrize("figure", TOGETHER)
def test_rows_of_a_figure_differ_in_colour_or_in_marker(figure):
    styles = figures.styles_of(map(figures.shown, TOGETHER[figure]))
    assert len(styles) >= 4
    assert too_near(styles) == []


def test_a_name_has_one_line_whatever_stands_beside_it():
    for names in TOGETHER.values():
        for name in map(figures.shown, names):
            if name in figures.ROW_STYLES:
                alone = row_styles.dashes_of(figures.styles_of([name]))
                beside = row_styles.dashes_of(figures.styles_of(map(figures.shown, names)))
                assert alone[name] == beside[name], name


def test_losses_of_one_colour_in_a_figure_differ_in_their_lines():
    styles = figures.styles_of(map(figures.shown, survey.LOSSES))
    lines = row_styles.dashes_of(styles)
    looks = {(style.colour, str(lines[name])) for name, style in styles.items()}
    assert len(looks) == len(styles)


# Maps and waffle charts have no markers: colour alone carries the dataset.
DATASETS = {
    "mini": ["glyphs", "garments", "digits", "vehicles", "photos", "birds", "aircraft", "flowers"],
    "photographs": [
        "animals",
        "birds",
        "cars",
        "characters",
        "emoji",
        "faces",
        "flowers",
        "objects",
    ],
    "paper": list(expected()["dataset"].unique()),
}


@pytest.mark.parametrize("benchmark", DATASETS)
def test_datasets_differ_in_colour(benchmark):
    styles = figures.styles_of(DATASETS[benchmark])
    assert len(styles) == 8
    for one, other in itertools.combinations(styles, 2):
        apart = difference(styles[one].colour, styles[other].colour)
        assert apart >= LEAST, (one, other)
