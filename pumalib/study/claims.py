"""The paper's claims (data/paper/claims.yaml), judged by its own print and by the kept runs of a profile.

A claim says that rows of a table are above others.  By kept runs each comparison is a paired difference with p-values:
all of a claim's comparisons must be above zero to support it, one below zero (after Bonferroni) contradicts it, and
Holm's correction runs over all claims that can be tested.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd
import yaml

from .. import data, evaluation, paths
from ..config import Profile
from . import kept, paper

CLAIMS = yaml.safe_load((paths.PAPER / "claims.yaml").read_text(encoding="utf-8"))
# What the notebooks save, by the paper's table or figure; rows are named as the paper names them.
FILES = {2: "main_results", 3: "components", 4: "backbones", 5: "puma_with_losses", 6: "backbones"}
FILES |= {7: "adaptation_methods", 8: "memory", 9: "specific_vs_universal", 10: "standard_benchmarks"}
FILES |= {"8 and 5": "memory", "fig6": "few_shot", "fig7": "ablations"}
FROZEN, FULL = "frozen", "universal CurricularFace"
LEVEL = 0.05


class NotTestable(LookupError):
    """A table, row or column that a claim needs is missing, or cannot answer."""


@dataclass(frozen=True)
class Print:
    """The paper's tables; a difference is above zero or not, to rounding."""

    tables: Mapping[int, pd.DataFrame]

    def gains(self, table, ours: list[str], theirs: list[str], by: float) -> pd.DataFrame:
        rows = self.tables[table].select_dtypes("number").drop(columns=list(paper.SETTINGS), errors="ignore")
        datasets = rows.columns.intersection(paper.DATASETS)
        rows["large"] = rows[datasets.intersection(paper.LARGE)].mean(axis=1, skipna=False)
        rows["small"] = rows[datasets.difference(paper.LARGE)].mean(axis=1, skipna=False)
        rows["small - large"] = rows["small"] - rows["large"]
        value = rows.loc[ours].mean(skipna=False) - rows.loc[theirs].mean(skipna=False)
        above = (value <= max(0, by - paper.ROUNDING)).astype(float).where(value.notna())
        return pd.DataFrame({"value": value, "low": np.nan, "high": np.nan, "above": above, "below": 1 - above})


@dataclass(frozen=True)
class Runs:
    """Kept runs: per table the runs of each row; a difference has p-values, in points of R@1."""

    profile: str
    tables: Mapping[int | str, Mapping[str, list[str]]]
    large: list[str]

    def gains(self, table, ours: list[str], theirs: list[str], by: float) -> pd.DataFrame:
        rows = {row: runs for rows in self.tables.values() for row, runs in rows.items()} | self.tables[table]
        if {FROZEN, FULL} <= rows.keys() and self._gain(rows, [FULL], [FROZEN]).at["harmonic", "low"] <= 0:
            raise NotTestable("full fine-tuning is not above the frozen backbone: nothing here could show a gain")
        for row in {*ours, *theirs} - {FROZEN} if FROZEN in rows else ():
            if self._gain(rows, [row], [FROZEN]).at["harmonic", "high"] < 0:
                raise NotTestable(f"{row} collapsed: it ends below the frozen backbone")
        return self._gain(rows, ours, theirs)

    def _gain(self, rows, ours: list[str], theirs: list[str]) -> pd.DataFrame:
        sides = (tuple(tuple(rows[row]) for row in side) for side in (ours, theirs))
        gains = _difference(*sides, self.profile, tuple(self.large))
        return gains.assign(**{name: 100 * gains[name] for name in ("value", "low", "high")})


_difference = lru_cache(4096)(kept.difference)  # claims share their comparisons


def scorecard(profile: Profile, about: Collection | None = None) -> pd.DataFrame:
    """Every claim, or those `about` some tables, by name: `section`, `claim`, `table`, `print`, `here` and `why`.

    `print` is holds, fails, or not printed.  `here` is supported, contradicted, undecided, or not testable: rows are
    missing or have one seed, a trained row is below the frozen backbone (collapsed), or full fine-tuning is not above
    it, so that nothing here could show a gain.
    """
    large = list(data.load(profile.data).train["dataset"].value_counts().index[:2])
    sources = Print(printed()), Runs(profile.name, saved(profile.name), large)
    columns, lines, tests = ["name", "section", "claim", "table", "print", "here", "why"], [], {}
    for claim in CLAIMS:
        found = []
        for source in sources:
            try:
                found.append(evidence(claim, source))
            except NotTestable as missing:
                found.append((None, None, str(missing)))
        (misprint, *_), (above, below, why) = found
        if above is not None:
            tests[claim["name"]] = above, below
        said = {None: "not printed", 0.0: "holds", 1.0: "fails"}[misprint]
        table = claim["above"][0]["table"]
        lines.append((claim["name"], claim["section"], claim["text"], table, said, "not testable", why))
    table = pd.DataFrame(lines, columns=columns).set_index("name")
    chances = evaluation.holm({name: min(1.0, 2 * min(test)) for name, test in tests.items()})
    for name, (above, below) in tests.items():
        sure = "supported" if above < below else "contradicted"
        table.loc[name, "here"] = sure if chances[name] < LEVEL else "undecided"
    return table[table["table"].isin(about or list(table["table"]))]


def printed() -> dict[int | str, pd.DataFrame]:
    """The paper's tables with accuracies, and Tables 8 and 5 as one."""
    tables = {number: paper.table(number) for number in range(2, 13)}
    both = pd.concat([tables[8], tables[5]])
    return tables | {"8 and 5": both[~both.index.duplicated()]}


def saved(profile: str) -> dict[int | str, dict[str, list[str]]]:
    """The runs of each row of each table that a notebook saved, by the table's number."""
    found = {}
    for number, name in FILES.items():
        if (file := paths.RESULTS / profile / f"{name}.csv").is_file():
            found[number] = pd.read_csv(file).groupby("row", sort=False)["runs"].first().str.split().to_dict()
    return found


def evidence(claim: dict, source: Print | Runs) -> tuple[float, float, str]:
    """p-values of a claim as a whole, against "not above" and against "not below", and its weakest comparison in words."""
    found = []
    for one in claim["above"]:
        if one["table"] not in source.tables:
            raise NotTestable(f"table {one['table']}")
        names = list(getattr(source.tables[one["table"]], "index", source.tables[one["table"]]))
        ours, theirs = _rows(one["winners"], names), _rows(one["rivals"], names)
        if len(ours[0]) > 1 and len(theirs[0]) > 1:  # two means: of the losses that both have
            both = {row.split()[-1] for row in ours[0]} & {row.split()[-1] for row in theirs[0]}
            ours, theirs = ([[row for row in side[0] if row.split()[-1] in both]] for side in (ours, theirs))
        for mine, other in ((mine, other) for mine in ours for other in theirs if other not in ours):
            gains = source.gains(one["table"], mine, other, one.get("by", 0))
            columns = one.get("columns", paper.OVERALL)
            columns = [name for name in gains.index if name not in evaluation.OVERALL] if columns == "each" else columns
            if lost := [name for name in columns if name not in gains.index or np.isnan(gains.at[name, "above"])]:
                raise NotTestable(f"{mine[0]} over {other[0]}: no {lost[0]}, or one seed")
            pair = (rows[0] if len(rows) == 1 else f"the mean of {len(rows)}" for rows in (mine, other))
            found.append(gains.loc[list(columns)].assign(pair=" over ".join(pair)))
    table = pd.concat(found).rename_axis("column").reset_index()
    needed = math.ceil(claim["above"][0].get("share", 1) * len(table))
    fatal = len(table) - needed + 1  # so many below zero refute it
    above, below = table["above"].nlargest(fatal).iloc[-1], table["below"].nsmallest(fatal).iloc[-1] * needed
    weakest = table.sort_values(["above", "value"], ascending=[False, True]).iloc[0]
    limits = f" [{weakest['low']:+.1f}, {weakest['high']:+.1f}]" if np.isfinite(weakest["low"]) else ""
    said = f"{weakest['pair']}, {weakest['column']}: {weakest['value']:+.1f}{limits}"
    return float(above), float(min(1, below)), said + f"; the weakest of {len(table)}" * (len(table) > 1)


def _rows(patterns: list[str], names: list[str]) -> list[list[str]]:
    """The rows that patterns name, each a group of its own; "mean of A, B" is one group."""
    found = []
    for pattern in patterns:
        rows = [name for part in pattern.removeprefix("mean of ").split(", ") for name in fnmatch.filter(names, part)]
        if not rows:
            raise NotTestable(f"no row {pattern!r}")
        found += [rows] if pattern.startswith("mean of ") else [[row] for row in rows]
    return found
