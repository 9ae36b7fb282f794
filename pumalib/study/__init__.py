"""The study: rows of a table to results (`run_all`), runs that are kept (`store`, `runs`), the paper's word (`printed`,
`claims`)."""

from . import claims, printed, store
from .claims import scorecard
from .planning import plan
from .results import Results, collect
from .run_all import embed_kept, embeddings, loss_of, model, run_all, specific
from .runs import list_runs, run_of
from .show import marked
from .store import hits

__all__ = ["Results", "claims", "collect", "embed_kept", "embeddings", "hits", "list_runs", "loss_of", "marked", "model"]
__all__ += ["plan", "printed", "run_all", "run_of", "scorecard", "specific", "store"]
