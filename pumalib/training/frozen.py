"""Compare a model trained on a user's folders with its frozen backbone, on the same images.

These are the test images or, if epochs were scored, the held-out ones: then the choice between the
two does not use the test classes.  A model that started from a trained one is compared with that.
"""

import shlex
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import paths
from ..config import METHODS, Run, Training
from ..models import model_folder
from . import held_out, loop, parallel, run_folder

# The metric and the rows of the comparison.
METRIC = "R@1"
ROWS = ("unified", "harmonic")
# The method of the frozen backbone.
BARE = METHODS["pretrained"]

# The advice after a warning.
_OTHERS = "to train another: method whitened, a lower lr, fewer or more epochs, or more images"
_OF_NO_TRAINING = "to gain on it: more images"


def warn_if_below(run: Run, folder: Path) -> None:
    """Warn if the trained model in `folder` has a lower R@1 than its frozen backbone.

    Only for the benchmark `folders`: a study has the frozen backbone as a row.  If epochs were
    scored, the best epoch is compared, on the held-out classes.  The backbone is evaluated once for
    these images, as a run beside `folder` that `load` can load.  If the run started from a trained
    model and was scored, it warns if no epoch is better than that model.
    """
    if run.data.benchmark != "folders" or not parallel.is_first():
        return
    record = run_folder.read_record(folder)
    if run.method.name == BARE.name:
        return
    best = held_out.best(record["log"])
    start = model_folder(run.pretrained)
    if start:
        # The pretrained weights of the backbone are not available.
        _warn_if_start_is_best(start, best)
        return
    bare = of_backbone(run, on_held_out=run.data.holdout or best is not None)
    beside = folder.parent / run_folder.run_name(bare)
    with run_folder.held(beside):
        loop.train(bare, beside)

    by_backbone = _accuracies(run_folder.read_record(beside))
    if best is None:
        said = _on_test_images(_accuracies(record), by_backbone)
    else:
        said = _on_held_out_images(best, by_backbone["harmonic"])
    if not said:
        return
    trained = record["parameters"]["trainable"] > 0
    advice = _OTHERS if trained else _OF_NO_TRAINING
    warnings.warn(f"{said}; {_use(beside)}; {advice}", stacklevel=3)


def _warn_if_start_is_best(start: Path, best: dict[str, Any] | None) -> None:
    """Warn if no epoch was better than the trained model that the run started from."""
    if best is None or best["epoch"] > 0:
        return
    found = f"{100 * best[held_out.SCORE]:.1f}% on the held-out classes"
    said = f"no epoch finds more than the model that it began from, {found} (R@1, harmonic mean)"
    warnings.warn(f"{said}, which is kept; {_use(start)}; {_OTHERS}", stacklevel=4)


def _use(folder: Path) -> str:
    """How to use the model in a folder, in Python and by the commands."""
    shown = paths.shown(folder)
    return f"to use it: pumalib.load({shown!r}), or --model {shlex.quote(shown)}"


def _on_test_images(found: dict[str, float], by_backbone: dict[str, float]) -> str:
    """The warning if a model is below its frozen backbone on the test images, else ""."""
    if all(found[row] >= by_backbone[row] for row in ROWS):
        return ""
    what = f"the frozen backbone finds {_percent(by_backbone)} on these folders"
    theirs = f"your model {_percent(found)} (R@1; pumalib.read_scores has the intervals)"
    return f"{what}, {theirs}"


def _on_held_out_images(best: dict[str, Any], by_backbone: float) -> str:
    """The same for the best epoch, by the harmonic R@1 on the held-out classes."""
    score = best[held_out.SCORE]
    if score >= by_backbone:
        return ""
    what = f"the frozen backbone finds {100 * by_backbone:.1f}% on the held-out classes"
    epoch = best["epoch"]
    return f"{what}, your model {100 * score:.1f}% in its best epoch, {epoch} (R@1, harmonic mean)"


def of_backbone(run: Run, on_held_out: bool) -> Run:
    """The run of the frozen backbone on the same images, without training.

    It tests the test classes or, with `on_held_out`, the held-out ones.  Settings that only concern
    training are not copied, so that many runs share it.
    """
    recipe = Training(device=run.training.device, workers=run.training.workers)
    return Run(
        data=replace(run.data, shots=0, holdout=on_held_out),
        backbone=run.backbone,
        pretrained=run.pretrained,
        method=BARE,
        training=recipe,
        pooling=run.pooling,
    )


def _accuracies(record: dict[str, Any]) -> dict[str, float]:
    return {row["dataset"]: row[METRIC] for row in record["table"]}


def _percent(accuracies: dict[str, float]) -> str:
    unified, harmonic = (f"{100 * accuracies[row]:.1f}%" for row in ROWS)
    if unified == harmonic:
        return unified
    return f"{unified} (harmonic mean of datasets {harmonic})"
