"""Pairwise cross-entropy in the Poincare ball (Ermolov et al., CVPR 2022)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import sqrt_or_zero, unit
from .pair import PairLoss


class Hyp(PairLoss):
    """Mean over pairs (a, p) of -log exp(-d_ap / t) / (exp(-d_ap / t) + sum_n exp(-d_an / t)), d the Poincare distance.

    It takes the model's output before normalisation, clipped to length `clip`, into the ball of radius 1 / sqrt(c);
    c = 0 is the sphere, with d = 1 - s.  With two samples per class this is its authors' loss (who sum the two
    orders); with more, they compare two of each class at a time, in the order of the batch.
    `variant` "code" as PUMA's authors released it: a pair of a class of K samples weighs 1 / K^2, not 1 / (K (K - 1)).
    """

    normalised_input = False
    hyper, choices = {"c": 0.1, "temperature": 0.2, "clip": 2.3, "variant": "paper"}, {"variant": ("paper", "code")}

    def project(self, x: Tensor) -> Tensor:
        """Clip (N, D) outputs to length `clip` and map them into the ball by the exponential map at 0."""
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
        """Distances (N, M) of the model's outputs a (N, D), b (M, D): how to retrieve them."""
        return self.distance(self.project(a), self.project(b))

    def average(self, outputs: Tensor) -> Tensor:
        """Outputs (N, D) that project to the Einstein midpoints of the projections of `outputs` (K, N, D)."""
        if self.c == 0:
            return F.normalize(outputs, dim=-1).mean(0)
        x = self.project(outputs.flatten(0, 1)).view_as(outputs)
        klein = 2 * x / (1 + self.c * x.square().sum(-1, keepdim=True))
        weight = (1 - self.c * klein.square().sum(-1, keepdim=True)).rsqrt()
        middle = (weight * klein).sum(0) / weight.sum(0)
        x = middle / (1 + (1 - self.c * middle.square().sum(-1, keepdim=True)).sqrt())
        scaled = math.sqrt(self.c) * torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-12)
        return x * (scaled.atanh() / scaled)

    def pairs(self, a, b, positive, negative):
        z = -self.distance(a, b) / self.temperature
        negatives = z.masked_fill(~negative, torch.finfo(z.dtype).min).logsumexp(1, keepdim=True)
        loss = F.softplus(negatives - z) * positive
        if self.variant == "paper":
            return loss.sum() / positive.sum().clamp_min(1)
        size = 1 + positive.sum(1).to(z.dtype)
        classes = (positive.any(1) / size).sum()  # each class of K samples counts K times 1 / K
        return (loss.sum(1) / size.square()).sum() / classes.clamp_min(1)
