"""Save and load a trained model: its tensors, its run, and a digest of its backbone.

Another model can also start from the folder of such a file: `build`.
"""

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from .. import config, paths
from ..config import Run
from . import backbones, embedding
from .embedding import EmbeddingModel

MODEL_FILE = "model.safetensors"
# The names of runs' folders, which end in a hash.
_RUN_NAME = re.compile(r".+-[0-9a-f]{8}")
_BACKBONE = "backbone."
# Values of `pretrained` that are no file and no folder.
WITHOUT_FILE = ("embedded", "hub", "random")


@dataclass(frozen=True)
class _Label:
    """The metadata of a model file, as texts."""

    # The run as JSON.
    run: str
    # Digest of the frozen backbone, or "" if the file holds the backbone itself.
    backbone_digest: str
    # Whether embeddings are normalised, as JSON.
    normalise: str
    # The run's name; "" in files from before names were stored.
    name: str = ""

    def digest(self, state: dict[str, Tensor]) -> str:
        """SHA-256 of the tensors and the metadata."""
        return backbones.state_digest(
            state, self.run, self.backbone_digest, self.normalise, self.name
        )


def trainable_state(model: EmbeddingModel) -> dict[str, Tensor]:
    """The tensors that a checkpoint needs: all outside the backbone, and the backbone if tuned.

    A frozen backbone can be loaded again from its own weights.
    """
    tuned = model.method.tune_backbone
    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not name.startswith(_BACKBONE):
            state[name] = parameter.detach().contiguous()
    for name, buffer in model.named_buffers():
        if tuned or not name.startswith(_BACKBONE):
            state[name] = buffer.contiguous()
    return state


def save(model: EmbeddingModel, run: Run, folder: Path) -> None:
    """Write `model.safetensors` into the folder of `run`, which has the run's name.

    It holds the trained tensors, and also a frozen backbone with random weights, which is stored
    nowhere else.  Its metadata are the run and a digest of the backbone.  Raises OSError where it
    cannot be written.
    """
    holds_backbone = model.method.tune_backbone or run.pretrained == "random"
    if holds_backbone:
        state = model.state_dict()
        backbone_digest = ""
    else:
        state = trainable_state(model)
        backbone_digest = backbones.state_digest(model.backbone.state_dict())
    label = _Label(run.to_json(), backbone_digest, json.dumps(model.normalise), folder.name)
    metadata = {**asdict(label), "digest": label.digest(state)}
    with paths.written_whole(folder / MODEL_FILE) as file:
        # As bytes: `save_file` would raise errors that are no OSError.
        file.write_bytes(safetensors.torch.save(state, metadata))


def save_whole(
    model: EmbeddingModel, run: Run, folder: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write `model.safetensors` with the backbone, so that it can be loaded without other files.

    The paths of data and weights in training are not stored.  Floating-point tensors are stored as
    `dtype`; a loaded model has float32 again.  Raises OSError where it cannot be written.
    """
    state = {}
    for name, tensor in model.state_dict().items():
        stored = tensor.to(dtype) if tensor.is_floating_point() else tensor
        state[name] = stored.cpu().contiguous()
    label = _Label(_without_places(run).to_json(), "", json.dumps(model.normalise))
    metadata = {**asdict(label), "digest": label.digest(state)}
    with paths.written_whole(folder / MODEL_FILE) as file:
        file.write_bytes(safetensors.torch.save(state, metadata))


def save_trained(model: EmbeddingModel, run: Run, folder: Path) -> None:
    """Write `model.safetensors` with only the trained tensors, to load with the same backbone.

    It names no file of this machine: if a timm backbone came from a file, `load_model` takes it
    from the hub, unless it is given `pretrained`.  Raises ValueError if the backbone was trained
    too or is stored nowhere else, OSError where it cannot be written.
    """
    if model.method.tune_backbone or run.pretrained == "random":
        what = f"method {model.method.name!r} on weights {run.pretrained!r}"
        raise ValueError(f"{what} has a backbone of its own: save the whole model")
    if model_folder(run.pretrained):
        what = f"it went on from {run.pretrained!r}, with whose backbone alone it would load"
        raise ValueError(f"{what}: save the whole model")
    state = trainable_state(model)
    backbone_digest = backbones.state_digest(model.backbone.state_dict())
    portable = _without_places(run)
    if run.pretrained not in WITHOUT_FILE and run.backbone not in backbones.EMBEDDED:
        portable = replace(portable, pretrained="hub")
    label = _Label(portable.to_json(), backbone_digest, json.dumps(model.normalise))
    metadata = {**asdict(label), "digest": label.digest(state)}
    with paths.written_whole(folder / MODEL_FILE) as file:
        file.write_bytes(safetensors.torch.save(state, metadata))


def _without_places(run: Run) -> Run:
    """The run without paths of the machine that trained it."""
    data = replace(run.data, root=None, split=None)
    pretrained = run.pretrained
    if pretrained not in WITHOUT_FILE:
        pretrained = Path(pretrained).name
    return replace(run, data=data, pretrained=pretrained)


def load_model(
    folder: str | Path, pretrained: str | Path | None = None
) -> tuple[EmbeddingModel, Run]:
    """Load the trained model in a run's folder, in evaluation mode, and its run.

    `folder` is absolute, or found by `paths.find`.  `pretrained` is the source of the backbone's
    weights on this machine; None: that of the run.  Raises FileNotFoundError if model or weights
    are missing, ValueError for a file that is damaged, of another run than the folder, or for
    another backbone.
    """
    file = paths.find(folder) / MODEL_FILE
    if not file.is_file():
        raise FileNotFoundError(f"no {MODEL_FILE} in {folder}; a finished run's folder holds one")
    state, label, run = _read(file)
    _check_place(file, label)

    source: str | Path = "random"
    if label.backbone_digest:
        source = pretrained or run.pretrained
        _require_other_start(file, source)
    model = build(
        run.method,
        run.backbone,
        run.dim,
        pretrained=source,
        image_size=run.data.image_size,
        pooling=run.pooling,
        normalise=json.loads(label.normalise),
    )
    expected = model.state_dict()
    if label.backbone_digest:
        if backbones.state_digest(model.backbone.state_dict()) != label.backbone_digest:
            what = f"{file} adapts another backbone than {run.backbone!r} with weights"
            remedy = "give pretrained= the weights it was trained on (digest: its metrics.json)"
            raise ValueError(f"{what} {str(source)!r}; {remedy}")
        expected = trainable_state(model)
    _check_shapes(file, state, expected, run)
    model.load_state_dict(state, strict=False)
    _check_finite(file, state, model)
    return model.eval(), run


# ---- a trained model as the start of another


def build(
    method: str | config.Method,
    backbone: str = backbones.PAPER_BACKBONE,
    dim: int = 128,
    *,
    pretrained: str | bool | Path | None = "hub",
    image_size: int | None = None,
    pooling: str = "avgmax",
    normalise: bool = True,
    **settings: Any,
) -> EmbeddingModel:
    """`embedding.build`, for which `pretrained` may also be the folder of a trained model.

    The new model then starts with the weights of that one: its backbone, tuned or not, its parts,
    and its head if the shapes are equal.  Raises ValueError if the two backbones differ, or
    `method` does not have the same parts.
    """
    start = model_folder(pretrained)
    model = embedding.build(
        method,
        backbone,
        dim,
        pretrained="random" if start else pretrained,
        image_size=image_size,
        pooling=pooling,
        normalise=normalise,
        **settings,
    )
    if start:
        _take_over(model, start, backbone, image_size)
    return model


def model_folder(pretrained: str | bool | Path | None) -> Path | None:
    """The folder of a trained model if `pretrained` is one, else None."""
    if pretrained in (None, True, False, *WITHOUT_FILE):
        return None
    folder = paths.find(str(pretrained))
    if (folder / MODEL_FILE).is_file():
        return folder
    return None


def _take_over(model: EmbeddingModel, folder: Path, backbone: str, image_size: int | None) -> None:
    """Load the weights of a trained model into `model`, except a head of another shape."""
    trained, run = load_model(folder)
    if run.backbone != backbone or image_size not in (None, run.data.image_size):
        here = f"{backbone!r} at {image_size} px"
        there = f"{run.backbone!r} at {run.data.image_size} px"
        remedy = "give backbone and image_size of that model, or other weights"
        raise ValueError(f"{folder} is a model of {there}, not {here}: {remedy}")

    taken = trained.state_dict()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in [name for name in taken if name.startswith("head.")]:
        if shapes.get(name) != taken[name].shape:
            del taken[name]
    unfit = [name for name, tensor in taken.items() if shapes.get(name) != tensor.shape]
    if unfit:
        what = f"{folder} is a model of {run.method.name!r}, whose {unfit[0]} {model.method.name!r}"
        remedy = f"train {run.method.name!r} with the same settings on, or begin from other weights"
        raise ValueError(f"{what} has not: {remedy}")
    model.load_state_dict(taken, strict=False)


def _require_other_start(file: Path, source: str | Path) -> None:
    """Raise ValueError if a model starts from itself, directly or through other models."""
    seen = {file.resolve()}
    start = model_folder(source)
    while start is not None:
        held = start / MODEL_FILE
        if held.resolve() in seen:
            what = f"{file} takes its backbone from {str(source)!r}, and that from itself"
            raise ValueError(f"{what}: give pretrained= the weights it was trained on")
        seen.add(held.resolve())
        _, label, run = _read(held)
        start = model_folder(run.pretrained) if label.backbone_digest else None


# ---- reading and checking


def _read(file: Path) -> tuple[dict[str, Tensor], _Label, Run]:
    """The tensors of a file, its metadata and its run; ValueError if the digest does not match."""
    try:
        with safetensors.safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
        label = _Label(
            run=metadata["run"],
            backbone_digest=metadata["backbone_digest"],
            normalise=metadata["normalise"],
            name=metadata.get("name", ""),
        )
        if metadata["digest"] != label.digest(state):
            raise ValueError("its contents have another digest")
        if label.normalise not in ("true", "false"):
            raise ValueError("it does not say whether embeddings are normalised")
        run = Run.from_dict(json.loads(label.run))
    except (
        safetensors.SafetensorError,
        KeyError,
        ValueError,
        TypeError,
        RecursionError,
        OSError,
    ) as error:
        what = f"{file} is damaged or not of pumalib ({error!r})"
        raise ValueError(f"{what}; copy it again or train it again") from error
    return state, label, run


def _check_place(file: Path, label: _Label) -> None:
    """Raise ValueError if a run's folder holds the model of another run."""
    folder = file.parent.name
    if label.name and _RUN_NAME.fullmatch(folder) and label.name != folder:
        what = f"{file} is the model of {label.name!r}, not of {folder!r}"
        raise ValueError(f"{what}; put back that run's own, or train it again")


def _check_shapes(
    file: Path, state: dict[str, Tensor], expected: dict[str, Tensor], run: Run
) -> None:
    """Raise ValueError unless `state` has the tensors of this run's model, float16 allowed."""
    same_names = state.keys() == expected.keys()
    if not same_names or not all(_fits(state[name], expected[name]) for name in expected):
        what = f"{file} is damaged: its tensors are not those of"
        raise ValueError(f"{what} {run.method.name!r} on {run.backbone!r}")


def _fits(stored: Tensor, expected: Tensor) -> bool:
    """Whether a stored tensor fits the model's: same shape and dtype, or float16 for float32."""
    is_half = stored.dtype == torch.float16 and expected.dtype == torch.float32
    return stored.shape == expected.shape and (is_half or stored.dtype == expected.dtype)


def _check_finite(file: Path, state: dict[str, Tensor], model: EmbeddingModel) -> None:
    """Raise ValueError if a weight of the file is NaN or infinite; buffers may be."""
    for name, parameter in model.named_parameters():
        if name in state and not parameter.isfinite().all():
            what = f"{file} is of no use: the weights {name} are not finite"
            raise ValueError(f"{what}; train it again")
