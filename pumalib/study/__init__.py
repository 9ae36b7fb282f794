"""The study: rows of a table to results (`run_all`), runs that are kept (`kept`), the paper's word (`paper`)."""

from . import kept, paper
from .kept import hits, run_name, run_of, runs
from .paper import scorecard
from .run_all import Results, collect, embed, embeddings, loss_of, marked, model, plan, run_all, specific

__all__ = ["Results", "collect", "embed", "embeddings", "hits", "kept", "loss_of", "marked", "model"]
__all__ += ["paper", "plan", "run_all", "run_name", "run_of", "runs", "scorecard", "specific"]
