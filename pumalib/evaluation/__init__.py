"""Retrieval evaluation: accuracies, nearest neighbours, and paired differences of models.

Read `metrics` first, which defines the accuracies; `search` finds the neighbours, and `statistics`
estimates how much of a difference is chance.
"""

from .arrays import evaluate, evaluate_files
from .metrics import KS, Scores, pack, scores, unpack
from .search import neighbours
from .statistics import (
    MEAN,
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
    harmonic_shares,
    holm,
    interval,
    pooled_spreads,
    rank_correlation,
    resampled,
    smallest_found,
    student,
    with_errors,
)

__all__ = [
    "KS",
    "MEAN",
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
    "harmonic_shares",
    "holm",
    "interval",
    "neighbours",
    "pack",
    "pooled_spreads",
    "rank_correlation",
    "resampled",
    "scores",
    "smallest_found",
    "student",
    "unpack",
    "with_errors",
]
