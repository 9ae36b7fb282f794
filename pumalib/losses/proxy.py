"""Losses of embeddings against learnable class vectors.

x and p are L2-normalised embeddings (N, D) and proxies (C, D), s their cosine, d = 2 - 2 s the squared
distance, y the sample's class.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .base import (
    ProxyLoss,
    check_choice,
    cross_entropy,
    direction_cosines,
    euclidean,
    fused,
    log_sum_exp,
    rows,
    softmax_,
    unit,
)


class ProxyNCA(ProxyLoss):
    """Mean of d_y + log sum over c != y of exp(-d_c), x and p scaled by `scale`, so that d is scale^2 (2 - 2 s).

    Movshovitz-Attias et al., ICCV 2017.  The positive is not in the sum, so the value may be negative.
    pytorch-metric-learning's ProxyNCALoss has it there: that is `proxynca++` with scale 1.

    Args:
        direction: gamma of direction regularisation, see `regularisers.direction`; 0 for none.
    """

    def __init__(self, num_classes: int, dim: int, scale: float = 1, direction: float = 0):
        super().__init__(num_classes, dim)
        self.scale, self.direction = scale, direction

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x = unit(x)
        p = self.unit_proxies(x)
        own = rows(p, labels)
        if self.num_classes == 1:  # no negative: nothing to learn
            return 0 * (x * own).sum()
        column, squared_scale = labels[:, None], self.scale**2
        if self.direction:
            kappa = direction_cosines(x, own, p)
            exponent = -squared_scale * (euclidean(x, p).square() + self.direction * kappa)
            others = torch.ones_like(exponent, dtype=torch.bool).scatter_(1, column, False)
            positive = squared_scale * (x - own).square().sum(1)
            return (log_sum_exp(exponent, others)[:, 0] + positive).mean()

        def negatives(z):
            total = softmax_(z.scatter_(1, column, -torch.inf))
            return total.sum(), z

        positive = 2 * squared_scale * (x * own).sum(1).mean()  # -d = 2 s - 2, and the 2 cancels
        return fused(negatives, 2 * squared_scale * x, p) / len(x) - positive


class ProxyNCApp(ProxyLoss):
    """Mean cross-entropy of -d, x and p scaled by `scale`: -scale^2 d (Teh et al., ECCV 2020, Eq. 6).

    Proxies start as N(0, 1/64), as theirs.

    Args:
        variant: "paper", or "code" as PUMA's authors released it: without the scale.
    """

    def __init__(self, num_classes: int, dim: int, scale: float = 3, variant: str = "paper"):
        super().__init__(num_classes, dim, std=1 / 8)
        check_choice("variant", variant, ("paper", "code"))
        self.scale = scale if variant == "paper" else 1

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x = unit(x)
        return cross_entropy(2 * self.scale**2 * x, self.unit_proxies(x), labels)  # -d = 2 s - 2, and the 2 cancels


class ProxyAnchor(ProxyLoss):
    """Proxy-Anchor (Kim et al., CVPR 2020, Eq. 4).

    Mean over the classes present of log(1 + sum over their samples of exp(-alpha (s - margin)))
    + mean over all classes of log(1 + sum over the other samples of exp(alpha (s + margin))).
    Proxies start He-normal over the classes, N(0, 2 / C), as theirs.
    """

    def __init__(self, num_classes: int, dim: int, alpha: float = 32, margin: float = 0.1):
        super().__init__(num_classes, dim, std=math.sqrt(2 / num_classes))
        self.alpha, self.margin = alpha, margin

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x = unit(x)
        p = self.unit_proxies(x)

        exponent = -self.alpha * ((x * rows(p, labels)).sum(1) - self.margin)
        classes = x.new_zeros(self.num_classes)
        present = classes.index_fill(0, labels, 1).sum()
        top = classes.scatter_reduce(0, labels, exponent.detach(), "amax")  # at least 0, the exponent of the 1
        total = (-top).exp().index_add(0, labels, (exponent - top[labels]).exp())
        positive = (total.log() + top).sum() / present

        def negatives(z):  # (C, N)
            z.add_(self.alpha * self.margin).scatter_(0, labels[None], -torch.inf)
            top = z.amax(1, keepdim=True).clamp_min_(0)
            total = z.sub_(top).exp_().sum(1, keepdim=True).add_((-top).exp())
            return (total.log() + top).sum(), z.div_(total)

        return positive + fused(negatives, self.alpha * p, x) / self.num_classes


class ProxyGML(ProxyLoss):
    """Proxy-based graph loss (Zhu et al., NeurIPS 2020) with K proxies per class.

    Each sample keeps the ceil(ratio C K) proxies most similar to it, its own class's first.  A class's score is the
    sum of its kept similarities; cross-entropy over the classes whose score is not zero.  Plus `weight` times the
    cross-entropy of each proxy's summed similarities to all classes, which costs C^2 K whatever the batch:
    the authors take K = 1, weight = 0 for the 11,318 classes of SOP.
    """

    def __init__(
        self, num_classes: int, dim: int, proxies_per_class: int = 12, ratio: float = 0.05, weight: float = 0.3
    ):
        super().__init__(num_classes, dim, per_class=proxies_per_class)
        uniform_as_linear(self.proxies)
        self.per_class, self.weight = proxies_per_class, weight
        self.kept = math.ceil(ratio * num_classes * proxies_per_class)
        if not 1 <= self.kept <= num_classes * proxies_per_class:
            raise ValueError(f"ratio must lie in (0, 1], got {ratio}")

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x = unit(x)
        p = self.unit_proxies(x)
        column = labels[:, None]
        own = column * self.per_class + torch.arange(self.per_class, device=x.device)

        def value_and_slope(z):  # (N, C K)
            similarity = z.gather(1, own)
            kept = z.scatter_(1, own, similarity + 4).topk(self.kept, sorted=False).indices  # a cosine is below 4
            classes = kept // self.per_class
            score = x.new_zeros(len(x), self.num_classes)
            score.scatter_add_(1, classes, z.scatter_(1, own, similarity).gather(1, kept))
            target = score.gather(1, column)
            total = softmax_(score.masked_fill_(score == 0, -torch.inf).scatter_(1, column, target))
            score.scatter_add_(1, column, torch.full_like(target, -1))
            return (total - target).sum(), z.zero_().scatter_(1, kept, score.gather(1, classes))

        loss = fused(value_and_slope, x, p) / len(x)
        return loss + self.weight * self._regulariser(p) if self.weight else loss

    def _regulariser(self, p: Tensor) -> Tensor:
        sums = p.view(self.num_classes, self.per_class, -1).sum(1)
        labels = torch.arange(self.num_classes, device=p.device).repeat_interleave(self.per_class)
        rows = max(1, 2**26 // self.num_classes)  # blocks, so that memory does not grow with C^2 K
        parts = zip(p.split(rows), labels.split(rows))
        return sum(cross_entropy(block, sums, own) * (len(block) / len(p)) for block, own in parts)


class SoftTriple(ProxyLoss):
    """SoftTriple (Qian et al., ICCV 2019, Eq. 7 to 9) with K = `centers` per class.

    S_c = sum over k of softmax_k(s_ck / gamma) s_ck; mean cross-entropy of la (S_c - margin [c = y]).  `tau` weighs
    its regulariser that merges centres (0.2 there, left out by pytorch-metric-learning): mean over classes of
    sum over k < l of sqrt(2 + 1e-5 - 2 w_k . w_l) / (K (K - 1)).
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        centers: int = 10,
        la: float = 20,
        gamma: float = 0.1,
        margin: float = 0.01,
        tau: float = 0,
    ):
        super().__init__(num_classes, dim, per_class=centers)
        uniform_as_linear(self.proxies)
        self.centers, self.la, self.gamma, self.margin, self.tau = centers, la, gamma, margin, tau

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x = unit(x)
        p = self.unit_proxies(x).view(self.num_classes, self.centers, -1)
        column = labels[:, None]

        def value_and_slope(z):
            s = z.view(len(x), self.centers, self.num_classes)
            weight = s / self.gamma
            weight.sub_(weight.amax(1, keepdim=True)).exp_()
            total = weight.sum(1)
            mean = torch.zeros_like(total)  # S
            for k in range(self.centers):
                mean.addcmul_(weight[:, k], s[:, k])
            mean.div_(total)
            logits = self.la * mean
            logits.scatter_add_(1, column, torch.full_like(column, -self.la * self.margin, dtype=x.dtype))
            target = logits.gather(1, column)
            value = (softmax_(logits) - target).sum()
            slope = logits.scatter_add_(1, column, torch.full_like(target, -1)).mul_(self.la).div_(total)
            # dS/ds_k = weight_k / total (1 + (s_k - S) / gamma)
            s.mul_((slope / self.gamma)[:, None]).add_((slope - slope * mean / self.gamma)[:, None]).mul_(weight)
            return value, z

        loss = fused(value_and_slope, x, p.transpose(0, 1).flatten(0, 1)) / len(x)
        if self.tau and self.centers > 1:
            upper = torch.triu_indices(self.centers, self.centers, 1, device=x.device)
            gaps = (2 + 1e-5 - 2 * (p @ p.mT)[:, upper[0], upper[1]]).sqrt()
            loss = loss + self.tau * gaps.sum() / (self.num_classes * self.centers * (self.centers - 1))
        return loss


def uniform_as_linear(proxies: Tensor) -> None:
    """Draw the proxies as their authors do, as the (D, C K) weight of a linear layer: uniform up to 1 / sqrt(C K)."""
    bound = 1 / math.sqrt(len(proxies))
    nn.init.uniform_(proxies, -bound, bound)
