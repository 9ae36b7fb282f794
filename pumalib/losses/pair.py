"""Losses over the pairs of a batch: contrastive, triplet, N-pair, margin, multi-similarity, SupCon.

x are L2-normalised embeddings (N, D), s cosines, d Euclidean distances; a anchor, p another sample of its class,
n one of another class.  Defaults are those of pytorch-metric-learning (PML).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import (
    Loss,
    check_choice,
    direction_cosines,
    euclidean,
    fused,
    log_sum_exp,
    mean_of_nonzero,
    rounding,
    rows,
    sqrt_or_zero,
    unit,
    with_slope,
)


class PairLoss(Loss):
    """A loss of anchors against others, so that a memory can be the others (see `memory.XBM`)."""

    batches = "classes"

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.project(x)
        same = labels[:, None] == labels
        negative = ~same
        return self.pairs(x, x, same.fill_diagonal_(False), negative)

    def project(self, x: Tensor) -> Tensor:
        """What the loss compares, from embeddings (N, D)."""
        return unit(x)

    def pairs(self, a: Tensor, b: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """The loss of anchors a (N, D) against b (M, D), both projected; the masks (N, M) may leave pairs out."""
        raise NotImplementedError


class Contrastive(PairLoss):
    """Mean of [d_ap - pos_margin]+ plus mean of [neg_margin - d_an]+, over the nonzero terms of each.

    Hadsell et al., CVPR 2006, without the squares, as in PML.
    """

    def __init__(self, num_classes: int, dim: int, pos_margin: float = 0, neg_margin: float = 1):
        super().__init__(num_classes, dim)
        self.pos_margin, self.neg_margin = pos_margin, neg_margin

    def pairs(self, a, b, positive, negative):
        pull_mask, push_mask = positive.to(a.dtype), negative.to(a.dtype)  # faster than to select by booleans

        def value_and_slope(s):
            squared = torch.add(s.new_tensor(2), s, alpha=-2, out=s)
            d = F.threshold_(squared, rounding(s), 0).sqrt_()
            pull = ((d - self.pos_margin).clamp_min_(0) if self.pos_margin else d) * pull_mask
            push = (self.neg_margin - d).clamp_min_(0).mul_(push_mask)
            pulled, pushed = pull.sum(), push.sum()
            pulls, pushes = pull.sign_().sum().clamp_min(1), push.sign_().sum().clamp_min(1)
            slope = push.div_(pushes).addcmul_(pull, 1 / pulls, value=-1)  # of -d, whose own slope is 1 / d
            return pulled / pulls + pushed / pushes, slope.div_(F.threshold_(d, 0, torch.inf))

        return fused(value_and_slope, a, b, symmetric=True)


class Triplet(PairLoss):
    """Mean over the nonzero terms of [d_ap - d_an + margin]+ (Schroff et al., CVPR 2015).

    Args:
        miner: "batchhard": each anchor's farthest positive and nearest negative; "all" triplets;
            "semihard": those with d_ap < d_an; "random": one random negative for each (a, p).
        distance: "cosine", then d = 1 - s, or "euclidean".
        direction: gamma of direction regularisation, see `regularisers.direction`; 0 for none.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 0.05,
        miner: str = "batchhard",
        distance: str = "cosine",
        direction: float = 0,
    ):
        super().__init__(num_classes, dim)
        check_choice("miner", miner, ("all", "random", "semihard", "batchhard"))
        check_choice("distance", distance, ("cosine", "euclidean"))
        self.margin, self.miner, self.distance, self.direction = margin, miner, distance, direction

    def pairs(self, a, b, positive, negative):
        if self.miner == "batchhard":
            anchor = torch.arange(len(a), device=a.device)
            with torch.no_grad():
                s = a @ b.T
                farthest, p = torch.where(positive, s, torch.inf).min(1)
                nearest, n = torch.where(negative, s, -torch.inf).max(1)
                keep = farthest.isfinite() & nearest.isfinite()  # has a positive and a negative
        elif self.miner == "random":
            anchor, p, n, keep = sample(negative.to(a.dtype), positive)
        else:
            d = self._distances(a @ b.T)
            if self.direction:
                return self._every_triplet(a, b, d, positive, negative)
            return self._sorted(d, positive, negative)
        a, p, n = rows(a, anchor), rows(b, p), rows(b, n)
        violation = self._distances((a * p).sum(1)) - self._distances((a * n).sum(1)) + self.margin
        if self.direction:
            violation = violation - self.direction * direction_cosines(a[:, None], p[:, None], n[:, None])[:, 0, 0]
        return mean_of_nonzero(violation.relu(), keep)

    def _distances(self, s):
        return 1 - s if self.distance == "cosine" else sqrt_or_zero(2 - 2 * s)

    def _sorted(self, d, positive, negative):
        """All (semi-hard) triplets in O(N M log M): a pair's negatives in violation are a run of the sorted ones."""
        ordered = d.masked_fill(~negative, torch.inf).sort(1).values
        before = F.pad(ordered.cumsum(1, dtype=torch.float64), (1, 0))  # float64: differences of long sums
        bound = d + self.margin
        with torch.no_grad():
            end = torch.searchsorted(ordered, bound)
            start = torch.searchsorted(ordered, d.detach(), right=True) if self.miner == "semihard" else end * 0
            count = (end - start).masked_fill(~positive, 0)
        total = count * bound.double() - (before.gather(1, end) - before.gather(1, start)).masked_fill(~positive, 0)
        return (total.sum() / count.sum().clamp_min(1)).to(d.dtype)

    def _every_triplet(self, a, b, d, positive, negative):
        """The same written out, (number of pairs, M): a direction has no order to exploit."""
        anchor, p = positive.nonzero(as_tuple=True)
        far, near, keep = d[anchor, p][:, None], d[anchor], negative[anchor]
        if self.miner == "semihard":
            keep = keep & (near > far) & (near < far + self.margin)
        violation = far - near + self.margin - self.direction * direction_cosines(a[anchor], b[p], b)
        return mean_of_nonzero(violation.relu(), keep)


class NPair(PairLoss):
    """Mean cross-entropy of anchor . positive among all positives, a pair per class, plus `l2` times the mean length.

    Sohn, NeurIPS 2016.  Embeddings are not normalised; the length is the mean over the batch.  A pair is its class's
    first two samples in the order of the batch, as in PML; without any pair the loss is 0.
    """

    normalised_input = False

    def __init__(self, num_classes: int, dim: int, l2: float = 0.02):
        super().__init__(num_classes, dim)
        self.l2 = l2

    @torch.no_grad()
    def _value_and_slope(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        labels, order = labels.sort(stable=True)
        same = F.pad(labels[1:] == labels[:-1], (1, 1))  # as its predecessor; the last has no successor
        anchor = ~same[:-1] & same[1:]
        most = len(x) // 2 if x.is_cuda else int(anchor.sum())  # on a GPU a bound, not to wait for the number
        take = (~anchor).long().argsort(stable=True)[: max(1, most)]
        valid = anchor[take]
        pair = order[torch.cat([take, (take + 1).clamp_max_(len(x) - 1)])]
        anchors, positives = x[pair].clamp_(-1e16, 1e16).chunk(2)  # so that no product overflows float32
        z = anchors @ positives.T
        target = z.diagonal().clone()
        z.masked_fill_(~valid, -torch.inf).diagonal().copy_(target)  # nobody's positive; a row needs its own
        z = z.log_softmax(1)
        weight = valid.to(x.dtype) / valid.sum().clamp_min(1)
        value = -z.diagonal() @ weight
        z.exp_().diagonal().sub_(1)
        z.mul_(weight[:, None])

        length = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64)  # huge rows do not overflow
        penalty = valid.any().to(length.dtype) * (self.l2 / len(x))
        slope = x.new_zeros(len(x) + 1, x.shape[1])  # the last row takes what belongs to no pair
        slope[pair.masked_fill_(~valid.repeat(2), len(x))] = torch.cat([z @ positives, z.T @ anchors])
        slope = slope[:-1].addcmul_(x, (penalty / length.masked_fill(length < 1e-12, torch.inf)).to(x.dtype))
        return value + (penalty * length.sum()).to(x.dtype), slope

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        return with_slope(x, *self._value_and_slope(x, labels))


class Margin(PairLoss):
    """Sum over triplets of [d_ap - beta + margin]+ + [beta - d_an + margin]+ over its number of nonzero terms.

    Wu et al., ICCV 2017.

    Args:
        learn_beta: beta is a parameter, one for all classes.
        variant: "paper": each (a, p) with one negative drawn by inverse density of its distance, at least 0.5
            and below 1.4; "code" as PUMA's authors released it: all pairs kept by the miner of `ms`, epsilon 0.1;
            "all" triplets, which is PML without a miner.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 0.2,
        beta: float = 1.2,
        learn_beta: bool = False,
        variant: str = "paper",
    ):
        super().__init__(num_classes, dim)
        check_choice("variant", variant, ("paper", "code", "all"))
        self.margin, self.variant = margin, variant
        self.beta = nn.Parameter(torch.tensor(float(beta))) if learn_beta else beta

    def pairs(self, a, b, positive, negative):
        if self.variant == "paper":
            weights = distance_weights(euclidean(a, b).detach(), negative, a.shape[1])
            anchor, p, n, found = sample(weights, positive)
            a = rows(a, anchor)
            s_ap, s_an = (a * rows(b, p)).sum(1), (a * rows(b, n)).sum(1)
            far, near = self._terms(sqrt_or_zero(2 - 2 * s_ap), sqrt_or_zero(2 - 2 * s_an))
            count = ((far > 0).long() + (near > 0)) * found
            return ((far + near) * found).sum() / count.sum().clamp_min(1)
        if self.variant == "code":
            positive, negative = hard_pairs((a @ b.T).detach(), positive, negative, 0.1)
        d = euclidean(a, b)
        far, near = self._terms(d, d)
        far, near = far.masked_fill(~positive, 0), near.masked_fill(~negative, 0)
        positives, negatives = positive.sum(1), negative.sum(1)  # each positive stands in as many triplets
        total = (far.sum(1) * negatives + near.sum(1) * positives).sum()
        count = ((far > 0).sum(1) * negatives + (near > 0).sum(1) * positives).sum()
        return total / count.clamp_min(1)

    def _terms(self, d_ap, d_an):
        return (d_ap - self.beta + self.margin).relu(), (self.beta - d_an + self.margin).relu()


class MultiSimilarity(PairLoss):
    """Mean over anchors of log(1 + sum_p exp(-alpha (s - base))) / alpha + log(1 + sum_n exp(beta (s - base))) / beta.

    The miner keeps positives with s_ap - epsilon < max s_an and negatives with s_an + epsilon > min s_ap
    (Wang et al., CVPR 2019).

    Args:
        epsilon: of the miner; None: all pairs.
        variant: "paper", or "code" as PUMA's authors released it: mined as `margin` is, by distance.
        direction: gamma of direction regularisation, see `regularisers.direction`; 0 for none.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        alpha: float = 2,
        beta: float = 50,
        base: float = 0.5,
        epsilon: float | None = 0.1,
        variant: str = "paper",
        direction: float = 0,
    ):
        super().__init__(num_classes, dim)
        check_choice("variant", variant, ("paper", "code"))
        self.alpha, self.beta, self.base, self.epsilon = alpha, beta, base, epsilon
        self.variant, self.direction = variant, direction

    def pairs(self, a, b, positive, negative):
        s = a @ b.T
        push = s - self.base
        if self.direction:
            p = s.detach().masked_fill(~positive, torch.inf).argmin(1)  # the anchor's hardest positive
            kappa = direction_cosines(a, b[p], b).masked_fill(~positive.any(1, keepdim=True), 0)
            push = push - self.direction * kappa
        if self.variant == "code":
            weights = distance_weights(euclidean(a, b).detach(), negative, a.shape[1])
            anchor, _, n, found = sample(weights, positive)
            positive = positive & (weights > 0).any(1, keepdim=True)
            negative = torch.zeros_like(negative).index_put_((anchor, n), found)
        elif self.epsilon is not None:
            positive, negative = hard_pairs(s.detach(), positive, negative, self.epsilon)
        pull = log_sum_exp(-self.alpha * (s - self.base), positive, one=True) / self.alpha
        return (pull + log_sum_exp(self.beta * push, negative, one=True) / self.beta).mean()


class SupCon(PairLoss):
    """Mean over an anchor's positives of -log softmax, over all others, of s / temperature; then mean over anchors.

    Khosla et al., NeurIPS 2020, Eq. 2.  Anchors whose loss is zero, as those without a positive, do not count in the
    mean, as in PML.
    """

    def __init__(self, num_classes: int, dim: int, temperature: float = 0.1):
        super().__init__(num_classes, dim)
        self.temperature = temperature

    def pairs(self, a, b, positive, negative):
        left_out = ~(positive | negative)
        target = positive.to(a.dtype)
        target.div_(target.sum(1, keepdim=True).clamp_min(1))

        def value_and_slope(s):
            z = s.div_(self.temperature)
            mean = (z * target).sum(1, keepdim=True)
            top = z.masked_fill_(left_out, -torch.inf).amax(1, keepdim=True)
            top.masked_fill_(top == -torch.inf, 0)
            total = z.sub_(top).exp_().sum(1, keepdim=True)
            total.masked_fill_(total == 0, 1)
            loss = (total.log() + top - mean).masked_fill_(~positive.any(1, keepdim=True), 0)
            counted = loss > 0
            weight = counted / counted.sum().clamp_min(1)
            per_s = weight / self.temperature
            return (loss * weight).sum(), z.mul_(per_s / total).addcmul_(target, per_s, value=-1)

        return fused(value_and_slope, a, b)


def hard_pairs(s: Tensor, positive: Tensor, negative: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The masks (N, M) of the multi-similarity miner: pairs within epsilon of the hardest of the other kind."""
    closest_negative = s.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    farthest_positive = s.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
    return positive & (s - epsilon < closest_negative), negative & (s + epsilon > farthest_positive)


def distance_weights(d: Tensor, negative: Tensor, dim: int) -> Tensor:
    """Inverse density of distances on the unit sphere, (N, M), up to a factor per row (Wu et al., Sec. 4)."""
    allowed = negative & (d < 1.4)
    d = d.clamp(0.5, 1.4)
    log_weight = (2 - dim) * d.log() - (dim - 3) / 2 * (1 - d.square() / 4).log()
    log_weight = log_weight.masked_fill(~allowed, -torch.inf)
    return (log_weight - log_weight.amax(1, keepdim=True).clamp_min(torch.finfo(d.dtype).min)).exp()


def sample(weights: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each positive pair its rows a and p, a row n drawn by the anchor's weights (N, M), and whether it has any.

    The number of pairs is not known beforehand: on a GPU this waits for it.
    """
    anchor, p = positive.nonzero(as_tuple=True)
    cumulative = weights.cumsum(1)[anchor]
    total = cumulative[:, -1:]
    n = torch.searchsorted(cumulative, torch.rand_like(total) * total, right=True)
    return anchor, p, n[:, 0].clamp_max(weights.shape[1] - 1), total[:, 0] > 0
