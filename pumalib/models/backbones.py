"""Backbones: any timm vision transformer (or CNN), and the two of the `mini` benchmark."""

import difflib
import hashlib
import textwrap
from functools import lru_cache
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
import torch
from huggingface_hub.errors import HfHubHTTPError
from timm.models import PretrainedCfg
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from .. import paths

PAPER_BACKBONE = "vit_small_patch16_224.augreg_in21k"
# Name and width of those that come with the project.
EMBEDDED = {"mini_vit": 128, "mini_vit_64": 64}
MINI_SIZE = 48
# What weights of timm's hub are called, unless timm says otherwise.
HUB_FILE = "model.safetensors"
# Seconds to wait for timm's hub before it is given up.
HUB_SECONDS = 5.0


def mini_vit(width: int = 128) -> VisionTransformer:
    """Make an untrained ViT of the `mini` benchmark.

    48 px, patches of 8 px, 5 layers, heads of 32 features; 1 M weights at a width of 128.
    """
    heads = width // 32
    return VisionTransformer(MINI_SIZE, 8, num_classes=0, embed_dim=width, depth=5, num_heads=heads)


def create(
    name: str, pretrained: str | bool | Path | None = "hub", image_size: int | None = None
) -> nn.Module:
    """Make a backbone without its classifier: "mini_vit", "mini_vit_64", or timm's with its tag.

    `pretrained` is "embedded" (a mini_vit only), "hub" or True (timm's), "random", False or None,
    or a file.  Position embeddings are resampled to `image_size`, in pixels.  Raises ValueError
    and FileNotFoundError for what does not exist or fit.
    """
    source = _source(name, pretrained)
    if name in EMBEDDED:
        if image_size not in (None, MINI_SIZE):
            what = f"backbone {name} takes {MINI_SIZE} px images"
            raise ValueError(f"{what}, not image_size = {image_size}")
        model: Any = mini_vit(EMBEDDED[name])
    else:
        model = _from_timm(name, source == "hub", image_size)
    if image_size is not None:
        _check_patches(model, name, image_size)
    if isinstance(source, Path):
        _load(model, source, name)
    return model


# ---- which weights


def _source(name: str, pretrained: str | bool | Path | None) -> str | Path:
    """Where the weights come from: "random", "hub", or a file that is there."""
    if name not in EMBEDDED:
        _check_name(name)
    source: str | Path
    if pretrained is None or pretrained is False:
        source = "random"
    elif pretrained is True:
        source = "hub"
    else:
        source = pretrained
    if source == "random":
        return source

    if name in EMBEDDED and source in ("embedded", "hub"):
        file = paths.MINI / f"{name}.safetensors"
    elif source == "hub":
        return source
    elif source == "embedded":
        what = f"pretrained = 'embedded' is only for {_embedded_names()}"
        raise ValueError(f"{what}; for {name!r}: 'hub', 'random' or a file")
    else:
        file = paths.find(source)
        if file.is_dir():
            # A trained model, which `saved.build` begins from.
            file = file / "model.safetensors"
    if not file.is_file():
        remedy = "give pretrained = 'hub', a file or a model's folder (relative to the project)"
        raise FileNotFoundError(f"no weights at {file}; {remedy}")
    return file


def _check_name(name: str) -> None:
    """Raise ValueError unless timm has a model, and weights, of this name."""
    architecture, _, tag = name.partition(".")
    tagged = timm.list_pretrained(architecture)
    if timm.is_model(architecture) and (not tag or name in tagged):
        return
    vits = [*EMBEDDED, *tagged, *timm.list_models("vit*"), *timm.list_models("deit*")]
    near = ", ".join(difflib.get_close_matches(name, vits, 4)) or "none"
    known = f"{_embedded_names()}, and timm's models"
    raise ValueError(f"unknown backbone {name!r}; near: {near}; known: {known}")


def _embedded_names() -> str:
    return " and ".join(EMBEDDED)


# ---- timm's models


def _from_timm(name: str, pretrained: bool, image_size: int | None) -> nn.Module:
    if pretrained:
        _ask_hub(name)
    try:
        return timm.create_model(
            name, pretrained=pretrained, num_classes=0, **_options(name, image_size)
        )
    # The hub's client raises its own and the network's errors, constructors what they like.
    except Exception as error:
        if image_size is not None and isinstance(error, (TypeError, AssertionError)):
            what = f"backbone {name} cannot be made for image_size = {image_size}"
            own = _known(name).input_size[-1]
            raise ValueError(f"{what} ({error}); its own is {own}") from error
        if not pretrained:
            raise
        raise _no_weights(name, error) from error


def _options(name: str, image_size: int | None) -> dict[str, Any]:
    """The arguments of timm's model that an image size and the paper's pooling ask for."""
    family = timm.models.model_entrypoint(name.split(".")[0]).__module__
    is_vit = family.endswith(("vision_transformer", "deit"))
    known = _known(name)
    options: dict[str, Any] = {}
    if not is_vit and known.pool_size is not None:
        # Average + max pooling, as in Table 10's CNN rows, of features that are a grid.
        options["global_pool"] = "avgmax"
    if image_size is not None and (is_vit or known.fixed_input_size):
        options["img_size"] = image_size
    return options


def _known(name: str) -> PretrainedCfg:
    """What timm knows of a model's weights."""
    return timm.get_pretrained_cfg(name) or PretrainedCfg()


def _ask_hub(name: str) -> None:
    """Ask the hub once whether it is there: timm's own attempts go on for most of a minute.

    Raises FileNotFoundError where it is not, and the weights are not in its cache either.
    """
    known = _known(name)
    if not known.hf_hub_id or _is_cached(known):
        return
    file = known.hf_hub_filename or HUB_FILE
    try:
        url = huggingface_hub.hf_hub_url(known.hf_hub_id, file)
        huggingface_hub.get_hf_file_metadata(url, timeout=HUB_SECONDS)
    except HfHubHTTPError:
        # It has answered, and timm may ask for another file.
        return
    # Clients of different versions raise errors of different libraries.
    except Exception as error:
        raise _no_weights(name, error) from error


def _is_cached(known: PretrainedCfg) -> bool:
    """Whether weights of timm's hub lie in its cache on this machine."""
    for file in (known.hf_hub_filename or HUB_FILE, "pytorch_model.bin"):
        if isinstance(huggingface_hub.try_to_load_from_cache(str(known.hf_hub_id), file), str):
            return True
    return False


def missing_weights(name: str, pretrained: str) -> str:
    """Say which weights are not on this machine, and how to get them; an empty text: they are.

    Asks no network.
    """
    try:
        source = _source(name, pretrained)
    except FileNotFoundError as error:
        return str(error)
    known = _known(name)
    if source != "hub" or not known.hf_hub_id or _is_cached(known):
        return ""
    command = f"python -c \"import pumalib; pumalib.frozen('{name}')\""
    return (
        f"the weights of {name} are not in the cache of timm's hub; `{command}` fetches them "
        "where there is a network, and so does the first run"
    )


def _no_weights(name: str, error: Exception) -> FileNotFoundError:
    why = f"no weights for {name!r} from timm's hub ({error!r})"
    save = f"torch.save(timm.create_model('{name}', pretrained=True).state_dict(), 'weights.pth')"
    remedy = f"On a machine with a network: {save}; then pretrained = <that file>"
    return FileNotFoundError(f"{why}. {remedy}")


def _check_patches(model: nn.Module, name: str, image_size: int) -> None:
    """Raise ValueError unless the image is a whole number of patches."""
    embed = getattr(model, "patch_embed", None)
    size = getattr(embed, "patch_size", None)
    if not isinstance(size, tuple):
        return
    patch = size[0]
    if image_size % patch:
        below = image_size // patch * patch
        what = f"{name} has patches of {patch} px: image_size = {image_size} is no multiple"
        raise ValueError(f"{what}; {below} or {below + patch} is")


# ---- files of weights


def _load(model: Any, file: Path, name: str) -> None:
    try:
        if file.suffix == ".npz":
            model.load_pretrained(str(file))
        else:
            model.load_state_dict(_state(model, file))
    # Readers of damaged files raise nearly anything.
    except Exception as error:
        what = f"{file} is damaged or does not fit backbone {name!r}"
        remedy = "name the one it was made for, or copy it again"
        raise ValueError(f"{what}; {remedy}. {textwrap.shorten(str(error), 500)}") from error


def _state(model: nn.Module, file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, by timm's names and in float32, without those of a classifier."""
    state = timm.models.load_state_dict(str(file), weights_only=True)
    if isinstance(model, VisionTransformer):
        # From the names of OpenAI's CLIP, DINOv2, OpenCLIP and DeiT-III.
        state = checkpoint_filter_fn(state, model, adapt_layer_scale=True)
    if not all(isinstance(value, torch.Tensor) for value in state.values()):
        held = ", ".join(list(state)[:5])
        raise ValueError(f"it holds {held}; save the part of it that is the network")
    kept = {}
    for key, value in state.items():
        if key.split(".")[0] not in ("head", "head_dist", "fc"):
            kept[key] = value.float()
    return kept


# ---- what tells weights apart


def weights_digest(name: str, pretrained: str | bool | Path | None) -> str:
    """What the weights are, without loading them: a file's SHA-256, or the hub's name for them."""
    source = _source(name, pretrained)
    if isinstance(source, Path):
        return _file_digest(source, *paths.state(source.stat()))
    if source == "random":
        return "random"
    hub_name = _known(name).hf_hub_id or name
    return f"hub:{hub_name}:{name}"


@lru_cache
def _file_digest(file: Path, *state: int) -> str:
    """Computed once for each state of a file: every run of a notebook asks."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def state_digest(state: dict[str, torch.Tensor], *texts: str) -> str:
    """SHA-256 of tensors with their names, and of `texts`."""
    sha = hashlib.sha256("".join(texts).encode())
    for key, value in sorted(state.items()):
        sha.update(key.encode())
        values = value.detach().cpu().contiguous().view(-1)
        sha.update(values.view(torch.uint8).numpy().data)
    return sha.hexdigest()


def normalisation(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (RGB, of images in 0..1) of the backbone's own pretraining."""
    known: Any = getattr(model, "pretrained_cfg", None) or {}
    mean = known.get("mean", (0.5, 0.5, 0.5))
    std = known.get("std", (0.5, 0.5, 0.5))
    return tuple(mean), tuple(std)
