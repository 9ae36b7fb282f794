"""PUMA: a stochastic adapter beside every block and a prompt chosen by the image (Sec. 4, Eq. 4 to 9).
Shapes: B images, N tokens, D width of the backbone, L layers, r bottleneck, M prompts of N_p tokens."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StochasticAdapter(nn.Module):
    """gamma * s * ReLU(h W_down) W_up, in parallel with a branch whose normalised input is h (Eq. 4, 5, Sec. 4.2).
    s = `scale` is 1 in Eq. 5, 0.1 in the authors' code; `start` "code" is theirs, "usual" that of a linear layer."""

    def __init__(self, width: int, rank: int, scale: float = 0.1, start: str = "code"):
        super().__init__()
        self.down, self.up, self.scale = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False), scale
        bound = math.sqrt(3 / rank if start == "code" else 1 / width)
        nn.init.uniform_(self.down.weight, -bound, bound)
        nn.init.zeros_(self.up.weight)  # untrained it changes nothing

    def forward(self, h: Tensor, gate: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D); `gate` is gamma, (B,) or (1,), as `draw_gates` makes it; None: always on."""
        return self.up(gated(F.relu(self.down(h)), self.scale, gate))


def gated(hidden: Tensor, scale: float, gate: Tensor | None) -> Tensor:
    """gamma * s * hidden, (B, N, r): on the narrow side of a bottleneck the factors cost least."""
    return hidden * (scale if gate is None else (scale * gate).view(-1, 1, 1).to(hidden.dtype))


def draw_gates(keep: float, layers: int, images: int, per="sample", divide=True, generator=None) -> Tensor:
    """The gamma of Eq. 5 for one training step: independent Bernoulli(keep), (L, 2, B) for layers, branches and images.
    `per` "sample" as the authors' code, or "batch", (L, 2, 1); `divide` by p = keep, to have the expectation 1."""
    shape = (layers, 2, images if per == "sample" else 1)
    gates = torch.bernoulli(torch.full(shape, float(keep)), generator=generator)
    return gates / keep if divide and keep > 0 else gates


class PromptPool(nn.Module):
    """A key-value memory of prompts (P_m, K_m, A_m) from which an image's patches choose (Eq. 6 to 9, Sec. 4.3).
    `attention`: "free" uses A_m as it is (Eq. 8), "softmax" normalises it over features (authors' code)."""

    def __init__(self, width: int, prompts: int = 20, length: int = 8, attention: str = "free"):
        super().__init__()
        self.keys = nn.Parameter(nn.init.orthogonal_(torch.empty(prompts, width)))
        self.attention = nn.Parameter(nn.init.orthogonal_(torch.empty(prompts, width)))
        one = nn.init.orthogonal_(torch.empty(length, width))  # authors' code: all prompts start as copies of it
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
