"""Universal metric learning with parameter-efficient transfer learning (PUMA).

Read `models/puma.py` for the idea, `training/loop.py` for a run.  The study of the paper, which
trains and compares many runs, is `puma_study` beside this package, in the checkout.

`import pumalib` is enough to use it: each name of `__all__` is imported when first used.

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
    """Import a public name on first use, so that `import pumalib` alone is fast."""
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
    """The installed version; "0" in a checkout that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("pumalib")
    except metadata.PackageNotFoundError:
        return "0"
