"""Cross-batch memory (Wang et al., CVPR 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Loss
from .pair import PairLoss


class XBM(Loss):
    """A pair-based `loss` of the batch against the last `size` embeddings, this batch's included, itself excluded.

    The memory holds values without gradient.  It is filled from the first step, in training mode only, and is saved
    and restored with its write position.

    Args:
        size: embeddings kept, at least the batch size.
        warmup: steps with the loss of the batch alone, while embeddings still move fast (1,000 there).
    """

    batches = "classes"

    def __init__(self, loss: PairLoss, size: int = 4096, warmup: int = 0):
        super().__init__(loss.num_classes, loss.dim)
        if not isinstance(loss, PairLoss) or type(loss).pairs is PairLoss.pairs:
            raise ValueError(f"xbm cannot hold {type(loss).__name__}: it needs a loss of anchors against others")
        self.loss, self.size, self.warmup = loss, size, warmup
        self.normalised_input, self.metric = loss.normalised_input, loss.metric
        self.register_buffer("memory", torch.zeros(size, loss.dim))
        self.register_buffer("memory_labels", torch.full((size,), -1))  # -1: still empty
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
