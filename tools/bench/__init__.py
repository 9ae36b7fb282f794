"""Time and memory of the code, measured together with references in one process (notebook 92).

Machines differ and run other work too, so only ratios mean something: candidates are timed in turns
(`Clock.interleaved`), and each is compared with a common way to do the same job.
"""

from .clock import Clock, environment, peak_memory
from .losses import (
    LossEntry,
    LossSizes,
    PlainCrossEntropy,
    losses_beside_cross_entropy,
    losses_beside_library,
)
from .reading import (
    PhotographSizes,
    decoding_times,
    photographs,
    reading_times,
    small_file_times,
)
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
    "decoding_times",
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
