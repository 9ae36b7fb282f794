"""Figures: the same bytes twice, one colour and one marker for a method everywhere."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from pumalib import figures
from pumalib.data import Benchmark
from pumalib.study import printed

DATASETS = ("unified", "a", "b", "harmonic")


def tidy(*rows):
    values = [(row, name, "R@1", 0.4 + 0.1 * n) for n, (row, name) in enumerate(itertools.product(rows, DATASETS))]
    table = pd.DataFrame(values, columns=["row", "dataset", "metric", "value"])
    return table.assign(low=table["value"] - 0.1, high=table["value"] + 0.2)


@pytest.fixture
def benchmark(tmp_path):
    """Files of two datasets, "a" with 6 classes of 4 images, "b" with 2 classes of 9; odd classes are test."""
    classes = [("a", c) for c in range(6) for _ in range(4)] + [("b", 6 + c) for c in range(2) for _ in range(9)]
    images = pd.DataFrame(classes, columns=["dataset", "label"])
    images = images.assign(class_name=images["label"].map("class {}".format), path=[f"{i}.png" for i in images.index])
    images["split"] = np.where(images["label"] % 2, "test", "train")
    for path, label, mode in zip(images["path"], images["label"], itertools.cycle(("L", "RGB", "P", "RGBA"))):
        Image.new(mode, (40, 20), 20 * label if mode in "LP" else (20 * label,) * len(mode)).save(tmp_path / path)
    return Benchmark("folders", images, root=tmp_path)


def test_a_figure_is_saved_whole_with_the_same_bytes_twice(benchmark, tmp_path):
    points = benchmark.images.assign(x=np.arange(42.0), y=0.0)
    pairs = [("a - b", "harmonic", 1, 0.5, 2, 0.01), ("c - b", "harmonic", -1, -2, 0, 0.06)]
    differences = pd.DataFrame(pairs, columns=["difference", "of", "points", "low", "high", "p"])
    card = pd.DataFrame({"section": ["1", "2"], "claim": "text", "print": ["holds", "fails"], "here": "undecided"})
    draw = {
        "bars": lambda: figures.intervals(tidy("VPT", "PUMA").rename(columns={"dataset": "place"}), "R@1"),
        "parameters": lambda: figures.accuracy_against_parameters(tidy("VPT", "PUMA"), {"VPT": 100, "PUMA": 2000}),
        "curves": lambda: figures.curves(tidy("p 1", "p 2"), {"p 1": ("PUMA", 1), "p 2": ("PUMA", 2)}, "number"),
        "sheet": lambda: figures.contact_sheet(benchmark, 4),
        "grid": lambda: figures.retrieval_grid(benchmark, [0, 12], {"PUMA": np.array([[1, 13], [13, 0]])}),
        "map": lambda: figures.embedding_map({"PUMA": points, "frozen": points}, "a"),
        "heat": lambda: figures.heatmap(pd.DataFrame([[0.1, np.nan]], columns=[1, 2]), "weights", "mean", ".1f"),
        "gains": lambda: figures.gains(differences),
        "verdicts": lambda: figures.verdicts(card),
        "field": lambda: figures.field({"a": {"at": [(1, 0)], "move": [(1, 1)], "colours": "k"}}),
    }
    for name, make in draw.items():
        one, two = (figures.save(make(), tmp_path / part / f"{name}.png") for part in ("one", "two"))
        assert one.read_bytes() == two.read_bytes() and Image.open(one).info.keys() <= {"dpi"}, name
    assert plt.get_fignums() == [], "a figure that pyplot keeps is shown twice by a notebook"


def test_a_method_looks_the_same_everywhere_and_like_no_other():
    assert {*printed.METHOD_OF_ROW, *(name for n in (2, 3, 7) for name in printed.table(n).index)} <= set(figures.LOOKS)
    assert all(figures.LOOKS[name] == figures.LOOKS[method] for name, method in printed.METHOD_OF_ROW.items())
    rest = [look[0] for look in figures.LOOKS.values() if look != figures.OURS]
    assert figures.LOOKS["PUMA"] == figures.OURS == figures.LOOKS["puma"] and figures.OURS[0] not in rest
    assert len({figures.LOOKS[name] for name in printed.table(2).index}) == len(printed.table(2))
    alone, beside = figures.looks(["mine"]), figures.looks(["PUMA", "VPT", "mine", "other"])
    assert alone["mine"] == beside["mine"] != beside["other"] and beside["VPT"] == figures.LOOKS["VPT"]
