"""What a run is: frozen dataclasses, one documented line per field, and profiles read from YAML.

A `Run` is a value: two equal runs have equal numbers.  A `Profile` says where the data is and how much is spent on
it; `profile.run("puma", seed=0)` makes the `Run` of one row of a table.  pydantic checks types and ranges, whatever
the way in: YAML, the command line or Python.  No torch here.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from . import paths

NUMBERS = 2  # raise it when a change of the code changes the numbers of finished runs
CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)


def _no_bool(value):
    if type(value) is bool:
        raise ValueError("a number is needed, not true or false")
    return value


def _ordered(scale: tuple[float, float]) -> tuple[float, float]:
    if scale[0] > scale[1]:
        raise ValueError("the first number must not be above the second")
    return scale


def _distinct(values: tuple | None) -> tuple | None:
    if values is not None and (not values or len(set(values)) < len(values)):
        raise ValueError("give at least one, and each once")
    return values


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=10**9)]
Positive = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=10**6)]
Number = Annotated[float, BeforeValidator(_no_bool)]
Amount = Annotated[Number, Field(ge=0)]
Rate = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], AfterValidator(_distinct)]


@dataclass(frozen=True, config=CHECKED)
class Data:
    """Which images, and how they become tensors."""

    benchmark: Literal["mini", "folders", "paper"] = "mini"
    root: str | None = None  # folder of the datasets, absolute or relative to the project; not used by "mini"
    datasets: Names | None = None  # only these datasets; None = all
    image_size: Annotated[Positive, Field(ge=8, le=4096)] = 224  # pixels, height and width of the network's input
    # area share of the training crop (authors' code)
    crop_scale: Annotated[tuple[Rate, Annotated[Rate, Field(le=1)]], AfterValidator(_ordered)] = (0.2, 1.0)
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
    head: Literal["linear", "mlp3", "none"] = "linear"  # D -> dim, D -> 2048 -> 2048 -> dim, or the D features
    prompts: Count = 0  # M of Eq. 7; 0 = no prompt, 1 = one prompt for all images (VPT), more = conditional pool
    prompt_length: Count = 8  # N_p, tokens per prompt
    prompt_attention: Literal["free", "softmax"] = "free"  # A_m of Eq. 8: paper or authors' code
    prompt_position: Literal["none", "cls"] = "none"  # position embedding of a prompt; "cls" as the authors' code
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
    # which of the three projections LoRA adapts; the authors' code "qk"
    lora_targets: Literal["qv", "qk", "kv", "q", "k", "v", "qkv"] = "qv"
    lora_scale: Number = 1.0  # factor on LoRA's output


METHODS: dict[str, Method] = {
    name: Method(name, **settings)
    for name, settings in {
        "full": {"tune_backbone": True},
        "pretrained": {"head": "none"},  # trains nothing: the 0 shots of Fig. 6
        "linear": {},
        "mlp3": {"head": "mlp3"},
        "vpt": {"prompts": 1},
        "vpt-deep": {"prompts": 1, "prompt_deep": True},
        "lora": {"lora_rank": 128},
        "lora-stochastic": {"lora_rank": 128, "lora_keep": 0.5},
        "adaptformer": {"adapter_rank": 256, "adapter_branches": "mlp"},
        "adapter": {"adapter_rank": 128},
        "adapter-stochastic": {"adapter_rank": 128, "adapter_keep": 0.5},
        "prompt-pool": {"prompts": 20},
        "vpt+adapter": {"prompts": 1, "adapter_rank": 128},
        "puma": {"prompts": 20, "adapter_rank": 128, "adapter_keep": 0.5},
        "puma+lora": {"prompts": 20, "adapter_rank": 128, "adapter_keep": 0.5, "lora_rank": 128},
        "puma+lora-stochastic": {
            "prompts": 20,
            "adapter_rank": 128,
            "adapter_keep": 0.5,
            "lora_rank": 128,
            "lora_keep": 0.5,
        },
    }.items()
}


def method(name: str | Method, **settings) -> Method:
    """The method called `name` (or a `Method` itself) with some settings changed.

    Raises:
        ValueError: unknown name or setting, or a bad value; the message lists what is allowed.
    """
    if not isinstance(name, Method):
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; {_near(name, METHODS)}known: {', '.join(METHODS)}")
        name = METHODS[name]
    return _changed(name, settings, f"method {name.name!r}")


@dataclass(frozen=True, config=CHECKED)
class Training:
    """The recipe (Appendix A; what the paper leaves open follows the authors' code, see docs/deviations.md)."""

    epochs: Positive = 100  # passes over the training images
    batch_size: Positive = 720  # images per step
    images_per_class: Positive = 4  # K of the class batches of pair-based losses
    lr: Rate = 1e-4  # learning rate of backbone weights; the base of the two factors below
    new_lr_factor: Amount = 10.0  # x lr for prompts, adapters, LoRA and the head (authors' code)
    loss_lr_factor: Amount = 1e4  # x lr for proxies and every parameter of the loss (Appendix A)
    weight_decay: Amount = 1e-4  # of AdamW
    schedule: Literal["constant", "step", "cosine"] = "step"  # "step": x step_factor every step_epochs; "cosine": to 0
    step_epochs: Positive = 20  # epochs between two steps of the learning rate
    step_factor: Rate = 0.5  # factor of each step
    clip_value: Amount = 1.0  # every gradient entry is clamped to +- this, loss parameters too; 0 = off
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # "auto": bfloat16 on CUDA, float32 elsewhere
    # What follows cannot change a number beyond rounding, and is no part of a run's identity.
    micro_batch: Count = 0  # images per forward pass; 0 = the whole batch; less memory, the same gradient
    workers: Annotated[Count, Field(le=1024)] = 0  # processes that decode images
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    checkpoint_seconds: Rate = 120.0  # seconds between two checkpoints within an epoch
    compile: bool = False  # torch.compile the network: the first steps take minutes, later ones less on a GPU
    recompute: bool = False  # recompute a block's activations in the backward pass: less memory, a third slower


PLACES = ("micro_batch", "workers", "device", "checkpoint_seconds", "compile", "recompute")


@dataclass(frozen=True, config=CHECKED)
class Run:
    """One training with its evaluation: everything that can change its numbers."""

    data: Data = field(default_factory=Data)
    backbone: str = "mini_vit"  # "mini_vit" or the full name of a timm vision transformer
    pretrained: str = "embedded"  # "embedded" (mini_vit), "hub" (timm), "random", or a file of weights
    method: Method = field(default_factory=lambda: METHODS["puma"])
    dim: Annotated[Positive, Field(le=65536)] = 128  # embedding dimensions
    loss: str = "curricularface"  # a name of pumalib.losses
    loss_settings: dict[str, Any] = field(default_factory=dict)  # hyperparameters of the loss, where not its defaults
    training: Training = field(default_factory=Training)
    seed: Count = 0  # of initialisation, batches, augmentation and gates

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Run:
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, content: Mapping) -> Run:
        return _build(cls, content, "run")

    def identity(self, data_digest: str, weights_digest: str) -> str:
        """SHA-256 of what can change the numbers: settings and the contents of data and weights, not their place."""
        content = dataclasses.asdict(self) | {
            "pretrained": weights_digest,
            "data_digest": data_digest,
            "numbers": NUMBERS,
        }
        content["data"].pop("root")
        for key in PLACES:
            content["training"].pop(key)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, config=CHECKED)
class Profile:
    """Where the data is and how much is spent: the part of every `Run` that a table does not choose."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # results/<name>
    data: Data = field(default_factory=Data)
    backbone: str = "mini_vit"
    pretrained: str = "embedded"
    dim: Annotated[Positive, Field(le=65536)] = 128
    seeds: Annotated[tuple[Count, ...], AfterValidator(_distinct)] = (0,)
    side_seeds: tuple[Count, ...] = ()  # of the rows beside the headline ones (Table 3, Figs. 7 and 8); () = seeds
    rank_scale: Rate = 1.0  # x the ranks of adapters and LoRA, which METHODS gives for a width of 384
    training: Training = field(default_factory=Training)
    full: dict[str, Any] = field(default_factory=dict)  # settings of `training` when the backbone is tuned
    frozen: dict[str, Any] = field(default_factory=dict)  # settings of `training` when it is frozen
    jobs: Positive = 1  # runs at once on this machine
    dask: str | None = None  # address of a Dask scheduler whose workers train

    @model_validator(mode="after")
    def _recipes_fit(self):
        for recipe in ("full", "frozen"):
            _changed(self.training, getattr(self, recipe), recipe)
        return self

    def run(
        self,
        method_name: str | Method = "puma",
        *,
        loss: str = "curricularface",
        seed: int = 0,
        loss_settings: Mapping | None = None,
        dim: int | None = None,
        data: Data | None = None,
        training: Mapping | None = None,
        **settings,
    ) -> Run:
        """The `Run` of one row: a method (with settings such as `adapter_keep=0.3`), a loss, a seed."""
        chosen = method(method_name)
        ranks = {key: round(self.rank_scale * getattr(chosen, key)) for key in ("adapter_rank", "lora_rank")}
        chosen = method(chosen, **{**ranks, **settings})
        recipe = {**(self.full if chosen.tune_backbone else self.frozen), **(training or {})}
        return Run(
            data=data or self.data,
            backbone=self.backbone,
            pretrained=self.pretrained,
            method=chosen,
            dim=self.dim if dim is None else dim,
            loss=loss,
            loss_settings=dict(loss_settings or {}),
            training=_changed(self.training, recipe, f"profile {self.name!r}, training"),
            seed=seed,
        )


def profile(name: str, **changes) -> Profile:
    """Read `notebooks/profiles/<name>.yaml`, or the YAML file `name`.

    Args:
        name: name of a profile, or path of a YAML file (absolute, or relative to the project).
        **changes: what replaces the file's word where it is not None: any field of `Profile`, `Data` or `Training`.

    Raises:
        ValueError: no such profile (the message lists them), an unknown key (naming the nearest), or a bad value.
    """
    file = paths.PROFILES / f"{name}.yaml"
    file = file if file.is_file() else paths.resolve(name)
    if not file.is_file():
        known = ", ".join(sorted(p.stem for p in paths.PROFILES.glob("*.yaml")))
        raise ValueError(f"no profile {name!r}; known: {known}; or give the path of a YAML file")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file.name} is no YAML: {' '.join(str(error).split())}") from None
    if type(content) is not dict:
        raise ValueError(f"{file.name}: a profile is a mapping of settings, not {type(content).__name__}")
    result = _build(Profile, {"name": file.stem, **content}, file.name)
    return _overridden(result, {key: value for key, value in changes.items() if value is not None})


def overridable() -> list[str]:
    """The names that `profile` takes as changes."""
    return [name for cls in (Profile, Data, Training) for name in names(cls) if name != "name"]


def _overridden(profile: Profile, changes: dict) -> Profile:
    """Put each change where its field lives; `training` fields win over `full` and `frozen`."""
    parts = {"data": Data, "training": Training}
    inner = {part: {k: v for k, v in changes.items() if k in names(cls)} for part, cls in parts.items()}
    own = {key: value for key, value in changes.items() if key not in {**inner["data"], **inner["training"]}}
    where, known = f"profile {profile.name!r}", overridable()
    unknown = next((key for key in own if key not in known), None)
    if unknown:
        raise ValueError(f"{where}: unknown setting {unknown!r}; {_near(unknown, known)}known: {', '.join(known)}")
    if "seeds" in changes:  # an explicit wish is for all rows
        own["side_seeds"] = ()
    for recipe in ("full", "frozen"):
        own.setdefault(recipe, {k: v for k, v in getattr(profile, recipe).items() if k not in changes})
    own |= {part: _changed(getattr(profile, part), values, where) for part, values in inner.items() if values}
    return _changed(profile, own, where)


def names(cls) -> list[str]:
    """The fields of a dataclass."""
    return [f.name for f in fields(cls)]


def _near(name: str, known) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}? " if near else ""


def _changed(value, changes: Mapping, where: str):
    """`value` with some fields replaced, checked."""
    return _explained(where, type(value), replace, value, **changes)


def _build(cls, content: Mapping, where: str):
    """The dataclass `cls` from plain YAML or JSON, checked."""
    return _explained(where, cls, TypeAdapter(cls).validate_python, content)


def _explained(where: str, cls, make, *args, **values):
    """`make(...)`, with pydantic's complaint as one line that names field, value and what is allowed."""
    try:
        return make(*args, **values)
    except ValidationError as error:
        first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == "unexpected_keyword_argument":
        *above, key = place
        known = names({"data": Data, "method": Method, "training": Training}[above[-1]] if above else cls)
        where = ", ".join([where, *above])
        raise ValueError(f"{where}: unknown setting {key!r}; {_near(key, known)}known: {', '.join(known)}")
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "it should").replace("tuple", "list")
    raise ValueError(f"{where}: {'.'.join(place)} = {first['input']!r}: {message}" if place else f"{where}: {message}")
