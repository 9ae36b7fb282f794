"""An embedding model = backbone + the parts a `Method` names + a head (Fig. 3): Eq. 2 to 10 in their order."""

from functools import partial

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import config
from . import backbones
from .peft import LoRA, SinglePrompt
from .puma import PromptPool, StochasticAdapter, draw_gates

BRANCHES = ("attn", "mlp")


class EmbeddingModel(nn.Module):
    """Images (B, 3, H, W) to embeddings (B, dim), L2-normalised unless `normalise` is off (`loss.normalised_input`).
    Without a head `dim` is the backbone's width.  ValueError: `method` adds what this timm model cannot carry."""

    def __init__(self, backbone: nn.Module, method: config.Method, dim: int, normalise: bool = True):
        super().__init__()
        self.backbone, self.method, self.normalise = backbone, method, normalise
        self.recompute = False  # True: recompute layers in the backward pass; same gradients, less memory
        self.plain_vit = isinstance(backbone, VisionTransformer) and all(
            type(b) is Block and type(b.attn) is Attention and getattr(b.attn, "gate", None) is None
            for b in backbone.blocks  # each x + attn(norm(x)), then x + mlp(norm(x))
        )
        self.reads_class_token = self.plain_vit and backbone.global_pool == "token" and backbone.attn_pool is None
        m, width, layers = method, backbone.num_features, len(backbone.blocks) if self.plain_vit else 0
        if not layers and (m.prompts or m.adapter_rank or m.lora_rank):
            why = f"{type(backbone).__name__} has none: use 'full', 'linear' or 'mlp3'"
            raise ValueError(f"method {m.name!r} adds to transformer blocks of the form x + f(norm(x)); {why}")
        backbone.requires_grad_(m.tune_backbone)
        self.prompt = self.adapters = self.lora = None
        if m.prompts > 1 and m.prompt_length:
            self.prompt = PromptPool(width, m.prompts, m.prompt_length, m.prompt_attention)
        elif m.prompts and m.prompt_length:
            self.prompt = SinglePrompt(width, m.prompt_length, layers if m.prompt_deep else 1, m.start)
        if m.adapter_rank:
            adapter = partial(StochasticAdapter, width, m.adapter_rank, m.adapter_scale, m.start)
            branches = BRANCHES if m.adapter_branches == "both" else BRANCHES[1:]
            adapted = layers if m.adapter_layers is None else min(m.adapter_layers, layers)
            self.adapters = nn.ModuleList(nn.ModuleDict({b: adapter() for b in branches}) for _ in range(adapted))
            for layer in self.adapters if m.start == "code" else ():
                layer["mlp"].load_state_dict(layer[branches[0]].state_dict())  # both branches start equal
        if m.lora_rank:
            self.lora = nn.ModuleList(LoRA(width, m.lora_rank, m.lora_targets, m.lora_scale) for _ in range(layers))
        self.dim = width if m.head == "none" else dim
        self.head = nn.Linear(width, dim) if m.head == "linear" else nn.Identity()
        if m.head == "linear" and m.start == "usual":
            nn.init.orthogonal_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        if m.head.startswith("mlp3"):  # the MLP-3 of Table 2(c): 5.2 M parameters for ViT-S
            between, wide = nn.ReLU if m.head == "mlp3-relu" else nn.GELU, nn.Linear(width, 2048)
            self.head = nn.Sequential(wide, between(), nn.Linear(2048, 2048), between(), nn.Linear(2048, dim))

    def train(self, mode: bool = True):
        """As nn.Module.train, but a frozen backbone stays in evaluation mode: frozen means frozen."""
        super().train(mode)
        self.backbone.train(mode and self.method.tune_backbone)
        return self

    def draw_gates(self, images: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The gates of one step, "adapter" and "lora", (L, 2, B) each: random in training, constant in evaluation."""
        m, gates = self.method, {}
        for name, keep, parts in (("adapter", m.adapter_keep, self.adapters), ("lora", m.lora_keep, self.lora)):
            if parts and keep < 1 and self.training:
                gates[name] = draw_gates(keep, len(parts), images, m.adapter_gate, m.adapter_divide, generator)
            elif parts and keep < 1:  # always on, or p if training did not divide by it
                gates[name] = torch.full((len(parts), 2, 1), float(keep > 0 if m.adapter_divide else keep))
        return gates

    def forward(self, images: Tensor, gates: dict[str, Tensor] | None = None, prompt_weights: bool = False):
        """Images (B, 3, H, W), normalised as the backbone expects, to embeddings (B, dim).
        `gates` None: `draw_gates` draws; {}: all open.  `prompt_weights`: with the pool's (B, M) or None (Fig. 4)."""
        features, weights = self._features(images, gates) if self.plain_vit else (self.backbone(images), None)
        embeddings = self.head(features)
        if self.normalise:
            embeddings = F.normalize(embeddings.float(), dim=-1)
        return (embeddings, weights) if prompt_weights else embeddings

    def _features(self, images: Tensor, gates: dict[str, Tensor] | None) -> tuple[Tensor, Tensor | None]:
        """Backbone with prompts and adapters: (B, 3, H, W) -> pooled features (B, D) and prompt weights (B, M)."""
        if gates is None:
            gates = self.draw_gates(len(images))
        always = dict.fromkeys(("adapter", "lora"), [[None, None]] * len(self.backbone.blocks))
        gates = always | {name: gate.to(images.device, non_blocking=True) for name, gate in gates.items()}
        vit, weights, length, prefix = self.backbone, None, 0, self.backbone.num_prefix_tokens
        patches = vit.patch_embed(images)  # E, (B, N, D)
        x = vit._pos_embed(patches)  # Eq. 2, (B, 1 + N, D): class token (and any register tokens), patches
        if self.prompt is not None:
            prompt, weights = self.prompt(patches.flatten(1, -2))  # Eq. 6 to 9, (B, N_p, D) and (B, M)
            if self.method.prompt_position == "cls" and not vit.no_embed_class:
                prompt = prompt + vit.pos_embed[:, :1]
            length = prompt.shape[1]
            x = torch.cat([x[:, :prefix], prompt.to(x.dtype), x[:, prefix:]], 1)  # Eq. 10, (B, 1 + N_p + N, D)
        x = vit.norm_pre(x)
        layer = partial(checkpoint, self._layer, use_reentrant=False) if self.recompute else self._layer
        for number in range(len(vit.blocks)):
            if number and length and self.method.prompt_deep:
                prompt = self.prompt(patches, number)[0].to(x.dtype)
                x = torch.cat([x[:, :prefix], prompt, x[:, prefix + length :]], 1)
            x = layer(number, x, gates)  # Eq. 5
        x = vit.norm(x)
        x = torch.cat([x[:, :prefix], x[:, prefix + length :]], 1)  # pooling sees the patches as ever
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


def build(method, backbone=backbones.PAPER, dim=128, *, pretrained="hub", image_size=None, normalise=True, **settings):
    """The `EmbeddingModel` of these names, see `backbones.create`, initialised from torch's global random state.
    `method` is a name in `config.METHODS` or a `Method`, `settings` its fields to change, as `adapter_keep=0.3`."""
    chosen = config.method(method, **settings)
    return EmbeddingModel(backbones.create(backbone, pretrained, image_size), chosen, dim, normalise)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trainable, total) numbers of parameters."""
    return tuple(sum(p.numel() for p in model.parameters() if p.requires_grad or frozen) for frozen in (False, True))
