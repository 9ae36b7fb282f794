"""Losses of embeddings x against learnable class vectors p: s their cosine, d = 2 - 2 s, y the sample's class."""

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import ProxyLoss, direction_cosines, log_one_plus_sum_exp, unit


class ProxyNCA(ProxyLoss):
    """Mean of d_y + log sum over c != y of exp(-d_c), x and p scaled by `scale`, so that d is scale^2 (2 - 2 s).

    Movshovitz-Attias et al., ICCV 2017.  The positive is not in the sum, so the value may be negative;
    pytorch-metric-learning's ProxyNCALoss has it there: that is `proxynca++` with scale 1.
    `direction`: gamma of direction regularisation, see `direction_cosines`.
    """

    hyper: ClassVar[dict] = {"scale": 1.0, "direction": 0.0}

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        d, y = self.scale**2 * (2 - 2 * self.cosines(x)), labels[:, None]
        if self.num_classes == 1:  # no negative: nothing to learn
            return 0 * d.sum()
        push = -d
        if self.direction:
            p = unit(self.proxies.to(x.dtype))
            push = push - self.scale**2 * self.direction * direction_cosines(unit(x), p[labels], p)
        return (d.gather(1, y) + push.scatter(1, y, -torch.inf).logsumexp(1, keepdim=True)).mean()


class ProxyNCApp(ProxyLoss):
    """Mean cross-entropy of -d, x and p scaled by `scale`: -scale^2 d (Teh et al., ECCV 2020, Eq. 6).

    Proxies start as N(0, 1/64), as theirs.  `variant` "code" as PUMA's authors released it: without the scale.
    """

    hyper, choices = {"scale": 3.0, "variant": "paper"}, {"variant": ("paper", "code")}
    std = 1 / 8

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        scale = self.scale if self.variant == "paper" else 1
        return F.cross_entropy(-(scale**2) * (2 - 2 * self.cosines(x)), labels)


class ProxyAnchor(ProxyLoss):
    """Proxy-Anchor (Kim et al., CVPR 2020, Eq. 4); proxies start as N(0, 2 / C), He-normal over the classes, as theirs.

    Mean over the classes present of log(1 + sum over their samples of exp(-alpha (s - margin)))
    + mean over all classes of log(1 + sum over the other samples of exp(alpha (s + margin))).
    """

    hyper: ClassVar[dict] = {"alpha": 32.0, "margin": 0.1}
    std = property(lambda self: math.sqrt(2 / self.num_classes))

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        s, own = self.cosines(x).T, F.one_hot(labels, self.num_classes).bool().T
        pull = log_one_plus_sum_exp(-self.alpha * (s - self.margin), own)
        push = log_one_plus_sum_exp(self.alpha * (s + self.margin), ~own)
        return pull.sum() / own.any(1).sum() + push.mean()


class ProxyGML(ProxyLoss):
    """Proxy-based graph loss (Zhu et al., NeurIPS 2020) with K proxies per class.

    Each sample keeps the ceil(ratio C K) proxies most similar to it, its own class's first.  A class's score is the
    sum of its kept similarities; cross-entropy over the classes whose score is not zero.  Plus `weight` times the
    cross-entropy of each proxy's summed similarities to all classes, which takes time and memory for C^2 K numbers:
    the authors take K = 1, weight = 0 for the 11,318 classes of SOP.
    """

    hyper: ClassVar[dict] = {"proxies_per_class": 12, "ratio": 0.05, "weight": 0.3}

    def initial(self) -> Tensor:
        self.kept = math.ceil(self.ratio * self.num_classes * self.proxies_per_class)
        if not 1 <= self.kept <= self.num_classes * self.proxies_per_class:
            raise ValueError(f"ratio must lie in (0, 1], got {self.ratio}")
        return uniform(self.num_classes * self.proxies_per_class, self.dim)

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        s, own = self.cosines(x), F.one_hot(labels, self.num_classes).bool()
        first = s.detach() + 4 * own.repeat_interleave(self.proxies_per_class, 1)  # a cosine is below 4
        kept = torch.zeros_like(s).scatter(1, first.topk(self.kept, sorted=False).indices, 1)
        score = (s * kept).view(len(x), self.num_classes, self.proxies_per_class).sum(2)
        loss = F.cross_entropy(score.masked_fill((score == 0) & ~own, -torch.inf), labels)
        if not self.weight:
            return loss
        p = unit(self.proxies.to(x.dtype))
        classes = p.view(self.num_classes, self.proxies_per_class, -1).sum(1)
        labels = torch.arange(self.num_classes, device=p.device).repeat_interleave(self.proxies_per_class)
        return loss + self.weight * F.cross_entropy(p @ classes.T, labels)


class SoftTriple(ProxyLoss):
    """SoftTriple (Qian et al., ICCV 2019, Eq. 7 to 9) with K = `centers` per class.

    S_c = sum over k of softmax_k(s_ck / gamma) s_ck; mean cross-entropy of la (S_c - margin [c = y]).  `tau` weighs
    its regulariser that merges centres (0.2 there, left out by pytorch-metric-learning): mean over classes of
    sum over k < l of sqrt(2 + 1e-5 - 2 w_k . w_l) / (K (K - 1)).
    """

    hyper: ClassVar[dict] = {"centers": 10, "la": 20.0, "gamma": 0.1, "margin": 0.01, "tau": 0.0}

    def initial(self) -> Tensor:
        return uniform(self.num_classes * self.centers, self.dim)

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        s, y = self.cosines(x).view(len(x), self.num_classes, self.centers), labels[:, None]
        s = ((s / self.gamma).softmax(2) * s).sum(2)
        loss = F.cross_entropy(self.la * s.scatter(1, y, s.gather(1, y) - self.margin), labels)
        if self.tau and self.centers > 1:
            w = unit(self.proxies.to(x.dtype)).view(self.num_classes, self.centers, -1)
            gaps = (2 + 1e-5 - 2 * w @ w.mT).sqrt().triu(1)
            loss = loss + self.tau * gaps.sum() / (self.num_classes * self.centers * (self.centers - 1))
        return loss


def uniform(rows: int, dim: int) -> Tensor:
    """Proxies (C K, D) as their authors draw them, the weight (D, C K) of a linear layer: up to 1 / sqrt(C K)."""
    return torch.empty(rows, dim).uniform_(-1, 1) / math.sqrt(rows)
