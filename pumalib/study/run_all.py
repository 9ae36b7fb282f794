"""Rows of a table to results: each run is trained once, kept under the name of what it is, and shared by all notebooks.

results = run_all({"PUMA": profile.run("puma"), "Linear": profile.run("linear")}, profile)
results.wide("R@1")          # a row per name, a column per dataset
results.save("quickstart")   # results/<profile>/quickstart.csv
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from .. import config, data, evaluation, losses, models, paths, training
from ..config import Data, Profile, Run
from ..data.paper import DATASETS
from ..training import run_folder
from . import kept, paper

METRICS = [f"R@{k}" for k in evaluation.KS] + ["RP", "MAP@R"]


@dataclass(frozen=True)
class Ensemble:
    """Dataset-specific models as one: each is judged on its own dataset, their averaged embedding on all (Sec. 5.2).

    Attributes:
        runs: of one method and loss, each trained on another dataset.
    """

    runs: tuple[Run, ...]


def specific(run: Run) -> Ensemble:
    """`run` on each of its datasets alone; those of "paper" need not be there yet."""
    names = list(DATASETS) if run.data.benchmark == "paper" else data.load(run.data).datasets
    names = [name for name in names if name in (run.data.datasets or names)]
    return Ensemble(tuple(replace(run, data=replace(run.data, datasets=(name,))) for name in names))


def run_all(rows: Mapping[str, Run | Ensemble], profile: Profile, side: Collection[str] = ()) -> Results:
    """Train what is not yet kept of every row, once per seed of the profile, and collect the results.

    Rows named in `side` are run with `profile.side_seeds`.  A kept run is taken as it is, an unfinished one resumed;
    of two processes that want the same run, one trains it and the other waits.  Runs are trained here one after
    another, `profile.jobs` at a time, or by the workers of the Dask scheduler at `profile.dask`.
    """
    names, runs, ensembles = _named(rows, profile, side, kept.run_name)
    done = kept.read(profile.name)
    missing = {kept.folder(name, profile.name): run for name, run in runs.items() if name not in done}
    if missing and (profile.dask or profile.jobs > 1):
        from . import cluster  # Dask takes a second to import

        with nullcontext(profile.dask) if profile.dask else cluster.local(profile.jobs) as address:
            jobs = {folder.name: (run.to_json(), str(folder), config.NUMBERS) for folder, run in missing.items()}
            cluster.each(_train_for, jobs, address, next(iter(missing)).parent)
    else:
        for number, (folder, run) in enumerate(missing.items(), 1):
            _train(run, folder, f"run {number} of {len(missing)}")
    for name in ensembles.keys() - done.keys():
        _average(name, ensembles[name], profile.name)
    return collect(names, profile.name)


def _named(rows, profile: Profile, side: Collection[str], name_of: Callable[[Run], str]):
    """The names of each row's runs, every single run by name, and the names of each ensemble's members."""
    names, runs, ensembles = {}, {}, {}
    for row, wanted in rows.items():
        names[row] = []
        for seed in (profile.side_seeds if row in side else ()) or profile.seeds:
            parts = wanted.runs if isinstance(wanted, Ensemble) else (wanted,)
            mine = {name_of(run): run for run in (replace(part, seed=seed) for part in parts)}
            runs |= mine
            name = next(iter(mine))
            if isinstance(wanted, Ensemble):
                name = run_folder.ensemble_name(list(mine))
                ensembles[name] = list(mine)
            names[row].append(name)
    return names, runs, ensembles


def _train(run: Run, folder: Path, position: str = "", live: bool | None = None) -> None:
    """`training.train` and keep the numbers, unless another process is at it: then wait, and take or finish its run."""
    with kept.held(folder):
        training.train(run, folder, position, live)


def _train_for(text: str, folder: str, numbers: int) -> None:
    """Runs on a worker: refuse what would not give the client's numbers, then train."""
    run, name = Run.from_json(text), Path(folder).name
    if numbers != config.NUMBERS:
        raise RuntimeError(
            f"this worker has another pumalib, whose numbers differ (NUMBERS is {config.NUMBERS} there, {numbers} at "
            "the client): bring both to one revision and restart the workers"
        )
    if (mine := kept.run_name(run)) != name:
        raise RuntimeError(
            f"this worker would call this run {mine}: its pumalib, datasets or weights are not the client's; share the "
            "checkout and the folder of the datasets, or make them equal"
        )
    _train(run, Path(folder), live=False)


def _average(name: str, members: list[str], profile: str) -> None:
    """Keep an ensemble: what is its own of each member, and the mean of all embeddings on the union."""
    records = [kept.record(member, profile) for member in members]
    runs = [kept.run_of(member, profile) for member in members]
    union = replace(runs[0].data, datasets=tuple(run.data.datasets[0] for run in runs))
    images, loss = data.load(union).test.reset_index(drop=True), loss_of(runs[0])
    device = training.choose_device(runs[0].training.device)
    judge = partial(evaluation.scores, ks=evaluation.KS, distance=loss.metric, device=device)
    outputs = [embeddings(member, profile, union, train=True)[0] for member in members]
    scores = judge(loss.average(torch.from_numpy(np.stack(outputs))), images)
    for output, run in zip(outputs, runs, strict=True):
        mine = (images["dataset"] == run.data.datasets[0]).to_numpy()
        scores.values[run.data.datasets[0]] = judge(output[mine], images[mine]).values[run.data.datasets[0]]
    record = {
        "name": name,
        "members": members,
        "environment": records[0]["environment"],
        "parameters": {key: sum(r["parameters"][key] for r in records) for key in ("trainable", "total")},
        "seconds": sum(r["seconds"] for r in records),
        "images_per_second": None,
        "table": scores.table().reset_index(names="dataset").to_dict("records"),
        "hits": scores.packed(),
        "log": [],
    }
    kept.add(paths.RESULTS / profile, record)


def loss_of(run: Run) -> losses.base.Loss:
    """The loss of a run for what needs no classes: how its embeddings are compared and averaged."""
    return losses.make(run.loss, 2, run.dim, **run.loss_settings)


def model(name: str, profile: str, train: bool = False) -> models.saved.Embedder:
    """The trained model of a kept run.

    Args:
        train: train it again where only its numbers were kept, as in a fresh clone; its kept numbers stay.

    Raises:
        FileNotFoundError: only its numbers were kept, and `train` is False.
    """
    folder, run = kept.folder(name, profile), kept.run_of(name, profile)
    if not (folder / kept.MODEL).is_file():
        if not train:
            remedy = f"pass train=True to train it again, or call `python -m pumalib train {name} --profile {profile}`"
            raise FileNotFoundError(f"only the numbers of {profile}/{name} were kept, not its model: {remedy}")
        _train(run, folder)
    return models.load(folder, device=training.choose_device(run.training.device))


def embeddings(name: str, profile: str, data: Data | None = None, train: bool = False):
    """Test embeddings (n, dim) of a kept run and the rows of the test table they belong to; see `embed`."""
    rows = _load(data or kept.run_of(name, profile).data).test.reset_index(drop=True)
    return embed(name, profile, rows, data, train), rows


def embed(name: str, profile: str, rows: pd.DataFrame, data: Data | None = None, train: bool = False, **options):
    """`training.embed` by the model of a kept run: `rows` of its own benchmark, or of `data`; `train` as in `model`."""
    trained = model(name, profile, train)
    device = training.choose_device(trained.run.training.device)
    return training.embed(
        trained.model, _load(data or trained.run.data), rows, trained.run.data, device=device, **options
    )


_load = data.load  # `data` is an argument above


@dataclass(frozen=True)
class Results:
    """Kept runs of some rows.

    Attributes:
        profile: its name.
        tidy: a line per row, dataset and metric: value (mean over seeds, fraction), low, high (95%), sd over
            seeds, seeds, runs (names), profile, device.
        parameters: per row the trainable and total number of parameters, and seconds of training per run.
        names: per row the name of each seed's run.
    """

    profile: str
    tidy: pd.DataFrame
    parameters: pd.DataFrame
    names: dict[str, list[str]]

    def wide(self, metric: str = "R@1", value: str = "value") -> pd.DataFrame:
        """A line per row and a column per dataset, unified and harmonic, as fractions."""
        part = self.tidy[self.tidy["metric"] == metric]
        order = list(dict.fromkeys(part["dataset"]))
        return part.pivot(index="row", columns="dataset", values=value).loc[list(self.names), order]

    def beside(self, printed: pd.DataFrame) -> pd.DataFrame:
        """R@1 in percent: each dataset, then unified and harmonic with intervals, what is printed, and the difference.

        Args:
            printed: `paper.table(n)`, whose row names ours are; a row it lacks stands without printed numbers, and
                only unified and harmonic stand beside theirs unless all datasets are the paper's.
        """
        value, low, high = (100 * self.wide("R@1", part) for part in ("value", "low", "high"))
        table = value.drop(columns=list(paper.OVERALL)).round(1)
        printed = paper.comparable(printed, table.columns).reindex(value.index)
        for name in value:
            if name in paper.OVERALL:
                table[name] = [f"{v:.1f} [{a:.1f}, {b:.1f}]" for v, a, b in zip(value[name], low[name], high[name])]
            if name in printed:
                table[f"{name}, paper"] = printed[name]
                table[f"{name}, difference"] = (value[name] - printed[name]).round(1)
        return table

    def difference(self, row: str, other: str) -> pd.DataFrame:
        """R@1 of `row` minus `other` per dataset, by `evaluation.paired_difference` of the seeds that both have."""
        ours, theirs = ([kept.hits(name, self.profile) for name in self.names[r]] for r in (row, other))
        return evaluation.paired_difference(ours, theirs)

    def verdicts(self, comparisons: Iterable[tuple[str, str]], printed: pd.DataFrame, columns=paper.OVERALL):
        """Whether each row of `comparisons` is above the other as in the paper, in points of R@1.

        `here` says "holds" or "FAILS" only where the interval excludes zero, "open" elsewhere; `paper` is the printed
        difference, where both rows are printed.  Comparisons of rows that were not run are left out.
        """
        lines = []
        for better, worse in comparisons:
            if not {better, worse} <= set(self.names):
                continue
            difference = self.difference(better, worse)
            for name in columns:
                both = {better, worse} <= set(printed.index) and name in printed
                gap = printed.at[better, name] - printed.at[worse, name] if both else np.nan
                d = difference.loc[name]
                measured = f"{100 * d['value']:+.1f} [{100 * d['low']:+.1f}, {100 * d['high']:+.1f}]"
                said = "" if np.isnan(gap) else f"{gap:+.1f}"
                lines.append((f"{better} above {worse}, {name}", said, measured, evaluation.SAYS[d["verdict"]]))
        return pd.DataFrame(lines, columns=["claim", "paper", "measured", "here"])

    def save(self, name: str) -> Path:
        """Write the tidy table to `results/<profile>/<name>.csv`."""
        file = paths.RESULTS / self.profile / f"{name}.csv"
        with paths.written_whole(file) as temporary:
            self.tidy.to_csv(temporary, index=False, float_format="%.6f")
        return file


def collect(names: Mapping[str, list[str]], profile: str) -> Results:
    """The results of kept runs: `names` has, per row, the name of each seed's run."""
    lines, parameters = [], []
    for row, seeds in names.items():
        records = [kept.record(name, profile) for name in seeds]
        seconds = float(np.mean([record["seconds"] for record in records]))
        parameters.append(dict(row=row, **records[0]["parameters"], seconds=seconds))
        devices = "; ".join(sorted({record["environment"]["device"] for record in records}))
        shared = {"seeds": len(seeds), "runs": " ".join(seeds), "profile": profile, "device": devices}
        tables = [pd.DataFrame(record["table"]).set_index("dataset") for record in records]
        for dataset in tables[0].index:
            for metric in METRICS:
                found = [
                    np.array([t.loc[dataset, metric + end] for t in tables], float) for end in ("", "_low", "_high")
                ]
                lines.append(dict(row=row, dataset=dataset, metric=metric, **evaluation.interval(*found), **shared))
    return Results(profile, pd.DataFrame(lines), pd.DataFrame(parameters).set_index("row"), dict(names))


def agreement(results: Results) -> pd.DataFrame:
    """How far runs that are kept in another profile too came out alike: those of the study, trained again here.

    Returns:
        A row per row of the results, run and other profile: R@1 in percent `unified` and `harmonic`, here and
        `there`; `equal hits`, the share of queries with equal R@1; and `verdict`, "agrees" where both are within 0.2
        points, as far as rounding drifts, else "DIFFERS".
    """
    found, columns = [], ["unified", "unified, there", "harmonic", "harmonic, there", "equal hits", "verdict"]
    homes = {file.parent for root in (paths.RESULTS, paths.ROOT / "results") for file in root.glob("*/kept.jsonl")}
    for row, name in ((row, name) for row, names in results.names.items() for name in names):
        for home in sorted(homes - {paths.RESULTS / results.profile}):
            if name not in kept.lines(home)[0]:
                continue
            both = [kept.record(name, results.profile), kept.lines(home)[0][name]]
            here, there = ({line["dataset"]: 100 * line["R@1"] for line in r["table"]} for r in both)
            equal = np.mean(np.equal(*(kept.hits_of(record)["unified"] for record in both)))
            numbers = [side[key] for key in paper.OVERALL for side in (here, there)]
            agrees = all(abs(here[key] - there[key]) <= 0.2 for key in paper.OVERALL)
            found.append((row, name, home.name, *numbers, equal, "agrees" if agrees else "DIFFERS"))
    return pd.DataFrame(found, columns=["row", "name", "other profile", *columns]).set_index(["row", "name"])


def plan(rows: Mapping[str, Run | Ensemble] | None, profile: Profile, side: Collection[str] = ()) -> pd.DataFrame:
    """What `run_all` would train, and how long it would take; trains nothing and needs no data of "paper".

    Returns:
        A row per run, by name: `method`, `images` (training images x epochs), `kept` and `hours`, by the median speed
        of kept runs of the same method, backbone and kind of device; NaN where there are none.
    """

    def name_of(run: Run) -> str:
        try:
            return kept.run_name(run)
        except (ValueError, OSError):  # its images or weights are not there yet
            return run_folder.name(run, "unknown", "unknown")

    runs, done = _named(rows or {}, profile, side, name_of)[1], kept.read(profile.name)
    device = training.device_name(training.choose_device(profile.training.device))
    speeds = {}
    for record in (r for home in paths.RESULTS.glob("*/") for r in kept.lines(home)[0].values()):
        if record["images_per_second"] and record["environment"]["device"] == device:
            run = Run.from_dict(record["run"])
            speeds.setdefault((run.method.name, run.backbone, run.data.image_size), []).append(
                record["images_per_second"]
            )
    lines = []
    for name, run in runs.items():
        speed = np.median(speeds.get((run.method.name, run.backbone, run.data.image_size), np.nan))
        images = _images(run)
        lines.append((name, run.method.name, images, name in done, images / speed / 3600 if images else 0.0))
    return pd.DataFrame(lines, columns=["name", "method", "images", "kept", "hours"]).set_index("name")


def _images(run: Run) -> int:
    """Images that pass the network in training: epochs x training images; none where nothing is trained."""
    m = run.method
    if not (m.tune_backbone or m.head != "none" or m.prompts or m.adapter_rank or m.lora_rank):
        return 0
    try:
        return run.training.epochs * len(data.load(run.data, run.seed).train)
    except (ValueError, OSError):
        if run.data.benchmark != "paper":
            raise
    counts = [DATASETS[name].counts["train"] for name in run.data.datasets or DATASETS]  # Table 1
    shots = run.data.shots
    return run.training.epochs * sum(min(images, shots * classes) if shots else images for images, classes in counts)
