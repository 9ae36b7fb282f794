"""What a loss costs at the number of classes that faces have: time, and bytes that are held.

Bytes are counted, not read off the process: they are the same on every machine.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pumalib.losses.base import Loss

# AdamW keeps, beside a weight and its gradient, two moments of each.
COPIES = 4


class Held(NamedTuple):
    """Bytes that a step of training holds for a loss.

    `learnt` are its proxies with their gradients and AdamW's moments; `saved` is what forward
    leaves for backward, beside the embeddings and the proxies.
    """

    learnt: int
    saved: int


def bytes_held(loss: Loss, x: Tensor, labels: Tensor) -> Held:
    """The bytes that a step with embeddings x (N, dim) and labels (N,) holds."""
    learnt = {one.untyped_storage().data_ptr(): one.nbytes for one in loss.parameters()}
    saved: dict[int, int] = {}
    # What was saved must not be freed, or another tensor could be counted as it.
    alive = []

    def note(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in learnt and place != x.untyped_storage().data_ptr():
            saved[place] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss(x, labels)
    return Held(COPIES * sum(learnt.values()), sum(saved.values()))


def milliseconds(loss: Loss, x: Tensor, labels: Tensor, turns: int) -> float:
    """CPU time of forward, backward and AdamW's step on the proxies; of `turns` the fastest.

    A turn more warms up.  The processor's time is what other work on the machine disturbs least.
    """
    optimizer = None
    if list(loss.parameters()):
        optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-4)
    spent = []
    for _ in range(turns + 1):
        begin = time.process_time()
        loss(x, labels).backward()
        if optimizer is not None:
            optimizer.step()
        spent.append(1000 * (time.process_time() - begin))
        x.grad = None
        loss.zero_grad()
    return min(spent[1:])


def extended(counts: Sequence[float], values: Sequence[float], count: float) -> float:
    """What a larger count would need, by the line through the last two of some measurements.

    Raises ValueError for fewer than two.
    """
    if len(counts) < 2:
        raise ValueError(f"{len(counts)} measurements: a line needs two")
    slope = (values[-1] - values[-2]) / (counts[-1] - counts[-2])
    return values[-1] + slope * (count - counts[-1])


def share_of_pairs(loss: Loss, x: Tensor, labels: Tensor) -> float:
    """The share of a batch's pairs of images, N (N - 1), whose cosine has a gradient.

    Of a loss of pairs; NaN of one that compares images with proxies.
    """
    pairs = getattr(loss, "pairs", None)
    if pairs is None:
        return float("nan")
    x = nn.functional.normalize(x.detach(), dim=1)
    itself = torch.eye(len(x), dtype=torch.bool)
    same = labels[:, None] == labels
    with torch.enable_grad():
        # Anchors whose product with unit vectors is their cosines: the loss as a function of these.
        cosines = (x @ x.T).requires_grad_()
        value = pairs(cosines, itself.float(), same & ~itself, ~same)
        (gradient,) = torch.autograd.grad(value, cosines)
    return float((gradient[~itself] != 0).float().mean())
