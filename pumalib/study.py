"""Rows of a table to results: each run is trained once, cached by what it is, and shared by all notebooks.

    results = run_all({"PUMA": profile.run("puma"), "Linear": profile.run("linear")}, profile)
    results.wide("R@1")          # a row per name, a column per dataset
    results.save("quickstart")   # results/<profile>/quickstart.csv
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from filelock import FileLock
from tqdm import tqdm

from . import evaluation, losses, models, paths, training
from .config import Data, Profile, Run
from .results import Results, collect


@dataclass(frozen=True)
class Ensemble:
    """Dataset-specific models as one: each is judged on its own dataset, their averaged embedding on all (Sec. 5.2).

    Attributes:
        runs: of one method and loss, each trained on another dataset.
    """

    runs: tuple[Run, ...]


def specific(run: Run) -> Ensemble:
    """`run` on each of its datasets alone."""
    names = training.load_data(run.data).datasets
    return Ensemble(tuple(replace(run, data=replace(run.data, datasets=(name,))) for name in names))


def run_all(rows: Mapping[str, Run | Ensemble], profile: Profile, side: Collection[str] = ()) -> Results:
    """Train what is not yet trained of every row, once per seed of the profile, and collect the results.

    Rows named in `side` are run with `profile.side_seeds`.

    A finished run is taken as it is, an unfinished one resumed; of two processes that want the same run, one
    trains it and the other waits.  Where `PUMALIB_DASK` holds the address of a Dask scheduler, its workers train.
    """
    missing, folders, ensembles = {}, {}, {}
    for row, wanted in rows.items():
        folders[row] = []
        for seed in (profile.side_seeds if row in side else ()) or profile.seeds:
            runs = [replace(run, seed=seed) for run in (wanted.runs if isinstance(wanted, Ensemble) else (wanted,))]
            places = [run_folder(run, profile.name) for run in runs]
            missing |= dict(zip(places, runs, strict=True))
            if isinstance(wanted, Ensemble):
                places = [ensemble_folder(places)]
                ensembles[places[0]] = runs
            folders[row] += places
    if _plan is not None:
        _plan.update(missing)
        raise Planned
    missing = {folder: run for folder, run in missing.items() if not (folder / training.FINISHED).is_file()}
    if missing and os.environ.get("PUMALIB_DASK"):
        from . import cluster  # Dask takes a second to import

        cluster.train(missing, os.environ["PUMALIB_DASK"])
    for folder, run in tqdm(missing.items(), desc="runs", unit="run", disable=not missing):
        train(run, folder)
    for folder, runs in tqdm(ensembles.items(), desc="ensembles", leave=False, disable=not ensembles):
        average(folder, runs, profile.name)
    return collect(folders, profile.name)


def train(run: Run, folder: Path) -> None:
    """`training.train`, unless another process is at it: then wait, and take or finish what it left."""
    make_folder(folder)
    with FileLock(folder / ".lock"):
        training.train(run, folder)


def run_folder(run: Run, profile: str) -> Path:
    """Where a run lives: a readable name that ends in a hash of everything that can change its numbers."""
    weights = models.backbones.weights_digest(run.backbone, run.pretrained)
    name = f"{run.method.name}-{run.loss}-{run.identity(training.load_data(run.data).digest(), weights)[:8]}"
    return paths.RESULTS / profile / "runs" / name


def make_folder(folder: Path) -> None:
    """Make a run's folder, or say how to write elsewhere."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot make {folder}: {error.strerror}; name another place with PUMALIB_RESULTS=<folder>"
        ) from error


def ensemble_folder(members: list[Path]) -> Path:
    """Where an ensemble of these runs lives, by the name of their method and loss and a hash of theirs."""
    name = members[0].name.rsplit("-", 1)[0]
    return members[0].with_name(f"{name}-ensemble-{short_hash([member.name for member in members])}")


def average(folder: Path, runs: list[Run], profile: str) -> None:
    """Judge an ensemble: what is its own of each member, and the mean of all embeddings on the union."""
    make_folder(folder)
    with FileLock(folder / ".lock"):
        if (folder / training.FINISHED).is_file():
            return
        places = [run_folder(run, profile) for run in runs]
        union = replace(runs[0].data, datasets=tuple(run.data.datasets[0] for run in runs))
        images = training.load_data(union).test.reset_index(drop=True)
        loss = loss_of(runs[0])
        judge = partial(evaluation.scores, ks=training.KS, distance=loss.metric, device=_device(runs[0]))
        outputs = [embeddings(place, union)[0] for place in places]
        scores = judge(loss.average(torch.from_numpy(np.stack(outputs))), images)
        for output, run in zip(outputs, runs, strict=True):
            (name,) = run.data.datasets
            mine = (images["dataset"] == name).to_numpy()
            scores.values[name] = judge(output[mine], images[mine]).values[name]
        metrics = [json.loads((place / training.FINISHED).read_text(encoding="utf-8")) for place in places]
        environment = json.loads((places[0] / "environment.json").read_text(encoding="utf-8"))
        for file, content in {"run.json": dict(members=[p.name for p in places]), "environment.json": environment}.items():
            with paths.written_whole(folder / file) as temporary:
                temporary.write_text(json.dumps(content, indent=2), encoding="utf-8")
        training.finish(
            folder, scores, images_per_second=None, seconds=sum(m["seconds"] for m in metrics),
            **{key: sum(m["parameters"][key] for m in metrics) for key in ("trainable", "total")},
        )  # fmt: skip


def _device(run: Run) -> torch.device:
    return training.choose_device(run.training.device)


def embeddings(folder: Path, data: Data | None = None) -> tuple[np.ndarray, pd.DataFrame]:
    """Test embeddings (n, dim) of a finished run and the rows of the test table they belong to.

    Args:
        data: another benchmark than the run's own.
    """
    rows = training.load_data(data or read_run(folder).data).test.reset_index(drop=True)
    return embed(folder, rows, data), rows


def embed(folder: Path, rows: pd.DataFrame, data: Data | None = None, **options):
    """`training.embed` by the model of a finished run: `rows` of its own benchmark, or of `data`."""
    trained = models.load(with_model(folder))
    benchmark, device = training.load_data(data or trained.run.data), _device(trained.run)
    return training.embed(trained.model.to(device), benchmark, rows, trained.run.data, device=device, **options)


def loss_of(run: Run) -> losses.base.Loss:
    """The loss of a run for what needs no classes: how its embeddings are compared and averaged."""
    return losses.make(run.loss, 2, run.dim, **run.loss_settings)


def with_model(folder: Path) -> Path:
    """`folder`, its run trained again if only the numbers were kept, as in a fresh clone."""
    with FileLock(folder / ".lock"):
        if not (folder / models.saving.FILE).is_file():
            again = folder / "again"
            make_folder(again)
            training.train(read_run(folder), again)
            (again / models.saving.FILE).replace(folder / models.saving.FILE)
            shutil.rmtree(again)
    return folder


def members(folder: Path) -> dict[str, Path]:
    """Per dataset the folder of an ensemble's member."""
    names = json.loads((folder / "run.json").read_text(encoding="utf-8"))["members"]
    found = [folder.with_name(name) for name in names]
    return {read_run(member).data.datasets[0]: member for member in found}


def read_run(folder: Path) -> Run:
    """The `Run` of a folder."""
    return Run.from_json((folder / "run.json").read_text(encoding="utf-8"))


def short_hash(content) -> str:
    """Eight hexadecimal digits that tell JSON contents apart."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


class Planned(Exception):
    """No error: raised by `run_all` instead of training while `planning`, it ends a notebook whose runs are only told."""


_plan: dict[Path, Run] | None = None


@contextmanager
def planning() -> Iterator[dict[Path, Run]]:
    """Inside, `run_all` trains nothing: it notes folder and run of all it was asked for, and raises `Planned`."""
    global _plan
    _plan = {}
    try:
        yield _plan
    finally:
        _plan = None
