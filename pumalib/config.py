"""What a run is: frozen dataclasses, one documented line per field, and profiles read from YAML.
Two equal `Run`s have equal numbers.  A `Profile` says where the data is and how much is spent on it;
`profile.run("puma", seed=0)` makes the `Run` of a row.  pydantic checks whatever comes in, by YAML, `-p` or Python."""

import copy
import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, field, fields, is_dataclass
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from . import paths

NUMBERS = 3  # raise it when a change of the code changes the numbers of finished runs
CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)


def _refused(wrong: Callable[[Any], bool], message: str) -> Callable:
    def check(value):
        if wrong(value):
            raise ValueError(message)
        return value

    return check


_number = BeforeValidator(_refused(lambda value: type(value) is bool, "a number is needed, not true or false"))
_ordered = AfterValidator(_refused(lambda pair: pair[0] > pair[1], "the first number must not be above the second"))
_distinct = AfterValidator(_refused(lambda some: not some or len(set(some)) < len(some), "give one or more, each once"))
Count = Annotated[int, _number, Field(ge=0, le=10**9)]
Positive = Annotated[int, _number, Field(ge=1, le=10**6)]
Number = Annotated[float, _number, Field(allow_inf_nan=False)]
Amount = Annotated[Number, Field(ge=0)]
Rate = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Dimensions = Annotated[Positive, Field(le=65536)]


def added(neutral: Any, default: Any = None) -> Any:
    """A field that is newer than kept runs: it enters a run's name only where it is not `neutral`.

    `neutral` is what all runs before it had, and never changes; `default`, by default the same, may."""
    if default is None:
        default = neutral
    return field(default_factory=lambda: copy.copy(default), metadata={"neutral": neutral})


@dataclass(frozen=True, config=CHECKED)
class Data:
    """Which images, and how they become tensors."""

    benchmark: str = "mini"  # a name of data.READERS
    root: str | None = None  # folder of the datasets, absolute or relative to the project; not used by "mini"
    split: str | None = None  # CSV of path,split in place of root/split.csv: "folders" takes those images alone
    datasets: Annotated[tuple[str, ...], _distinct] | None = None  # only these datasets; None = all
    image_size: Annotated[Positive, Field(ge=8, le=4096)] = 224  # pixels, height and width of the network's input
    crop_scale: Annotated[tuple[Rate, Share], _ordered] = (0.2, 1.0)  # area share of the training crop (authors' code)
    resize: Literal["both", "shorter"] = "both"  # at test: both sides to 256/224 of image_size (paper), or the shorter
    flip: bool = True  # random horizontal flip in training (Appendix A)
    upright: bool | None = None  # turn photographs as their EXIF data says; None: in "folders" only, as the authors
    prepared: bool = False  # read images from their resized copies (python -m pumalib data prepare)
    holdout: bool = False  # train and test on two halves of the training classes: to choose settings, never for results
    shots: Count = 0  # training images per class, drawn by the run's seed (Fig. 6); 0 = all
    drop_unreadable: bool = False  # leave unreadable images out, with a warning, instead of stopping


@dataclass(frozen=True, config=CHECKED)
class Method:
    """How the backbone is adapted: a sum of parts, each off by default (Tables 2(c), 3 and 7 are rows of these)."""

    name: str = "linear"
    tune_backbone: bool = False  # train every weight of the backbone too
    head: Literal["linear", "mlp3", "mlp3-relu", "none"] = "linear"  # mlp3 by GELU (authors' code); none: D features
    prompts: Count = 0  # M of Eq. 7; 0 = no prompt, 1 = one prompt for all images (VPT), more = conditional pool
    prompt_length: Count = 8  # N_p, tokens per prompt
    prompt_attention: Literal["free", "softmax"] = "free"  # A_m of Eq. 8: paper or authors' code
    prompt_position: Literal["none", "cls"] = "cls"  # position embedding of a prompt: the class token's (authors' code)
    prompt_deep: bool = False  # with one prompt: new prompt tokens in every layer (VPT-deep)
    adapter_rank: Count = 0  # r of Sec. 4.2; 0 = no adapter
    adapter_keep: Share = 1.0  # p of Eq. 5, probability that an adapter is on in training
    adapter_scale: Number = 0.1  # fixed factor on an adapter's output; 1 = Eq. 5 to the letter, 0.1 = authors' code
    adapter_gate: Literal["sample", "batch"] = "sample"  # what the Bernoulli gate is drawn for, per layer and branch
    adapter_divide: bool = True  # divide by p in training; False: multiply by p at test instead
    adapter_branches: Literal["both", "mlp"] = "both"  # parallel to MSA and MLP (PUMA), or to the MLP (AdaptFormer)
    adapter_layers: Count | None = None  # only in the first K layers (Table 6, dagger); None = all
    lora_rank: Count = 0  # bottleneck of LoRA; 0 = none
    lora_keep: Share = 1.0  # keep probability of stochastic LoRA (Table 7)
    lora_targets: Literal["qv", "qk", "kv", "q", "k", "v", "qkv"] = "qv"  # projections; the authors' code "qk"
    lora_scale: Number = 1.0  # factor on LoRA's output
    start: Literal["code", "usual"] = "code"  # head, adapters, single prompts: as the authors' code, or docs/deviations
    # A module of pumalib.models with a part of its own (docs/contributing.md), and the part's settings.
    part: str = added("")
    part_settings: dict[str, Any] = added({})


_methods = [
    Method("full", tune_backbone=True),
    Method("pretrained", head="none"),  # trains nothing: the 0 shots of Fig. 6
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
    Method("puma+lora-stochastic", prompts=20, adapter_rank=128, adapter_keep=0.5, lora_rank=128, lora_keep=0.5),
]
METHODS = {method.name: method for method in _methods}


def method(name: str | Method, **settings) -> Method:
    """The method called `name`, or a `Method` itself, with some settings changed; a ValueError lists the known ones."""
    if not isinstance(name, Method) and name not in METHODS:
        raise ValueError(_unknown(name, METHODS, "method"))
    chosen = name if isinstance(name, Method) else METHODS[name]
    return _changed(chosen, settings, f"method {chosen.name!r}")


@dataclass(frozen=True, config=CHECKED)
class Training:
    """The recipe (Appendix A; what the paper leaves open follows the authors' code, see docs/deviations.md)."""

    epochs: Positive = 100  # passes over the training images
    batch_size: Positive = 720  # images per step
    images_per_class: Positive = 4  # K of the class batches of pair-based losses
    repeat_images: bool = True  # class batches draw images with replacement (authors' code)
    lr: Rate = 1e-4  # learning rate of backbone weights; the base of the two factors below
    new_lr_factor: Amount = 10.0  # x lr for prompts, adapters, LoRA and the head (authors' code)
    loss_lr_factor: Amount = 1e4  # x lr for proxies and every parameter of the loss (Appendix A)
    weight_decay: Amount = 1e-4  # of AdamW
    schedule: Literal["constant", "step", "cosine"] = "step"  # "step": x step_factor every step_epochs
    step_epochs: Positive = 20  # epochs between two steps of the learning rate
    step_factor: Rate = 0.5  # factor of each step
    cosine_floor: Share = 0.1  # share of lr at which "cosine" ends (authors' code)
    clip_value: Amount = 1.0  # every gradient entry is clamped to +- this, loss parameters too; 0 = off
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # "auto": bfloat16 on CUDA, float32 elsewhere
    # What follows cannot change a number beyond rounding, and is no part of a run's identity.
    micro_batch: Count = 0  # images per forward pass; 0 = the whole batch; less memory, the same gradient
    workers: Annotated[Count, Field(le=1024)] = 0  # processes that decode images
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    checkpoint_seconds: Rate = 120.0  # seconds between two checkpoints within an epoch
    recompute: bool = False  # recompute a block's activations in the backward pass: less memory, a third slower


PLACES = ("micro_batch", "workers", "device", "checkpoint_seconds", "recompute")


@dataclass(frozen=True, config=CHECKED)
class Run:
    """One training with its evaluation: everything that can change its numbers."""

    data: Data = field(default_factory=Data)
    backbone: str = "mini_vit"  # "mini_vit" or the full name of a timm vision transformer
    pretrained: str = "embedded"  # "embedded" (mini_vit), "hub" (timm), "random", or a file of weights
    method: Method = field(default_factory=lambda: METHODS["puma"])
    dim: Dimensions = 128  # embedding dimensions
    loss: str = "curricularface"  # a name of pumalib.losses
    loss_settings: dict[str, Any] = field(default_factory=dict)  # hyperparameters of the loss, where not its defaults
    training: Training = field(default_factory=Training)
    seed: Count = 0  # of initialisation, batches, augmentation and gates

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_dict(cls, content: Mapping) -> "Run":
        return checked("run", cls, _with_neutral(cls, content))

    def identity(self, data_digest: str, weights_digest: str, more: Mapping | None = None) -> str:
        """A hash of what can change the numbers: settings and the contents of data and weights, not their place."""
        content = _without_neutral(self) | {"pretrained": weights_digest, "data_digest": data_digest, "numbers": NUMBERS}
        if more:
            content["more"] = dict(more)
        del content["data"]["root"], content["data"]["split"]
        for key in PLACES:
            del content["training"][key]
        return short_hash(content)


def _without_neutral(value: Any) -> dict[str, Any]:
    """`asdict` of a dataclass, less the added fields that have their neutral value."""
    content = {}
    for one in fields(value):
        setting = getattr(value, one.name)
        if "neutral" in one.metadata and setting == one.metadata["neutral"]:
            continue
        content[one.name] = _without_neutral(setting) if is_dataclass(setting) else copy.deepcopy(setting)
    return content


def _with_neutral(cls: type, content: Mapping) -> dict[str, Any]:
    """Settings of a run that was written before some fields were added, with their neutral values."""
    whole = dict(content)
    for one in fields(cls):
        if "neutral" in one.metadata:
            whole.setdefault(one.name, copy.copy(one.metadata["neutral"]))
        if is_dataclass(one.type) and isinstance(whole.get(one.name), Mapping):
            whole[one.name] = _with_neutral(one.type, whole[one.name])
    return whole


def short_hash(content) -> str:
    """Eight hexadecimal digits that tell JSON contents apart."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True, config=CHECKED)
class Profile:
    """Where the data is and how much is spent: the part of every `Run` that a table does not choose."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # results/<name>
    data: Data = field(default_factory=Data)
    backbone: str = "mini_vit"
    pretrained: str = "embedded"
    dim: Dimensions = 128
    seeds: Annotated[tuple[Count, ...], _distinct] = (0,)
    side_seeds: tuple[Count, ...] = ()  # of the rows beside the headline ones (Table 3, Figs. 7 and 8); () = seeds
    rank_scale: Annotated[Rate, Field(le=1000)] = 1.0  # x the ranks, which METHODS gives for a width of 384
    prompt_scale: Annotated[Rate, Field(le=1000)] = 1.0  # x the tokens of a prompt, 8 for 196 patches
    training: Training = field(default_factory=Training)
    full: dict[str, Any] = field(default_factory=dict)  # settings of `training` when the backbone is tuned
    frozen: dict[str, Any] = field(default_factory=dict)  # settings of `training` when it is frozen
    jobs: Positive = 1  # runs at once on this machine
    dask: str | None = None  # address of a Dask scheduler whose workers train
    train: bool = True  # False: only what is kept is read

    @model_validator(mode="after")
    def _fits(self):
        if self.side_seeds != self.seeds[: len(self.side_seeds)]:
            raise ValueError("side_seeds must be the first of seeds: rows are compared seed by seed")
        for recipe in ("full", "frozen"):
            _changed(self.training, getattr(self, recipe), recipe)
        return self

    def run(self, name: str | Method = "puma", *, training: Mapping | None = None, **changes) -> Run:
        """A row's `Run`: a method, with `changes` of its fields or those of `Run`, and of the recipe by `training`."""
        chosen = method(name)
        ranks = {key: round(self.rank_scale * getattr(chosen, key)) for key in ("adapter_rank", "lora_rank")}
        own = {"data": self.data, "backbone": self.backbone, "pretrained": self.pretrained, "dim": self.dim}
        own |= {key: value for key in _names(Run) if (value := changes.pop(key, None)) is not None}
        length = max(1, round(self.prompt_scale * chosen.prompt_length))
        chosen = method(chosen, **(ranks | {"prompt_length": length} | changes))
        recipe = (self.full if chosen.tune_backbone else self.frozen) | dict(training or {})
        return Run(**own, method=chosen, training=_changed(self.training, recipe, f"profile {self.name!r}, training"))


def profile(name: str, **changes) -> Profile:
    """Read `notebooks/profiles/<name>.yaml`, or the YAML file `name` (absolute, or relative to the project).
    `changes` that are not None replace the file's word: any field of `Profile`, `Data` or `Training`; a field of
    `Training` wins over the recipes `full` and `frozen` too.  A ValueError names a bad field and what is allowed."""
    file = next((f for f in (paths.PROFILES / f"{name}.yaml", paths.resolve(name)) if f.is_file()), None)
    if file is None:
        known = ", ".join(sorted(f.stem for f in paths.PROFILES.glob("*.yaml")))
        raise ValueError(f"no profile {name!r}; known: {known}; or give the path of a YAML file")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file.name} is no YAML: {' '.join(str(error).split())}") from None
    if type(content) is not dict:
        raise ValueError(f"{file.name}: a profile is a mapping of settings, not {type(content).__name__}")
    read = checked(file.name, Profile, {"name": file.stem, **content})
    where, changes = f"profile {read.name!r}", {key: value for key, value in changes.items() if value is not None}
    if unknown := [key for key in changes if key not in overridable()]:
        raise ValueError(f"{where}: {_unknown(unknown[0], overridable())}")
    own = {"side_seeds": ()} if "seeds" in changes else {}  # an explicit wish is for all rows
    for recipe in ("full", "frozen"):
        own[recipe] = {key: value for key, value in getattr(read, recipe).items() if key not in changes}
    changes = ({"split": None} if "root" in changes else {}) | changes  # a split is of the images of its own root
    for part, before in (("data", read.data), ("training", read.training)):
        own[part] = _changed(before, {key: changes.pop(key) for key in _names(before) if key in changes}, where)
    return _changed(read, own | changes, where)


def overridable() -> list[str]:
    """The names that `profile` takes as changes."""
    return [name for cls in (Profile, Data, Training) for name in _names(cls) if name != "name"]


def _names(cls) -> list[str]:
    return [field.name for field in fields(cls)]


def _unknown(name: str, known: Iterable[str], kind: str = "setting") -> str:
    near = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}; {meant}known: {', '.join(known)}"


def _changed(value, changes: Mapping, where: str):
    return checked(where, type(value), vars(value) | changes)


def checked(where: str, cls, content):
    """`content` as a `cls`, or pydantic's complaint as one line that names field, value and what is allowed."""
    try:
        return TypeAdapter(cls).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == "unexpected_keyword_argument":
        *above, key = place
        known = _names({"data": Data, "method": Method, "training": Training}[above[-1]] if above else cls)
        raise ValueError(f"{', '.join([where, *above])}: {_unknown(key, known)}")
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "it should").replace("tuple", "list")
    raise ValueError(f"{where}: {'.'.join(place)} = {first['input']!r}: {message}" if place else f"{where}: {message}")
