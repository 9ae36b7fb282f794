"""Backbones: any timm vision transformer or CNN, and two small ViTs for the `mini` benchmark."""

import difflib
import hashlib
import sys
import textwrap
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import timm
import torch
from huggingface_hub.errors import HfHubHTTPError
from timm.models import PretrainedCfg
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from .. import paths

PAPER_BACKBONE = "vit_small_patch16_224.augreg_in21k"
# Name and width of the backbones that come with the project.
EMBEDDED = {"mini_vit": 128, "mini_vit_64": 64}
MINI_SIZE = 48
# The default file name of weights on timm's hub.
HUB_FILE = "model.safetensors"
# Seconds to wait for timm's hub before giving up.
HUB_SECONDS = 5.0


def mini_vit(width: int = 128) -> VisionTransformer:
    """Make an untrained ViT for the `mini` benchmark.

    48 px images, patches of 8 px, 5 layers, heads of 32 features; 1 M weights at a width of 128.
    """
    heads = width // 32
    return VisionTransformer(MINI_SIZE, 8, num_classes=0, embed_dim=width, depth=5, num_heads=heads)


def create(
    name: str,
    pretrained: str | bool | Path | None = "hub",
    image_size: int | None = None,
    pooling: str = "avgmax",
) -> nn.Module:
    """Make a backbone without its classifier: "mini_vit", "mini_vit_64", or a timm name with tag.

    `pretrained` is "embedded" (a mini_vit only), "hub" or True (timm's weights), "random", False or
    None, or a file.  Position embeddings are resampled to `image_size` in pixels; None: the model's
    own size.  For `pooling` see `config.Run`.  Raises FileNotFoundError for missing weights,
    ValueError for unknown names and for weights or sizes that do not fit, before any image is read
    or much memory is allocated.
    """
    source = _source(name, pretrained)
    if name in EMBEDDED:
        if image_size not in (None, MINI_SIZE):
            what = f"backbone {name} takes {MINI_SIZE} px images"
            raise ValueError(f"{what}, not image_size = {image_size}")
        model: Any = mini_vit(EMBEDDED[name])
        if isinstance(source, Path):
            with torch.device("meta"):
                outline: nn.Module = mini_vit(EMBEDDED[name])
            _load(model, _fitting(source, name, outline), source, name)
        return model

    if not isinstance(source, Path):
        _require_possible(name, image_size, pooling)
        return _from_timm(name, source == "hub", image_size, pooling)
    outline = _outline(name, image_size, pooling)
    if source.suffix == ".npz":
        _require_own_grids(source, name, _arrays(source, name), outline, image_size)
        model = _from_timm(name, False, image_size, pooling)
        _load_npz(model, source, name)
        return model
    state = _fitting(source, name, outline, image_size)
    model = _from_timm(name, False, image_size, pooling)
    _load(model, state, source, name)
    return model


def native_size(name: str) -> int:
    """The image size in pixels, height and width, that a backbone was made for.

    Raises ValueError if timm has no such model, or its images are not square.
    """
    if name in EMBEDDED:
        return MINI_SIZE
    _check_name(name)
    _, height, width = _known(name).input_size
    if height != width:
        what = f"backbone {name} is made for images of {height} x {width} px"
        raise ValueError(f"{what}; square ones are shown here: give image_size")
    return height


def features_width(model: Any) -> int:
    """The number of features that a backbone gives for an image.

    Some of timm's models have a layer after pooling: `num_features` is then its input width.
    """
    width: int = getattr(model, "head_hidden_size", None) or model.num_features
    return width


# ---- which weights


def _source(name: str, pretrained: str | bool | Path | None) -> str | Path:
    """The source of the weights: "random", "hub", or an existing file."""
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
            # A trained model, from which `saved.build` starts.
            file = file / "model.safetensors"
    if not file.is_file():
        remedy = "give pretrained = 'hub', a file or a model's folder (relative to the project)"
        raise FileNotFoundError(f"no weights at {file}; {remedy}")
    return file


def _check_name(name: str) -> None:
    """Raise ValueError unless timm has a model of this name and, if tagged, its weights."""
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


@lru_cache
def _require_possible(name: str, image_size: int | None, pooling: str) -> None:
    """Raise ValueError where `_outline` does; it takes a second, so that each is tried once."""
    _outline(name, image_size, pooling)


def _outline(name: str, image_size: int | None, pooling: str) -> nn.Module:
    """The model on torch's meta device: its shapes, without memory for its weights.

    It is tried on an image there.  Raises ValueError, with timm's reason, if it cannot be made,
    cannot take an image of this size, or does not return a vector of features.
    """
    size = image_size or _known(name).input_size[-1]
    # Neither draws from the caller's random state.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = timm.create_model(name, num_classes=0, **_options(name, image_size, pooling))
            if image_size is not None:
                _check_patches(model, name, image_size)
            features = model.eval()(torch.zeros(1, 3, size, size))
        except _NoMultipleError:
            raise
        # timm's constructors and layers raise many kinds of errors.
        except Exception as error:
            raise _impossible(name, size, pooling, error) from error
    width = features_width(model)
    if features.shape != (1, width):
        what = f"backbone {name} gives {tuple(features.shape)} of an image"
        raise ValueError(f"{what}, not the vector (1, {width}) that is compared; take another one")
    return model


def _impossible(name: str, size: int, pooling: str, error: Exception) -> ValueError:
    what = f"backbone {name} cannot be made for image_size = {size}"
    # Some errors have no message.
    why = textwrap.shorten(str(error), 300) or type(error).__name__
    own = f"its own is {_known(name).input_size[-1]}"
    if _pools_otherwise(name, pooling):
        # timm does not say whether the size or the pooling is the problem.
        return ValueError(f"{what} with pooling = {pooling!r} ({why}); {own}, and pooling 'timm'")
    return ValueError(f"{what} ({why}); {own}")


def _from_timm(name: str, pretrained: bool, image_size: int | None, pooling: str) -> nn.Module:
    if pretrained:
        _ask_hub(name)
    options = _options(name, image_size, pooling)
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
    # The hub's client raises its own errors and those of the network.
    except Exception as error:
        if not pretrained:
            raise
        if "size mismatch" in str(error):
            raise _only_own_size("timm's hub", name, image_size, error) from error
        raise _no_weights(name, error) from error


def _options(name: str, image_size: int | None, pooling: str) -> dict[str, Any]:
    """The arguments for timm's model that set the image size and the paper's pooling."""
    options: dict[str, Any] = {}
    if _pools_otherwise(name, pooling):
        options["global_pool"] = "avgmax"
    if image_size is not None and (_is_vit(name) or _known(name).fixed_input_size):
        options["img_size"] = image_size
    return options


def _pools_otherwise(name: str, pooling: str) -> bool:
    """Whether to pool as in Table 10's CNN rows instead of timm's way: features are a grid."""
    return pooling == "avgmax" and not _is_vit(name) and _known(name).pool_size is not None


def _is_vit(name: str) -> bool:
    family = timm.models.model_entrypoint(name.split(".")[0]).__module__
    return family.endswith(("vision_transformer", "deit"))


def _known(name: str) -> PretrainedCfg:
    """Timm's description of a model's pretrained weights."""
    return timm.get_pretrained_cfg(name) or PretrainedCfg()


def _ask_hub(name: str) -> None:
    """Ask the hub once whether it answers: timm itself would retry for most of a minute.

    Raises FileNotFoundError if it does not, and the weights are not in the local cache either.
    """
    known = _known(name)
    if not known.hf_hub_id or _is_cached(known):
        return
    file = known.hf_hub_filename or HUB_FILE
    try:
        url = huggingface_hub.hf_hub_url(known.hf_hub_id, file)
        huggingface_hub.get_hf_file_metadata(url, timeout=HUB_SECONDS)
    except HfHubHTTPError:
        # The hub has answered; timm may ask for another file.
        return
    # Different versions of the client raise errors of different libraries.
    except Exception as error:
        raise _no_weights(name, error) from error


def _is_cached(known: PretrainedCfg) -> bool:
    """Whether these weights of timm's hub are in its cache on this machine."""
    for file in (known.hf_hub_filename or HUB_FILE, "pytorch_model.bin"):
        if isinstance(huggingface_hub.try_to_load_from_cache(str(known.hf_hub_id), file), str):
            return True
    return False


def missing_weights(name: str, pretrained: str) -> str:
    """A message that weights are not on this machine, with the remedy; "" if they are.

    Does not use the network.
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


class _NoMultipleError(ValueError):
    """An image size that is not a whole number of patches."""


def _check_patches(model: nn.Module, name: str, image_size: int) -> None:
    """Raise ValueError unless the image is a whole number of patches."""
    embed = getattr(model, "patch_embed", None)
    size = getattr(embed, "patch_size", None)
    stride = getattr(getattr(embed, "proj", None), "stride", size)
    # Overlapping patches fit any size.
    if not isinstance(size, tuple) or stride != size:
        return
    patch = size[0]
    if image_size % patch:
        below = image_size // patch * patch
        what = f"{name} has patches of {patch} px: image_size = {image_size} is no multiple"
        raise _NoMultipleError(f"{what}; {below} or {below + patch} is")


# ---- files of weights


def _fitting(
    file: Path, name: str, outline: nn.Module, image_size: int | None = None
) -> dict[str, torch.Tensor]:
    """Read a file's tensors under timm's names, in float32, without the classifier.

    Raises ValueError unless they have the names and shapes of `outline`, the model on the meta
    device.
    """
    try:
        stored = timm.models.load_state_dict(str(file), weights_only=True)
        state = _by_timms_names(stored, outline, name)
        _require_fit(outline, state)
    # Reading a damaged file can raise nearly anything.
    except Exception as error:
        if image_size is not None and "size mismatch" in str(error):
            raise _only_own_size(str(file), name, image_size, error) from error
        raise _unfit(file, name, error) from error
    _require_own_grids(file, name, stored, outline, image_size)
    return state


def _by_timms_names(
    stored: dict[str, Any], outline: nn.Module, name: str
) -> dict[str, torch.Tensor]:
    """Rename and resample `stored` as timm's own loading of this family does, to float32."""
    rename = _filter_of(outline)
    state = dict(stored)
    if isinstance(outline, VisionTransformer):
        # From the names of OpenAI's CLIP, DINOv2, OpenCLIP and DeiT-III.
        state = checkpoint_filter_fn(state, outline, adapt_layer_scale=True)
    elif rename is not None:
        state = rename(state, outline)
    if not all(isinstance(value, torch.Tensor) for value in state.values()):
        held = ", ".join(list(state)[:5])
        raise ValueError(f"it holds {held}; save the part of it that is the network")

    own = outline.state_dict()
    kept = {}
    for key, value in state.items():
        if key not in own and _is_classifier(key, name):
            continue
        kept[key] = value.float() if value.is_floating_point() else value
    return kept


def _filter_of(outline: nn.Module) -> Any:
    """Timm's function that renames weights of this model's family, or None."""
    module = sys.modules[type(outline).__module__]
    return getattr(module, "checkpoint_filter_fn", None)


def _is_classifier(key: str, name: str) -> bool:
    """Whether a tensor belongs to the classifier, by timm's name for it in this model."""
    named: Any = _known(name).classifier or ()
    if isinstance(named, str):
        named = (named,)
    # A classifier may have a normalisation beside it; DeiT's files have two classifiers.
    parts = (*named, "head", "head_dist", "fc")
    return any(key.startswith(f"{part}.") for part in parts)


def _require_fit(outline: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Raise torch's RuntimeError unless `state` has the model's tensors, by name and shape."""
    with torch.device("meta"):
        shapes = {key: torch.empty(value.shape) for key, value in state.items()}
    outline.load_state_dict(shapes, assign=True)


def _require_own_grids(
    file: Path,
    name: str,
    stored: Mapping[str, torch.Tensor],
    outline: nn.Module,
    image_size: int | None,
) -> None:
    """Raise ValueError if timm had to resample patches or positions without being asked.

    timm resamples patch kernels and position embeddings to any size.  But a kernel of another patch
    size belongs to another model.  Positions may have the model's own image size or `image_size`.
    """
    models = [outline]
    if image_size is not None and image_size != _known(name).input_size[-1]:
        models.append(_outline(name, None, "timm"))
    shapes = [model.state_dict() for model in models]
    # The class token and registers may have positions or not.
    tokens = getattr(outline, "num_prefix_tokens", 0)
    # Kernels first: with another patch size the positions differ too.
    for key in sorted(shapes[0], key=_is_kernel, reverse=True):
        is_kernel = _is_kernel(key)
        if not is_kernel and ("pos" not in key or shapes[0][key].ndim < 2):
            continue
        found = _counterparts(key, stored, is_kernel)
        slack = 0 if is_kernel else tokens * shapes[0][key].shape[-1]
        sizes = [own[key].numel() for own in shapes if key in own]
        fits = [abs(one.numel() - size) <= slack for one in found for size in sizes]
        if found and not any(fits):
            here = tuple(shapes[0][key].shape)
            there = " or ".join(str(tuple(one.shape)) for one in found)
            what = f"{file} is of another model than {name!r}: its {key} is {there}, not {here}"
            kind = "patches of another size" if is_kernel else "images of another size"
            raise ValueError(f"{what}, for {kind}; name the model that it was made for")


def _is_kernel(key: str) -> bool:
    """Whether this is timm's name of the patch embedding's kernel."""
    return key.endswith("patch_embed.proj.weight")


def _counterparts(
    key: str, stored: Mapping[str, torch.Tensor], is_kernel: bool
) -> list[torch.Tensor]:
    """The tensors of a file that may correspond to the model's tensor `key`."""
    if key in stored:
        return [stored[key]]
    if is_kernel:
        return [value for value in stored.values() if getattr(value, "ndim", 0) == 4]
    if key != "pos_embed":
        return []
    return [value for other, value in stored.items() if "pos" in other and value.ndim > 1]


def _require_finite(
    file: Path, state: Mapping[str, torch.Tensor], fresh: Mapping[str, torch.Tensor]
) -> None:
    """Raise ValueError if a number is not finite, unless timm's new model has the same there.

    `fresh` is the model before loading: a few families have bounds that are infinite.
    """
    for key, value in state.items():
        is_usual = value.isfinite()
        if key in fresh:
            is_usual |= value == fresh[key]
        if not is_usual.all():
            what = f"{file} is of no use: its {key} is not finite"
            raise ValueError(f"{what}; copy it again, or train it again")


def _arrays(file: Path, name: str) -> dict[str, torch.Tensor]:
    """The arrays of an .npz file of JAX weights."""
    try:
        with np.load(file) as opened:
            return {key: torch.from_numpy(opened[key]) for key in opened.files}
    except Exception as error:
        raise _unfit(file, name, error) from error


def _load_npz(model: Any, file: Path, name: str) -> None:
    try:
        model.load_pretrained(str(file))
    except Exception as error:
        raise _unfit(file, name, error) from error
    _require_finite(file, model.state_dict(), {})


def _load(model: nn.Module, state: dict[str, torch.Tensor], file: Path, name: str) -> None:
    _require_finite(file, state, model.state_dict())
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise _unfit(file, name, error) from error


def _unfit(file: Path, name: str, error: Exception) -> ValueError:
    what = f"{file} is damaged or does not fit backbone {name!r}"
    remedy = "name the one it was made for, or copy it again"
    return ValueError(f"{what}; {remedy}. {textwrap.shorten(str(error), 500)}")


def _only_own_size(source: str, name: str, image_size: int | None, error: Exception) -> ValueError:
    own = _known(name).input_size[-1]
    what = f"the weights of {source} do not fit {name!r} at image_size = {image_size}"
    why = "they are another model's, or timm cannot resample them"
    message = textwrap.shorten(str(error), 300)
    return ValueError(f"{what}: {why}; its own size is {own}. {message}")


# ---- digests of weights


def weights_digest(name: str, pretrained: str | bool | Path | None) -> str:
    """A text that identifies the weights without loading them: a SHA-256, or a name on the hub."""
    source = _source(name, pretrained)
    if isinstance(source, Path):
        return _file_digest(source, *paths.state(source.stat()))
    if source == "random":
        return "random"
    hub_name = _known(name).hf_hub_id or name
    return f"hub:{hub_name}:{name}"


@lru_cache
def _file_digest(file: Path, *state: int) -> str:
    """SHA-256 of a file, cached by its state, as every run of a notebook needs it."""
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
    """Mean and standard deviation (RGB, images in 0..1) from the backbone's pretraining."""
    known: Any = getattr(model, "pretrained_cfg", None) or {}
    mean = known.get("mean", (0.5, 0.5, 0.5))
    std = known.get("std", (0.5, 0.5, 0.5))
    return tuple(mean), tuple(std)


def transform(model: nn.Module) -> dict[str, Any]:
    """The backbone's own image transform, as fields of `data.images.View`."""
    mean, std = normalisation(model)
    known: Any = getattr(model, "pretrained_cfg", None)
    if not known:
        # A mini_vit, which timm does not know.
        return {"mean": mean, "std": std}
    shown = timm.data.resolve_data_config(pretrained_cfg=known)
    return {
        "mean": mean,
        "std": std,
        "crop_share": shown["crop_pct"],
        "crop_mode": shown["crop_mode"],
        "interpolation": shown["interpolation"],
    }
