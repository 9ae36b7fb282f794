"""Training: one loop (`loop`), its batches in parts (`parallel`), and the folder a run leaves (`run_folder`)."""

from .loop import NonFiniteLoss, choose_device, device_name, embed, train

__all__ = ["NonFiniteLoss", "choose_device", "device_name", "embed", "train"]
