"""What a run is: frozen dataclasses, one documented line per field, and profiles read from YAML.

Two equal `Run`s have equal numbers.  A `Profile` says where the data is and how much is spent on
it; `profile.run("puma", seed=0)` makes the `Run` of a row.  pydantic checks whatever comes in, by
YAML, `-p` or Python.
"""

import copy
import difflib
import hashlib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.dataclasses import dataclass
from yaml.composer import ComposerError

from . import paths

NUMBERS = 3  # raise it when a change of the code changes the numbers of finished runs
CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)


# ---- what a field may hold


def _no_bool(value: Any) -> Any:
    """Refuse true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _ordered(pair: tuple) -> tuple:
    if pair[0] > pair[1]:
        raise ValueError("the first number must not be above the second")
    return pair


def _once(values: tuple) -> tuple:
    if len(set(values)) < len(values):
        raise ValueError("give each once")
    return values


def _distinct(values: tuple) -> tuple:
    if not values or len(set(values)) < len(values):
        raise ValueError("give one or more, each once")
    return values


_Number = BeforeValidator(_no_bool)
Count = Annotated[int, _Number, Field(ge=0, le=10**9)]
Positive = Annotated[int, _Number, Field(ge=1, le=10**6)]
Number = Annotated[float, _Number, Field(allow_inf_nan=False)]
Amount = Annotated[Number, Field(ge=0)]
Rate = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Dimensions = Annotated[Positive, Field(le=65536)]

# Of a row: more would take years, and a list of millions fills the memory.
MOST_SEEDS = 1000
Seeds = Annotated[tuple[Count, ...], Field(max_length=MOST_SEEDS)]

_THE_SAME = object()


def added(neutral: Any, default: Any = _THE_SAME) -> Any:
    """A field that is newer than kept runs: it enters a run's name only where it is not `neutral`.

    `neutral` is what all runs before it had, and never changes; `default`, the same at first, may.
    """
    if default is _THE_SAME:
        default = neutral

    def fresh() -> Any:
        return copy.deepcopy(default)

    return field(default_factory=fresh, metadata={"neutral": neutral})


def _is_asked_for(info: ValidationInfo) -> bool:
    """Whether somebody wants these settings now; those of a kept run are only read."""
    return not (info.context or {}).get("kept")


# ---- what a run is made of


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
    datasets: Annotated[tuple[str, ...], AfterValidator(_distinct)] | None = None
    # Pixels, height and width of the network's input.
    image_size: Annotated[Positive, Field(ge=8, le=4096)] = 224
    # Area share of the training crop (authors' code).
    crop_scale: Annotated[tuple[Rate, Share], AfterValidator(_ordered)] = (0.2, 1.0)
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


@dataclass(frozen=True, config=CHECKED)
class Method:
    """How the backbone is adapted: a sum of parts, each off by default.

    Rows of Tables 2(c), 3 and 7 are such sums.
    """

    name: str = "linear"
    # Train every weight of the backbone too.
    tune_backbone: bool = False
    # mlp3 with GELU (authors' code); none: the backbone's own features, as wide as they are;
    # whitened: these, by their spread within the training classes (models/whitening.py).
    head: Literal["linear", "mlp3", "mlp3-relu", "none", "whitened"] = "linear"

    # M of Eq. 7; 0 = no prompt, 1 = one prompt for all images (VPT), more = conditional pool.
    prompts: Count = 0
    # N_p, tokens per prompt.
    prompt_length: Count = 8
    # A_m of Eq. 8: paper or authors' code.
    prompt_attention: Literal["free", "softmax"] = "free"
    # Position embedding of a prompt: the class token's (authors' code).
    prompt_position: Literal["none", "cls"] = "cls"
    # With one prompt: new prompt tokens in every layer (VPT-deep).
    prompt_deep: bool = False

    # r of Sec. 4.2; 0 = no adapter.
    adapter_rank: Count = 0
    # p of Eq. 5, probability that an adapter is on in training.
    adapter_keep: Share = 1.0
    # Fixed factor on an adapter's output; 1 = Eq. 5 to the letter, 0.1 = authors' code.
    adapter_scale: Number = 0.1
    # What the Bernoulli gate is drawn for, per layer and branch.
    adapter_gate: Literal["sample", "batch"] = "sample"
    # Divide by p in training; False: multiply by p at test instead.
    adapter_divide: bool = True
    # Parallel to MSA and MLP (PUMA), or to the MLP (AdaptFormer).
    adapter_branches: Literal["both", "mlp"] = "both"
    # Only in the first K layers (Table 6, dagger); None = all.
    adapter_layers: Count | None = None

    # Bottleneck of LoRA; 0 = none.
    lora_rank: Count = 0
    # Keep probability of stochastic LoRA (Table 7).
    lora_keep: Share = 1.0
    # Projections that are adapted; the authors' code "qk".
    lora_targets: Literal["qv", "qk", "kv", "q", "k", "v", "qkv"] = "qv"
    # Factor on LoRA's output.
    lora_scale: Number = 1.0

    # Head, adapters and single prompts begin as in the authors' code, or as docs/deviations says.
    start: Literal["code", "usual"] = "code"

    # When gates are drawn, of LoRA too: see models.puma.Gate.
    adapter_schedule: Literal["constant", "early", "late"] = added("constant")

    # A module of pumalib.models with a part of its own (docs/contributing.md), and its settings.
    part: str = added("")
    part_settings: dict[str, Any] = added({})

    @model_validator(mode="after")
    def _can_be_built(self, info: ValidationInfo) -> Self:
        if _is_asked_for(info) and self.prompt_deep and self.prompts > 1:
            raise ValueError(
                f"prompt_deep is for one prompt, and prompts = {self.prompts} make a pool: "
                "set prompts = 1, or prompt_deep = False"
            )
        return self


_METHODS = [
    Method("full", tune_backbone=True),
    Method("pretrained", head="none"),  # trains nothing: the 0 shots of Fig. 6
    Method("whitened", head="whitened"),  # computed in a pass over the training images
    Method("linear"),
    Method("mlp3", head="mlp3"),
    Method("vpt", prompts=1),
    Method("vpt-deep", prompts=1, prompt_deep=True),
    Method("lora", lora_rank=128),
    Method("lora-stochastic", lora_rank=128, lora_keep=0.5),
    Method("adaptformer", adapter_rank=256, adapter_branches="mlp"),
    Method("adapter", adapter_rank=128),
    Method("adapter-stochastic", adapter_rank=128, adapter_keep=0.5),
    Method("prompt-pool", prompts=20),
    Method("vpt+adapter", prompts=1, adapter_rank=128),
    Method("puma", prompts=20, adapter_rank=128, adapter_keep=0.5),
    Method("puma+lora", prompts=20, adapter_rank=128, adapter_keep=0.5, lora_rank=128),
    Method(
        "puma+lora-stochastic",
        prompts=20,
        adapter_rank=128,
        adapter_keep=0.5,
        lora_rank=128,
        lora_keep=0.5,
    ),
]
METHODS = {method.name: method for method in _METHODS}

# Losses whose own parameters are a layer, whose weights and bias have no fixed length as proxies
# have: at the rate of proxies one step of AdamW would be larger than they are.
LOSSES_WITH_A_LAYER = ("crossentropy",)


def method(name: str | Method, /, **settings: Any) -> Method:
    """The method called `name`, or a `Method` itself, with some settings changed.

    Raises ValueError, which lists the known ones, for an unknown method or setting.
    """
    if isinstance(name, Method):
        chosen = name
    elif name in METHODS:
        chosen = METHODS[name]
    else:
        raise ValueError(_unknown(name, METHODS, "method"))
    where = f"method {chosen.name!r}"
    _require_known(where, settings, settings_of_method())
    return _changed(chosen, settings, where)


def settings_of_method() -> list[str]:
    """The fields of a `Method` that may be set: all but its name."""
    return [name for name in _names(Method) if name != "name"]


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
    # "auto": bfloat16 on CUDA, float32 elsewhere.
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    # Score held-out classes every so many epochs, and keep the epoch that scores best; 0 = never.
    score_epochs: Count = added(0)
    # Stop after so many scores in a row that are not above the best; 0 = never.
    patience: Count = added(0)

    # What follows (NOT_IN_IDENTITY) cannot change a number beyond rounding.
    # Images per forward pass; 0 = the whole batch; less memory, the same gradient.
    micro_batch: Count = 0
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
        if _is_asked_for(info) and self.images_per_class > self.batch_size:
            raise ValueError(
                f"images_per_class = {self.images_per_class} is more than "
                f"batch_size = {self.batch_size}: lower it, or raise batch_size"
            )
        return self

    @model_validator(mode="after")
    def _patience_has_scores(self, info: ValidationInfo) -> Self:
        if _is_asked_for(info) and self.patience and not self.score_epochs:
            raise ValueError(
                f"patience = {self.patience} counts scores, and score_epochs = 0 makes none: "
                "set score_epochs = 1, or patience = 0"
            )
        return self


NOT_IN_IDENTITY = ("micro_batch", "workers", "device", "checkpoint_seconds", "recompute")


def _require_weights(backbone: str, pretrained: str) -> None:
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
        if _is_asked_for(info):
            _require_weights(self.backbone, self.pretrained)
        return self

    def to_json(self) -> str:
        """All settings as text, for `from_dict(json.loads(text))`."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_dict(cls, content: Mapping) -> "Run":
        """A run by its record, as `to_json` wrote it, also of settings that are refused today.

        Raises ValueError, which names the field, for what no run ever had.
        """
        return checked("run", cls, _with_neutral(cls, content), kept=True)

    def identity(
        self, data_digest: str, weights_digest: str, more: Mapping[str, Any] | None = None
    ) -> str:
        """A hash of what can change the numbers: settings, and the contents of data and weights.

        Where they lie does not enter it.  `more`, where it is not empty, does.
        """
        content = _without_neutral(self)
        content["pretrained"] = weights_digest
        content["data_digest"] = data_digest
        content["numbers"] = NUMBERS
        if more:
            content["more"] = dict(more)
        del content["data"]["root"]
        del content["data"]["split"]
        for key in NOT_IN_IDENTITY:
            del content["training"][key]
        return short_hash(content)


def _without_neutral(value: Any) -> dict[str, Any]:
    """`asdict` of a dataclass, less the added fields that have their neutral value."""
    content = {}
    for one in fields(value):
        setting = getattr(value, one.name)
        if "neutral" in one.metadata and setting == one.metadata["neutral"]:
            continue
        if is_dataclass(setting):
            content[one.name] = _without_neutral(setting)
        else:
            content[one.name] = copy.deepcopy(setting)
    return content


def _with_neutral(cls: type, content: Mapping) -> dict[str, Any]:
    """Settings from before some fields were added, with the neutral values of these."""
    whole = dict(content)
    for one in fields(cls):
        if "neutral" in one.metadata and one.name not in whole:
            whole[one.name] = copy.deepcopy(one.metadata["neutral"])
        below = whole.get(one.name)
        if isinstance(one.type, type) and is_dataclass(one.type) and isinstance(below, Mapping):
            whole[one.name] = _with_neutral(one.type, below)
    return whole


def short_hash(content: Any) -> str:
    """Eight hexadecimal digits that tell JSON contents apart."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


# ---- profiles


@dataclass(frozen=True, config=CHECKED)
class Profile:
    """Where the data is and how much is spent: what of every `Run` a table does not choose."""

    # Results are written to results/<name>.
    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=60)]
    data: Data = field(default_factory=Data)
    backbone: str = "mini_vit"
    pretrained: str = "embedded"
    dim: Dimensions = 128
    # As of `Run`.
    pooling: Literal["avgmax", "timm"] = "avgmax"
    seeds: Annotated[Seeds, AfterValidator(_distinct)] = (0,)
    # Of the rows beside the headline ones (Table 3, Figs. 7 and 8); () = seeds.
    side_seeds: Seeds = ()
    # Of rows whose seeds lie far apart: any row has them too, once they are kept.
    further_seeds: Seeds = ()
    # x the ranks, which METHODS gives for a width of 384.
    rank_scale: Annotated[Rate, Field(le=1000)] = 1.0
    # x the tokens of a prompt, 8 for 196 patches.
    prompt_scale: Annotated[Rate, Field(le=1000)] = 1.0
    training: Training = field(default_factory=Training)
    # Settings of `training` when the backbone is tuned.
    full: dict[str, Any] = field(default_factory=dict)
    # Settings of `training` when it is frozen.
    frozen: dict[str, Any] = field(default_factory=dict)
    # Of single methods, by name: fields of `Training` and `Method` as they were tuned, see `run`.
    tuned: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Of single losses with a method, by both names: fields of `Training`, over what is `tuned`.
    tuned_losses: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    # The large datasets, all others being small; None: by the number of images (claims.large).
    large: Annotated[tuple[str, ...], AfterValidator(_once)] | None = None
    # Runs at once on this machine.
    jobs: Positive = 1
    # Address of a Dask scheduler whose workers train.
    dask: str | None = None
    # False: only what is kept is read.
    train: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.side_seeds != self.seeds[: len(self.side_seeds)]:
            raise ValueError(
                "side_seeds must be the first of seeds: rows are compared seed by seed"
            )
        all_seeds = (*self.seeds, *self.further_seeds)
        if len(set(all_seeds)) < len(all_seeds):
            raise ValueError("further_seeds: give each once, and none of seeds")
        _changed(self.training, self.full, "full")
        _changed(self.training, self.frozen, "frozen")
        for name, settings in self.tuned.items():
            self._check_tuned(name, settings)
        for name, of_losses in self.tuned_losses.items():
            self._check_tuned_losses(name, of_losses)
        _require_weights(self.backbone, self.pretrained)
        return self

    def _check_tuned(self, name: str, settings: Mapping[str, Any]) -> None:
        """Raise ValueError where `tuned` has an unknown method, field or value."""
        if name not in METHODS:
            raise ValueError(f"tuned: {_unknown(name, METHODS, 'method')}")
        where = f"tuned.{name}"
        known = [*_names(Training), *settings_of_method()]
        _require_known(where, settings, known)
        _changed(METHODS[name], _only_fields(settings, Method), where)
        _changed(self.training, _only_fields(settings, Training), where)

    def _check_tuned_losses(self, name: str, of_losses: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise ValueError where `tuned_losses` has an unknown method, field or value.

        Which losses there are is not known here: `puma_study` looks at their names.
        """
        if name not in METHODS:
            raise ValueError(f"tuned_losses: {_unknown(name, METHODS, 'method')}")
        for loss, settings in of_losses.items():
            where = f"tuned_losses.{name}.{loss}"
            _require_known(where, settings, _names(Training))
            _changed(self.training, settings, where)

    def run(
        self,
        name: str | Method = "puma",
        /,
        *,
        training: Mapping[str, Any] | None = None,
        data: Data | None = None,
        backbone: str | None = None,
        pretrained: str | None = None,
        dim: int | None = None,
        loss: str | None = None,
        loss_settings: Mapping[str, Any] | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> Run:
        """A row's `Run`: a method with some `settings` changed, at the profile's scale.

        `training` changes fields of the recipe, the others replace those of `Run`; None is the
        profile's word, or the default.  Raises ValueError, which names a bad field.

        What was `tuned` for a method goes by its name, and so holds for whatever is made of it by
        other settings, data or losses too: PUMA without its gate has PUMA's rate.  It stands above
        the recipes `full` and `frozen`, and below what is asked for here.  A `Method` that is given
        in place of a name keeps those of its settings that are not its namesake's in `METHODS`; one
        of another name has nothing tuned.  What was tuned for the method with one loss
        (`tuned_losses`) stands above what was tuned for the method; a loss that names the one it
        holds has what that one has.
        """
        chosen = self._scaled(method(name), settings)
        inner = (loss_settings or {}).get("loss", loss or Run.loss)
        content = {
            "method": chosen,
            "training": self._recipe(chosen, inner, training or {}),
            "data": self.data,
            "backbone": self.backbone,
            "pretrained": self.pretrained,
            "dim": self.dim,
            "pooling": self.pooling,
        }
        given = {
            "data": data,
            "backbone": backbone,
            "pretrained": pretrained,
            "dim": dim,
            "loss": loss,
            "loss_settings": loss_settings,
            "seed": seed,
        }
        for key, value in given.items():
            if value is not None:
                content[key] = value
        return checked(f"profile {self.name!r}", Run, content)

    def at_length(
        self,
        name: str | Method,
        factor: float,
        /,
        *,
        training: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Run:
        """A row's `Run`, trained for `factor` times the epochs that `run` would give it.

        The schedule of the learning rate is stretched with them; a length that is not a whole
        number of epochs is rounded, to one at least.  `training` and `settings` are those of `run`.
        """
        usual = self.run(name, training=training, **settings)
        if factor == 1:
            return usual
        stretched = dict(training or {})
        for key in ("epochs", "step_epochs"):
            stretched[key] = max(1, round(factor * getattr(usual.training, key)))
        return self.run(name, training=stretched, **settings)

    def _scaled(self, chosen: Method, settings: Mapping[str, Any]) -> Method:
        """A method at the scale of the backbone and its images, and tuned.

        But for what `settings` say.
        """
        scaled = {
            "adapter_rank": round(self.rank_scale * chosen.adapter_rank),
            "lora_rank": round(self.rank_scale * chosen.lora_rank),
            "prompt_length": max(1, round(self.prompt_scale * chosen.prompt_length)),
        }
        return method(chosen, **{**scaled, **self._tuned_settings(chosen), **settings})

    def _tuned_settings(self, chosen: Method) -> dict[str, Any]:
        """What was tuned of a method's own settings, but for those that were changed already."""
        found = {}
        for key, value in _only_fields(self.tuned.get(chosen.name, {}), Method).items():
            if getattr(chosen, key) == getattr(METHODS[chosen.name], key):
                found[key] = value
        return found

    def _recipe(self, chosen: Method, loss: str, changes: Mapping[str, Any]) -> Training:
        """The recipe for a method: as it tunes the backbone or not, and as it was tuned itself."""
        recipe = self.full if chosen.tune_backbone else self.frozen
        tuned = _only_fields(self.tuned.get(chosen.name, {}), Training)
        usual = {**recipe, **tuned}
        nobody_chose = self.training.loss_lr_factor == Training.loss_lr_factor
        if loss in LOSSES_WITH_A_LAYER and nobody_chose:
            usual["loss_lr_factor"] = usual.get("new_lr_factor", self.training.new_lr_factor)

        with_loss = self.tuned_losses.get(chosen.name, {}).get(loss, {})
        where = f"profile {self.name!r}, training"
        return _changed(self.training, {**usual, **with_loss, **changes}, where)


def profile(name: str, /, **changes: Any) -> Profile:
    """Read `notebooks/profiles/<name>.yaml`, or the YAML file `name`.

    A file is absolute, or as `paths.find` has it.  `changes` that are not None replace the file's
    word: any field of `Profile`, `Data` or `Training`; a field of `Training` wins over the recipes
    `full` and `frozen`, and over what was `tuned`, too.  Raises ValueError, which names a bad field
    and what is allowed.
    """
    read = _read_profile(_profile_file(name))
    where = f"profile {read.name!r}"
    asked = {key: value for key, value in changes.items() if value is not None}
    _require_known(where, asked, overridable())

    # The data.  A split is of the images of its own root.
    of_data = _only_fields(asked, Data)
    if "root" in of_data and "split" not in of_data:
        of_data["split"] = None
    own: dict[str, Any] = {"data": _changed(read.data, of_data, where)}

    # The training.  What is asked for wins over the recipes, and over what was tuned, too.
    of_training = _only_fields(asked, Training)
    own["training"] = _changed(read.training, of_training, where)
    own["full"] = _without(read.full, of_training)
    own["frozen"] = _without(read.frozen, of_training)
    own["tuned"] = {name: _without(tuned, of_training) for name, tuned in read.tuned.items()}
    own["tuned_losses"] = {}
    for method_name, of_losses in read.tuned_losses.items():
        left = {loss: _without(tuned, of_training) for loss, tuned in of_losses.items()}
        own["tuned_losses"][method_name] = left

    # The profile.  Seeds that are asked for are for all rows.
    if "seeds" in asked:
        own["side_seeds"] = ()
        own["further_seeds"] = ()
    own.update(_only_fields(asked, Profile))
    return _changed(read, own, where)


def require_values(changes: Mapping[str, Any]) -> None:
    """Raise ValueError where a change that a user wrote is null: `profile` takes that for none."""
    for name, value in changes.items():
        if value is None:
            raise ValueError(f"{name} = null would change nothing: give a value, or leave it out")


def overridable() -> list[str]:
    """The names that `profile` takes as changes."""
    names = [*_names(Profile), *_names(Data), *_names(Training)]
    names.remove("name")
    return names


def _profile_file(name: str) -> Path:
    """The file of a profile, by its name among ours or by its path."""
    known = _our_profiles()
    if name in known:
        return known[name]
    file = paths.find(name)
    if file.is_file():
        return file
    if paths.IN_CHECKOUT:
        ours = f"known: {', '.join(sorted(known))}"
    else:
        ours = "those of the study need its checkout: PUMALIB_ROOT=<checkout>"
    raise ValueError(f"no profile {name!r}; {ours}; or give the path of a YAML file")


def _our_profiles() -> dict[str, Path]:
    """The files of notebooks/profiles by name; none where pumalib runs without its checkout."""
    if not paths.IN_CHECKOUT:
        return {}
    return {file.stem: file for file in paths.PROFILES.glob("*.yaml")}


# Folders of results that are no profile's: the timings.
_OTHER_RESULTS = ("bench",)


def _read_profile(file: Path) -> Profile:
    try:
        content = read_yaml(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.name} is no YAML: {error}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{file.name}: a profile is a mapping of settings, not {kind}")
    read = checked(file.name, Profile, {"name": file.stem, **content})
    if read.name.casefold() in _OTHER_RESULTS:
        raise ValueError(
            f"{file}: results/{read.name} holds other results; give it another name by `name:`"
        )
    # Some file systems take names for one that differ in upper and lower case alone.
    ours = {name.casefold(): own for name, own in _our_profiles().items()}.get(read.name.casefold())
    if ours is not None and not ours.samefile(file):
        raise ValueError(
            f"{file}: {read.name!r} is the name of {paths.shown(ours)}, with whose results its own "
            "would be mixed; give it another by `name:`"
        )
    return read


# What they stand for grows by a factor with each: 20 of them to 1,600 times at most.
MOST_ALIASES = 20


class _Loader(yaml.SafeLoader):
    """YAML in which no mapping has a key twice, of which the first would be dropped unseen.

    Nor are there many aliases: forty, of mappings that are merged, take seconds.
    """

    aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MOST_ALIASES:
                said = f"more than {MOST_ALIASES} aliases (*): write out what they stand for"
                raise ComposerError(None, None, said, self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                said = f"the key {_short(key.value)} stands twice"
                raise ComposerError(None, None, said, key.start_mark)
            seen.add((key.tag, key.value))
        return node


# YAML 1.2 reads 3e-4 as a number, PyYAML (1.1) as a text, since it has no point.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(text: str) -> Any:
    """What a text in YAML says; ValueError, in one line: it is none, or has a key twice."""
    try:
        # A SafeLoader: it makes numbers, texts, lists and dictionaries alone.
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from None


# ---- checks, and what they say


def checked(where: str, cls: Any, content: Any, kept: bool = False) -> Any:
    """`content` as a `cls`, a type.

    Raises ValueError, pydantic's complaint as one line that names field, value and what is allowed.
    What is only refused today is taken where `kept` says that a finished run had it.
    """
    try:
        return TypeAdapter(cls).validate_python(content, context={"kept": kept})
    except ValidationError as error:
        first = error.errors()[0]
    # Outside of the `except`: pydantic's own words are no part of what is shown.
    raise ValueError(_complaint(where, cls, first))


_SECTIONS = {"data": Data, "method": Method, "training": Training}


def _complaint(where: str, cls: Any, error: Mapping[str, Any]) -> str:
    place = [str(part) for part in error["loc"]]
    if error["type"] == "unexpected_keyword_argument":
        *above, key = place
        owner = _SECTIONS[above[-1]] if above else cls
        return f"{', '.join([where, *above])}: {_unknown(key, _names(owner))}"
    message = error["msg"].removeprefix("Value error, ")
    message = re.sub("^(Input|String) should", "it should", message).replace("tuple", "list")
    if not place:
        return f"{where}: {message}"
    return f"{where}: {'.'.join(place)} = {_short(error['input'])}: {message}"


def _short(value: Any) -> str:
    """`repr` of a value, cut where it is long: aliases in YAML make gigabytes of a few lines."""
    short = reprlib.Repr()
    short.maxlevel = 3
    short.maxlist = short.maxtuple = short.maxdict = 8
    short.maxstring = short.maxother = 200
    try:
        text = short.repr(value)
    # Python does not write numbers of thousands of digits.
    except ValueError:
        return f"a large {type(value).__name__}"
    if len(text) > 400:
        return f"{text[:400]} ..."
    return text


def _changed(value: Any, changes: Mapping[str, Any], where: str) -> Any:
    """A dataclass with some fields changed, checked again."""
    return checked(where, type(value), {**vars(value), **changes})


def _names(cls: Any) -> list[str]:
    return [one.name for one in fields(cls)]


def _only_fields(changes: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """Those of the `changes` that are fields of `cls`."""
    return {name: changes[name] for name in _names(cls) if name in changes}


def _without(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The settings but those of the `names`."""
    return {name: value for name, value in settings.items() if name not in names}


def _require_known(where: str, names: Iterable[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: {_unknown(name, known)}")


def _unknown(name: str, known: Iterable[str], kind: str = "setting") -> str:
    near = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {_short(name)}; {meant}known: {', '.join(known)}"
