"""Choose the best epoch by its score on held-out classes, and decide when to stop.

Both follow from the log: the rows of scored epochs have `SCORE`, the harmonic mean of the datasets'
R@1 (Sec. 5.1) on classes that are neither trained on nor tested (`data.held_out`).
"""

from typing import Any

from ..config import Training

# A column of the log; None in the rows of epochs that were not scored.
SCORE = "held_out_R@1"


def is_due(recipe: Training, epoch: int) -> bool:
    """Whether to score the model after `epoch` (from 1): each `score_epochs`, and the last."""
    if not recipe.score_epochs:
        return False
    return epoch % recipe.score_epochs == 0 or epoch == recipe.epochs


def best(log: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row with the highest score, the first of equal ones; None if nothing was scored."""
    rows = _scored(log)
    if not rows:
        return None
    # Of equal scores, max returns the first.
    return max(rows, key=lambda row: row[SCORE])


def patience_is_over(recipe: Training, log: list[dict[str, Any]]) -> bool:
    """Whether the last `patience` scores have not exceeded the best one."""
    row = best(log)
    if not recipe.patience or row is None:
        return False
    since = [later for later in _scored(log) if later["epoch"] > row["epoch"]]
    return len(since) >= recipe.patience


def _scored(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in log if row.get(SCORE) is not None]
