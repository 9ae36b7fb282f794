"""Training: the loop, its checkpoints, batches in parts, what is seen, and the folder of a run.

Read `loop` first, from `train` on.
"""

from .loop import NonFiniteLoss, choose_device, device_name, train
from .run_folder import run_name

__all__ = ["NonFiniteLoss", "choose_device", "device_name", "run_name", "train"]
