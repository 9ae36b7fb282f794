"""What is timed is what the tables say: turns, operations, memory, photographs, clusters."""

import time

import numpy as np
import pytest
import torch
from PIL import Image

from pumalib import data, models, paths
from tools import bench
from tools.bench import reading

CPU = torch.device("cpu")
CLOCK = bench.Clock(CPU, rounds=1)
SETTING = bench.StepSetting("mini_vit", 48, torch.float32, CPU)
FEW = bench.PhotographSizes(images=8, narrowest=96, widest=129)


@pytest.fixture
def batch():
    torch.manual_seed(0)
    return torch.randn(4, 3, 48, 48), torch.tensor([0, 0, 1, 2])


class TestClock:
    def test_candidates_take_turns_and_the_first_turn_does_not_count(self):
        called = []

        def slow_at_first():
            if "a" not in called:
                time.sleep(0.2)
            called.append("a")

        candidates = {"a": slow_at_first, "b": lambda: called.append("b")}
        spent = bench.Clock(CPU, rounds=3).interleaved(candidates)
        assert called == ["a", "b"] * 4
        assert {name: turns.shape for name, turns in spent.items()} == {"a": (3,), "b": (3,)}
        assert spent["a"].max() < 0.2
        assert bench.Clock(CPU, rounds=3).interleaved(candidates, rounds=1)["b"].shape == (1,)

    def test_seconds(self):
        spent = CLOCK.interleaved({"sleeps": lambda: time.sleep(0.05)})
        assert 0.05 <= spent["sleeps"].item() < 1


class TestLosses:
    def test_plain_cross_entropy(self):
        loss = bench.PlainCrossEntropy(3, 2)
        with torch.no_grad():
            loss.proxies.copy_(torch.tensor([[5.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
        expected = torch.logsumexp(torch.tensor([32.0, 0.0, -32.0]), 0) - 32
        found = loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        torch.testing.assert_close(found, expected)

    def test_a_row_per_loss(self):
        sizes = bench.LossSizes(batch=8, dim=4, classes=5)
        entries = [
            bench.LossEntry("one", "cosface", bar=1e9),
            bench.LossEntry("two", "softtriple", bar=0),
        ]
        table = bench.losses_beside_cross_entropy(entries, 3, sizes, CLOCK)
        assert list(table["loss"]) == ["one", "two"]
        assert set(table["reference"]) == {"cross-entropy over 15 proxies"}
        assert list(table["met"]) == [True, False]
        ratio = table["milliseconds"] / table["reference_milliseconds"]
        assert list(table["ratio"]) == list(ratio)

    def test_beside_pytorch_metric_learning(self):
        pytest.importorskip("pytorch_metric_learning")
        sizes = bench.LossSizes(batch=16, dim=4, classes=5)
        table = bench.losses_beside_library(sizes, CLOCK)
        assert set(table["reference"]) == {"pytorch-metric-learning"}
        assert (table["milliseconds"] > 0).all()
        assert table["loss"].is_unique


class TestTrainingStep:
    @pytest.mark.parametrize("name", ["timm", "full", "linear", "puma"])
    def test_learns_what_the_method_trains_and_no_more(self, name, batch):
        step = bench.TrainingStep(name, *batch, SETTING)
        parameters = list(step.model.named_parameters())
        before = {key: value.detach().clone() for key, value in parameters}
        # What starts at zero hides what stands before it, and gates are closed by chance.
        for _ in range(8):
            step.run()
        for key, value in parameters:
            assert torch.equal(value, before[key]) != value.requires_grad, key

    def test_operations_of_a_linear_head_on_a_frozen_backbone(self, batch):
        """A backward pass through the backbone takes twice the forward pass."""
        linear = bench.TrainingStep("linear", *batch, SETTING).operations()
        full = bench.TrainingStep("full", *batch, SETTING).operations()
        assert 2.5 < full / linear < 3.1

    def test_operations_are_of_one_image(self, batch):
        images, labels = batch
        four = bench.TrainingStep("full", images, labels, SETTING).operations()
        eight = bench.TrainingStep(
            "full", torch.cat([images, images]), torch.cat([labels, labels]), SETTING
        )
        assert eight.operations() == pytest.approx(four, rel=0.01)

    def test_operations_are_counted_on_one_image(self, batch, monkeypatch):
        step = bench.TrainingStep("full", *batch, SETTING)
        seen = []
        monkeypatch.setattr(step, "draw_gates", lambda count: seen.append(count) or {})
        step.operations()
        step.run()
        assert seen == [1, 4], "a batch would need the memory of a larger GPU"

    def test_memory_has_weights_gradients_and_the_optimisers_two_means(self, batch):
        step = bench.TrainingStep("full", *batch, SETTING)
        step.run()
        numbers = models.count_parameters(step.model)[0] + models.count_parameters(step.loss)[0]
        images = batch[0]
        one = bench.TrainingStep("full", images[:1], torch.tensor([2]), SETTING)
        one.run()
        per_image = (step.memory() - one.memory()) / 3
        assert per_image > 0
        assert step.memory() - 4 * per_image == pytest.approx(4 * 4 * numbers, rel=0.01)

    def test_the_table(self):
        sizes = bench.TrainingSizes(batch=2, classes=3, matmul_side=16)
        table = bench.training_times(["timm", "full", "linear"], sizes, SETTING, CLOCK)
        table = table.set_index("method")
        assert table.loc["full", ["beside_full", "memory_beside_full"]].tolist() == [1, 1]
        assert table.at["linear", "memory_beside_full"] < 1
        hours = 100 * bench.TRAIN_IMAGES / table["images_per_s"] / 3600
        assert table["hours_100_epochs"].tolist() == pytest.approx(hours.tolist())


class TestPhotographs:
    def test_are_a_benchmark_and_always_the_same(self, tmp_path):
        settings = [bench.photographs(tmp_path / name, FEW, 64) for name in ("one", "two")]
        tables = [data.load(some).images for some in settings]
        assert len(tables[0]) == 8
        assert tables[0]["class_name"].nunique() == 4
        for path in tables[0]["path"]:
            files = [tmp_path / name / path for name in ("one", "two")]
            assert files[0].read_bytes() == files[1].read_bytes()
            with Image.open(files[0]) as image:
                assert image.format == "JPEG"
                assert 96 <= max(image.size) < 129

    def test_both_ways_give_batches_of_224_pixels(self, tmp_path):
        settings = bench.photographs(tmp_path, FEW, 224)
        benchmark = data.load(settings)
        order = [np.array([0, 1, 2]), np.array([5])]
        for stream in (
            reading._stream(benchmark, settings, order),
            reading._authors_stream(benchmark, order),
        ):
            images = list(stream)
            assert [tuple(some.shape) for some in images] == [(3, 3, 224, 224), (1, 3, 224, 224)]
            assert images[0].min() >= -1
            assert images[0].max() <= 1

    def test_reading_leaves_threads_and_cache_as_they_were(self):
        before = torch.get_num_threads(), paths.CACHE
        table = bench.reading_times(FEW, 4).set_index("way")
        assert (torch.get_num_threads(), paths.CACHE) == before
        assert table.at["authors (Pillow, torchvision)", "ratio"] == 1
        assert (table > 0).all(axis=None)

    def test_decoders_give_batches_alike(self, tmp_path):
        table = bench.decoding_times(FEW, 4).set_index("way")
        assert table.at["ours, from the files", "ratio"] == 1
        assert (table > 0).all(axis=None)
        settings = bench.photographs(tmp_path, FEW, 224)
        (images,) = reading._torchvision_stream(data.load(settings), [np.array([0, 1, 2])])
        assert images.shape == (3, 3, 224, 224)
        assert -1 <= images.min() < images.max() <= 1

    def test_small_files_have_a_first_and_later_epochs(self):
        setting = bench.StepSetting("mini_vit", 48, torch.float32, CPU)
        spent = {"files": np.array([4.0, 2.0, 2.0]), "memory": np.array([1.0, 1.0, 1.0])}
        table = reading._first_and_later("linear", 8, 4, setting, spent)
        assert table["epoch"].tolist() == ["first", "later"]
        assert table["beside_memory"].tolist() == [0.25, 0.5]
        assert table["images_per_s"].tolist() == [1, 2]


class TestVectors:
    def test_embeddings_and_their_table(self):
        vectors, table = bench.embeddings_of({"a": (60, 6), "b": (20, 10)}, dim=32)
        assert vectors.shape == (80, 32)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
        assert table.groupby("dataset")["label"].agg(
            ["min", "max", "size"]
        ).to_numpy().tolist() == [
            [0, 5, 60],
            [6, 15, 20],
        ]
        cosines = vectors @ vectors.T
        labels = table["label"].to_numpy()
        alike = labels[:, None] == labels
        assert cosines[alike].mean() > cosines[~alike].mean() + 0.2

    def test_search_is_timed_beside_two_references(self):
        pytest.importorskip("pytorch_metric_learning")
        table = bench.search_times({"a": (60, 6)}, CLOCK)
        assert table["beside_faiss"].iloc[0] == table["beside_library"].iloc[-1] == 1
        assert (table["rows"] == 60).all()
