"""LoRA: a low-rank change of attention (Hu et al., ICLR 2022), stochastic in Table 7."""

import math
from typing import cast

import torch
from torch import Tensor, nn

from .parts import Part
from .puma import Gate, gated


class LowRank(nn.Module):
    """A low-rank update of one layer's query, key or value projections, those in `targets`."""

    def __init__(self, width: int, rank: int, targets: str = "qv", scale: float = 1.0):
        super().__init__()
        self.targets = ["qkv".index(letter) for letter in targets]
        self.scale = scale
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in targets)
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in targets)
        for down in self.down:
            nn.init.kaiming_uniform_(cast(nn.Linear, down).weight, a=math.sqrt(5))
        for up in self.up:
            nn.init.zeros_(cast(nn.Linear, up).weight)

    def forward(
        self, h: Tensor, products: list[Tensor], gate: Tensor | None = None
    ) -> list[Tensor]:
        """Add the low-rank update to query, key and value (B, N, D) of the normalised input `h`.

        `h` is (B, N, D).  `gate` is gamma, (B,) or (1,), as in a stochastic adapter; None: always
        on.
        """
        changed = list(products)
        for target, down, up in zip(self.targets, self.down, self.up):
            changed[target] = changed[target] + up(gated(down(h), self.scale, gate))
        return changed


class LoRA(Part, nn.ModuleList):
    """The low-rank updates of all layers: `lora[layer]`."""

    gate_name = "lora"

    def __init__(
        self,
        width: int,
        layers: int,
        rank: int,
        *,
        targets: str = "qv",
        scale: float = 1.0,
        gate: Gate | None = None,
    ):
        super().__init__(LowRank(width, rank, targets, scale) for _ in range(layers))
        self.gate = gate or Gate()

    def draw_gates(self, images: int, generator: torch.Generator | None) -> Tensor | None:
        """The gates (L, 2, B) of one step; LoRA uses the first of each layer's two."""
        return self.gate.draw(len(self), images, self.training, generator, self.progress)

    def qkv(
        self, layer: int, h: Tensor, products: list[Tensor], gates: Tensor | None
    ) -> list[Tensor]:
        """This layer's query, key and value with the low-rank update."""
        gate = None
        if gates is not None:
            gate = gates[layer, 0]
        return self[layer](h, products, gate)
