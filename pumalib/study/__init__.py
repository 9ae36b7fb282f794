"""The study: from the rows of a table to their results.

`run_all` trains what is missing, `store` and `runs` have what is kept, `results` and `show` make
tables of it; `printed` and `claims` have the paper's word.
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
