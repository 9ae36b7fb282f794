"""An embedding model = backbone + the parts a `Method` names + a head (Fig. 3).

The forward pass is Eq. 2 to 10 in their order; what a method lacks is not there.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import config
from . import backbones
from .peft import LoRA, SinglePrompt, mlp3
from .puma import PromptPool, StochasticAdapter, draw_gates

BRANCHES = ("attn", "mlp")


class EmbeddingModel(nn.Module):
    """Images (B, 3, H, W) to embeddings (B, dim), L2-normalised unless `normalise` is off.

    Args:
        backbone: a timm model without classifier (`backbones.create`).
        dim: dimensions of the embedding; without a head the backbone's width, whatever is asked.
        normalise: False for losses that want the head's raw output (`loss.normalised_input` is False).

    Raises:
        ValueError: the method adds tokens or branches that this backbone cannot carry.
    """

    def __init__(self, backbone: nn.Module, method: config.Method, dim: int, normalise: bool = True):
        super().__init__()
        self.backbone, self.method, self.normalise = backbone, method, normalise
        self.recompute = False  # True: recompute layers in the backward pass; same gradients, less memory
        self.plain_vit = isinstance(backbone, VisionTransformer) and all(map(_is_plain, backbone.blocks))
        self.reads_class_token = self.plain_vit and backbone.global_pool == "token" and backbone.attn_pool is None
        m, width, layers = method, backbone.num_features, len(backbone.blocks) if self.plain_vit else 0
        if not layers and (m.prompts or m.adapter_rank or m.lora_rank):
            raise ValueError(
                f"method {m.name!r} adds tokens or branches to transformer blocks of the form x + f(norm(x)); "
                f"{type(backbone).__name__} has none: use 'full', 'linear' or 'mlp3'"
            )
        backbone.requires_grad_(m.tune_backbone)
        self.prompt = self.adapters = self.lora = None
        if m.prompts > 1 and m.prompt_length:
            self.prompt = PromptPool(width, m.prompts, m.prompt_length, m.prompt_attention)
        elif m.prompts == 1 and m.prompt_length:
            self.prompt = SinglePrompt(width, m.prompt_length, layers if m.prompt_deep else 1)
        if m.adapter_rank:
            adapter = partial(StochasticAdapter, width, m.adapter_rank, m.adapter_scale)
            branches = BRANCHES if m.adapter_branches == "both" else BRANCHES[1:]
            adapted = layers if m.adapter_layers is None else min(m.adapter_layers, layers)
            self.adapters = nn.ModuleList(nn.ModuleDict({b: adapter() for b in branches}) for _ in range(adapted))
        if m.lora_rank:
            self.lora = nn.ModuleList(LoRA(width, m.lora_rank, m.lora_targets, m.lora_scale) for _ in range(layers))
        self.dim = width if m.head == "none" else dim
        self.head = mlp3(width, dim) if m.head == "mlp3" else nn.Identity()
        if m.head == "linear":
            self.head = nn.Linear(width, dim)
            nn.init.orthogonal_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def train(self, mode: bool = True) -> EmbeddingModel:
        """As nn.Module.train, but a frozen backbone stays in evaluation mode: frozen means frozen."""
        super().train(mode)
        self.backbone.train(mode and self.method.tune_backbone)
        return self

    def draw_gates(self, images: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The random gates of one training step: {"adapter": (L, 2, B), "lora": (L, 2, B)}, those there are.

        They are drawn here, not inside the layers, so that a batch computed in parts (micro-batches) or
        twice has the same gates, and a resumed run the gates of an uninterrupted one.
        """
        per, divide = self.method.adapter_gate, self.method.adapter_divide
        return {name: draw_gates(keep, n, images, per, divide, generator) for name, keep, n in self._stochastic()}

    def test_gates(self) -> dict[str, Tensor]:
        """The constant gates of evaluation: always on, or p if training did not divide by it."""
        divide = self.method.adapter_divide
        return {n: torch.full((layers, 2, 1), float(p > 0 if divide else p)) for n, p, layers in self._stochastic()}

    def _stochastic(self) -> list[tuple[str, float, int]]:
        parts = ("adapter", self.method.adapter_keep, self.adapters), ("lora", self.method.lora_keep, self.lora)
        return [(name, keep, len(layers)) for name, keep, layers in parts if layers is not None and keep < 1]

    def forward(self, images: Tensor, gates: dict[str, Tensor] | None = None, prompt_weights: bool = False):
        """Images (B, 3, H, W), normalised as the backbone expects, to embeddings (B, dim).

        Args:
            gates: from `draw_gates`; None: drawn now in training, the constant ones in evaluation; {}: all open.
            prompt_weights: return the pool's weights (B, M) too, None without a pool (Fig. 4).
        """
        features, weights = self._features(images, gates) if self.plain_vit else (self.backbone(images), None)
        embeddings = self.head(features)
        if self.normalise:
            embeddings = F.normalize(embeddings.float(), dim=-1)
        return (embeddings, weights) if prompt_weights else embeddings

    def _features(self, images: Tensor, gates: dict[str, Tensor] | None) -> tuple[Tensor, Tensor | None]:
        """Backbone with prompts and adapters: (B, 3, H, W) -> pooled features (B, D) and prompt weights (B, M)."""
        if gates is None:
            gates = self.draw_gates(len(images)) if self.training else self.test_gates()
        vit, weights, length = self.backbone, None, 0
        always = dict.fromkeys(("adapter", "lora"), [[None, None]] * len(vit.blocks))
        gates = always | {name: gate.to(images.device, non_blocking=True) for name, gate in gates.items()}
        patches = vit.patch_embed(images)  # E, (B, N, D)
        x = vit._pos_embed(patches)  # Eq. 2, (B, 1 + N, D): class token (and any register tokens), patches
        if self.prompt is not None:
            prompt, weights = self.prompt(patches.flatten(1, -2))  # Eq. 6 to 9, (B, N_p, D) and (B, M)
            if self.method.prompt_position == "cls" and not vit.no_embed_class:
                prompt = prompt + vit.pos_embed[:, :1]
            x, length = self._with_prompt(x, prompt), prompt.shape[1]  # Eq. 10, (B, 1 + N_p + N, D)
        x = vit.norm_pre(x)
        layer = partial(checkpoint, self._layer, use_reentrant=False) if self.recompute else self._layer
        for number in range(len(vit.blocks)):
            if number and length and self.method.prompt_deep:
                x = self._with_prompt(x, self.prompt(patches, number)[0], replaced=length)
            x = layer(number, x, gates)  # Eq. 5
        x = self._with_prompt(vit.norm(x), x[:, :0], replaced=length)  # pooling sees the patches as ever
        return vit.forward_head(x, pre_logits=True), weights

    def _layer(self, number: int, x: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Eq. 5: each branch and its adapter read the same normalised input, (B, N, D) -> (B, N, D)."""
        block, lora = self.backbone.blocks[number], self.lora and self.lora[number]
        h = block.norm1(x)
        msa = lora(block.attn, h, gates["lora"][number][0]) if lora else block.attn(h)
        x = block.ls1(msa) + x + self._adapter(number, "attn", h, gates)
        x = self._still_read(number, x)
        h = block.norm2(x)
        return block.ls2(block.mlp(h)) + x + self._adapter(number, "mlp", h, gates)

    def _adapter(self, number: int, branch: str, h: Tensor, gates: dict[str, Tensor]) -> Tensor | float:
        """gamma times the adapter of Eq. 4, or 0 where there is none."""
        if self.adapters is None or number >= len(self.adapters) or branch not in self.adapters[number]:
            return 0.0
        return self.adapters[number][branch](h, gates["adapter"][number][BRANCHES.index(branch)])

    def _still_read(self, number: int, x: Tensor) -> Tensor:
        """`x`; before the last MLP the class token alone, if pooling reads no other (saves up to a fifth of a step)."""
        last = number == len(self.backbone.blocks) - 1
        return x[:, : self.backbone.num_prefix_tokens] if last and self.reads_class_token else x

    def _with_prompt(self, x: Tensor, prompt: Tensor, replaced: int = 0) -> Tensor:
        """[class token, prompt, patches], in place of the `replaced` prompt tokens that stood there."""
        prefix = self.backbone.num_prefix_tokens
        return torch.cat([x[:, :prefix], prompt.to(x.dtype), x[:, prefix + replaced :]], dim=1)


def _is_plain(block: nn.Module) -> bool:
    """Whether a block is x + attn(norm(x)), then x + mlp(norm(x))."""
    return type(block) is Block and type(block.attn) is Attention and getattr(block.attn, "gate", None) is None


def build(
    method, backbone=backbones.PAPER, dim=128, *, pretrained="hub", image_size=None, normalise=True, **settings
) -> EmbeddingModel:
    """An embedding model by names, initialised from torch's global random state.

    Args:
        method: a name in `config.METHODS`, or a `Method`.
        backbone, pretrained, image_size: see `backbones.create`.
        dim, normalise: see `EmbeddingModel`.
        settings: fields of the method to change, for example `adapter_keep=0.3`.

    Raises:
        ValueError: unknown method, setting or backbone, weights that do not fit, a method the backbone cannot carry.
        FileNotFoundError: no weights.
    """
    chosen = config.method(method, **settings)
    return EmbeddingModel(backbones.create(backbone, pretrained, image_size), chosen, dim, normalise)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trainable, total) numbers of parameters."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)
