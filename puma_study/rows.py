"""From the rows of a table to their results: each run is trained once, for all notebooks.

A run's name follows from its settings, under which it is kept and found again.  A first table is
`run_all({"PUMA": profile.run("puma"), "Linear": profile.run("linear")}, profile).wide("R@1")`.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from pumalib import embedder, evaluation, losses, training
from pumalib.config import Data, Profile, Run
from pumalib.data import expected, load, unchanged
from pumalib.training import run_folder

from . import store
from .record import FinishedRun
from .results import Results, collect
from .runs import run_of

# One run per dataset, all of one method and loss: each is scored on its own dataset, and the mean
# of their embeddings on the union of all (Sec. 5.2).
Ensemble = tuple[Run, ...]


@dataclass(frozen=True)
class SeededRow:
    """A row at one seed: its run, or the members of its ensemble."""

    row: str
    runs: tuple[Run, ...]
    is_ensemble: bool

    @cached_property
    def run_names(self) -> list[str]:
        """Names of its runs; raises ValueError or OSError if data or weights are missing."""
        return [run_folder.run_name(run) for run in self.runs]

    @cached_property
    def name(self) -> str:
        """The name that its result is kept under; raises as `run_names`."""
        if self.is_ensemble:
            return run_folder.ensemble_name(self.run_names)
        return self.run_names[0]


def specific(run: Run, same_images: bool = False) -> Ensemble:
    """An ensemble of `run`, one member per dataset; images of "paper" need not be there.

    A member is trained for the epochs of `run`, or with `same_images` for as many as show it as
    many images as `run` shows of all datasets, rounded to whole epochs.
    """
    members = []
    for dataset in _datasets(run.data):
        members.append(replace(run, data=replace(run.data, datasets=(dataset,))))
    if not same_images:
        return tuple(members)
    of_all = training_images(run)
    longer = []
    for member in members:
        factor = of_all / training_images(member)
        longer.append(replace(member, training=member.training.stretched(factor)))
    return tuple(longer)


def training_images(run: Run) -> int:
    """The number of training images; of "paper" by Table 1, if its files are not there.

    Raises ValueError or OSError if images are missing and their number is not known.
    """
    try:
        return len(load(run.data, run.seed).train)
    except (ValueError, OSError):
        known = expected_images(run.data)
        if known is None:
            raise
        return known


def expected_images(settings: Data) -> int | None:
    """The number of training images if it is known without files (Table 1), else None."""
    known = expected(settings)
    if known is None:
        return None
    of_train = known[known["split"] == "train"]
    images = of_train["images"]
    if settings.shots:
        images = images.clip(upper=settings.shots * of_train["classes"])
    return int(images.sum())


def _datasets(settings: Data) -> list[str]:
    """The datasets that `settings` select, in the benchmark's order."""
    known = expected(settings)
    if known is not None:
        return list(dict.fromkeys(known["dataset"]))
    names = load(settings).datasets
    if settings.datasets is None:
        return names
    return [name for name in names if name in settings.datasets]


def run_all(
    rows: Mapping[str, Run | Ensemble],
    profile: Profile,
    side: Collection[str] = (),
    may_fail: Collection[str] = (),
) -> Results:
    """Train the runs of all rows, one per seed, that are not kept yet; return the results.

    Every row has the profile's seeds; a row in `side` has only `profile.side_seeds`.  Seeds that
    follow, up to the last of `profile.further_seeds`, are added as far as their runs are kept.

    Kept runs are reused, unfinished ones resumed; if two processes need one run, one trains it and
    the other waits.  `profile.jobs` runs train at a time, or one on each worker of `profile.dask`.

    A run whose loss is not finite has failed.  The failure is kept, the other runs are trained, and
    the failed one is not trained again until `runs remove` drops it.  Its row is left out and named
    in `Results.failed` if it is in `may_fail`, as in a search for settings.

    Raises `store.NotKept` if runs are missing and `profile.train` is False, and `store.Failed` if a
    run failed whose row is not in `may_fail`.
    """
    _require_known_losses(profile)
    done = store.read(profile.name)
    failed = store.failures(profile.name)
    runs_by_name: dict[str, Run] = {}
    with unchanged():
        seeded = list(seeded_rows(rows, profile, side, done))
        for one in seeded:
            runs_by_name.update(zip(one.run_names, one.runs))
    _require_own_records(runs_by_name, done, profile.name)
    missing = {
        name: run for name, run in runs_by_name.items() if name not in done and name not in failed
    }
    ensembles = {one.name: one for one in seeded if one.is_ensemble and one.name not in done}

    can_be_averaged = [one for one in ensembles.values() if failed.keys().isdisjoint(one.run_names)]
    if (missing or can_be_averaged) and not profile.train:
        raise store.NotKept(
            f"{len(missing)} of {len(runs_by_name)} runs and {len(can_be_averaged)} ensembles "
            "are not kept"
        )
    _train_missing(missing, profile)

    failed_rows = _failed_rows(seeded, may_fail, profile.name)
    for ensemble in ensembles.values():
        if ensemble.row not in failed_rows:
            _average(ensemble, profile.name)
    names = _names_by_row(rows, seeded)
    whole_rows = {row: names[row] for row in names if row not in failed_rows}
    return replace(collect(whole_rows, profile.name), failed=failed_rows)


def _require_known_losses(profile: Profile) -> None:
    """Raise ValueError if a recipe names an unknown loss: it would have no effect."""
    for key in profile.recipes:
        _, slash, loss = key.partition("/")
        if slash:
            try:
                losses.defaults(loss)
            except ValueError as error:
                where = f"profile {profile.name!r}, recipes.{key}"
                raise ValueError(f"{where}: {error}") from None


def _require_own_records(
    runs: Mapping[str, Run], done: Mapping[str, FinishedRun], profile: str
) -> None:
    """Raise ValueError if a record in `done` is of other settings or images than its run.

    The name of a run of a few images a class is by the images of seed 0, so theirs are compared.
    """
    for name, run in runs.items():
        if name not in done:
            continue
        problem = ""
        if done[name].settings.fingerprint("", "") != run.fingerprint("", ""):
            problem = "has the settings of another run"
        elif run.data.shots and done[name].environment.data != load(run.data, run.seed).digest:
            problem = "was trained on other images"
        if problem:
            removed = store.HOW_TO_REMOVE.format(name=name)
            raise ValueError(
                f"what is kept in profile {profile} as {name} {problem}: "
                f"{removed}, and it is trained again"
            )


def _failed_rows(
    seeded: list[SeededRow], may_fail: Collection[str], profile: str
) -> dict[str, str]:
    """Rows with failed runs, all of them in `may_fail`, and for each a text on the failures.

    Raises `store.Failed` if a run of another row failed.
    """
    needed = [name for one in seeded if one.row not in may_fail for name in one.run_names]
    store.require_none_failed(dict.fromkeys(needed), profile)

    known = store.failures(profile)
    failed: dict[str, list[str]] = {}
    for one in seeded:
        for name in one.run_names:
            if name in known:
                failed.setdefault(one.row, []).append(known[name].summary)
    return {row: ", ".join(dict.fromkeys(summaries)) for row, summaries in failed.items()}


def seeded_rows(
    rows: Mapping[str, Run | Ensemble],
    profile: Profile,
    side: Collection[str],
    done: Collection[str] = (),
) -> Iterator[SeededRow]:
    """Each row at each of its seeds, and at further seeds that are `done` (see `run_all`)."""
    for row, asked_for in rows.items():
        own_seeds = profile.seeds
        if row in side and profile.side_seeds:
            own_seeds = profile.side_seeds
        for number, seed in enumerate((*profile.seeds, *profile.further_seeds)):
            seeded = _at_seed(row, asked_for, seed)
            is_further = number >= len(own_seeds)
            if is_further and (not done or seeded.name not in done):
                break
            yield seeded


def _at_seed(row: str, asked_for: Run | Ensemble, seed: int) -> SeededRow:
    if isinstance(asked_for, Run):
        return SeededRow(row, (replace(asked_for, seed=seed),), is_ensemble=False)
    members = tuple(replace(member, seed=seed) for member in asked_for)
    return SeededRow(row, members, is_ensemble=True)


def _names_by_row(rows: Iterable[str], seeded: list[SeededRow]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {row: [] for row in rows}
    for one in seeded:
        names[one.row].append(one.name)
    return names


def _train_missing(missing: Mapping[str, Run], profile: Profile) -> None:
    """Train runs, given by name, here or on a cluster."""
    folders = {name: store.folder(name, profile.name) for name in missing}
    for run in missing.values():
        loss_of(run)  # a bad setting of the last run is refused before the first is trained
    if missing and (profile.dask or profile.jobs > 1):
        _train_on_workers(missing, folders, profile)
        return
    for number, (name, run) in enumerate(missing.items(), 1):
        _train_or_fail(run, folders[name], f"run {number} of {len(missing)}")


def _train_on_workers(
    missing: Mapping[str, Run], folders: Mapping[str, Path], profile: Profile
) -> None:
    from pumalib import cluster  # Dask takes a second to import

    jobs = {name: (asdict(run), str(folders[name])) for name, run in missing.items()}
    shared = next(iter(folders.values())).parent
    if profile.dask:
        cluster.run_each(_train_for, jobs, profile.dask, shared)
        return
    with cluster.local(profile.jobs) as address:
        cluster.run_each(_train_for, jobs, address, shared, patience=cluster.PATIENCE)


def _train_for(content: dict[str, Any], folder: str) -> None:
    """Train a run on a worker; RuntimeError if the run would have another name there."""
    run = Run.from_dict(content)
    name = Path(folder).name
    mine = run_folder.run_name(run)
    if mine != name:
        raise RuntimeError(
            f"this worker would call this run {mine}: its pumalib, datasets or weights are not "
            "the client's; share checkout and datasets, or make them equal, and restart the workers"
        )
    _train_or_fail(run, Path(folder))


def _train_or_fail(run: Run, folder: Path, position: str = "") -> None:
    """Train one of several runs; its failure is kept, and raised when the others are finished.

    Another process may have found the failure first.
    """
    with suppress(training.NonFiniteLoss, store.Failed):
        _train(run, folder, position)


def _train(run: Run, folder: Path, position: str = "") -> None:
    with store.held(folder):
        training.train(run, folder, position)


def _average(ensemble: SeededRow, profile: str) -> None:
    """Keep an ensemble: its scores, and the sums of its members' parameters and seconds."""
    records = [store.record(name, profile) for name in ensemble.run_names]
    scores = _ensemble_scores(ensemble.run_names, profile)
    content = {
        "name": ensemble.name,
        "members": ensemble.run_names,
        "environment": records[0].environment.model_dump(),
        "parameters": {
            "trainable": sum(record.parameters.trainable for record in records),
            "total": sum(record.parameters.total for record in records),
        },
        "seconds": sum(record.seconds for record in records),
        "images_per_second": None,
        "log": [],
        "table": scores.table().reset_index(names="dataset").to_dict("records"),
        **scores.packed(),
    }
    store.add(FinishedRun.rounded(content), profile)


def _ensemble_scores(members: list[str], profile: str) -> evaluation.Scores:
    """Scores of an ensemble: of the mean embedding on the union, of each member on its dataset."""
    members_settings = [run_of(name, profile) for name in members]
    first = members_settings[0]
    own = [_own_dataset(run) for run in members_settings]
    union = replace(first.data, datasets=tuple(own))
    loss = loss_of(first)
    device = training.choose_device(first.training.device)

    def scored(vectors: np.ndarray | torch.Tensor, rows: pd.DataFrame) -> evaluation.Scores:
        return evaluation.scores(vectors, rows, evaluation.KS, distance=loss.metric, device=device)

    outputs = []
    for name in members:
        vectors, images = embeddings(name, profile, union, train=True)
        outputs.append(vectors)
    mean = loss.average(torch.from_numpy(np.stack(outputs)))
    scores = scored(mean, images)
    for dataset, vectors in zip(own, outputs, strict=True):
        mine = (images["dataset"] == dataset).to_numpy()
        alone = scored(vectors[mine], images[mine])
        scores.values[dataset] = alone.values[dataset]
    return scores


def _own_dataset(run: Run) -> str:
    if run.data.datasets is None:
        raise ValueError("a member of an ensemble is trained on one dataset, which its run names")
    return run.data.datasets[0]


def loss_of(run: Run) -> losses.base.Loss:
    """The loss of a run, made for two classes: enough to compare and average embeddings."""
    # `similarity` has a row per class of the training set.
    settings = {key: value for key, value in run.loss_settings.items() if key != "similarity"}
    with warnings.catch_warnings():
        # a warning that two classes are too few for a setting does not concern the run
        warnings.simplefilter("ignore")
        return losses.make(run.loss, 2, run.dim, **settings)


def model(name: str, profile: str, train: bool = False) -> embedder.Embedder:
    """The trained model of a kept run.

    If only its numbers were kept, it is trained again if `train`; else `store.NotKept` is raised.
    """
    run = run_of(name, profile)
    folder = store.folder(name, profile)
    if not (folder / store.MODEL).is_file():
        if not train:
            raise store.NotKept(
                f"only the numbers of {profile}/{name} were kept, not its model: pass train=True "
                f"to train it again, or call `python -m puma_study runs train {name} "
                f"--profile {profile}`"
            )
        _train(run, folder)
    return embedder.load(folder, device=training.choose_device(run.training.device))


def embeddings(
    name: str, profile: str, data: Data | None = None, train: bool = False
) -> tuple[np.ndarray, pd.DataFrame]:
    """Test embeddings (n, dim) of a kept run, and their rows of the test table (`embed_kept`)."""
    settings = data or run_of(name, profile).data
    rows = load(settings).test.reset_index(drop=True)
    return embed_kept(name, profile, rows, data, train), rows


def embed_kept(
    name: str,
    profile: str,
    rows: pd.DataFrame,
    data: Data | None = None,
    train: bool = False,
    *,
    prompt_weights: bool = False,
) -> Any:
    """Embeddings (n, dim), float32, of rows of a test table by the model of a kept run.

    `rows` belong to the run's own benchmark, or to that of `data`; `train` as in `model`.  With
    `prompt_weights` it returns the same as `embedder.embed_with_prompt_weights`.
    """
    trained = model(name, profile, train)
    settings = trained.run.data
    benchmark = load(data or settings)
    device = training.choose_device(trained.run.training.device)
    if prompt_weights:
        return embedder.embed_with_prompt_weights(
            trained.model, benchmark, rows, settings, device=device
        )
    return embedder.embed_rows(trained.model, benchmark, rows, settings, device=device)
