"""Softmax losses over cosines with class vectors: margins on the target, several centres per class.

In formulas s is the cosine of embedding and class vector, y the sample's class, theta the angle
between the sample and its class vector.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from .base import Loss, amount, choice, classes_and_dim, divisor, one_or_more, sqrt_or_zero
from .proxy import ProxyLoss

CurricularFaceVariant = Literal["paper", "code"]


class CrossEntropy(Loss):
    """Mean cross-entropy of the logits x W^T + b, as in a classifier.

    The first loss of the survey (arXiv 2312.10046).  x is the model's output before L2
    normalisation; W (C, D) and b (C,) start like a linear layer's.  Outputs are compared by their
    cosine.  Raises ValueError if `num_classes` or `dim` is missing.
    """

    normalised_input = False

    def __init__(self, num_classes: int | None = None, dim: int | None = None) -> None:
        num_classes, dim = classes_and_dim("CrossEntropy", num_classes, dim)
        super().__init__(num_classes, dim)
        self.classifier = nn.Linear(dim, num_classes)

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        # Larger numbers would overflow float32 in the logits.
        x = x.clamp(-1e16, 1e16)
        weight = self.classifier.weight.to(x.dtype)
        bias = self.classifier.bias.to(x.dtype)
        return F.cross_entropy(F.linear(x, weight, bias), labels)


class NormalisedSoftmax(ProxyLoss):
    """Mean cross-entropy of s_c / temperature: class vectors and embeddings have length 1.

    Zhai and Wu, BMVC 2019, without their balanced batches.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        temperature: float = 0.05,
    ) -> None:
        super().__init__(num_classes, dim)
        self.temperature = divisor("temperature", temperature)

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.cosines(x) / self.temperature, labels)


class SoftTriple(ProxyLoss):
    """Mean cross-entropy of la (S_c - margin [c = y]), with K = `centers` vectors per class.

    S_c = sum over k of softmax_k(s_ck / gamma) s_ck (Qian et al., ICCV 2019).  `tau` (0.2 there,
    0 in PML) is the weight of the distances between a class's centres, Eq. 9 there.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        centers: int = 10,
        la: float = 20.0,
        gamma: float = 0.1,
        margin: float = 0.01,
        tau: float = 0.0,
    ) -> None:
        centers = one_or_more("centers", centers)
        super().__init__(num_classes, dim, per_class=centers)
        self.centers = centers
        self.la = amount("la", la)
        self.gamma = divisor("gamma", gamma)
        self.margin = amount("margin", margin)
        self.tau = amount("tau", tau)

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        y = labels[:, None]
        s = self.cosines(x).unflatten(1, (self.num_classes, -1))  # (N, C, K)
        s = ((s / self.gamma).softmax(2) * s).sum(2)
        logits = self.la * s.scatter(1, y, s.gather(1, y) - self.margin)
        loss = F.cross_entropy(logits, labels)
        if self.tau and self.centers > 1:
            loss = loss + self.tau * self._gaps(x.dtype)
        return loss

    def _gaps(self, dtype: torch.dtype) -> Tensor:
        """The sum of distances between centres of a class, over C K (K - 1), Eq. 9."""
        w = self.unit_proxies(dtype).unflatten(0, (self.num_classes, -1))
        gaps = (2 + 1e-5 - 2 * w @ w.mT).sqrt().triu(1)
        return gaps.sum() / (self.num_classes * self.centers * (self.centers - 1))


class CosFace(ProxyLoss):
    """Mean cross-entropy of `scale` s_c, where s_y is replaced by s_y - margin.

    Wang et al., CVPR 2018, Eq. 4.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        scale: float = 64.0,
        margin: float = 0.35,
    ) -> None:
        super().__init__(num_classes, dim)
        self.scale = amount("scale", scale)
        self.margin = amount("margin", margin)

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        y = labels[:, None]
        s = self.cosines(x)
        logits = self.scale * s.scatter(1, y, self.target(s.gather(1, y)))
        return F.cross_entropy(logits, labels)

    def target(self, cosine: Tensor) -> Tensor:
        """The replacement for the cosine with the sample's own class."""
        return cosine - self.margin


class ArcFace(CosFace):
    """CosFace with cos(theta + margin) in place of s_y = cos theta (Deng et al., CVPR 2019).

    Where theta + margin exceeds pi, it is s_y - margin sin(margin).
    """

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        scale: float = 64.0,
        margin: float = 0.5,
    ) -> None:
        super().__init__(num_classes, dim, scale=scale, margin=margin)

    @override
    def target(self, cosine: Tensor) -> Tensor:
        beyond = cosine <= math.cos(math.pi - self.margin)
        shifted = cosine - self.margin * math.sin(self.margin)
        return torch.where(beyond, shifted, self.angle_sum(cosine))

    def angle_sum(self, cosine: Tensor) -> Tensor:
        """cos(theta + margin) from cos(theta).

        By the addition theorem instead of acos, whose slope at 1 is infinite.
        """
        first = cosine * math.cos(self.margin)
        sine = sqrt_or_zero(1 - cosine.square())
        return first - sine * math.sin(self.margin)


class CurricularFace(ArcFace):
    """ArcFace where hard negatives, s_j > cos(theta + margin), are replaced by s_j (t + s_j).

    Huang et al., CVPR 2020.  In training t becomes 0.99 t + 0.01 (batch mean of s_y), before it is
    used.  Scale and margin are PUMA's (Appendix A).  `variant` "code": one t per class, updated
    after it is used; a negative is hard if it exceeds the modified target.
    """

    t: Tensor

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        scale: float = 32.0,
        margin: float = 0.3,
        variant: CurricularFaceVariant = "paper",
    ) -> None:
        super().__init__(num_classes, dim, scale=scale, margin=margin)
        self.variant = choice("variant", variant, get_args(CurricularFaceVariant))
        start = torch.zeros(())
        if self.variant == "code":
            start = torch.zeros(self.num_classes)
        self.register_buffer("t", start)

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        y = labels[:, None]
        s = self.cosines(x)
        own = s.gather(1, y)
        modified = self.target(own)
        if self.variant == "paper":
            self._update_t(own)
            t = self.t.to(x.dtype)
            threshold = self.angle_sum(own)
        else:
            # A copy: the update is for the next batch.
            t = self.t[y].to(x.dtype)
            threshold = modified
            self._update_t_per_class(own, labels)
        s = torch.where(s > threshold, s * (t + s), s)
        return F.cross_entropy(self.scale * s.scatter(1, y, modified), labels)

    def _update_t(self, own: Tensor) -> None:
        if self.training:
            seen = own.detach()[:, 0].to(self.t.dtype)
            self.t.lerp_(seen.mean(), 0.01)

    def _update_t_per_class(self, own: Tensor, labels: Tensor) -> None:
        """Update t of the classes in the batch; t of the others stays."""
        if self.training:
            seen = own.detach()[:, 0].to(self.t.dtype)
            means = self.t.scatter_reduce(0, labels, seen, "mean", include_self=False)
            self.t.lerp_(means, 0.01)
