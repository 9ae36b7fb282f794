"""Finished runs as tables: accuracies with intervals, differences in pairs, measured beside printed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from . import evaluation, paths, reference, training

METRIC_ORDER = [f"R@{k}" for k in training.KS] + ["RP", "MAP@R"]
OVERALL = ("unified", "harmonic")
SAYS = {"higher": "holds", "lower": "FAILS", "open": "open"}


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

    def beside(self, printed: pd.DataFrame) -> pd.DataFrame:
        """R@1 in percent: each dataset, then unified and harmonic with intervals, what is printed, and the difference.

        Args:
            printed: `reference.table(n)`, whose row names ours are; a row it lacks stands without printed numbers, and
                only unified and harmonic stand beside theirs unless all datasets are the paper's.
        """
        value, low, high = (100 * self.wide("R@1", part) for part in ("value", "low", "high"))
        table = value.drop(columns=[name for name in OVERALL if name in value]).round(1)
        printed = reference.comparable(printed, table.columns).reindex(value.index)
        for name in value:
            if name in OVERALL:
                table[name] = [f"{v:.1f} [{a:.1f}, {b:.1f}]" for v, a, b in zip(value[name], low[name], high[name], strict=True)]
            if name in printed:
                table[f"{name}, paper"] = printed[name]
                table[f"{name}, difference"] = (value[name] - printed[name]).round(1)
        return table

    def difference(self, row: str, other: str) -> pd.DataFrame:
        """R@1 of `row` minus `other` per dataset: value, low, high, and what can be said ("higher", "lower", "open").

        Both are resampled with the same queries and compared seed by seed, so that what makes a query or a seed
        easy for both cancels out; the two sources of chance are added as in `interval`.
        """
        ours, theirs = ([hits(folder) for folder in self.folders[r]] for r in (row, other))
        pairs = list(zip(ours, theirs, strict=False))  # seeds both have
        rng = np.random.default_rng(0)
        samples = {}
        for name in ours[0]:
            values = np.stack([seed[name] for pair in pairs for seed in pair], axis=1)  # (queries, seeds x 2)
            samples[name] = np.concatenate([values.mean(0, keepdims=True), evaluation.resample(values, 1000, rng)])
        datasets = [name for name in samples if name != "unified"]
        samples["harmonic"] = evaluation.harmonic_mean(np.stack([samples[name] for name in datasets]))
        lines = {}
        for name, sample in samples.items():
            gains = sample[:, ::2] - sample[:, 1::2]  # (1 + bootstrap, seeds)
            low, high = np.percentile(gains[1:].mean(1), (2.5, 97.5))
            chance = interval(gains[0], *(np.full(len(pairs), bound) for bound in (low, high)))
            verdict = "higher" if chance["low"] > 0 else "lower" if chance["high"] < 0 else "open"
            lines[name] = {key: chance[key] for key in ("value", "low", "high")} | {"verdict": verdict}
        return pd.DataFrame.from_dict(lines, orient="index").rename_axis("dataset")

    def verdicts(self, comparisons: Iterable[tuple[str, str]], printed: pd.DataFrame, columns=OVERALL) -> pd.DataFrame:
        """Whether each row of `comparisons` is above the other as in the paper, in points of R@1.

        `here` says "holds" or "FAILS" only where the interval excludes zero, "open" elsewhere; `paper` is the printed
        difference, where both rows are printed.  Comparisons of rows that were not run are left out.
        """
        lines = []
        for better, worse in comparisons:
            if not {better, worse} <= set(self.folders):
                continue
            difference = self.difference(better, worse)
            for name in columns:
                both = {better, worse} <= set(printed.index) and name in printed
                gap = printed.at[better, name] - printed.at[worse, name] if both else np.nan
                d = difference.loc[name]
                lines.append({
                    "claim": f"{better} above {worse}, {name}", "paper": "" if np.isnan(gap) else f"{gap:+.1f}",
                    "measured": f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]", "here": SAYS[d.verdict],
                })  # fmt: skip
        return pd.DataFrame(lines, columns=["claim", "paper", "measured", "here"])

    def save(self, name: str) -> Path:
        """Write the tidy table to `results/<profile>/<name>.csv`."""
        file = paths.RESULTS / self.profile / f"{name}.csv"
        with paths.written_whole(file) as temporary:
            self.tidy.to_csv(temporary, index=False, float_format="%.6f")
        return file


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
    share their queries, so it does not shrink with their number) and t sd / sqrt(seeds), Student's t for so few.

    Args:
        values, low, high: (seeds,), each seed's value and its bootstrap interval.
    """
    count = len(values)
    sd = float(values.std(ddof=1)) if count > 1 else float("nan")
    seeds = 0.0 if count == 1 else float(stats.t.ppf(0.975, count - 1)) * sd / count**0.5
    mean = float(values.mean())
    return dict(
        value=mean,
        low=mean - float(np.hypot(np.mean(values - low), seeds)),
        high=mean + float(np.hypot(np.mean(high - values), seeds)),
        sd=sd,
    )


def hits(folder: Path) -> dict[str, np.ndarray]:
    """R@1 (0 or 1) of every query of a finished run, (queries,) per dataset and for "unified"."""
    metrics = json.loads((folder / training.FINISHED).read_text(encoding="utf-8"))
    counts = {line["dataset"]: line["queries"] for line in metrics["table"]}
    return {name: evaluation.unpack(text, counts[name]).astype(float) for name, text in metrics["hits"].items()}
