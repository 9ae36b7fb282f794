"""Terms added to another loss: language guidance and direction regularisation."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Loss, unit


class Language(Loss):
    """`loss` plus `weight` times the divergence of image similarities from text similarities (Roth et al., CVPR 2022).

    S = x x^T of the batch, T = `similarity` of their classes + 1, both 2 where the classes are the same; mean over
    rows of KL(softmax T || softmax S), with gradient through S only.  weight 7.5 for CUB, 6 for Cars there (D = 128).

    Args:
        similarity: (C, C) cosines of the text embeddings of class names; not saved with the loss.
    """

    def __init__(self, loss: Loss, similarity: Tensor, weight: float = 7.5):
        super().__init__(loss.num_classes, loss.dim)
        similarity = torch.as_tensor(similarity, dtype=torch.float32)
        if similarity.shape != (loss.num_classes, loss.num_classes):
            raise ValueError(
                f"similarity must be ({loss.num_classes}, {loss.num_classes}), a row and a column for each class, "
                f"got {tuple(similarity.shape)}"
            )
        self.loss, self.weight = loss, weight
        self.batches, self.normalised_input, self.metric = loss.batches, loss.normalised_input, loss.metric
        self.register_buffer("similarity", similarity, persistent=False)

    @property
    def proxies(self):
        return self.loss.proxies

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        same = labels[:, None] == labels
        images = (unit(x) @ unit(x).T).masked_fill(same, 2)
        texts = (self.similarity[labels[:, None], labels].to(x.dtype) + 1).masked_fill(same, 2)
        divergence = texts.softmax(1) * (texts.log_softmax(1) - images.log_softmax(1))
        return self.loss.compute(x, labels) + self.weight * divergence.sum(1).mean()


def direction(loss: Loss, gamma: float = 0.3) -> Loss:
    """Direction regularisation (Mohan et al., CVPR 2020): `loss` (triplet, proxynca or ms) with its term switched on.

    kappa = cos(x_n - x_a, x_p - x_a): a negative in the positive's direction should not be pushed away from the
    anchor straight through the positive.  Triplet: [d_ap - d_an + margin - gamma kappa]+.  ProxyNCA, a = x,
    p = p_y, n = p_c: the negative's exponent is -(d_c + gamma kappa).  MS, p the anchor's hardest positive: the
    negative's exponent is beta (s_an - base - gamma kappa).  kappa is 0 where two of the three coincide.

    Second-hand: the paper itself was not at hand; these are its equations as others state them.
    """
    if not hasattr(loss, "direction"):
        raise ValueError(f"direction regularisation is defined for triplet, proxynca and ms, not {type(loss).__name__}")
    loss.direction = gamma
    return loss
