"""Values and gradients of every loss against pytorch-metric-learning, or a plain loop where it has none."""

import math

import pytest
import torch
from pytorch_metric_learning import distances, miners, regularizers
from pytorch_metric_learning import losses as pml
from torch.nn import functional as F

from pumalib import losses
from pumalib.losses.pair import distance_weights, sample

C, D, N = 9, 12, 32


def batch(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, D, generator=generator), torch.randint(C, (n,), generator=generator)


def agree(loss, reference, own_proxies=None, its_proxies=None, tolerance=1e-5):
    """Same value, same gradient of embeddings and proxies."""
    x, labels = batch()
    ours, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    if own_proxies is not None:
        turned = own_proxies.shape != its_proxies.shape  # (D, C)
        own_proxies.data.copy_(its_proxies.data.T if turned else its_proxies.data)
    value, expected = loss(ours, labels), reference(its, labels)
    value.backward()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=tolerance)
    assert torch.allclose(ours.grad, its.grad, atol=tolerance)
    if own_proxies is not None:
        assert torch.allclose(own_proxies.grad, its_proxies.grad.T if turned else its_proxies.grad, atol=tolerance)


def mined(loss, miner):
    return lambda x, labels: loss(x, labels, miner(x, labels))


COSINE, PRODUCT = {"distance": distances.CosineSimilarity()}, distances.DotProductSimilarity(normalize_embeddings=False)
SEMIHARD, SIMILAR = miners.TripletMarginMiner(0.2, "semihard", **COSINE), miners.MultiSimilarityMiner(0.1)
LENGTHS = {"embedding_regularizer": regularizers.LpRegularizer(), "embedding_reg_weight": 0.02}
CASES = {
    "contrastive": ({}, pml.ContrastiveLoss()),
    "contrastive margins": ({"pos_margin": 0.4, "neg_margin": 1.5}, pml.ContrastiveLoss(0.4, 1.5)),
    "triplet": ({}, mined(pml.TripletMarginLoss(**COSINE), miners.BatchHardMiner(**COSINE))),
    "triplet euclidean": ({"distance": "euclidean"}, mined(pml.TripletMarginLoss(), miners.BatchHardMiner())),
    "triplet all": ({"miner": "all"}, pml.TripletMarginLoss(**COSINE)),
    "triplet all euclidean": ({"miner": "all", "distance": "euclidean"}, pml.TripletMarginLoss()),
    "triplet semihard": ({"miner": "semihard", "margin": 0.2}, mined(pml.TripletMarginLoss(0.2, **COSINE), SEMIHARD)),
    "npair": ({}, pml.NPairsLoss(distance=PRODUCT, **LENGTHS)),
    "margin code": ({"variant": "code"}, mined(pml.MarginLoss(), SIMILAR)),
    "ms": ({}, mined(pml.MultiSimilarityLoss(), SIMILAR)),
    "ms all": ({"epsilon": 3}, pml.MultiSimilarityLoss()),
    "supcon": ({}, pml.SupConLoss()),
    "hyp": ({"c": 0}, pml.NTXentLoss(0.2)),
    "proxynca++": ({}, pml.ProxyNCALoss(C, D, softmax_scale=9)),
    "proxyanchor": ({}, pml.ProxyAnchorLoss(C, D)),
    "softtriple": ({}, pml.SoftTripleLoss(C, D)),
    "cosface": ({}, pml.CosFaceLoss(C, D)),
    "arcface": ({}, pml.ArcFaceLoss(C, D, margin=math.degrees(0.5))),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_agree_with_the_library(case):
    hyper, reference = CASES[case]
    loss = losses.make(case.split()[0], C, D, **hyper)
    agree(loss, reference, *([loss.proxies, next(reference.parameters())] if hasattr(loss, "proxies") else []))


def test_xbm_against_a_list():
    torch.manual_seed(0)
    loss, alone = losses.make("xbm", C, D, loss="ms", size=30, warmup=2), losses.make("ms", C, D)
    memory = []
    for step in range(6):
        x, labels = torch.randn(12, D), torch.randint(C, (12,))
        memory = (memory + list(zip(x, labels)))[-30:]
        value = loss(x, labels)
        if step < 2:
            expected = alone(x, labels)
        else:
            others, their = torch.stack([m[0] for m in memory]), torch.stack([m[1] for m in memory])
            same = labels[:, None] == their
            itself = torch.zeros_like(same)
            itself[:, -12:] = torch.eye(12, dtype=torch.bool)
            expected = alone.pairs(F.normalize(x), F.normalize(others), same & ~itself, ~same)
        assert value.item() == pytest.approx(expected.item(), rel=1e-5)


def curricular(loss, x, labels, t, code):
    """Sample by sample; t is a float, or one per class."""
    s = F.normalize(x) @ F.normalize(loss.proxies).T
    total = 0
    for row, y in zip(s, labels):
        theta = row[y].acos()
        target = (theta + 0.3).cos() if theta < math.pi - 0.3 else row[y] - 0.3 * math.sin(0.3)
        threshold = target if code else (theta + 0.3).cos()
        own_t = t[y] if code else t
        logits = [target if j == y else (s_j * (own_t + s_j) if s_j > threshold else s_j) for j, s_j in enumerate(row)]
        total = total + F.cross_entropy(32 * torch.stack(logits)[None], y[None])
    return total / len(x)


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_curricularface_against_a_loop(variant):
    torch.manual_seed(0)
    loss, twin = (losses.make("curricularface", C, D, variant=variant).double() for _ in range(2))
    loss.t.uniform_(0.1, 0.6)
    t = loss.t.clone()

    def reference(x, labels):
        x = x.double()
        own = (F.normalize(x) * F.normalize(twin.proxies)[labels]).sum(1).mean().detach()
        return curricular(twin, x, labels, t if variant == "code" else 0.99 * t + 0.01 * own, variant == "code")

    agree(loss, reference, loss.proxies, twin.proxies)


@pytest.mark.parametrize("gamma", [0, 0.3])
def test_proxynca_against_a_loop(gamma):
    torch.manual_seed(0)
    loss, twin = (losses.make("proxynca", C, D, scale=2, direction=gamma) for _ in range(2))

    def reference(x, labels):
        total, p = 0, F.normalize(twin.proxies)
        for row, y in zip(F.normalize(x), labels):
            others = [c for c in range(C) if c != y]
            kappa = {c: F.cosine_similarity(p[c] - row, p[y] - row, dim=0) for c in others}
            exponents = [-4 * ((row - p[c]).square().sum() + gamma * kappa[c]) for c in others]
            total = total + 4 * (row - p[y]).square().sum() + torch.stack(exponents).logsumexp(0)
        return total / len(x)

    agree(loss, reference, loss.proxies, twin.proxies)


@pytest.mark.parametrize("ratio, k", [(0.05, 12), (0.3, 4), (0.01, 3), (1, 2)])
def test_proxygml_against_a_loop(ratio, k):
    torch.manual_seed(0)
    loss, twin = (losses.make("proxygml", C, D, proxies_per_class=k, ratio=ratio) for _ in range(2))

    def reference(x, labels):
        p = F.normalize(twin.proxies)
        kept = math.ceil(ratio * C * k)
        total = 0
        for row, y in zip(F.normalize(x) @ p.T, labels):
            order = sorted(range(C * k), key=lambda j: -(row[j].item() + 1000 * (j // k == y)))[:kept]
            scores = {}
            for j in order:
                scores[j // k] = scores.get(j // k, 0) + row[j]
            total = total + torch.stack(list(scores.values())).logsumexp(0) - scores[y.item()]
        logits = (p @ p.T).view(C * k, C, k).sum(2)
        return total / len(x) + 0.3 * F.cross_entropy(logits, torch.arange(C).repeat_interleave(k))

    agree(loss, reference, loss.proxies, twin.proxies)


def moebius_distance(a, b, c):
    """The definition: 2 / sqrt(c) artanh(sqrt(c) |-a + b|) with Moebius addition."""
    a, product = -a, -(a * b).sum()
    added = (1 + 2 * c * product + c * b.square().sum()) * a + (1 - c * a.square().sum()) * b
    added = added / (1 + 2 * c * product + c**2 * a.square().sum() * b.square().sum())
    return 2 / math.sqrt(c) * (math.sqrt(c) * added.norm()).atanh()


@pytest.mark.parametrize("c", [0.1, 1])
def test_hyp_against_a_loop(c):
    loss = losses.make("hyp", C, D, c=c)

    def reference(x, labels):
        points = []
        for row in x.double():
            row = row * min(1, 2.3 / row.norm().item()) if row.norm() <= 2.3 else 2.3 * row / row.norm()
            points.append((math.sqrt(c) * row.norm()).tanh() * row / (math.sqrt(c) * row.norm()))
        terms = []
        for i, a in enumerate(points):
            z = {j: -moebius_distance(a, b, c) / 0.2 for j, b in enumerate(points) if j != i}
            negatives = [z[j] for j in z if labels[j] != labels[i]]
            terms += [torch.stack([z[j], *negatives]).logsumexp(0) - z[j] for j in z if labels[j] == labels[i]]
        return torch.stack(terms).mean()

    agree(loss, reference, tolerance=2e-5)


def test_language_against_a_loop():
    torch.manual_seed(0)
    similarity = torch.rand(C, C)
    inner = losses.make("ms", C, D)

    def reference(x, labels):
        unit, total = F.normalize(x), 0
        for i in range(len(x)):
            same = labels == labels[i]
            image = torch.where(same, 2.0, unit @ unit[i])
            text = torch.where(same, 2.0, similarity[labels[i], labels] + 1)
            total = total + F.kl_div(image.log_softmax(0), text.softmax(0), reduction="sum")
        return inner(x, labels) + 7.5 * total / len(x)

    agree(losses.make("language", C, D, loss="ms", similarity=similarity), reference)


def others(labels, a):
    """Positions of the positives and of the negatives of anchor a."""
    positives = [j for j in range(len(labels)) if labels[j] == labels[a] and j != a]
    return positives, [j for j in range(len(labels)) if labels[j] != labels[a]]


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("miner", ["all", "semihard", "batchhard"])
def test_direction_of_triplets_against_a_loop(miner, distance):
    loss = losses.make("direction", C, D, loss="triplet", gamma=0.3, miner=miner, distance=distance, margin=0.1)

    def reference(x, labels):
        x = F.normalize(x)
        d = 1 - x @ x.T if distance == "cosine" else (2 - 2 * x @ x.T).clamp_min(1e-12).sqrt()
        terms = []
        for a in range(len(x)):
            positives, negatives = others(labels, a)
            if miner == "batchhard":
                positives = positives and [max(positives, key=lambda j: d[a, j].item())]
                negatives = negatives and [min(negatives, key=lambda j: d[a, j].item())]
            for p in positives:
                for n in negatives:
                    if miner != "semihard" or d[a, p] < d[a, n] < d[a, p] + 0.1:
                        kappa = F.cosine_similarity(x[n] - x[a], x[p] - x[a], dim=0)
                        terms.append(d[a, p] - d[a, n] + 0.1 - 0.3 * kappa)
        terms = torch.stack(terms)
        return terms[terms > 0].mean()

    agree(loss, reference)


def test_distance_weighted_draws():
    """Negatives of one anchor are drawn by 1 / q(d), none beyond 1.4, and every positive pair gets one."""
    torch.manual_seed(0)
    d = torch.tensor([[0.0, 0.3, 0.2, 0.9, 1.2, 1.39, 1.5]])
    negative = torch.tensor([[False, False, True, True, True, True, True]])
    weights = distance_weights(d, negative, 6)
    clipped = [max(value, 0.5) for value in d[0, 2:6].tolist()]
    density = torch.tensor([value**4 * (1 - value**2 / 4) ** 1.5 for value in clipped])
    expected = torch.cat([torch.zeros(2), 1 / density, torch.zeros(1)])
    assert torch.allclose(weights[0] / weights.sum(), expected / expected.sum(), atol=1e-6)
    many = torch.ones(1, 20_000, dtype=torch.bool)
    anchor, p, n = sample(weights, many)
    share = n.bincount(minlength=7) / len(n)
    assert len(p) == 20_000 and (anchor == 0).all() and torch.allclose(share, (weights / weights.sum())[0], atol=0.02)
