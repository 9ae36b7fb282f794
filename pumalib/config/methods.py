"""The methods: how a backbone is adapted.  A new one is a line of `_METHODS`."""

from typing import Any, Literal, Self

from pydantic import ValidationInfo, model_validator
from pydantic.dataclasses import dataclass

from .reading import (
    CHECKED,
    Count,
    Number,
    Share,
    added,
    changed,
    is_asked_for,
    names_of,
    require_known,
    unknown,
)


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
    # One Bernoulli gate per image ("sample") or per batch, for each layer and branch.
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
        if is_asked_for(info) and self.prompt_deep and self.prompts > 1:
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


def method(name: str | Method, /, **settings: Any) -> Method:
    """The method called `name`, or a `Method` itself, with some settings changed.

    Raises ValueError, which lists the known ones, for an unknown method or setting.
    """
    if isinstance(name, Method):
        chosen = name
    elif name in METHODS:
        chosen = METHODS[name]
    else:
        raise ValueError(unknown(name, METHODS, "method"))
    where = f"method {chosen.name!r}"
    require_known(where, settings, settings_of_method())
    return changed(chosen, settings, where)


def settings_of_method() -> list[str]:
    """The fields of a `Method` that may be set: all but its name."""
    return [name for name in names_of(Method) if name != "name"]
