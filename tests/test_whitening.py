"""The head that is computed: round spreads within classes, drawn images, and going on from it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_held_out import CLASSES, assert_same_weights, put_scores, root, weights  # noqa: F401

from pumalib import config, embedder, models, training
from pumalib.data import held_out as held_out_classes
from pumalib.models import whitening
from pumalib.training import frozen, held_out, loop, run_folder

RECIPE = config.Training(epochs=2, batch_size=6, lr=1e-4, device="cpu")
WHITENED = config.METHODS["whitened"]


def drawn(images=4000, width=3):
    """Features of four classes whose first direction has ten times the spread of the others."""
    rng = np.random.default_rng(0)
    of_class = np.arange(images) % 4
    means = rng.normal(0, 5, (4, width))
    spread = np.array([10.0, *[1.0] * (width - 1)])
    features = means[of_class] + spread * rng.normal(size=(images, width))
    return torch.from_numpy(features).float(), torch.from_numpy(of_class)


# ---- the map


def test_the_spread_within_classes_becomes_round():
    features, labels = drawn()
    weight, bias = whitening.whitening(features, labels)
    mapped = features.double() @ weight.T + bias
    torch.testing.assert_close(mapped.mean(0), torch.zeros(3).double(), rtol=0, atol=1e-9)
    means = torch.stack([mapped[labels == one].mean(0) for one in range(4)])
    within = mapped - means[labels]
    variances = (within.T @ within / len(within)).diagonal()
    assert variances.max() / variances.min() < 1.1, "it was a hundred"
    torch.testing.assert_close(weight, weight.T)


def test_it_is_what_the_formula_says_computed_by_hand():
    """Two features, one class of two images and one of one: a covariance of diag(2/3, 0)."""
    features = torch.tensor([[0.0, 0.0], [2.0, 0.0], [5.0, 3.0]])
    weight, bias = whitening.whitening(features, torch.tensor([7, 7, 9]))
    share = 3 / (3 + whitening.PRIOR * 2)
    mean_variance = (2 / 3 + 0) / 2
    first = share * 2 / 3 + (1 - share) * mean_variance
    second = (1 - share) * mean_variance
    expected = torch.tensor([mean_variance / first, mean_variance / second]).sqrt().diag().double()
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(bias, -expected @ torch.tensor([7 / 3, 1.0]).double())


def test_few_images_leave_the_features_nearly_as_they_are():
    features, labels = drawn(images=8, width=192)
    weight, _ = whitening.whitening(features, labels)
    cosine = (weight / weight.norm() * torch.eye(192) / 192**0.5).sum()
    assert cosine > 0.99


def test_without_two_images_that_differ_it_says_what_to_do():
    for features in (torch.randn(3, 4), torch.ones(3, 4)):
        labels = torch.arange(3) if features.std() > 0 else torch.zeros(3)
        with pytest.raises(ValueError, match="two images that differ: .* use method 'pretrained'"):
            whitening.whitening(features, labels)


# ---- a run


@pytest.fixture(scope="module")
def run(root):  # noqa: F811
    images = config.Data(benchmark="folders", root=str(root), image_size=48)
    return config.Run(data=images, dim=16, training=RECIPE, method=WHITENED)


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    return training.train(run, tmp_path_factory.mktemp("runs") / training.run_name(run))


def test_a_run_computes_it_from_the_training_images_alone(run, trained):
    bare = embedder.Embedder(
        models.build("pretrained", "mini_vit", pretrained="embedded", normalise=False), run
    )
    held = held_out_classes(run.data)
    assert set(held.train["class_name"]) == set(CLASSES["train"])
    features = embedder.embed_rows(bare.model, held, held.train, run.data)
    labels = torch.from_numpy(held.train["label"].to_numpy())
    weight, bias = whitening.whitening(torch.from_numpy(features), labels)
    model = embedder.load(trained)
    assert model.model.dim == features.shape[1] == len(bias)
    torch.testing.assert_close(model.model.head.weight.double(), weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.model.head.bias.double(), bias, rtol=1e-4, atol=1e-4)
    record = run_folder.read_record(trained)
    assert record["parameters"]["trainable"] == 0
    assert record["log"] == []


def test_it_is_saved_whole_as_any_model(trained, tmp_path):
    model = embedder.load(trained)
    again = embedder.load(model.save(tmp_path / "moved"))
    images = np.random.default_rng(0).integers(0, 256, (2, 60, 50, 3), dtype=np.uint8)
    np.testing.assert_allclose(again.embed(images), model.embed(images), atol=1e-6)

    card = (tmp_path / "moved" / "README.md").read_text()
    assert "computed from the features of its training images in one pass" in card
    assert "trained with" not in card
    described = json.loads((tmp_path / "moved" / "config.json").read_text())
    assert (described["loss"], described["epochs"]) == (None, 0)


def test_other_parts_train_under_it_and_go_on_after_a_stop(run, tmp_path, monkeypatch):
    width = 128
    method = config.method("lora", lora_rank=2, head="whitened")
    chosen = replace(run, method=method, dim=width)
    with pytest.raises(ValueError, match=r"head = 'whitened' leaves .* set dim = 128"):
        training.train(replace(chosen, dim=16), tmp_path / "narrow")
    whole = weights(training.train(chosen, tmp_path / "whole"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "open_loss", lambda setup: (_ for _ in ()).throw(KeyboardInterrupt))
        training.train(chosen, tmp_path / "stopped")
    assert_same_weights(weights(training.train(chosen, tmp_path / "stopped")), whole)


# ---- going on from it, and below it


@pytest.fixture
def going_on(run, trained):
    recipe = replace(RECIPE, score_epochs=1)
    linear = config.METHODS["linear"]
    return replace(run, method=linear, dim=128, pretrained=str(trained), training=recipe)


def put_start_and_epochs(patch, values):
    """The first of `values` is the score before training, the others those after each epoch."""
    put_scores(patch, [*values[1:], values[0]])


def test_the_start_counts_and_is_kept_where_no_epoch_is_above_it(going_on, trained, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        put_start_and_epochs(patch, [0.9, 0.5, 0.6])
        folder = training.train(going_on, tmp_path / "run")
    log = run_folder.read_record(folder)["log"]
    assert [row["epoch"] for row in log] == [0, 1, 2]
    assert [row[held_out.SCORE] for row in log] == [0.9, 0.5, 0.6]
    for name, tensor in weights(trained).items():
        torch.testing.assert_close(weights(folder)[name], tensor)
    with pytest.warns(UserWarning, match=r"no epoch finds more .* began from, 90\.0%") as said:
        training.warn_if_below(going_on, folder)
    assert f"pumalib.load({str(trained)!r})" in str(said[0].message)


def test_a_better_epoch_is_kept_and_told_nothing(going_on, trained, tmp_path, recwarn):
    with pytest.MonkeyPatch.context() as patch:
        put_start_and_epochs(patch, [0.4, 0.5, 0.6])
        folder = training.train(going_on, tmp_path / "run")
    assert not torch.equal(weights(folder)["head.weight"], weights(trained)["head.weight"])
    training.warn_if_below(going_on, folder)
    assert not [one for one in recwarn if "began from" in str(one.message)]


def test_the_score_of_the_start_is_that_of_its_model(going_on, trained, tmp_path):
    folder = training.train(going_on, tmp_path / "run")
    start = run_folder.read_record(folder)["log"][0]
    held = replace(going_on, method=WHITENED, pretrained="embedded", training=RECIPE)
    held = replace(held, data=replace(held.data, holdout=True))
    record = run_folder.read_record(training.train(held, tmp_path / "held"))
    harmonic = {row["dataset"]: row["R@1"] for row in record["table"]}["harmonic"]
    assert start[held_out.SCORE] == pytest.approx(harmonic, abs=1e-6)


def test_only_a_trained_start_is_scored(run, tmp_path):
    scored = replace(run, method=config.METHODS["linear"], training=replace(RECIPE, score_epochs=1))
    record = run_folder.read_record(training.train(scored, tmp_path / "run"))
    assert [row["epoch"] for row in record["log"]] == [1, 2]


def test_the_whitened_one_is_compared_with_the_frozen_backbone(run, trained, monkeypatch):
    accuracies = frozen._accuracies

    def stated(record):
        if record["run"]["method"]["name"] == "whitened":
            return {"unified": 0.0, "harmonic": 0.0}
        return accuracies(record)

    monkeypatch.setattr(frozen, "_accuracies", stated)
    scored = replace(run, training=replace(RECIPE, score_epochs=1))
    for chosen in (run, scored):
        with pytest.warns(UserWarning, match=r"on these folders, your model 0\.0%"):
            training.warn_if_below(chosen, trained)
