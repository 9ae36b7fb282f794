"""Embedding models: `build` makes one by name, `count_parameters` counts it, `load_model` brings a trained one back."""

from . import backbones
from .embedding import EmbeddingModel, build, count_parameters
from .saved import load_model, save, trainable_state

__all__ = ["EmbeddingModel", "backbones", "build", "count_parameters", "load_model", "save", "trainable_state"]
