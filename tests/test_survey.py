"""What the notebooks on the survey's losses share, against values by hand."""

import pytest
import torch

from puma_study import survey
from pumalib import config, losses

LABELS = torch.tensor([0, 0, 1])


def test_the_triplets_of_a_batch():
    positive, negative = survey.masks(LABELS)
    triplets = survey.all_triplets(positive, negative)
    # Of two images of one class and one of another: both as anchors, against the third.
    assert triplets.nonzero().tolist() == [[0, 1, 2], [1, 0, 2]]


def test_a_hinge_is_open_by_how_far_the_margin_is_violated():
    d = torch.tensor([[0.0, 0.5, 0.4], [0.5, 0.0, 1.0], [0.4, 1.0, 0.0]])
    hinges = survey.hinges(d, margin=0.25)
    assert hinges[0, 1, 2] == pytest.approx(0.5 - 0.4 + 0.25)
    assert hinges[1, 0, 2] == 0


def test_the_loss_of_a_row():
    assert survey.make("triplet semihard", 3, 4).miner == "semihard"
    assert survey.loss_of("arcface") == ("arcface", {})
    with pytest.raises(ValueError, match="unknown loss 'mine'; known: .*npair"):
        survey.loss_of("mine")
    for name in survey.LOSSES:
        assert isinstance(survey.make(name, 40, 4), losses.Loss)


@pytest.mark.parametrize(
    "changes", [{"new_lr_factor": 1.0}, {"weight_decay": 0.5}, {"repeat_images": False}], ids=str
)
def test_a_table_of_heads_is_of_all_settings_that_train_them(changes):
    usual = survey.heads(config.profile("smoke")).about()
    assert survey.heads(config.profile("smoke", **changes)).about() != usual


def test_heads_are_trained_for_their_steps_and_measured_on_the_same_batches():
    heads = survey.heads(config.profile("smoke"), steps=3)
    assert heads.seeds == list(heads.profile.seeds)
    labels = torch.arange(40) // 4
    features = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    loss, head = heads.drawn("triplet all", 0, features, labels)
    at_first = head.weight.detach().clone()
    seen = []
    for step in heads.train(loss, head, features, labels, seed=0):
        seen.append((step, torch.equal(head.weight, at_first)))
    assert seen == [(0, True), (1, False), (2, False), (3, False)]
    _, again = heads.drawn("triplet all", 0, features, labels)
    assert torch.equal(again.weight, at_first)
    probes = heads.probes(labels, 0, repeat_images=False)
    assert all(len(probe) == heads.classes * heads.images for probe in probes)
    same = heads.probes(labels, 0, repeat_images=False)
    assert all((one == other).all() for one, other in zip(probes, same))
    of_proxies, head = heads.drawn("proxynca", 0, features, labels)
    with pytest.raises(ValueError, match="a loss with parameters is not trained here"):
        next(heads.train(of_proxies, head, features, labels, seed=0))
