"""What PUMA's parts do not cover of Table 2(c): VPT and LoRA; AdaptFormer is `StochasticAdapter` beside the MLP."""

import math

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from .puma import gated


class SinglePrompt(nn.Module):
    """One prompt for every image: VPT-shallow, or VPT-deep, new before each of `layers` (Jia et al., ECCV 2022)."""

    def __init__(self, width: int, length: int = 8, layers: int = 1, start: str = "code"):
        super().__init__()
        prompts, bound = torch.empty(layers, length, width), 0.045 * math.sqrt(3 * 384 / width)  # std 0.045 for ViT-S
        usual = nn.init.trunc_normal_(prompts, std=0.02)
        self.prompts = nn.Parameter(nn.init.uniform_(prompts, -bound, bound) if start == "code" else usual)

    def forward(self, patches: Tensor, layer: int = 0) -> tuple[Tensor, None]:
        """The prompt before this layer for each of B images, (B, N_p, D), and no weights."""
        return self.prompts[layer].expand(len(patches), -1, -1), None


class LoRA(nn.Module):
    """A low-rank change of the query, key and value products that `targets` names (Hu et al., ICLR 2022)."""

    def __init__(self, width: int, rank: int, targets: str = "qv", scale: float = 1.0):
        super().__init__()
        self.targets, self.scale = ["qkv".index(letter) for letter in targets], scale
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in targets)
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in targets)
        for down, up in zip(self.down, self.up):
            nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
            nn.init.zeros_(up.weight)

    def forward(self, attn: Attention, h: Tensor, gate: Tensor | None = None) -> Tensor:
        """MSA of the normalised input (B, N, D) with changed products; `gate` as for a stochastic adapter."""
        qkv = list(attn.qkv(h).chunk(3, dim=-1))
        for target, down, up in zip(self.targets, self.down, self.up):
            qkv[target] = qkv[target] + up(gated(down(h), self.scale, gate))
        q, k, v = (part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for part in qkv)  # (B, heads, N, D / heads)
        q, k = attn.q_norm(q), attn.k_norm(k)
        x = F.scaled_dot_product_attention(q, k, v) if attn.fused_attn else (q * attn.scale @ k.mT).softmax(-1) @ v
        return attn.proj(attn.norm(x.transpose(1, 2).flatten(2)))
