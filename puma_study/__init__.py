"""The study of the paper: from the rows of a table to their results.  It needs the checkout.

Read `rows` first: its `run_all` trains the missing runs of a table.

- Runs: `record` (one run), `store` (files of kept runs), `runs` (list, compare, verify), `one_run`
  (train one), `search` (settings by method, rates by loss), `needs` (memory and hours).
- Comparisons: `contrasts` (differences of rows), `groups` (classes that belong together), `results`
  (a table of rows), `show` and `text` (how it is displayed), `figures`.
- The paper: `printed` (its tables), `claims` (its claims as comparisons), `measures` (times and
  shares), `verdicts` (the scorecard), `reading` (whether what is printed is still possible).
- Notebooks: `planning` and `notebooks` (plan and execute), `cells` (shared code), `findings` (their
  first lines), `analysis` (trained models), `survey` and `scale` (the survey's losses).

Notebooks `import puma_study as study`.  Names are imported when first used, so that `--help` stays
fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import claims as claims
    from . import contrasts as contrasts
    from . import groups as groups
    from . import printed as printed
    from . import store as store
    from .cells import begin as begin
    from .cells import chosen as chosen
    from .cells import save_table as save_table
    from .cells import show_figure as show_figure
    from .findings import found as found
    from .planning import plan as plan
    from .reading import pair_readings as pair_readings
    from .reading import readings as readings
    from .results import Results as Results
    from .results import collect as collect
    from .rows import embed_kept as embed_kept
    from .rows import embeddings as embeddings
    from .rows import loss_of as loss_of
    from .rows import model as model
    from .rows import run_all as run_all
    from .rows import specific as specific
    from .runs import list_runs as list_runs
    from .runs import run_of as run_of
    from .show import marked as marked
    from .show import readable as readable
    from .text import plain as plain
    from .verdicts import scorecard as scorecard

# Functions and classes, by the module they are in.
_HOMES = {
    "cells": ["begin", "chosen", "save_table", "show_figure"],
    "findings": ["found"],
    "planning": ["plan"],
    "reading": ["pair_readings", "readings"],
    "results": ["Results", "collect"],
    "rows": ["embed_kept", "embeddings", "loss_of", "model", "run_all", "specific"],
    "runs": ["list_runs", "run_of"],
    "show": ["marked", "readable"],
    "text": ["plain"],
    "verdicts": ["scorecard"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ["claims", "contrasts", "groups", "printed", "store"]

__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    """A public name, imported now."""
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
