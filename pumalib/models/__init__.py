"""Embedding models: a backbone and the parts that a method adds to it.

`build` makes a model by name, `count_parameters` counts its parameters, `load_model` loads a
trained one.  Read `puma` for the idea, and `parts` to add a part of your own.
"""

from . import backbones
from .embedding import EmbeddingModel, count_parameters
from .parts import part_settings, with_own_settings
from .saved import (
    build,
    load_model,
    model_folder,
    save,
    save_trained,
    save_whole,
    trainable_state,
)

__all__ = [
    "EmbeddingModel",
    "backbones",
    "build",
    "count_parameters",
    "load_model",
    "model_folder",
    "part_settings",
    "save",
    "save_trained",
    "save_whole",
    "trainable_state",
    "with_own_settings",
]
