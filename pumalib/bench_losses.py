"""Time of each loss, forward and backward, against what it must not exceed: `python -m pumalib bench losses`.

Margin-softmax and proxy losses stand against a plain cross-entropy over as many normalised proxies, pair-based losses
against pytorch-metric-learning, where that is installed.  Candidates and reference run by turns in one process, and
the ratio is of their medians, so that a busy machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F

from . import losses, paths

COLUMNS = [
    "loss", "reference", "batch", "dim", "classes", "milliseconds", "reference_milliseconds", "ratio", "bar", "met",
    "rounds", "torch", "device", "threads",
]  # fmt: skip
PAIR_BAR = 0.5  # of the library's time

# {proxies per class: (shown name, make's name, hyperparameters, bar on the ratio)}
PROXY = {
    1: [
        ("proxynca", "proxynca", {}, 1.3),
        ("proxynca++", "proxynca++", {}, 1.3),
        ("proxyanchor", "proxyanchor", {}, 1.3),
        ("cosface", "cosface", {}, 1.3),
        ("arcface", "arcface", {}, 1.3),
        ("curricularface", "curricularface", {}, 1.3),
        ("curricularface, code", "curricularface", {"variant": "code"}, 1.3),
    ],
    10: [("softtriple", "softtriple", {}, 1.3)],
    # without its regulariser, which costs C^2 K whatever the batch and which its authors leave out at this scale
    12: [("proxygml, weight 0", "proxygml", {"weight": 0}, 3.0)],
}


def pairs(dim: int) -> list[tuple]:
    """(shown name, make's name, hyperparameters, the same of pytorch-metric-learning or None) of pair-based losses."""
    try:
        from pytorch_metric_learning import distances, miners
        from pytorch_metric_learning import losses as library
    except ImportError:
        names = ("contrastive", "triplet", "npair", "margin", "ms", "supcon", "hyp", "xbm")
        return [(name, name, {}, None) for name in names]

    def mined(loss, miner):
        return lambda x, labels: loss(x, labels, miner(x, labels))

    cosine, product = distances.CosineSimilarity(), distances.DotProductSimilarity(normalize_embeddings=False)
    triplet, similar = library.TripletMarginLoss(distance=cosine), miners.MultiSimilarityMiner()
    hard, drawn = miners.BatchHardMiner(distance=cosine), miners.DistanceWeightedMiner()
    semihard = miners.TripletMarginMiner(0.05, "semihard", distance=cosine)
    return [
        ("contrastive", "contrastive", {}, library.ContrastiveLoss()),
        ("triplet, batch-hard", "triplet", {}, mined(triplet, hard)),
        ("triplet, all", "triplet", {"miner": "all"}, triplet),
        ("triplet, semi-hard", "triplet", {"miner": "semihard"}, mined(triplet, semihard)),
        ("triplet, random", "triplet", {"miner": "random"}, library.TripletMarginLoss(triplets_per_anchor=3)),
        ("npair", "npair", {}, library.NPairsLoss(distance=product)),
        ("margin", "margin", {}, mined(library.MarginLoss(), drawn)),
        ("margin, all", "margin", {"variant": "all"}, library.MarginLoss()),
        ("margin, code", "margin", {"variant": "code"}, mined(library.MarginLoss(), similar)),
        ("ms", "ms", {}, mined(library.MultiSimilarityLoss(), similar)),
        ("ms, code", "ms", {"variant": "code"}, mined(library.MultiSimilarityLoss(), drawn)),
        ("supcon", "supcon", {}, library.SupConLoss()),
        ("hyp", "hyp", {}, None),  # it has none; its NTXentLoss, the same at c = 0, needs 15 GB at full size
        ("xbm of contrastive", "xbm", {}, library.CrossBatchMemory(library.ContrastiveLoss(), dim, 4096)),
    ]


class PlainCrossEntropy(nn.Module):
    """Cross-entropy of 32 cosines over normalised proxies, as one would write it."""

    def __init__(self, count: int, dim: int):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(count, dim))

    def forward(self, x, labels):
        return F.cross_entropy(32 * F.linear(F.normalize(x), F.normalize(self.proxies)), labels)


def milliseconds(candidates: dict, x: torch.Tensor, labels: torch.Tensor, rounds: int) -> tuple[dict[str, float], int]:
    """Median time of forward and backward of each `{name: loss}`, run by turns, and how many turns that were.

    The first turn does not count; after two more they end early once 20 seconds have passed.
    """
    spent = {name: [] for name in candidates}
    begin = time.perf_counter()
    for turn in range(rounds + 1):
        if turn > 2 and time.perf_counter() - begin > 20:
            break
        for name, loss in candidates.items():
            x.grad = None
            if isinstance(loss, nn.Module):
                loss.zero_grad()
            if x.is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            loss(x, labels).backward()
            if x.is_cuda:
                torch.cuda.synchronize()
            spent[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(times[1:]) for name, times in spent.items()}, len(spent[name]) - 1


def measure(batch: int, dim: int, classes: int, rounds: int, device: str) -> pd.DataFrame:
    """A row per loss: times in milliseconds, `met` where the ratio is within its bar."""
    x = F.normalize(torch.randn(batch, dim, device=device)).requires_grad_()
    rows = []

    def add(name, reference, times, turns, bar):
        ratio = times[name] / times[reference] if reference in times else None
        met = None if ratio is None else ratio <= bar
        rows.append((name, reference, batch, dim, classes, times[name], times.get(reference), ratio, bar, met, turns))

    labels = torch.randint(classes, (batch,), device=device)
    for per_class, entries in PROXY.items():
        reference = f"cross-entropy over {classes * per_class:,} proxies"
        candidates = {reference: PlainCrossEntropy(classes * per_class, dim).to(device)}
        for name, key, hyper, _ in entries:
            candidates[name] = losses.make(key, classes, dim, **hyper).to(device)
        times, turns = milliseconds(candidates, x, labels, rounds)
        for name, _, _, bar in entries:
            add(name, reference, times, turns, bar)

    labels = torch.arange(batch, device=device) // 4 % classes
    for name, key, hyper, library in pairs(dim):
        candidates = {name: losses.make(key, classes, dim, **hyper).to(device)}
        if library is not None:
            candidates["pytorch-metric-learning"] = library
        add(name, "pytorch-metric-learning", *milliseconds(candidates, x, labels, rounds), PAIR_BAR)

    hardware = torch.cuda.get_device_name(device) if x.is_cuda else "cpu"
    table = pd.DataFrame(rows, columns=COLUMNS[:-3])
    return table.assign(torch=torch.__version__, device=hardware, threads=torch.get_num_threads())


def main(argv: list[str] | None = None) -> Path:
    """Measure, print the table, write `results/bench/losses-<device>.csv`; returns that path."""
    parser = argparse.ArgumentParser(prog="python -m pumalib bench losses", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each loss, fewer where they are slow")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny size, only to see that it runs")
    options = parser.parse_args(argv)
    if options.quick:
        table = measure(batch=24, dim=8, classes=20, rounds=1, device=options.device)
    else:  # the unified training set of the paper
        table = measure(batch=720, dim=128, classes=15_952, rounds=options.rounds, device=options.device)
    print(table[COLUMNS[:10]].to_string(index=False, float_format="%.3g"))
    path = paths.RESULTS / "bench" / f"losses-{torch.device(options.device).type}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False, float_format="%.5g")
    print(f"written to {path}")
    return path
