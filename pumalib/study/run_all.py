"""Rows of a table to results: each run is trained once, kept under the name of what it is, and shared by all notebooks.
`run_all({"PUMA": profile.run("puma"), "Linear": profile.run("linear")}, profile).wide("R@1")` is a first table."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from .. import embedder, evaluation, losses, training
from ..config import Data, Profile, Run
from ..data import expected, load
from ..training import run_folder
from . import runs, store
from .results import Results, collect

# Of one method and loss, each trained on another dataset: each is judged on its own, their mean on all (Sec. 5.2).
Ensemble = tuple[Run, ...]


def specific(run: Run) -> Ensemble:
    """`run` on each of its datasets alone; those of "paper" need not be there yet."""
    known = expected(run.data)
    names = load(run.data).datasets if known is None else list(dict.fromkeys(known["dataset"]))
    names = [name for name in names if name in (run.data.datasets or names)]
    return tuple(replace(run, data=replace(run.data, datasets=(name,))) for name in names)


def run_all(rows: Mapping[str, Run | Ensemble], profile: Profile, side: Collection[str] = ()) -> "Results":
    """Train what is not yet kept of every row, once per seed of the profile, and collect the results.
    Rows in `side` have `profile.side_seeds`, and what further seeds are kept.  A kept run is taken as it is, an unfinished
    one resumed; of two processes that want one run, one trains it and the other waits.  `profile.jobs` train at a time,
    or the workers of `profile.dask`; where runs are missing and `profile.train` is False, raises `store.NotKept`."""
    names, wanted_runs, ensembles, done = {row: [] for row in rows}, {}, {}, store.read(profile.name)
    for row, parts in asked(rows, profile, side, done):
        name, mine = _name(rows[row], parts), [run_folder.run_name(run) for run in parts]
        ensembles |= {} if isinstance(rows[row], Run) else {name: mine}
        names[row].append(name)
        wanted_runs |= zip(mine, parts)
    missing = {store.folder(name, profile.name): run for name, run in wanted_runs.items() if name not in done}
    means = ensembles.keys() - done.keys()
    if (missing or means) and not profile.train:
        raise store.NotKept(f"{len(missing)} of {len(wanted_runs)} runs and {len(means)} ensembles are not kept")
    for run in missing.values():
        loss_of(run)  # a bad setting of the last run is refused before the first is trained
    if missing and (profile.dask or profile.jobs > 1):
        from . import cluster  # Dask takes a second to import

        jobs = {folder.name: (asdict(run), str(folder)) for folder, run in missing.items()}
        with nullcontext(profile.dask) if profile.dask else cluster.local(profile.jobs) as address:
            cluster.run_each(_train_for, jobs, address, next(iter(missing)).parent)
    else:
        for number, (folder, run) in enumerate(missing.items(), 1):
            _train(run, folder, f"run {number} of {len(missing)}")
    for name in means:
        _average(name, ensembles[name], profile.name)
    return collect(names, profile.name)


def asked(rows, profile: Profile, side: Collection[str], done: Collection = ()) -> Iterator[tuple[str, list[Run]]]:
    """Each row once per seed, with its run, or the members of its ensemble; of a side row further seeds if `done`."""
    few = len(profile.side_seeds or profile.seeds)
    for row, wanted in rows.items():
        for number, seed in enumerate(profile.seeds):
            parts = [replace(run, seed=seed) for run in ((wanted,) if isinstance(wanted, Run) else wanted)]
            if row in side and number >= few and not (done and _name(wanted, parts) in done):
                break
            yield row, parts


def _name(wanted: Run | Ensemble, parts: list[Run]) -> str:
    names = [run_folder.run_name(run) for run in parts]
    return names[0] if isinstance(wanted, Run) else run_folder.ensemble_name(names)


def _train(run: Run, folder: Path, position: str = "") -> None:
    with store.held(folder):
        training.train(run, folder, position)


def _train_for(content: dict, folder: str) -> None:
    run, name = Run.from_dict(content), Path(folder).name
    if (mine := run_folder.run_name(run)) != name:
        said = "its pumalib, datasets or weights are not the client's; share checkout and datasets, or make them equal"
        raise RuntimeError(f"this worker would call this run {mine}: {said}, and restart the workers")
    _train(run, Path(folder))


def _average(name: str, members: list[str], profile: str) -> None:
    """Keep an ensemble: what is its own of each member, and the mean of all embeddings on the union."""
    records = [store.record(member, profile) for member in members]
    members_runs = [runs.run_of(member, profile) for member in members]
    own = [run.data.datasets[0] for run in members_runs]
    union, loss = replace(members_runs[0].data, datasets=tuple(own)), loss_of(members_runs[0])
    outputs, images = zip(*(embeddings(member, profile, union, train=True) for member in members), strict=True)
    options = {"distance": loss.metric, "device": training.choose_device(members_runs[0].training.device)}
    scores = evaluation.scores(loss.average(torch.from_numpy(np.stack(outputs))), images[0], evaluation.KS, **options)
    for dataset, output in zip(own, outputs, strict=True):
        mine = (images[0]["dataset"] == dataset).to_numpy()
        alone = evaluation.scores(output[mine], images[0][mine], evaluation.KS, **options)
        scores.values[dataset] = alone.values[dataset]
    record = {"name": name, "members": members, "environment": records[0]["environment"]}
    record["parameters"] = {key: sum(r["parameters"][key] for r in records) for key in ("trainable", "total")}
    record |= {"seconds": sum(r["seconds"] for r in records), "images_per_second": None, "log": []}
    table = scores.table().reset_index(names="dataset").to_dict("records")
    store.add({**record, "table": table, **scores.packed()}, profile)


def loss_of(run: Run) -> losses.base.Loss:
    """The loss of a run for what needs no classes: how its embeddings are compared and averaged."""
    settings = {key: value for key, value in run.loss_settings.items() if key != "similarity"}  # of the classes
    return losses.make(run.loss, 2, run.dim, **settings)


def model(name: str, profile: str, train: bool = False) -> embedder.Embedder:
    """The trained model of a kept run; if only its numbers were kept, trained again if `train`, else `store.NotKept`."""
    folder, run = store.folder(name, profile), runs.run_of(name, profile)
    if not (folder / store.MODEL).is_file():
        if not train:
            remedy = f"pass train=True to train it again, or call `python -m pumalib train {name} --profile {profile}`"
            raise store.NotKept(f"only the numbers of {profile}/{name} were kept, not its model: {remedy}")
        _train(run, folder)
    return embedder.load(folder, device=training.choose_device(run.training.device))


def embeddings(name: str, profile: str, data: Data | None = None, train: bool = False):
    """Test embeddings (n, dim) of a kept run and the rows of the test table they belong to; see `embed_kept`."""
    rows = load(data or runs.run_of(name, profile).data).test.reset_index(drop=True)
    return embed_kept(name, profile, rows, data, train), rows


def embed_kept(name: str, profile: str, rows: pd.DataFrame, data: Data | None = None, train: bool = False, **options):
    """`embedder.embed_rows` by the model of a kept run: `rows` of its own benchmark, or of `data`; `train` as in `model`."""
    trained = model(name, profile, train)
    options["device"], settings = training.choose_device(trained.run.training.device), trained.run.data
    return embedder.embed_rows(trained.model, load(data or settings), rows, settings, **options)
