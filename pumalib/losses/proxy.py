"""Losses of embeddings x against learnable class vectors p: s their cosine, d = 2 - 2 s, y the sample's class."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Loss, direction_cosines, log_one_plus_sum_exp, sqrt_or_zero, unit


class ProxyLoss(Loss):
    """A loss with learnable class vectors `proxies` (C x K, D), the K of one class adjacent.
    Only their direction counts, but the shorter they are, the faster a step of the optimiser turns them."""

    per_class = ""  # the hyperparameter K, if there is one

    def __init__(self, num_classes: int, dim: int, **hyper):
        super().__init__(num_classes, dim, **hyper)
        if self.per_class:  # as the weight (D, C K) of a linear layer
            count = num_classes * getattr(self, self.per_class)
            start = torch.empty(count, dim).uniform_(-1, 1) / math.sqrt(count)
        else:  # Kaiming's normal distribution over the classes, as PUMA's authors
            start = math.sqrt(2 / num_classes) * torch.randn(num_classes, dim)
        self.proxies = nn.Parameter(start)

    def cosines(self, x: Tensor) -> Tensor:
        """The cosines (N, C x K) of embeddings (N, D) and proxies."""
        return unit(x) @ unit(self.proxies.to(x.dtype)).T


class ProxyNCA(ProxyLoss, scale=1.0, direction=0.0):
    """Mean of d_y + log sum over c != y of exp(-d_c - direction kappa), x, p times `scale` (Movshovitz-Attias, 2017).
    It may be negative: PML has the positive in the sum, as `proxynca++` with scale 1."""

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        d, y = self.scale**2 * (2 - 2 * self.cosines(x)), labels[:, None]
        if self.num_classes == 1:  # no negative: nothing to learn
            return 0 * d.sum()
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
    A class's score is the sum of its kept similarities; cross-entropy over the classes whose score is not zero.  Plus
    `weight` times the same of proxies against classes, C^2 K numbers: the authors take K = 1, weight = 0 for SOP."""

    per_class, block = "proxies_per_class", 2**22  # numbers of the second term in memory at once

    def __init__(self, num_classes: int, dim: int, **hyper):
        super().__init__(num_classes, dim, **hyper)
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must lie in (0, 1], got {self.ratio}")

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        p, own = unit(self.proxies.to(x.dtype)), F.one_hot(labels, self.num_classes).bool()
        s = unit(x) @ p.T
        first = s.detach() + 4 * own.repeat_interleave(self.proxies_per_class, 1)  # a cosine is below 4
        count = math.ceil(self.ratio * self.num_classes * self.proxies_per_class)
        kept = torch.zeros_like(s).scatter(1, first.topk(count, sorted=False).indices, 1)
        score = (s * kept).unflatten(1, (self.num_classes, -1)).sum(2)
        loss = F.cross_entropy(score.masked_fill((score == 0) & ~own, -torch.inf), labels)
        if self.weight:
            classes = p.unflatten(0, (self.num_classes, -1)).sum(1)  # a class's own logits add up to its square
            total = _SumOfLogSumExp.apply(p, classes, max(1, self.block // self.num_classes))
            loss = loss + self.weight * ((total - classes.square().sum()) / len(p))
        return loss


class _SumOfLogSumExp(torch.autograd.Function):
    """Sum over a's rows of log sum exp(a b^T), and at once its gradient, so that no more than `rows` are in memory."""

    @staticmethod
    def forward(ctx, a, b, rows):
        total, by_a, by_b = a.new_zeros(()), torch.empty_like(a), torch.zeros_like(b)
        for part, by_part in zip(a.split(rows), by_a.split(rows)):
            z = part @ b.T
            norm = z.logsumexp(1, keepdim=True)
            total += norm.sum()
            softmax = z.sub_(norm).exp_()
            torch.mm(softmax, b, out=by_part)
            by_b.addmm_(softmax.T, part)
        ctx.save_for_backward(by_a, by_b)
        return total

    @staticmethod
    def backward(ctx, gradient):
        by_a, by_b = ctx.saved_tensors
        return gradient * by_a, gradient * by_b, None


class SoftTriple(ProxyLoss, centers=10, la=20.0, gamma=0.1, margin=0.01, tau=0.0):
    """Mean cross-entropy of la (S_c - margin [c = y]), S_c = sum over the K = `centers` of softmax_k(s_ck / gamma) s_ck
    (Qian et al., ICCV 2019, Eq. 7 to 9).  `tau` (0.2 there, 0 in PML) weighs the mean over classes of the sum over
    k < l of sqrt(2 + 1e-5 - 2 w_k . w_l) / (K (K - 1))."""

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
    t is 0.99 t + 0.01 (batch mean of s_y), without gradient, updated before its use, in training mode only (Eq. 5 to 8
    there).  Scale and margin are PUMA's (Appendix A), 64 and 0.5 by the loss's authors.  `variant` "code": t per class
    of the sample, updated after the loss for the classes in the batch; negatives compared with the modified target."""

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
