"""Rows of a table to results: each run is trained once, cached by what it is, and shared by all notebooks.

    results = run_all({"PUMA": profile.run("puma"), "Linear": profile.run("linear")}, profile)
    results.wide("R@1")          # a row per name, a column per dataset
    results.save("quickstart")   # results/<profile>/quickstart.csv
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from filelock import FileLock

from . import models, paths, training
from .config import Profile, Run

METRIC_ORDER = [f"R@{k}" for k in training.KS] + ["RP", "MAP@R"]


@dataclass(frozen=True)
class Results:
    """Finished runs of some rows.

    Attributes:
        tidy: a line per row, dataset and metric: value (mean over seeds, fraction), low, high (95%), sd over
            seeds, seeds, runs (folder names), profile, device.
        parameters: per row the trainable and total number of parameters, and seconds of training per run.
        folders: per row the folder of each seed's run.
    """

    profile: str
    tidy: pd.DataFrame
    parameters: pd.DataFrame
    folders: dict[str, list[Path]]

    def wide(self, metric: str = "R@1", value: str = "value") -> pd.DataFrame:
        """A line per row and a column per dataset, unified and harmonic, as fractions."""
        part = self.tidy[self.tidy["metric"] == metric]
        order = list(dict.fromkeys(part["dataset"]))
        return part.pivot(index="row", columns="dataset", values=value).loc[list(self.folders), order]

    def difference(self, row: str, other: str, metric: str = "R@1") -> pd.DataFrame:
        """`row` minus `other` per dataset: value, low, high, and what can be said ("higher", "lower", "open").

        The two are taken as independent; since they share their queries, the interval is wider than it need be.
        """
        parts = [self.tidy[(self.tidy["row"] == r) & (self.tidy["metric"] == metric)].set_index("dataset") for r in (row, other)]
        a, b = parts
        value = a["value"] - b["value"]
        low = value - np.hypot(a["value"] - a["low"], b["high"] - b["value"])
        high = value + np.hypot(a["high"] - a["value"], b["value"] - b["low"])
        verdict = np.where(low > 0, "higher", np.where(high < 0, "lower", "open"))
        return pd.DataFrame(dict(value=value, low=low, high=high, verdict=verdict))

    def save(self, name: str) -> Path:
        """Write the tidy table to `results/<profile>/<name>.csv`."""
        file = paths.RESULTS / self.profile / f"{name}.csv"
        with paths.written_whole(file) as temporary:
            self.tidy.to_csv(temporary, index=False, float_format="%.6f")
        return file


def run_all(rows: Mapping[str, Run], profile: Profile) -> Results:
    """Train what is not yet trained of every row, once per seed of the profile, and collect the results.

    A finished run is taken as it is, an unfinished one resumed; of two processes that want the same run, one
    trains it and the other waits.
    """
    wanted = {row: [replace(run, seed=seed) for seed in profile.seeds] for row, run in rows.items()}
    runs = [run for row in wanted.values() for run in row]
    digests = {settings: training.load_data(settings).digest() for settings in {run.data for run in runs}}
    folders = {
        row: [run_folder(run, profile.name, digests[run.data]) for run in seeds] for row, seeds in wanted.items()
    }
    for row, seeds in wanted.items():
        for run, folder in zip(seeds, folders[row], strict=True):
            if not (folder / training.FINISHED).is_file():
                make_folder(folder)
                with FileLock(folder / ".lock"):
                    training.train(run, folder)
    return collect(folders, profile.name)


def run_folder(run: Run, profile: str, data_digest: str) -> Path:
    """Where a run lives: a readable name that ends in a hash of everything that can change its numbers."""
    weights = models.backbones.weights_digest(run.backbone, run.pretrained)
    name = f"{run.method.name}-{run.loss}-{run.identity(data_digest, weights)[:8]}"
    return paths.RESULTS / profile / "runs" / name


def make_folder(folder: Path) -> None:
    """Make a run's folder, or say how to write elsewhere."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot make {folder}: {error.strerror}; name another place with PUMALIB_RESULTS=<folder>"
        ) from error


def collect(folders: Mapping[str, list[Path]], profile: str) -> Results:
    """The results of finished runs: `folders` has, per row, the folder of each seed."""
    lines, parameters = [], []
    for row, seeds in folders.items():
        metrics = [json.loads((folder / training.FINISHED).read_text(encoding="utf-8")) for folder in seeds]
        devices = {json.loads((folder / "environment.json").read_text(encoding="utf-8"))["device"] for folder in seeds}
        parameters.append(
            dict(row=row, **metrics[0]["parameters"], seconds=float(np.mean([m["seconds"] for m in metrics])))
        )
        tables = [pd.DataFrame(m["table"]).set_index("dataset") for m in metrics]
        shared = dict(seeds=len(seeds), runs=" ".join(f.name for f in seeds), profile=profile, device="; ".join(sorted(devices)))
        for dataset in tables[0].index:
            for metric in METRIC_ORDER:
                values, low, high = (
                    np.array([table.loc[dataset, metric + end] for table in tables], float) for end in ("", "_low", "_high")
                )
                lines.append(dict(row=row, dataset=dataset, metric=metric, **interval(values, low, high), **shared))
    return Results(profile, pd.DataFrame(lines), pd.DataFrame(parameters).set_index("row"), dict(folders))


def interval(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> dict[str, float]:
    """Mean over seeds with a 95% interval from both sources of chance: which queries, and which seed.

    The half-widths add as independent errors: that of the bootstrap over queries (its mean over seeds; seeds
    share their queries, so it does not shrink with their number) and 1.96 sd / sqrt(seeds).

    Args:
        values, low, high: (seeds,), each seed's value and its bootstrap interval.
    """
    sd = float(values.std(ddof=1)) if len(values) > 1 else float("nan")
    seeds = 0.0 if len(values) == 1 else 1.96 * sd / len(values) ** 0.5
    mean = float(values.mean())
    return dict(
        value=mean,
        low=mean - float(np.hypot(np.mean(values - low), seeds)),
        high=mean + float(np.hypot(np.mean(high - values), seeds)),
        sd=sd,
    )


def embeddings(folder: Path) -> tuple[np.ndarray, pd.DataFrame]:
    """Test embeddings (n, dim) of a finished run and the rows of the test table they belong to."""
    trained = models.load(folder)
    device = training.choose_device(trained.run.training.device)
    benchmark = training.load_data(trained.run.data)
    rows = benchmark.test.reset_index(drop=True)
    return training.embed(trained.model.to(device), benchmark, rows, trained.run.data, device=device), rows
