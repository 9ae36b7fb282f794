"""How well a metric space retrieves: accuracies with intervals, nearest neighbours, and differences in pairs."""

from .retrieval import Scores, neighbours, pack, scores, unpack
from .statistics import KS, NOT_DATASETS, OVERALL, harmonic_mean, holm, interval, paired_difference

__all__ = ["KS", "Scores", "pack", "NOT_DATASETS", "OVERALL", "harmonic_mean", "holm", "interval", "neighbours", "paired_difference", "scores", "unpack"]
