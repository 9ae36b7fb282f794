"""Softmax over classes with a margin on the target: CosFace, ArcFace, CurricularFace.

x and p are L2-normalised embeddings (N, D) and proxies (C, D), s_j = x . p_j, y the sample's class, theta the
angle between x and p_y.  Each loss is the mean cross-entropy of `scale` times its modified cosines.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import ProxyLoss, check_choice, cross_entropy, fused, rows, softmax_, sqrt_or_zero, unit


class CosFace(ProxyLoss):
    """s_y becomes s_y - margin (Wang et al., CVPR 2018, Eq. 4; also AM-Softmax)."""

    def __init__(self, num_classes: int, dim: int, scale: float = 64, margin: float = 0.35):
        super().__init__(num_classes, dim)
        self.scale, self.margin = scale, margin

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x = unit(x)
        return cross_entropy(self.scale * x, self.unit_proxies(x), labels, -self.scale * self.margin)


class ArcFace(ProxyLoss):
    """s_y becomes cos(theta + margin), margin in radians (Deng et al., CVPR 2019, Eq. 3).

    Beyond theta = pi - margin that would rise again: there s_y - margin sin(margin), as the authors do.
    """

    def __init__(self, num_classes: int, dim: int, scale: float = 64, margin: float = 0.5):
        super().__init__(num_classes, dim)
        self.scale, self.margin = scale, margin

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x = unit(x)
        p = self.unit_proxies(x)
        target = (x * rows(p, labels)).sum(1)
        return cross_entropy(self.scale * x, p, labels, self.scale * (add_angle(target, self.margin) - target))


class CurricularFace(ProxyLoss):
    """ArcFace's target; hard negatives, s_j > cos(theta + margin), become s_j (t + s_j) (Huang et al., CVPR 2020).

    t is 0.99 t + 0.01 (batch mean of s_y), without gradient, and grows as training succeeds, so that hard
    negatives count ever more (Eq. 5 to 8 there).  It is updated before its use, in training mode only.
    Defaults: scale and margin of PUMA (Appendix A); the loss's own authors use 64 and 0.5.
    Proxies start as N(0, 0.01^2), as theirs.

    Args:
        variant: "paper", or "code" as PUMA's authors released it: t per class of the sample, updated after
            the loss for the classes in the batch, and negatives compared with the modified target.
    """

    def __init__(self, num_classes: int, dim: int, scale: float = 32, margin: float = 0.3, variant: str = "paper"):
        super().__init__(num_classes, dim, std=0.01)
        check_choice("variant", variant, ("paper", "code"))
        self.scale, self.margin, self.variant = scale, margin, variant
        self.register_buffer("t", torch.zeros(num_classes if variant == "code" else ()))

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x = unit(x)
        p = self.unit_proxies(x)
        target = (x * rows(p, labels)).sum(1)
        modified = add_angle(target, self.margin)
        if self.variant == "code":
            t, threshold = self.t.to(x.dtype)[labels, None], modified
        else:
            if self.training:
                self.t.lerp_(target.detach().mean().to(self.t.dtype), 0.01)
            t, threshold = self.t.to(x.dtype), angle_sum(target, self.margin)
        loss = self._loss(self.scale * x, p, labels, self.scale * modified, self.scale * threshold.detach(), t)
        if self.variant == "code" and self.training:
            self._update(target.detach().to(self.t.dtype), labels)
        return loss

    def _loss(self, x, p, labels, target, threshold, t):
        column = labels[:, None]

        def value_and_slopes(z, target):  # z is scale * s: its slope is that of s_j (t + s_j), or 1
            easy = z <= threshold[:, None]
            weight = torch.add(t, z, alpha=1 / self.scale).masked_fill_(easy, 1)  # t + s_j
            z.mul_(weight).scatter_(1, column, target[:, None])
            total = softmax_(z)
            slope = z.gather(1, column) - 1
            z.scatter_(1, column, 0)
            z.mul_(weight.mul_(2).sub_(t).masked_fill_(easy, 1))  # t + 2 s_j
            return (total[:, 0] - target).sum(), z, slope[:, 0]

        return fused(value_and_slopes, x, p, target) / len(x)

    @torch.no_grad()
    def _update(self, target, labels):
        count = torch.zeros_like(self.t).index_add_(0, labels, torch.ones_like(target))
        mean = torch.zeros_like(self.t).index_add_(0, labels, target) / count.clamp_min(1)
        self.t.lerp_(torch.where(count > 0, mean, self.t), 0.01)


def angle_sum(cosine: Tensor, margin: float) -> Tensor:
    """cos(theta + margin) from cos(theta), by the addition theorem: no acos, whose slope at 1 is infinite."""
    return cosine * math.cos(margin) - sqrt_or_zero(1 - cosine.square()) * math.sin(margin)


def add_angle(cosine: Tensor, margin: float) -> Tensor:
    """cos(theta + margin), or cos(theta) - margin sin(margin) where theta + margin exceeds pi."""
    beyond = cosine <= math.cos(math.pi - margin)
    return torch.where(beyond, cosine - margin * math.sin(margin), angle_sum(cosine, margin))

