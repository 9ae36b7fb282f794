"""Training: one loop (`loop`), its batches in parts (`parallel`), and the folder a run leaves (`run_folder`)."""

from .loop import NonFiniteLoss, choose_device, device_name, train
from .run_folder import run_name

__all__ = ["NonFiniteLoss", "choose_device", "device_name", "run_name", "train"]
