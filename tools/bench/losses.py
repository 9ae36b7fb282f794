"""Time of losses, forward and backward, against a cross-entropy or pytorch-metric-learning."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pumalib import losses

from .clock import Clock, library

# From embeddings and labels to a loss: ours, or a reference.
LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LossEntry:
    """A loss to be timed, and the largest ratio to the reference that is accepted (`bar`)."""

    shown: str
    name: str
    bar: float
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LossSizes:
    """Batch size, embedding dimension, and number of classes of the training set."""

    batch: int
    dim: int
    classes: int


@dataclass(frozen=True)
class _Reference:
    """The loss that others are compared with."""

    name: str
    loss: LossFunction


class PlainCrossEntropy(nn.Module):
    """Cross-entropy of scaled cosines to `count` proxies, in the most common form."""

    def __init__(self, count: int, dim: int):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(count, dim))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of embeddings (B, dim)."""
        cosines = F.linear(F.normalize(x), F.normalize(self.proxies))
        return F.cross_entropy(32 * cosines, labels)


def losses_beside_cross_entropy(
    entries: Sequence[LossEntry], proxies_per_class: int, sizes: LossSizes, clock: Clock
) -> pd.DataFrame:
    """Time proxy losses, forward and backward, against a cross-entropy over as many proxies.

    Returns a row per loss: loss, reference, batch, dim, classes, milliseconds,
    reference_milliseconds, ratio, bar, met.
    """
    count = sizes.classes * proxies_per_class
    plain = PlainCrossEntropy(count, sizes.dim).to(clock.device)
    reference = _Reference(f"cross-entropy over {count:,} proxies", plain)
    labels = torch.randint(sizes.classes, (sizes.batch,), device=clock.device)
    return _loss_times(entries, reference, labels, sizes, clock)


def losses_beside_library(sizes: LossSizes, clock: Clock) -> pd.DataFrame:
    """Time pair losses against pytorch-metric-learning's, on batches of four images a class.

    Returns the columns of `losses_beside_cross_entropy`; raises ImportError without that library.
    """
    labels = torch.arange(sizes.batch, device=clock.device) // 4 % sizes.classes
    tables = []
    for entry, loss in _library_losses(sizes.dim):
        reference = _Reference("pytorch-metric-learning", loss)
        tables.append(_loss_times([entry], reference, labels, sizes, clock))
    return pd.concat(tables, ignore_index=True)


def _library_losses(dim: int) -> list[tuple[LossEntry, LossFunction]]:
    """Pair losses, each with its counterpart in pytorch-metric-learning."""
    distances = library("distances")
    miners = library("miners")
    theirs = library("losses")

    def mined(loss: Callable, miner: Callable) -> LossFunction:
        return lambda x, labels: loss(x, labels, miner(x, labels))

    cosine = distances.CosineSimilarity()
    plain_product = distances.DotProductSimilarity(normalize_embeddings=False)
    triplet = theirs.TripletMarginLoss(distance=cosine)
    hardest = miners.BatchHardMiner(distance=cosine)
    semihard = miners.TripletMarginMiner(0.05, "semihard", distance=cosine)
    similar = miners.MultiSimilarityMiner()
    by_distance = miners.DistanceWeightedMiner()

    def entry(shown: str, name: str, **settings: str) -> LossEntry:
        return LossEntry(shown, name, 1.0, settings)

    return [
        (entry("contrastive", "contrastive"), theirs.ContrastiveLoss()),
        (entry("triplet, batch-hard", "triplet"), mined(triplet, hardest)),
        (entry("triplet, all", "triplet", miner="all"), triplet),
        (entry("triplet, semi-hard", "triplet", miner="semihard"), mined(triplet, semihard)),
        (
            entry("triplet, random", "triplet", miner="random"),
            theirs.TripletMarginLoss(triplets_per_anchor=3),
        ),
        (entry("npair", "npair"), theirs.NPairsLoss(distance=plain_product)),
        (entry("margin", "margin"), mined(theirs.MarginLoss(), by_distance)),
        (entry("ms", "ms"), mined(theirs.MultiSimilarityLoss(), similar)),
        (entry("supcon", "supcon"), theirs.SupConLoss()),
        (
            entry("xbm of contrastive", "xbm"),
            theirs.CrossBatchMemory(theirs.ContrastiveLoss(), dim, 4096),
        ),
    ]


def _loss_times(
    entries: Sequence[LossEntry],
    reference: _Reference,
    labels: Tensor,
    sizes: LossSizes,
    clock: Clock,
) -> pd.DataFrame:
    x = F.normalize(torch.randn(sizes.batch, sizes.dim, device=clock.device)).requires_grad_()
    candidates = {reference.name: _loss_step(reference.loss, x, labels)}
    for entry in entries:
        loss = losses.make(entry.name, sizes.classes, sizes.dim, **entry.settings)
        candidates[entry.shown] = _loss_step(loss.to(clock.device), x, labels)
    milliseconds = {}
    for name, turns in clock.interleaved(candidates).items():
        milliseconds[name] = 1000 * statistics.median(turns)

    rows = []
    for entry in entries:
        ratio = milliseconds[entry.shown] / milliseconds[reference.name]
        rows.append(
            {
                "loss": entry.shown,
                "reference": reference.name,
                "batch": sizes.batch,
                "dim": sizes.dim,
                "classes": sizes.classes,
                "milliseconds": milliseconds[entry.shown],
                "reference_milliseconds": milliseconds[reference.name],
                "ratio": ratio,
                "bar": entry.bar,
                "met": ratio <= entry.bar,
            }
        )
    return pd.DataFrame(rows)


def _loss_step(loss: LossFunction, x: Tensor, labels: Tensor) -> Callable[[], None]:
    """The function to be timed: forward and backward of a loss."""

    def step() -> None:
        x.grad = None
        if isinstance(loss, nn.Module):
            loss.zero_grad()
        loss(x, labels).backward()

    return step
