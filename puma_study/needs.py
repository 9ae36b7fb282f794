"""GPU memory and time of training a run, estimated from a few measurements.

A vision transformer's activations grow with images x tokens x width x layers, and its operations
with tokens x width^2 x layers.  Other networks are not estimated.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer

from pumalib import models
from pumalib.config import Method, Run

# Images per second of training a ViT-S at 224 px on a GPU of an A100's class.  An assumption, used
# if no kept run was measured and the user gives no speed.
STATED_SPEED = 1500.0


class Shape(NamedTuple):
    """The sizes of a vision transformer that determine its cost."""

    tokens: int  # patches and the class token
    width: int
    layers: int
    parameters: int


# The network and the batch that were measured.
MEASURED_SHAPE = Shape(tokens=197, width=384, layers=12, parameters=21_600_000)
MEASURED_IMAGES = 720
# Bytes that autograd saves for the backward pass of that batch, in bfloat16, counted by hooks: of
# full fine-tuning, PUMA, and PUMA with LoRA.
FULL = 22.8e9
PUMA = 20.4e9
PUMA_LORA = 26.7e9
# With `recompute`.
RECOMPUTED = 2.8e9
# Photographs of 500 px that a core decodes into training batches in a second, by
# `python -m tools bench decoders --size full` (docs/gpu.md).
READING_SPEED = 290
# Bytes of a weight in a saved model, and of one in the two checkpoints of a run that is training.
SAVED = 4
IN_CHECKPOINTS = 24
# What methods train that leave the backbone as it is, as a share of its weights, at most: of an
# MLP-3 head on a ViT-S it is 0.24.
ADDED = 0.25
# Bytes of a trained parameter (weight, gradient, AdamW's two moments) and of a frozen one, float32.
OF_TRAINED = 16
OF_FROZEN = 4


@lru_cache(maxsize=64)
def shape(backbone: str, image_size: int) -> Shape | None:
    """Sizes of a backbone, made without memory for its weights; None: no vision transformer."""
    with torch.device("meta"):
        network = models.backbones.create(backbone, "random", image_size)
    if not isinstance(network, VisionTransformer):
        return None
    parameters = sum(one.numel() for one in network.parameters())
    tokens = network.patch_embed.num_patches + network.num_prefix_tokens
    return Shape(tokens, network.embed_dim, len(network.blocks), parameters)


def memory(run: Run) -> float:
    """Bytes of GPU memory for training a run: saved activations and weights; NaN if unknown.

    A method that was not measured counts as the next larger one that was, so the estimate errs on
    the high side.  The loss's proxies and saved tensors are not counted.
    """
    own = shape(run.backbone, run.data.image_size)
    if own is None:
        return float("nan")
    images = run.training.batch_size
    # By the memory of the GPU that trains it: none can be said here.
    if run.training.micro_batch > 0:
        images = min(images, run.training.micro_batch)

    tokens = own.tokens
    if run.method.prompts:
        tokens += run.method.prompt_length
    measured_tokens = MEASURED_SHAPE.tokens
    if _is_puma(run.method):
        # PUMA was measured with its eight prompt tokens.
        measured_tokens += Method.prompt_length
    share = images / MEASURED_IMAGES
    share *= tokens / measured_tokens
    share *= own.width / MEASURED_SHAPE.width
    share *= own.layers / MEASURED_SHAPE.layers
    if run.training.precision != "bfloat16":
        share *= 2
    weights = OF_TRAINED if run.method.tune_backbone else OF_FROZEN
    return share * _saved(run, own.layers) + weights * own.parameters


def disk(run: Run) -> float:
    """Bytes, at most, of the model that a run leaves; NaN if unknown."""
    own = shape(run.backbone, run.data.image_size)
    if own is None:
        return float("nan")
    return SAVED * own.parameters * (1 if run.method.tune_backbone else ADDED)


def cores(images_per_second: float) -> int:
    """The idle cores that decode so many photographs, of 500 px, in a second."""
    return math.ceil(images_per_second / READING_SPEED)


def _is_puma(method: Method) -> bool:
    return not method.tune_backbone and _trains_inside(method)


def _trains_inside(method: Method) -> bool:
    """Whether gradients pass through the layers of the backbone."""
    inner = (method.tune_backbone, method.prompts, method.adapter_rank, method.lora_rank)
    return any(inner) or bool(method.part)


def _saved(run: Run, layers: int) -> float:
    """Bytes that autograd saves in a step of the measured network and batch."""
    method = run.method
    if not _trains_inside(method):
        # Autograd saves nothing: one layer's activations exist at a time.
        return FULL / layers
    if run.training.recompute:
        return RECOMPUTED
    if method.tune_backbone:
        return FULL
    if method.lora_rank:
        return PUMA_LORA
    return PUMA


def relative_cost(run: Run) -> float:
    """Operations per image relative to a ViT-S at 224 px; 1 if not a vision transformer."""
    own = shape(run.backbone, run.data.image_size)
    if own is None:
        return 1.0
    return _operations(own) / _operations(MEASURED_SHAPE)


def _operations(own: Shape) -> float:
    """Multiplications per image: 12 width^2 weights a layer, and the attention's two products."""
    of_token = 12 * own.width**2 + 2 * own.tokens * own.width
    return own.layers * own.tokens * of_token
