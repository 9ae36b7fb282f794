"""VPT: one prompt for all images (Jia et al., "Visual prompt tuning", ECCV 2022)."""

import math

import torch
from torch import Tensor, nn

from .parts import Part


class SinglePrompt(Part):
    """One prompt for all images: before the first layer or, in VPT-deep, a new one before each.

    `layers` is the number of layers with a prompt.  `start` "code" is uniform, as in the code of
    PUMA's authors, "usual" a truncated normal with standard deviation 0.02.
    """

    def __init__(self, width: int, length: int = 8, layers: int = 1, start: str = "code"):
        super().__init__()
        prompts = nn.init.trunc_normal_(torch.empty(layers, length, width), std=0.02)
        if start == "code":
            # A standard deviation of 0.045 for the 384 features of ViT-S.  Drawn in addition to the
            # usual start, so that the random numbers of later initialisations do not change.
            bound = 0.045 * math.sqrt(3 * 384 / width)
            nn.init.uniform_(prompts, -bound, bound)
        self.prompts = nn.Parameter(prompts)

    def tokens(
        self, patches: Tensor, layer: int, gates: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """The prompt before this layer and no weights; None if the layer has no prompt."""
        if layer >= len(self.prompts):
            return None
        return self(patches, layer)

    def forward(self, patches: Tensor, layer: int = 0) -> tuple[Tensor, None]:
        """The prompt before this layer for B images, (B, N_p, D), and no weights."""
        return self.prompts[layer].expand(patches.shape[0], -1, -1), None
