"""An embedding model = backbone + the parts a `Method` names + a head (Fig. 3).

The forward pass is Eq. 2 to 10 in their order; what a method lacks is not there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import config
from . import backbones
from .baselines import LoRA, SinglePrompt, mlp3
from .puma import PromptPool, StochasticAdapter, draw_gates

BRANCHES = ("attn", "mlp")


class EmbeddingModel(nn.Module):
    """Images (B, 3, H, W) to embeddings (B, dim), L2-normalised unless `normalise` is off.

    Args:
        backbone: a timm model without classifier (`backbones.create`).
        method: what is added to it and what is trained.
        dim: dimensions of the embedding; without a head the backbone's width, whatever is asked.
        normalise: False for losses that want the head's raw output (`loss.normalised_input` is False).
    """

    def __init__(self, backbone: nn.Module, method: config.Method, dim: int, normalise: bool = True):
        super().__init__()
        self.backbone, self.method, self.normalise = backbone, method, normalise
        self.is_vit = isinstance(backbone, VisionTransformer)
        needs_vit = method.prompts or method.adapter_rank or method.lora_rank
        if needs_vit and not self.is_vit:
            raise ValueError(
                f"method {method.name!r} adds tokens or parallel branches to transformer blocks; "
                f"{type(backbone).__name__} has none: use 'full', 'linear' or 'mlp3'"
            )
        plain = self.is_vit and all(type(b) is Block and _is_plain(b.attn) for b in backbone.blocks)
        if needs_vit and not plain:
            raise ValueError(f"method {method.name!r} needs blocks of the form x + f(norm(x)); those of this {type(backbone).__name__} differ")
        self.reads_class_token = plain and backbone.global_pool == "token" and backbone.attn_pool is None
        self.recompute = False  # True: recompute a block's activations in the backward pass; same gradients, less memory
        backbone.requires_grad_(method.tune_backbone)

        width = backbone.num_features
        layers = len(backbone.blocks) if self.is_vit else 0
        self.prompt = self.adapters = self.lora = None
        if method.prompts > 1 and method.prompt_length:
            self.prompt = PromptPool(width, method.prompts, method.prompt_length, method.prompt_attention)
        elif method.prompts == 1 and method.prompt_length:
            self.prompt = SinglePrompt(width, method.prompt_length, layers if method.prompt_deep else 1)
        if method.adapter_rank:
            branches = BRANCHES if method.adapter_branches == "both" else BRANCHES[1:]
            adapted = layers if method.adapter_layers is None else min(method.adapter_layers, layers)
            self.adapters = nn.ModuleList(
                nn.ModuleDict({b: StochasticAdapter(width, method.adapter_rank, method.adapter_scale) for b in branches})
                for _ in range(adapted)
            )
        if method.lora_rank:
            args = (width, method.lora_rank, method.lora_targets, method.lora_scale)
            self.lora = nn.ModuleList(LoRA(*args) for _ in range(layers))
        if method.head == "none":
            self.head = nn.Identity()
        elif method.head == "mlp3":
            self.head = mlp3(width, dim)
        else:
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
        m, options = self.method, dict(per=self.method.adapter_gate, divide=self.method.adapter_divide, generator=generator)
        gates = {}
        if self.adapters is not None and m.adapter_keep < 1:
            gates["adapter"] = draw_gates(m.adapter_keep, len(self.adapters), images, **options)
        if self.lora is not None and m.lora_keep < 1:
            gates["lora"] = draw_gates(m.lora_keep, len(self.lora), images, **options)
        return gates

    def test_gates(self) -> dict[str, Tensor]:
        """The constant gates of evaluation: always on (no entry), times p if training did not divide by it."""
        m, gates = self.method, {}
        for name, part, keep in (("adapter", self.adapters, m.adapter_keep), ("lora", self.lora, m.lora_keep)):
            if part is not None and (keep == 0 or (keep < 1 and not m.adapter_divide)):
                gates[name] = torch.full((len(part), 2, 1), float(keep))
        return gates

    def forward(self, images: Tensor, gates: dict[str, Tensor] | None = None, prompt_weights: bool = False):
        """Embed a batch.

        Args:
            images: (B, 3, H, W), normalised as the backbone expects.
            gates: from `draw_gates`; None: drawn now in training, the constant ones in evaluation.
            prompt_weights: return the weights of the prompt pool too (Fig. 4).

        Returns:
            (B, dim) embeddings; with `prompt_weights` also (B, M) cosines, or None without a pool.
        """
        if gates is None:
            gates = self.draw_gates(len(images)) if self.training else self.test_gates()
        gates = {name: gate.to(images.device, non_blocking=True) for name, gate in gates.items()}
        features, weights = self._features(images, gates) if self.is_vit else (self.backbone(images), None)
        embeddings = self.head(features)
        if self.normalise:
            embeddings = F.normalize(embeddings.float(), dim=-1)
        return (embeddings, weights) if prompt_weights else embeddings

    def _features(self, images: Tensor, gates: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Backbone with prompts and adapters: (B, 3, H, W) -> pooled features (B, D) and prompt weights."""
        vit = self.backbone
        patches = vit.patch_embed(images)  # (B, N, D), the E of Eq. 2
        x = vit._pos_embed(patches)  # (B, 1 + N, D): class token (and any register tokens), patches
        prefix, length, weights = vit.num_prefix_tokens, 0, None
        if self.prompt is not None:
            if isinstance(self.prompt, PromptPool):
                prompt, weights = self.prompt(patches.flatten(1, -2))
            else:
                prompt = self.prompt(len(images))
            if self.method.prompt_position == "cls" and not vit.no_embed_class:
                prompt = prompt + vit.pos_embed[:, :1]
            length = prompt.shape[1]
            x = torch.cat([x[:, :prefix], prompt.to(x.dtype), x[:, prefix:]], dim=1)  # Eq. 10
        x = vit.norm_pre(x)
        last = len(vit.blocks) - 1
        for layer, block in enumerate(vit.blocks):
            if layer and self.method.prompt_deep and length:
                x = torch.cat([x[:, :prefix], self.prompt(len(images), layer).to(x.dtype), x[:, prefix + length :]], dim=1)
            # Pooling by class token reads nothing else of the last layer's output: compute nothing else.
            rows = prefix if layer == last and self.reads_class_token else None
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(self._block, layer, block, x, gates, rows, use_reentrant=False)
            else:
                x = self._block(layer, block, x, gates, rows)
        x = vit.norm(x)
        if length and not self.reads_class_token:  # the prompts have done their work: pooling sees the patches as ever
            x = torch.cat([x[:, :prefix], x[:, prefix + length :]], dim=1)
        return vit.forward_head(x, pre_logits=True), weights

    def _block(self, layer: int, block: nn.Module, x: Tensor, gates: dict[str, Tensor], rows: int | None = None) -> Tensor:
        """Eq. 3 with Eq. 5: each branch and its adapter read the same normalised input; only the first `rows` tokens leave."""
        adapters = self.adapters[layer] if self.adapters is not None and layer < len(self.adapters) else {}
        lora = self.lora[layer] if self.lora is not None else None
        if not adapters and lora is None and rows is None:
            return block(x)

        def adapted(branch: str, h: Tensor, out: Tensor) -> Tensor:
            if branch not in adapters:
                return out
            gate = gates["adapter"][layer, BRANCHES.index(branch)] if "adapter" in gates else None
            return adapters[branch].add_to(out, h, gate)

        h = block.norm1(x)
        gate = gates["lora"][layer, 0] if "lora" in gates else None
        out = block.attn(h) if lora is None and rows is None else attention(block.attn, h, lora, gate, rows)
        x = x[:, :rows] + adapted("attn", h[:, :rows], block.ls1(out))
        h = block.norm2(x)
        return x + adapted("mlp", h, block.ls2(block.mlp(h)))


def _is_plain(attn: nn.Module) -> bool:
    return type(attn) is Attention and getattr(attn, "gate", None) is None


def attention(attn: Attention, h: Tensor, lora: LoRA | None = None, gate: Tensor | None = None, rows: int | None = None) -> Tensor:
    """timm's `Attention.forward` with LoRA on its way, for the first `rows` queries: (B, N, D) -> (B, rows or N, D)."""
    qkv = attn.qkv(h)
    parts = qkv.chunk(3, dim=-1) if lora is None else lora(h, qkv, gate)
    q, k, v = (part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for part in parts)  # (B, heads, N, D / heads)
    x = F.scaled_dot_product_attention(attn.q_norm(q[:, :, :rows]), attn.k_norm(k), v)
    return attn.proj(attn.norm(x.transpose(1, 2).flatten(2)))


def build(method: str | config.Method, backbone: str = "vit_small_patch16_224.augreg_in21k", dim: int = 128, *,
          pretrained: str | bool | None = "hub", image_size: int | None = None, normalise: bool = True,
          **settings) -> EmbeddingModel:  # fmt: skip
    """An embedding model by names, initialised from torch's global random state.

    Args:
        method: a name in `config.METHODS`, or a `Method`.
        backbone, pretrained, image_size: see `backbones.create`.
        dim: dimensions of the embedding.
        **settings: fields of the method to change, for example `adapter_keep=0.3`.

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
