"""Backbones: any timm vision transformer (or ResNet), and the two embedded ones of the `mini` benchmark."""

from __future__ import annotations

import difflib
import hashlib
from functools import lru_cache
from pathlib import Path

import timm
import torch
from timm.models import vision_transformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from .. import paths

EMBEDDED = {"mini_vit": 128, "mini_vit_64": 64}  # name: width


def mini_vit(width: int = 128) -> VisionTransformer:
    """A ViT of the `mini` benchmark (32 px, patch 4, 5 layers, heads of 32 features), untrained; 1 M parameters at 128."""
    sizes = dict(img_size=32, patch_size=4, embed_dim=width, depth=5, num_heads=width // 32, mlp_ratio=4)
    return VisionTransformer(**sizes, num_classes=0)


def embedded_weights(name: str) -> Path:
    """The file of an embedded backbone, float16, made by notebooks/90_pretrain_mini_backbone.ipynb."""
    return paths.MINI / f"{name}.safetensors"


def create(name: str, pretrained: str | bool | Path | None = "hub", image_size: int | None = None) -> nn.Module:
    """A backbone without its classifier.

    Args:
        name: "mini_vit", "mini_vit_64", or a timm model name; name the tag too (`vit_small_patch16_224.augreg_in21k`),
            since the default weights of a bare name have changed over timm's versions.
        pretrained: where the weights are: "embedded" (the mini_vit only), "hub" or True (timm's), "random",
            False or None, or a file (.safetensors, .pth, .npz).
        image_size: pixels, a multiple of the patch; None: the backbone's own. Position embeddings are resampled to it.

    Raises:
        ValueError: unknown backbone, a size its patches do not tile, or weights that do not fit it.
        FileNotFoundError: no such file, or no weights to be had from the hub; the message says what to do.
    """
    source = source_of(pretrained)
    if name in EMBEDDED:
        if image_size not in (None, 32):
            raise ValueError(f"backbone {name} takes 32 px images, not image_size = {image_size}")
        model = mini_vit(EMBEDDED[name])
        if source != "random":
            load_weights(model, embedded_weights(name) if source in ("embedded", "hub") else paths.resolve(source), name)
        return model
    if not timm.is_model(name.split(".")[0]):
        near = difflib.get_close_matches(name, [*EMBEDDED, *timm.list_models("vit*"), *timm.list_models("deit*")], 4)
        known = ", ".join(EMBEDDED)
        raise ValueError(f"unknown backbone {name!r}; near: {', '.join(near) or 'none'}; known: {known} and timm's models")
    if source == "embedded":
        raise ValueError(
            f"pretrained = 'embedded' is only for {', '.join(EMBEDDED)}; for {name!r} give 'hub', 'random' or a file"
        )
    size = {} if image_size is None or not _is_vit(name) else {"img_size": image_size}
    pool = {} if _is_vit(name) else {"global_pool": "avgmax"}  # Table 10's CNN rows: average + max pooling
    if source != "hub":
        model = _divisible(timm.create_model(name, pretrained=False, num_classes=0, **size, **pool), name, image_size)
        if source != "random":
            load_weights(model, paths.resolve(source), name)
        return model
    try:
        model = timm.create_model(name, pretrained=True, num_classes=0, **size, **pool)
    except Exception as error:  # the hub's client raises its own and the network's errors
        raise FileNotFoundError(
            f"no weights for {name!r} from timm's hub ({type(error).__name__}: {error}). On a machine with a network: "
            f"python -c \"import timm; timm.create_model('{name}', pretrained=True)\" keeps them in its hub cache "
            "(copy the cache, or save model.state_dict() to a .safetensors file), then pretrained = <that file>"
        ) from error
    return _divisible(model, name, image_size)


def _divisible(model: nn.Module, name: str, image_size: int | None) -> nn.Module:
    """`model`, unless its patches leave out the image's right and lower edge."""
    patch = model.patch_embed.patch_size[0] if isinstance(model, VisionTransformer) else 1
    if image_size is not None and image_size % patch:
        near = f"{image_size // patch * patch} or {-(-image_size // patch) * patch}"
        raise ValueError(f"backbone {name!r} cuts images into patches of {patch} px: image_size = {image_size} is no multiple; {near} is")
    return model


def source_of(pretrained: str | bool | Path | None) -> str:
    """The word for `pretrained`: True is "hub", False and None are "random"."""
    return {True: "hub", False: "random", None: "random"}.get(pretrained) or str(pretrained)


def _is_vit(name: str) -> bool:
    return timm.models.model_entrypoint(name.split(".")[0]).__module__.endswith(("vision_transformer", "deit"))


def load_weights(model: nn.Module, file: Path, name: str) -> None:
    """Load `file` into `model`, ignoring a classifier, resampling position embeddings, refusing any other misfit."""
    if not file.is_file():
        raise FileNotFoundError(f"no weights at {file}; pretrained = a file, absolute or relative to the project, or 'hub'")
    try:
        if file.suffix == ".npz":
            model.load_pretrained(str(file))
            return
        state = timm.models.load_state_dict(str(file), weights_only=True)
        if isinstance(model, VisionTransformer):  # names of OpenAI's CLIP, DINOv2, OpenCLIP, DeiT-III -> timm's
            state = vision_transformer.checkpoint_filter_fn(state, model, adapt_layer_scale=True)
        if not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise ValueError(f"it holds {', '.join(list(state)[:5])}, not one table of tensors; save the part that is the network")
    except Exception as error:
        raise ValueError(f"{file} cannot be read as weights of {name!r}: {error}") from error
    state = {key: value.float() for key, value in state.items() if key.split(".")[0] not in ("head", "head_dist", "fc")}
    own = model.state_dict()
    wrong = [k for k in own if k in state and own[k].shape != state[k].shape]
    missing, unknown = [k for k in own if k not in state], [k for k in state if k not in own]
    if wrong or missing or unknown:
        example = f"{wrong[0]} is {tuple(state[wrong[0]].shape)}, should be {tuple(own[wrong[0]].shape)}; " if wrong else ""
        raise ValueError(
            f"{file} does not fit backbone {name!r}: {example}{len(wrong)} tensors of another shape, {len(missing)} missing, "
            f"{len(unknown)} unknown; name the backbone the weights were made for"
        )
    model.load_state_dict(state)


def weights_digest(name: str, pretrained: str | bool | Path | None) -> str:
    """What the weights are, without loading them: the SHA-256 of a file, or the hub's name for them."""
    source = source_of(pretrained)
    if source == "random":
        return "random"
    if source == "hub" and name not in EMBEDDED:
        return f"hub:{timm.get_pretrained_cfg(name).hf_hub_id or name}:{name}" if timm.is_model(name.split(".")[0]) else name
    file = embedded_weights(name) if source in ("embedded", "hub") else paths.resolve(source)
    if not file.is_file():
        raise FileNotFoundError(f"no weights at {file}; pretrained = a file, absolute or relative to the project, or 'hub'")
    state = file.stat()
    return _file_digest(file, state.st_mtime_ns, state.st_size)


@lru_cache
def _file_digest(file: Path, changed: int, size: int) -> str:  # once per state of a file: every run of a notebook asks
    return hashlib.sha256(file.read_bytes()).hexdigest()


def state_digest(model: nn.Module) -> str:
    """SHA-256 of every parameter and buffer: two backbones with equal digests are the same."""
    sha = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        sha.update(key.encode())
        sha.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def normalisation(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (RGB, of images in 0..1) of the backbone's own pretraining."""
    config = getattr(model, "pretrained_cfg", None) or {}
    half = (0.5, 0.5, 0.5)
    return tuple(config.get("mean", half)), tuple(config.get("std", half))
