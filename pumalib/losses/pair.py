"""Losses over pairs: s cosine, d distance, a anchor, p another of its class, n one of another; defaults as in PML."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Loss, direction_cosines, euclidean, log_one_plus_sum_exp, mean_of_nonzero, unit


class PairLoss(Loss):
    """A loss `pairs(a, b, positive, negative)` of anchors a (N, D) against others b (M, D), both projected.

    In a batch a and b are the same; `XBM` compares with its memory.  The masks (N, M) may leave pairs out.
    """

    batches = "classes"

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x, same = self.project(x), labels[:, None] == labels
        return self.pairs(x, x, same.clone().fill_diagonal_(False), ~same)

    def project(self, x: Tensor) -> Tensor:
        """What the loss compares, from embeddings (N, D)."""
        return unit(x)


class Contrastive(PairLoss):
    """Mean nonzero [d_ap - pos_margin]+ plus mean nonzero [neg_margin - d_an]+ (Hadsell, CVPR 2006, unsquared)."""

    hyper: ClassVar[dict] = {"pos_margin": 0.0, "neg_margin": 1.0}

    def pairs(self, a, b, positive, negative):
        d = euclidean(a, b)
        pull = (d - self.pos_margin).relu() * positive
        push = (self.neg_margin - d).relu() * negative
        return mean_of_nonzero(pull) + mean_of_nonzero(push)


class Triplet(PairLoss):
    """Mean over the nonzero terms of [d_ap - d_an + margin]+ (Schroff et al., CVPR 2015).

    `miner` "batchhard": each anchor's farthest positive and nearest negative; "all" triplets; "semihard": those with
    d_ap < d_an; "random": one random negative for each (a, p); the last three hold (number of pairs, M) distances.
    `distance` "cosine": d = 1 - s.  `direction`: gamma of direction regularisation, see `direction_cosines`.
    """

    hyper: ClassVar[dict] = {"margin": 0.05, "miner": "batchhard", "distance": "cosine", "direction": 0.0}
    choices: ClassVar[dict] = {"miner": ("all", "random", "semihard", "batchhard"), "distance": ("cosine", "euclidean")}

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


class NPair(Loss):
    """Mean cross-entropy of anchor . positive among all positives, a pair per class, plus `l2` times the mean length.

    Sohn, NeurIPS 2016.  Embeddings are not normalised; the length is the mean over the batch.  A pair is its class's
    first two samples in the order of the batch, as in PML; without any pair the loss is 0.
    """

    hyper: ClassVar[dict] = {"l2": 0.02}
    batches, normalised_input = "classes", False

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x.clamp(-1e16, 1e16)  # products of more would overflow float32
        same = labels[:, None] == labels
        earlier = same.tril(-1).sum(1)  # samples of its class before it
        anchor = (earlier == 0) & (same.sum(1) > 1)
        positive = x[(same & (earlier == 1)).int().argmax(1)]
        z = (x @ positive.T).masked_fill(~anchor, torch.finfo(x.dtype).min)
        loss = F.cross_entropy(z, torch.arange(len(x), device=x.device), reduction="none").masked_fill(~anchor, 0)
        penalty = self.l2 * torch.linalg.vector_norm(x, dim=1).mean() * anchor.any()
        return loss.sum() / anchor.sum().clamp_min(1) + penalty


class Margin(PairLoss):
    """Sum over triplets of [d_ap - beta + margin]+ + [beta - d_an + margin]+ over its number of nonzero terms.

    Wu et al., ICCV 2017.  `learn_beta`: beta is a parameter, one for all classes.
    `variant` "paper": each (a, p) with one negative drawn by inverse density of its distance, at least 0.5 and below
    1.4; "code" as PUMA's authors released it: all pairs kept by the miner of `ms`, epsilon 0.1; "all" triplets.
    """

    hyper: ClassVar[dict] = {"margin": 0.2, "beta": 1.2, "learn_beta": False, "variant": "paper"}
    choices: ClassVar[dict] = {"variant": ("paper", "code", "all")}

    def __init__(self, num_classes: int, dim: int, **hyper):
        super().__init__(num_classes, dim, **hyper)
        if self.learn_beta:
            self.beta = nn.Parameter(torch.tensor(float(self.beta)))

    def pairs(self, a, b, positive, negative):
        d = euclidean(a, b)
        pull = (d - self.beta + self.margin).relu()
        push = (self.beta - d + self.margin).relu()
        if self.variant == "paper":
            anchor, p, n = sample(distance_weights(d.detach(), negative, self.dim), positive)
            return mean_of_nonzero(torch.cat([pull[anchor, p], push[anchor, n]]))
        if self.variant == "code":
            positive, negative = hard_pairs(a @ b.T, positive, negative, 0.1)
        pulls = positive * negative.sum(1, keepdim=True)  # the triplets that a pair is in
        pushes = negative * positive.sum(1, keepdim=True)
        count = ((pull > 0) * pulls + (push > 0) * pushes).sum().clamp_min(1)
        return (pull * pulls + push * pushes).sum() / count


class MultiSimilarity(PairLoss):
    """Mean over anchors of log(1 + sum_p exp(-alpha (s - base))) / alpha + log(1 + sum_n exp(beta (s - base))) / beta.

    The miner keeps positives with s_ap - epsilon < max s_an and negatives with s_an + epsilon > min s_ap, all pairs
    if `epsilon` is None (Wang et al., CVPR 2019).  `variant` "code" as PUMA's authors released it: mined as `margin`
    is, by distance.  `direction`: gamma of direction regularisation, see `direction_cosines`.
    """

    hyper: ClassVar[dict] = {
        "alpha": 2.0,
        "beta": 50.0,
        "base": 0.5,
        "epsilon": 0.1,
        "variant": "paper",
        "direction": 0.0,
    }
    choices: ClassVar[dict] = {"variant": ("paper", "code")}

    def pairs(self, a, b, positive, negative):
        s = a @ b.T
        pull = push = s - self.base
        if self.direction:
            hardest = b[s.masked_fill(~positive, torch.inf).argmin(1)]
            push = push - self.direction * direction_cosines(a, hardest, b) * positive.any(1, keepdim=True)
        if self.variant == "code":
            anchor, p, n = sample(distance_weights(euclidean(a, b).detach(), negative, self.dim), positive)
            positive, negative = torch.zeros_like(positive), torch.zeros_like(negative)
            positive[anchor, p] = negative[anchor, n] = True
        elif self.epsilon is not None:
            positive, negative = hard_pairs(s, positive, negative, self.epsilon)
        pull = log_one_plus_sum_exp(-self.alpha * pull, positive) / self.alpha
        push = log_one_plus_sum_exp(self.beta * push, negative) / self.beta
        return (pull + push).mean()


class SupCon(PairLoss):
    """Mean over an anchor's positives of -log softmax, over all others, of s / temperature; then mean over anchors.

    Khosla et al., NeurIPS 2020, Eq. 2.  Anchors whose loss is zero do not count in the mean, as in PML.
    """

    hyper: ClassVar[dict] = {"temperature": 0.1}

    def pairs(self, a, b, positive, negative):
        z = (a @ b.T / self.temperature).masked_fill(~(positive | negative), torch.finfo(a.dtype).min)
        return mean_of_nonzero(-(z.log_softmax(1) * positive).sum(1) / positive.sum(1).clamp_min(1))


def hard_pairs(s: Tensor, positive: Tensor, negative: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The masks (N, M) of the multi-similarity miner: pairs within epsilon of the hardest of the other kind."""
    closest_negative = s.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    farthest_positive = s.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
    return positive & (s - epsilon < closest_negative), negative & (s + epsilon > farthest_positive)


def distance_weights(d: Tensor, negative: Tensor, dim: int) -> Tensor:
    """Inverse density of distances on the unit sphere, (N, M), up to a factor per row (Wu et al., Sec. 4)."""
    allowed, d = negative & (d < 1.4), d.clamp(0.5, 1.4)
    log_weight = (2 - dim) * d.log() - (dim - 3) / 2 * (1 - d.square() / 4).log()
    log_weight = log_weight.masked_fill(~allowed, -torch.inf)
    return (log_weight - log_weight.amax(1, keepdim=True).clamp_min(torch.finfo(d.dtype).min)).exp()


def sample(weights: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows a, p of the positive pairs and n drawn by the anchor's weights (N, M); none where all are zero."""
    anchor, p = (positive & (weights > 0).any(1, keepdim=True)).nonzero(as_tuple=True)
    return anchor, p, weights[anchor].multinomial(1)[:, 0]
