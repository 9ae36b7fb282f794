"""Losses over pairs (s cosine, d distance, a anchor, p of its class, n of another; PML's defaults), two wrappers."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .base import (
    Loss,
    direction_cosines,
    euclidean,
    log_one_plus_sum_exp,
    mean_of_nonzero,
    sqrt_or_zero,
    unit,
)
from .texts import similarities

MINERS = ("batchhard", "all", "random", "semihard")


class PairLoss(Loss):
    """A loss `pairs(a, b, positive, negative)` of anchors a (N, D) and others b (M, D), projected; masks are (N, M)."""

    batches = "classes"

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x, same = self.project(x), labels[:, None] == labels
        return self.pairs(x, x, same.clone().fill_diagonal_(False), ~same)

    def project(self, x: Tensor) -> Tensor:
        return unit(x)


class Contrastive(PairLoss, pos_margin=0.0, neg_margin=1.0):
    """Mean nonzero [d_ap - pos_margin]+ plus mean nonzero [neg_margin - d_an]+ (Hadsell, CVPR 2006, unsquared)."""

    def pairs(self, a, b, positive, negative):
        d = euclidean(a, b)
        pull, push = (d - self.pos_margin).relu(), (self.neg_margin - d).relu()
        return mean_of_nonzero(pull * positive) + mean_of_nonzero(push * negative)


class Triplet(PairLoss, margin=0.05, miner=MINERS, distance=("cosine", "euclidean"), direction=0.0):
    """Mean nonzero [d_ap - d_an + margin - direction kappa]+ (Schroff et al., CVPR 2015), d = 1 - s if "cosine".
    `miner` "batchhard": farthest positive, nearest negative; "semihard": d_ap < d_an; "random": one negative a pair."""

    def pairs(self, a, b, positive, negative):
        d = 1 - a @ b.T if self.distance == "cosine" else euclidean(a, b)
        if self.miner == "batchhard":
            anchor, p = torch.arange(len(a), device=a.device), d.masked_fill(~positive, -torch.inf).argmax(1)
            n = d.masked_fill(~negative, torch.inf).argmin(1)
            keep = negative & positive.any(1, keepdim=True) & F.one_hot(n, len(b)).bool()
        elif self.miner == "random":
            anchor, p, n = sample(negative.to(d.dtype), positive)
            keep = F.one_hot(n, len(b)).bool()
        else:
            anchor, p = positive.nonzero(as_tuple=True)
            keep = negative[anchor]
        d_ap, d_an = d[anchor, p][:, None], d[anchor]
        if self.miner == "semihard":
            keep = keep & (d_an > d_ap) & (d_an < d_ap + self.margin)
        violation = d_ap - d_an + self.margin
        if self.direction:
            violation = violation - self.direction * direction_cosines(a[anchor], b[p], b)
        return mean_of_nonzero(violation.relu() * keep)


class NPair(Loss, l2=0.02):
    """Mean cross-entropy of anchor . positive among all positives, plus `l2` times the mean length (Sohn, 2016).
    A pair is its class's first two samples in the order of the batch, as in PML; without any pair the loss is 0."""

    batches, normalised_input = "classes", False

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x.clamp(-1e16, 1e16)  # products of more would overflow float32
        later = (labels[:, None] == labels).triu(1)  # samples of its class after it
        anchor = (later.any(1) & ~later.any(0)).nonzero()[:, 0]
        z = x[anchor] @ x[later[anchor].int().argmax(1)].T
        loss = F.cross_entropy(z, torch.arange(len(z), device=x.device), reduction="sum") / max(1, len(z))
        return loss + self.l2 * torch.linalg.vector_norm(x, dim=1).mean() * (len(z) > 0)


class Margin(PairLoss, margin=0.2, beta=1.2, variant=("paper", "code", "all")):
    """Sum over triplets of [d_ap - beta + margin]+ + [beta - d_an + margin]+ by its nonzero terms (Wu, ICCV 2017).
    `variant` "paper": each (a, p), one negative drawn by `distance_weights`; "code": of `hard_pairs`; "all"."""

    def pairs(self, a, b, positive, negative):
        d = euclidean(a, b)
        pull, push = (d - self.beta + self.margin).relu(), (self.beta - d + self.margin).relu()
        if self.variant == "paper":
            anchor, p, n = sample(distance_weights(d, negative, self.dim), positive)
            return mean_of_nonzero(torch.cat([pull[anchor, p], push[anchor, n]]))
        if self.variant == "code":
            positive, negative = hard_pairs(a @ b.T, positive, negative, 0.1)
        pulls, pushes = positive * negative.sum(1, keepdim=True), negative * positive.sum(1, keepdim=True)  # triplets
        count = ((pull > 0) * pulls + (push > 0) * pushes).sum().clamp_min(1)
        return (pull * pulls + push * pushes).sum() / count


class MultiSimilarity(PairLoss, alpha=2.0, beta=50.0, base=0.5, epsilon=0.1, variant=("paper", "code"), direction=0.0):
    """Mean over anchors of log(1 + sum_p exp(-alpha (s - base))) / alpha + log(1 + sum_n exp(beta (s - base))) / beta.
    On `hard_pairs`, all for an `epsilon` above 2, `margin`'s for "code" (Wang, CVPR 2019); kappa of the hardest positive."""

    def pairs(self, a, b, positive, negative):
        s = a @ b.T
        pull = push = s - self.base
        if self.direction:
            hardest = b[s.masked_fill(~positive, torch.inf).argmin(1)]
            push = push - self.direction * direction_cosines(a, hardest, b) * positive.any(1, keepdim=True)
        if self.variant == "code":
            anchor, p, n = sample(distance_weights(euclidean(a, b), negative, self.dim), positive)
            positive, negative = torch.zeros_like(positive), torch.zeros_like(negative)
            positive[anchor, p] = negative[anchor, n] = True
        elif self.epsilon <= 2:
            positive, negative = hard_pairs(s, positive, negative, self.epsilon)
        pull = log_one_plus_sum_exp(-self.alpha * pull, positive) / self.alpha
        push = log_one_plus_sum_exp(self.beta * push, negative) / self.beta
        return (pull + push).mean()


class SupCon(PairLoss, temperature=0.1):
    """Mean over anchors, then positives, of -log softmax of s / temperature over all others (Khosla, NeurIPS 2020)."""

    def pairs(self, a, b, positive, negative):
        z = (a @ b.T / self.temperature).masked_fill(~(positive | negative), torch.finfo(a.dtype).min)
        return mean_of_nonzero(-(z.log_softmax(1) * positive).sum(1) / positive.sum(1).clamp_min(1))


class Hyp(PairLoss, c=0.1, temperature=0.2, clip=2.3, variant=("paper", "code")):
    """Mean over pairs (a, p) of -log exp(-d_ap / t) / (exp(-d_ap / t) + sum_n exp(-d_an / t)) (Ermolov, CVPR 2022).
    d: Poincare distance, radius 1 / sqrt(c); c = 0: 1 - s.  "code": of K samples a pair weighs 1 / K^2, as theirs."""

    normalised_input = False

    def project(self, x: Tensor) -> Tensor:
        """Outputs (N, D), clipped to length `clip`, mapped into the ball by the exponential map at 0."""
        if self.c == 0:
            return unit(x)
        x = x / (x.detach().abs().amax(1, keepdim=True) / self.clip).clamp_min(1)  # no overflow; is clipped anyway
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1e-5)
        x = x * (self.clip / length).clamp_max(1)
        scaled = math.sqrt(self.c) * length.clamp_max(self.clip)
        return x * (scaled.tanh().clamp_max(1 - 1e-3) / scaled)  # 1e-3 off the border, as its authors

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Distances (N, M) of projected a (N, D), b (M, D): 2 artanh(sqrt(c) |-a + b|) / sqrt(c), + after Moebius."""
        product = a @ b.T
        if self.c == 0:
            return 1 - product
        aa, bb = a.square().sum(1)[:, None], b.square().sum(1)
        squared = self.c * (aa + bb - 2 * product) / (1 - 2 * self.c * product + self.c**2 * aa * bb)
        return 2 / math.sqrt(self.c) * sqrt_or_zero(squared).clamp_max(1 - 1e-5).atanh()

    def metric(self, a: Tensor, b: Tensor) -> Tensor:
        return self.distance(self.project(a), self.project(b))

    def average(self, outputs: Tensor) -> Tensor:
        """Outputs (N, D) that project to the Einstein midpoints of the projections of `outputs` (K, N, D)."""
        x = self.project(outputs.flatten(0, 1)).view_as(outputs)
        if self.c == 0:
            return x.mean(0)
        factor = 2 / (1 - self.c * x.square().sum(-1, keepdim=True))
        double = (factor * x).sum(0) / (factor - 1).sum(0)  # the midpoint, added to itself as Moebius
        scaled = math.sqrt(self.c) * torch.linalg.vector_norm(double, dim=-1, keepdim=True).clamp_min(1e-12)
        return double * (scaled.atanh() / (2 * scaled))

    def pairs(self, a, b, positive, negative):
        z = -self.distance(a, b) / self.temperature
        negatives = z.masked_fill(~negative, torch.finfo(z.dtype).min).logsumexp(1, keepdim=True)
        loss = F.softplus(negatives - z) * positive
        if self.variant == "paper":
            return loss.sum() / positive.sum().clamp_min(1)
        size = 1 + positive.sum(1).to(z.dtype)
        classes = (positive.any(1) / size).sum()  # each class of K samples counts K times 1 / K
        return (loss.sum(1) / size.square()).sum() / classes.clamp_min(1)


class Wrapper(Loss):
    """A loss around `loss`, whose batches and metric are its own."""

    def __init__(self, loss: Loss, **hyper):
        super().__init__(loss.num_classes, loss.dim, **hyper)
        self.loss, self.batches, self.normalised_input = loss, loss.batches, loss.normalised_input
        self.metric, self.average = loss.metric, loss.average


class XBM(Wrapper, size=4096, warmup=0):
    """A pair-based `loss` of the batch against the last `size` embeddings, this batch's included (Wang et al., 2020).
    The memory is filled from the first step, in training only.  For `warmup` steps (1,000 there) it is not used."""

    def __init__(self, loss: PairLoss, **hyper):
        super().__init__(loss, **hyper)
        if not hasattr(loss, "pairs"):
            raise ValueError(f"xbm cannot hold {type(loss).__name__}: it needs a loss of anchors against others")
        self.register_buffer("memory", torch.zeros(self.size, loss.dim))
        self.register_buffer("memory_labels", torch.full((self.size,), -1))  # -1: still empty
        self.register_buffer("position", torch.zeros((), dtype=torch.long))  # where the next one goes
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        if len(x) > self.size:
            raise ValueError(f"a batch of {len(x)} does not fit into a memory of size {self.size}; raise size")
        slots = (self.position + torch.arange(len(x), device=x.device)) % self.size
        if self.training:
            self.memory[slots], self.memory_labels[slots] = x.detach().to(self.memory.dtype), labels
            self.position.copy_((self.position + len(x)) % self.size)
            self.steps.add_(1)
        same = labels[:, None] == self.memory_labels
        different = ~same & (self.memory_labels >= 0)
        if self.training:
            same.scatter_(1, slots[:, None], False)  # itself
        others = self.loss.project(self.memory.to(x.dtype))
        loss = self.loss.pairs(self.loss.project(x), others, same, different)
        if self.warmup:  # both, and no waiting for the device to say which
            loss = torch.where(self.steps > self.warmup, loss, self.loss.compute(x, labels))
        return loss


class Language(Wrapper, texts="words", similarity=None, weight=7.5):
    """`loss` plus `weight` times the mean over rows of KL(softmax T || softmax S), S = x x^T (Roth, CVPR 2022).
    T = 1 + `similarity` (C, C), by default that of `texts` on the classes; both are 2 where the classes are the same."""

    def __init__(self, loss: Loss, classes: Sequence[str] | None = None, **hyper):
        super().__init__(loss, **hyper)
        if self.similarity is None:  # without names too: for what needs no classes, as how outputs are compared
            self.similarity = np.eye(loss.num_classes) if classes is None else similarities(self.texts, classes)
        similarity, shape = torch.as_tensor(self.similarity, dtype=torch.float32), (loss.num_classes, loss.num_classes)
        if similarity.shape != shape:
            raise ValueError(f"similarity must be {shape}, of every two classes, got {tuple(similarity.shape)}")
        del self.similarity
        self.register_buffer("similarity", similarity, persistent=False)

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        same = labels[:, None] == labels
        images = (unit(x) @ unit(x).T).masked_fill(same, 2)
        texts = (self.similarity[labels[:, None], labels].to(x.dtype) + 1).masked_fill(same, 2)
        divergence = texts.softmax(1) * (texts.log_softmax(1) - images.log_softmax(1))
        return self.loss.compute(x, labels) + self.weight * divergence.sum(1).mean()


def hard_pairs(s: Tensor, positive: Tensor, negative: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The multi-similarity miner's masks (N, M): s_ap - epsilon < max s_an, s_an + epsilon > min s_ap."""
    closest_negative = s.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    farthest_positive = s.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
    return positive & (s - epsilon < closest_negative), negative & (s + epsilon > farthest_positive)


def distance_weights(d: Tensor, negative: Tensor, dim: int) -> Tensor:
    """1 / density of distances d on the sphere, at least 0.5 and below 1.4, but for a factor per row (Wu, Sec. 4)."""
    allowed, d = negative & (d < 1.4), d.detach().clamp(0.5, 1.4)
    log_weight = (2 - dim) * d.log() - (dim - 3) / 2 * (1 - d.square() / 4).log()
    log_weight = log_weight.masked_fill(~allowed, -torch.inf)
    return (log_weight - log_weight.amax(1, keepdim=True).clamp_min(torch.finfo(d.dtype).min)).exp()


def sample(weights: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows a, p of the positive pairs and n drawn by the anchor's weights (N, M); none where all are zero."""
    anchor, p = (positive & (weights > 0).any(1, keepdim=True)).nonzero(as_tuple=True)
    return anchor, p, weights[anchor].multinomial(1)[:, 0]
