"""PUMA: a stochastic adapter beside every block and a prompt chosen by the image (Sec. 4, Eq. 2 to 10).

Shapes: B images, N tokens, D width of the backbone, L layers, r bottleneck, M prompts of N_p tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StochasticAdapter(nn.Module):
    """gamma * s * ReLU(h W_down) W_up, in parallel with a block whose normalised input is h (Eq. 4, 5, Sec. 4.2).

    W_up starts at zero, so an untrained adapter changes nothing.  No biases (the paper's parameter counts).

    Args:
        width: D, features of the backbone.
        rank: r, the bottleneck.
        scale: s, a fixed factor; 1 is Eq. 5 to the letter, 0.1 the authors' code.
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
        hidden = F.relu(self.down(h))  # (B, N, r)
        # The factors multiply the narrow side of the bottleneck: r features a token instead of D.
        hidden = hidden * (self.scale if gate is None else (self.scale * gate).view(-1, 1, 1).to(hidden.dtype))
        return self.up(hidden)

    def add_to(self, out: Tensor, h: Tensor, gate: Tensor | None = None) -> Tensor:
        """`out + self(h, gate)`, Eq. 5 without the work for images whose gate is closed: (B, N, D) -> (B, N, D)."""
        if not can_skip(gate):
            return out + self(h, gate)
        gate = gate.expand(len(h))
        is_open = gate.nonzero().squeeze(1)
        change = self(h.index_select(0, is_open), gate[is_open])
        return out.index_add(0, is_open, change.to(out.dtype))


def can_skip(gate: Tensor | None) -> bool:
    """Whether work is saved by leaving out images: some gate is closed, and to ask costs nothing.

    A GPU would have to wait for the answer, and a compiled graph would lose its static shapes.
    """
    return gate is not None and gate.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(gate.all())


def draw_gates(keep: float, layers: int, images: int, *, per: str = "sample", divide: bool = True,
               generator: torch.Generator | None = None) -> Tensor:  # fmt: skip
    """The gamma of Eq. 5 for one training step: independent Bernoulli(keep) for each layer and branch.

    Args:
        keep: p, the probability that an adapter is on.
        layers: L.
        images: B.
        per: "sample" draws for each image (authors' code, as timm's DropPath), "batch" once for the batch.
        divide: divide by p, so that the adapter that is always on at test has the expectation of training.
        generator: source of randomness, on the CPU.

    Returns:
        (L, 2, B) float32, or (L, 2, 1) per batch; the second axis is MSA, MLP.
    """
    shape = (layers, 2, images if per == "sample" else 1)
    gates = torch.bernoulli(torch.full(shape, float(keep)), generator=generator)
    return gates / keep if divide and keep > 0 else gates


class PromptPool(nn.Module):
    """A key-value memory of prompts from which an image's patches choose (Eq. 6 to 9, Sec. 4.3).

    Args:
        width: D.
        prompts: M, prompts in the pool.
        length: N_p, tokens per prompt.
        attention: "free" uses A_m as it is (Eq. 8), "softmax" normalises it over features (authors' code).
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

    def weights(self, patches: Tensor) -> Tensor:
        """alpha_m = cos(q * A_m, K_m) with q = average + maximum of the patch embeddings: (B, N, D) -> (B, M)."""
        query = (patches.mean(1) + patches.amax(1)).float()  # Eq. 6, (B, D)
        attention = self.attention.float()
        attention = attention.softmax(-1) if self.softmax else attention
        keys = F.normalize(self.keys.float(), dim=-1)
        # Eq. 8 without the (B, M, D) product: both the inner product and the norm are matrix products.
        norms = (query.square() @ attention.square().T).clamp_min(1e-12).sqrt()
        return query @ (attention * keys).T / norms

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Patch embeddings (B, N, D) -> conditional prompts (B, N_p, D) of Eq. 9 and their weights (B, M)."""
        with torch.autocast(patches.device.type, enabled=False):  # a cosine in bfloat16 has two digits
            weights = self.weights(patches)
            prompt = torch.einsum("bm,mnd->bnd", weights, self.prompts.float())
        return prompt.to(patches.dtype), weights
