"""Train a run by all processes that torchrun has started, or by one."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ..config import Run
from . import loop, parallel, run_folder


def train_together(
    run: Run, folder: Path, held: AbstractContextManager[None]
) -> dict[str, Any] | None:
    """Train a run in `folder`, in all processes; the first returns its record, the others None.

    The first process enters `held`, which locks the folder, while the others wait.  Raises the
    errors of `train` and `parallel.join`.
    """
    with held if parallel.is_first() else nullcontext():
        parallel.join(loop.choose_device(run.training.device))
        loop.train(run, folder)
        parallel.leave()  # if nothing was left to train
    if not parallel.is_first():
        return None
    return run_folder.read_record(folder)
