"""Losses that compare embeddings x with learnable class vectors p, the proxies.

In formulas s is the cosine of x and p, d = 2 - 2 s their squared distance, y the sample's class,
C the number of classes and K the number of proxies per class.
"""

import math
import warnings
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from .base import (
    Loss,
    amount,
    choice,
    classes_and_dim,
    direction_cosines,
    log_one_plus_sum_exp,
    one_or_more,
    unit,
)

ProxyNCAppVariant = Literal["paper", "code"]


class ProxyLoss(Loss):
    """A loss with learnable `proxies` (C K, D), grouped by class; their lengths do not matter.

    `per_class` is K; without it each class has one proxy, initialised from another distribution.
    Raises ValueError if `num_classes` or `dim` is missing.
    """

    num_classes: int
    dim: int

    def __init__(
        self, num_classes: int | None, dim: int | None, *, per_class: int | None = None
    ) -> None:
        num_classes, dim = classes_and_dim(type(self).__name__, num_classes, dim)
        super().__init__(num_classes, dim)
        if per_class is None:
            # Normal, with the standard deviation of PUMA's authors, who draw uniformly.
            start = math.sqrt(2 / num_classes) * torch.randn(num_classes, dim)
        else:
            # Like the weight (D, C K) of a linear layer.
            count = num_classes * per_class
            start = torch.empty(count, dim).uniform_(-1, 1) / math.sqrt(count)
        self.proxies = nn.Parameter(start)

    def unit_proxies(self, dtype: torch.dtype) -> Tensor:
        """The proxies (C K, D) scaled to length 1."""
        return unit(self.proxies.to(dtype))

    def cosines(self, x: Tensor) -> Tensor:
        """The cosines (N, C K) of embeddings (N, D) and proxies."""
        return unit(x) @ self.unit_proxies(x.dtype).T


class ProxyNCA(ProxyLoss):
    """Mean of d_y + log sum over c != y of exp(-d_c - direction kappa) (Movshovitz-Attias, 2017).

    x and p have length `scale`; kappa: `base.direction_cosines`.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        scale: float = 1.0,
        direction: float = 0.0,
    ) -> None:
        super().__init__(num_classes, dim)
        if self.num_classes < 2:
            raise ValueError("proxynca compares with other classes: num_classes must be 2 or more")
        self.scale = amount("scale", scale)
        self.direction = amount("direction", direction)

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        y = labels[:, None]
        d = self.scale**2 * (2 - 2 * self.cosines(x))
        exponents = -d
        if self.direction:
            p = self.unit_proxies(x.dtype)
            kappa = direction_cosines(unit(x), p[labels], p)
            exponents = exponents - self.scale**2 * self.direction * kappa
        pull = d.gather(1, y)
        push = exponents.scatter(1, y, -torch.inf).logsumexp(1, keepdim=True)
        return (pull + push).mean()


class ProxyNCApp(ProxyLoss):
    """Mean cross-entropy of -scale^2 d (Teh et al., ECCV 2020, Eq. 6); `variant` "code": of -d."""

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        scale: float = 3.0,
        variant: ProxyNCAppVariant = "paper",
    ) -> None:
        super().__init__(num_classes, dim)
        self.scale = amount("scale", scale)
        self.variant = choice("variant", variant, get_args(ProxyNCAppVariant))

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        d = 2 - 2 * self.cosines(x)
        if self.variant == "code":
            return F.cross_entropy(-d, labels)
        return F.cross_entropy(-(self.scale**2) * d, labels)


class ProxyAnchor(ProxyLoss):
    """Pull the samples of each class to its proxy, and push all others away from it.

    Mean over the classes present of log(1 + sum over their samples of exp(-alpha (s - margin))) +
    mean over all classes of log(1 + sum over the other samples of exp(alpha (s + margin)))
    (Kim et al., CVPR 2020, Eq. 4).
    """

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        alpha: float = 32.0,
        margin: float = 0.1,
    ) -> None:
        super().__init__(num_classes, dim)
        self.alpha = amount("alpha", alpha)
        self.margin = amount("margin", margin)

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        s = self.cosines(x).T  # (C, N)
        own = F.one_hot(labels, self.num_classes).bool().T
        pull = log_one_plus_sum_exp(-self.alpha * (s - self.margin), own)
        push = log_one_plus_sum_exp(self.alpha * (s + self.margin), ~own)
        present = own.any(1).sum()
        return pull.sum() / present + push.mean()


class ProxyGML(ProxyLoss):
    """Cross-entropy over the ceil(ratio C K) proxies nearest to a sample, its own class's first.

    A class's logit is the sum of the cosines with its chosen proxies.  Added is `weight` times the
    cross-entropy of each proxy with the classes' sums of proxies (Zhu et al., NeurIPS 2020).  K is
    `proxies_per_class`.  With 1 / ratio classes or fewer only the proxies of the own class are
    chosen, and no sample has a gradient; a warning says so.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        proxies_per_class: int = 12,
        ratio: float = 0.05,
        weight: float = 0.3,
    ) -> None:
        proxies_per_class = one_or_more("proxies_per_class", proxies_per_class)
        super().__init__(num_classes, dim, per_class=proxies_per_class)
        self.proxies_per_class = proxies_per_class
        self.ratio = amount("ratio", ratio)
        self.weight = amount("weight", weight)
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must lie in (0, 1], got {self.ratio}")
        if self.weight and self.num_classes * len(self.proxies) > 3e8:
            raise ValueError(
                "proxygml holds C^2 K numbers; "
                "weight = 0 for so many classes, as its authors for SOP"
            )
        self.kept = math.ceil(self.ratio * self.num_classes * proxies_per_class)
        if self.kept <= proxies_per_class < len(self.proxies):
            warnings.warn(
                f"proxygml: ratio = {self.ratio:g} keeps {self.kept} of {len(self.proxies)} "
                f"proxies, and the {proxies_per_class} of an image's own class come first: "
                f"no image has a gradient; use a ratio above {1 / self.num_classes:g}",
                stacklevel=3,
            )

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        p = self.unit_proxies(x.dtype)
        own = F.one_hot(labels, self.num_classes).bool()
        s = unit(x) @ p.T
        kept = self._kept(s.detach(), own)
        score = (s * kept).unflatten(1, (self.num_classes, -1)).sum(2)
        # A class without a chosen proxy is no candidate.
        score = score.masked_fill((score == 0) & ~own, -torch.inf)
        loss = F.cross_entropy(score, labels)
        if self.weight:
            loss = loss + self.weight * self._of_proxies(p)
        return loss

    def _kept(self, s: Tensor, own: Tensor) -> Tensor:
        """(N, C K): 1 for the proxies that are chosen for each sample, else 0."""
        # Cosines are below 4, so that the proxies of the own class come first.
        first = s + 4 * own.repeat_interleave(self.proxies_per_class, 1)
        chosen = first.topk(self.kept, sorted=False).indices
        return torch.zeros_like(s).scatter(1, chosen, 1)

    def _of_proxies(self, p: Tensor) -> Tensor:
        """Cross-entropy of unit proxies p (C K, D) against the classes' sums of proxies."""
        sums = p.unflatten(0, (self.num_classes, -1)).sum(1)
        its_class = torch.arange(len(p), device=p.device) // self.proxies_per_class
        return F.cross_entropy(p @ sums.T, its_class)
