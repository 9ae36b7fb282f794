"""Every loss: values by hand, the contract of `forward`, gradients under stress, state, errors."""

import math

import pytest
import torch
from torch.nn import functional as F

from pumalib import losses

C, D = 7, 8
PAIRS = ("contrastive", "triplet", "npair", "margin", "ms", "supcon", "hyp", "xbm", "direction")


def make(name, classes=C, dim=D, **hyper):
    if name == "language":
        generator = torch.Generator().manual_seed(1)
        hyper.setdefault("similarity", torch.rand(classes, classes, generator=generator))
    return losses.make(name, classes, dim, **hyper)


def batch(n=32, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(C, (n,), generator=generator)


# Three points on the circle: s_01 = 0.6, s_02 = 0, s_12 = 0.8; the first two are of one class.
POINTS = torch.tensor([[1, 0], [0.6, 0.8], [0, 1]], dtype=torch.float64)
LABELS = torch.tensor([0, 0, 1])
FAR, NEAR = math.sqrt(0.8), math.sqrt(0.4)


def log1p_exp(*z):
    return math.log(1 + sum(math.exp(value) for value in z))


@pytest.mark.parametrize(
    "name, hyper, expected",
    [
        ("contrastive", {}, FAR + (1 - NEAR)),
        ("contrastive", {"pos_margin": 0.5, "neg_margin": 2}, FAR - 0.5 + (2 - NEAR + 2 - math.sqrt(2)) / 2),
        ("triplet", {}, 0.8 - 0.6 + 0.05),
        ("triplet", {"miner": "all", "margin": 1}, ((0 - 0.6 + 1) + (0.8 - 0.6 + 1)) / 2),
        ("triplet", {"miner": "all", "distance": "euclidean"}, FAR - NEAR + 0.05),
        ("triplet", {"miner": "random", "distance": "euclidean"}, FAR - NEAR + 0.05),  # one negative to draw
        ("triplet", {"miner": "semihard", "margin": 1}, 0 - 0.6 + 1),
        ("margin", {}, 1.4 - NEAR),  # anchor 0 has its negative beyond 1.4
        ("margin", {"variant": "all"}, 1.4 - NEAR),
        ("margin", {"variant": "all", "beta": 0.5}, ((FAR - 0.3) * 2 + (0.7 - NEAR)) / 3),
        ("ms", {}, (log1p_exp(-0.2) / 2 + log1p_exp(15) / 50) / 3),  # only anchor 1 has hard pairs
        ("ms", {"variant": "code"}, (log1p_exp(-0.2) / 2 + log1p_exp(15) / 50) / 3),  # one negative to draw
        ("ms", {"epsilon": 3}, (log1p_exp(-0.2) + (log1p_exp(-25) + log1p_exp(15) + log1p_exp(-25, 15)) / 50) / 3),
        ("supcon", {}, (log1p_exp(-6) + log1p_exp(2)) / 2),
        ("hyp", {"c": 0}, (log1p_exp(-3) + log1p_exp(1)) / 2),
        ("hyp", {"c": 0, "variant": "code"}, (log1p_exp(-3) + log1p_exp(1)) / 4),
        ("xbm", {}, FAR + (1 - NEAR)),
        ("direction", {}, 0.8 - 0.6 + 0.05 + 0.3 * 0.4 / (FAR * NEAR)),  # kappa < 0 at anchor 1
        ("direction", {"loss": "ms", "gamma": 0.1}, (log1p_exp(-0.2) / 2 + log1p_exp(15 + 2 / (FAR * NEAR)) / 50) / 3),
    ],
)
def test_pair_losses_by_hand(name, hyper, expected):
    assert make(name, 2, 2, **hyper)(POINTS, LABELS).item() == pytest.approx(expected, rel=1e-9, abs=1e-7)


ANGLE = math.acos(0.6)


@pytest.mark.parametrize(
    "name, hyper, expected",
    [  # x = (0.6, 0.8) of class 0; proxies (1, 0) and (0, 1)
        ("proxynca", {}, 0.8 - 0.4),
        ("proxynca++", {}, log1p_exp(18 * 0.2)),
        ("proxynca++", {"variant": "code"}, log1p_exp(2 * 0.2)),
        ("proxyanchor", {}, log1p_exp(-32 * 0.5) + log1p_exp(32 * 0.9) / 2),
        ("proxygml", {"proxies_per_class": 1, "ratio": 0.5, "weight": 0}, 0),  # keeps its own proxy only
        ("proxygml", {"proxies_per_class": 1, "ratio": 1, "weight": 0.3}, log1p_exp(0.2) + 0.3 * log1p_exp(-1)),
        ("softtriple", {"centers": 1}, log1p_exp(20 * (0.8 - 0.6 + 0.01))),
        ("cosface", {}, log1p_exp(64 * (0.8 - 0.6 + 0.35))),
        ("arcface", {}, log1p_exp(64 * (0.8 - math.cos(ANGLE + 0.5)))),
        ("curricularface", {}, log1p_exp(32 * (0.8 * (0.006 + 0.8) - math.cos(ANGLE + 0.3)))),
        ("curricularface", {"variant": "code"}, log1p_exp(32 * (0.8 * 0.8 - math.cos(ANGLE + 0.3)))),
        ("direction", {"loss": "proxynca"}, 0.8 - 0.4 - 0.3 * -0.4 / (FAR * NEAR)),
    ],
)
def test_proxy_losses_by_hand(name, hyper, expected):
    loss = make(name, 2, 2, **hyper).double()
    loss.proxies.data.copy_(torch.tensor([[3, 0], [0, 2]]))
    assert loss(POINTS[1:2], LABELS[1:2]).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_softtriple_centres_and_regulariser_by_hand():
    loss = make("softtriple", 2, 2, centers=2, tau=0.2).double()
    loss.proxies.data.copy_(torch.tensor([[1, 0], [0, 1], [0, 1], [0, 1]]))  # those of a class are adjacent
    weight = 1 / (1 + math.exp(-2))
    own = 0.6 * (1 - weight) + 0.8 * weight
    gaps = (math.sqrt(2 + 1e-5) + math.sqrt(1e-5)) / (2 * 2)
    expected = log1p_exp(20 * (0.8 - own + 0.01)) + 0.2 * gaps
    assert loss(POINTS[1:2], LABELS[1:2]).item() == pytest.approx(expected, rel=1e-9)


def test_arcface_falls_monotonically_beyond_pi():
    loss = make("arcface", 2, 2).double()
    loss.proxies.data.copy_(torch.tensor([[1, 0], [0, -1]]))
    angles = torch.linspace(2.5, 3.14, 9, dtype=torch.float64)
    for angle in angles:
        x = torch.stack([angle.cos(), angle.sin()])[None]
        target = angle + 0.5
        expected = math.cos(target) if target < math.pi else math.cos(angle) - 0.5 * math.sin(0.5)
        assert loss(x, LABELS[:1]).item() == pytest.approx(log1p_exp(64 * (-math.sin(angle) - expected)), rel=1e-6)


VARIANTS = [
    *((name, {}) for name in losses.NAMES),
    *(("triplet", {"miner": miner}) for miner in ("all", "semihard", "random")),
    *(("triplet", {"miner": miner, "distance": "euclidean"}) for miner in ("all", "batchhard", "random")),
    *(("direction", {"miner": miner}) for miner in ("all", "semihard", "random")),
    *(("direction", {"loss": loss}) for loss in ("ms", "proxynca")),
    *(("margin", {"variant": variant}) for variant in ("all", "code")),
    *(("ms", {"variant": "code"}), ("ms", {"epsilon": 3})),
    *(("hyp", {"c": 0}), ("hyp", {"c": 10, "variant": "code"}), ("curricularface", {"variant": "code"})),
    *(("softtriple", {"tau": 0.2}), ("softtriple", {"gamma": 1e-3}), ("proxyanchor", {"alpha": 1000})),
    *(("xbm", {"loss": loss, "size": 40, "warmup": 1}) for loss in ("triplet", "margin", "supcon", "hyp")),
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


@pytest.mark.parametrize("name, hyper", VARIANTS)
def test_finite_under_stress(name, hyper):
    torch.manual_seed(0)
    loss = make(name, **hyper)
    for on_proxies in (False, True):  # cosines of exactly 1 and -1 with proxies
        if on_proxies and "proxies" in dict(loss.named_parameters()):
            loss.proxies.data.copy_(torch.cat([torch.eye(D), -torch.eye(D)]).repeat(9, 1)[: len(loss.proxies)])
        for case, (x, labels) in STRESS.items():
            leaf = x.clone().requires_grad_()
            value = loss(leaf, labels)
            value.backward()
            assert value.ndim == 0 and value.isfinite(), case
            for tensor in (leaf, *loss.parameters()):
                assert tensor.grad is not None and tensor.grad.isfinite().all(), case
                tensor.grad = None


@pytest.mark.parametrize("name", ["triplet", "npair", "margin", "ms", "supcon", "hyp", "direction"])
def test_zero_with_a_graph_without_positives(name):
    x = batch(C)[0].requires_grad_()
    value = make(name)(x, torch.arange(C))
    value.backward()
    assert value.item() == 0 and (x.grad == 0).all()


@pytest.mark.parametrize("name", losses.NAMES)
def test_low_precision_and_autocast(name):
    x, labels = batch(dtype=torch.bfloat16)

    def value(dtype, autocast):
        torch.manual_seed(0)
        loss = make(name)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss(x.to(dtype), labels)

    single, double = value(torch.float32, False), value(torch.float64, True)
    assert value(torch.bfloat16, True) == value(torch.float32, True) == single
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    if name != "margin":  # float64 draws other negatives
        assert single.item() == pytest.approx(double.item(), rel=1e-5)


def test_batches_and_outputs_that_losses_want():
    wanted = {name: make(name).batches for name in losses.NAMES}
    assert {name for name, kind in wanted.items() if kind == "classes"} == {*PAIRS, "language"}
    assert make("direction", loss="proxynca").batches == make("language", loss="arcface").batches == "random"
    assert not make("hyp").normalised_input and not make("npair").normalised_input and make("ms").normalised_input


STATES = [("curricularface", {}), ("curricularface", {"variant": "code"})]
STATES += [("xbm", {"size": 40}), ("xbm", {"size": 40, "warmup": 3}), ("language", {"loss": "xbm", "size": 40})]


@pytest.mark.parametrize("name, hyper", STATES)
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
    loss(*batch())  # outside training it stands still
    assert all((before[key] == value).all() for key, value in loss.state_dict().items())


def test_t_of_the_released_curricularface_is_per_class():
    (x, labels), loss = batch(), make("curricularface", variant="code")
    own = (F.normalize(x) @ F.normalize(loss.proxies.detach()).T).gather(1, labels[:, None])[:, 0]
    for _ in range(2):
        loss(x, labels)
    means = [own[labels == c].mean() if (labels == c).any() else torch.tensor(0.0) for c in range(C)]
    assert torch.allclose(loss.t, torch.stack(means) * 0.01 * 1.99, atol=1e-7)


@pytest.mark.parametrize(
    "x, labels, message",
    [
        (torch.randn(4, D), torch.tensor([0, 1, 2, C]), f"0..{C - 1}, got 0..{C}"),
        (torch.randn(4, D + 1), torch.zeros(4, dtype=torch.long), r"shape \(N, 8\)"),
        (torch.zeros(4, D, dtype=torch.long), torch.zeros(4, dtype=torch.long), "must be floats"),
        (torch.randn(0, D), torch.zeros(0, dtype=torch.long), "N >= 1"),
        (torch.randn(4, D), torch.zeros(4), r"integers of shape \(N,\) .* got torch.float32"),
    ],
)
def test_bad_input(x, labels, message):
    for name in ("cosface", "triplet", "xbm"):
        with pytest.raises(ValueError, match=message):
            make(name)(x, labels)
    with pytest.raises(ValueError, match="raise size"):
        make("xbm", size=16)(*batch(17))


def test_bad_names():
    for name, hyper, message in (
        ("tripel", {}, "unknown loss 'tripel'; known: contrastive, triplet"),
        ("cosface", {"margn": 1}, "unknown 'margn' of CosFace; known: scale, margin"),
        ("triplet", {"miner": "easy"}, "unknown miner 'easy'; known: batchhard, all"),
        ("language", {"similarity": torch.ones(2, 3)}, r"similarity must be \(7, 7\)"),
        ("xbm", {"loss": "cosface"}, "xbm cannot hold CosFace"),
        ("xbm", {"loss": "ms", "epsilom": 1}, "unknown 'epsilom' of MultiSimilarity"),
        ("direction", {"loss": "supcon"}, "unknown 'direction' of SupCon"),
        ("proxygml", {"ratio": 1.5}, "ratio must lie"),
        ("curricularface", {"margin": "x"}, "margin = 'x': it should be a valid number"),
        ("triplet", {"margin": math.nan}, "margin = nan: it should be"),
        ("softtriple", {"centers": 2.5}, "centers = 2.5: it should be a valid integer"),
        ("cosface", {"scale": -3}, "scale = -3: it should be greater than or equal to 0"),
    ):
        with pytest.raises(ValueError, match=message):
            losses.make(name, C, D, **hyper)
    with pytest.raises(ValueError, match=r"C\^2 K numbers; weight = 0 for so many classes"):
        losses.make("proxygml", 6000, 1)


def test_hyp_averages_points_of_the_ball():
    loss = make("hyp", 2, 2)
    outputs = torch.tensor([[[0.4, 1], [2, 0], [0.5, 0]], [[0.4, 1], [-2, 0], [1.5, 0]]], dtype=torch.float64)
    expected = torch.tensor([[0.4, 1], [0, 0], [1, 0]], dtype=torch.float64)  # of two: half way along the geodesic
    torch.testing.assert_close(loss.average(outputs), expected)
    outputs = batch(12, torch.float64)[0].view(3, 4, D)
    klein = [2 * x / (1 + loss.c * x.square().sum(1, keepdim=True)) for x in map(loss.project, outputs)]
    weights = [(1 - loss.c * x.square().sum(1, keepdim=True)).rsqrt() for x in klein]
    middle = loss.project(loss.average(outputs))
    expected = sum(w * x for w, x in zip(weights, klein)) / sum(weights)  # Einstein's, in the Klein model
    torch.testing.assert_close(2 * middle / (1 + loss.c * middle.square().sum(1, keepdim=True)), expected)
    torch.testing.assert_close(make("hyp", 2, 2, c=0).average(outputs), F.normalize(outputs, dim=2).mean(0))
