"""Checkpoints: the state of a training, written as a whole and checked when read."""

import warnings
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from .. import models, paths
from ..models import EmbeddingModel
from .run_folder import CHECKPOINTS, write_text


@dataclass
class Reached:
    """The progress of a training: before step `step` of epoch `epoch`, with that epoch's sums."""

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    # Sums of the measures of `watch` in that epoch.
    watched: dict[str, float] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    # Weights of `model` and `loss` from the epoch with the best score; {} before the first.
    best: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def save(
    folder: Path,
    reached: Reached,
    model: EmbeddingModel,
    loss: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write `checkpoint.pt`, keep the previous one, and write the log of finished epochs.

    Raises OSError if the disk is full; the previous files stay.
    """
    state = {
        "model": models.trainable_state(model),
        "loss": loss.state_dict(),
        "optimizer": optimizer.state_dict(),
        "at": asdict(reached),
    }
    current, previous = (folder / name for name in CHECKPOINTS)
    with paths.written_whole(current) as temporary:
        _write(state, temporary)
        if current.is_file():
            current.replace(previous)

    # After the checkpoint: a logged epoch is never trained again.
    if reached.log:
        write_text(folder / "log.csv", pd.DataFrame(reached.log).to_csv(index=False))


def _write(state: dict[str, Any], path: Path) -> None:
    """Write a file by torch.save; OSError where it cannot be written."""
    try:
        # Given a path instead of a file, torch does not say why it could not write.
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        # torch then fails to close its archive and raises that: the first error is the cause.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def resume(
    folder: Path, model: EmbeddingModel, loss: nn.Module, optimizer: torch.optim.Optimizer
) -> Reached:
    """Load the newest intact checkpoint of this model, and return its progress.

    Without one, the training starts from the beginning.  A warning names damaged checkpoints.
    """
    shapes = _shapes(model, loss, optimizer)
    for name in CHECKPOINTS:
        file = folder / name
        if not file.is_file():
            continue
        try:
            state = _read_whole(file, shapes)
        except ValueError as error:
            warnings.warn(
                f"{file} is damaged ({error}); the one before it is taken, or the beginning",
                stacklevel=2,
            )
            continue
        model.load_state_dict(state["model"], strict=False)
        loss.load_state_dict(state["loss"])
        optimizer.load_state_dict(state["optimizer"])
        return Reached(**state["at"])
    return Reached()


Shapes = dict[str | int, torch.Size]
# Fields of `Reached` that older checkpoints may lack.
NEWER = {"watched", "best"}


def _shapes(model: EmbeddingModel, loss: nn.Module, optimizer: torch.optim.Optimizer) -> Shapes:
    """The shapes that a checkpoint must have: tensors by name, optimizer moments by number."""
    shapes: Shapes = {}
    for name, tensor in models.trainable_state(model).items():
        shapes[name] = tensor.shape
    for name, tensor in loss.state_dict().items():
        shapes[name] = tensor.shape
    optimised = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(optimised):
        shapes[number] = parameter.shape
    return shapes


def _read_whole(file: Path, shapes: Shapes) -> dict[str, Any]:
    """Read a checkpoint; ValueError unless its checksums and shapes are right."""
    try:
        # torch.load does not verify checksums.
        with zipfile.ZipFile(file) as content:
            bad = content.testzip()
        if bad:
            raise ValueError(f"the check sum of {bad} is wrong")

        state = torch.load(file, map_location="cpu", weights_only=True)
        found: Shapes = {}
        for name, tensor in (state["model"] | state["loss"]).items():
            found[name] = tensor.shape
        for number, moments in state["optimizer"]["state"].items():
            found[number] = moments["exp_avg"].shape
        place = state["at"].keys() | NEWER
        if found != shapes or place != asdict(Reached()).keys():
            raise ValueError("its tensors have other names or shapes")
    # A damaged file raises nearly anything.
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return state
