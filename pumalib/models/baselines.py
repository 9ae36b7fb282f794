"""The parameter-efficient baselines of Table 2(c) that PUMA's own parts do not cover: VPT, LoRA, the MLP head.

AdaptFormer is `puma.StochasticAdapter` always on and beside the MLP alone; linear embedding is the head alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class SinglePrompt(nn.Module):
    """One learnable prompt for every image: visual prompt tuning (Jia et al., ECCV 2022).

    Args:
        width: D.
        length: tokens of the prompt.
        layers: 1 for VPT-shallow; L for VPT-deep, which replaces the prompt tokens before every layer.
    """

    def __init__(self, width: int, length: int = 8, layers: int = 1):
        super().__init__()
        self.prompts = nn.Parameter(nn.init.trunc_normal_(torch.empty(layers, length, width), std=0.02))

    def forward(self, images: int, layer: int = 0) -> Tensor:
        """The prompt before this layer for so many images: (B, N_p, D)."""
        return self.prompts[layer].expand(images, -1, -1)


class LoRA(nn.Module):
    """A low-rank change of two of the query, key and value products (Hu et al., ICLR 2022).

    Args:
        width: D.
        rank: the bottleneck of each change.
        targets: which of "q", "k", "v" are changed, for example "qv".
        scale: fixed factor.
    """

    def __init__(self, width: int, rank: int, targets: str = "qv", scale: float = 1.0):
        super().__init__()
        self.targets = ["qkv".index(letter) for letter in targets]
        self.scale = scale
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in targets)
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in targets)
        for down, up in zip(self.down, self.up, strict=True):
            nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
            nn.init.zeros_(up.weight)

    def forward(self, h: Tensor, qkv: Tensor, gate: Tensor | None = None) -> list[Tensor]:
        """Normalised input (B, N, D) and frozen product (B, N, 3D) -> changed queries, keys, values, each (B, N, D).

        `gate` is (B,) or (1,), drawn as for a stochastic adapter; None: always on.
        """
        parts = list(qkv.chunk(3, dim=-1))
        for target, down, up in zip(self.targets, self.down, self.up, strict=True):
            hidden = down(h)  # (B, N, r)
            hidden = hidden * (self.scale if gate is None else (self.scale * gate).view(-1, 1, 1).to(hidden.dtype))
            parts[target] = parts[target] + up(hidden)
        return parts


def mlp3(width: int, dim: int, hidden: int = 2048) -> nn.Sequential:
    """The MLP-3 embedding of Table 2(c): D -> 2048 -> 2048 -> dim with ReLU between (5.2 M parameters for ViT-S)."""
    return nn.Sequential(
        nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, dim)
    )
