"""Values and gradients of every loss against pytorch-metric-learning, or a plain loop where it has none."""

import math

import pytest
import torch
from torch.nn import functional as F

from pumalib import losses

C, D, N = 9, 12, 32


def batch(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, D, generator=generator), torch.randint(C, (n,), generator=generator)


def agree(loss, reference, own_proxies=None, its_proxies=None, transposed=False, tolerance=1e-5):
    """Same value, same gradient of embeddings and proxies."""
    x, labels = batch()
    ours, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    if own_proxies is not None:
        own_proxies.data.copy_(its_proxies.data.T if transposed else its_proxies.data)
    value, expected = loss(ours, labels), reference(its, labels)
    value.backward()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=tolerance)
    assert torch.allclose(ours.grad, its.grad, atol=tolerance)
    if own_proxies is not None:
        grad = its_proxies.grad.T if transposed else its_proxies.grad
        assert torch.allclose(own_proxies.grad, grad, atol=tolerance)


def mined(loss, miner):
    return lambda x, labels: loss(x, labels, miner(x, labels))


def pair_cases():
    pml = pytest.importorskip("pytorch_metric_learning.losses")
    from pytorch_metric_learning import distances, miners, regularizers

    cosine, product = distances.CosineSimilarity(), distances.DotProductSimilarity(normalize_embeddings=False)
    hard = miners.BatchHardMiner(distance=cosine)
    semihard = miners.TripletMarginMiner(0.2, "semihard", distance=cosine)
    similar = miners.MultiSimilarityMiner(epsilon=0.1)
    lengths = regularizers.LpRegularizer()
    return {
        "contrastive": ({}, pml.ContrastiveLoss()),
        "contrastive margins": ({"pos_margin": 0.4, "neg_margin": 1.5}, pml.ContrastiveLoss(0.4, 1.5)),
        "triplet": ({}, mined(pml.TripletMarginLoss(distance=cosine), hard)),
        "triplet euclidean": ({"distance": "euclidean"}, mined(pml.TripletMarginLoss(), miners.BatchHardMiner())),
        "triplet all": ({"miner": "all"}, pml.TripletMarginLoss(distance=cosine)),
        "triplet all euclidean": ({"miner": "all", "distance": "euclidean"}, pml.TripletMarginLoss()),
        "triplet semihard": (
            {"miner": "semihard", "margin": 0.2},
            mined(pml.TripletMarginLoss(0.2, distance=cosine), semihard),
        ),
        "npair": (
            {},
            pml.NPairsLoss(distance=product, embedding_regularizer=lengths, embedding_reg_weight=0.02),
        ),
        "margin code": ({"variant": "code"}, mined(pml.MarginLoss(), similar)),
        "ms": ({}, mined(pml.MultiSimilarityLoss(), similar)),
        "ms all": ({"epsilon": None}, pml.MultiSimilarityLoss()),
        "supcon": ({}, pml.SupConLoss()),
        "hyp": ({"c": 0}, pml.NTXentLoss(0.2)),
    }


PAIR_CASES = (
    *("contrastive", "contrastive margins", "triplet", "triplet euclidean", "triplet all", "triplet all euclidean"),
    *("triplet semihard", "npair", "margin code", "ms", "ms all", "supcon", "hyp"),
)


@pytest.mark.parametrize("case", PAIR_CASES)
def test_pair_losses_agree_with_the_library(case):
    hyper, reference = pair_cases()[case]
    agree(losses.make(case.split()[0], C, D, **hyper), reference)


def test_learned_beta_agrees_with_the_library():
    pml = pytest.importorskip("pytorch_metric_learning.losses")
    loss, reference = losses.make("margin", C, D, variant="all", learn_beta=True), pml.MarginLoss(learn_beta=True)
    agree(loss, reference)
    assert loss.beta.grad.item() == pytest.approx(reference.beta.grad.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["proxynca++", "proxyanchor", "softtriple", "cosface", "arcface"])
def test_proxy_losses_agree_with_the_library(name):
    pml = pytest.importorskip("pytorch_metric_learning.losses")
    reference = {
        "proxynca++": lambda: pml.ProxyNCALoss(C, D, softmax_scale=9),
        "proxyanchor": lambda: pml.ProxyAnchorLoss(C, D),
        "softtriple": lambda: pml.SoftTripleLoss(C, D),
        "cosface": lambda: pml.CosFaceLoss(C, D),
        "arcface": lambda: pml.ArcFaceLoss(C, D, margin=math.degrees(0.5)),
    }[name]()
    loss = losses.make(name, C, D)
    proxies = next(reference.parameters())
    agree(loss, reference, loss.proxies, proxies, transposed=len(proxies) == D)


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


def unit_proxies(loss):
    return F.normalize(loss.proxies)


def curricular(loss, x, labels, t, code):
    """Sample by sample; t is a float, or one per class."""
    s = F.normalize(x) @ unit_proxies(loss).T
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
        own = (F.normalize(x) * unit_proxies(twin)[labels]).sum(1).mean().detach()
        return curricular(twin, x, labels, t if variant == "code" else 0.99 * t + 0.01 * own, variant == "code")

    agree(loss, reference, loss.proxies, twin.proxies)


@pytest.mark.parametrize("gamma", [0, 0.3])
def test_proxynca_against_a_loop(gamma):
    torch.manual_seed(0)
    loss, twin = (losses.make("proxynca", C, D, scale=2, direction=gamma) for _ in range(2))

    def reference(x, labels):
        total, p = 0, unit_proxies(twin)
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
        p = unit_proxies(twin)
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


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("miner", ["all", "semihard", "batchhard"])
def test_direction_of_triplets_against_a_loop(miner, distance):
    loss = losses.make("direction", C, D, loss="triplet", gamma=0.3, miner=miner, distance=distance, margin=0.1)

    def reference(x, labels):
        x = F.normalize(x)
        d = 1 - x @ x.T if distance == "cosine" else (2 - 2 * x @ x.T).clamp_min(1e-12).sqrt()
        terms = []
        for a in range(len(x)):
            positives = [j for j in range(len(x)) if labels[j] == labels[a] and j != a]
            negatives = [j for j in range(len(x)) if labels[j] != labels[a]]
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


def test_direction_of_ms_against_a_loop():
    loss = losses.make("direction", C, D, loss="ms", gamma=0.3)

    def reference(x, labels):
        x, total = F.normalize(x), 0
        s = x @ x.T
        for a in range(len(x)):
            positives = [j for j in range(len(x)) if labels[j] == labels[a] and j != a]
            negatives = [j for j in range(len(x)) if labels[j] != labels[a]]
            if not positives:
                continue
            hardest = min(positives, key=lambda j: s[a, j].item())
            closest = max(s[a, n].item() for n in negatives)
            kappa = {n: F.cosine_similarity(x[n] - x[a], x[hardest] - x[a], dim=0) for n in negatives}
            pull = [(-2 * (s[a, p] - 0.5)).exp() for p in positives if s[a, p] - 0.1 < closest]
            push = [(50 * (s[a, n] - 0.5 - 0.3 * kappa[n])).exp() for n in negatives if s[a, n] + 0.1 > s[a, hardest]]
            total = total + (1 + sum(pull)).log() / 2 if pull else total
            total = total + (1 + sum(push)).log() / 50 if push else total
        return total / len(x)

    agree(loss, reference)


def test_distance_weighted_draws():
    """Negatives of one anchor are drawn by 1 / q(d), none beyond 1.4, and every positive pair gets one."""
    from pumalib.losses.pair import distance_weights, sample

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


def test_code_variant_of_ms_draws_one_negative_per_positive():
    """With one negative per anchor to draw, it is the loss of all pairs with a negative below 1.4."""
    x = torch.tensor([[1, 0.0], [0.8, 0.6], [0.0, 1.0]])
    labels = torch.tensor([0, 0, 1])
    value = losses.make("ms", 2, 2, variant="code")(x, labels).item()
    pull = math.log1p(math.exp(-2 * 0.3)) / 2
    push = math.log1p(math.exp(50 * (0.6 - 0.5))) / 50
    assert value == pytest.approx((pull + push) / 3, rel=1e-5)  # anchor 0's negative is at sqrt(2) > 1.4
