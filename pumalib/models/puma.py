"""PUMA: stochastic adapters beside every block, and a conditional prompt per image (Sec. 4).

Shapes: B images, N tokens, D width of the backbone, L layers, r bottleneck of an adapter, M prompts
of N_p tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import BRANCHES, Part

# ---- gates: what makes an adapter stochastic


def draw_gates(
    keep: float,
    layers: int,
    images: int,
    *,
    per: str = "sample",
    divide: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw the gamma of Eq. 5 for one training step: independent Bernoulli(keep).

    (L, 2, B) for layers, branches and images with `per` "sample", as in the authors' code, or
    (L, 2, 1) with `per` "batch".  `divide`: by p = `keep`, so that the expectation is 1.
    """
    if per == "batch":
        images = 1
    gates = torch.bernoulli(torch.full((layers, 2, images), float(keep)), generator=generator)
    if divide and keep > 0:
        return gates / keep
    return gates


@dataclass(frozen=True)
class Gate:
    """How and when the gamma of Eq. 5 is drawn; see `draw_gates` for `keep`, `per` and `divide`.

    `schedule` "constant" draws it in every training step, "early" only in the first half of the
    steps, "late" only in the second half; in the other half every gate is open.  These are early
    and late dropout (Liu et al., ICML 2023), switched abruptly at half of the training.
    """

    keep: float = 1.0
    per: str = "sample"
    divide: bool = True
    schedule: str = "constant"

    def is_drawn(self, progress: float) -> bool:
        """Whether gates are drawn at this finished share of the training, 0 to 1."""
        if self.schedule == "early":
            return progress < 0.5
        if self.schedule == "late":
            return progress >= 0.5
        return True

    def draw(
        self,
        layers: int,
        images: int,
        training: bool,
        generator: torch.Generator | None,
        progress: float = 0.0,
    ) -> Tensor | None:
        """Draw the gates of a training step; in evaluation (L, 2, 1), the same for every image.

        None if every gate is open.  `progress` is the finished share of the training, 0 to 1;
        evaluation uses the expectation of the gates at the end of training.
        """
        if layers == 0 or self.keep >= 1:
            return None
        if not training:
            progress = 1.0
        if not self.is_drawn(progress):
            return None
        if training:
            return draw_gates(
                self.keep,
                layers,
                images,
                per=self.per,
                divide=self.divide,
                generator=generator,
            )
        # The expectation in training: 1 if it divides by p, else p.
        expected = self.keep
        if self.divide and self.keep > 0:
            expected = 1.0
        return torch.full((layers, 2, 1), float(expected))


def gated(hidden: Tensor, scale: float, gate: Tensor | None) -> Tensor:
    """Gamma * s * hidden, (B, N, r): applied inside the bottleneck, where it is cheapest.

    `gate` is gamma, (B,) or (1,); None: always on.
    """
    if gate is None:
        return hidden * scale
    factor = (scale * gate).view(-1, 1, 1)
    return hidden * factor.to(hidden.dtype)


# ---- adapters


class StochasticAdapter(nn.Module):
    """gamma * s * ReLU(h W_down) W_up, in parallel to a branch of a layer (Eq. 4 and 5, Sec. 4.2).

    h is the branch's normalised input.  s = `scale` is 1 in Eq. 5 and 0.1 in the authors' code.
    `start`: initialise W_down as in the authors' code ("code") or as a linear layer ("usual").
    """

    def __init__(self, width: int, rank: int, scale: float = 0.1, start: str = "code"):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.scale = scale
        bound = math.sqrt(1 / width)
        if start == "code":
            bound = math.sqrt(3 / rank)
        nn.init.uniform_(self.down.weight, -bound, bound)
        # Zeros: an untrained adapter changes nothing.
        nn.init.zeros_(self.up.weight)

    def forward(self, h: Tensor, gate: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D); `gate` is gamma, (B,) or (1,); None: always on."""
        hidden = F.relu(self.down(h))
        return self.up(gated(hidden, self.scale, gate))


class Adapters(Part, nn.ModuleList):
    """Stochastic adapters in parallel to the branches of each layer: `adapters[layer][branch]`.

    Eq. 5.  Adapters at the MLP alone are AdaptFormer (Chen et al., NeurIPS 2022).
    """

    gate_name = "adapter"

    def __init__(
        self,
        width: int,
        layers: int,
        rank: int,
        *,
        branches: Sequence[str] = BRANCHES,
        scale: float = 0.1,
        start: str = "code",
        gate: Gate | None = None,
    ):
        super().__init__()
        self.gate = gate or Gate()
        for _ in range(layers):
            beside = nn.ModuleDict()
            for branch in branches:
                beside[branch] = StochasticAdapter(width, rank, scale, start)
            if start == "code":
                # In the authors' code both branches start with equal weights.
                beside["mlp"].load_state_dict(beside[branches[0]].state_dict())
            self.append(beside)

    def draw_gates(self, images: int, generator: torch.Generator | None) -> Tensor | None:
        """The gates (L, 2, B) of one step; see `Gate.draw`."""
        return self.gate.draw(len(self), images, self.training, generator, self.progress)

    def addition(
        self, layer: int, branch: str, h: Tensor, out: Tensor, gates: Tensor | None
    ) -> Tensor | None:
        """Gamma times the adapter of Eq. 4; None if this layer's branch has no adapter."""
        if layer >= len(self):
            return None
        beside = cast(nn.ModuleDict, self[layer])
        if branch not in beside:
            return None
        gate = None
        if gates is not None:
            gate = gates[layer, BRANCHES.index(branch)]
        return beside[branch](h, gate)


# ---- prompts


class PromptPool(Part):
    """A pool of prompts (P_m, K_m, A_m), combined for each image by its patches (Eq. 6 to 9).

    `attention` "free" uses A_m unchanged (Eq. 8), "softmax" normalises it over the features, as in
    the authors' code.
    """

    def __init__(self, width: int, prompts: int = 20, length: int = 8, attention: str = "free"):
        super().__init__()
        self.keys = nn.Parameter(nn.init.orthogonal_(torch.empty(prompts, width)))
        self.attention = nn.Parameter(nn.init.orthogonal_(torch.empty(prompts, width)))
        # In the authors' code all prompts start as copies of one.
        one = nn.init.orthogonal_(torch.empty(length, width))
        self.prompts = nn.Parameter(one.expand(prompts, length, width).clone())
        self.softmax = attention == "softmax"

    def tokens(
        self, patches: Tensor, layer: int, gates: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """The conditional prompt for the first layer (Eq. 10), and its weights; else None."""
        if layer > 0:
            return None
        return self(patches)

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Patch embeddings (B, N, D) -> conditional prompts (B, N_p, D), their weights (B, M)."""
        # In bfloat16 a cosine would have only two digits.
        with torch.autocast(patches.device.type, enabled=False):
            # Eq. 6, (B, D)
            query = (patches.mean(1) + patches.amax(1)).float()
            attention: Tensor = self.attention
            if self.softmax:
                attention = attention.softmax(-1)
            # Eq. 8, (B, M)
            alpha = F.cosine_similarity(query[:, None] * attention, self.keys, dim=-1)
            # Eq. 9, (B, N_p, D)
            prompt = torch.einsum("bm,mnd->bnd", alpha, self.prompts.to(alpha.dtype))
        return prompt.to(patches.dtype), alpha
