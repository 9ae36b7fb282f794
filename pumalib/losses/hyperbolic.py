"""The loss in hyperbolic space, the Poincare ball (Ermolov et al., CVPR 2022)."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from .base import amount, choice, divisor, sqrt_or_zero, unit
from .pair import PairLoss

HypVariant = Literal["paper", "code"]


class Hyp(PairLoss):
    """Mean over pairs (a, p) of -log e^(-d_ap / t) / (e^(-d_ap / t) + sum_n e^(-d_an / t)).

    d is the Poincare distance in the ball of radius 1 / sqrt(c), or 1 - s for c = 0; t is the
    `temperature`, `clip` the largest length of an output before its projection into the ball.
    `variant` "code": a pair of a class of K samples has weight 1 / K^2, as in the authors' code.
    """

    normalised_input = False

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        c: float = 0.1,
        temperature: float = 0.2,
        clip: float = 2.3,
        variant: HypVariant = "paper",
    ) -> None:
        super().__init__(num_classes, dim)
        self.c = amount("c", c)
        self.temperature = divisor("temperature", temperature)
        self.clip = divisor("clip", clip)
        self.variant = choice("variant", variant, get_args(HypVariant))

    @override
    def project(self, x: Tensor) -> Tensor:
        """Map outputs (N, D) into the ball: clip to length `clip`, then exponential map at 0."""
        if self.c == 0:
            return unit(x)
        # A first, rough clip, so that the length does not overflow; the second one is exact.
        largest = x.detach().abs().amax(1, keepdim=True)
        x = x / (largest / self.clip).clamp_min(1)
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1e-5)
        x = x * (self.clip / length).clamp_max(1)
        scaled = math.sqrt(self.c) * length.clamp_max(self.clip)
        # 1e-3 off the border, as in the authors' code.
        return x * (scaled.tanh().clamp_max(1 - 1e-3) / scaled)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Distances (N, M) of projected a (N, D) and b (M, D).

        `2 artanh(sqrt(c) |-a + b|) / sqrt(c)`, where + is Moebius addition.
        """
        product = a @ b.T
        if self.c == 0:
            return 1 - product
        aa = a.square().sum(1)[:, None]
        bb = b.square().sum(1)
        numerator = self.c * (aa + bb - 2 * product)
        squared = numerator / (1 - 2 * self.c * product + self.c**2 * aa * bb)
        return 2 / math.sqrt(self.c) * sqrt_or_zero(squared).clamp_max(1 - 1e-5).atanh()

    def metric(self, a: Tensor, b: Tensor) -> Tensor:
        """Distances (N, M) of outputs a (N, D) and b (M, D)."""
        return self.distance(self.project(a), self.project(b))

    @override
    def average(self, outputs: Tensor) -> Tensor:
        """Outputs (N, D) that project to the Einstein midpoints of the projected (K, N, D)."""
        x = self.project(outputs.flatten(0, 1)).view_as(outputs)
        if self.c == 0:
            return x.mean(0)
        factor = 2 / (1 - self.c * x.square().sum(-1, keepdim=True))
        # The midpoint, Moebius-added to itself.
        double = (factor * x).sum(0) / (factor - 1).sum(0)
        length = torch.linalg.vector_norm(double, dim=-1, keepdim=True)
        scaled = math.sqrt(self.c) * length.clamp_min(1e-12)
        return double * (scaled.atanh() / (2 * scaled))

    @override
    def pairs(self, a: Tensor, b: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        z = -self.distance(a, b) / self.temperature
        lowest = torch.finfo(z.dtype).min
        negatives = z.masked_fill(~negative, lowest).logsumexp(1, keepdim=True)
        terms = F.softplus(negatives - z) * positive
        if self.variant == "paper":
            return terms.sum() / positive.sum().clamp_min(1)

        size = 1 + positive.sum(1).to(z.dtype)
        # Each class of K samples counts K times 1 / K.
        classes = (positive.any(1) / size).sum()
        return (terms.sum(1) / size.square()).sum() / classes.clamp_min(1)
