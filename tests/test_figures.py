"""Figures draw the numbers they are given, name by name in its own style, and change no setting."""

import importlib
import itertools
import os
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import is_color_like, rgb_to_hsv, same_color, to_hex, to_rgb
from matplotlib.container import ErrorbarContainer
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from PIL import Image

import puma_study
from puma_study import figures, printed, reading
from puma_study.figures import (
    Gap,
    Picture,
    RowStyle,
    Text,
    claimed,
    labels,
    row_styles,
    style,
)
from puma_study.figures.pictures import PICTURE_WIDTH
from pumalib import config, paths
from pumalib.data import Benchmark
from tools import page_rows

DATASETS = ("unified", "a", "b", "harmonic")
# The shown name of the row VPT
VPT = "Visual prompt (VPT)"


def tidy(*rows):
    """0.4, 0.5, ... for each row and dataset, from 0.1 below to 0.2 above."""
    places = itertools.product(rows, DATASETS)
    values = [(row, name, "R@1", 0.4 + 0.1 * n) for n, (row, name) in enumerate(places)]
    table = pd.DataFrame(values, columns=["row", "dataset", "metric", "value"])
    return table.assign(low=table["value"] - 0.1, high=table["value"] + 0.2)


def numbers(rows, places, **more):
    """A table for `intervals`: 1, 2, ... for each row and place, from 1 below to 2 above."""
    table = pd.DataFrame(itertools.product(rows, places), columns=["row", "place"])
    table["value"] = np.arange(1.0, len(table) + 1)
    return table.assign(low=table["value"] - 1, high=table["value"] + 2, **more)


def points(**rows):
    """A table for `against`: x by row, y = 10 x."""
    table = pd.DataFrame({"row": list(rows), "x": list(rows.values())})
    table["value"] = 10 * table["x"]
    return table.assign(low=table["value"] - 1, high=table["value"] + 2)


def bars(axis):
    """The drawn intervals by label: x, y, low, high and style."""
    drawn = {}
    for bar in axis.containers:
        if isinstance(bar, ErrorbarContainer):
            dots, _, (intervals,) = bar.lines
            # (intervals, ends, x and y)
            ends = np.reshape(intervals.get_segments(), (-1, 2, 2))
            along = ends[:, :, 1] if bar.has_yerr else ends[:, :, 0]
            drawn[bar.get_label()] = {
                "x": list(dots.get_xdata()),
                "y": list(dots.get_ydata()),
                "low": list(along[:, 0]),
                "high": list(along[:, 1]),
                "style": RowStyle(to_hex(dots.get_color()), dots.get_marker()),
            }
    return drawn


def lines(axis):
    """The lines of an axis by label, those without one left out."""
    return {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}


def is_grey(colour):
    return rgb_to_hsv(to_rgb(colour))[1] < 0.2


def degrees_between(one, other):
    """How far apart two hues lie on the circle of colours."""
    hues = [360 * rgb_to_hsv(to_rgb(colour))[0] for colour in (one, other)]
    apart = abs(hues[0] - hues[1])
    return min(apart, 360 - apart)


def titles(figure):
    return [axis.get_title() for axis in figure.axes if axis.axison]


def ticks(axis):
    return [label.get_text() for label in axis.get_xticklabels()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.fixture
def benchmark(tmp_path):
    """Files of two datasets, "a" with 6 classes of 4 images, "b" with 2 of 9; odd classes are test.

    An image of class n is of the grey 20 n all over.
    """
    classes = [("a", n) for n in range(6) for _ in range(4)]
    classes += [("b", 6 + n) for n in range(2) for _ in range(9)]
    images = pd.DataFrame(classes, columns=["dataset", "label"])
    images["class_name"] = images["label"].map("class {}".format)
    images["path"] = [f"{number}.png" for number in images.index]
    images["split"] = np.where(images["label"] % 2, "test", "train")
    for path, label in zip(images["path"], images["label"]):
        Image.new("L", (40, 20), 20 * label).save(tmp_path / path)
    return Benchmark("folders", images, root=tmp_path)


@pytest.mark.parametrize("name", [r"$\foo$", "$$", "a_b^c{", "%s {x} %(y)s"])
def test_a_name_is_no_formula(name, tmp_path):
    table = tidy(name, "other").replace({"dataset": {"a": name}})
    drawn = [
        figures.intervals(numbers([name, "b"], [name, "d"]), "R@1 (%)"),
        figures.accuracy_against_parameters(table, {name: 10, "other": 10_000}),
    ]
    for figure in drawn:
        file = figures.save(figure, tmp_path / "figure.png")
        assert file.stat().st_size > 1000
        texts = [text.get_text() for text in figure.findobj(plt.Text)]
        assert name in texts


CHANGED_SETTINGS = """
import sys
import matplotlib
import pandas as pd

def settings():
    # _get: asking for the backend in the usual way would choose one
    found = {name: str(matplotlib.rcParams._get(name)) for name in matplotlib.rcParams}
    found["pandas"] = pd.describe_option("", _print_desc=False)
    return found

before = settings()
from puma_study import figures
after = settings()
print("by importing:", [name for name in before if before[name] != after[name]])

table = pd.DataFrame({"row": ["PUMA"], "x": [1], "value": [1], "low": [0], "high": [2]})
figures.save(figures.against({"title": table}, "x", "y"), sys.argv[1])
after = settings()
# With the first figure matplotlib chooses a backend
changed = [name for name in before if before[name] != after[name] and name != "backend"]
print("by drawing:", changed)
"""


class TestSettings:
    """Of matplotlib and pandas: they are the user's."""

    def test_importing_and_drawing_changes_none(self, tmp_path):
        environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
        done = subprocess.run(
            [sys.executable, "-c", CHANGED_SETTINGS, str(tmp_path / "figure.png")],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines() == ["by importing: []", "by drawing: []"]

    def test_a_figure_is_in_style_whatever_the_settings_are(self, tmp_path):
        table = {"title": points(PUMA=1.0, VPT=2.0)}
        with plt.rc_context({"font.size": 20, "axes.grid": False, "grid.color": "red"}):
            elsewhere = figures.save(figures.against(table, "x", "y"), tmp_path / "one.png")
        here = figures.save(figures.against(table, "x", "y"), tmp_path / "two.png")
        assert elsewhere.read_bytes() == here.read_bytes()

    def test_an_error_leaves_them_as_they_were(self):
        with plt.rc_context({"font.size": 20}):
            with pytest.raises(ValueError, match="unknown metric 'R@9'; known: R@1"):
                figures.curves(tidy("p 1"), {"p 1": ("PUMA", 1)}, "number", metric="R@9")
            with pytest.raises(KeyError):
                figures.against({"title": pd.DataFrame({"row": ["PUMA"]})}, "x", "y")
            assert plt.rcParams["font.size"] == 20

    def test_what_else_is_set_while_drawing_stays(self):
        """A notebook's backend, loaded with the first figure, sets interactive mode."""

        @style.styled
        def draw():
            plt.rcParams["interactive"] = True
            return plt.rcParams["font.size"]

        with plt.rc_context({"interactive": False, "font.size": 20}):
            assert draw() == figures.STYLE["font.size"]
            assert plt.rcParams["interactive"] is True
            assert plt.rcParams["font.size"] == 20

    def test_a_notebook_may_ask_for_them(self):
        shown = ("display.max_colwidth", "display.max_rows")
        before = {name: pd.get_option(name) for name in shown}
        try:
            with plt.rc_context():
                figures.use_style()
                assert {name: plt.rcParams[name] for name in figures.STYLE} == figures.STYLE
                assert [pd.get_option(name) for name in shown] == [None, 200]
        finally:
            for name, value in before.items():
                pd.set_option(name, value)


class TestRowStyles:
    def test_every_line_of_the_table_can_be_drawn(self):
        for name, (colour, marker, line) in figures.ROW_STYLES.items():
            assert is_color_like(colour), name
            assert marker in Line2D.markers, name
            assert Line2D([], [], linestyle=line), name

    @pytest.mark.parametrize("place", ["first", "last"])
    def test_a_new_method_repaints_none(self, place, monkeypatch):
        new = {"mine": config.METHODS["vpt"]}
        known = config.METHODS
        methods = {**new, **known} if place == "first" else {**known, **new}
        monkeypatch.setattr(config, "METHODS", methods)
        monkeypatch.setattr(puma_study, "figures", figures)
        for name in [name for name in sys.modules if name.startswith("puma_study.figures")]:
            monkeypatch.delitem(sys.modules, name)
        anew = importlib.import_module("puma_study.figures")
        assert anew is not figures
        assert {name: anew.styles_of(methods)[name] for name in known} == figures.styles_of(known)

    def test_a_row_of_the_paper_is_called_and_drawn_as_its_method(self):
        for row, method in printed.METHOD_OF_ROW.items():
            assert figures.shown(row) == figures.shown(method), row
            assert figures.styles_of([row])[row] == figures.styles_of([method])[method], row

    def test_a_method_with_a_loss_has_both_names_and_a_loss_with_a_setting_its_own(self):
        assert figures.shown("full, npair") == "Full fine-tuning, N-pair"
        assert figures.shown("CurricularFace, margin") == "CurricularFace, margin"

    def test_of_a_method_at_a_length_the_length_follows(self):
        assert figures.shown("full x 1") == "Full fine-tuning, usual epochs"
        assert figures.shown("puma x 0.25") == "PUMA, 0.25 times the epochs"
        assert figures.shown("72 x 3") == "72 x 3"

    def test_full_fine_tuning_has_one_name(self):
        names = ("full", "full fine-tuning", "universal CurricularFace")
        assert {figures.shown(name) for name in names} == {"Full fine-tuning"}

    def test_the_pages_call_rows_as_the_figures_do(self):
        assert len(page_rows.ROWS) > 15
        for row in page_rows.ROWS.values():
            # A length's row is named by its rate in pages, by its length in figures.
            if row.file != "training_length":
                assert figures.shown(row.row) == row.name

    def test_datasets_have_short_names(self):
        found = set()
        for file in (paths.ROOT / "data").glob("photos*/split.csv"):
            found |= set(pd.read_csv(file)["path"].str.partition("/")[0])
        assert len(found) >= 8
        assert all(
            len(figures.shown(name)) <= 10 and "_" not in figures.shown(name) for name in found
        )

    @pytest.mark.parametrize("number", [2, 3, 7])
    def test_the_rows_of_a_table_of_the_paper_are_told_apart(self, number):
        rows = printed.table(number).index
        assert {figures.shown(row) for row in rows} <= set(figures.ROW_STYLES)
        assert len(set(figures.styles_of(rows).values())) == len(rows)

    @pytest.mark.parametrize("colour", [figures.OURS.colour, figures.TRUE, figures.FALSE])
    def test_a_hue_with_a_meaning_means_nothing_else(self, colour):
        """No other colour is within 25 degrees of the hues of PUMA, of true, and of false."""
        others = set()
        for name, style_of_name in figures.ROW_STYLES.items():
            # PUMA of another dimension or backbone is PUMA.
            if name != "PUMA" and not name.startswith("PUMA, "):
                others.add(style_of_name.colour)
        others |= {
            *figures.COLOURS,
            row_styles.ABOVE,
            row_styles.BELOW,
            figures.GREY,
            row_styles.BLACK,
        }
        meant = {figures.OURS.colour, figures.TRUE, figures.FALSE}
        assert figures.styles_of(["puma"])["puma"] == figures.OURS
        if colour == figures.FALSE:
            # Brown and amber are of its hue, and of another lightness.
            assert colour not in others | meant - {colour}
            return
        for other in others | meant - {colour}:
            assert is_grey(other) or degrees_between(colour, other) > 25, other

    def test_a_name_without_a_line_is_drawn_by_its_name_alone(self):
        mine = figures.styles_of(["mine"])["mine"]
        # As on every machine and in every process
        assert mine == RowStyle("#9f5717", "P")
        assert figures.styles_of(["PUMA", "VPT", "mine", "other"])["mine"] == mine
        assert figures.styles_of(["other", "mine", "frozen"])["mine"] == mine

    def test_names_without_a_line_are_told_apart_within_a_figure(self):
        names = [f"row {number}" for number in range(40)]
        found = figures.styles_of(["PUMA", *names, "VPT"])
        assert list(found) == ["PUMA", *names, "VPT"]
        assert len({found[name].colour for name in names[:8]}) == 8
        assert len({found[name] for name in names}) == 40
        assert found["VPT"] == figures.ROW_STYLES[VPT]

    def test_a_row_that_comes_later_repaints_none(self):
        names = [f"row {number}" for number in range(12)]
        found = figures.styles_of(names)
        for count in range(1, len(names)):
            assert figures.styles_of(names[:count]).items() <= found.items()

    def test_a_figure_has_them(self):
        table = points(PUMA=1.0, VPT=2.0, mine=3.0)
        drawn = bars(figures.against({"": table}, "x", "y").axes[0])
        expected = figures.styles_of(table["row"].map(figures.shown))
        assert {name: bar["style"] for name, bar in drawn.items()} == expected


class TestIntervals:
    def test_rows_stand_side_by_side_with_their_numbers(self):
        table = numbers(["VPT", "PUMA"], ["a", "b"])
        figure = figures.intervals(table, "R@1 (%)", "what it shows", xlabel="where")
        (axis,) = figure.axes
        assert bars(axis) == {
            VPT: {
                "x": pytest.approx([-0.2, 0.8]),
                "y": [1, 2],
                "low": [0, 1],
                "high": [3, 4],
                "style": figures.ROW_STYLES[VPT],
            },
            "PUMA": {
                "x": pytest.approx([0.2, 1.2]),
                "y": [3, 4],
                "low": [2, 3],
                "high": [5, 6],
                "style": figures.ROW_STYLES["PUMA"],
            },
        }
        assert ticks(axis) == ["a", "b"]
        assert (axis.get_xlabel(), axis.get_ylabel()) == ("where", "R@1 (%)")
        assert figure.get_suptitle() == "what it shows"
        assert legend(figure) == [VPT, "PUMA"]

    def test_one_row_stands_at_its_places_and_needs_no_legend(self):
        figure = figures.intervals(numbers(["PUMA"], ["a", "b"]), "R@1 (%)")
        assert bars(figure.axes[0])["PUMA"]["x"] == [0, 1]
        assert figure.legends == []

    def test_overall_accuracies_are_last_and_shaded(self):
        table = numbers(["PUMA"], ["harmonic", "a", "unified", "b"])
        (axis,) = figures.intervals(table, "R@1 (%)").axes
        assert ticks(axis) == ["a", "b", "unified", "harmonic"]
        assert sorted(zip(bars(axis)["PUMA"]["x"], bars(axis)["PUMA"]["y"])) == [
            (0, 2),
            (1, 4),
            (2, 3),
            (3, 1),
        ]
        assert [(patch.get_x(), patch.get_width()) for patch in axis.patches] == [
            (1.5, 1),
            (2.5, 1),
        ]

    def test_panels_have_their_own_rows_places_and_units(self):
        parts = [numbers(["VPT", "PUMA"], ["1", "2"], panel="one")]
        parts.append(numbers(["PUMA"], ["3"], panel="two"))
        units = {"one": "points", "two": "seconds"}
        figure = figures.intervals(pd.concat(parts), units)
        assert titles(figure) == ["one", "two"]
        assert [axis.get_ylabel() for axis in figure.axes] == ["points", "seconds"]
        assert [ticks(axis) for axis in figure.axes] == [["1", "2"], ["3"]]
        assert [list(bars(axis)) for axis in figure.axes] == [[VPT, "PUMA"], ["PUMA"]]

    def test_panels_without_data_are_hidden(self):
        parts = [numbers(["PUMA"], ["1"], panel=f"panel {number}") for number in range(5)]
        figure = figures.intervals(pd.concat(parts), "R@1 (%)")
        assert len(figure.axes) == 8
        assert titles(figure) == [f"panel {number}" for number in range(5)]

    def test_what_is_printed_is_hollow(self):
        table = numbers(["VPT", "PUMA"], ["a", "b"], printed=[np.nan, 7.0, 8.0, 9.0])
        (axis,) = figures.intervals(table, "R@1 (%)").axes
        hollow = [line for line in axis.lines if line.get_markerfacecolor() == "none"]
        assert [list(line.get_ydata()) for line in hollow] == [
            pytest.approx([np.nan, 7], nan_ok=True),
            [8, 9],
        ]
        assert [line.get_marker() for line in hollow] == [figures.ROW_STYLES[VPT].marker, "*"]
        assert list(hollow[0].get_xdata()) == bars(axis)[VPT]["x"]

    def test_more_than_two_lines_have_error_bars_and_their_own_dashes(self):
        rows = ["PUMA", "VPT", "frozen", "mine"]
        (axis,) = figures.intervals(numbers(rows, ["1", "2"]), "R@1 (%)", joined=True).axes
        assert set(bars(axis)) == {"PUMA", VPT, "Frozen backbone", "mine"}
        assert [one for one in axis.collections if "FillBetween" in type(one).__name__] == []
        # Beside each other, and the frozen backbone alone is dashed.
        starts = {tuple(bar["x"]) for bar in bars(axis).values()}
        assert len(starts) == 4
        dashed = {}
        for bar in axis.containers:
            dashed[bar.get_label()] = bar.lines[0].get_linestyle() == "--"
        # "mine" has VPT's colour.
        assert dashed == {"PUMA": False, VPT: False, "Frozen backbone": True, "mine": True}

    def test_zero_is_a_line(self):
        table = numbers(["PUMA"], ["a"])
        (without,) = figures.intervals(table, "points").axes
        (axis,) = figures.intervals(table, "points", zero=True).axes
        assert len(axis.lines) == len(without.lines) + 1
        assert list(axis.lines[-1].get_ydata()) == [0, 0]

    def test_joined_is_a_line_with_a_band_but_not_of_one_point(self):
        table = pd.concat([numbers(["PUMA"], ["1", "2", "3"]), numbers(["VPT"], ["2"])])
        (axis,) = figures.intervals(table, "R@1 (%)", joined=True).axes
        assert list(lines(axis)["PUMA"].get_xdata()) == [0, 1, 2]
        assert list(lines(axis)["PUMA"].get_ydata()) == [1, 2, 3]
        (band,) = [one for one in axis.collections if "FillBetween" in type(one).__name__]
        low, high = band.get_paths()[0].get_extents().intervaly
        assert (low, high) == (0, 5)
        assert list(bars(axis)) == [VPT]
        assert bars(axis)[VPT]["x"] == [1]

    @pytest.mark.parametrize(("length", "angle"), [(3, 0), (40, 40)], ids=["short", "long"])
    def test_long_names_of_places_are_tilted(self, length, angle):
        table = numbers(["PUMA"], ["a" * length, "b" * length, "c" * length])
        (axis,) = figures.intervals(table, "R@1 (%)").axes
        assert {label.get_rotation() for label in axis.get_xticklabels()} == {angle}


# Row, line and place of `curves`
PLACES = {"p 10": ("PUMA", 10), "p 2": ("PUMA", 2), "v 2": ("VPT", 2), "v 10": ("VPT", 10)}


class TestCurves:
    def test_lines_run_over_the_numbers_in_their_order(self):
        table = tidy("p 10", "p 2", "v 10", "v 2", "not drawn")
        figure = figures.curves(table, PLACES, "how many")
        assert titles(figure) == ["unified", "harmonic"]
        axis = figure.axes[0]
        assert ticks(axis) == ["2", "10"]
        assert set(lines(axis)) == {"PUMA", VPT}
        shares = table[table["dataset"] == "unified"].set_index("row")["value"]
        percent = [100 * shares["p 2"], 100 * shares["p 10"]]
        assert list(lines(axis)["PUMA"].get_ydata()) == pytest.approx(percent)
        assert lines(axis)["PUMA"].get_color() == figures.OURS.colour
        assert (axis.get_xlabel(), axis.get_ylabel()) == ("how many", "R@1 (%)")

    def test_panels_are_the_columns_asked_for_in_their_order(self):
        figure = figures.curves(tidy("p 10", "p 2"), PLACES, "how many", columns=["b", "unified"])
        assert titles(figure) == ["b", "unified"]

    def test_numbers_stand_to_scale(self):
        table = tidy("p 1", "p 10", "p 100", "v 1", "v 10", "v 100")
        places = {row: (row[0], int(row[2:])) for row in table["row"].unique()}
        axis = figures.curves(table, places, "how many", title="what it shows").axes[0]
        assert ticks(axis) == ["1", "10", "100"]
        assert list(axis.get_xticks()) == pytest.approx([0, 1, 2])
        shares = numbers(["PUMA"], [0.0, 0.25, 1.0])
        (axis,) = figures.intervals(shares, "points", joined=True).axes
        assert ticks(axis) == ["0", "0.25", "1"]
        assert list(axis.get_xticks()) == [0, 0.5, 2]

    def test_no_band_leaves_0_to_100_percent(self):
        table = tidy("p 10", "p 2").assign(low=-0.2, high=1.3)
        axis = figures.curves(table, PLACES, "how many").axes[0]
        (band,) = [one for one in axis.collections if "FillBetween" in type(one).__name__]
        assert tuple(band.get_paths()[0].get_extents().intervaly) == (0, 100)

    def test_lines_of_one_panel_have_their_names_at_their_ends(self):
        numbers = tidy("p 10", "p 2", "v 10", "v 2")
        figure = figures.curves(numbers, PLACES, "how many", columns=["unified"])
        assert figure.legends == []
        (axis,) = figure.axes
        assert {text.get_text() for text in axis.texts} == {"PUMA", VPT}
        both = figures.curves(numbers, PLACES, "how many")
        assert legend(both) == ["PUMA", VPT]
        assert all(not axis.texts for axis in both.axes)

    def test_the_frozen_backbone_is_a_line_through_the_panel(self):
        table = pd.DataFrame(
            {"row": "frozen", "place": ["1", "2"], "value": 5.0, "low": 4.0, "high": 6.0}
        )
        rest = table.assign(row="PUMA", value=[6.0, 7.0], low=[5.0, 6.0], high=[7.0, 8.0])
        figure = figures.intervals(pd.concat([table, rest]), "how good", joined=True)
        (level,) = [line for line in figure.axes[0].lines if line.get_label() == "Frozen backbone"]
        assert level.get_xdata() == [0, 1]
        assert list(level.get_ydata()) == [5, 5]
        assert level.get_linestyle() == "--"

    def test_another_metric_may_be_drawn(self):
        table = pd.concat([tidy("p 10", "p 2"), tidy("p 10", "p 2").assign(metric="RP", value=0.3)])
        figure = figures.curves(table, PLACES, "how many", metric="RP")
        assert figure.axes[0].get_ylabel() == "RP (%)"
        assert list(lines(figure.axes[0])["PUMA"].get_ydata()) == pytest.approx([30, 30])


class TestAgainst:
    def test_points_with_intervals_in_panels(self):
        panels = {"here": points(PUMA=1.0, VPT=2.0), "there": points(VPT=3.0)}
        figure = figures.against(panels, "how large", "how good")
        assert titles(figure) == ["here", "there"]
        here, there = (bars(axis) for axis in figure.axes)
        of_vpt = figures.ROW_STYLES[VPT]
        assert here[VPT] == {"x": [2], "y": [20], "low": [19], "high": [22], "style": of_vpt}
        assert there[VPT] == {"x": [3], "y": [30], "low": [29], "high": [32], "style": of_vpt}
        assert {(axis.get_xlabel(), axis.get_ylabel()) for axis in figure.axes} == {
            ("how large", "how good")
        }
        # So few points have their names beside them.
        assert figure.legends == []
        assert [text.get_text() for text in figure.axes[0].texts] == ["PUMA", VPT]

    def test_many_points_have_a_legend(self):
        table = points(**{f"row {number}": float(number) for number in range(20)})
        figure = figures.against({"here": table}, "x", "y")
        assert len(legend(figure)) == 20
        assert list(figure.axes[0].texts) == []

    def test_points_may_have_names_of_their_own(self):
        table = pd.concat([points(here=1.0), points(here=2.0)]).assign(point_label=["one", "two"])
        figure = figures.against({"": table}, "x", "y")
        assert [text.get_text() for text in figure.axes[0].texts] == ["one", "two"]

    def test_unified_and_harmonic_have_one_scale(self):
        panels = {"unified": points(PUMA=1.0), "harmonic": points(PUMA=5.0), "a": points(PUMA=9.0)}
        one, two, other = figures.against(panels, "x", "y").axes
        assert one.get_ylim() == two.get_ylim() != other.get_ylim()
        assert one.get_ylim()[0] < 9 and one.get_ylim()[1] > 52

    def test_a_row_without_a_place_is_a_dashed_line(self):
        table = points(PUMA=1.0, frozen=np.nan).fillna({"value": 7.0})
        (axis,) = figures.against({"": table}, "x", "y").axes
        assert list(bars(axis)) == ["PUMA"]
        line = lines(axis)["Frozen backbone"]
        assert list(line.get_ydata()) == [7, 7]
        assert line.get_linestyle() == "--"

    def test_panels_may_have_axes_of_their_own_and_stand_in_lines(self):
        panels = {name: points(PUMA=1.0) for name in "abc"}
        units = {"a": "points", "b": "ms", "c": "MiB"}
        figure = figures.against(panels, units, units, columns=2)
        drawn = [axis for axis in figure.axes if axis.axison]
        assert [axis.get_ylabel() for axis in drawn] == ["points", "ms", "MiB"]
        assert [axis.get_xlabel() for axis in drawn] == ["points", "ms", "MiB"]
        places = [axis.get_subplotspec() for axis in drawn]
        assert [(place.rowspan.start, place.colspan.start) for place in places] == [
            (0, 0),
            (0, 1),
            (1, 0),
        ]

    @pytest.mark.parametrize(
        ("log", "scales"),
        [("", ("linear", "linear")), ("x", ("log", "linear")), ("xy", ("log", "log"))],
    )
    def test_axes_may_be_logarithmic(self, log, scales):
        (axis,) = figures.against({"": points(PUMA=1000.0, VPT=10.0)}, "x", "y", log=log).axes
        assert (axis.get_xscale(), axis.get_yscale()) == scales
        if log:
            assert axis.xaxis.get_major_formatter()(1000) == "1,000"

    @pytest.mark.parametrize("band", [True, False], ids=["band", "no band"])
    def test_joined_is_a_line_with_a_band_where_there_is_one(self, band):
        table = pd.DataFrame({"row": "PUMA", "x": [1, 2, 4], "value": [5, 6, 7]})
        if band:
            table = table.assign(low=4, high=8)
        (axis,) = figures.against({"": table}, "x", "y", joined=True).axes
        assert lines(axis)["PUMA"].get_xydata().tolist() == [[1, 5], [2, 6], [4, 7]]
        assert len(axis.collections) == band

    def test_a_loss_over_its_settings_has_its_default_and_one_scale(self):
        panels = {
            "alpha": pd.concat([points(VPT=2.0), points(VPT=8.0)]),
            "base": points(VPT=0.0, frozen=np.nan).fillna({"value": 7.0}),
        }
        figure = figures.over_settings(panels, {"alpha": 8, "base": 0.5}, "R@1 (%)")
        alpha, base = figure.axes
        assert (ticks(alpha), ticks(base)) == (["2", "8"], ["0"])
        assert (alpha.get_xscale(), base.get_xscale()) == ("log", "linear")
        assert lines(alpha)[VPT].get_xydata().tolist() == [[2, 20], [8, 80]]
        assert [lines(axis)["the default"].get_xdata()[0] for axis in (alpha, base)] == [8, 0.5]
        assert list(lines(base)["Frozen backbone"].get_ydata()) == [7, 7]
        assert alpha.get_ylim() == base.get_ylim()
        assert set(legend(figure)) == {VPT, "Frozen backbone", "the default"}

    def test_accuracy_is_drawn_over_millions_of_parameters(self):
        trainable = {"VPT": 2_500_000, "PUMA": 4_000_000, "frozen": 0}
        table = tidy("VPT", "PUMA", "frozen")
        # All of them shares
        table[["value", "low", "high"]] *= 0.5
        figure = figures.accuracy_against_parameters(table, trainable)
        assert titles(figure) == ["unified", "harmonic"]
        for axis, dataset in zip(figure.axes, ("unified", "harmonic")):
            shares = table[table["dataset"] == dataset].set_index("row")["value"]
            drawn = bars(axis)
            assert (drawn[VPT]["x"], drawn["PUMA"]["x"]) == (
                [pytest.approx(2.5)],
                [pytest.approx(4)],
            )
            assert drawn[VPT]["y"] == pytest.approx([100 * shares["VPT"]])
            assert drawn["PUMA"]["high"] == pytest.approx([100 * shares["PUMA"] + 10])
            assert lines(axis)["Frozen backbone"].get_ydata()[0] == pytest.approx(
                100 * shares["frozen"]
            )
            assert axis.get_xscale() == "log"

    def test_nearly_equal_numbers_of_parameters_are_moved_to_both_sides(self):
        trainable = {"VPT": 1_000_000, "PUMA": 1_000_000}
        figure = figures.accuracy_against_parameters(tidy("VPT", "PUMA"), trainable)
        drawn = bars(figure.axes[0])
        (one,), (other,) = drawn[VPT]["x"], drawn["PUMA"]["x"]
        assert (one * other, other / one) == (pytest.approx(1), pytest.approx(1.125))

    def test_a_single_point_among_lines_is_large_over_them_and_beside_others(self):
        table = pd.concat([points(VPT=1.0), points(VPT=2.0), points(PUMA=1.0)])
        (axis,) = figures.against({"": table}, "x", "y", joined=True).axes
        (bar,) = axis.containers
        dot = bar.lines[0]
        assert dot.get_linestyle() == "None"
        assert dot.get_zorder() > lines(axis)[VPT].get_zorder()
        assert dot.get_xdata() == pytest.approx([0.98])
        # The whole interval is seen.
        assert axis.get_ylim()[0] < bars(axis)["PUMA"]["low"][0]

    def test_lines_over_few_numbers_have_a_tick_at_each(self):
        table = pd.concat([points(PUMA=x) for x in (8.0, 32.0, 100.0)])
        (axis,) = figures.against({"": table}, "x", "y", log="x", joined=True).axes
        assert list(axis.get_xticks()) == [8, 32, 100]
        assert list(axis.get_xticks(minor=True)) == []

    def test_a_short_logarithmic_axis_has_numbers_between_powers_of_ten(self):
        table = points(PUMA=3000.0, VPT=90_000.0)
        (axis,) = figures.against({"": table}, "x", "y", log="x").axes
        axis.get_figure().draw_without_rendering()
        names = [label.get_text() for label in axis.get_xticklabels(minor=True)]
        assert {"3,000", "30,000"} <= set(names)
        assert "2,000" not in names


class TestLabels:
    def test_names_at_ends_keep_their_order_and_their_distance(self):
        heights = [10.0, 12.0, 11.0, 50.0]
        moved = labels.moved_apart(heights, 10.0)
        assert moved == pytest.approx([1, 21, 11, 50])
        assert labels.moved_apart([5.0, 30.0], 10.0) == [5, 30]
        with_a_gap = labels.moved_apart([5.0, np.nan, 5.0], 10.0)
        assert with_a_gap == pytest.approx([0, np.nan, 10], nan_ok=True)

    def test_names_of_points_do_not_overlap_where_there_is_room(self):
        near = {f"name {number}": 1.0 + number / 1000 for number in range(4)}
        (axis,) = figures.against({"": points(**near)}, "x", "y").axes
        axis.get_figure().draw_without_rendering()
        boxes = [text.get_window_extent() for text in axis.texts]
        assert len(boxes) == 4
        for one, other in itertools.combinations(boxes, 2):
            assert not one.shrunk(0.9, 0.7).overlaps(other.shrunk(0.9, 0.7))

    def test_names_without_room_are_a_legend(self):
        near = {f"a long name of a row, number {number}": 1.0 for number in range(11)}
        figure = figures.against({"": points(**near)}, "x", "y")
        assert list(figure.axes[0].texts) == []
        assert sorted(legend(figure)) == sorted(near)

    def test_a_line_that_ends_early_has_no_leader(self):
        table = pd.concat([points(VPT=1.0), points(VPT=5.0), points(PUMA=1.0)])
        figure = figures.against({"": table}, "x", "y", joined=True)
        assert list(figure.axes[0].texts) == []
        assert set(legend(figure)) == {VPT, "PUMA"}

    def test_the_name_of_a_level_gives_way_to_those_of_points(self):
        table = points(linear=1.0, full=100.0, frozen=np.nan)
        table["value"] = [4.9, 9.0, 5.0]
        (axis,) = figures.against({"": table}, "x", "y", log="x").axes
        axis.get_figure().draw_without_rendering()
        boxes = [text.get_window_extent() for text in axis.texts]
        assert len(boxes) == 3
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)


class TestGains:
    DIFFERENCES = pd.DataFrame(
        [
            ("above", "unified", 1.0, 0.5, 2.0, 0.01),
            ("below", "unified", -1.0, -2.0, -0.5, 0.01),
            ("across", "unified", 0.5, -1.0, 2.0, 0.4),
            ("one seed", "unified", 3.0, 2.0, 4.0, np.nan),
            ("above", "harmonic", 2.0, 1.0, 3.0, 0.01),
        ],
        columns=["difference", "of", "points", "low", "high", "p"],
    )

    def test_colours_say_on_which_side_of_zero_an_interval_lies(self):
        figure = figures.gains(self.DIFFERENCES, "gains")
        assert titles(figure) == ["unified", "harmonic"]
        drawn = bars(figure.axes[0])
        assert {name: bar["x"] for name, bar in drawn.items() if not name.startswith("_")} == {
            "interval above 0": [1.0],
            "interval below 0": [-1.0],
            "interval across 0": [0.5],
            "one seed": [3.0],
        }
        assert (drawn["one seed"]["low"], drawn["one seed"]["high"]) == ([2], [4])
        colours = [bar["style"].colour for bar in drawn.values()]
        assert colours == [row_styles.ABOVE, row_styles.BELOW, row_styles.GREY, row_styles.GREY]
        dots = [bar.lines[0].get_markerfacecolor() for bar in figure.axes[0].containers]
        assert [face == "white" for face in dots] == [False, False, False, True]

    def test_the_legend_has_the_kinds_that_occur_in_one_order(self):
        figure = figures.gains(self.DIFFERENCES.iloc[::-1])
        kinds = ["interval above 0", "interval below 0", "interval across 0", "one seed"]
        assert legend(figure) == kinds
        assert legend(figures.gains(self.DIFFERENCES.query("p > 0.1"))) == ["interval across 0"]

    def test_the_first_difference_is_on_top_and_named_once(self):
        left, right = figures.gains(self.DIFFERENCES).axes
        names = {label.get_text(): y for label, y in zip(left.get_yticklabels(), left.get_yticks())}
        assert names == {"above": 0, "below": -1, "across": -2, "one seed": -3}
        assert {label.get_text() for label in right.get_yticklabels()} <= {""}
        assert bars(left)["interval above 0"]["y"] == bars(right)["interval above 0"]["y"] == [0]

    def test_all_panels_have_one_scale(self):
        left, right = figures.gains(self.DIFFERENCES).axes
        assert left.get_xlim() == right.get_xlim()
        assert left.get_xlim()[0] < -2 and left.get_xlim()[1] > 4

    def test_differences_that_share_a_row_stand_below_its_name(self):
        pairs = ["puma over full", "vpt over frozen", "puma over lora", "linear over frozen"]
        pairs.append("static over lora")
        table = pd.DataFrame({"difference": pairs, "of": "unified", "points": range(5)})
        (axis,) = figures.gains(table.assign(low=0.0, high=9.0, p=0.5)).axes
        labels = axis.get_yticklabels()
        assert [label.get_text() for label in labels] == [
            *("PUMA minus ...", "Full fine-tuning", "LoRA"),
            *("... minus Frozen backbone", VPT, "Linear embedding"),
            *("Other differences", "Adapter, static minus LoRA"),
        ]
        assert [label.get_fontweight() == "bold" for label in labels] == [
            *(True, False, False, True, False, False, True, False)
        ]
        drawn = bars(axis)["interval across 0"]
        assert dict(zip(drawn["x"], drawn["y"])) == {0: -1, 2: -2, 1: -4, 3: -5, 4: -7}

    def test_headings_of_ones_own(self):
        table = self.DIFFERENCES.assign(group=["one", "two", "one", "two", "one"])
        left = figures.gains(table).axes[0]
        names = [label.get_text() for label in left.get_yticklabels()]
        assert names == ["one", "above", "across", "two", "below", "one seed"]

    def test_without_p_all_are_of_one_seed(self):
        figure = figures.gains(self.DIFFERENCES.drop(columns="p"))
        shown = [name for name in bars(figure.axes[0]) if not name.startswith("_")]
        assert shown == ["one seed"]

    def test_what_is_printed_is_hollow(self):
        table = self.DIFFERENCES.assign(paper=[5.0, np.nan, 6.0, np.nan, np.nan])
        left, right = figures.gains(table).axes
        assert list(lines(left)["printed in the paper"].get_xdata()) == pytest.approx(
            [5, np.nan, 6, np.nan], nan_ok=True
        )
        assert lines(left)["printed in the paper"].get_markerfacecolor() == "none"
        # Over the dots, which would hide it.
        dots = [bar.lines[0].get_zorder() for bar in left.containers]
        assert lines(left)["printed in the paper"].get_zorder() > max(dots)
        assert "printed in the paper" not in lines(right)


def test_gains_over_length_have_a_panel_with_and_one_without_a_dataset():
    table = pd.DataFrame(
        [
            ("full", 8, False, -2.0, -3.0, -1.0, 3),
            ("full", 32, False, -1.0, -2.0, 0.0, 1),
            ("full", 8, True, -0.5, -1.0, 0.0, 3),
            ("full", 32, True, -0.2, -1.0, 0.5, 1),
            ("lora", 32, False, 1.0, 0.5, 1.5, 1),
        ],
        columns=["rival", "epochs", "is_without", "points", "low", "high", "seeds"],
    )
    figure = figures.gains_over_length(table, "puma", "cars_196")
    left, right = figure.axes
    drawn = bars(left)
    without = bars(right)
    assert list(drawn) == ["Full fine-tuning", "LoRA"]
    assert list(without) == ["Full fine-tuning"]
    assert drawn["Full fine-tuning"]["y"] == [-2, -1]
    assert drawn["Full fine-tuning"]["low"] == pytest.approx([-3, -2])
    assert without["Full fine-tuning"]["high"] == pytest.approx([0, 0.5])
    assert (left.get_title(), right.get_title()) == ("all datasets", "without cars")
    assert figure.get_suptitle().endswith("with 95% intervals")
    assert legend(figure) == ["Full fine-tuning", "LoRA"]
    # A length that a rival lacks is left out: LoRA stands at the second of the two.
    assert drawn["LoRA"]["y"] == [1]
    assert np.round(drawn["LoRA"]["x"]) == [1]
    assert ticks(left) == ticks(right) == ["8", "32\none seed"]
    assert "PUMA minus rival" in left.get_ylabel()
    assert left.get_ylim() == right.get_ylim()
    low, high = left.get_ylim()
    assert low < -3 and high > 1.5


def test_a_waffle_has_a_square_for_each_of_its_whole():
    counts = pd.Series({"sop": 6.6, "cub": 3.8, "dogs": 1.6})
    (axis,) = figures.waffle(counts, "twelve images", lines=3).axes
    squares = {dots.get_label(): dots.get_offsets().tolist() for dots in axis.collections}
    # Rounded so that none is lost, column by column.
    assert {name: len(places) for name, places in squares.items()} == {
        "SOP 7": 7,
        "CUB 3": 3,
        "dogs 2": 2,
    }
    assert squares["SOP 7"] == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0]]
    assert squares["dogs 2"] == [[3, 1], [3, 2]]


def test_a_waffle_of_shares_says_how_many_there_are():
    counts = pd.Series({"sop": 5994, "cub": 2997, "dogs": 999})
    figure = figures.waffle(counts, "shares", 30, lines=3)
    assert [len(dots.get_offsets()) for dots in figure.axes[0].collections] == [18, 9, 3]
    assert legend(figure) == ["SOP: 5,994 (60%)", "CUB: 2,997 (30%)", "dogs: 999 (10%)"]


class TestReadings:
    LONG = " ".join(["a claim of many words"] * 8)
    NONE = (np.nan, np.nan, np.nan, np.nan, False, "", "not run here: a row", "a row")
    TABLE = pd.DataFrame(
        [
            (
                "5.1",
                "small",
                "too uncertain to say",
                "undecided",
                0.6,
                0.5,
                -1.0,
                2.0,
                True,
                "+0.5 [-1.0, +2.0]",
                "",
                "9 seeds",
            ),
            (
                "5.2",
                LONG,
                "opposite",
                "contradicted",
                1.0,
                -2.0,
                -3.0,
                -1.0,
                True,
                "-2.0 [-3.0, -1.0]",
                "",
                "decided",
            ),
            (
                "5.3",
                "large",
                "opposite",
                "contradicted",
                2.0,
                -7.5,
                -9.0,
                -6.0,
                True,
                "-7.5 [-9.0, -6.0]",
                "",
                "decided",
            ),
            (
                "5.4",
                "true",
                "as printed",
                "supported",
                3.0,
                3.0,
                2.0,
                4.0,
                True,
                "+3.0 [+2.0, +4.0]",
                "",
                "decided",
            ),
            (
                "5.5",
                "a time",
                "as claimed",
                "supported",
                np.nan,
                1.25,
                1.0,
                1.5,
                False,
                "+1.25 [+1.00, +1.50]",
                "",
                "decided",
            ),
            ("5.6", "no row", "not run", "not testable", *NONE),
            (
                "5.6",
                "... and more",
                "smaller than printed",
                "undecided",
                9.0,
                1.1,
                0.1,
                2.2,
                True,
                "+1.1 [+0.1, +2.2]",
                "two rows collapsed",
                "other rows",
            ),
        ],
        columns=[
            "section",
            "claim",
            "reading",
            "here",
            "paper",
            "value",
            "low",
            "high",
            "in_points",
            "ours",
            "reason",
            "needs",
        ],
    ).assign(column="unified", pair="a row over a rival", print="holds")
    TABLE.loc[TABLE["claim"] == "a time", "column"] = "exponent, classes"
    TABLE.loc[TABLE["claim"] == "a time", "pair"] = "1.5 over a loss"
    TABLE.loc[TABLE["claim"] == "small", "print"] = "fails"

    def test_claims_stand_by_their_reading_and_the_largest_first(self):
        left, axis = figures.readings(self.TABLE).axes
        *sentences, heading = [" ".join(text.get_text().split()) for text in left.texts]
        assert sentences[::2] == [
            "true (5.4)",
            "no row ... and more (5.6)",
            "small (5.1)",
            "large (5.3)",
            f"{self.LONG} (5.2)",
            # Without a scale in points, below a heading.
            "a time (5.5)",
        ]
        assert heading.startswith("Decided by measures")
        # No mark without a verdict and, where it is undecided, what it would take.
        assert sentences[1] == "Verdict: supported."
        assert sentences[3] == "Verdict: undecided; it would take other rows. Two rows collapsed."
        assert sentences[5] == (
            "Verdict: undecided; it would take 9 seeds. The paper's own numbers fail it."
        )
        printed_marks = [line for line in axis.lines if line.get_marker() == "D"]
        assert printed_marks[0].get_xdata().tolist() == [3.0, 9.0, 0.6, 2.0, 1.0]

    def test_a_claim_of_either_way_has_the_size_of_its_difference_and_what_it_asks(self):
        table = self.TABLE[self.TABLE["claim"] == "large"].assign(apart=1.0)
        figure = figures.readings(table)
        axis = figure.axes[1]
        (drawn,) = bars(axis).values()
        assert (drawn["x"], drawn["low"], drawn["high"]) == ([7.5], [6], [9])
        (asked,) = [line for line in axis.lines if line.get_marker() == "|"]
        assert asked.get_xdata().tolist() == [1]
        # The number is turned as the mark is.
        assert axis.texts[0].get_text() == "+7.5 [+6.0, +9.0]"
        assert axis.texts[1].get_text() == "size, unified R@1\nprinted: +2.0"
        assert "the size asked for" in figure.get_suptitle()

    def test_each_has_its_numbers_and_its_reading(self):
        figure = figures.readings(self.TABLE)
        said = [" ".join(text.get_text().split()) for text in figure.axes[1].texts]
        assert said[:3] == ["+3.0 [+2.0, +4.0]", "unified R@1 printed: +3.0", "as printed"]
        assert said[15:18] == ["+1.25 [+1.00, +1.50]", "1.5 minus the exponent", "as claimed"]
        assert figure.get_suptitle().startswith(
            "The comparison that decides each of 6 claims, with its 95% interval; of 7, 1 were not"
        )

    def test_measures_alone_have_no_scale_of_points(self):
        measures = self.TABLE[self.TABLE["claim"] == "a time"]
        axis = figures.readings(measures).axes[1]
        assert not axis.axison
        assert all("R@1" not in text.get_text() for text in axis.texts)
        assert axis.texts[0].get_text() == "+1.25 [+1.00, +1.50]"

    def test_numbers_have_three_digits_and_no_interval_without_a_width(self):
        measure = self.TABLE[self.TABLE["claim"] == "a time"].assign(apart=np.nan)
        numbers = {"value": 0.0952, "low": 0.0951, "high": 0.0953}
        ratio = measure.assign(column="log ms", value=np.log(2), low=0.0, high=np.log(4))
        share = measure.assign(column="picked", **numbers)
        same = measure.assign(value=25.191, low=25.188, high=25.194)
        said = [claimed._numbers(next(one.itertuples())) for one in (ratio, share, same)]
        assert said == ["2.00 [1.00, 4.00]", "+9.52 [+9.51, +9.53]", "+25.2"]

    def test_reasons_name_rows_as_the_figures_do(self):
        reasons = {
            "not run here: specific * (9 of 9), universal PA, universal MS": (
                "not run here: a model per dataset with 9 of 9 losses; "
                "full fine-tuning with Proxy-Anchor, Multi-similarity"
            ),
            "below the frozen backbone: full, ms (neg_margin = 1), linear 8": (
                "below the frozen backbone: full fine-tuning with Multi-similarity "
                "(negative margin\N{NO-BREAK SPACE}1); Linear embedding (images a class: 8)"
            ),
            "MLP-3 Emb. collapsed: its cosine": "MLP-3 collapsed: its cosine",
            "not in this benchmark: sop, aircraft": "not in this benchmark: SOP, aircraft",
            "the words ask: what": "the words ask: what",
        }
        for reason, said in reasons.items():
            assert claimed._with_names(reason) == said

    def test_every_reading_has_a_colour(self):
        assert set(reading.READINGS) - {reading.NOT_RUN} == set(claimed.READINGS)


class TestHeatmap:
    TABLE = pd.DataFrame(
        [[0.25, np.nan], [-1.0, 0.5]], index=["here", "there"], columns=["first", "other"]
    )

    def test_cells_are_the_numbers_and_named(self):
        figure = figures.heatmap(self.TABLE, "what", "how much", ".2f")
        axis, scale = figure.axes
        cells = axis.collections[0].get_array().reshape(2, 2)
        assert cells.filled(np.nan).tolist() == pytest.approx(self.TABLE.to_numpy(), nan_ok=True)
        assert [text.get_text() for text in axis.texts] == ["0.25", "-1.00", "0.50"]
        assert ticks(axis) == ["first", "other"]
        assert [label.get_text() for label in axis.get_yticklabels()] == ["here", "there"]
        assert (axis.get_title(), scale.get_ylabel()) == ("what", "how much")

    def test_without_a_format_no_numbers_are_written(self):
        axis = figures.heatmap(self.TABLE, "what", "how much").axes[0]
        assert list(axis.texts) == []

    def test_a_signed_scale_is_symmetric(self):
        signed = figures.heatmap(self.TABLE, "what", "how much", signed=True).axes[0].collections[0]
        assert signed.get_clim() == (-1, 1)
        wide = figures.heatmap(self.TABLE, "what", "how much", signed=True, limit=2)
        assert wide.axes[0].collections[0].get_clim() == (-2, 2)
        plain = figures.heatmap(self.TABLE, "what", "how much").axes[0].collections[0]
        assert plain.get_clim() == (-1, 0.5)


def test_an_embedding_map_shows_datasets_and_the_classes_of_one(benchmark):
    images = benchmark.images
    maps = {
        "PUMA": images.assign(x=np.arange(42.0), y=-np.arange(42.0)),
        "frozen": images.assign(x=0, y=0),
    }
    figure = figures.embedding_map(maps, "a")
    assert titles(figure) == [
        "PUMA, by dataset",
        "PUMA: a, 6 of 6 classes coloured",
        "Frozen backbone, by dataset",
        "Frozen backbone: a, 6 of 6 classes coloured",
    ]
    left, right = figure.axes[:2]
    first, second = left.collections
    assert first.get_offsets().tolist() == [[n, -n] for n in range(24)]
    assert second.get_offsets().tolist() == [[n, -n] for n in range(24, 42)]
    drawn = figures.styles_of(["a", "b"])
    assert same_color(first.get_facecolor()[0], drawn["a"].colour)
    assert same_color(second.get_facecolor()[0], drawn["b"].colour)
    assert not figure.legends, "the classes beside them have the same colours"
    # In words, upon a point of each.
    names = {text.get_text(): text.get_position() for text in left.texts}
    assert list(names) == ["a", "b"]
    assert list(names["a"]) in first.get_offsets().tolist()
    assert list(names["b"]) in second.get_offsets().tolist()

    below, of_dataset, *classes = right.collections
    assert len(below.get_offsets()) == 42
    assert len(of_dataset.get_offsets()) == 24
    assert [len(one.get_offsets()) for one in classes] == 6 * [4]
    looks = [to_hex(one.get_facecolor()[0]) for one in classes]
    assert looks == figures.COLOURS[:6]


def test_a_map_colours_no_more_classes_than_can_be_told_apart():
    """Ten classes of one to ten images: the eight largest have colours, the others are grey."""
    sizes = np.arange(1, 11)
    points = pd.DataFrame({"dataset": "a", "label": sizes.repeat(sizes)})
    points = points.assign(x=np.arange(55.0), y=0.0)
    figure = figures.embedding_map({"PUMA": points}, "a")
    assert titles(figure)[1] == "PUMA: a (dark grey), 8 of 10 classes coloured"
    _, _, *classes = figure.axes[1].collections
    assert [len(one.get_offsets()) for one in classes] == list(range(10, 2, -1))


def test_a_map_names_a_dataset_where_most_of_it_lies():
    """Two clusters: the name stands upon the larger, not between them."""
    x = [0.0, 0.1, 0.2, 8.0, 8.1, 8.2, 8.3, 4.0]
    points = pd.DataFrame({"x": x, "y": 0.0, "dataset": "a", "label": 0})
    left = figures.embedding_map({"PUMA": points}, "a").axes[0]
    [name] = left.texts
    assert name.get_position()[0] > 7


def test_a_name_with_an_underscore_stands_in_legends_and_keeps_its_look(benchmark):
    table = points(**{f"_row {number}": float(number) for number in range(20)})
    names = [text.strip(figures.UNSEEN) for text in legend(figures.against({"": table}, "x", "y"))]
    assert sorted(names) == sorted(table["row"])
    squares = figures.waffle(pd.Series({"_hidden": 6.0, "b": 6.0}), "of what", lines=3)
    assert legend(squares) == [f"{figures.UNSEEN}_hidden 6", "b 6"]
    two = figures.intervals(numbers(["PUMA", "_mine"], ["a", "_hidden"]), "R@1 (%)")
    assert legend(two) == ["PUMA", f"{figures.UNSEEN}_mine"]

    images = benchmark.images.replace({"dataset": {"a": "_hidden"}}).assign(x=0, y=0)
    figure = figures.embedding_map({"": images}, "_hidden")
    names = [text.get_text() for text in figure.axes[0].texts]
    assert names == [f"{figures.UNSEEN}_hidden", "b"]
    assert figures.styles_of(["_hidden"])["_hidden"] in figures.styles_of(names[:1]).values()


def test_a_field_has_its_arrows_dots_and_contour():
    grid = np.meshgrid(np.linspace(-1, 1, 5), np.linspace(-1, 1, 5))
    panels = {
        "one": {
            "at": [(1, 0), (0, -2)],
            "move": [(0.5, 1), (0, 0)],
            "colours": ["#ff0000", "#0000ff"],
            "dots": [(np.array([(3, 4)]), "#00ff00", 12, "o")],
            "line": (*grid, grid[0]),
        },
        "two": {"at": [(1, 1)], "move": [(1, 1)], "colours": "k"},
    }
    figure = figures.field(panels, "where to", columns=3)
    assert figure.get_suptitle() == "where to"
    assert [axis.get_title() for axis in figure.axes] == ["one", "two", ""]
    one = figure.axes[0]
    # All that is drawn has room: the dot at 4 is the farthest.
    assert one.get_xlim() == one.get_ylim() == figure.axes[1].get_xlim()
    assert one.get_xlim() == pytest.approx((-4.2, 4.2))
    assert figure.legends == []
    marked = figures.field({"two": panels["two"]}, "", meanings={"a step": {"marker": ">"}})
    assert legend(marked) == ["a step"]
    contour, arrows, dots = one.collections
    assert contour.get_paths()[0].vertices[:, 0] == pytest.approx(0)
    assert arrows.XY.tolist() == [[1, 0], [0, -2]]
    assert (arrows.U.tolist(), arrows.V.tolist()) == ([0.5, 0], [1, 0])
    assert [to_hex(colour) for colour in arrows.get_facecolor()] == ["#ff0000", "#0000ff"]
    assert dots.get_offsets().tolist() == [[3, 4]]
    assert to_hex(dots.get_facecolor()[0]) == "#00ff00"


def shown(axis):
    """The pictures of a grid: left edge, top edge and the grey in the middle."""
    return [
        (*np.round([image.get_extent()[0], image.get_extent()[3]], 6), image.get_array()[48, 48, 0])
        for image in axis.images
    ]


def frames(axis):
    return [
        (to_hex(patch.get_edgecolor(), keep_alpha=True), patch.get_linestyle())
        for patch in axis.patches
        if isinstance(patch, Rectangle)
    ]


class TestPictures:
    def test_cells_stand_from_left_to_right_and_lines_below_each_other(self):
        red, blue = (Image.new("RGB", (30, 60), colour) for colour in ((200, 0, 0), (90, 0, 0)))
        lines = [
            [Text("in front"), Picture(red, "below\nin two lines"), Gap(), Picture(blue)],
            [],
            [Gap(PICTURE_WIDTH), Picture(blue, frame="#00ff00"), Text("behind")],
        ]
        figure = figures.picture_grid(lines, "title")
        (axis,) = figure.axes
        # A line is 1.1 high and 0.22 more for each line of text below a picture, an empty one 0.2
        assert shown(axis) == [(1.8, 0, 200), (3.1, 0, 90), (1.1, 1.74, 90)]
        texts = {text.get_text(): text for text in axis.texts}
        assert texts["in front"].get_position() == pytest.approx((1.7, 0.5))
        assert texts["in front"].get_ha() == "right"
        assert texts["below\nin two lines"].get_position() == pytest.approx((2.3, 1.04))
        assert texts["behind"].get_position() == pytest.approx((2.3, 2.24))
        assert texts["behind"].get_ha() == "left"
        assert [colour for colour, _ in frames(axis)] == ["#00000000", "#00000000", "#00ff00ff"]
        assert axis.get_title() == "title"

    def test_a_picture_is_cut_to_its_middle(self):
        picture = Image.new("L", (300, 100), 0)
        picture.paste(200, (100, 0, 200, 100))
        (axis,) = figures.picture_grid([[Picture(picture.convert("RGB"))]]).axes
        pixels = np.asarray(axis.images[0].get_array())
        assert pixels.shape == (96, 96, 3)
        assert (pixels == 200).all()

    def test_a_contact_sheet_shows_pairs_of_a_class(self, benchmark):
        (axis,) = figures.contact_sheet(benchmark, 4).axes
        assert [text.get_text() for text in axis.texts if text.get_text()] == [
            "a\n6 classes\n24 images",
            "b\n2 classes\n18 images",
        ]
        pictures = shown(axis)
        assert len(pictures) == 8
        greys = [grey for _, _, grey in pictures]
        assert greys[0::2] == greys[1::2]
        assert len(set(greys)) == 4
        assert set(greys[4:]) == {120, 140}

    def test_a_retrieval_grid_shows_what_was_found_and_whether_it_is_right(self, benchmark):
        # In the test split classes 1, 3 and 5 have four images each, then class 7 has nine
        found = {"PUMA": np.array([[1, 13], [13, 0]]), "frozen": np.array([[5, 2], [0, 14]])}
        figure = figures.retrieval_grid(benchmark, [0, 12], found)
        (axis,) = figure.axes
        assert [grey for _, _, grey in shown(axis)] == [
            *(20, 20, 140),
            *(60, 20),
            *(140, 140, 20),
            *(20, 140),
        ]
        edges = [colour[:7] for colour, _ in frames(axis)]
        right, wrong = figures.TRUE, figures.FALSE
        black = "#222222"
        assert edges == [
            *(black, right, wrong),
            *(wrong, right),
            *(black, right, wrong),
            *(wrong, right),
        ]
        dashed = [line != "solid" for _, line in frames(axis)]
        assert dashed == [edge == wrong for edge in edges]
        # What one method found stands below what the other did
        pictures = shown(axis)
        assert pictures[3][0] == pictures[1][0]
        assert pictures[3][1] > pictures[1][1]
        said = [text.get_text() for text in axis.texts if text.get_text()]
        assert said == [
            *("a\nclass 1", "PUMA", "Frozen backbone"),
            *("b\nclass 7", "PUMA", "Frozen backbone"),
        ]

    def test_embedded_pictures_are_shown_too(self, benchmark):
        images = benchmark.images.assign(path=[str(row) for row in benchmark.images.index])
        greys = 20 * images["label"].to_numpy(np.uint8)
        pixels = np.broadcast_to(greys[:, None, None, None], (42, 8, 8, 3))
        embedded = Benchmark("mini", images, pixels=pixels)
        (axis,) = figures.contact_sheet(embedded, 4).axes
        (files,) = figures.contact_sheet(benchmark, 4).axes
        assert shown(axis) == shown(files)


FIGURES = {
    "intervals": lambda _: figures.intervals(numbers(["VPT", "mine"], ["a", "b"]), "R@1"),
    "parameters": lambda _: figures.accuracy_against_parameters(tidy("VPT"), {"VPT": 100}),
    "curves": lambda _: figures.curves(tidy("p 1", "p 2"), {"p 1": ("P", 1), "p 2": ("P", 2)}, "n"),
    "settings": lambda _: figures.over_settings({"a": points(PUMA=1.0)}, {"a": 1.0}, "R@1"),
    "gains": lambda _: figures.gains(TestGains.DIFFERENCES),
    "heatmap": lambda _: figures.heatmap(TestHeatmap.TABLE, "what", "how much", ".1f"),
    "field": lambda _: figures.field(
        {"a": {"at": [(1, 0)], "move": [(1, 1)], "colours": "k"}}, "where to"
    ),
    "readings": lambda _: figures.readings(TestReadings.TABLE),
    "sheet": lambda benchmark: figures.contact_sheet(benchmark, 4),
    "map": lambda benchmark: figures.embedding_map(
        {"PUMA": benchmark.images.assign(x=np.arange(42.0), y=0.0)}, "a"
    ),
}


# GitHub shows a figure at most this wide, in pixels, on a page and on a phone of 390 pixels; files
# have 150 to an inch.
SHOWN_WIDTH = 830
PHONE_WIDTH = 358


def letters_below_nine_pixels(figure, width):
    """The texts of a figure with letters of less than 9 pixels where it is shown `width` wide."""
    scale = 150 / 72 * min(1, width / (150 * figure.get_figwidth()))
    texts = [text for text in figure.findobj(plt.Text) if text.get_text().strip()]
    assert texts
    return {one.get_text() for one in texts if scale * one.get_fontsize() < 9}


@pytest.mark.parametrize("name", FIGURES)
def test_letters_are_at_least_nine_pixels_high_where_github_shows_them(name, benchmark):
    assert letters_below_nine_pixels(FIGURES[name](benchmark), SHOWN_WIDTH) == set()


def test_the_figure_of_the_readme_is_read_on_a_phone():
    table = pd.DataFrame({"panel": "unified", "rival": ["one", "two"], "points": [1.0, 2.0]})
    figure = figures.claimed_and_measured(
        table.assign(low=0.0, high=3.0, paper=4.0), "PUMA", "points"
    )
    assert letters_below_nine_pixels(figure, PHONE_WIDTH) == set()


class TestSaved:
    @pytest.mark.parametrize("name", FIGURES)
    def test_the_same_bytes_twice(self, name, benchmark, tmp_path):
        one = FIGURES[name](benchmark)
        two = FIGURES[name](benchmark)
        for ending in (".png", ".svg", ".pdf"):
            first = figures.save(one, tmp_path / f"one{ending}").read_bytes()
            assert len(first) > 1000
            assert first == figures.save(two, tmp_path / f"two{ending}").read_bytes(), ending

    def test_a_png_of_256_colours_without_a_date_or_a_version(self, tmp_path):
        figure = figures.against({"title": points(PUMA=1.0)}, "x", "y")
        path = figures.save(figure, str(tmp_path / "new" / "figure.png"))
        assert path == tmp_path / "new" / "figure.png"
        saved = Image.open(path)
        assert (saved.format, saved.mode) == ("PNG", "P")
        assert saved.info.keys() <= {"dpi"}
        width, height = figure.get_size_inches()
        assert saved.size == (int(150 * width), int(150 * height))
        assert [file.name for file in path.parent.iterdir()] == ["figure.png"]

    @pytest.mark.parametrize(("ending", "start"), [(".svg", b"<?xml"), (".pdf", b"%PDF")])
    def test_a_figure_for_print_is_a_file_of_its_own(self, ending, start, tmp_path):
        figure = figures.against({"title": points(PUMA=1.0)}, "x", "y")
        path = figures.save(figure, tmp_path / f"figure{ending}")
        assert path.read_bytes().startswith(start)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]

    @pytest.mark.parametrize("name", FIGURES)
    def test_pyplot_keeps_none_else_a_notebook_shows_it_twice(self, name, benchmark):
        before = plt.get_fignums()  # another test of this process may have left one
        FIGURES[name](benchmark)
        assert plt.get_fignums() == before


def search(row, harmonic, **more):
    """A table of a search: one row at 1e-4 and 3e-4, at 8 epochs and seed 0."""
    table = pd.DataFrame({"rate": [1e-4, 3e-4], "harmonic": harmonic})
    fixed = {"row": row, "hyperparameter": "adapter_scale", "value": 0.1, "seed": 0, "epochs": 8}
    return table.assign(**{**fixed, "mirrored": True, "chosen": False, **more})


class TestTheTrial:
    def test_curves_over_the_rate_on_one_scale_with_the_frozen_backbone(self):
        table = pd.concat(
            [
                search("puma", [0.6, 0.7], chosen=[False, True]),
                search("puma", [0.5, 0.55], value=1.0),
                search("full", [0.4, 0.0]),
            ]
        )
        figure = figures.tuning_curves(table, 0.5, 8)
        puma, full = [axis for axis in figure.axes if axis.axison]
        assert puma.get_title() == "PUMA\nadapter's scale\n0.1 (dotted: 1)"
        assert puma.get_ylim() == full.get_ylim()
        drawn = [list(line.get_ydata()) for line in puma.lines]
        assert [60, 70] in [list(np.round(values, 9)) for values in drawn]
        assert [50, 50] in drawn, "the frozen backbone"
        ring = [line for line in puma.lines if line.get_markersize() == 11]
        assert ring[0].get_xdata()[0] == 3e-4
        # What is far below is drawn at the edge, with its number
        assert [text.get_text() for text in full.texts] == ["0"]
        assert full.get_ylim()[0] == 34

    def test_where_it_wins_names_every_place_without_a_run(self):
        columns = {
            "benchmark": "mini",
            "points": [3.0, -4.0],
            "low": [1.0, -5.0],
            "high": [6.0, -2.0],
        }
        places = pd.DataFrame({**columns, "seeds": [3, 1]})
        of_sets = places.assign(dataset=["birds_cub", "cars"], frozen=[40.0, 10.0])
        small = places.assign(place=["1", "2"], aside=[False, True])
        blank = pd.DataFrame({"place": ["4"], "points": [np.nan], "aside": [False]})
        panels = dict.fromkeys("abcd", pd.concat([small, blank]))
        figure = figures.where_it_wins(of_sets, panels, "told")
        large, *others = figure.axes
        assert [text.get_text() for text in large.texts][:2] == ["birds_cub", "cars"]
        assert {"mini", "mini, one seed"} == set(legend(figure))
        assert bars(large)["mini"]["y"] == [3]
        assert bars(large)["mini"]["high"] == [6]
        for axis in others:
            assert ticks(axis) == ["1", "2", "4"]
            assert [text.get_text() for text in axis.texts] == ["not run"]
            assert axis.get_ylim() == others[0].get_ylim()
        assert "no room" not in large.get_xlabel()

    def test_where_it_wins_says_which_names_have_no_room_and_breaks_lines_without_a_run(self):
        numbers = {"benchmark": "mini", "points": 1.0, "low": 0.9, "high": 1.1, "seeds": 3}
        sets = [f"set {number}" for number in range(12)]
        of_sets = pd.DataFrame({"dataset": sets, "frozen": 40.0, **numbers})
        places = pd.DataFrame({"place": list("acde"), "aside": False, **numbers})
        blank = pd.DataFrame({"place": ["b"], "points": [np.nan], "aside": [False]})
        panel = pd.concat([places[:1], blank, places[1:]])
        figure = figures.where_it_wins(of_sets, dict.fromkeys("abcd", panel))
        large, *others = figure.axes
        named = [text.get_text() for text in large.texts if text.get_text().startswith("set")]
        unnamed = [name for name in sets if name not in named]
        assert named and unnamed
        below = " ".join(large.get_xlabel().split())
        assert below.endswith(f"no room for the names of: {', '.join(unnamed)}")
        drawn = [list(line.get_xdata()) for line in others[0].lines if line.get_marker() == "None"]
        assert [0] in drawn and [2, 3, 4] in drawn
