"""The public functions: lists of what is available, and train, load, evaluate.

`import pumalib` gives them by name: `pumalib.train`, not `pumalib.api.train`.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from . import config, data, embedder, evaluation, losses, models, paths, training
from .training import run_folder


def list_methods() -> list[str]:
    """Names of the methods: how a backbone can be adapted.

    >>> import pumalib
    >>> "puma" in pumalib.list_methods()
    True
    """
    return list(config.METHODS)


def list_losses() -> list[str]:
    """Names of the losses, as `losses.make` and `loss=` take them.

    >>> import pumalib
    >>> "curricularface" in pumalib.list_losses()
    True
    """
    return losses.list_losses()


def list_benchmarks() -> list[str]:
    """Names of the benchmarks, as `config.Data(benchmark=...)` takes them.

    >>> import pumalib
    >>> "folders" in pumalib.list_benchmarks()
    True
    """
    return data.list_benchmarks()


def list_models() -> list[str]:
    """Names of the trained models that come with the package, as `load` takes them.

    >>> import pumalib
    >>> "mini" in pumalib.list_models()
    True
    """
    return embedder.list_kept()


def train(
    run: config.Run | config.Profile | str,
    method: str | config.Method | None = None,
    folder: str | Path | None = None,
    **changes: Any,
) -> Path:
    """Train and evaluate a run, or resume it, and return its folder.

    `run` is a `config.Run`, or a profile (its name, its file or a `config.Profile`) that is trained
    with `method` and `changes`, the arguments of `Profile.run`: `seed=1`, `loss="ms"`,
    `adapter_rank=64`.  `folder` is by default in `paths.RESULTS`, named after the run's settings.
    A finished run is only read.  With `training={"score_epochs": 1}` the model is that of the epoch
    with the best score on held-out classes.  On your own folders of images a warning tells where
    the frozen backbone is more accurate than the trained model.

    Raises ValueError for settings that cannot be trained, `training.NonFiniteLoss` where a loss or
    weight is no longer finite, OSError where data or weights are missing or the folder cannot be
    written.

    >>> import pumalib
    >>> folder = pumalib.train("smoke", "linear", seed=1)
    >>> sorted(file.name for file in folder.glob("m*"))
    ['metrics.json', 'model.safetensors']
    """
    if isinstance(run, config.Run):
        chosen = _whole(run, method, changes)
        home = paths.RESULTS
    else:
        profile = run if isinstance(run, config.Profile) else config.profile(run)
        named = _named(method)
        # The other arguments of `Profile.run` are no settings of the method.
        others = inspect.signature(config.Profile.run).parameters
        chosen = profile.run(named, **models.with_own_settings(named, changes, others))
        home = paths.RESULTS / profile.name

    if folder is None:
        folder = home / "runs" / training.run_name(chosen)
    place = paths.resolve(folder)
    with run_folder.held(place):
        training.train(chosen, place)
    training.warn_if_below(chosen, place)
    return place


def read_scores(folder: str | Path) -> pd.DataFrame:
    """The accuracies of a trained run's model on its test classes, as a table like `evaluate`'s.

    It has a row per dataset, then unified and harmonic.  Raises ValueError where the run is not
    finished.

    >>> import pumalib
    >>> scores = pumalib.read_scores(pumalib.train("smoke", "linear", seed=1))
    >>> list(scores.index)
    ['aircraft', 'flowers', 'unified', 'harmonic']
    """
    record = run_folder.read_record(paths.find(folder))
    return pd.DataFrame(record["table"]).set_index("dataset")


def _whole(run: config.Run, method: str | config.Method | None, changes: dict) -> config.Run:
    if method is not None or changes:
        raise ValueError("a Run is whole: change it by dataclasses.replace, and train it alone")
    return run


def _named(method: str | config.Method | None) -> str | config.Method:
    if method is None:
        known = ", ".join(config.METHODS)
        raise ValueError(f"of a profile one method is trained: name it; known: {known}")
    return method


def load(
    folder: str | Path,
    pretrained: str | Path | None = None,
    device: str | torch.device = "cpu",
) -> embedder.Embedder:
    """Load a trained model, ready to embed images, from a folder or by its name in `list_models`.

    The folder is a run's, or one that a model's `save` has written.  `pretrained` is the file of
    the backbone's weights; None: they are in the folder, at timm's hub, or where they were in
    training.  Raises FileNotFoundError where the model or its weights are missing, ValueError where
    they are damaged.

    >>> import numpy, pumalib
    >>> model = pumalib.load("mini")
    >>> images = numpy.zeros((2, 100, 80, 3), "uint8")
    >>> model.embed(images).shape
    (2, 128)
    """
    return embedder.load(folder, pretrained, device)


def frozen(
    backbone: str,
    pretrained: str | Path = "hub",
    image_size: int | None = None,
    device: str | torch.device = "cpu",
    *,
    resize: str = "timm",
) -> embedder.Embedder:
    """Load a pretrained timm backbone without any further training, ready to embed images.

    `backbone` is timm's name with its tag; `pretrained` is "hub" (timm's weights, downloaded once)
    or a file of weights.  Images are transformed as in timm's own evaluation, at the model's own
    size unless `image_size` (pixels) is given; `resize="both"` squashes them to a square first, as
    the paper does.  Raises FileNotFoundError where a file is missing, ValueError where the name is
    unknown or the weights do not fit.

    >>> import numpy, pumalib
    >>> model = pumalib.frozen("test_vit", "random", image_size=32)
    >>> model.embed(numpy.zeros((2, 100, 80, 3), "uint8")).shape
    (2, 64)
    """
    return embedder.frozen(backbone, pretrained, image_size, device, resize=resize)


def evaluate(
    vectors: np.ndarray | torch.Tensor | pd.DataFrame | Sequence,
    labels: Sequence | np.ndarray,
    datasets: Sequence[str] | np.ndarray | None = None,
    *,
    queries: Sequence | np.ndarray | None = None,
    gallery: Sequence | np.ndarray | None = None,
) -> pd.DataFrame:
    """Retrieval accuracy of embeddings (n, dim): R@k, RP and MAP@R by cosine, with 95 % intervals.

    Each image is a query against all others, unless `queries` or `gallery` choose fewer: by row
    numbers, each once, or by True or False (1 or 0) for each row.  `labels` (n,) are classes, all
    text or all numbers.  Without `datasets` (n,) the table has one row, "all".  With them it has a
    row per dataset, searched alone, then "unified" (all datasets searched together) and "harmonic"
    (the harmonic mean of the datasets' rows).  Accuracies are fractions (Sec. 5.1).  Raises
    ValueError where shapes differ, a label is missing, a vector is zero or not finite, or no query
    has another image of its class in the gallery.

    >>> import numpy, pumalib
    >>> vectors = numpy.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.2]])
    >>> table = pumalib.evaluate(vectors, ["cat", "cat", "dog", "dog"])
    >>> float(table.at["all", "R@1"])
    0.75
    >>> table = pumalib.evaluate(vectors, [0, 0, 1, 1], ["pets", "pets", "farm", "farm"])
    >>> list(table.index)
    ['pets', 'farm', 'unified', 'harmonic']
    >>> table = pumalib.evaluate(vectors, [0, 0, 1, 1], queries=[0, 3], gallery=[1, 2])
    >>> int(table.at["all", "queries"])
    2
    """
    return evaluation.evaluate(vectors, labels, datasets, queries=queries, gallery=gallery)
