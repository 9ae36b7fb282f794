"""Backbones: any timm vision transformer (or ResNet), and the two embedded ones of the `mini` benchmark."""

import difflib
import hashlib
import textwrap
from functools import lru_cache
from pathlib import Path

import timm
import torch
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from .. import paths

PAPER = "vit_small_patch16_224.augreg_in21k"
EMBEDDED = {"mini_vit": 128, "mini_vit_64": 64}  # name: width


def mini_vit(width: int = 128) -> VisionTransformer:
    """An untrained ViT of the `mini` benchmark: 48 px, patch 8, 5 layers, heads of 32 features; 1 M weights at 128."""
    return VisionTransformer(48, 8, num_classes=0, embed_dim=width, depth=5, num_heads=width // 32)


def create(name: str, pretrained: str | bool | Path | None = "hub", image_size: int | None = None) -> nn.Module:
    """A backbone without its classifier: "mini_vit", "mini_vit_64", or timm's `name` with its tag.
    `pretrained`: "embedded" (the mini_vit only), "hub" or True (timm's), "random", False or None, or a file.  Position
    embeddings are resampled to `image_size`, in pixels.  ValueError, FileNotFoundError: what does not exist or fit."""
    source = _source(name, pretrained)
    if name in EMBEDDED and image_size not in (None, 48):
        raise ValueError(f"backbone {name} takes 48 px images, not image_size = {image_size}")
    model = mini_vit(EMBEDDED[name]) if name in EMBEDDED else _from_timm(name, source == "hub", image_size)
    patch = model.patch_embed.patch_size[0] if isinstance(model, VisionTransformer) else 1
    if image_size and image_size % patch:
        near = f"{image_size // patch * patch} or {-(-image_size // patch) * patch}"
        raise ValueError(f"{name} has patches of {patch} px: image_size = {image_size} is no multiple; {near} is")
    if isinstance(source, Path):
        _load(model, source, name)
    return model


def _source(name: str, pretrained: str | bool | Path | None) -> str | Path:
    source, known = {True: "hub", False: "random", None: "random"}.get(pretrained, pretrained), " and ".join(EMBEDDED)
    if name not in EMBEDDED:
        architecture, _, tag = name.partition(".")
        tagged = timm.list_pretrained(architecture)
        if not timm.is_model(architecture) or (tag and name not in tagged):
            vits = [*EMBEDDED, *tagged, *timm.list_models("vit*"), *timm.list_models("deit*")]
            near = ", ".join(difflib.get_close_matches(name, vits, 4)) or "none"
            raise ValueError(f"unknown backbone {name!r}; near: {near}; known: {known}, and timm's models")
        if source == "embedded":
            raise ValueError(f"pretrained = 'embedded' is only for {known}; for {name!r}: 'hub', 'random' or a file")
    if source == "random" or (source == "hub" and name not in EMBEDDED):
        return source
    file = paths.MINI / f"{name}.safetensors" if source in ("embedded", "hub") else paths.resolve(source)
    if not file.is_file():
        raise FileNotFoundError(f"no weights at {file}; give pretrained = 'hub', or a file (relative to the project)")
    return file


def _from_timm(name: str, pretrained: bool, image_size: int | None) -> nn.Module:
    options = {} if image_size is None else {"img_size": image_size}
    if not timm.models.model_entrypoint(name.split(".")[0]).__module__.endswith(("vision_transformer", "deit")):
        options = {"global_pool": "avgmax"}  # Table 10's CNN rows: average + max pooling
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
    except Exception as error:  # the hub's client raises its own and the network's errors
        if not pretrained:
            raise
        save = f"torch.save(timm.create_model('{name}', pretrained=True).state_dict(), 'weights.pth')"
        why = f"no weights for {name!r} from timm's hub ({error!r})"
        raise FileNotFoundError(f"{why}. On a machine with a network: {save}; then pretrained = <that file>") from error


def _load(model: nn.Module, file: Path, name: str) -> None:
    try:
        if file.suffix == ".npz":
            return model.load_pretrained(str(file))
        state = timm.models.load_state_dict(str(file), weights_only=True)
        if isinstance(model, VisionTransformer):  # names of OpenAI's CLIP, DINOv2, OpenCLIP, DeiT-III -> timm's
            state = checkpoint_filter_fn(state, model, adapt_layer_scale=True)
        if not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise ValueError(f"it holds {', '.join(list(state)[:5])}; save the part of it that is the network")
        state = {key: value.float() for key, value in state.items()}
        model.load_state_dict({k: v for k, v in state.items() if k.split(".")[0] not in ("head", "head_dist", "fc")})
    except Exception as error:  # readers of damaged files raise nearly anything
        why = f"is damaged or does not fit backbone {name!r}; name the one it was made for, or copy it again"
        raise ValueError(f"{file} {why}. {textwrap.shorten(str(error), 500)}") from error


def weights_digest(name: str, pretrained: str | bool | Path | None) -> str:
    """What the weights are, without loading them: the SHA-256 of a file, or the hub's name for them."""
    source = _source(name, pretrained)
    if isinstance(source, Path):
        return _file_digest(source, source.stat().st_mtime_ns, source.stat().st_size)
    return "random" if source == "random" else f"hub:{timm.get_pretrained_cfg(name).hf_hub_id or name}:{name}"


@lru_cache
def _file_digest(file: Path, changed: int, size: int) -> str:  # once per state of a file: every run of a notebook asks
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def state_digest(state: dict[str, torch.Tensor], *texts: str) -> str:
    """SHA-256 of tensors with their names, and of `texts`."""
    sha = hashlib.sha256("".join(texts).encode())
    for key, value in sorted(state.items()):
        sha.update(key.encode())
        sha.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def normalisation(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (RGB, of images in 0..1) of the backbone's own pretraining."""
    config = {"mean": (0.5,) * 3, "std": (0.5,) * 3} | (getattr(model, "pretrained_cfg", None) or {})
    return tuple(config["mean"]), tuple(config["std"])
