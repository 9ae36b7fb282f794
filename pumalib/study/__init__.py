"""The study: from the rows of a table to their results.

Read `run_all` first, which trains what is missing.  `store` keeps finished runs, a `kept_line`
each, and `runs` lists them; `contrasts` compares rows of them, with what `seeds` and `groups` know,
and `results` and `show` make tables.  `printed` has the paper's numbers, `claims` what they and
kept runs say of its claims and the survey's, `measures` what is no accuracy, and `verdicts` the
scorecard.  `planning` and `notebooks` say and do what a notebook would train, `cluster`
elsewhere, and `needs` what of a GPU;
`one_run` is a run by itself, `tuning` searches the settings of every method alike, `across`
compares profiles, `analysis` looks into trained models, and `speed` times everything, a subject a
file.  `pages` writes the numbers of README.md and docs, and `findings` shows at the top of a
notebook what was found.
"""

from . import claims, contrasts, groups, printed, store
from .findings import found
from .planning import plan
from .results import Results, collect
from .run_all import embed_kept, embeddings, loss_of, model, run_all, specific
from .runs import list_runs, run_of
from .show import marked, plain
from .store import hits
from .verdicts import scorecard

__all__ = [
    "Results",
    "claims",
    "collect",
    "contrasts",
    "embed_kept",
    "embeddings",
    "found",
    "groups",
    "hits",
    "list_runs",
    "loss_of",
    "marked",
    "model",
    "plain",
    "plan",
    "printed",
    "run_all",
    "run_of",
    "scorecard",
    "specific",
    "store",
]
