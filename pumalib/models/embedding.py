"""An embedding model: a backbone, the parts that a `Method` adds, and a head (Fig. 3)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import config
from . import backbones
from .lora import LoRA
from .parts import BRANCHES, Part, Shapes, own_part, with_own_settings
from .puma import Adapters, Gate, PromptPool
from .vpt import SinglePrompt

# A part may have this many times the parameters of its backbone.
LARGEST_PART = 10
# Heads that keep the width of the backbone's features and ignore `dim`.
OF_THE_BACKBONES_WIDTH = ("none", "whitened")


def build(
    method: str | config.Method,
    backbone: str = backbones.PAPER_BACKBONE,
    dim: int = 128,
    *,
    pretrained: str | bool | Path | None = "hub",
    image_size: int | None = None,
    pooling: str = "avgmax",
    normalise: bool = True,
    **settings: Any,
) -> "EmbeddingModel":
    """Make an `EmbeddingModel` by names, initialised from torch's global random state.

    `method` is a name in `config.METHODS` or a `Method`; `settings` changes its fields, such as
    `adapter_keep=0.3`, or those of its own part.  `backbone`, `pretrained`, `image_size` and
    `pooling` are arguments of `backbones.create`.  Raises ValueError and FileNotFoundError as
    `backbones.create` and `EmbeddingModel` do.
    """
    chosen = config.method(method, **with_own_settings(method, settings))
    return EmbeddingModel(
        backbones.create(backbone, pretrained, image_size, pooling), chosen, dim, normalise
    )


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count the (trainable, total) parameters."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    return trainable, total


class EmbeddingModel(nn.Module):
    """A network from images (B, 3, H, W) to embeddings (B, dim).

    They are L2-normalised unless `normalise` is off (`loss.normalised_input`).  Without a head, or
    with a whitened one, `dim` is the backbone's width.  Raises ValueError if `method` adds parts
    that do not fit this timm model, or are too large.
    """

    # timm's models have no types.
    backbone: Any

    def __init__(
        self, backbone: nn.Module, method: config.Method, dim: int, normalise: bool = True
    ):
        super().__init__()
        self.backbone = backbone
        self.method = method
        self.normalise = normalise
        # True: recompute layers in the backward pass, for the same gradients with less memory.
        self.recompute = False
        self.plain_vit = _is_plain_vit(backbone)
        # If pooling reads only the class token, nothing after the last attention needs the others.
        self.reads_class_token = (
            self.plain_vit
            and self.backbone.global_pool == "token"
            and self.backbone.attn_pool is None
        )

        width = backbones.features_width(backbone)
        layers = len(self.backbone.blocks) if self.plain_vit else 0
        _check_method(method, backbone, width, layers)
        self.backbone.requires_grad_(method.tune_backbone)
        # Do not reorder these four: each draws from the random state.
        self.prompt = _prompt(method, width, layers)
        self.adapters = _adapters(method, width, layers)
        self.lora = _lora(method, width, layers)
        self.part = _own_part(method, backbone)
        parts = (self.prompt, self.adapters, self.lora, self.part)
        self.parts: tuple[Part, ...] = tuple(part for part in parts if part is not None)
        # Without parts of these two kinds, attention and MLP run timm's own code.
        self.inner_parts = tuple(part for part in self.parts if _changes_activations(part))
        self.attention_parts = tuple(part for part in self.parts if type(part).qkv is not Part.qkv)
        self.head = _head(method, width, dim)
        self.dim = width if method.head in OF_THE_BACKBONES_WIDTH else dim

    def train(self, mode: bool = True) -> "EmbeddingModel":
        """Like nn.Module.train, but a frozen backbone stays in evaluation mode."""
        super().train(mode)
        self.backbone.train(mode and self.method.tune_backbone)
        return self

    def draw_gates(
        self, images: int, generator: torch.Generator | None = None, progress: float = 0.0
    ) -> dict[str, Tensor]:
        """Draw the gates of one step: random in training, constant in evaluation.

        "adapter" and "lora" are (L, 2, B) each, see `puma.Gate`; "part" are those of the method's
        own part.  A part whose gates are always open has no entry.  `progress` is the finished
        share of the training, 0 to 1, before this step.
        """
        gates = {}
        for part in self.parts:
            part.progress = progress
            drawn = part.draw_gates(images, generator)
            if drawn is not None:
                gates[part.gate_name] = drawn
        return gates

    def forward(
        self,
        images: Tensor,
        gates: dict[str, Tensor] | None = None,
        prompt_weights: bool = False,
    ) -> Any:
        """Embed images (B, 3, H, W), normalised as the backbone expects: (B, dim).

        `gates` None: `draw_gates` draws them; {}: all are open.  With `prompt_weights` it returns
        the embeddings and the prompt weights (B, M) of the pool, or None without one (Fig. 4).
        """
        weights = None
        if self.plain_vit:
            features, weights = self._features(images, gates)
        else:
            features = self.backbone(images)
        embeddings = self.head(features)
        if self.normalise:
            embeddings = F.normalize(embeddings.float(), dim=-1)
        if prompt_weights:
            return embeddings, weights
        return embeddings

    def _features(
        self, images: Tensor, gates: dict[str, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run transformer and parts: pooled features (B, D), and the pool's weights (B, M)."""
        if gates is None:
            # Not len(): an export would fix the number of images.
            gates = self.draw_gates(images.shape[0])
        gates = {name: gate.to(images.device, non_blocking=True) for name, gate in gates.items()}
        vit = self.backbone
        # E, (B, N, D)
        patches = self._changed(0, "patch_embed", vit.patch_embed(images), gates)
        # Eq. 2, (B, 1 + N, D): class token (and any register tokens), patches
        x = vit._pos_embed(patches)
        patches = patches.flatten(1, -2)
        lengths = [0] * len(self.parts)
        # Eq. 10, (B, 1 + N_p + N, D)
        x, weights = self._with_tokens(x, patches, 0, lengths, gates)
        x = vit.norm_pre(x)

        layer = self._layer
        if self.recompute:
            layer = partial(checkpoint, self._layer, use_reentrant=False)
        for number in range(len(vit.blocks)):
            if number > 0:
                x, _ = self._with_tokens(x, patches, number, lengths, gates)
            x = layer(number, x, gates)
        x = self._changed(0, "norm", vit.norm(x), gates)

        # Pooling sees the usual tokens, without those of the parts.
        prefix = vit.num_prefix_tokens
        x = torch.cat([x[:, :prefix], x[:, prefix + sum(lengths) :]], 1)
        return vit.forward_head(x, pre_logits=True), weights

    def _with_tokens(
        self,
        x: Tensor,
        patches: Tensor,
        layer: int,
        lengths: list[int],
        gates: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Put the parts' tokens for `layer` after the prefix of `x`, replacing their earlier ones.

        `lengths` is the number of tokens of each part, and is updated.  The second value is the
        pool's weights of its prompts, or None.
        """
        weights = None
        # Some networks have no class token, or none with a position.
        has_position = self.backbone.cls_token is not None and not self.backbone.no_embed_class
        start = self.backbone.num_prefix_tokens
        for place, part in enumerate(self.parts):
            given = part.tokens(patches, layer, gates.get(part.gate_name))
            if given is not None:
                tokens, chosen = given
                if layer == 0 and part.at_class_position and has_position:
                    tokens = tokens + self.backbone.pos_embed[:, :1]
                behind = x[:, start + lengths[place] :]
                x = torch.cat([x[:, :start], tokens.to(x.dtype), behind], 1)
                lengths[place] = tokens.shape[1]
                if chosen is not None:
                    weights = chosen
            start += lengths[place]
        return x, weights

    def _layer(self, number: int, x: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """One layer (Eq. 5): a branch and its additions share one normalised input (B, N, D)."""
        block = self.backbone.blocks[number]
        h = self._changed(number, "norm1", block.norm1(x), gates)
        out = block.ls1(self._attention(number, h, gates))
        x = out + x
        for more in self._additions(number, "attn", h, out, gates):
            x = x + more

        x = self._still_read(number, x)
        h = self._changed(number, "norm2", block.norm2(x), gates)
        out = block.ls2(self._mlp(number, h, gates))
        x = out + x
        for more in self._additions(number, "mlp", h, out, gates):
            x = x + more
        return x

    def _attention(self, number: int, h: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Multi-head attention of the normalised input, with the parts' changes."""
        attn = self.backbone.blocks[number].attn
        if not self.attention_parts and not self.inner_parts:
            return attn(h)
        side_by_side = self._changed(number, "qkv", attn.qkv(h), gates)
        products = list(side_by_side.chunk(3, dim=-1))
        for part in self.attention_parts:
            products = part.qkv(number, h, products, gates.get(part.gate_name))
        return self._changed(number, "proj", _attend(attn, products), gates)

    def _mlp(self, number: int, h: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """The MLP of the normalised input, with the parts' changes."""
        mlp = self.backbone.blocks[number].mlp
        if not self.inner_parts:
            return mlp(h)
        hidden = self._changed(number, "fc1", mlp.fc1(h), gates)
        active = self._changed(number, "act", mlp.act(hidden), gates)
        out = mlp.fc2(mlp.norm(mlp.drop1(active)))
        return mlp.drop2(self._changed(number, "fc2", out, gates))

    def _changed(self, number: int, place: str, x: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """The activations `x` at one of `parts.PLACES`, after the parts have changed them."""
        for part in self.inner_parts:
            x = part.activations(number, place, x, gates.get(part.gate_name))
        return x

    def _additions(
        self, number: int, branch: str, h: Tensor, out: Tensor, gates: dict[str, Tensor]
    ) -> Iterator[Tensor]:
        """Yield the parts' additions to a branch of this layer."""
        for part in self.parts:
            more = part.addition(number, branch, h, out, gates.get(part.gate_name))
            if more is not None:
                yield more

    def _still_read(self, number: int, x: Tensor) -> Tensor:
        """`x`, but only its class token before the last MLP, if pooling reads no other.

        That saves up to a fifth of a step.
        """
        last = number == len(self.backbone.blocks) - 1
        if last and self.reads_class_token:
            return x[:, : self.backbone.num_prefix_tokens]
        return x


def _is_plain_vit(backbone: nn.Module) -> bool:
    """Whether each block is x + attn(norm(x)), then x + mlp(norm(x)), with ordinary attention."""
    if not isinstance(backbone, VisionTransformer):
        return False
    return all(
        type(block) is Block
        and type(block.attn) is Attention
        and getattr(block.attn, "gate", None) is None
        for block in backbone.blocks
    )


def _attend(attn: Any, products: list[Tensor]) -> Tensor:
    """Timm's `Attention` from its query, key and value on, (B, N, D) each."""
    # (B, heads, N, D / heads)
    q, k, v = (part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for part in products)
    q = attn.q_norm(q)
    k = attn.k_norm(k)
    if attn.fused_attn:
        x = F.scaled_dot_product_attention(q, k, v)
    else:
        x = (q * attn.scale @ k.mT).softmax(-1) @ v
    return attn.proj(attn.norm(x.transpose(1, 2).flatten(2)))


# ---- the parts of a method


def _check_method(method: config.Method, backbone: nn.Module, width: int, layers: int) -> None:
    """Raise ValueError if the method does not fit the backbone, or its parts are too large."""
    adds = method.prompts or method.adapter_rank or method.lora_rank or method.part
    if adds and not layers:
        what = f"method {method.name!r} adds to the plain blocks of a timm VisionTransformer"
        why = f"{type(backbone).__name__} has none: use 'full', 'linear' or 'mlp3'"
        raise ValueError(f"{what}, x + f(norm(x)); {why}")
    if method.prompt_deep and method.prompts > 1:
        why = f"prompts = {method.prompts} is a pool, which is put before the first layer alone"
        raise ValueError(f"prompt_deep needs one prompt (prompts = 1); {why}")

    # Checked before anything is allocated: there may not be enough memory for it.
    prompts = f"prompts = {method.prompts} of prompt_length = {method.prompt_length}"
    prompt_layers = layers if method.prompt_deep else 1
    branches = len(_branches(method))
    targets = len(method.lora_targets)
    sizes = {
        prompts: prompt_layers * method.prompts * method.prompt_length * width,
        f"adapter_rank = {method.adapter_rank}": (
            _adapted_layers(method, layers) * branches * 2 * width * method.adapter_rank
        ),
        f"lora_rank = {method.lora_rank}": layers * targets * 2 * width * method.lora_rank,
    }
    _, total = count_parameters(backbone)
    for setting, size in sizes.items():
        if size > LARGEST_PART * total:
            what = f"method {method.name!r}: {setting} on a backbone of width {width}"
            why = f"more than {LARGEST_PART} times the backbone's {total:,}"
            remedy = f"choose less (a rank is usually at most the width, {width})"
            raise ValueError(f"{what} would have {size:,} parameters, {why}; {remedy}")


def _branches(method: config.Method) -> tuple[str, ...]:
    """The branches with adapters."""
    if method.adapter_branches == "both":
        return BRANCHES
    return ("mlp",)


def _adapted_layers(method: config.Method, layers: int) -> int:
    if method.adapter_layers is None:
        return layers
    return min(method.adapter_layers, layers)


def _prompt(method: config.Method, width: int, layers: int) -> PromptPool | SinglePrompt | None:
    if not method.prompts or not method.prompt_length:
        return None
    prompt: PromptPool | SinglePrompt
    if method.prompts > 1:
        prompt = PromptPool(width, method.prompts, method.prompt_length, method.prompt_attention)
    else:
        prompt_layers = layers if method.prompt_deep else 1
        prompt = SinglePrompt(width, method.prompt_length, prompt_layers, method.start)
    prompt.at_class_position = method.prompt_position == "cls"
    return prompt


def _adapters(method: config.Method, width: int, layers: int) -> Adapters | None:
    if not method.adapter_rank:
        return None
    return Adapters(
        width,
        _adapted_layers(method, layers),
        method.adapter_rank,
        branches=_branches(method),
        scale=method.adapter_scale,
        start=method.start,
        gate=_gate(method, method.adapter_keep),
    )


def _gate(method: config.Method, keep: float) -> Gate:
    return Gate(keep, method.adapter_gate, method.adapter_divide, method.adapter_schedule)


def _lora(method: config.Method, width: int, layers: int) -> LoRA | None:
    if not method.lora_rank:
        return None
    return LoRA(
        width,
        layers,
        method.lora_rank,
        targets=method.lora_targets,
        scale=method.lora_scale,
        gate=_gate(method, method.lora_keep),
    )


def _own_part(method: config.Method, backbone: Any) -> Part | None:
    if not method.part:
        return None
    part = own_part(method, _shapes(backbone))
    kinds = {type(block.mlp) for block in backbone.blocks}
    if _changes_activations(part) and kinds != {Mlp}:
        what = f"part {method.part!r} changes activations within timm's Mlp"
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"{what}, and this backbone has {names}; choose a plain ViT")
    return part


def _shapes(backbone: Any) -> Shapes:
    """The sizes of a backbone with plain blocks."""
    block = backbone.blocks[0]
    return Shapes(
        width=backbone.num_features,
        layers=len(backbone.blocks),
        hidden=block.mlp.fc2.in_features,
        heads=block.attn.num_heads,
    )


def _changes_activations(part: Part) -> bool:
    return type(part).activations is not Part.activations


def _head(method: config.Method, width: int, dim: int) -> nn.Module:
    if method.head == "none":
        return nn.Identity()
    if method.head == "whitened":
        return _unfitted(width)
    if method.head == "linear":
        head = nn.Linear(width, dim)
        if method.start == "usual":
            nn.init.orthogonal_(head.weight)
            nn.init.zeros_(head.bias)
        return head
    # The MLP-3 of Table 2(c): 5.2 M parameters for ViT-S.
    between = nn.ReLU if method.head == "mlp3-relu" else nn.GELU
    return nn.Sequential(
        nn.Linear(width, 2048),
        between(),
        nn.Linear(2048, 2048),
        between(),
        nn.Linear(2048, dim),
    )


def _unfitted(width: int) -> nn.Linear:
    """The head "whitened" before it is computed: the identity; it is never trained."""
    # It draws no random numbers, and is on the default device, which may be "meta".
    head = nn.utils.skip_init(nn.Linear, width, width, device=torch.empty(0).device)
    nn.init.eye_(head.weight)
    nn.init.zeros_(head.bias)
    return head.requires_grad_(False)
