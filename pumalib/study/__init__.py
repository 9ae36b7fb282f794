"""The study: from the rows of a table to their results.

Read `run_all` first, which trains what is missing.  `store` keeps finished runs, a `kept_line`
each, and `runs` lists and compares them; `results` and `show` make tables of them.  `printed` has
the paper's numbers, and `claims` judges what it claims.  `planning` and `notebooks` say and do what
a notebook would train, `cluster` elsewhere; `one_run` is a run by itself, `analysis` looks into
trained models, and `speed` times everything.  `pages` writes the numbers of README.md and docs.
"""

from . import claims, printed, store
from .claims import scorecard
from .planning import plan
from .results import Results, collect
from .run_all import embed_kept, embeddings, loss_of, model, run_all, specific
from .runs import list_runs, run_of
from .show import marked
from .store import hits

__all__ = [
    "Results",
    "claims",
    "collect",
    "embed_kept",
    "embeddings",
    "hits",
    "list_runs",
    "loss_of",
    "marked",
    "model",
    "plan",
    "printed",
    "run_all",
    "run_of",
    "scorecard",
    "specific",
    "store",
]
