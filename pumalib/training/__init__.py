"""Training: the loop, checkpoints, parallel batches, logged measures, scores, a run's folder.

Read `loop` first, from `train` on.
"""

from .frozen import warn_if_below
from .loop import NonFiniteLoss, choose_device, device_name, train
from .run_folder import run_name
from .together import train_together

__all__ = [
    "NonFiniteLoss",
    "choose_device",
    "device_name",
    "run_name",
    "train",
    "train_together",
    "warn_if_below",
]
