"""What training a run needs of a GPU, by arithmetic from a few measured numbers: memory and time.

A vision transformer's activations grow with images x tokens x width x layers, and its operations
with tokens x width^2 x layers.  Of another network neither is known here.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer

from pumalib import models
from pumalib.config import Method, Run

# Images per second of a GPU of an A100's class that trains a ViT-S at 224 px: an assumption, which
# stands where nothing was measured and nobody says otherwise.
STATED_SPEED = 1500.0


class Shape(NamedTuple):
    """What of a vision transformer its cost depends on."""

    tokens: int  # patches and the class token
    width: int
    layers: int
    parameters: int


# The network, and the images of a step, that were measured.
MEASURED_SHAPE = Shape(tokens=197, width=384, layers=12, parameters=21_600_000)
MEASURED_IMAGES = 720
# Bytes that the forward pass of such a step leaves for the backward pass, in bfloat16, counted by
# hooks on the tensors that autograd saves: of full fine-tuning, PUMA, and PUMA with LoRA.
FULL = 22.8e9
PUMA = 20.4e9
PUMA_LORA = 26.7e9
# With `recompute`.
RECOMPUTED = 2.8e9
# Weight, gradient and AdamW's two moments, in float32.
OF_TRAINED = 16
OF_FROZEN = 4


@lru_cache(maxsize=64)
def shape(backbone: str, image_size: int) -> Shape | None:
    """The shape of a backbone, made without memory for its weights; None: no vision transformer."""
    with torch.device("meta"):
        network = models.backbones.create(backbone, "random", image_size)
    if not isinstance(network, VisionTransformer):
        return None
    parameters = sum(one.numel() for one in network.parameters())
    tokens = network.patch_embed.num_patches + network.num_prefix_tokens
    return Shape(tokens, network.embed_dim, len(network.blocks), parameters)


def memory(run: Run) -> float:
    """Bytes of GPU memory that training a run needs: saved activations, and weights; NaN: unknown.

    A method that was not measured is taken for the measured one that is above it, so that this is
    rather too much; proxies and what the loss keeps are not counted.
    """
    own = shape(run.backbone, run.data.image_size)
    if own is None:
        return float("nan")
    images = run.training.batch_size
    if run.training.micro_batch:
        images = min(images, run.training.micro_batch)

    tokens = own.tokens
    if run.method.prompts:
        tokens += run.method.prompt_length
    measured_tokens = MEASURED_SHAPE.tokens
    if _is_puma(run.method):
        # What was measured has its prompts of eight tokens.
        measured_tokens += Method.prompt_length
    share = images / MEASURED_IMAGES
    share *= tokens / measured_tokens
    share *= own.width / MEASURED_SHAPE.width
    share *= own.layers / MEASURED_SHAPE.layers
    # On a GPU "auto" is bfloat16.
    if run.training.precision == "float32":
        share *= 2
    weights = OF_TRAINED if run.method.tune_backbone else OF_FROZEN
    return share * _saved(run, own.layers) + weights * own.parameters


def _is_puma(method: Method) -> bool:
    return not method.tune_backbone and _trains_inside(method)


def _trains_inside(method: Method) -> bool:
    """Whether gradients go through the layers of the backbone."""
    inner = (method.tune_backbone, method.prompts, method.adapter_rank, method.lora_rank)
    return any(inner) or bool(method.part)


def _saved(run: Run, layers: int) -> float:
    """Bytes that a step of the measured size saves."""
    method = run.method
    if not _trains_inside(method):
        # Nothing is saved; what a layer computes is there while it computes.
        return FULL / layers
    if run.training.recompute:
        return RECOMPUTED
    if method.tune_backbone:
        return FULL
    if method.lora_rank:
        return PUMA_LORA
    return PUMA


def relative_cost(run: Run) -> float:
    """Operations of an image, in those of a ViT-S at 224 px; 1 of what is no vision transformer."""
    own = shape(run.backbone, run.data.image_size)
    if own is None:
        return 1.0
    return _operations(own) / _operations(MEASURED_SHAPE)


def _operations(own: Shape) -> float:
    """Multiplications of an image: 12 width^2 weights a layer, and the attention's two products."""
    of_token = 12 * own.width**2 + 2 * own.tokens * own.width
    return own.layers * own.tokens * of_token
