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
    Contrast,
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
    rank_correlation,
    resampled,
    smallest_found,
    student,
)

__all__ = [
    "KS",
    "NOT_DATASETS",
    "OVERALL",
    "WEIGHTED",
    "Averages",
    "Contrast",
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
    "rank_correlation",
    "resampled",
    "scores",
    "smallest_found",
    "student",
    "unpack",
]
