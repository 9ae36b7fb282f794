"""Losses over pairs and triplets of a batch.

In formulas s is a cosine, d a distance, a an anchor, p another sample of its class, n a sample of
a different class.  Defaults are those of pytorch-metric-learning (PML).
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from .base import (
    Loss,
    amount,
    choice,
    direction_cosines,
    divisor,
    euclidean,
    log_one_plus_sum_exp,
    mean_of_nonzero,
    unit,
)
from .miners import TRIPLET_MINERS, distance_weights, hard_pairs, sample

Distance = Literal["cosine", "euclidean"]
MarginVariant = Literal["paper", "code", "all"]
MultiSimilarityVariant = Literal["paper", "code"]


class PairLoss(Loss):
    """A loss that compares anchors with others: the batch with itself, or with a memory (XBM).

    A subclass defines `pairs`.
    """

    batches = "classes"

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.project(x)
        same = labels[:, None] == labels
        positive = same.clone().fill_diagonal_(False)
        return self.pairs(x, x, positive, ~same)

    def project(self, x: Tensor) -> Tensor:
        """Map the model's outputs (N, D) to the points that `pairs` compares."""
        return unit(x)

    def pairs(self, a: Tensor, b: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """The loss of projected anchors a (N, D) and others b (M, D), with pair masks (N, M)."""
        raise NotImplementedError


class Contrastive(PairLoss):
    """Mean of nonzero [d_ap - pos_margin]+ plus mean of nonzero [neg_margin - d_an]+.

    Hadsell et al., CVPR 2006, without their squares.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        pos_margin: float = 0.0,
        neg_margin: float = 1.0,
    ) -> None:
        super().__init__(num_classes, dim)
        self.pos_margin = amount("pos_margin", pos_margin)
        self.neg_margin = amount("neg_margin", neg_margin)

    @override
    def pairs(self, a: Tensor, b: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        d = euclidean(a, b)
        pull = (d - self.pos_margin).relu()
        push = (self.neg_margin - d).relu()
        nonzero = ((pull > 0) & positive).sum() + ((push > 0) & negative).sum()
        self._note_zeros(nonzero, positive.sum() + negative.sum())
        return mean_of_nonzero(pull * positive) + mean_of_nonzero(push * negative)


class Triplet(PairLoss):
    """Mean of nonzero [d_ap - d_an + margin - direction kappa]+ (Schroff et al., CVPR 2015).

    `distance`: d is 1 - s for "cosine".  `miner`: a name of `miners.TRIPLET_MINERS`.
    kappa: `base.direction_cosines`.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        margin: float = 0.05,
        miner: str = "batchhard",
        distance: Distance = "cosine",
        direction: float = 0.0,
    ) -> None:
        super().__init__(num_classes, dim)
        self.margin = amount("margin", margin)
        self.miner = choice("miner", miner, TRIPLET_MINERS)
        self.distance = choice("distance", distance, get_args(Distance))
        self.direction = amount("direction", direction)

    @override
    def pairs(self, a: Tensor, b: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        d = self._distances(a, b)
        mine = TRIPLET_MINERS[self.miner]
        triplets = mine(d.detach(), positive, negative, self.margin)
        d_ap = d[triplets.anchor, triplets.positive][:, None]
        d_an = d[triplets.anchor]

        violation = d_ap - d_an + self.margin  # (T, M)
        if self.direction:
            kappa = direction_cosines(a[triplets.anchor], b[triplets.positive], b)
            violation = violation - self.direction * kappa
        terms = violation.relu() * triplets.negatives
        self._note_zeros((terms > 0).sum(), triplets.negatives.sum())
        return mean_of_nonzero(terms)

    def _distances(self, a: Tensor, b: Tensor) -> Tensor:
        if self.distance == "cosine":
            return 1 - a @ b.T
        return euclidean(a, b)


class NPair(Loss):
    """Mean cross-entropy of anchor . positive among all positives, plus `l2` times the mean length.

    Sohn, NeurIPS 2016.  A pair is its class's first two samples in the order of the batch, as in
    PML; without any pair the loss is 0.
    """

    batches = "classes"
    normalised_input = False

    def __init__(
        self, num_classes: int | None = None, dim: int | None = None, *, l2: float = 0.02
    ) -> None:
        super().__init__(num_classes, dim)
        self.l2 = amount("l2", l2)

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        # Products of larger numbers would overflow float32.
        x = x.clamp(-1e16, 1e16)
        # later[i, j]: j is of the class of i and comes after it in the batch.
        later = (labels[:, None] == labels).triu(1)
        is_first = later.any(1) & ~later.any(0)
        anchor = is_first.nonzero()[:, 0]
        positive = later[anchor].int().argmax(1)

        products = x[anchor] @ x[positive].T
        itself = torch.arange(len(anchor), device=x.device)
        loss = F.cross_entropy(products, itself, reduction="sum") / max(1, len(anchor))
        if len(anchor) == 0:
            return loss
        return loss + self.l2 * torch.linalg.vector_norm(x, dim=1).mean()


class Margin(PairLoss):
    """Sum over triplets of [d_ap - beta + margin]+ + [beta - d_an + margin]+, per nonzero term.

    Wu et al., ICCV 2017.  `variant` "paper": each positive pair with one negative drawn by
    `miners.distance_weights`; "code": the triplets of `miners.hard_pairs`; "all": all triplets.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        margin: float = 0.2,
        beta: float = 1.2,
        variant: MarginVariant = "paper",
    ) -> None:
        super().__init__(num_classes, dim)
        self.margin = amount("margin", margin)
        self.beta = amount("beta", beta)
        self.variant = choice("variant", variant, get_args(MarginVariant))

    @override
    def pairs(self, a: Tensor, b: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        d = euclidean(a, b)
        pull = (d - self.beta + self.margin).relu()
        push = (self.beta - d + self.margin).relu()
        if self.variant == "paper":
            anchor, p, n = sample(distance_weights(d, negative, a.shape[1]), positive)
            terms = torch.cat([pull[anchor, p], push[anchor, n]])
            self._note_zeros((terms > 0).sum(), len(terms))
            return mean_of_nonzero(terms)

        if self.variant == "code":
            positive, negative = hard_pairs(a @ b.T, positive, negative, 0.1)
        # The number of triplets of each pair: a positive pair has one per negative of its anchor.
        pulls = positive * negative.sum(1, keepdim=True)
        pushes = negative * positive.sum(1, keepdim=True)
        nonzero = ((pull > 0) * pulls + (push > 0) * pushes).sum()
        self._note_zeros(nonzero, pulls.sum() + pushes.sum())
        return (pull * pulls + push * pushes).sum() / nonzero.clamp_min(1)


class MultiSimilarity(PairLoss):
    """Mean over anchors of log(1 + sum_p e^(-alpha z)) / alpha + log(1 + sum_n e^(beta z)) / beta.

    z = s - base (Wang et al., CVPR 2019).  `variant` "paper": over `miners.hard_pairs`, or over all
    pairs if `epsilon` is above 2; "code": over pairs drawn as in Margin.  `direction` times kappa,
    of the anchor's hardest positive, is subtracted from the z of a negative.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        alpha: float = 2.0,
        beta: float = 50.0,
        base: float = 0.5,
        epsilon: float = 0.1,
        variant: MultiSimilarityVariant = "paper",
        direction: float = 0.0,
    ) -> None:
        super().__init__(num_classes, dim)
        self.alpha = divisor("alpha", alpha)
        self.beta = divisor("beta", beta)
        self.base = amount("base", base)
        self.epsilon = amount("epsilon", epsilon)
        self.variant = choice("variant", variant, get_args(MultiSimilarityVariant))
        self.direction = amount("direction", direction)

    @override
    def pairs(self, a: Tensor, b: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        s = a @ b.T
        z_positive = s - self.base
        z_negative = z_positive
        if self.direction:
            z_negative = z_negative - self._directed(s, a, b, positive)

        if self.variant == "code":
            positive, negative = self._drawn_pairs(a, b, positive, negative)
        elif self.epsilon <= 2:
            positive, negative = hard_pairs(s, positive, negative, self.epsilon)
        pull = log_one_plus_sum_exp(-self.alpha * z_positive, positive) / self.alpha
        push = log_one_plus_sum_exp(self.beta * z_negative, negative) / self.beta
        # A term is zero for an anchor without any pair.
        terms = pull + push
        self._note_zeros((terms > 0).sum(), len(terms))
        return terms.mean()

    def _directed(self, s: Tensor, a: Tensor, b: Tensor, positive: Tensor) -> Tensor:
        """`direction` times kappa (N, M) of each anchor's least similar positive; 0 without any."""
        hardest = s.masked_fill(~positive, torch.inf).argmin(1)
        kappa = direction_cosines(a, b[hardest], b)
        return self.direction * kappa * positive.any(1, keepdim=True)

    def _drawn_pairs(
        self, a: Tensor, b: Tensor, positive: Tensor, negative: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Masks (N, M) of the positives that have a negative, and of the negatives drawn."""
        weights = distance_weights(euclidean(a, b), negative, a.shape[1])
        anchor, p, n = sample(weights, positive)
        drawn_positive = torch.zeros_like(positive)
        drawn_negative = torch.zeros_like(negative)
        drawn_positive[anchor, p] = True
        drawn_negative[anchor, n] = True
        return drawn_positive, drawn_negative


class SupCon(PairLoss):
    """Mean over anchors, then positives, of -log softmax of s / temperature over all others.

    Khosla et al., NeurIPS 2020.
    """

    def __init__(
        self, num_classes: int | None = None, dim: int | None = None, *, temperature: float = 0.1
    ) -> None:
        super().__init__(num_classes, dim)
        self.temperature = divisor("temperature", temperature)

    @override
    def pairs(self, a: Tensor, b: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        z = a @ b.T / self.temperature
        z = z.masked_fill(~(positive | negative), torch.finfo(a.dtype).min)
        log_likelihood = (z.log_softmax(1) * positive).sum(1)
        return mean_of_nonzero(-log_likelihood / positive.sum(1).clamp_min(1))
