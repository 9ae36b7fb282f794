"""Miners: the choice of pairs and triplets of a batch for a loss.

Throughout, N anchors are compared with M others: d (N, M) are their distances, s (N, M) cosines.
The mask `positive` (N, M) marks the others of the anchor's class (never itself), `negative` (N, M)
those of other classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Triplets:
    """T pairs of an anchor and a positive, each with its negatives."""

    anchor: Tensor  # (T,) rows
    positive: Tensor  # (T,) columns
    negatives: Tensor  # (T, M) a mask


def batch_hard(d: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Triplets:
    """Each anchor with its farthest positive and nearest negative (Hermans, arXiv 1703.07737)."""
    anchor = torch.arange(len(d), device=d.device)
    farthest = d.masked_fill(~positive, -torch.inf).argmax(1)
    nearest = d.masked_fill(~negative, torch.inf).argmin(1)
    # argmax and argmin give a column even if there is no positive or no negative.
    exists = negative & positive.any(1, keepdim=True)
    return Triplets(anchor, farthest, exists & _one_each(nearest, d))


def all_triplets(d: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Triplets:
    """Every positive pair with every negative of its anchor."""
    anchor, p = positive.nonzero(as_tuple=True)
    return Triplets(anchor, p, negative[anchor])


def random_negative(d: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Triplets:
    """Every positive pair with one negative of its anchor, drawn uniformly."""
    anchor, p, n = sample(negative.to(d.dtype), positive)
    return Triplets(anchor, p, _one_each(n, d))


def semi_hard(d: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Triplets:
    """Every positive pair with the negatives d_ap < d_an < d_ap + margin (Schroff, CVPR 2015)."""
    anchor, p = positive.nonzero(as_tuple=True)
    d_ap = d[anchor, p][:, None]
    d_an = d[anchor]
    between = (d_an > d_ap) & (d_an < d_ap + margin)
    return Triplets(anchor, p, negative[anchor] & between)


TRIPLET_MINERS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Triplets]] = {
    "batchhard": batch_hard,
    "all": all_triplets,
    "random": random_negative,
    "semihard": semi_hard,
}


def hard_pairs(
    s: Tensor, positive: Tensor, negative: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Masks (N, M) of the hard positives and negatives of multi-similarity (Wang, CVPR 2019).

    A positive is hard if s_ap - epsilon < max s_an, a negative if s_an + epsilon > min s_ap.
    """
    closest_negative = s.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    farthest_positive = s.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
    hard_positive = positive & (s - epsilon < closest_negative)
    hard_negative = negative & (s + epsilon > farthest_positive)
    return hard_positive, hard_negative


def distance_weights(d: Tensor, negative: Tensor, dim: int) -> Tensor:
    """Weights (N, M) for drawing negatives (Wu et al., ICCV 2017, Sec. 4).

    They are proportional, in each row, to 1 / q(d), where q(d) = d^(dim-2) (1 - d^2/4)^((dim-3)/2)
    is the density of distances on the sphere in `dim` dimensions.  Distances below 0.5 count as
    0.5; beyond 1.4 the weight is 0.
    """
    allowed = negative & (d < 1.4)
    d = d.detach().clamp(0.5, 1.4)
    log_weight = (2 - dim) * d.log() - (dim - 3) / 2 * (1 - d.square() / 4).log()
    log_weight = log_weight.masked_fill(~allowed, -torch.inf)
    largest = log_weight.amax(1, keepdim=True)
    # A row without allowed negatives is all -inf, and -inf - (-inf) is NaN.
    largest = largest.clamp_min(torch.finfo(d.dtype).min)
    return (log_weight - largest).exp()


def sample(weights: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one triplet for each positive pair: rows a (T,), columns p (T,) and n (T,).

    The negative n is drawn with the weights (N, M) of the anchor's row; an anchor whose weights are
    all zero has no triplet.
    """
    has_negative = (weights > 0).any(1, keepdim=True)
    anchor, p = (positive & has_negative).nonzero(as_tuple=True)
    n = weights[anchor].multinomial(1)[:, 0]
    return anchor, p, n


def _one_each(column: Tensor, d: Tensor) -> Tensor:
    """A mask (T, M) with one true `column` (T,) in each row."""
    return F.one_hot(column, d.shape[1]).bool()
