"""Kept runs of some rows as tables."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from pumalib import evaluation, paths
from pumalib.config import Profile

from . import claims, contrasts, store, verdicts
from .printed import METHOD_OF_ROW, comparable
from .record import FinishedRun
from .text import with_interval

if TYPE_CHECKING:
    from IPython.display import Markdown

# Columns of `Results.tidy`, and of `Results.parameters` with the row first.
TIDY = [
    "row",
    "dataset",
    "metric",
    "value",
    "low",
    "high",
    "sd",
    "seeds",
    "runs",
    "profile",
    "device",
]
PARAMETERS = ["row", "trainable", "total", "seconds"]
METRICS = [f"R@{k}" for k in evaluation.KS] + ["RP", "MAP@R"]
# Where the paper prints no numbers.
NOTHING = pd.DataFrame()
# One epoch of three small datasets has an order of methods all the same.
MEANS_NOTHING = (
    "> **The numbers below mean nothing**: `smoke` shows that the notebook runs, in seconds.  "
    '`profile = "mini"` has numbers.'
)
# Verdicts whose claims a headline lists; the claims of the others it counts.
DECIDED = ("supported", "contradicted")


@dataclass(frozen=True)
class Results:
    """Kept runs of some rows."""

    profile: str
    # A line per row, dataset and metric: value (mean of seeds), low, high, sd, seeds, runs, profile
    # and device.
    tidy: pd.DataFrame
    # A line per row: trainable and total, numbers of parameters; seconds of training per run.
    parameters: pd.DataFrame
    # Per row the name of each seed's run.
    names: dict[str, list[str]]
    # Rows that have no numbers, as the loss of a run was not finite: what happened, in words.
    failed: dict[str, str] = field(default_factory=dict)

    def wide(self, metric: str = "R@1", value: str = "value") -> pd.DataFrame:
        """A line per row and a column per dataset, unified and harmonic, as fractions."""
        part = self.tidy[self.tidy["metric"] == metric]
        table = part.pivot(index="row", columns="dataset", values=value)
        return table.loc[list(self.names), part["dataset"].unique()]

    def with_paper_values(self, printed: pd.DataFrame = NOTHING) -> pd.DataFrame:
        """R@1 in percent: seeds, unified and harmonic with intervals, then each dataset.

        `printed` is `printed.table(n)` with our row names: what it has stands in brackets, of
        single datasets only where all of ours are the paper's.
        """
        value = 100 * self.wide("R@1", "value")
        low = 100 * self.wide("R@1", "low")
        high = 100 * self.wide("R@1", "high")
        datasets = list(value.columns.difference(evaluation.OVERALL, sort=False))
        printed = comparable(printed, datasets).reindex(value.index)

        seeds = [len(names) for names in self.names.values()]
        table = pd.DataFrame({"seeds": seeds}, value.index.rename(None))
        for name in evaluation.OVERALL:
            table[name] = [
                with_interval(*numbers) for numbers in zip(value[name], low[name], high[name])
            ]
        for name in datasets:
            table[name] = value[name].round(1)
        for name in table.columns.intersection(printed.columns):
            papers = printed[name].map(" (paper {:.1f})".format, "ignore").fillna("")
            table[name] = table[name].astype(str) + papers
        return table

    def headline(
        self,
        profile: Profile,
        about: Collection = (),
        pairs: Iterable[tuple[str, str]] = (),
    ) -> "Markdown":
        """What came out, as text.

        The best row, those called PUMA and frozen; differences of `pairs` of rows; verdicts on the
        claims `about` some tables.  Of `smoke` it says first that none of that means anything.
        """
        from IPython.display import Markdown  # the commands do without it

        parts = [self._levels(profile), self._pairs(pairs), _verdicts(profile, about)]
        text = "  ".join(part for part in parts if part)
        if profile.name == "smoke":
            text = f"{MEANS_NOTHING}\n\n{text}"
        return Markdown(text)

    def _levels(self, profile: Profile) -> str:
        from .figures import shown  # the commands do without matplotlib

        part = self.tidy.query("metric == 'R@1' and dataset == 'harmonic'")
        part = part.sort_values("value", ascending=False)
        named = [part["row"].iloc[0], claims.FROZEN]
        named += [row for row in self.names if METHOD_OF_ROW.get(row) == "puma"]
        levels = []
        for line in part[part["row"].isin(named)].itertuples():
            numbers = with_interval(100 * line.value, 100 * line.low, 100 * line.high)
            levels.append(f"{shown(line.row)} {numbers}")
        seeds = " to ".join(str(count) for count in sorted(set(part["seeds"])))
        return (
            f"**On `{profile.name}`** (seeds: {seeds}), harmonic R@1, the highest first: "
            f"{'; '.join(levels)}."
        )

    def _pairs(self, pairs: Iterable[tuple[str, str]]) -> str:
        from .figures import shown  # the commands do without matplotlib

        gains = []
        for line in self.differences(pairs, columns=["harmonic"]).itertuples():
            row, _, other = line.difference.partition(" over ")
            numbers = with_interval(line.points, line.low, line.high, sign="+")
            gains.append(f"{shown(row)} over {shown(other)} {numbers}")
        if not gains:
            return ""
        return f"In pairs: {'; '.join(gains)}."

    def difference(self, row: str, other: str) -> pd.DataFrame:
        """R@1 of `row` minus `other` per dataset, as `contrasts.difference` has it."""
        return contrasts.difference(self.names[row], self.names[other], self.profile)

    def differences(
        self,
        pairs: Iterable[tuple[str, str]],
        printed: pd.DataFrame = NOTHING,
        columns: Collection[str] = evaluation.OVERALL,
    ) -> pd.DataFrame:
        """R@1 of the first of each pair minus the second, in points.

        Columns: `difference`, `of` what, `points`, `low` and `high`, `p`, and `paper`, as printed.
        Pairs of rows that were not run are left out, and columns without a number: a p-value needs
        two seeds.
        """
        lines = []
        for row, other in pairs:
            if row not in self.names or other not in self.names:
                continue
            compared = self.difference(row, other)
            # No -0.0.
            points = contrasts.in_points(compared).round(1) + 0.0
            p_value = 2 * compared[["p_greater", "p_less"]].min(axis=1)
            for name in columns:
                line: dict[str, Any] = {"difference": f"{row} over {other}", "of": name}
                line |= points.loc[name, ["points", "low", "high"]].to_dict()
                line["p"] = round(p_value[name], 4)
                line["paper"] = _printed_gain(printed, row, other, name)
                lines.append(line)
        order = ["difference", "of", "points", "low", "high", "p", "paper"]
        table = pd.DataFrame(lines, columns=order)
        if not lines:
            return table
        return table.dropna(axis=1, how="all")

    def save(self, name: str) -> None:
        """Write the tidy table to `<name>.csv` in `store.output_folder`, and print where.

        ValueError: a score is no finite number.
        """
        if not np.isfinite(self.tidy["value"]).all():
            raise ValueError(f"{name}.csv: a score is no finite number")
        file = store.output_folder(self.profile) / f"{name}.csv"
        with paths.written_whole(file) as temporary:
            self.tidy.to_csv(temporary, index=False, float_format="%.6f")
        print("table", paths.shown(file))


def _printed_gain(printed: pd.DataFrame, row: str, other: str, name: str) -> float:
    if name not in printed or row not in printed.index or other not in printed.index:
        return np.nan
    return round(printed.at[row, name] - printed.at[other, name], 1)


def _verdicts(profile: Profile, about: Collection) -> str:
    """How many claims have which verdict, what the decided ones say, and how many could have."""
    if not about:
        return ""
    card = verdicts.scorecard(profile, about)
    if card.empty:
        return ""
    counts = []
    for here, claims_of in card.groupby("here")["claim"]:
        verdict = f"{len(claims_of)} {here}"
        if here in DECIDED:
            verdict += f": *{'; '.join(claims_of)}*"
        counts.append(verdict)
    could = int(card["could_support"].sum())
    return (
        f"Of the paper's claims about it: {'; '.join(counts)}.  "
        f"The rows that were run could support {could} of the {len(card)}."
    )


def collect(names: Mapping[str, list[str]], profile: str) -> Results:
    """The results of kept runs: `names` has, per row, the name of each seed's run."""
    lines: list[dict[str, Any]] = []
    parameters = []
    for row, run_names in names.items():
        records = [store.record(name, profile) for name in run_names]
        seconds = np.mean([record.seconds for record in records])
        of_model = records[0].parameters.model_dump()
        parameters.append({"row": row, **of_model, "seconds": seconds})
        devices = {record.environment.device for record in records}
        shared = {
            "seeds": len(run_names),
            "runs": " ".join(run_names),
            "profile": profile,
            "device": "; ".join(sorted(devices)),
        }
        for line in _intervals(records):
            lines.append({"row": row, **line, **shared})
    tidy = pd.DataFrame(lines, columns=TIDY)
    of_rows = pd.DataFrame(parameters, columns=PARAMETERS).set_index("row")
    return Results(profile, tidy, of_rows, dict(names))


def _intervals(records: list[FinishedRun]) -> Iterator[dict[str, Any]]:
    """Per dataset and metric the mean of some seeds, with its interval."""
    # In a data frame each of a thousand look-ups would take fifty times as long.
    tables = [record.scores().to_dict("index") for record in records]
    for dataset in tables[0]:
        for metric in METRICS:
            value = _of_seeds(tables, dataset, metric)
            low = _of_seeds(tables, dataset, f"{metric}_low")
            high = _of_seeds(tables, dataset, f"{metric}_high")
            interval = evaluation.interval(value, low, high)
            yield {"dataset": dataset, "metric": metric, **interval}


def _of_seeds(tables: list[dict[str, Any]], dataset: str, column: str) -> np.ndarray:
    return np.array([table[dataset][column] for table in tables], float)
