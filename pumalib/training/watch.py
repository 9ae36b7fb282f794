"""Measures of the embeddings during training that show a collapse.

They are logged per epoch and change no number of a training:

- `cosine`: the mean cosine between the embeddings of a batch; 1 if all are one point;
- `norm` and `norm_sd`: mean and standard deviation, within a batch, of the lengths of the head's
  outputs, before normalisation; under torchrun of the first process's part of the batch;
- `zero_share`: the share of the loss's terms that are zero, if the loss counts them.

All are means over the batches.  They stay on the device until they are read, with the loss, of
several steps at once: each reading waits for a GPU.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..losses.base import Loss, unit
from ..models import EmbeddingModel

# A batch has collapsed if all distances between its embeddings, of length 1, are at most this.
NEAR = 0.01


@dataclass(frozen=True)
class Step:
    """The numbers of a training step, on the device."""

    where: str  # such as "epoch 3, batch 7"
    loss: Tensor
    seen: dict[str, Tensor]  # as `Watch.seen`


def read(steps: Sequence[Step]) -> list[tuple[float, dict[str, float]]]:
    """The loss of each step and what was seen of it, read from the device at once."""
    numbers: list[Tensor] = []
    for step in steps:
        numbers += [step.loss, *step.seen.values()]
    values = iter(torch.stack([number.float() for number in numbers]).tolist())
    found = []
    for step in steps:
        loss = next(values)
        found.append((loss, {name: next(values) for name in step.seen}))
    return found


class Watch:
    """Measures the batches of a training, between the network and the loss."""

    def __init__(self) -> None:
        # The measures of the last batch, by the names above, and `reach`: the largest distance to
        # its first embedding, all scaled to length 1.  {} for a batch of one image.
        self.seen: dict[str, Tensor] = {}
        self._outputs: list[Tensor] = []
        self._is_open = False
        self._has_warned = False

    def begin(self) -> None:
        """Measure the next batch, up to its loss; later passes of its micro-batches are ignored."""
        self._outputs = []
        self._is_open = True

    def see_outputs(self, head: nn.Module, inputs: Any, outputs: Tensor) -> None:
        """A forward hook of the model's head that stores its outputs."""
        if self._is_open:
            self._outputs.append(outputs.detach())

    @torch.no_grad()
    def see_batch(self, loss: Loss, inputs: tuple[Tensor, Tensor], value: Tensor) -> None:
        """A forward hook of the loss that measures the embeddings (N, dim) of the whole batch."""
        if not self._is_open:
            return
        self._is_open = False
        self.seen = {}
        embeddings = inputs[0].detach().float()
        count = len(embeddings)
        if count < 2:
            return

        directions = unit(embeddings)
        # The sum over all pairs of different rows, without the (N, N) cosines.
        of_pairs = directions.sum(0).square().sum() - directions.square().sum()
        norms = torch.linalg.vector_norm(torch.cat(self._outputs).float(), dim=1)
        numbers = {
            "cosine": of_pairs / (count * (count - 1)),
            "norm": norms.mean(),
            "norm_sd": norms.std(correction=0),
            "reach": torch.linalg.vector_norm(directions - directions[0], dim=1).max(),
        }
        zeros = loss.share_of_zeros()
        if zeros is not None:
            numbers["zero_share"] = zeros
        self.seen = numbers

    def warn_of_collapse(self, where: str, value: float, reach: float) -> None:
        """Warn, once per training, if all embeddings of a batch are one point.

        `where` names the run and the batch, `value` is its loss, `reach` as seen of it.
        """
        # The distance of two embeddings is at most twice the largest distance to the first one.
        if 2 * reach > NEAR or self._has_warned:
            return
        self._has_warned = True
        remedy = (
            "A smaller lr, new_lr_factor or loss_lr_factor, or another loss or miner, usually"
            " helps (as a new run)"
        )
        warnings.warn(
            f"{where}: all embeddings of this batch are within {NEAR} of each other: the model"
            f" collapses to a point (loss {value:.4g}). {remedy}",
            stacklevel=2,
        )


@contextmanager
def watching(model: EmbeddingModel, loss: Loss) -> Iterator[Watch]:
    """Measure the embeddings that pass from model to loss, in this context."""
    watch = Watch()
    hooks = [
        model.head.register_forward_hook(watch.see_outputs),
        loss.register_forward_hook(watch.see_batch),
    ]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def added(sums: dict[str, float], seen: dict[str, float]) -> dict[str, float]:
    """The sums over an epoch's batches with one more batch added; "steps" counts the batches.

    `reach` is not summed.
    """
    if not seen:
        return sums
    total = {"steps": sums.get("steps", 0) + 1}
    for name, value in seen.items():
        if name != "reach":
            total[name] = sums.get(name, 0.0) + value
    return total


def means(sums: dict[str, float]) -> dict[str, float]:
    """The means over an epoch's batches, for its row of the log, from the sums of `added`."""
    return {name: value / sums["steps"] for name, value in sums.items() if name != "steps"}
