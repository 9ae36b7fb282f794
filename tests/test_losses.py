"""Every loss: values by hand, the contract of `forward`, gradients, state, settings."""

import doctest
import json
import math
import warnings

import pytest
import torch
from torch.nn import functional as F

from pumalib import losses
from pumalib.losses import wrappers

C, D = 7, 8


def make(name, classes=C, dim=D, **hyper):
    if name == "language":
        generator = torch.Generator().manual_seed(1)
        hyper.setdefault("similarity", torch.rand(classes, classes, generator=generator))
    return losses.make(name, classes, dim, **hyper)


def batch(n=32, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(C, (n,), generator=generator)


# ---- values by hand

# Three points on the circle: s_01 = 0.6, s_02 = 0, s_12 = 0.8; the first two are of one class.
POINTS = torch.tensor([[1, 0], [0.6, 0.8], [0, 1]], dtype=torch.float64)
LABELS = torch.tensor([0, 0, 1])
FAR, NEAR = math.sqrt(0.8), math.sqrt(0.4)


def log1p_exp(*z):
    return math.log(1 + sum(math.exp(value) for value in z))


# Of multi-similarity only anchor 1 has hard pairs.
MS = (log1p_exp(-0.2) / 2 + log1p_exp(15) / 50) / 3
ALL_MS = (log1p_exp(-0.2) + (log1p_exp(-25) + log1p_exp(15) + log1p_exp(-25, 15)) / 50) / 3
DIRECTED_MS = (log1p_exp(-0.2) / 2 + log1p_exp(15 + 2 / (FAR * NEAR)) / 50) / 3
BOTH_MARGINS = FAR - 0.5 + (2 - NEAR + 2 - math.sqrt(2)) / 2


@pytest.mark.parametrize(
    ("name", "hyper", "expected"),
    [
        ("contrastive", {}, FAR + (1 - NEAR)),
        ("contrastive", {"pos_margin": 0.5, "neg_margin": 2}, BOTH_MARGINS),
        ("triplet", {}, 0.8 - 0.6 + 0.05),
        ("triplet", {"miner": "all", "margin": 1}, ((0 - 0.6 + 1) + (0.8 - 0.6 + 1)) / 2),
        ("triplet", {"miner": "all", "distance": "euclidean"}, FAR - NEAR + 0.05),
        # There is one negative to draw.
        ("triplet", {"miner": "random", "distance": "euclidean"}, FAR - NEAR + 0.05),
        ("triplet", {"miner": "semihard", "margin": 1}, 0 - 0.6 + 1),
        # Anchor 0 has its negative beyond 1.4.
        ("margin", {}, 1.4 - NEAR),
        ("margin", {"variant": "all"}, 1.4 - NEAR),
        ("margin", {"variant": "all", "beta": 0.5}, ((FAR - 0.3) * 2 + (0.7 - NEAR)) / 3),
        ("ms", {}, MS),
        ("ms", {"variant": "code"}, MS),
        ("ms", {"epsilon": 3}, ALL_MS),
        ("supcon", {}, (log1p_exp(-6) + log1p_exp(2)) / 2),
        ("hyp", {"c": 0}, (log1p_exp(-3) + log1p_exp(1)) / 2),
        ("hyp", {"c": 0, "variant": "code"}, (log1p_exp(-3) + log1p_exp(1)) / 4),
        ("xbm", {}, FAR + (1 - NEAR)),
        # kappa < 0 at anchor 1.
        ("direction", {}, 0.8 - 0.6 + 0.05 + 0.3 * 0.4 / (FAR * NEAR)),
        ("direction", {"loss": "ms", "gamma": 0.1}, DIRECTED_MS),
    ],
)
def test_pair_losses_by_hand(name, hyper, expected):
    value = make(name, 2, 2, **hyper)(POINTS, LABELS)
    assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-7)


@pytest.mark.parametrize("base", ["triplet", "proxynca", "ms"])
def test_a_direction_of_weight_zero_is_the_plain_loss_to_the_last_bit(base):
    plain = value_and_gradient(base)
    at_zero = value_and_gradient("direction", loss=base, gamma=0.0)
    directed = value_and_gradient("direction", loss=base, gamma=0.3)
    assert all(map(torch.equal, plain, at_zero))
    assert not torch.equal(plain[1], directed[1])


def value_and_gradient(name, **settings):
    """Of a loss on twelve random embeddings of four classes, from the same proxies each time."""
    torch.manual_seed(0)
    x = torch.randn(12, 6, requires_grad=True)
    value = make(name, 4, 6, **settings)(x, torch.arange(12) // 3)
    return value, torch.autograd.grad(value, x)[0]


ANGLE = math.acos(0.6)
# With one proxy a class; half of them: only the sample's own is kept.
HALF_GML = {"proxies_per_class": 1, "ratio": 0.5, "weight": 0}
ALL_GML = {"proxies_per_class": 1, "ratio": 1, "weight": 0.3}
CODE = {"variant": "code"}


@pytest.mark.parametrize(
    ("name", "hyper", "expected"),
    [
        # x = (0.6, 0.8) of class 0; proxies (1, 0) and (0, 1).
        ("proxynca", {}, 0.8 - 0.4),
        ("proxynca++", {}, log1p_exp(18 * 0.2)),
        ("proxynca++", CODE, log1p_exp(2 * 0.2)),
        ("proxyanchor", {}, log1p_exp(-32 * 0.5) + log1p_exp(32 * 0.9) / 2),
        ("proxygml", HALF_GML, 0),
        ("proxygml", ALL_GML, log1p_exp(0.2) + 0.3 * log1p_exp(-1)),
        ("softtriple", {"centers": 1}, log1p_exp(20 * (0.8 - 0.6 + 0.01))),
        ("normsoftmax", {}, log1p_exp((0.8 - 0.6) / 0.05)),
        ("cosface", {}, log1p_exp(64 * (0.8 - 0.6 + 0.35))),
        ("arcface", {}, log1p_exp(64 * (0.8 - math.cos(ANGLE + 0.5)))),
        ("curricularface", {}, log1p_exp(32 * (0.8 * (0.006 + 0.8) - math.cos(ANGLE + 0.3)))),
        ("curricularface", CODE, log1p_exp(32 * (0.8 * 0.8 - math.cos(ANGLE + 0.3)))),
        ("direction", {"loss": "proxynca"}, 0.8 - 0.4 - 0.3 * -0.4 / (FAR * NEAR)),
    ],
)
def test_proxy_losses_by_hand(name, hyper, expected):
    loss = make(name, 2, 2, **hyper).double()
    loss.proxies.data.copy_(torch.tensor([[3, 0], [0, 2]]))
    assert loss(POINTS[1:2], LABELS[1:2]).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_cross_entropy_by_hand():
    """Neither embeddings nor class vectors are normalised."""
    loss = make("crossentropy", 2, 2).double()
    loss.classifier.weight.data.copy_(torch.tensor([[3, 0], [0, 2]]))
    loss.classifier.bias.data.copy_(torch.tensor([0.5, -0.5]))
    x = 10 * POINTS[1:2]
    expected = log1p_exp((2 * 8 - 0.5) - (3 * 6 + 0.5))
    assert loss(x, LABELS[1:2]).item() == pytest.approx(expected, rel=1e-9)


def test_softtriple_centres_and_regulariser_by_hand():
    loss = make("softtriple", 2, 2, centers=2, tau=0.2).double()
    # Those of a class are adjacent.
    loss.proxies.data.copy_(torch.tensor([[1, 0], [0, 1], [0, 1], [0, 1]]))
    weight = 1 / (1 + math.exp(-2))
    own = 0.6 * (1 - weight) + 0.8 * weight
    gaps = (math.sqrt(2 + 1e-5) + math.sqrt(1e-5)) / (2 * 2)
    expected = log1p_exp(20 * (0.8 - own + 0.01)) + 0.2 * gaps
    assert loss(POINTS[1:2], LABELS[1:2]).item() == pytest.approx(expected, rel=1e-9)


def test_arcface_falls_monotonically_beyond_pi():
    loss = make("arcface", 2, 2).double()
    loss.proxies.data.copy_(torch.tensor([[1, 0], [0, -1]]))
    for angle in torch.linspace(2.5, 3.14, 9, dtype=torch.float64):
        x = torch.stack([angle.cos(), angle.sin()])[None]
        target = math.cos(angle) - 0.5 * math.sin(0.5)
        if angle + 0.5 < math.pi:
            target = math.cos(angle + 0.5)
        expected = log1p_exp(64 * (-math.sin(angle) - target))
        assert loss(x, LABELS[:1]).item() == pytest.approx(expected, rel=1e-6)


def test_examples_of_docstrings():
    tried = doctest.testmod(losses)
    assert tried.attempted > 0
    assert tried.failed == 0


# ---- the contract of every loss

VARIANTS = [
    *((name, {}) for name in losses.list_losses()),
    ("triplet", {"miner": "all"}),
    ("triplet", {"miner": "semihard"}),
    ("triplet", {"miner": "random"}),
    ("triplet", {"miner": "all", "distance": "euclidean"}),
    ("triplet", {"miner": "batchhard", "distance": "euclidean"}),
    ("triplet", {"miner": "random", "distance": "euclidean"}),
    ("direction", {"miner": "all"}),
    ("direction", {"miner": "semihard"}),
    ("direction", {"miner": "random"}),
    ("direction", {"loss": "ms"}),
    ("direction", {"loss": "proxynca"}),
    ("margin", {"variant": "all"}),
    ("margin", {"variant": "code"}),
    ("ms", {"variant": "code"}),
    ("ms", {"epsilon": 3}),
    ("hyp", {"c": 0}),
    ("hyp", {"c": 10, "variant": "code"}),
    ("curricularface", {"variant": "code"}),
    ("softtriple", {"tau": 0.2}),
    ("softtriple", {"gamma": 1e-3}),
    ("proxyanchor", {"alpha": 1000}),
    ("xbm", {"loss": "triplet", "size": 40, "warmup": 1}),
    ("xbm", {"loss": "margin", "size": 40, "warmup": 1}),
    ("xbm", {"loss": "supcon", "size": 40, "warmup": 1}),
    ("xbm", {"loss": "hyp", "size": 40, "warmup": 1}),
]

STRESS = {
    "random": batch(),
    "scaled": (100 * batch()[0], batch()[1]),
    "one": (batch(1)[0], torch.tensor([3])),
    "one class": (batch()[0], torch.full((32,), 3)),
    "no positive": (batch(C)[0], torch.arange(C)),
    "duplicates": (batch(2)[0].repeat(8, 1), torch.arange(16) % 3),
    "all equal": (torch.ones(16, D), torch.arange(16) % 3),
    "opposite": (torch.cat([batch(8)[0], -batch(8)[0]]), torch.arange(16) % 3),
    "axes": (torch.eye(D).repeat(2, 1), torch.arange(16) % 3),
    "zero": (torch.zeros(8, D), torch.arange(8) % 3),
    "huge": (1e30 * batch()[0], batch()[1]),
    "tiny": (1e-30 * batch()[0], batch()[1]),
    "mixed": (batch()[0] * 10.0 ** torch.arange(-16, 16)[:, None], batch()[1]),
}


def assert_finite(loss, x, labels, where):
    """The value, and the gradients of embeddings and parameters."""
    leaf = x.clone().requires_grad_()
    value = loss(leaf, labels)
    value.backward()
    assert value.ndim == 0, where
    assert value.isfinite(), where
    for tensor in (leaf, *loss.parameters()):
        assert tensor.grad is not None, where
        assert tensor.grad.isfinite().all(), where
        tensor.grad = None


@pytest.mark.parametrize(("name", "hyper"), VARIANTS)
def test_finite_under_stress(name, hyper):
    torch.manual_seed(0)
    loss = make(name, **hyper)
    for case, (x, labels) in STRESS.items():
        assert_finite(loss, x, labels, case)
    if "proxies" in dict(loss.named_parameters()):
        # Cosines of exactly 1 and -1 with proxies.
        axes = torch.cat([torch.eye(D), -torch.eye(D)]).repeat(9, 1)
        loss.proxies.data.copy_(axes[: len(loss.proxies)])
        for case, (x, labels) in STRESS.items():
            assert_finite(loss, x, labels, f"{case}, proxies on the axes")


NO_PAIR = ["triplet", "npair", "margin", "ms", "supcon", "hyp", "direction"]


@pytest.mark.parametrize("name", NO_PAIR)
def test_zero_with_a_graph_without_positives(name):
    x = batch(C)[0].requires_grad_()
    value = make(name)(x, torch.arange(C))
    value.backward()
    assert value.item() == 0
    assert (x.grad == 0).all()


@pytest.mark.parametrize("name", losses.list_losses())
def test_low_precision_and_autocast(name):
    x, labels = batch(dtype=torch.bfloat16)

    def value(dtype, autocast, draws=0):
        torch.manual_seed(0)
        loss = make(name)
        torch.manual_seed(draws)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss(x.to(dtype), labels)

    single = value(torch.float32, False)
    double = value(torch.float64, True)
    assert value(torch.bfloat16, True) == value(torch.float32, True) == single
    assert single.dtype == torch.float32
    assert double.dtype == torch.float64
    # In float64 other negatives are drawn, by losses that draw.
    if value(torch.float32, False, draws=1) == single:
        assert single.item() == pytest.approx(double.item(), rel=1e-5)


PAIRS = ["contrastive", "triplet", "npair", "margin", "ms", "supcon", "hyp", "xbm", "direction"]
PROXIES = [
    "proxynca",
    "proxynca++",
    "proxyanchor",
    "proxygml",
    "normsoftmax",
    "softtriple",
    "cosface",
    "arcface",
]


# By hand: cosines of POINTS are 0.6, 0 and 0.8, distances FAR of the pair and NEAR of the nearest.
ZEROS = [
    # Six ordered pairs: two positives and four negatives; only NEAR's two negatives are below 0.7.
    ("contrastive", {"neg_margin": 0.7}, 2 / 6),
    # Anchors 0 and 1 have a positive; only anchor 1 has a negative that is nearer.
    ("triplet", {"margin": 0.05}, 1 / 2),
    ("triplet", {"margin": 5.0}, 0),
    ("triplet", {"margin": 0.05, "miner": "all"}, 1 / 2),
    # Pulls FAR - 0.1 twice, pushes 0.3 - d: none.
    ("margin", {"beta": 0.2, "margin": 0.1, "variant": "all"}, 1 / 2),
    # Anchor 2 has no positive, and without one no pair is hard.
    ("ms", {}, 2 / 3),
    ("xbm", {"size": 3, "neg_margin": 0.7}, 2 / 6),
]


@pytest.mark.parametrize("name, hyper, share", ZEROS)
def test_the_share_of_zero_terms_by_hand(name, hyper, share):
    loss = losses.make(name, dim=2, **hyper)
    assert loss.share_of_zeros() is None
    loss(POINTS, LABELS)
    assert float(loss.share_of_zeros()) == pytest.approx(share)
    assert not loss.share_of_zeros().requires_grad
    assert "zero" not in " ".join(loss.state_dict())


@pytest.mark.parametrize("name", ["triplet", "margin", "ms"])
def test_without_a_pair_every_term_is_zero(name):
    loss = losses.make(name)
    loss(POINTS, torch.arange(3))
    assert float(loss.share_of_zeros()) == 1


def test_losses_whose_terms_are_never_zero_know_no_share():
    for name in ("curricularface", "proxyanchor", "npair", "hyp"):
        loss = make(name, classes=2, dim=2)
        loss(POINTS, LABELS)
        assert loss.share_of_zeros() is None


def test_batches_and_outputs_that_losses_want():
    for name in losses.list_losses():
        assert make(name).batches in ("classes", "random"), name
    for name in (*PAIRS, "language"):
        assert make(name).batches == "classes", name
    for name in (*PROXIES, "curricularface"):
        assert make(name).batches == "random", name
    assert make("direction", loss="proxynca").batches == "random"
    assert make("language", loss="arcface").batches == "random"
    assert not make("hyp").normalised_input
    assert not make("npair").normalised_input
    assert make("ms").normalised_input


# ---- state

STATES = [
    ("curricularface", {}),
    ("curricularface", {"variant": "code"}),
    ("xbm", {"size": 40}),
    ("xbm", {"size": 40, "warmup": 3}),
    ("language", {"loss": "xbm", "size": 40}),
]


@pytest.mark.parametrize(("name", "hyper"), STATES)
def test_saved_and_restored_in_the_middle(name, hyper, tmp_path):
    torch.manual_seed(0)
    steps = [(torch.randn(16, D), torch.randint(C, (16,))) for _ in range(8)]
    loss = make(name, **hyper)
    for x, labels in steps[:4]:
        loss(x, labels)
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    expected = [loss(x, labels).item() for x, labels in steps[4:]]
    fresh = make(name, **hyper)
    fresh.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    assert [fresh(x, labels).item() for x, labels in steps[4:]] == expected

    before = {key: value.clone() for key, value in loss.eval().state_dict().items()}
    loss(*batch())
    after = loss.state_dict()
    assert all((before[key] == after[key]).all() for key in before), "it moved outside training"


# Checkpoints have these names.
@pytest.mark.parametrize(
    ("name", "hyper", "state"),
    [
        ("triplet", {}, []),
        ("proxyanchor", {}, ["proxies"]),
        ("curricularface", {}, ["proxies", "t"]),
        ("xbm", {}, ["memory", "memory_labels", "position", "steps"]),
        ("language", {"loss": "arcface"}, ["loss.proxies"]),
        ("direction", {"loss": "proxynca"}, ["proxies"]),
    ],
)
def test_names_of_the_state(name, hyper, state):
    assert list(make(name, **hyper).state_dict()) == state


def test_t_of_the_released_curricularface_is_per_class():
    x, labels = batch()
    loss = make("curricularface", variant="code")
    cosines = F.normalize(x) @ F.normalize(loss.proxies.detach()).T
    own = cosines.gather(1, labels[:, None])[:, 0]
    for _ in range(2):
        loss(x, labels)
    means = torch.zeros(C)
    for c in labels.unique():
        means[c] = own[labels == c].mean()
    assert torch.allclose(loss.t, means * 0.01 * 1.99, atol=1e-7)


def test_hyp_averages_points_of_the_ball():
    loss = make("hyp", 2, 2)
    first = [[0.4, 1], [2, 0], [0.5, 0]]
    second = [[0.4, 1], [-2, 0], [1.5, 0]]
    outputs = torch.tensor([first, second], dtype=torch.float64)
    # Of two points it is half way along the geodesic.
    expected = torch.tensor([[0.4, 1], [0, 0], [1, 0]], dtype=torch.float64)
    torch.testing.assert_close(loss.average(outputs), expected)

    def klein(points):
        return 2 * points / (1 + loss.c * points.square().sum(-1, keepdim=True))

    outputs = batch(12, torch.float64)[0].view(3, 4, D)
    points = torch.stack([klein(loss.project(x)) for x in outputs])
    weights = (1 - loss.c * points.square().sum(-1, keepdim=True)).rsqrt()
    # Einstein's midpoint, in the Klein model.
    expected = (weights * points).sum(0) / weights.sum(0)
    torch.testing.assert_close(klein(loss.project(loss.average(outputs))), expected)

    flat = make("hyp", 2, 2, c=0)
    torch.testing.assert_close(flat.average(outputs), F.normalize(outputs, dim=2).mean(0))


# ---- what is refused

INTEGERS = torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(
    ("x", "labels", "message"),
    [
        (torch.randn(4, D), torch.tensor([0, 1, 2, C]), f"0..{C - 1}, got 0..{C}"),
        (torch.randn(4, D + 1), INTEGERS, r"shape \(N, 8\)"),
        (torch.zeros(4, D, dtype=torch.long), INTEGERS, "must be floats"),
        (torch.randn(0, D), INTEGERS[:0], "N >= 1"),
        (torch.randn(4, D), torch.zeros(4), r"integers of shape \(N,\) .* got torch.float32"),
        (torch.randn(4, D), [0.5] * 4, r"integers of shape \(N,\) .* got torch.float64"),
        (torch.randn(4, D), INTEGERS[:, None], r"got torch.int64 \(4, 1\) for embeddings \(4, 8\)"),
        (torch.randn(4, D), [0, 1, 2], r"got torch.int64 \(3,\) for embeddings \(4, 8\)"),
        (torch.randn(4, D), [*"abcd"], r"labels must be integers of shape \(N,\) \("),
        (torch.randn(4, D), None, r"labels must be integers of shape \(N,\) \("),
        (torch.randn(4, D), [-1, 0, 1, 2], "got -1..2"),
        (torch.randn(4, D), torch.ones(4, dtype=torch.bool), "got torch.bool"),
        (torch.randn(4, D).numpy(), INTEGERS, "embeddings must be a tensor, .* got ndarray"),
    ],
)
@pytest.mark.parametrize("name", ["cosface", "triplet", "xbm"])
def test_bad_input(name, x, labels, message):
    with pytest.raises(ValueError, match=message):
        make(name)(x, labels)


@pytest.mark.parametrize("name", losses.list_losses())
def test_labels_may_be_a_list_or_an_array_of_any_integers(name):
    x, labels = batch()
    given = [labels.tolist(), labels.numpy().astype("uint8"), labels.numpy().astype("uint16")]
    for other in (*given, labels.short()):
        torch.manual_seed(0)
        found = make(name)(x, other)
        torch.manual_seed(0)
        expected = make(name)(x, labels)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", losses.list_losses())
def test_one_class_gives_a_number_or_is_refused(name):
    x, _ = batch(4)
    if name == "proxynca":
        with pytest.raises(ValueError, match="num_classes must be 2 or more"):
            make(name, classes=1)
    else:
        assert make(name, classes=1)(x, INTEGERS).isfinite()


def test_a_batch_must_fit_into_the_memory():
    with pytest.raises(ValueError, match="does not fit into a memory of size 16; raise size"):
        make("xbm", size=16)(*batch(17))


@pytest.mark.parametrize(
    ("name", "hyper", "message"),
    [
        ("tripel", {}, "unknown loss 'tripel'; known: .*contrastive, triplet"),
        ("cosface", {"margn": 1}, "unknown 'margn' of CosFace; known: scale, margin"),
        ("triplet", {"miner": "easy"}, "unknown miner 'easy'; known: batchhard, all"),
        ("hyp", {"variant": "all"}, "unknown variant 'all'; known: paper, code"),
        ("language", {"similarity": torch.ones(2, 3)}, r"similarity must be \(7, 7\)"),
        ("xbm", {"loss": "cosface"}, "xbm cannot hold CosFace"),
        ("xbm", {"loss": "ms", "epsilom": 1}, "unknown 'epsilom' of MultiSimilarity"),
        ("direction", {"loss": "supcon"}, "unknown 'direction' of SupCon"),
        ("direction", {"direction": 0.5}, "direction = 0.5: .* gamma"),
        ("direction", {"loss": "direction"}, "this loss holds another one, not itself"),
        ("proxygml", {"ratio": 1.5}, "ratio must lie"),
        ("curricularface", {"margin": "x"}, "margin = 'x': it should be a valid number"),
        ("triplet", {"margin": math.nan}, "margin = nan: it should be"),
        ("triplet", {"margin": True}, "margin = True: a number is needed, not true or false"),
        ("softtriple", {"centers": 2.5}, "centers = 2.5: it should be a valid integer"),
        ("cosface", {"scale": -3}, "scale = -3: it should be greater than or equal to 0"),
    ],
)
def test_bad_names_and_values(name, hyper, message):
    with pytest.raises(ValueError, match=message):
        losses.make(name, C, D, **hyper)


def test_proxygml_of_too_many_classes():
    with pytest.raises(ValueError, match=r"C\^2 K numbers; weight = 0 for so many classes"):
        losses.make("proxygml", 6000, 1)


def test_proxygml_of_too_few_classes():
    """... for its ratio: 0.05 of 20 classes are a sample's own proxies and no other."""
    x = torch.randn(8, 4, requires_grad=True)
    y = torch.arange(8)
    with pytest.warns(UserWarning, match="ratio = 0.05 keeps 12 of 240 .* a ratio above 0.05"):
        loss = losses.make("proxygml", 20, 4)
    loss(x, y).backward()
    assert not x.grad.any()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = losses.make("proxygml", 20, 4, ratio=0.2)
    loss(x, y).backward()
    assert x.grad.any(1).all()


@pytest.mark.parametrize(
    ("name", "key", "allowed"),
    [
        ("supcon", "temperature", "greater than 0"),
        ("hyp", "temperature", "greater than 0"),
        ("hyp", "clip", "greater than 0"),
        ("ms", "alpha", "greater than 0"),
        ("ms", "beta", "greater than 0"),
        ("softtriple", "gamma", "greater than 0"),
        ("softtriple", "centers", "greater than or equal to 1"),
        ("proxygml", "proxies_per_class", "greater than or equal to 1"),
        ("xbm", "size", "greater than or equal to 1"),
    ],
)
def test_what_divides_must_not_be_zero(name, key, allowed):
    with pytest.raises(ValueError, match=f"{key} = 0: it should be {allowed}"):
        losses.make(name, C, D, **{key: 0})


@pytest.mark.parametrize("name", losses.list_losses())
def test_a_setting_of_zero_is_refused_or_gives_numbers(name):
    x, labels = batch()
    for key, default in losses.defaults(name).items():
        if not isinstance(default, int | float) or isinstance(default, bool):
            continue
        try:
            loss = make(name, **{key: 0})
        except ValueError as error:
            assert str(error).startswith(key), "it names the setting"
        else:
            assert_finite(loss, x, labels, f"{key} = 0")


# ---- without num_classes and dim


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "xbm"])
def test_pair_losses_need_no_numbers(name):
    x, labels = batch()
    torch.manual_seed(0)
    expected = make(name)(x, labels)
    loss = losses.make(name)
    torch.manual_seed(0)
    assert loss(x, labels) == expected
    # Of other classes, and of another length.
    assert loss(batch()[0][:, :4], 1000 * labels).isfinite()
    for bad, message in (
        (labels - 1, r"labels must lie in 0\.\., got -1\.\.5"),
        (labels.float(), "labels must be integers"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(x, bad)
    with pytest.raises(
        ValueError, match=r"floats of shape \(N, D\), got torch.float32 \(32, 2, 4\)"
    ):
        loss(x.view(32, 2, 4), labels)


def test_draws_by_distance_take_the_dimension_from_the_embeddings():
    x, labels = batch()
    values = []
    for loss in (losses.make("margin"), losses.make("margin", C, D)):
        torch.manual_seed(5)
        values.append(loss(x, labels).item())
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        *(
            (name, {}, "learns vectors of classes: it needs num_classes and dim")
            for name in PROXIES
        ),
        ("cosface", {"dim": D}, "CosFace learns .* needs num_classes and dim"),
        ("cosface", {"num_classes": 0, "dim": D}, "num_classes = 0, dim = 8: .* equal to 1"),
        ("xbm", {}, "xbm holds embeddings of one length: it needs dim"),
        ("language", {}, "language compares every two classes: it needs num_classes"),
    ],
)
def test_who_needs_numbers_says_so(name, numbers, message):
    with pytest.raises(ValueError, match=message):
        losses.make(name, **numbers)


# ---- names, defaults, and what a run's name must say


def test_multisimilarity_is_another_name_of_ms():
    assert isinstance(losses.make("multisimilarity", epsilon=0.2), losses.LOSSES["ms"])
    assert losses.make("xbm", dim=D, loss="multisimilarity").loss.epsilon == 0.1
    assert "multisimilarity" not in losses.list_losses()
    assert losses.defaults("multisimilarity") == losses.defaults("ms")


def test_defaults_are_those_of_the_constructors():
    assert losses.defaults("contrastive") == {"pos_margin": 0.0, "neg_margin": 1.0}
    assert losses.defaults("arcface") == {"scale": 64.0, "margin": 0.5}
    assert losses.defaults("xbm") == {"loss": "contrastive", "size": 4096, "warmup": 0}
    assert losses.defaults("direction") == {"loss": "triplet", "gamma": 0.3}
    assert losses.defaults("language")["weight"] == 7.5
    with pytest.raises(ValueError, match="unknown loss 'tripel'; known: .*contrastive, triplet"):
        losses.defaults("tripel")


@pytest.mark.parametrize("name", losses.list_losses())
def test_defaults_can_be_given_and_written_down(name):
    defaults = losses.defaults(name)
    json.dumps(defaults)
    losses.make(name, C, D, **defaults)


# Defaults that were changed on purpose, by loss, as the names of new runs say them.
CHANGED = {}


@pytest.mark.parametrize("name", losses.HASH_DEFAULTS)
def test_a_name_says_nothing_of_defaults_that_never_changed(name):
    assert losses.implicit_defaults(name, {}) == CHANGED.get(name, {})


@pytest.fixture
def margin_of_a_fifth(monkeypatch):
    """Triplet's default margin changed, as by editing its constructor."""
    triplet = losses.LOSSES["triplet"]
    monkeypatch.setitem(triplet.__init__.__kwdefaults__, "margin", 0.2)
    assert losses.make("triplet").margin == 0.2


@pytest.mark.usefixtures("margin_of_a_fifth")
@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("triplet", {}, {"margin": 0.2}),
        ("triplet", {"miner": "all"}, {"margin": 0.2}),
        ("triplet", {"margin": 0.1}, {}),
        ("ms", {}, {}),
        ("xbm", {}, {}),
        ("xbm", {"loss": "triplet", "size": 64}, {"triplet.margin": 0.2}),
        ("xbm", {"loss": "triplet", "margin": 0.1}, {}),
        ("language", {"loss": "triplet"}, {"triplet.margin": 0.2}),
        ("language", {"loss": "xbm"}, {}),
        ("direction", {}, {"triplet.margin": 0.2}),
        ("direction", {"loss": "ms"}, {}),
        ("language", {"loss": "direction"}, {"direction.triplet.margin": 0.2}),
    ],
)
def test_a_changed_default_is_said(name, settings, said):
    assert losses.implicit_defaults(name, settings) == said


def test_changed_defaults_of_wrappers_are_said(monkeypatch):
    monkeypatch.setattr(wrappers.XBM, "default_loss", "ms")
    assert losses.implicit_defaults("xbm", {}) == {"loss": "ms"}
    assert losses.implicit_defaults("xbm", {"loss": "ms"}) == {}
    # Both have a weight: one's own, and that of the loss within.
    proxygml = losses.LOSSES["proxygml"]
    monkeypatch.setitem(proxygml.__init__.__kwdefaults__, "weight", 1.0)
    said = losses.implicit_defaults("language", {"loss": "proxygml", "weight": 3})
    assert said == {"proxygml.weight": 1.0}
    # The direction of a loss is always given by gamma.
    triplet = losses.LOSSES["triplet"]
    monkeypatch.setitem(triplet.__init__.__kwdefaults__, "direction", 0.1)
    assert losses.implicit_defaults("triplet", {}) == {"direction": 0.1}
    assert losses.implicit_defaults("direction", {}) == {}


class Centred(losses.Loss):
    """A loss that somebody adds, with positional hyperparameters."""

    def __init__(self, num_classes=None, dim=None, weight=1.0, power=2):
        super().__init__(num_classes, dim)
        self.weight = weight
        self.power = power

    def compute(self, x, labels):
        return self.weight * x.abs().pow(self.power).mean()


def test_a_new_loss_is_one_line_of_the_table(monkeypatch):
    monkeypatch.setitem(losses.LOSSES, "centred", Centred)
    assert losses.list_losses()[-2:] == ["centred", "direction"]
    assert losses.make("centred", weight=3)(torch.ones(2, 4), torch.zeros(2).long()) == 3
    assert losses.make("language", C, D, loss="centred", power=1).loss.power == 1
    with pytest.raises(ValueError, match="unknown 'margin' of Centred; known: weight, power"):
        losses.make("centred", margin=1)
    # All its defaults are in the names of its runs.
    assert losses.implicit_defaults("centred", {}) == {"weight": 1.0, "power": 2}
    assert losses.implicit_defaults("centred", {"power": 3}) == {"weight": 1.0}
    assert losses.implicit_defaults("language", {"loss": "centred", "power": 3}) == {
        "centred.weight": 1.0
    }


def test_a_hyperparameter_that_an_old_loss_gets(monkeypatch):
    class Weighted(losses.LOSSES["npair"]):
        def __init__(self, num_classes=None, dim=None, *, l2=0.02, weight=1.0):
            super().__init__(num_classes, dim, l2=l2)
            self.weight = weight

    monkeypatch.setitem(losses.LOSSES, "npair", Weighted)
    assert losses.implicit_defaults("npair", {}) == {"weight": 1.0}
    monkeypatch.setitem(losses.HASH_DEFAULTS, "npair", {"l2": 0.02, "weight": 1.0})
    assert losses.implicit_defaults("npair", {}) == {}
