"""PUMA: a stochastic adapter beside every block and a prompt chosen by the image (Sec. 4, Eq. 4 to 9).

Shapes: B images, N tokens, D width of the backbone, L layers, r bottleneck, M prompts of N_p tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StochasticAdapter(nn.Module):
    """gamma * s * ReLU(h W_down) W_up, in parallel with a branch whose normalised input is h (Eq. 4, 5, Sec. 4.2).

    W_up starts at zero, so an untrained adapter changes nothing.  No biases (the paper's parameter counts).
    The fixed factor s = `scale` is 1 in Eq. 5, 0.1 in the authors' code.
    """

    def __init__(self, width: int, rank: int, scale: float = 0.1):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.scale = scale
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, h: Tensor, gate: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D); `gate` is gamma, (B,) or (1,), as `draw_gates` makes it; None: always on."""
        return self.up(gated(F.relu(self.down(h)), self.scale, gate))


def gated(hidden: Tensor, scale: float, gate: Tensor | None) -> Tensor:
    """gamma * s * hidden, (B, N, r): on the narrow side of a bottleneck the factors cost least."""
    return hidden * (scale if gate is None else (scale * gate).view(-1, 1, 1).to(hidden.dtype))


def draw_gates(keep: float, layers: int, images: int, per="sample", divide=True, generator=None) -> Tensor:
    """The gamma of Eq. 5 for one training step: independent Bernoulli(keep) for each layer and branch.

    Args:
        per: "sample" draws for each image (authors' code, as timm's DropPath), "batch" once for the batch.
        divide: divide by p = keep, so that the adapter that is always on at test has the expectation of training.
        generator: torch.Generator on the CPU; None: the global one.

    Returns:
        (L, 2, B) float32, or (L, 2, 1) per batch; the second axis is MSA, MLP.
    """
    shape = (layers, 2, images if per == "sample" else 1)
    gates = torch.bernoulli(torch.full(shape, float(keep)), generator=generator)
    return gates / keep if divide and keep > 0 else gates


class PromptPool(nn.Module):
    """A key-value memory of prompts (P_m, K_m, A_m) from which an image's patches choose (Eq. 6 to 9, Sec. 4.3).

    `attention`: "free" uses A_m as it is (Eq. 8), "softmax" normalises it over features (authors' code).
    """

    def __init__(self, width: int, prompts: int = 20, length: int = 8, attention: str = "free"):
        super().__init__()
        # The paper leaves the start open; as in the authors' code, keys and attention vectors are
        # orthogonal and all prompts are copies of one orthogonal matrix, told apart by their weights alone.
        self.keys = nn.Parameter(nn.init.orthogonal_(torch.empty(prompts, width)))
        self.attention = nn.Parameter(nn.init.orthogonal_(torch.empty(prompts, width)))
        one = nn.init.orthogonal_(torch.empty(length, width))
        self.prompts = nn.Parameter(one.expand(prompts, length, width).clone())
        self.softmax = attention == "softmax"

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Patch embeddings (B, N, D) -> conditional prompts (B, N_p, D) and their weights alpha (B, M)."""
        with torch.autocast(patches.device.type, enabled=False):  # a cosine in bfloat16 has two digits
            query = (patches.mean(1) + patches.amax(1)).float()  # Eq. 6, (B, D)
            attention = self.attention.softmax(-1) if self.softmax else self.attention
            alpha = F.cosine_similarity(query[:, None] * attention, self.keys, dim=-1)  # Eq. 8, (B, M)
            prompt = torch.einsum("bm,mnd->bnd", alpha, self.prompts.to(alpha.dtype))  # Eq. 9, (B, N_p, D)
        return prompt.to(patches.dtype), alpha
