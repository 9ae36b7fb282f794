"""A trained model as a file: what was trained, and which backbone it belongs to."""

import json
from pathlib import Path

import safetensors.torch
from torch import Tensor

from .. import paths
from ..config import Run
from . import backbones
from .embedding import EmbeddingModel, build

FILE = "model.safetensors"


def trainable_state(model: EmbeddingModel) -> dict[str, Tensor]:
    """The tensors that training changes: trainable parameters, and a tuned backbone's buffers."""
    state = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if model.method.tune_backbone:
        state |= {f"backbone.{name}": b for name, b in model.backbone.named_buffers()}
    return {name: tensor.contiguous() for name, tensor in state.items()}


def save(model: EmbeddingModel, run: Run, folder: Path) -> None:
    """Write `model.safetensors`: what was trained (and a random backbone, to be had nowhere else), run and backbone."""
    whole = model.method.tune_backbone or run.pretrained == "random"
    digest = "" if whole else backbones.state_digest(model.backbone.state_dict())
    metadata = {"run": run.to_json(), "backbone_digest": digest, "normalise": json.dumps(model.normalise)}
    state = model.state_dict() if whole else trainable_state(model)
    metadata["digest"] = backbones.state_digest(state, *metadata.values())
    with paths.written_whole(folder / FILE) as file:  # bytes: save_file's own errors are no OSError
        file.write_bytes(safetensors.torch.save(state, metadata))


def load_model(folder: str | Path, pretrained: str | Path | None = None) -> tuple[EmbeddingModel, Run]:
    """The trained model of a run's folder, for evaluation, and its run.

    `pretrained` says where the backbone's weights are here, None: as in the run.  Raises FileNotFoundError
    without them, ValueError for a damaged file or one made for another backbone."""
    file = paths.resolve(folder) / FILE
    if not file.is_file():
        raise FileNotFoundError(f"no {FILE} in {folder}; a finished run's folder holds one")
    try:
        with safetensors.safe_open(file, "pt") as opened:
            metadata, names = opened.metadata() or {}, opened.keys()
            state = {name: opened.get_tensor(name) for name in names}
        run, digest, normalise = (metadata[key] for key in ("run", "backbone_digest", "normalise"))
        if metadata["digest"] != backbones.state_digest(state, run, digest, normalise):
            raise ValueError("its contents have another digest")
        run, normalise = Run.from_dict(json.loads(run)), json.loads(normalise)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is damaged or not of pumalib ({error!r}); copy it again or train it again") from error
    options = {"image_size": run.data.image_size, "normalise": normalise}
    source = (pretrained or run.pretrained) if digest else "random"
    model = build(run.method, run.backbone, run.dim, pretrained=source, **options)
    if digest and backbones.state_digest(model.backbone.state_dict()) != digest:
        why = f"{file} adapts another backbone than {run.backbone!r} with weights {str(source)!r}"
        raise ValueError(f"{why}; give pretrained= the weights it was trained on (digest: its metrics.json)")
    expected = trainable_state(model) if digest else model.state_dict()
    if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in expected.items()}:
        raise ValueError(f"{file} is damaged: its tensors are not those of {run.method.name!r} on {run.backbone!r}")
    model.load_state_dict(state, strict=False)
    return model.eval(), run
