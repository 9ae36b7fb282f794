"""Universal metric learning with parameter-efficient transfer learning (PUMA).

Read `models/puma.py` for the idea, `training/loop.py` for a run.  The study of the paper, which
trains and compares many runs, is `puma_study` beside this package, in the checkout.

To use it, `import pumalib` is enough: the names of `__all__` come when they are first asked for.

    folder = pumalib.train("mini", "puma")
    vectors = pumalib.load(folder).embed(images)
    table = pumalib.evaluate(vectors, labels)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import evaluate as evaluate
    from .api import frozen as frozen
    from .api import list_benchmarks as list_benchmarks
    from .api import list_losses as list_losses
    from .api import list_methods as list_methods
    from .api import list_models as list_models
    from .api import load as load
    from .api import read_scores as read_scores
    from .api import train as train

_FUNCTIONS = [
    "evaluate",
    "frozen",
    "list_benchmarks",
    "list_losses",
    "list_methods",
    "list_models",
    "load",
    "read_scores",
    "train",
]
_LIBRARY = [
    "cluster",
    "config",
    "data",
    "embed_parts",
    "embedder",
    "evaluation",
    "export",
    "index",
    "losses",
    "models",
    "options",
    "paths",
    "progress",
    "search_page",
    "terminal",
    "training",
]

__all__ = [*_FUNCTIONS, *_LIBRARY]


def __getattr__(name: str) -> Any:
    """A public name, imported now: `import pumalib` alone reads no file and takes no time."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(".api", __name__), name)
    if name in _LIBRARY:
        return importlib.import_module(f".{name}", __name__)
    if name == "__version__":
        return _version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])


def _version() -> str:
    """What was installed; "0" in a checkout that was not."""
    from importlib import metadata

    try:
        return metadata.version("pumalib")
    except metadata.PackageNotFoundError:
        return "0"
