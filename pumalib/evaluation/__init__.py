"""Retrieval evaluation: accuracies, nearest neighbours, and paired differences of models.

Read `metrics` first, which defines the accuracies; `search` finds the neighbours, and `statistics`
estimates how much of a difference is chance.
"""

from .arrays import evaluate, evaluate_files
from .metrics import KS, Scores, pack, scores, unpack
from .search import neighbours
from .statistics import (
    NOT_DATASETS,
    OVERALL,
    WEIGHTED,
    Averages,
    Spread,
    Term,
    averaged,
    contrast,
    ensemble_spread,
    harmonic_mean,
    holm,
    interval,
    paired_difference,
    pooled_spreads,
    resampled,
    smallest_found,
)

__all__ = [
    "KS",
    "NOT_DATASETS",
    "OVERALL",
    "WEIGHTED",
    "Averages",
    "Scores",
    "Spread",
    "Term",
    "averaged",
    "contrast",
    "ensemble_spread",
    "evaluate",
    "evaluate_files",
    "harmonic_mean",
    "holm",
    "interval",
    "neighbours",
    "pack",
    "paired_difference",
    "pooled_spreads",
    "resampled",
    "scores",
    "smallest_found",
    "unpack",
]
