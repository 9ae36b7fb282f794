"""Rows of a table to results: each run is trained once, kept under the name of what it is, and shared by all notebooks.
`run_all({"PUMA": profile.run("puma"), "Linear": profile.run("linear")}, profile).wide("R@1")` is a first table."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from IPython.display import Markdown
from pandas.io.formats.style import Styler

from .. import evaluation, losses, models, paths, training
from ..config import Data, Profile, Run
from ..data import expected, load
from ..training import run_folder
from . import kept, paper

METRICS = [f"R@{k}" for k in evaluation.KS] + ["RP", "MAP@R"]
NOTHING = pd.DataFrame()  # where the paper prints no numbers
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
    or the workers of `profile.dask`; where runs are missing and `profile.train` is False, raises `kept.NotKept`."""
    names, runs, ensembles, done = {row: [] for row in rows}, {}, {}, kept.read(profile.name)
    for row, parts in _asked(rows, profile, side, done):
        name, mine = _name(rows[row], parts), [kept.run_name(run) for run in parts]
        ensembles |= {} if isinstance(rows[row], Run) else {name: mine}
        names[row].append(name)
        runs |= zip(mine, parts)
    missing = {kept.folder(name, profile.name): run for name, run in runs.items() if name not in done}
    means = ensembles.keys() - done.keys()
    if (missing or means) and not profile.train:
        raise kept.NotKept(f"{len(missing)} of {len(runs)} runs and {len(means)} ensembles are not kept")
    for run in missing.values():
        loss_of(run)  # a bad setting of the last run is refused before the first is trained
    if missing and (profile.dask or profile.jobs > 1):
        from . import cluster  # Dask takes a second to import

        jobs = {folder.name: (asdict(run), str(folder)) for folder, run in missing.items()}
        with nullcontext(profile.dask) if profile.dask else cluster.local(profile.jobs) as address:
            cluster.each(_train_for, jobs, address, next(iter(missing)).parent)
    else:
        for number, (folder, run) in enumerate(missing.items(), 1):
            _train(run, folder, f"run {number} of {len(missing)}")
    for name in means:
        _average(name, ensembles[name], profile.name)
    return collect(names, profile.name)


def _asked(rows, profile: Profile, side: Collection[str], done: Collection = ()) -> Iterator[tuple[str, list[Run]]]:
    """Each row once per seed, with its run, or the members of its ensemble; of a side row further seeds if `done`."""
    few = len(profile.side_seeds or profile.seeds)
    for row, wanted in rows.items():
        for number, seed in enumerate(profile.seeds):
            parts = [replace(run, seed=seed) for run in ((wanted,) if isinstance(wanted, Run) else wanted)]
            if row in side and number >= few and not (done and _name(wanted, parts) in done):
                break
            yield row, parts


def _name(wanted: Run | Ensemble, parts: list[Run]) -> str:
    names = [kept.run_name(run) for run in parts]
    return names[0] if isinstance(wanted, Run) else run_folder.ensemble_name(names)


def _train(run: Run, folder: Path, position: str = "") -> None:
    with kept.held(folder):
        training.train(run, folder, position)


def _train_for(content: dict, folder: str) -> None:
    run, name = Run.from_dict(content), Path(folder).name
    if (mine := kept.run_name(run)) != name:
        said = "its pumalib, datasets or weights are not the client's; share checkout and datasets, or make them equal"
        raise RuntimeError(f"this worker would call this run {mine}: {said}, and restart the workers")
    _train(run, Path(folder))


def _average(name: str, members: list[str], profile: str) -> None:
    """Keep an ensemble: what is its own of each member, and the mean of all embeddings on the union."""
    records = [kept.record(member, profile) for member in members]
    runs = [kept.run_of(member, profile) for member in members]
    own = [run.data.datasets[0] for run in runs]
    union, loss = replace(runs[0].data, datasets=tuple(own)), loss_of(runs[0])
    outputs, images = zip(*(embeddings(member, profile, union, train=True) for member in members), strict=True)
    options = {"distance": loss.metric, "device": training.choose_device(runs[0].training.device)}
    scores = evaluation.scores(loss.average(torch.from_numpy(np.stack(outputs))), images[0], evaluation.KS, **options)
    for dataset, output in zip(own, outputs, strict=True):
        mine = (images[0]["dataset"] == dataset).to_numpy()
        alone = evaluation.scores(output[mine], images[0][mine], evaluation.KS, **options)
        scores.values[dataset] = alone.values[dataset]
    record = {"name": name, "members": members, "environment": records[0]["environment"]}
    record["parameters"] = {key: sum(r["parameters"][key] for r in records) for key in ("trainable", "total")}
    record |= {"seconds": sum(r["seconds"] for r in records), "images_per_second": None, "log": []}
    table = scores.table().reset_index(names="dataset").to_dict("records")
    kept.add({**record, "table": table, **scores.packed()}, profile)


def loss_of(run: Run) -> losses.base.Loss:
    """The loss of a run for what needs no classes: how its embeddings are compared and averaged."""
    settings = {key: value for key, value in run.loss_settings.items() if key != "similarity"}  # of the classes
    return losses.make(run.loss, 2, run.dim, **settings)


def model(name: str, profile: str, train: bool = False) -> models.saved.Embedder:
    """The trained model of a kept run; if only its numbers were kept, trained again if `train`, else `kept.NotKept`."""
    folder, run = kept.folder(name, profile), kept.run_of(name, profile)
    if not (folder / kept.MODEL).is_file():
        if not train:
            remedy = f"pass train=True to train it again, or call `python -m pumalib train {name} --profile {profile}`"
            raise kept.NotKept(f"only the numbers of {profile}/{name} were kept, not its model: {remedy}")
        _train(run, folder)
    return models.load(folder, device=training.choose_device(run.training.device))


def embeddings(name: str, profile: str, data: Data | None = None, train: bool = False):
    """Test embeddings (n, dim) of a kept run and the rows of the test table they belong to; see `embed`."""
    rows = load(data or kept.run_of(name, profile).data).test.reset_index(drop=True)
    return embed(name, profile, rows, data, train), rows


def embed(name: str, profile: str, rows: pd.DataFrame, data: Data | None = None, train: bool = False, **options):
    """`training.embed` by the model of a kept run: `rows` of its own benchmark, or of `data`; `train` as in `model`."""
    trained = model(name, profile, train)
    options["device"], settings = training.choose_device(trained.run.training.device), trained.run.data
    return training.embed(trained.model, load(data or settings), rows, settings, **options)


@dataclass(frozen=True)
class Results:
    """Kept runs of some rows."""

    profile: str
    tidy: pd.DataFrame  # per row, dataset, metric: value (mean of seeds), low, high, sd, seeds, runs, profile, device
    parameters: pd.DataFrame  # per row: trainable and total, numbers of parameters; seconds of training per run
    names: dict[str, list[str]]  # per row the name of each seed's run

    def wide(self, metric: str = "R@1", value: str = "value") -> pd.DataFrame:
        """A line per row and a column per dataset, unified and harmonic, as fractions."""
        part = self.tidy[self.tidy["metric"] == metric]
        return part.pivot(index="row", columns="dataset", values=value).loc[list(self.names), part["dataset"].unique()]

    def beside(self, printed: pd.DataFrame = NOTHING) -> pd.DataFrame:
        """R@1 in percent: seeds, unified and harmonic with intervals, then each dataset, in brackets what is printed.
        `printed` is `paper.table(n)` with our row names; its datasets stand beside ours only where all are the paper's."""
        value, low, high = (100 * self.wide("R@1", part) for part in ("value", "low", "high"))
        datasets = [*value.columns.difference(paper.OVERALL, sort=False)]
        printed = paper.comparable(printed, datasets).reindex(value.index)
        table = pd.DataFrame({"seeds": [*map(len, self.names.values())]}, value.index.rename(None))
        for name in (*paper.OVERALL, *datasets):
            spans = (f"{v:.1f} [{a:.1f}, {b:.1f}]" for v, a, b in zip(value[name], low[name], high[name]))
            table[name] = list(spans) if name in paper.OVERALL else value[name].round(1)
            if name in printed:
                table[name] = table[name].astype(str) + printed[name].map(" (paper {:.1f})".format, "ignore").fillna("")
        return table

    def headline(self, profile: Profile, about: Collection = (), pairs: Iterable[tuple[str, str]] = ()) -> Markdown:
        """What came out: the best row, those called PUMA and frozen; differences of `pairs`; verdicts `about` some tables."""
        part = self.tidy.query("metric == 'R@1' and dataset == 'harmonic'").sort_values("value", ascending=False)
        named = [part["row"].iloc[0], *(row for row in self.names if paper.METHODS.get(row) == "puma"), paper.FROZEN]
        rows = part[part["row"].isin(named)][["row", "value", "low", "high"]].itertuples(index=False)
        levels = "; ".join(f"{row} {100 * v:.1f} [{100 * low:.1f}, {100 * high:.1f}]" for row, v, low, high in rows)
        seeds = " to ".join(map(str, sorted(set(part["seeds"]))))
        text = f"**On `{profile.name}`** (seeds: {seeds}), harmonic R@1, the highest first: {levels}."
        gains, verdicts = self.differences(pairs, columns=["harmonic"]).itertuples(), []
        gains = [f"{one.difference} {one.points:+.1f} [{one.low:+.1f}, {one.high:+.1f}]" for one in gains]
        text += f"  In pairs: {'; '.join(gains)}." * bool(gains)
        for here, claims in paper.scorecard(profile, about).groupby("here")["claim"] if about else ():
            sure = here in ("supported", "contradicted")
            verdicts.append(f"{len(claims)} {here}" + f": *{'; '.join(claims)}*" * sure)
        text += f"  Of the paper's claims about it: {'; '.join(verdicts)}." * bool(verdicts)
        return Markdown(text)

    def difference(self, row: str, other: str) -> pd.DataFrame:
        """R@1 of `row` minus `other` per dataset, by `evaluation.paired_difference`."""
        return kept.difference(self.names[row], self.names[other], self.profile)

    def differences(self, pairs: Iterable[tuple[str, str]], printed: pd.DataFrame = NOTHING, columns=paper.OVERALL):
        """R@1 of the first of each pair minus the second: `points`, `low` and `high`, `p`, and `paper`, as printed.
        Pairs of rows that were not run are left out, and columns without a number: a p-value needs two seeds."""
        lines = []
        for row, other in (pair for pair in pairs if set(pair) <= set(self.names)):
            gains, both = self.difference(row, other), {row, other} <= set(printed.index)
            for name in columns:
                said = printed.at[row, name] - printed.at[other, name] if both and name in printed else np.nan
                *points, above, below = gains.loc[name, ["value", "low", "high", "above", "below"]]
                points = [round(100 * number, 1) + 0.0 for number in points]  # no -0.0
                lines.append((f"{row} over {other}", name, *points, round(2 * min(above, below), 4), round(said, 1)))
        table = pd.DataFrame(lines, columns=["difference", "of", "points", "low", "high", "p", "paper"])
        return table.dropna(axis=1, how="all") if lines else table

    def save(self, name: str) -> Path:
        """Write the tidy table to `results/<profile>/<name>.csv`."""
        with paths.written_whole(file := paths.RESULTS / self.profile / f"{name}.csv") as temporary:
            self.tidy.to_csv(temporary, index=False, float_format="%.6f")
        return file


def marked(table: pd.DataFrame, values: pd.DataFrame) -> Styler:
    """`table` to be shown: in each column of `values`, fractions, the best is bold and the second underlined, by tags:
    GitHub drops styles, as Lab does in notebooks that it does not trust.  What is in brackets stands below."""

    def text(cell):
        if isinstance(cell, str):
            return re.sub(r" ([\[(].*?[])])", lambda m: f"<br><small>{m[1].replace(' ', '&nbsp;')}</small>", cell)
        return "" if pd.isna(cell) else f"{cell:,.1f}" if isinstance(cell, float) else f"{cell:,}"

    texts = table.map(text).astype(str)
    places = (100 * values).round(1).rank(method="dense", ascending=False).reindex(table.index)
    for name, (place, tag) in product(texts.columns.intersection(values.columns), ((1, "b"), (2, "u"))):
        told = texts[name].str.replace("^([^<]+)", rf"<{tag}>\1</{tag}>", regex=True)  # of ours, not what is below
        texts[name] = texts[name].where(places[name] != place, told)
    return texts.style.set_table_styles([{"selector": "td, th", "props": "padding: 0.3em 0.2em"}])


def collect(names: Mapping[str, list[str]], profile: str | Path) -> Results:
    """The results of kept runs: `names` has, per row, the name of each seed's run."""
    lines, parameters = [], []
    for row, seeds in names.items():
        records = [kept.record(name, profile) for name in seeds]
        parameters.append({"row": row, **records[0]["parameters"], "seconds": np.mean([r["seconds"] for r in records])})
        devices = "; ".join(sorted({record["environment"]["device"] for record in records}))
        shared = {"seeds": len(seeds), "runs": " ".join(seeds), "profile": profile, "device": devices}
        tables = [pd.DataFrame(record["table"]).set_index("dataset") for record in records]
        for dataset, metric in product(tables[0].index, METRICS):
            found = [[table.loc[dataset, metric + end] for table in tables] for end in ("", "_low", "_high")]
            interval = evaluation.interval(*np.array(found, float))
            lines.append({"row": row, "dataset": dataset, "metric": metric, **interval, **shared})
    return Results(profile, pd.DataFrame(lines), pd.DataFrame(parameters).set_index("row"), dict(names))


def plan(rows: Mapping[str, Run | Ensemble], profile: Profile, side: Collection[str] = ()) -> pd.DataFrame:
    """What `run_all` would train, and how long it would take; trains nothing and needs no data of "paper".
    By run: `method`, `images` (x epochs), `kept` and `hours`, by the median speed of kept runs alike, else NaN."""
    known, done, lines = kept.runs(), kept.read(profile.name), {}
    known = known[known["device"] == training.device_name(training.choose_device(profile.training.device))]
    speeds = known.groupby(["method", "backbone", "data.image_size"])["images_per_second"].median()
    for run in (run for _, parts in _asked(rows, profile, side) for run in parts):
        try:
            name, images = kept.run_name(run), len(load(run.data, run.seed).train)
        except (ValueError, OSError):  # not on this machine yet; then by the counts of Table 1
            if (known_counts := expected(run.data)) is None:
                raise
            counts = known_counts.loc[known_counts["split"] == "train", ["images", "classes"]].to_numpy().tolist()
            images = sum(min(count, (run.data.shots or count) * classes) for count, classes in counts)
            name = run_folder.name(run, "unknown", "unknown")
        images *= run.training.epochs * (run.method.name != "pretrained")
        speed = speeds.get((run.method.name, run.backbone, run.data.image_size), np.nan)
        lines[name] = [run.method.name, images, name in done, images / speed / 3600 if images else 0.0]
    return pd.DataFrame.from_dict(lines, "index", columns=["method", "images", "kept", "hours"]).rename_axis("name")
