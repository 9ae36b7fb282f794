"""Which epoch is kept: the one whose model finds most on held-out classes, and when to stop.

All is told by the log: the rows of epochs that were scored have `SCORE`, the harmonic mean of the
datasets' R@1 (Sec. 5.1) on classes that are neither trained on nor tested (`data.held_out`).
"""

from typing import Any

from ..config import Training

# A column of the log; None in the rows of epochs that were not scored.
SCORE = "held_out_R@1"


def is_due(recipe: Training, epoch: int) -> bool:
    """Whether the model is scored after `epoch` (from 1): every so many epochs, and at the end."""
    if not recipe.score_epochs:
        return False
    return epoch % recipe.score_epochs == 0 or epoch == recipe.epochs


def best(log: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row with the highest score, of equals the first; None where nothing was scored."""
    rows = _scored(log)
    if not rows:
        return None
    # Of equals, max takes the first.
    return max(rows, key=lambda row: row[SCORE])


def patience_is_over(recipe: Training, log: list[dict[str, Any]]) -> bool:
    """Whether the last `patience` scores were not above the best one."""
    row = best(log)
    if not recipe.patience or row is None:
        return False
    since = [later for later in _scored(log) if later["epoch"] > row["epoch"]]
    return len(since) >= recipe.patience


def _scored(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in log if row.get(SCORE) is not None]
