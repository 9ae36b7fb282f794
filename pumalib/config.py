"""What a run is: frozen dataclasses, one documented line per field, and profiles read from YAML.

A `Run` is a value: two equal runs have equal numbers.  A `Profile` says where the data is and how much
is spent on it; `profile.run("puma", seed=0)` makes the `Run` of one row of a table.  No torch here.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import yaml

from . import paths


@dataclass(frozen=True)
class Data:
    """Which images, and how they become tensors."""

    benchmark: str = "mini"  # "mini", "folders" or "paper"
    root: str | None = None  # folder of the datasets, absolute or relative to the project; not used by "mini"
    datasets: tuple[str, ...] | None = None  # only these datasets; None = all
    image_size: int = 224  # pixels, height and width of the network's input
    crop_scale: tuple[float, float] = (0.2, 1.0)  # area share of the training crop (authors' code)
    resize: str = "both"  # at test: resize "both" sides to 256/224 of image_size (paper) or the "shorter" (code), then crop
    flip: bool = True  # random horizontal flip in training (Appendix A)
    packed: bool = False  # read images from their packed copy (python -m pumalib data prepare)
    holdout: bool = False  # train and test on two halves of the training classes: to choose settings, never for results
    shots: int = 0  # training images per class, drawn by the run's seed (Fig. 6); 0 = all
    drop_unreadable: bool = False  # leave unreadable images out, with a warning, instead of stopping


@dataclass(frozen=True)
class Method:
    """How the backbone is adapted: a sum of parts, each off at its default (Tables 2(c), 3 and 7 are rows of these)."""

    name: str = "linear"
    tune_backbone: bool = False  # train every weight of the backbone too
    head: str = "linear"  # "linear": D -> dim; "mlp3": D -> 2048 -> 2048 -> dim; "none": the D features themselves
    prompts: int = 0  # M of Eq. 7; 0 = no prompt, 1 = one prompt for all images (VPT), more = conditional pool
    prompt_length: int = 8  # N_p, tokens per prompt
    prompt_attention: str = "free"  # A_m of Eq. 8: "free" (paper) or "softmax" (authors' code)
    prompt_position: str = "none"  # position embedding of a prompt: "none" (paper) or "cls" (authors' code)
    prompt_deep: bool = False  # with one prompt: new prompt tokens in every layer (VPT-deep)
    adapter_rank: int = 0  # r of Sec. 4.2; 0 = no adapter
    adapter_keep: float = 1.0  # p of Eq. 5, probability that an adapter is on in training
    adapter_scale: float = 0.1  # fixed factor on an adapter's output; 1 = Eq. 5 to the letter, 0.1 = authors' code
    adapter_gate: str = "sample"  # the Bernoulli gate is drawn per "sample" or per "batch", for each layer and branch
    adapter_divide: bool = True  # divide by p in training; False: multiply by p at test instead
    adapter_branches: str = "both"  # parallel to "both" MSA and MLP (PUMA) or to "mlp" alone (AdaptFormer)
    adapter_layers: int | None = None  # only in the first K layers (Table 6, dagger); None = all
    lora_rank: int = 0  # bottleneck of LoRA; 0 = none
    lora_keep: float = 1.0  # keep probability of stochastic LoRA (Table 7)
    lora_targets: str = "qv"  # two of "q", "k", "v"; the authors' code adapts "qk"
    lora_scale: float = 1.0  # factor on LoRA's output

    def __post_init__(self):
        choices = dict(head=("linear", "mlp3", "none"), prompt_attention=("free", "softmax"), prompt_position=("none", "cls"),
                       adapter_gate=("sample", "batch"), adapter_branches=("both", "mlp"))  # fmt: skip
        for key, known in choices.items():
            if getattr(self, key) not in known:
                raise ValueError(f"method {self.name!r}: {key} = {getattr(self, key)!r}; known: {', '.join(known)}")
        for key in ("adapter_keep", "lora_keep"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"method {self.name!r}: {key} = {getattr(self, key)} is no probability")
        for key in ("prompts", "prompt_length", "adapter_rank", "lora_rank"):
            if getattr(self, key) < 0:
                raise ValueError(f"method {self.name!r}: {key} = {getattr(self, key)} is negative")
        if set(self.lora_targets) - set("qkv") or len(set(self.lora_targets)) != len(self.lora_targets):
            raise ValueError(f"method {self.name!r}: lora_targets = {self.lora_targets!r}; give letters of 'qkv', each once")


_PUMA = Method("puma", prompts=20, adapter_rank=128, adapter_keep=0.5)
_LORA = dict(lora_rank=128)
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("full", tune_backbone=True),
        Method("pretrained", head="none"),  # trains nothing: the 0 shots of Fig. 6
        Method("linear"),
        Method("mlp3", head="mlp3"),
        Method("vpt", prompts=1),
        Method("vpt-deep", prompts=1, prompt_deep=True),
        Method("lora", **_LORA),
        Method("lora-stochastic", **_LORA, lora_keep=0.5),
        Method("adaptformer", adapter_rank=256, adapter_branches="mlp"),
        Method("adapter", adapter_rank=128),
        Method("adapter-stochastic", adapter_rank=128, adapter_keep=0.5),
        Method("prompt-pool", prompts=20),
        Method("vpt+adapter", prompts=1, adapter_rank=128),
        _PUMA,
        replace(_PUMA, name="puma+lora", **_LORA),
        replace(_PUMA, name="puma+lora-stochastic", **_LORA, lora_keep=0.5),
    )
}


def method(name: str | Method, **settings) -> Method:
    """The method called `name` (or a `Method` itself) with some settings changed.

    Raises:
        ValueError: unknown name or setting; the message lists the known ones.
    """
    if not isinstance(name, Method):
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
        name = METHODS[name]
    return _replace(name, settings, f"method {name.name!r}")


@dataclass(frozen=True)
class Training:
    """The recipe (Appendix A; what the paper leaves open follows the authors' code, see the deviations table)."""

    epochs: int = 100  # passes over the training images
    batch_size: int = 720  # images per step
    images_per_class: int = 4  # K of the class batches of pair-based losses
    lr: float = 1e-4  # learning rate of backbone weights; the base of the two factors below
    new_lr_factor: float = 10.0  # x lr for prompts, adapters, LoRA and the head (authors' code)
    loss_lr_factor: float = 1e4  # x lr for proxies and every parameter of the loss (Appendix A)
    weight_decay: float = 1e-4  # of AdamW
    schedule: str = "step"  # "constant", "step" (x step_factor every step_epochs) or "cosine" (to zero)
    step_epochs: int = 20  # epochs between two steps of the learning rate
    step_factor: float = 0.5  # factor of each step
    clip_value: float = 1.0  # every gradient entry is clamped to +- this, loss parameters too; 0 = off
    precision: str = "auto"  # "float32", "bfloat16" (autocast) or "auto": bfloat16 on CUDA, float32 elsewhere
    # What follows cannot change a number beyond rounding, and is no part of a run's identity.
    micro_batch: int = 0  # images per forward pass; 0 = the whole batch; less memory, the same gradient
    workers: int = 0  # processes that decode images
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1", ...
    checkpoint_seconds: float = 120.0  # seconds between two checkpoints within an epoch
    compile: bool = False  # torch.compile the network: the first steps take minutes, later ones less on a GPU
    recompute: bool = False  # recompute a transformer block's activations in the backward pass: less memory, a third slower
    NOT_IDENTITY = ("micro_batch", "workers", "device", "checkpoint_seconds", "compile", "recompute")

    def __post_init__(self):
        for key in ("epochs", "batch_size", "images_per_class", "step_epochs"):
            if getattr(self, key) < 1:
                raise ValueError(f"training: {key} = {getattr(self, key)}; it must be at least 1")
        for key, known in dict(schedule=("constant", "step", "cosine"), precision=("auto", "float32", "bfloat16")).items():
            if getattr(self, key) not in known:
                raise ValueError(f"training: {key} = {getattr(self, key)!r}; known: {', '.join(known)}")


@dataclass(frozen=True)
class Run:
    """One training with its evaluation: everything that can change its numbers."""

    data: Data = field(default_factory=Data)
    backbone: str = "mini_vit"  # "mini_vit" or the full name of a timm vision transformer
    pretrained: str = "embedded"  # "embedded" (mini_vit), "hub" (timm), "random", or a file of weights
    method: Method = field(default_factory=lambda: METHODS["puma"])
    dim: int = 128  # embedding dimensions
    loss: str = "curricularface"  # a name of pumalib.losses
    loss_settings: Mapping = field(default_factory=dict)  # hyperparameters of the loss that differ from its defaults
    training: Training = field(default_factory=Training)
    seed: int = 0  # of initialisation, batches, augmentation and gates

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Run:
        return _build(cls, json.loads(text), "run.json")

    def identity(self, data_digest: str, weights_digest: str) -> str:
        """SHA-256 of what can change the numbers: the settings and the contents of data and weights, not their place."""
        content = dataclasses.asdict(self)
        content["data"].pop("root")
        content["pretrained"] = weights_digest
        content["data_digest"] = data_digest
        content["numbers"] = NUMBERS
        for key in Training.NOT_IDENTITY:
            content["training"].pop(key)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


NUMBERS = 1  # raise it when a change of the code changes the numbers of finished runs


@dataclass(frozen=True)
class Profile:
    """Where the data is and how much is spent: the part of every `Run` that a table does not choose."""

    name: str
    data: Data = field(default_factory=Data)
    backbone: str = "mini_vit"
    pretrained: str = "embedded"
    dim: int = 128
    seeds: tuple[int, ...] = (0,)
    side_seeds: tuple[int, ...] = ()  # of the rows beside the headline ones (Tables 2(c) and 3, Fig. 7 and 8); () = seeds
    rank_scale: float = 1.0  # x the ranks of adapters and LoRA, which METHODS gives for a width of 384
    training: Training = field(default_factory=Training)
    full: Mapping = field(default_factory=dict)  # settings of `training` when the backbone is tuned
    frozen: Mapping = field(default_factory=dict)  # settings of `training` when it is frozen

    def run(self, method_name: str | Method = "puma", *, loss: str = "curricularface", seed: int = 0,
            loss_settings: Mapping | None = None, dim: int | None = None, data: Data | None = None,
            training: Mapping | None = None, **settings) -> Run:  # fmt: skip
        """The `Run` of one row: a method (with settings such as `adapter_keep=0.3`), a loss, a seed."""
        chosen = method(method_name)
        ranks = {key: round(self.rank_scale * getattr(chosen, key)) for key in ("adapter_rank", "lora_rank")}
        chosen = method(chosen, **{**ranks, **settings})
        recipe = {**(self.full if chosen.tune_backbone else self.frozen), **(training or {})}
        return Run(
            data=data or self.data, backbone=self.backbone, pretrained=self.pretrained, method=chosen,
            dim=dim or self.dim, loss=loss, loss_settings=dict(loss_settings or {}),
            training=_replace(self.training, recipe, f"profile {self.name!r}, training"), seed=seed,
        )  # fmt: skip


def profile(name: str, **changes) -> Profile:
    """Read `notebooks/profiles/<name>.yaml`, or the YAML file `name`.

    Args:
        name: name of a profile, or path of a YAML file (absolute, or relative to the project).
        **changes: what replaces the file's word where it is not None: `root`, `datasets`, `epochs`,
            `seeds`, `backbone`, `pretrained`, ... (any field of Profile, Data or Training).

    Raises:
        ValueError: no such profile (the message lists them), or an unknown key (naming the nearest).
    """
    file = paths.PROFILES / f"{name}.yaml"
    if not file.is_file():
        file = paths.resolve(name)
    if not file.is_file():
        known = ", ".join(sorted(p.stem for p in paths.PROFILES.glob("*.yaml")))
        raise ValueError(f"no profile {name!r}; known: {known}; or give the path of a YAML file")
    content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{file.name}: a profile is a mapping of settings, not {type(content).__name__}")
    result = _build(Profile, {"name": file.stem, **content}, file.name)
    for recipe in ("full", "frozen"):
        _refuse_unknown(getattr(result, recipe), _names(Training), f"{file.name}, {recipe}")
    return _change(result, {key: value for key, value in changes.items() if value is not None})


def _change(profile: Profile, changes: dict) -> Profile:
    """Put each change where its field lives; `training` fields win over `full` and `frozen`."""
    parts = {"data": _names(Data), "training": _names(Training)}
    _refuse_unknown(changes, [*_names(Profile), *parts["data"], *parts["training"]], f"profile {profile.name!r}")
    if "seeds" in changes:  # an explicit wish is for all rows
        profile = replace(profile, side_seeds=())
    for key, value in changes.items():
        value = tuple(value) if isinstance(value, list) else value
        part = next((part for part, names in parts.items() if key in names), None)
        if part:
            value = replace(getattr(profile, part), **{key: value})
            recipes = {recipe: {k: v for k, v in getattr(profile, recipe).items() if k != key} for recipe in ("full", "frozen")}
            profile = replace(profile, **recipes)
        profile = replace(profile, **{part or key: value})
    return profile


def _names(cls) -> list[str]:
    return [f.name for f in fields(cls)]


def _refuse_unknown(given, known: list[str], where: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where}: unknown setting {key!r}; {hint}known: {', '.join(known)}")


def _replace(value, changes, where: str):
    _refuse_unknown(changes, _names(type(value)), where)
    return replace(value, **changes)


def _build(cls, content: dict, where: str):
    """The dataclass `cls` from plain YAML or JSON, refusing unknown keys and wrong types, lists made tuples."""
    _refuse_unknown(content, _names(cls), where)
    parts = {"data": Data, "method": Method, "training": Training}
    values = {}
    for key, value in content.items():
        if key in parts:
            value = _build(parts[key], value or {}, f"{where}, {key}")
        elif isinstance(value, list):
            value = tuple(value)
        values[key] = value
    try:
        result = cls(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
    for f in fields(cls):
        value, kind = getattr(result, f.name), f.type
        number = kind in ("int", "float") and (isinstance(value, bool) or not isinstance(value, (int, float)))
        if number or (kind == "int" and not isinstance(value, int)) or (kind == "bool" and not isinstance(value, bool)):
            raise ValueError(f"{where}: {f.name} = {value!r} should be {kind} (write 1.0e-4, not 1e-4, in YAML)")
    return result
