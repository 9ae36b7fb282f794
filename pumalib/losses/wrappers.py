"""Losses around another one: cross-batch memory and language guidance."""

from typing import ClassVar

import torch
from torch import Tensor

from .base import Loss, unit
from .pair import PairLoss


class Wrapper(Loss):
    """A loss around `loss`, whose batches and metric are its own."""

    def __init__(self, loss: Loss, **hyper):
        super().__init__(loss.num_classes, loss.dim, **hyper)
        self.loss, self.batches, self.normalised_input = loss, loss.batches, loss.normalised_input
        self.metric, self.average = loss.metric, loss.average


class XBM(Wrapper):
    """A pair-based `loss` of the batch against the last `size` embeddings, this batch's included, itself excluded.

    Wang et al., CVPR 2020.  The memory, without gradient, is filled from the first step, in training mode only, and
    saved with its write position.  For `warmup` steps (1,000 there) the loss is that of the batch alone.
    """

    hyper: ClassVar[dict] = {"size": 4096, "warmup": 0}

    def __init__(self, loss: PairLoss, **hyper):
        super().__init__(loss, **hyper)
        if not hasattr(loss, "pairs"):
            raise ValueError(f"xbm cannot hold {type(loss).__name__}: it needs a loss of anchors against others")
        self.register_buffer("memory", torch.zeros(self.size, loss.dim))
        self.register_buffer("memory_labels", torch.full((self.size,), -1))  # -1: still empty
        self.register_buffer("position", torch.zeros((), dtype=torch.long))  # where the next one goes
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        if len(x) > self.size:
            raise ValueError(f"a batch of {len(x)} does not fit into a memory of size {self.size}; raise size")
        slots = (self.position + torch.arange(len(x), device=x.device)) % self.size
        if self.training:
            self.memory.index_copy_(0, slots, x.detach().to(self.memory.dtype))
            self.memory_labels.index_copy_(0, slots, labels)
            self.position.copy_((self.position + len(x)) % self.size)
            self.steps.add_(1)
        same = labels[:, None] == self.memory_labels
        different = ~same & (self.memory_labels >= 0)
        if self.training:
            same.scatter_(1, slots[:, None], False)  # itself
        others = self.loss.project(self.memory.to(x.dtype))
        loss = self.loss.pairs(self.loss.project(x), others, same, different)
        if self.warmup:  # both, and no waiting for the device to say which
            loss = torch.where(self.steps > self.warmup, loss, self.loss.compute(x, labels))
        return loss


class Language(Wrapper):
    """`loss` plus `weight` times the divergence of image similarities from text similarities (Roth et al., CVPR 2022).

    S = x x^T of the batch, T = `similarity` of their classes + 1, both 2 where the classes are the same; mean over
    rows of KL(softmax T || softmax S), with gradient through S only.  weight 7.5 for CUB, 6 for Cars there (D = 128).
    `similarity` (C, C) are cosines of the text embeddings of class names; they are not saved with the loss.
    """

    hyper: ClassVar[dict] = {"similarity": (), "weight": 7.5}

    def __init__(self, loss: Loss, **hyper):
        super().__init__(loss, **hyper)
        similarity, shape = torch.as_tensor(self.similarity, dtype=torch.float32), (loss.num_classes, loss.num_classes)
        if similarity.shape != shape:
            raise ValueError(f"similarity must be {shape}, of every two classes, got {tuple(similarity.shape)}")
        del self.similarity
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
