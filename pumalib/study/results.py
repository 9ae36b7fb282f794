"""Kept runs of some rows as tables."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from IPython.display import Markdown

from .. import evaluation, paths
from ..config import Profile
from . import claims, runs, store
from . import printed as printed_

METRICS = [f"R@{k}" for k in evaluation.KS] + ["RP", "MAP@R"]
NOTHING = pd.DataFrame()  # where the paper prints no numbers


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
        `printed` is `printed.table(n)` with our row names; its datasets stand beside ours only where all are the paper's."""
        value, low, high = (100 * self.wide("R@1", part) for part in ("value", "low", "high"))
        datasets = [*value.columns.difference(evaluation.OVERALL, sort=False)]
        printed = printed_.comparable(printed, datasets).reindex(value.index)
        table = pd.DataFrame({"seeds": [*map(len, self.names.values())]}, value.index.rename(None))
        for name in (*evaluation.OVERALL, *datasets):
            spans = (f"{v:.1f} [{a:.1f}, {b:.1f}]" for v, a, b in zip(value[name], low[name], high[name]))
            table[name] = list(spans) if name in evaluation.OVERALL else value[name].round(1)
            if name in printed:
                table[name] = table[name].astype(str) + printed[name].map(" (paper {:.1f})".format, "ignore").fillna("")
        return table

    def headline(self, profile: Profile, about: Collection = (), pairs: Iterable[tuple[str, str]] = ()) -> Markdown:
        """What came out: the best row, those called PUMA and frozen; differences of `pairs`; verdicts `about` some tables."""
        part = self.tidy.query("metric == 'R@1' and dataset == 'harmonic'").sort_values("value", ascending=False)
        named = [part["row"].iloc[0], *(row for row in self.names if printed_.METHOD_OF_ROW.get(row) == "puma"), claims.FROZEN]
        rows = part[part["row"].isin(named)][["row", "value", "low", "high"]].itertuples(index=False)
        levels = "; ".join(f"{row} {100 * v:.1f} [{100 * low:.1f}, {100 * high:.1f}]" for row, v, low, high in rows)
        seeds = " to ".join(map(str, sorted(set(part["seeds"]))))
        text = f"**On `{profile.name}`** (seeds: {seeds}), harmonic R@1, the highest first: {levels}."
        gains, verdicts = self.differences(pairs, columns=["harmonic"]).itertuples(), []
        gains = [f"{one.difference} {one.points:+.1f} [{one.low:+.1f}, {one.high:+.1f}]" for one in gains]
        text += f"  In pairs: {'; '.join(gains)}." * bool(gains)
        for here, said in claims.scorecard(profile, about).groupby("here")["claim"] if about else ():
            sure = here in ("supported", "contradicted")
            verdicts.append(f"{len(said)} {here}" + f": *{'; '.join(said)}*" * sure)
        text += f"  Of the paper's claims about it: {'; '.join(verdicts)}." * bool(verdicts)
        return Markdown(text)

    def difference(self, row: str, other: str) -> pd.DataFrame:
        """R@1 of `row` minus `other` per dataset, by `evaluation.paired_difference`."""
        return runs.difference(self.names[row], self.names[other], self.profile)

    def differences(self, pairs: Iterable[tuple[str, str]], printed: pd.DataFrame = NOTHING, columns=evaluation.OVERALL):
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


def collect(names: Mapping[str, list[str]], profile: str | Path) -> Results:
    """The results of kept runs: `names` has, per row, the name of each seed's run."""
    lines, parameters = [], []
    for row, seeds in names.items():
        records = [store.record(name, profile) for name in seeds]
        parameters.append({"row": row, **records[0]["parameters"], "seconds": np.mean([r["seconds"] for r in records])})
        devices = "; ".join(sorted({record["environment"]["device"] for record in records}))
        shared = {"seeds": len(seeds), "runs": " ".join(seeds), "profile": profile, "device": devices}
        tables = [pd.DataFrame(record["table"]).set_index("dataset") for record in records]
        for dataset, metric in product(tables[0].index, METRICS):
            found = [[table.loc[dataset, metric + end] for table in tables] for end in ("", "_low", "_high")]
            interval = evaluation.interval(*np.array(found, float))
            lines.append({"row": row, "dataset": dataset, "metric": metric, **interval, **shared})
    return Results(profile, pd.DataFrame(lines), pd.DataFrame(parameters).set_index("row"), dict(names))
