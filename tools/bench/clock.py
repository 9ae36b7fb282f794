"""Interleaved timings, the machine they were measured on, and the reference library."""

import importlib
import platform
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pumalib import training


@dataclass(frozen=True)
class Clock:
    """Measures seconds on a device, in `rounds` counted turns per candidate."""

    device: torch.device
    rounds: int

    def interleaved(
        self, candidates: Mapping[str, Callable[[], object]], rounds: int | None = None
    ) -> dict[str, np.ndarray]:
        """Run candidates, functions by name, in turns; returns seconds (rounds,) by name.

        The first turn of each warms up and is not returned.
        """
        if rounds is None:
            rounds = self.rounds
        spent: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(rounds + 1):
            for name, candidate in candidates.items():
                self._wait()
                start = time.perf_counter()
                candidate()
                self._wait()
                spent[name].append(time.perf_counter() - start)
        return {name: np.array(turns[1:]) for name, turns in spent.items()}

    def _wait(self) -> None:
        """Wait until a GPU has finished, which runs asynchronously."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def environment(device: torch.device) -> dict[str, str | int]:
    """The conditions of a measurement: device, threads, versions."""
    return {
        "device": training.device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def peak_memory() -> int:
    """The peak memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    if platform.system() == "Linux":
        return peak * 1024
    return peak


def library(module: str) -> Any:
    """A module of pytorch-metric-learning, which is a reference here and needed nowhere else."""
    return importlib.import_module(f"pytorch_metric_learning.{module}")
