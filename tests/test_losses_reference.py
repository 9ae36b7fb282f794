"""Values and gradients of losses against pytorch-metric-learning (PML), or a plain loop."""

import math

import pytest
import torch
from pytorch_metric_learning import distances, miners, regularizers
from pytorch_metric_learning import losses as pml
from torch.nn import functional as F

from pumalib import losses
from pumalib.losses.miners import distance_weights, sample

C, D, N = 9, 12, 32


def batch(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, D, generator=generator), torch.randint(C, (n,), generator=generator)


def agree(loss, reference, own_proxies=None, its_proxies=None, tolerance=1e-5):
    """Same value, same gradient of embeddings and proxies."""

    def as_ours(proxies):
        # Some of PML's are (D, C).
        return proxies if proxies.shape == own_proxies.shape else proxies.T

    x, labels = batch()
    ours = x.clone().requires_grad_()
    its = x.clone().requires_grad_()
    if own_proxies is not None:
        own_proxies.data.copy_(as_ours(its_proxies.data))
    value = loss(ours, labels)
    expected = reference(its, labels)
    value.backward()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=tolerance)
    assert torch.allclose(ours.grad, its.grad, atol=tolerance)
    if own_proxies is not None:
        assert torch.allclose(own_proxies.grad, as_ours(its_proxies.grad), atol=tolerance)


def mined(loss, miner):
    return lambda x, labels: loss(x, labels, miner(x, labels))


COSINE = {"distance": distances.CosineSimilarity()}
PRODUCT = distances.DotProductSimilarity(normalize_embeddings=False)
LENGTHS = {"embedding_regularizer": regularizers.LpRegularizer(), "embedding_reg_weight": 0.02}
BATCH_HARD = mined(pml.TripletMarginLoss(**COSINE), miners.BatchHardMiner(**COSINE))
BATCH_HARD_EUCLIDEAN = mined(pml.TripletMarginLoss(), miners.BatchHardMiner())
SEMI_HARD_MINER = miners.TripletMarginMiner(0.2, "semihard", **COSINE)
SEMI_HARD = mined(pml.TripletMarginLoss(0.2, **COSINE), SEMI_HARD_MINER)
HARD_PAIRS = miners.MultiSimilarityMiner(0.1)

CASES = {
    "contrastive": ({}, pml.ContrastiveLoss()),
    "contrastive margins": ({"pos_margin": 0.4, "neg_margin": 1.5}, pml.ContrastiveLoss(0.4, 1.5)),
    "triplet": ({}, BATCH_HARD),
    "triplet euclidean": ({"distance": "euclidean"}, BATCH_HARD_EUCLIDEAN),
    "triplet all": ({"miner": "all"}, pml.TripletMarginLoss(**COSINE)),
    "triplet all euclidean": ({"miner": "all", "distance": "euclidean"}, pml.TripletMarginLoss()),
    "triplet semihard": ({"miner": "semihard", "margin": 0.2}, SEMI_HARD),
    "npair": ({}, pml.NPairsLoss(distance=PRODUCT, **LENGTHS)),
    "margin code": ({"variant": "code"}, mined(pml.MarginLoss(), HARD_PAIRS)),
    "ms": ({}, mined(pml.MultiSimilarityLoss(), HARD_PAIRS)),
    "ms all": ({"epsilon": 3}, pml.MultiSimilarityLoss()),
    "supcon": ({}, pml.SupConLoss()),
    "hyp": ({"c": 0}, pml.NTXentLoss(0.2)),
    "proxynca++": ({}, pml.ProxyNCALoss(C, D, softmax_scale=9)),
    "proxyanchor": ({}, pml.ProxyAnchorLoss(C, D)),
    "normsoftmax": ({}, pml.NormalizedSoftmaxLoss(C, D)),
    "softtriple": ({}, pml.SoftTripleLoss(C, D)),
    "cosface": ({}, pml.CosFaceLoss(C, D)),
    "arcface": ({}, pml.ArcFaceLoss(C, D, margin=math.degrees(0.5))),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_agree_with_the_library(case):
    hyper, reference = CASES[case]
    loss = losses.make(case.split()[0], C, D, **hyper)
    if hasattr(loss, "proxies"):
        agree(loss, reference, loss.proxies, next(reference.parameters()))
    else:
        agree(loss, reference)


def test_cross_entropy_is_that_of_a_classifier_of_torch():
    x, labels = batch()
    loss = losses.make("crossentropy", C, D)
    ours = x.clone().requires_grad_()
    its = x.clone().requires_grad_()

    value = loss(ours, labels)
    expected = torch.nn.CrossEntropyLoss()(loss.classifier(its), labels)
    value.backward()
    expected.backward()
    assert value.item() == expected.item()
    assert torch.equal(ours.grad, its.grad)


def test_xbm_against_a_list():
    torch.manual_seed(0)
    loss = losses.make("xbm", C, D, loss="ms", size=30, warmup=2)
    alone = losses.make("ms", C, D)
    memory = []
    for step in range(6):
        x = torch.randn(12, D)
        labels = torch.randint(C, (12,))
        memory = (memory + list(zip(x, labels)))[-30:]
        value = loss(x, labels)
        if step < 2:
            expected = alone(x, labels)
        else:
            others = torch.stack([entry[0] for entry in memory])
            their = torch.stack([entry[1] for entry in memory])
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
        target = row[y] - 0.3 * math.sin(0.3)
        if theta < math.pi - 0.3:
            target = (theta + 0.3).cos()
        threshold = target if code else (theta + 0.3).cos()
        own_t = t[y] if code else t
        logits = []
        for j, s_j in enumerate(row):
            if j == y:
                logits.append(target)
            elif s_j > threshold:
                logits.append(s_j * (own_t + s_j))
            else:
                logits.append(s_j)
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
        if variant == "code":
            return curricular(twin, x, labels, t, code=True)
        return curricular(twin, x, labels, 0.99 * t + 0.01 * own, code=False)

    agree(loss, reference, loss.proxies, twin.proxies)


@pytest.mark.parametrize("gamma", [0, 0.3])
def test_proxynca_against_a_loop(gamma):
    torch.manual_seed(0)
    loss, twin = (losses.make("proxynca", C, D, scale=2, direction=gamma) for _ in range(2))

    def reference(x, labels):
        total = 0
        p = F.normalize(twin.proxies)
        for row, y in zip(F.normalize(x), labels):
            others = [c for c in range(C) if c != y]
            kappa = {c: F.cosine_similarity(p[c] - row, p[y] - row, dim=0) for c in others}
            exponents = [-4 * ((row - p[c]).square().sum() + gamma * kappa[c]) for c in others]
            total = total + 4 * (row - p[y]).square().sum() + torch.stack(exponents).logsumexp(0)
        return total / len(x)

    agree(loss, reference, loss.proxies, twin.proxies)


@pytest.mark.parametrize(("ratio", "k"), [(0.05, 12), (0.3, 4), (0.01, 3), (1, 2)])
def test_proxygml_against_a_loop(ratio, k):
    torch.manual_seed(0)
    loss, twin = (losses.make("proxygml", C, D, proxies_per_class=k, ratio=ratio) for _ in range(2))

    def reference(x, labels):
        p = F.normalize(twin.proxies)
        kept = math.ceil(ratio * C * k)
        total = 0
        for row, y in zip(F.normalize(x) @ p.T, labels):
            first = [row[j].item() + 1000 * (j // k == y) for j in range(C * k)]
            order = sorted(range(C * k), key=first.__getitem__, reverse=True)
            scores = {}
            for j in order[:kept]:
                scores[j // k] = scores.get(j // k, 0) + row[j]
            total = total + torch.stack(list(scores.values())).logsumexp(0) - scores[y.item()]
        logits = (p @ p.T).view(C * k, C, k).sum(2)
        return total / len(x) + 0.3 * F.cross_entropy(logits, torch.arange(C).repeat_interleave(k))

    agree(loss, reference, loss.proxies, twin.proxies)


def moebius_distance(a, b, c):
    """The definition: 2 / sqrt(c) artanh(sqrt(c) |-a + b|) with Moebius addition."""
    a = -a
    product = (a * b).sum()
    added = (1 + 2 * c * product + c * b.square().sum()) * a + (1 - c * a.square().sum()) * b
    added = added / (1 + 2 * c * product + c**2 * a.square().sum() * b.square().sum())
    return 2 / math.sqrt(c) * (math.sqrt(c) * added.norm()).atanh()


@pytest.mark.parametrize("c", [0.1, 1])
def test_hyp_against_a_loop(c):
    loss = losses.make("hyp", C, D, c=c)

    def reference(x, labels):
        points = []
        for row in x.double():
            if row.norm() > 2.3:
                row = 2.3 * row / row.norm()
            points.append((math.sqrt(c) * row.norm()).tanh() * row / (math.sqrt(c) * row.norm()))
        terms = []
        for i, a in enumerate(points):
            z = {j: -moebius_distance(a, b, c) / 0.2 for j, b in enumerate(points) if j != i}
            negatives = [z[j] for j in z if labels[j] != labels[i]]
            for j in z:
                if labels[j] == labels[i]:
                    terms.append(torch.stack([z[j], *negatives]).logsumexp(0) - z[j])
        return torch.stack(terms).mean()

    agree(loss, reference, tolerance=2e-5)


def test_language_against_a_loop():
    torch.manual_seed(0)
    similarity = torch.rand(C, C)
    inner = losses.make("ms", C, D)

    def reference(x, labels):
        unit = F.normalize(x)
        total = 0
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
    negatives = [j for j in range(len(labels)) if labels[j] != labels[a]]
    return positives, negatives


def triplets(miner, d, labels, margin):
    """The (anchor, positive, negative) that a miner picks."""
    picked = []
    for a in range(len(d)):
        positives, negatives = others(labels, a)
        if miner == "batchhard":
            positives = sorted(positives, key=lambda j, a=a: d[a, j].item())[-1:]
            negatives = sorted(negatives, key=lambda j, a=a: d[a, j].item())[:1]
        for p in positives:
            for n in negatives:
                if miner != "semihard" or d[a, p] < d[a, n] < d[a, p] + margin:
                    picked.append((a, p, n))
    return picked


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("miner", ["all", "semihard", "batchhard"])
def test_direction_of_triplets_against_a_loop(miner, distance):
    hyper = {"miner": miner, "distance": distance, "margin": 0.1}
    loss = losses.make("direction", C, D, loss="triplet", gamma=0.3, **hyper)

    def reference(x, labels):
        x = F.normalize(x)
        d = 1 - x @ x.T
        if distance == "euclidean":
            d = (2 * d).clamp_min(1e-12).sqrt()
        terms = []
        for a, p, n in triplets(miner, d, labels, 0.1):
            kappa = F.cosine_similarity(x[n] - x[a], x[p] - x[a], dim=0)
            terms.append(d[a, p] - d[a, n] + 0.1 - 0.3 * kappa)
        terms = torch.stack(terms)
        return terms[terms > 0].mean()

    agree(loss, reference)


def test_distance_weighted_draws():
    """Negatives are drawn by 1 / q(d), none beyond 1.4, and every positive pair gets one."""
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
    assert len(p) == 20_000
    assert (anchor == 0).all()
    assert torch.allclose(share, (weights / weights.sum())[0], atol=0.02)
