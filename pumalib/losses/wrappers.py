"""Losses around another loss: a memory of many batches, and guidance by texts."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from typing_extensions import override

from .base import Loss, amount, count, one_or_more, unit
from .pair import PairLoss
from .texts import similarities


class Wrapper(Loss):
    """A loss around another `loss`, with the batches and the metric of that one.

    `classes` are the class names by label, for wrappers that need them.
    """

    # The name of the loss that `losses.make` wraps by default.
    default_loss: str

    def __init__(self, loss: Loss, classes: Sequence[str] | None = None) -> None:
        super().__init__(loss.num_classes, loss.dim)
        self.loss = loss
        self.batches = loss.batches
        self.normalised_input = loss.normalised_input
        self.metric = loss.metric

    @override
    def average(self, outputs: Tensor) -> Tensor:
        return self.loss.average(outputs)

    @override
    def share_of_zeros(self) -> Tensor | None:
        return self.loss.share_of_zeros()


class XBM(Wrapper):
    """A pair-based `loss` between the batch and the last `size` embeddings, this batch included.

    Wang et al., CVPR 2020.  The memory fills from the first step on, in training only, but is not
    used for the first `warmup` steps (1,000 there).
    Raises ValueError for a loss that is no PairLoss, or was made without `dim`.
    """

    default_loss = "contrastive"

    loss: PairLoss
    memory: Tensor
    memory_labels: Tensor
    position: Tensor
    steps: Tensor

    def __init__(
        self,
        loss: Loss,
        classes: Sequence[str] | None = None,
        *,
        size: int = 4096,
        warmup: int = 0,
    ) -> None:
        super().__init__(loss, classes)
        self.size = one_or_more("size", size)
        self.warmup = count("warmup", warmup)
        if not isinstance(loss, PairLoss):
            held = type(loss).__name__
            raise ValueError(f"xbm cannot hold {held}: it needs a loss of anchors against others")
        if loss.dim is None:
            raise ValueError("xbm holds embeddings of one length: it needs dim")
        self.register_buffer("memory", torch.zeros(self.size, loss.dim))
        # -1: empty so far.
        self.register_buffer("memory_labels", torch.full((self.size,), -1))
        # The place of the next embedding.
        self.register_buffer("position", torch.zeros((), dtype=torch.long))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        if len(x) > self.size:
            raise ValueError(
                f"a batch of {len(x)} does not fit into a memory of size {self.size}; raise size"
            )
        slots = (self.position + torch.arange(len(x), device=x.device)) % self.size
        if self.training:
            self._remember(x, labels, slots)

        same = labels[:, None] == self.memory_labels
        different = ~same & (self.memory_labels >= 0)
        if self.training:
            # A sample is not a positive of its own entry in the memory.
            same.scatter_(1, slots[:, None], False)
        others = self.loss.project(self.memory.to(x.dtype))
        loss = self.loss.pairs(self.loss.project(x), others, same, different)
        self._zero_share = self.loss.share_of_zeros()
        if self.warmup:
            # Both are computed: reading the step from the device would wait for it.
            alone = self.loss.compute(x, labels)
            loss = torch.where(self.steps > self.warmup, loss, alone)
        return loss

    @override
    def share_of_zeros(self) -> Tensor | None:
        """The share of zero terms with the memory, also during the warm-up."""
        return self._zero_share

    def _remember(self, x: Tensor, labels: Tensor, slots: Tensor) -> None:
        self.memory[slots] = x.detach().to(self.memory.dtype)
        self.memory_labels[slots] = labels
        self.position.copy_((self.position + len(x)) % self.size)
        self.steps.add_(1)


class Language(Wrapper):
    """`loss` plus `weight` times the mean over rows of KL(softmax T || softmax S), S = x x^T.

    Roth et al., CVPR 2022.  T = 1 + `similarity` (C, C) of the classes, by default
    `texts.similarities(texts, classes)`; S and T are 2 for two samples of one class.
    Raises ValueError for a similarity of another shape, or a loss made without `num_classes`.
    """

    default_loss = "ms"

    similarity: Tensor

    def __init__(
        self,
        loss: Loss,
        classes: Sequence[str] | None = None,
        *,
        texts: str = "words",
        similarity: ArrayLike | None = None,
        weight: float = 7.5,
    ) -> None:
        super().__init__(loss, classes)
        self.texts = texts
        self.weight = amount("weight", weight)
        if loss.num_classes is None:
            raise ValueError("language compares every two classes: it needs num_classes")
        if similarity is None and classes is not None:
            similarity = similarities(texts, classes)
        elif similarity is None:
            # Enough for uses without class names, such as reading `metric`.
            similarity = np.eye(loss.num_classes)
        matrix = torch.as_tensor(similarity, dtype=torch.float32)
        shape = (loss.num_classes, loss.num_classes)
        if matrix.shape != shape:
            raise ValueError(
                f"similarity must be {shape}, of every two classes, got {tuple(matrix.shape)}"
            )
        self.register_buffer("similarity", matrix, persistent=False)

    @override
    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        same = labels[:, None] == labels
        images = (unit(x) @ unit(x).T).masked_fill(same, 2)
        texts = self.similarity[labels[:, None], labels].to(x.dtype) + 1
        texts = texts.masked_fill(same, 2)
        divergence = texts.softmax(1) * (texts.log_softmax(1) - images.log_softmax(1))
        return self.loss.compute(x, labels) + self.weight * divergence.sum(1).mean()
