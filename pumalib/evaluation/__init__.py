"""How well a metric space retrieves: accuracies with intervals, nearest neighbours, and differences in pairs."""

from .retrieval import Scores, evaluate, neighbours, scores, unpack
from .statistics import KS, SAYS, harmonic_mean, interval, paired_difference, resample

__all__ = ["Scores", "evaluate", "neighbours", "scores", "unpack"]
__all__ += ["KS", "SAYS", "harmonic_mean", "interval", "paired_difference", "resample"]
