"""Figures: what is drawn is what the tables say; saving is atomic and reproducible."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from pumalib import pictures, plots
from pumalib.data import Benchmark


@pytest.fixture
def benchmark():
    """Two datasets of 32 px: "a" with 6 classes of 4 images, "b" with 2 classes of 9; odd classes are test."""
    rows = [(f"a{c}", "a", c) for c in range(6) for _ in range(4)]
    rows += [(f"b{c}", "b", 6 + c) for c in range(2) for _ in range(9)]
    images = pd.DataFrame(rows, columns=["class_name", "dataset", "label"])
    images["path"] = np.arange(len(images))
    images["split"] = np.where(images["label"] % 2, "test", "train")
    pixels = np.random.default_rng(0).integers(256, size=(len(images), 32, 32, 3), dtype=np.uint8)
    return Benchmark("mini", images, pixels=pixels)


def tidy(**methods) -> pd.DataFrame:
    """A tidy table: for each method the values on a, b, unified, harmonic."""
    rows = [
        (method, dataset, "R@1", value, value - 0.1, value + 0.2)
        for method, values in methods.items()
        for dataset, value in zip(("unified", "a", "b", "harmonic"), values, strict=True)
    ]
    return pd.DataFrame(rows, columns=["row", "dataset", "metric", "value", "low", "high"])


def texts(axis) -> list[str]:
    return [text.get_text() for text in axis.texts]


def test_contact_sheet_has_a_row_per_dataset(benchmark):
    figure = pictures.contact_sheet(benchmark, per_dataset=6)
    assert [len(axis.images) for axis in figure.axes] == [6, 4]  # "b" has two classes only, two pictures each
    assert texts(figure.axes[0]) == ["a\n6 classes\n24 images"] and texts(figure.axes[1]) == ["b\n2 classes\n18 images"]
    first = figure.axes[0].images[0].get_array()  # 32 px, each pixel three times
    assert any(np.array_equal(first[::3, ::3], picture) for picture in benchmark.pixels)
    same = pictures.contact_sheet(benchmark, per_dataset=6).axes[0].images[0].get_array()
    other = pictures.contact_sheet(benchmark, per_dataset=6, seed=1).axes[0].images[0].get_array()
    assert np.array_equal(first, same) and not np.array_equal(first, other)


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "RGBA"])
def test_contact_sheet_reads_files_of_any_mode(benchmark, tmp_path, mode):
    images = benchmark.images.assign(path=[f"{i}.tiff" for i in range(len(benchmark.images))])
    for path in images["path"]:
        Image.new(mode, (40, 20)).save(tmp_path / path)
    figure = pictures.contact_sheet(Benchmark("folders", images, root=tmp_path), per_dataset=2)
    assert figure.axes[0].images[0].get_array().shape == (pictures.THUMBNAIL, pictures.THUMBNAIL, 3)


def test_class_sizes_draws_the_counts(benchmark):
    train, test = plots.class_sizes(benchmark).axes
    assert [line.get_ydata().tolist() for line in train.lines] == [[4, 4, 4], [9]]
    assert test.get_legend().get_texts()[1].get_text() == "b: 1 classes, 9 images"


def test_retrieval_grid_colours_matches(benchmark):
    labels = benchmark.test["label"].to_numpy()
    queries = [0, len(labels) - 1]  # of "a1" and of "b1"
    neighbours = np.array([[1, 4, 12], [13, 0, 2]])
    figure = pictures.retrieval_grid(benchmark, queries, neighbours)
    edges = [to_hex(patch.get_edgecolor()) for patch in figure.axes[0].patches]
    expected = []
    for query, row in zip(queries, neighbours, strict=True):
        expected += [plots.INK] + [pictures.TRUE if labels[query] == labels[other] else pictures.FALSE for other in row]
    assert edges == expected and set(edges) == {plots.INK, pictures.TRUE, pictures.FALSE}
    assert len(figure.axes[0].images) == 8


def test_retrieval_grid_stacks_methods(benchmark):
    figure = pictures.retrieval_grid(benchmark, [0, 5], {"full": np.zeros((2, 7), int), "puma": np.ones((2, 7), int)})
    assert len(figure.axes[0].images) == 2 * (1 + 2 * 7)
    assert [text for text in texts(figure.axes[0]) if text in ("full", "puma")] == ["full", "puma"] * 2
    with pytest.raises(ValueError, match=r"'puma' has shape \(1, 7\); it needs \(2, k\)"):
        pictures.retrieval_grid(benchmark, [0, 5], {"puma": np.zeros((1, 7), int)})


def test_accuracy_bars_draws_values_and_intervals():
    figure = plots.accuracy_bars(tidy(full=(0.5, 0.2, 0.4, 0.3), puma=(0.6, 0.3, 0.5, 0.4)))
    axis = figure.axes[0]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["a", "b", "unified", "harmonic"]
    full, puma = axis.containers
    assert full.lines[0].get_ydata() == pytest.approx([20, 40, 50, 30])
    assert puma.lines[0].get_ydata() == pytest.approx([30, 50, 60, 40])
    bar = puma.lines[2][0].get_segments()[0]  # on "a": 20 to 50 %
    assert bar[:, 1] == pytest.approx([20, 50])


def test_accuracy_bars_without_intervals_and_with_a_missing_cell():
    table = tidy(full=(0.5, 0.2, 0.4, 0.3), puma=(0.6, 0.3, 0.5, 0.4)).assign(low=np.nan, high=np.nan)
    axis = plots.accuracy_bars(table.drop(index=2)).axes[0]  # "full" has no "b"
    assert axis.containers[0].lines[0].get_ydata().tolist() == pytest.approx([20, np.nan, 50, 30], nan_ok=True)
    assert axis.containers[1].lines[0].get_ydata().tolist() == pytest.approx([30, 50, 60, 40])


def test_accuracy_against_parameters():
    table = tidy(full=(0.5, 0.2, 0.4, 0.3), puma=(0.6, 0.3, 0.5, 0.4))
    figure = plots.accuracy_against_parameters(table, {"full": 21_714_944, "puma": 2_485_376})
    harmonic, unified = figure.axes
    points = [container.lines[0].get_xydata()[0] for container in harmonic.containers]
    assert np.array(points) == pytest.approx(np.array([[21.714944, 30], [2.485376, 40]]))
    assert harmonic.get_xscale() == "log" and unified.containers[1].lines[0].get_ydata() == pytest.approx([60])
    with pytest.raises(ValueError, match="trainable lacks the number of parameters of 'puma'"):
        plots.accuracy_against_parameters(table, {"full": 1})


def test_accuracy_against_parameters_names_many_methods_without_overlap():
    losses = ["Triplet", "Margin", "MS", "PA", "SoftTriple", "CosFace", "ArcFace", "CurricularFace", "Hyp"]
    methods = {f"{group} {loss}": group for group in ("specific", "universal") for loss in losses} | {"PUMA": "PUMA"}
    table = tidy(**{name: (0.5 + i / 1e4, 0.2, 0.4, 0.6 + i / 1e4) for i, name in enumerate(methods)}, pretrained=[0.4] * 4)
    trainable = {name: {"specific": 173.7e6, "universal": 21.7e6, "PUMA": 2.5e6}[methods[name]] for name in methods}
    figure = plots.accuracy_against_parameters(table, trainable | {"pretrained": 0}, groups=methods)
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["specific", "universal", "PUMA"]
    for axis in figure.axes:
        assert sorted(texts(axis)) == sorted(losses * 2 + ["PUMA"])  # what trains nothing has no place on the axis
        boxes = [Text.get_window_extent(text) for text in axis.texts]  # without its line
        boxes = [Bbox.from_extents(box.x0 + 1, box.y0 + 1, box.x1 - 1, box.y1 - 1) for box in boxes]
        inside = axis.get_window_extent().padded(2)
        assert not any(one.overlaps(two) for one, two in itertools.combinations(boxes, 2))
        assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1 for box in boxes)


def test_curves_draw_a_line_per_method_over_the_number():
    values = {"PUMA 4": (0.6, 0.3, 0.5, 0.4), "PUMA 0": (0.5, 0.2, 0.4, 0.3), "PUMA 1": (0.4, 0.1, 0.3, 0.2)}
    table = tidy(**values, linear=(0.3, 0.2, 0.1, 0.2), other=(0.9, 0.9, 0.9, 0.9))
    x = {row: ("PUMA", int(row[-1])) for row in values} | {"linear": ("linear", 1), "not run": ("full", 1)}
    figure = plots.curves(table, x, "shots", columns=("unified", "harmonic", "b"), log2=True)
    unified, _, b = figure.axes
    assert [axis.get_title() for axis in figure.axes] == ["unified", "harmonic", "b"]
    assert unified.lines[0].get_xydata() == pytest.approx(np.array([[0, 50], [1, 40], [4, 60]]))
    assert b.lines[0].get_ydata() == pytest.approx([40, 30, 50])
    band = unified.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(30) and band[:, 1].max() == pytest.approx(80)
    assert b.containers[0].lines[0].get_xydata() == pytest.approx(np.array([[1, 10]]))  # a single point has a bar
    assert [tick.get_text() for tick in unified.get_xticklabels()] == ["0", "1", "4"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["PUMA", "linear"]
    assert plots.curves(table, x, "shots").axes[0].get_xscale() == "linear"
    with pytest.raises(ValueError, match="no column 'c'; known: a, b, harmonic, unified"):
        plots.curves(table, x, "shots", columns=("c",))
    with pytest.raises(ValueError, match="no row of the table is in x"):
        plots.curves(table, {"puma": ("PUMA", 1)}, "shots")


def test_tables_that_cannot_be_drawn():
    table = tidy(puma=(0.6, 0.3, 0.5, 0.4))
    with pytest.raises(ValueError, match="no row of metric 'RP'; known: R@1"):
        plots.accuracy_bars(table, "RP")
    with pytest.raises(ValueError, match="lacks high, low"):
        plots.accuracy_bars(table.drop(columns=["low", "high"]))
    with pytest.raises(ValueError, match="R@1 of 'puma' on 'unified' stands twice"):
        plots.accuracy_bars(pd.concat([table, table]))


def test_embedding_map(benchmark):
    points = np.random.default_rng(0).normal(size=(len(benchmark.images), 2))
    by_dataset, by_class = plots.embedding_map(points, benchmark.images).axes
    assert [len(dots.get_offsets()) for dots in by_dataset.collections] == [24, 18]
    assert len(np.unique(by_class.collections[0].get_facecolors(), axis=0)) == 8
    with pytest.raises(ValueError, match=r"points have shape \(3, 2\), the table 42 images"):
        plots.embedding_map(points[:3], benchmark.images)


def test_training_curves_and_prompt_heatmap():
    log = pd.DataFrame({"epoch": [1, 2, 3], "loss": [3.0, 2.0, 1.5]})
    axis = plots.training_curves({"puma": log, "full": log + 1}).axes[0]
    assert [line.get_ydata().tolist() for line in axis.lines] == [[3, 2, 1.5], [4, 3, 2.5]]
    similarities = pd.DataFrame(np.arange(6).reshape(2, 3) / 10, index=["a", "b"])
    heat = plots.prompt_heatmap(similarities).axes[0]
    assert heat.collections[0].get_array().ravel().tolist() == pytest.approx(np.arange(6) / 10)
    assert [tick.get_text() for tick in heat.get_yticklabels()] == ["a", "b"]


def test_save_is_reproducible_and_leaves_nothing_behind(tmp_path, monkeypatch):
    log = {"puma": pd.DataFrame({"epoch": [1, 2], "loss": [3.0, 2.0]})}
    one = plots.save(plots.training_curves(log), tmp_path / "deep" / "one.png")
    two = plots.save(plots.training_curves(log), tmp_path / "two.png")
    assert one.read_bytes() == two.read_bytes()
    with Image.open(one) as picture:
        assert picture.format == "PNG" and "Software" not in picture.info

    def broken(temporary, content):
        temporary.open("wb").write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", broken)
    with pytest.raises(OSError, match="no space left"):
        plots.save(plots.training_curves(log), one)
    monkeypatch.undo()
    assert one.read_bytes() == two.read_bytes() and [p.name for p in (tmp_path / "deep").iterdir()] == ["one.png"]


def test_figures_are_closed_for_pyplot():
    import matplotlib.pyplot as plt

    plots.training_curves({"puma": pd.DataFrame({"epoch": [1, 2], "loss": [3.0, 2.0]})})
    assert plt.get_fignums() == []
