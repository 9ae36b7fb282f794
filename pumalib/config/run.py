"""The settings of a run: frozen dataclasses, one documented line per field.

Two equal `Run`s have equal numbers, and `Run.fingerprint` is the hash of what can change them.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator
from pydantic.dataclasses import dataclass

from .methods import METHODS, Method
from .reading import (
    CHECKED,
    Amount,
    Count,
    Dimensions,
    Positive,
    Rate,
    Share,
    added,
    checked,
    distinct,
    is_asked_for,
    no_bool,
    ordered,
)

NUMBERS = 3  # raise it when a change of the code changes the numbers of finished runs


@dataclass(frozen=True, config=CHECKED)
class Data:
    """Which images, and how they become tensors."""

    # A name of data.READERS.
    benchmark: str = "mini"
    # Folder of the datasets, absolute or as `paths.find` has it; not used by "mini".
    root: str | None = None
    # CSV of path,split in place of root/split.csv: "folders" takes those images alone.
    split: str | None = None
    # Only these datasets; None = all.
    datasets: Annotated[tuple[str, ...], AfterValidator(distinct)] | None = None
    # Pixels, height and width of the network's input.
    image_size: Annotated[Positive, Field(ge=8, le=4096)] = 224
    # Area share of the training crop (authors' code).
    crop_scale: Annotated[tuple[Rate, Share], AfterValidator(ordered)] = (0.2, 1.0)
    # At test: both sides to 256/224 of image_size (paper), or the shorter; or as timm's own
    # transform of the backbone has it.
    resize: Literal["both", "shorter", "timm"] = "both"
    # Random horizontal flip in training (Appendix A).
    flip: bool = True
    # Turn photographs as their EXIF data says; None: in "folders" only, as the authors.
    upright: bool | None = None
    # Read images from their resized copies (python -m pumalib data prepare).
    prepared: bool = False
    # Train and test on two halves of the training classes: to choose settings, never for results.
    holdout: bool = False
    # Training images per class, drawn by the run's seed (Fig. 6); 0 = all.
    shots: Count = 0
    # Leave unreadable images out, with a warning, instead of stopping.
    drop_unreadable: bool = False


# `micro_batch` "auto".
BY_MEMORY = -1


def _images_at_once(value: Any) -> Any:
    """What "auto" is kept as; other values as they are."""
    if value == "auto":
        return BY_MEMORY
    return no_bool(value)


@dataclass(frozen=True, config=CHECKED)
class Training:
    """The recipe (Appendix A).

    What the paper leaves open follows the authors' code, see docs/deviations.md.
    """

    # Passes over the training images.
    epochs: Positive = 100
    # Images per step.
    batch_size: Positive = 720
    # K of the class batches of pair-based losses.
    images_per_class: Positive = 4
    # Class batches draw images with replacement (authors' code).
    repeat_images: bool = True
    # Learning rate of backbone weights; the base of the two factors below.
    lr: Rate = 1e-4
    # x lr for prompts, adapters, LoRA and the head (authors' code).
    new_lr_factor: Amount = 10.0
    # x lr for proxies and every parameter of the loss (Appendix A); where nobody chose one,
    # LOSSES_WITH_A_LAYER have new_lr_factor instead.
    loss_lr_factor: Amount = 1e4
    # Of AdamW.
    weight_decay: Amount = 1e-4
    # "step": x step_factor every step_epochs.
    schedule: Literal["constant", "step", "cosine"] = "step"
    # Epochs between two steps of the learning rate.
    step_epochs: Positive = 20
    # Factor of each step.
    step_factor: Rate = 0.5
    # Share of lr at which "cosine" ends (authors' code).
    cosine_floor: Share = 0.1
    # Every gradient entry is clamped to +- this, loss parameters too; 0 = off.
    clip_value: Amount = 1.0
    # Of the network.  "auto" is float32, by the name that most kept runs have for it: on every
    # device, so that a run's name says what it was computed in.
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    # Epochs between scores on held-out classes; the best epoch is kept.  0 = never.
    score_epochs: Count = added(0)
    # Stop after this number of scores in a row without a new best; 0 = never.
    patience: Count = added(0)
    # Let torch.compile make kernels of the network; "graphs" also replays them as CUDA graphs, for
    # small batches, whose kernels take less time than their launch.  Other roundings: another run.
    compile: Literal[False, True, "graphs"] = added(False)

    # What follows (NOT_IN_FINGERPRINT) cannot change a number beyond rounding.
    # Images per forward pass; 0 = the whole batch; less memory, the same gradient.  "auto", kept as
    # -1: as many as the free memory of a GPU allows.
    micro_batch: Annotated[int, BeforeValidator(_images_at_once), Field(ge=-1, le=10**9)] = 0
    # Processes that decode images.
    workers: Annotated[Count, Field(le=1024)] = 0
    # "auto": the GPU if there is one.
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    # Seconds between two checkpoints within an epoch.
    checkpoint_seconds: Rate = 120.0
    # Recompute a block's activations in the backward pass: less memory, a third slower.
    recompute: bool = False

    @model_validator(mode="after")
    def _a_class_fits_in_a_batch(self, info: ValidationInfo) -> Self:
        if is_asked_for(info) and self.images_per_class > self.batch_size:
            raise ValueError(
                f"images_per_class = {self.images_per_class} is more than "
                f"batch_size = {self.batch_size}: lower it, or raise batch_size"
            )
        return self

    @model_validator(mode="after")
    def _patience_has_scores(self, info: ValidationInfo) -> Self:
        if is_asked_for(info) and self.patience and not self.score_epochs:
            raise ValueError(
                f"patience = {self.patience} counts scores, and score_epochs = 0 makes none: "
                "set score_epochs = 1, or patience = 0"
            )
        return self

    def stretched(self, factor: float) -> Self:
        """The recipe for `factor` times as many epochs, with its schedule; rounded, at least 1."""
        epochs = max(1, round(factor * self.epochs))
        step_epochs = max(1, round(factor * self.step_epochs))
        return replace(self, epochs=epochs, step_epochs=step_epochs)


NOT_IN_FINGERPRINT = ("micro_batch", "workers", "device", "checkpoint_seconds", "recompute")


def require_weights(backbone: str, pretrained: str) -> None:
    """Raise ValueError where timm's hub is asked for a backbone that comes with the project."""
    if pretrained == "hub" and backbone.startswith("mini_vit"):
        raise ValueError(
            f"pretrained = 'hub' has no weights of {backbone!r}, which come with the project: "
            "set pretrained = 'embedded', 'random' or a file, or another backbone"
        )


@dataclass(frozen=True, config=CHECKED)
class Run:
    """One training with its evaluation: everything that can change its numbers."""

    data: Data = field(default_factory=Data)
    # "mini_vit" or the full name of a timm vision transformer.
    backbone: str = "mini_vit"
    # "embedded" (mini_vit), "hub" (timm), "random", or a file of weights.
    pretrained: str = "embedded"
    method: Method = field(default_factory=lambda: METHODS["puma"])
    # Embedding dimensions.
    dim: Dimensions = 128
    # A name of pumalib.losses.
    loss: str = "curricularface"
    # Hyperparameters of the loss, where not its defaults.
    loss_settings: dict[str, Any] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    # Of initialisation, batches, augmentation and gates.
    seed: Count = 0
    # How features that are a grid become a vector: average and maximum (Table 10's CNN rows), or
    # as timm has it for the backbone.  Other features are pooled as timm has it.
    pooling: Literal["avgmax", "timm"] = added("avgmax")

    @model_validator(mode="after")
    def _has_weights(self, info: ValidationInfo) -> Self:
        if is_asked_for(info):
            require_weights(self.backbone, self.pretrained)
        return self

    def to_json(self) -> str:
        """All settings as text, for `from_dict(json.loads(text))`."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_dict(cls, content: Mapping) -> "Run":
        """A run by its record, as `to_json` wrote it, also of settings that are refused today.

        Raises ValueError, which names the field, for what no run ever had.
        """
        return checked("run", cls, _with_defaults(cls, content), kept=True)

    def fingerprint(
        self, data_digest: str, weights_digest: str, more: Mapping[str, Any] | None = None
    ) -> str:
        """A hash of what can change the numbers: settings, and the contents of data and weights.

        Where they lie does not enter it.  `more`, where it is not empty, does.
        """
        content = _without_defaults(self)
        content["pretrained"] = weights_digest
        content["data_digest"] = data_digest
        content["numbers"] = NUMBERS
        if more:
            content["more"] = dict(more)
        del content["data"]["root"]
        del content["data"]["split"]
        for key in NOT_IN_FINGERPRINT:
            del content["training"][key]
        return short_hash(content)


def _without_defaults(value: Any) -> dict[str, Any]:
    """`asdict` of a dataclass, less the added fields that have their hash default."""
    content = {}
    for one in fields(value):
        setting = getattr(value, one.name)
        if "hash_default" in one.metadata and setting == one.metadata["hash_default"]:
            continue
        if is_dataclass(setting):
            content[one.name] = _without_defaults(setting)
        else:
            content[one.name] = copy.deepcopy(setting)
    return content


def _with_defaults(cls: type, content: Mapping) -> dict[str, Any]:
    """Settings from before some fields were added, with the hash defaults of these."""
    whole = dict(content)
    for one in fields(cls):
        if "hash_default" in one.metadata and one.name not in whole:
            whole[one.name] = copy.deepcopy(one.metadata["hash_default"])
        below = whole.get(one.name)
        if isinstance(one.type, type) and is_dataclass(one.type) and isinstance(below, Mapping):
            whole[one.name] = _with_defaults(one.type, below)
    return whole


def short_hash(content: Any) -> str:
    """Eight hexadecimal digits that tell JSON contents apart."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
