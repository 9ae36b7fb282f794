"""How well a metric space retrieves: accuracies, nearest neighbours, and differences in pairs.

Read `metrics` first, for what is measured; `search` finds the neighbours, and `statistics` says how
much of a difference is chance.
"""

from .arrays import evaluate, evaluate_files
from .metrics import KS, Scores, pack, scores, unpack
from .search import neighbours
from .statistics import (
    NOT_DATASETS,
    OVERALL,
    harmonic_mean,
    holm,
    interval,
    paired_difference,
)

__all__ = [
    "KS",
    "NOT_DATASETS",
    "OVERALL",
    "Scores",
    "evaluate",
    "evaluate_files",
    "harmonic_mean",
    "holm",
    "interval",
    "neighbours",
    "pack",
    "paired_difference",
    "scores",
    "unpack",
]
