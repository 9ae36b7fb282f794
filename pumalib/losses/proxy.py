"""Losses of embeddings x against learnable class vectors p: s their cosine, d = 2 - 2 s, y the sample's class."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Loss, direction_cosines, log_one_plus_sum_exp, sqrt_or_zero, unit


class ProxyLoss(Loss):
    """A loss with learnable class vectors `proxies` (C x K, D), the K of one class adjacent; only directions count."""

    per_class = ""  # the hyperparameter K, if there is one

    def __init__(self, num_classes: int, dim: int, **hyper):
        super().__init__(num_classes, dim, **hyper)
        if self.per_class:  # as the weight (D, C K) of a linear layer
            count = num_classes * getattr(self, self.per_class)
            start = torch.empty(count, dim).uniform_(-1, 1) / math.sqrt(count)
        else:  # of the deviation that PUMA's authors have; theirs is uniform
            start = math.sqrt(2 / num_classes) * torch.randn(num_classes, dim)
        self.proxies = nn.Parameter(start)

    def cosines(self, x: Tensor) -> Tensor:
        """The cosines (N, C x K) of embeddings (N, D) and proxies."""
        return unit(x) @ unit(self.proxies.to(x.dtype)).T


class ProxyNCA(ProxyLoss, scale=1.0, direction=0.0):
    """Mean of d_y + log sum over c != y of exp(-d_c - direction kappa), x, p times `scale` (Movshovitz-Attias 2017)."""

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        d, y = self.scale**2 * (2 - 2 * self.cosines(x)), labels[:, None]
        push = -d
        if self.direction:
            p = unit(self.proxies.to(x.dtype))
            push = push - self.scale**2 * self.direction * direction_cosines(unit(x), p[labels], p)
        return (d.gather(1, y) + push.scatter(1, y, -torch.inf).logsumexp(1, keepdim=True)).mean()


class ProxyNCApp(ProxyLoss, scale=3.0, variant=("paper", "code")):
    """Mean cross-entropy of -scale^2 d (Teh et al., ECCV 2020, Eq. 6); `variant` "code": of -d."""

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        scale = self.scale if self.variant == "paper" else 1
        return F.cross_entropy(-(scale**2) * (2 - 2 * self.cosines(x)), labels)


class ProxyAnchor(ProxyLoss, alpha=32.0, margin=0.1):
    """Mean over the classes present of log(1 + sum over their samples of exp(-alpha (s - margin))) + mean over all
    classes of log(1 + sum over the other samples of exp(alpha (s + margin))) (Kim et al., CVPR 2020, Eq. 4)."""

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        s, own = self.cosines(x).T, F.one_hot(labels, self.num_classes).bool().T
        pull = log_one_plus_sum_exp(-self.alpha * (s - self.margin), own)
        push = log_one_plus_sum_exp(self.alpha * (s + self.margin), ~own)
        return pull.sum() / own.any(1).sum() + push.mean()


class ProxyGML(ProxyLoss, proxies_per_class=12, ratio=0.05, weight=0.3):
    """Each sample keeps the ceil(ratio C K) proxies most similar to it, its own class's first (Zhu, NeurIPS 2020).
    Cross-entropy over the classes' sums of those kept, and `weight` times that of proxies with the sums of all."""

    per_class = "proxies_per_class"

    def __init__(self, num_classes: int, dim: int, **hyper):
        super().__init__(num_classes, dim, **hyper)
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must lie in (0, 1], got {self.ratio}")
        if self.weight and num_classes * len(self.proxies) > 3e8:
            raise ValueError("proxygml holds C^2 K numbers; weight = 0 for so many classes, as its authors for SOP")

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        p, own = unit(self.proxies.to(x.dtype)), F.one_hot(labels, self.num_classes).bool()
        s = unit(x) @ p.T
        first = s.detach() + 4 * own.repeat_interleave(self.proxies_per_class, 1)  # a cosine is below 4
        count = math.ceil(self.ratio * self.num_classes * self.proxies_per_class)
        kept = torch.zeros_like(s).scatter(1, first.topk(count, sorted=False).indices, 1)
        score = (s * kept).unflatten(1, (self.num_classes, -1)).sum(2)
        loss = F.cross_entropy(score.masked_fill((score == 0) & ~own, -torch.inf), labels)
        if self.weight:
            classes = p.unflatten(0, (self.num_classes, -1)).sum(1)
            its_class = torch.arange(len(p), device=p.device) // self.proxies_per_class
            loss = loss + self.weight * F.cross_entropy(p @ classes.T, its_class)
        return loss


class SoftTriple(ProxyLoss, centers=10, la=20.0, gamma=0.1, margin=0.01, tau=0.0):
    """Mean cross-entropy of la (S_c - margin [c = y]), S_c = sum over the K = `centers` of softmax_k(s_ck / gamma) s_ck
    (Qian, ICCV 2019).  `tau` (0.2 there, 0 in PML) weighs the distances of a class's centres, Eq. 9 there."""

    per_class = "centers"

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        s, y = self.cosines(x).unflatten(1, (self.num_classes, -1)), labels[:, None]
        s = ((s / self.gamma).softmax(2) * s).sum(2)
        loss = F.cross_entropy(self.la * s.scatter(1, y, s.gather(1, y) - self.margin), labels)
        if self.tau and self.centers > 1:
            w = unit(self.proxies.to(x.dtype)).unflatten(0, (self.num_classes, -1))
            gaps = (2 + 1e-5 - 2 * w @ w.mT).sqrt().triu(1)
            loss = loss + self.tau * gaps.sum() / (self.num_classes * self.centers * (self.centers - 1))
        return loss


class CosFace(ProxyLoss, scale=64.0, margin=0.35):
    """Mean cross-entropy of `scale` s_c, in which s_y becomes s_y - margin (Wang et al., CVPR 2018, Eq. 4)."""

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        s, y = self.cosines(x), labels[:, None]
        return F.cross_entropy(self.scale * s.scatter(1, y, self.target(s.gather(1, y))), labels)

    def target(self, cosine: Tensor) -> Tensor:
        return cosine - self.margin


class ArcFace(CosFace, scale=64.0, margin=0.5):
    """s_y = cos theta becomes cos(theta + margin), beyond pi s_y - margin sin(margin) (Deng et al., CVPR 2019)."""

    def target(self, cosine: Tensor) -> Tensor:
        beyond = cosine <= math.cos(math.pi - self.margin)
        return torch.where(beyond, cosine - self.margin * math.sin(self.margin), self.angle_sum(cosine))

    def angle_sum(self, cosine: Tensor) -> Tensor:
        """cos(theta + margin) from cos(theta), by the addition theorem: no acos, whose slope at 1 is infinite."""
        return cosine * math.cos(self.margin) - sqrt_or_zero(1 - cosine.square()) * math.sin(self.margin)


class CurricularFace(ArcFace, scale=32.0, margin=0.3, variant=("paper", "code")):
    """ArcFace's target; hard negatives, s_j > cos(theta + margin), become s_j (t + s_j) (Huang et al., CVPR 2020).
    t is 0.99 t + 0.01 (batch mean of s_y), updated before its use, in training only.  Scale and margin are PUMA's
    (Appendix A).  `variant` "code": t per class, updated after its use; hard negatives exceed the modified target."""

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
