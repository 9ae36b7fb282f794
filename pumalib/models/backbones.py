"""Backbones: any timm vision transformer (or ResNet), and the two embedded ones of the `mini` benchmark."""

from __future__ import annotations

import difflib
import hashlib
import textwrap
from functools import lru_cache
from pathlib import Path

import timm
import torch
from timm.models import vision_transformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from .. import paths

PAPER = "vit_small_patch16_224.augreg_in21k"
EMBEDDED = {"mini_vit": 128, "mini_vit_64": 64}  # name: width


def mini_vit(width: int = 128) -> VisionTransformer:
    """An untrained ViT of the `mini` benchmark: 32 px, patch 4, 5 layers, heads of 32 features; 1 M weights at 128."""
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": width, "depth": 5, "num_heads": width // 32, "mlp_ratio": 4}
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
        image_size: pixels; None: the backbone's own. Position embeddings are resampled to it.

    Raises:
        ValueError: unknown backbone, a size its patches do not tile, or weights that do not fit it.
        FileNotFoundError: no such file, or no weights to be had from the hub.
    """
    source = _known(name, pretrained)
    if name not in EMBEDDED:
        model = _from_timm(name, source == "hub", image_size)
    elif image_size in (None, 32):
        model = mini_vit(EMBEDDED[name])
    else:
        raise ValueError(f"backbone {name} takes 32 px images, not image_size = {image_size}")
    patch = model.patch_embed.patch_size[0] if isinstance(model, VisionTransformer) else 1
    if image_size is not None and image_size % patch:
        below = image_size // patch * patch
        raise ValueError(
            f"backbone {name!r} cuts images into patches of {patch} px: "
            f"image_size = {image_size} is no multiple; {below} or {below + patch} is"
        )
    if file := _weights_file(name, source):
        load_weights(model, file, name)
    return model


def _from_timm(name: str, pretrained: bool, image_size: int | None) -> nn.Module:
    if timm.models.model_entrypoint(name.split(".")[0]).__module__.endswith(("vision_transformer", "deit")):
        options = {} if image_size is None else {"img_size": image_size}
    else:
        options = {"global_pool": "avgmax"}  # Table 10's CNN rows: average + max pooling
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
    except Exception as error:  # the hub's client raises its own and the network's errors
        if not pretrained:
            raise
        raise FileNotFoundError(
            f"no weights for {name!r} from timm's hub ({type(error).__name__}: {error}). On a machine with a network: "
            f"torch.save(timm.create_model('{name}', pretrained=True).state_dict(), 'weights.pth'); "
            "then pretrained = <that file>"
        ) from error


def source_of(pretrained: str | bool | Path | None) -> str:
    """The word for `pretrained`: True is "hub", False and None are "random"."""
    return {True: "hub", False: "random", None: "random"}.get(pretrained) or str(pretrained)


def _known(name: str, pretrained: str | bool | Path | None) -> str:
    """`source_of(pretrained)` of a backbone that exists."""
    source, embedded, (architecture, _, tag) = source_of(pretrained), " and ".join(EMBEDDED), name.partition(".")
    tagged = timm.list_pretrained(architecture)
    if name not in EMBEDDED and (not timm.is_model(architecture) or (tag and name not in tagged)):
        vits = [*EMBEDDED, *tagged, *timm.list_models("vit*"), *timm.list_models("deit*")]
        near = ", ".join(difflib.get_close_matches(name, vits, 4)) or "none"
        raise ValueError(f"unknown backbone {name!r}; near: {near}; known: {embedded}, and timm's models")
    if name not in EMBEDDED and source == "embedded":
        raise ValueError(f"pretrained = 'embedded' is only for {embedded}; for {name!r}: 'hub', 'random' or a file")
    return source


def _weights_file(name: str, source: str) -> Path | None:
    """The file that holds the weights; None for random ones and the hub's."""
    if source == "random" or (source == "hub" and name not in EMBEDDED):
        return None
    file = embedded_weights(name) if source in ("embedded", "hub") else paths.resolve(source)
    if not file.is_file():
        raise FileNotFoundError(f"no weights at {file}; give pretrained = 'hub', or a file (relative to the project)")
    return file


def load_weights(model: nn.Module, file: Path, name: str) -> None:
    """Load `file` into `model`, ignoring a classifier, resampling position embeddings, refusing any other misfit."""
    try:
        if file.suffix == ".npz":
            return model.load_pretrained(str(file))
        state = timm.models.load_state_dict(str(file), weights_only=True)
        if isinstance(model, VisionTransformer):  # names of OpenAI's CLIP, DINOv2, OpenCLIP, DeiT-III -> timm's
            state = vision_transformer.checkpoint_filter_fn(state, model, adapt_layer_scale=True)
        if not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise ValueError(f"it holds {', '.join(list(state)[:5])}; save the part of it that is the network")
    except Exception as error:  # readers of damaged files raise nearly anything
        raise ValueError(f"{file} cannot be read as weights of {name!r}: {error}") from error
    state = {key: value.float() for key, value in state.items() if key.split(".")[0] not in ("head", "head_dist", "fc")}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        why = textwrap.shorten(str(error), 500)
        raise ValueError(f"{file} does not fit backbone {name!r}; name the one it was made for. {why}") from None


def weights_digest(name: str, pretrained: str | bool | Path | None) -> str:
    """What the weights are, without loading them: the SHA-256 of a file, or the hub's name for them."""
    source = _known(name, pretrained)
    if file := _weights_file(name, source):
        return _file_digest(file, file.stat().st_mtime_ns, file.stat().st_size)
    return "random" if source == "random" else f"hub:{timm.get_pretrained_cfg(name).hf_hub_id or name}:{name}"


@lru_cache
def _file_digest(file: Path, changed: int, size: int) -> str:  # once per state of a file: every run of a notebook asks
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def state_digest(model: nn.Module) -> str:
    """SHA-256 of every parameter and buffer: two backbones with equal digests are the same."""
    sha = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        sha.update(key.encode())
        sha.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def normalisation(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (RGB, of images in 0..1) of the backbone's own pretraining."""
    config = {"mean": (0.5,) * 3, "std": (0.5,) * 3} | (getattr(model, "pretrained_cfg", None) or {})
    return tuple(config["mean"]), tuple(config["std"])
