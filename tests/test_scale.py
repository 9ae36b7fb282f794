"""Memory and time of a loss at many classes, against numbers counted by hand."""

import math

import pandas as pd
import pytest
import torch

from puma_study import scale
from pumalib import config, losses
from pumalib.losses.base import Loss


class Products(Loss):
    """The sum of exponentials of all products of embeddings and proxies."""

    def __init__(self, num_classes, dim):
        super().__init__(num_classes, dim)
        self.proxies = torch.nn.Parameter(torch.zeros(num_classes, dim))

    def compute(self, x, labels):
        return (x @ self.proxies.T).exp().sum()


def batch(count=6, dim=8):
    torch.manual_seed(0)
    return torch.randn(count, dim, requires_grad=True), torch.arange(count) // 2


def test_bytes_are_proxies_with_their_copies_and_what_backward_needs():
    x, labels = batch()
    held = scale.bytes_held(Products(50, 8), x, labels)
    assert held.learnt == 4 * (50 * 8 * 4), "weights, gradients and two moments, in float32"
    assert held.saved == 6 * 50 * 4, "the exponentials; not x, not the proxies"


def test_bytes_of_proxies_grow_with_classes_and_those_of_pairs_do_not():
    x, labels = batch()
    few = scale.bytes_held(losses.make("proxyanchor", 100, 8), x, labels)
    many = scale.bytes_held(losses.make("proxyanchor", 1000, 8), x, labels)
    assert many.learnt == 10 * few.learnt
    assert many.saved > 5 * few.saved
    pairs = [scale.bytes_held(losses.make("ms", count, 8), x, labels) for count in (100, 1000)]
    assert pairs[0] == pairs[1]
    assert pairs[0].learnt == 0 < pairs[0].saved


def test_time_is_of_steps_that_move_the_proxies():
    x, labels = batch()
    loss = losses.make("proxyanchor", 3, 8)
    before = loss.proxies.detach().clone()
    assert scale.milliseconds(loss, x, labels, turns=2) > 0
    assert not torch.equal(loss.proxies, before)
    assert x.grad is None
    assert scale.milliseconds(losses.make("ms"), x, labels, turns=1) > 0


def test_a_line_goes_on_from_the_last_two():
    counts = [1.0, 10.0, 100.0]
    values = [9.0, 30.0, 210.0]
    assert scale.extended(counts, values, 100) == pytest.approx(210)
    assert scale.extended(counts, values, 1000) == pytest.approx(2010)
    with pytest.raises(ValueError, match="1 measurements: a line needs two"):
        scale.extended([1.0], [1.0], 10)


def test_pairs_that_a_hinge_leaves_alone_have_no_gradient():
    # Two classes at a right angle, and the two images of the first at 60 degrees.
    x = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.75**0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    labels = torch.tensor([0, 0, 1, 1])
    # Distances: 1 within the first class, 0 in the second, sqrt(2) between them.
    silent = losses.make("contrastive", neg_margin=1.0)
    assert scale.share_of_pairs(silent, x, labels) == pytest.approx(2 / 12)
    loud = losses.make("contrastive", neg_margin=1.5)
    assert scale.share_of_pairs(loud, x, labels) == pytest.approx(10 / 12)
    assert math.isnan(scale.share_of_pairs(losses.make("proxyanchor", 2, 3), x, labels))


def test_a_training_says_what_it_cost_before_each_step():
    images = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(12) // 4
    model = torch.nn.Linear(3, 2)
    at_first = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = losses.make("contrastive", neg_margin=1.5)
    told = []
    moved = []
    options = {"shape": (2, 3, False), "seed": 0, "steps": 2}
    for spent in scale.timed_training(model, loss, optimizer, images, labels, **options):
        told.append(spent)
        moved.append(not torch.equal(model.weight, at_first))
    assert [spent.step for spent in told] == [0, 1, 2]
    assert [spent.images for spent in told] == [0, 6, 12]
    assert moved == [False, True, True]
    assert told[0].seconds == 0 and math.isnan(told[0].pairs)
    assert 0 < told[2].seconds_of_loss < told[2].seconds
    assert 0 <= told[2].pairs <= 1


def test_steps_take_turns_of_which_the_first_warms_up():
    taken = []
    steps = {"a": lambda: taken.append("a"), "b": lambda: taken.append("b")}
    table = scale.in_turns(steps, turns=2, times={"b": 2})
    assert "".join(taken) == "abb" * 3
    assert list(zip(table["step"], table["turn"])) == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert (table["milliseconds"] >= 0).all()


def test_a_line_per_loss_and_number_of_classes_with_the_machine():
    kinds = {"pairs": ("ms", {}), "proxies": ("proxyanchor", {})}
    table = scale.step_costs(kinds, [40, 80], {"proxies": 40}, turns=1)
    assert table[["loss", "classes"]].to_numpy().tolist() == [
        ["pairs", 40],
        ["pairs", 80],
        ["proxies", 40],
    ]
    assert table["learnt"].tolist() == [0, 0, 4 * 40 * 128 * 4]
    assert scale.machines(table).startswith("measured on ")
    assert scale.machines(table).count("\n") == 0, "one machine, one line"


def test_images_until_a_target():
    training = pd.DataFrame({"step": [4, 0], "reported": [0.7, 0.3], "images": [100, 0]})
    assert scale.images_until(training, 0.5) == (pytest.approx(50), True), "halfway"
    assert scale.images_until(training, 0.8) == (100, False), "never"
    assert scale.images_until(training, 0.3) == (1, True), "before any step"


def test_a_step_of_the_network_moves_its_weights(monkeypatch):
    built = []
    build = scale.models.build

    def remembered(*args, **options):
        built.append(build(*args, **options))
        return built[-1]

    monkeypatch.setattr(scale.models, "build", remembered)
    step = scale.network_step(config.profile("smoke"), count=3, part=2)
    before = [weight.detach().clone() for weight in built[0].parameters()]
    step()
    assert not all(map(torch.equal, before, built[0].parameters()))
