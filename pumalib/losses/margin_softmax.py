"""Mean cross-entropy of `scale` times the cosines s_j, with a margin on that of the sample's class, s_y = cos theta."""

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import ProxyLoss, sqrt_or_zero


class CosFace(ProxyLoss):
    """s_y becomes s_y - margin (Wang et al., CVPR 2018, Eq. 4; also AM-Softmax)."""

    hyper: ClassVar[dict] = {"scale": 64.0, "margin": 0.35}

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        s, y = self.cosines(x), labels[:, None]
        return F.cross_entropy(self.scale * s.scatter(1, y, self.target(s.gather(1, y))), labels)

    def target(self, cosine: Tensor) -> Tensor:
        return cosine - self.margin


class ArcFace(CosFace):
    """s_y becomes cos(theta + margin), beyond pi s_y - margin sin(margin) (Deng et al., CVPR 2019, Eq. 3; radians)."""

    hyper: ClassVar[dict] = {"scale": 64.0, "margin": 0.5}

    def target(self, cosine: Tensor) -> Tensor:
        beyond = cosine <= math.cos(math.pi - self.margin)
        return torch.where(beyond, cosine - self.margin * math.sin(self.margin), self.angle_sum(cosine))

    def angle_sum(self, cosine: Tensor) -> Tensor:
        """cos(theta + margin) from cos(theta), by the addition theorem: no acos, whose slope at 1 is infinite."""
        return cosine * math.cos(self.margin) - sqrt_or_zero(1 - cosine.square()) * math.sin(self.margin)


class CurricularFace(ArcFace):
    """ArcFace's target; hard negatives, s_j > cos(theta + margin), become s_j (t + s_j) (Huang et al., CVPR 2020).

    t is 0.99 t + 0.01 (batch mean of s_y), without gradient, and grows as training succeeds, so that hard
    negatives count ever more (Eq. 5 to 8 there).  It is updated before its use, in training mode only.
    Scale and margin of PUMA (Appendix A), 64 and 0.5 by the loss's authors; proxies start as N(0, 0.01^2), as theirs.
    `variant` "code" as PUMA's authors released it: t per class of the sample, updated after the loss for the classes
    in the batch, and negatives compared with the modified target.
    """

    hyper, choices = {"scale": 32.0, "margin": 0.3, "variant": "paper"}, {"variant": ("paper", "code")}
    std = 0.01

    def __init__(self, num_classes: int, dim: int, **hyper):
        super().__init__(num_classes, dim, **hyper)
        self.register_buffer("t", torch.zeros(num_classes if self.variant == "code" else ()))

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        s, y = self.cosines(x), labels[:, None]
        target = s.gather(1, y)
        modified, seen = self.target(target), target.detach()[:, 0].to(self.t.dtype)
        if self.variant == "paper":
            if self.training:
                self.t.lerp_(seen.mean(), 0.01)
            t, threshold = self.t.to(x.dtype), self.angle_sum(target)
        else:
            t, threshold = self.t[y].to(x.dtype), modified
            if self.training:  # t is a copy: the new values are for the next batch
                self.t.lerp_(self.t.scatter_reduce(0, labels, seen, "mean", include_self=False), 0.01)
        s = torch.where(s > threshold, s * (t + s), s)
        return F.cross_entropy(self.scale * s.scatter(1, y, modified), labels)
