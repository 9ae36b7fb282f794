"""Whether finished runs are what they say: names, numbers, models; for `python -m pumalib runs verify`."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import safetensors

from . import config, evaluation, study, training
from .config import Run
from .kept import Kept, differing
from .models.saving import FILE as MODEL
from .results import METRIC_ORDER, OVERALL

ROUNDING = 1e-7  # metrics.json has 8 decimals
TOLERANCE = 0.005  # of an accuracy evaluated again, or two queries: rounding decides near ties anew


class Doubt(str):
    """What cannot be verified on this machine: no problem of the run."""


def problems(k: Kept, evaluate: bool = False) -> Iterator[str]:
    """What is wrong with a finished run, one sentence each; a `Doubt` where this machine cannot tell.

    Args:
        evaluate: embed and evaluate again, and compare with the stored table.
    """
    if k.damage:
        yield k.damage
        return
    broken = list(metrics_problems(k))
    yield from broken
    for name in k.members:
        if not (k.folder.with_name(name) / training.FINISHED).is_file():
            yield f"its member {name} is missing or not finished; `run` trains it again"
            return
    yield from _model_problems(k)
    try:
        why = outdated(k)
    except (ValueError, OSError) as error:
        yield Doubt(f"cannot tell whether it is outdated, data or weights absent: {error}")
        return
    if why:
        yield f"outdated: {why}"
    elif evaluate and not broken:
        yield from _evaluation_problems(k)


def outdated(k: Kept) -> str:
    """Why today's settings, data and weights give another folder name, "" if they do not.

    Raises:
        ValueError, OSError: data or weights are not on this machine.
    """
    if k.members and (name := study.ensemble_folder([k.folder.with_name(m) for m in k.members]).name) != k.folder.name:
        return f"its members give {name}"
    for run, member in zip(k.runs, k.members or [k.folder.name], strict=True):
        name = study.run_folder(run, k.profile).name
        if name == member:
            continue
        of = f"its member {member}: " if k.members else ""
        then = json.loads((k.folder.with_name(member) / "environment.json").read_text(encoding="utf-8")).get("data")
        now = training.data_of(run).digest()
        if then != now:
            return f"{of}the data has changed since (digest {str(then)[:8]}, now {now[:8]}), and gives {name}"
        return (f"{of}the same data gives {name} today: the numbers version (config.NUMBERS, now {config.NUMBERS}), "
                "the backbone's weights or run.json have changed since")  # fmt: skip
    return ""


def metrics_problems(k: Kept) -> Iterator[str]:
    """What is wrong with the numbers of a finished run: missing, not finite, or not those of the stored hits."""
    try:
        metrics = k.read(training.FINISHED)
        k.read("environment.json")["device"]
        numbers = [*(metrics["parameters"][key] for key in ("trainable", "total")), metrics["seconds"]]
        table = pd.DataFrame(metrics["table"]).set_index("dataset")
        values = table[[metric + end for metric in METRIC_ORDER for end in ("", "_low", "_high")]].astype(float)
        counts = {name: (int(table.at[name, "queries"]), int(table.at[name, "excluded"])) for name in table.index}
        hits = {name: base64.b64decode(metrics["hits"][name], validate=True) for name in table.index.drop("harmonic")}
        whole = len(k.runs) == len(k.members or [k.folder])  # an ensemble's datasets are known from all its members
        wanted = (whole and k.settings["data.datasets"]) or table.index.drop(list(OVERALL))
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        yield f"metrics.json or environment.json is damaged or lacks something ({type(error).__name__}: {error})"
        return
    if list(table.index) != [*wanted, *OVERALL]:
        yield f"metrics.json has the rows {', '.join(table.index)}, not {', '.join([*wanted, *OVERALL])}"
        return
    if not (np.isfinite(numbers).all() and min(numbers) >= 0):
        yield "metrics.json: numbers of parameters and seconds are not all finite and at least 0"
    wrong = ~(values.ge(0) & values.le(1))  # NaN too
    for name, column in zip(*np.nonzero(wrong.to_numpy())):
        yield f"metrics.json: {values.columns[column]} of {values.index[name]} is {values.iat[name, column]}, no fraction"
    given = {}
    for name, packed in hits.items():
        count = counts[name][0]
        if len(packed) != -(-count // 8):
            yield f"metrics.json: the stored hits of {name} are not those of its {count} queries"
            return
        given[name] = np.unpackbits(np.frombuffer(packed, np.uint8), count=count).mean()
    given["harmonic"] = evaluation.harmonic_mean(np.array([given[name] for name in wanted]))
    for name, r1 in given.items():
        if abs(values.at[name, "R@1"] - r1) > ROUNDING:
            yield f"metrics.json: R@1 of {name} is {values.at[name, 'R@1']:.6f}, its stored hits give {r1:.6f}"


def _model_problems(k: Kept) -> Iterator[str]:
    file = k.folder / MODEL
    if not file.is_file():
        return
    try:
        with safetensors.safe_open(file, "pt") as opened:
            of = Run.from_json((opened.metadata() or {}).get("run", "{}"))
            spoilt = [name for name in opened.keys() if not opened.get_tensor(name).isfinite().all()]
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        yield f"{MODEL} cannot be read ({error}); remove it with --models: it is trained again where it is needed"
        return
    if spoilt:
        yield f"{MODEL}: {spoilt[0]} is not finite"
    if fields := differing([k.settings, Kept(k.folder, (of,)).settings]):
        yield f"{MODEL} was trained with other settings than run.json has: {', '.join(fields)}"


def _evaluation_problems(k: Kept) -> Iterator[str]:
    """Embed and evaluate again; never train: `study` would, where only the numbers were kept."""
    folders = [k.folder.with_name(name) for name in k.members] or [k.folder]
    if not all((folder / MODEL).is_file() for folder in folders):
        yield Doubt("cannot be evaluated again: only its numbers were kept")
        return
    try:
        if k.members:
            with tempfile.TemporaryDirectory() as folder:
                study.average(Path(folder), list(k.runs), k.profile)
                again = Kept(Path(folder), ()).read(training.FINISHED)["table"]
        else:
            run = k.runs[0]
            metric = study.loss_of(run).metric
            device = training.choose_device(run.training.device)
            scores = evaluation.scores(*study.embeddings(k.folder), training.KS, distance=metric, device=device)
            again = scores.table(bootstrap=0).reset_index().to_dict("records")
    except ValueError as error:
        yield f"cannot be evaluated again: {error}"
        return
    except (OSError, RuntimeError, AssertionError) as error:  # weights from the hub, or the run's device, are not here
        yield Doubt(f"cannot be evaluated again here: {error}")
        return
    stored = pd.DataFrame(k.read(training.FINISHED)["table"]).set_index("dataset").drop("harmonic")  # follows from the others
    again = pd.DataFrame(again).set_index("dataset").loc[stored.index]
    off = (stored[METRIC_ORDER] - again[METRIC_ORDER]).abs()
    far = off.gt(np.maximum(TOLERANCE, 2 / stored["queries"]), axis=0)
    for name, column in zip(*np.nonzero(far.to_numpy())):
        metric, dataset = METRIC_ORDER[column], stored.index[name]
        yield f"evaluated again, {metric} of {dataset} is {again.at[dataset, metric]:.4f}, stored is {stored.at[dataset, metric]:.4f}"
