"""What things cost, measured side by side with references in one process (notebook 92).

Machines differ and others use them too, so only ratios mean something: candidates take turns
(`Clock.by_turns`), and each is told beside what is common for the same job.
"""

from .clock import Clock, environment, peak_memory
from .losses import (
    LossEntry,
    LossSizes,
    PlainCrossEntropy,
    losses_beside_cross_entropy,
    losses_beside_library,
)
from .reading import PhotographSizes, photographs, reading_times, small_file_times
from .search import (
    EIGHT_DATASETS,
    embeddings_of,
    search_of_eight,
    search_times,
)
from .steps import TRAIN_IMAGES, StepSetting, TrainingSizes, TrainingStep, training_times

__all__ = [
    "EIGHT_DATASETS",
    "TRAIN_IMAGES",
    "Clock",
    "LossEntry",
    "LossSizes",
    "PhotographSizes",
    "PlainCrossEntropy",
    "StepSetting",
    "TrainingSizes",
    "TrainingStep",
    "embeddings_of",
    "environment",
    "losses_beside_cross_entropy",
    "losses_beside_library",
    "peak_memory",
    "photographs",
    "reading_times",
    "search_of_eight",
    "search_times",
    "small_file_times",
    "training_times",
]
