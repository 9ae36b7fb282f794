"""The claims of the paper and of a digest of the survey, and what tables and kept runs say of them.

A `Claim` says that some rows of a table are above others.  `comparisons` compares them, as the
paper prints them (`Paper`) or by kept runs (`Kept`), in one table; `judge` reads a p-value for the
claim and one against it from that table; `verdicts.scorecard` makes verdicts of the p-values of all
claims.  Times, shares of gradients and other numbers that are no accuracy come from `measures`.
"""

import fnmatch
import functools
import math
import re
from collections import ChainMap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy import stats

from pumalib import config, data, evaluation, paths
from pumalib.evaluation import Averages

from . import contrasts, measures, printed, store
from .contrasts import NotTestable

# A number, "8 and 5", a figure as "fig6"; or the name of a CSV that a notebook writes.
TableName = int | str

# Files of claims, in data/paper.
PAPER = "claims.yaml"
SURVEY = "survey_claims.yaml"

FROZEN = "frozen"
FULL = "universal CurricularFace"
# A trained row collapsed above this mean cosine, or below this share of the frozen backbone's
# accuracy (docs/protocol-changes.md).
COLLAPSED_COSINE = 0.98
COLLAPSED_SHARE = 0.5
# Some datasets are large if the largest has this many times the images of the smallest (paper: 17).
LARGE_RATIO = 4
# The name of a dataset of the paper that a profile has in part.
OF_SUBSET = "{} (its subset {})"
SUBSET = re.compile(r"(.*) \(its subset (.*)\)")
# In Tables 4 and 6 a row names its backbone, "PUMA ViT-B/16 128"; all others have one backbone.
SCALE = re.compile(r"ViT-\w")


@dataclass(frozen=True)
class Statement:
    """Each of `winners` is above each of `rivals` in a table, as claims.yaml explains."""

    table: TableName
    winners: list[str]
    rivals: list[str]
    columns: str | Sequence[str] = evaluation.OVERALL  # "each" is every dataset
    alike: bool = False  # only rows whose names have the same last word
    share: float = 1.0  # of the comparisons that must hold
    by: dict[str, float] = field(default_factory=dict)  # points, for the print
    # In place of "above": some comparison differs by more than this many points, either way.
    apart: float = math.nan


@dataclass(frozen=True)
class Claim:
    """What the paper says, in our words, as statements that must all hold."""

    name: str
    section: str
    text: str
    above: list[Statement]
    collapse: bool = False  # it is about rows that collapse, which others must not do
    quote: str = ""  # the sentence that it is taken from, word for word
    source: str = ""  # of the quote: "digest", or "survey" where the digest quotes the survey
    asks: str = ""  # the part of the quote that the statements leave out
    untestable: str = ""  # why nothing here can judge it; it has no statements then
    needs: str = ""  # where its rows were not run: what they would need, and whether we can have it

    @property
    def named_pairs(self) -> int:
        """Pairs of winners and rivals as they are named."""
        return sum(len(one.winners) * len(one.rivals) for one in self.above)


def read_claims(file: str = PAPER) -> list[Claim]:
    """The claims of a file of data/paper, `PAPER` or `SURVEY`."""
    content = yaml.safe_load((paths.PAPER / file).read_text(encoding="utf-8"))
    found = []
    for one in content:
        statements = [Statement(**statement) for statement in one.get("above", ())]
        settings = {key: value for key, value in one.items() if key != "above"}
        claim = Claim(**settings, above=statements)
        if bool(claim.above) == bool(claim.untestable):
            raise ValueError(f"{file}, {claim.name}: give statements `above`, or `untestable`")
        found.append(claim)
    return found


# ---- the paper's tables


@dataclass(frozen=True)
class Paper:
    """The paper's own tables."""

    tables: Mapping[TableName, pd.DataFrame]

    @functools.cached_property
    def accuracies(self) -> dict[TableName, pd.DataFrame]:
        """The accuracies of each table, with the means of the large datasets and the small."""
        return {name: _with_groups(table) for name, table in self.tables.items()}

    def difference(self, claim: Claim, one: Statement, row: str, rival: str) -> pd.DataFrame:
        """One printed row minus another, in points and in columns as of `contrasts.contrast`.

        p-values are 0 or 1, for above by as many points as said, to rounding: a print has no
        chance, and no interval, error or dof.
        """
        rows = self.accuracies[one.table]
        value = rows.loc[row] - rows.loc[rival]
        points = pd.Series(one.by, dtype=float) - printed.ROUNDING
        least = points.reindex(value.index, fill_value=0)
        p_greater = (value <= least).astype(float).where(value.notna())
        table = {
            "value": value,
            "low": np.nan,
            "high": np.nan,
            "p_greater": p_greater,
            "p_less": 1 - p_greater,
        }
        return pd.DataFrame(table)

    def identity(self, table: TableName, row: str) -> Hashable:
        """A printed row is its place."""
        return table, row


def _with_groups(table: pd.DataFrame) -> pd.DataFrame:
    """The accuracies of a printed table, with the means of the large datasets and the small."""
    rows = table.select_dtypes("number")
    rows = rows.drop(columns=list(printed.SETTINGS), errors="ignore")
    datasets = rows.columns.intersection(printed.PAPER_DATASETS)
    of_large = rows[datasets.intersection(printed.LARGE)]
    of_small = rows[datasets.difference(printed.LARGE)]
    rows["large"] = of_large.mean(axis=1, skipna=False)
    rows["small"] = of_small.mean(axis=1, skipna=False)
    rows["small - large"] = rows["small"] - rows["large"]
    return rows


# ---- kept runs


@dataclass(frozen=True)
class Kept:
    """The rows of a profile's tables, and their kept runs."""

    profile: str
    # Of each table the names of the runs of each row.
    tables: Mapping[TableName, pd.Series]
    large: tuple[str, ...] = ()
    # Tables of measures, which have no runs: of each the values of each row, `measures.read`.
    measured: Mapping[TableName, pd.DataFrame] = field(default_factory=dict)

    @functools.cached_property
    def _states(self) -> tuple[store.State, ...]:
        # Looked at once: a scorecard asks for a thousand differences.
        return store.states(self.profile)

    def difference(self, claim: Claim, one: Statement, row: str, rival: str) -> pd.DataFrame:
        """One row minus another, in points and in columns as of `contrasts.contrast`.

        Measures stay as they are, and `by` is not judged.  Columns of `printed.METRICS` are
        compared by their seeds alone.  Raises NotTestable where the rows were tested on other
        queries, where full fine-tuning gains nothing over the frozen backbone, or where one of
        them collapsed, unless the claim is about `collapse`.
        """
        if one.table in self.measured:
            return measures.difference(self.measured[one.table], row, rival)
        # Its own table first: Table 10 has other datasets.
        tables = [self.tables[one.table], *self.tables.values()]
        rows = ChainMap(*tables)
        for name in (row, rival):
            frozen, full = reference_rows(name)
            if frozen not in rows:
                continue
            for table in tables:
                if full in table and frozen in table:
                    self._require_gain(table[full], table[frozen])
                    break
            how = "" if claim.collapse else collapse(rows[name], rows[frozen], self.profile)
            if how:
                raise NotTestable(f"{name} collapsed: {how}")
        found = [self._difference(rows[row], rows[rival])]
        for suffix, metric in printed.METRICS.items():
            if any(column.endswith(suffix) for column in one.columns):
                by_seeds = contrasts.by_seeds(rows[row], rows[rival], self.profile, metric)
                found.append(by_seeds.rename(index=lambda name, end=suffix: name + end))
        of_accuracies = pd.concat(found)
        of_accuracies[["value", "low", "high", "error", "class_error"]] *= 100
        return of_accuracies

    def runs(self, table: TableName, row: str) -> list[str]:
        """The names of a row's runs; none where there is no such row, or it is one of measures."""
        if table in self.measured:
            return []
        rows = ChainMap(self.tables[table], *self.tables.values())
        return list(rows.get(row, []))

    def ends_below_frozen(self, table: TableName, row: str) -> bool:
        """Whether a row ends below its frozen backbone, by the interval in harmonic R@1."""
        ours = self.runs(table, row)
        frozen = self.runs(table, reference_rows(row)[0])
        if not ours or not frozen:
            return False
        try:
            harmonic = self._difference(ours, frozen).loc["harmonic"]
        except NotTestable:  # they were tested on other queries
            return False
        return bool(harmonic["high"] < 0)

    def by_own_seeds(self, table: TableName, row: str, rival: str, column: str) -> pd.Series:
        """One row minus another in a column of `comparisons`, in points, by their own seeds alone.

        `low` and `high` are NaN where it is no R@1 of several seeds.
        """
        ours = self.runs(table, row)
        theirs = self.runs(table, rival)
        if ours and theirs:
            found = self._difference(ours, theirs, own_seeds=True)
            name = dataset_of(column)
            if name in found.index:
                return 100 * found.loc[name, ["low", "high"]]
        return pd.Series({"low": math.nan, "high": math.nan})

    def identity(self, table: TableName, row: str) -> Hashable:
        """A row is its runs, under any name; a row of measures is its place."""
        if table in self.measured:
            return table, row
        return frozenset(self.tables[table][row])

    def _require_gain(self, full: list[str], frozen: list[str]) -> None:
        if self._difference(full, frozen).at["harmonic", "low"] <= 0:
            raise NotTestable(
                "full fine-tuning is not above the frozen backbone: nothing here could show a gain"
            )

    def _difference(
        self, ours: list[str], theirs: list[str], *, own_seeds: bool = False
    ) -> pd.DataFrame:
        rows = tuple(ours), tuple(theirs)
        return _difference(*rows, self.profile, self.large, self._states, own_seeds=own_seeds)


def collapse(row: Sequence[str], frozen: Sequence[str], profile: str) -> str:
    """How a row of kept runs collapsed, in words; "" where it did not.

    Its embeddings end near one point: the cosine of two images of a batch, mean of the last epoch
    and of the seeds, is above `COLLAPSED_COSINE`.  Or its harmonic R@1 ends below `COLLAPSED_SHARE`
    of the frozen backbone's, which alone is asked where no cosine was recorded.
    """
    records = store.records(row, profile).values()
    last = [record.log[-1].get("cosine", math.nan) for record in records if record.log]
    cosines = [cosine for cosine in last if math.isfinite(cosine)]
    if cosines and np.mean(cosines) > COLLAPSED_COSINE:
        return f"the mean cosine within a batch ends at {np.mean(cosines):.3f}"
    reached = np.mean([record.accuracy("harmonic") for record in records])
    of_frozen = store.records(frozen, profile).values()
    untrained = np.mean([record.accuracy("harmonic") for record in of_frozen])
    if reached >= COLLAPSED_SHARE * untrained:
        return ""
    how = f"harmonic R@1 ends at {100 * reached:.1f}, below half of the frozen backbone's "
    how += f"{100 * untrained:.1f}"
    if not cosines:
        how += ", and no cosine was recorded"
    return how


@functools.lru_cache(4096)  # claims share their comparisons
def _difference(
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
    profile: str,
    large: tuple[str, ...],
    states: tuple[store.State, ...],
    *,
    own_seeds: bool,
) -> pd.DataFrame:
    """A difference of kept rows; `states` of the profile's files, so that changed ones are read."""
    averages = Averages(large=large)
    return contrasts.difference(ours, theirs, profile, averages, own_seeds=own_seeds)


def kept(profile: config.Profile, claims: Sequence[Claim] = ()) -> Kept:
    """The runs of the tables that notebooks wrote for a profile.

    These are the paper's tables, and further ones that `claims` call by the names of their files.
    """
    files = dict(printed.FILES)
    for claim in claims:
        for one in claim.above:
            if isinstance(one.table, str):
                files.setdefault(one.table, one.table)
    tables: dict[TableName, pd.Series] = {}
    measured: dict[TableName, pd.DataFrame] = {}
    for number, name in files.items():
        file = paths.RESULTS / profile.name / f"{name}.csv"
        if not file.is_file():
            continue
        if name in measures.TABLES:
            measured[number] = measures.read(name, file)
            tables[number] = pd.Series(dtype=object, index=measures.rows(measured[number]))
            continue
        rows = pd.read_csv(file).drop_duplicates("row").set_index("row")
        tables[number] = rows["runs"].str.split()
    return Kept(profile.name, tables, large(profile), measured)


def reference_rows(name: str) -> tuple[str, str]:
    """The rows of the frozen backbone and of full fine-tuning beside which row `name` is judged."""
    scale = SCALE.search(name)
    if scale is None:
        return FROZEN, FULL
    return f"frozen {scale[0]}", f"CurricularFace {scale[0]}/16 128"


def large(profile: config.Profile) -> tuple[str, ...]:
    """The datasets that the profile calls large, of those it has.

    Where it calls none so: the two with most training images; none where no dataset outweighs
    another.  Raises ValueError where it has no dataset of such a name.
    """
    sizes = data.load(profile.data).train["dataset"].value_counts()
    if profile.large is not None:
        if profile.data.datasets is None:
            data.check_known("large dataset", profile.large, sizes.index)
        return tuple(name for name in profile.large if name in sizes.index)
    if len(sizes) > 2 and sizes.max() > LARGE_RATIO * sizes.min():
        return tuple(sizes.index[:2])
    return ()


# ---- the comparisons of a claim

NUMBERS = ["value", "low", "high", "p_greater", "p_less", "error", "dof", "class_error"]
OF_STATEMENT = ["statement", "share", "apart", "in_points"]
OF_PAIR = ["row", "rival", "pair", "missing"]
COLUMNS = [*OF_STATEMENT, *OF_PAIR, "column", *NUMBERS, "why_not"]


def comparisons(claim: Claim, source: Paper | Kept) -> pd.DataFrame:
    """What a claim compares: a line for each statement, pair of rows, and column of their table.

    `NUMBERS` are of `row` minus `rival`, in the columns of `contrasts.contrast`: accuracies in
    points (`in_points`), measures as they are.  `statement` is the number of the statement, `share`
    and `apart` are what it asks; `pair` is what was compared, whatever the rows are called and
    whichever should win, and `missing` are datasets that the statement is about too and that are
    not there.

    What cannot be compared, a pair of rows or a whole statement, is one line that says `why_not`;
    the lines end after such a statement.
    """
    lines: list[dict[str, Any]] = []
    if claim.untestable:
        lines.append({"why_not": claim.untestable})
    for number, one in enumerate(claim.above):
        of_statement = {
            "statement": number,
            "share": one.share,
            "apart": one.apart,
            "in_points": one.table not in measures.TABLES,
        }
        of_pairs = _of_statement(claim, one, source)
        lines += [of_statement | line for line in of_pairs]
        if all(line["why_not"] for line in of_pairs):
            break
    table = pd.DataFrame(lines, columns=COLUMNS)
    return table.astype(dict.fromkeys(NUMBERS, float))


def compared(table: pd.DataFrame) -> pd.DataFrame:
    """The lines of `comparisons` with numbers; none where a whole statement has none."""
    found = table[table["why_not"] == ""]
    if found["statement"].nunique() < table["statement"].nunique():
        return found.iloc[:0]
    return found


def _of_statement(claim: Claim, one: Statement, source: Paper | Kept) -> list[dict[str, Any]]:
    """The lines of a statement, without the columns `OF_STATEMENT`."""
    try:
        pairs = _pairs(one, source)
    except NotTestable as error:
        return [{"why_not": str(error)}]
    lines = []
    for row, rival in pairs:
        lines += _of_pair(claim, one, source, row, rival)
    return lines


def _of_pair(
    claim: Claim, one: Statement, source: Paper | Kept, row: str, rival: str
) -> list[dict[str, Any]]:
    """The lines of a pair of rows, without the columns `OF_STATEMENT`."""
    try:
        table = source.difference(claim, one, row, rival)
        table, missing = _of_columns(table, one.columns, f"{row} over {rival}")
    except NotTestable as error:
        return [{"row": row, "rival": rival, "why_not": str(error)}]
    of_pair = {
        "row": row,
        "rival": rival,
        "pair": frozenset(source.identity(one.table, name) for name in (row, rival)),
        "missing": missing,
        "why_not": "",
    }
    return [{**of_pair, "column": column, **numbers} for column, numbers in table.iterrows()]


def _pairs(one: Statement, source: Paper | Kept) -> list[tuple[str, str]]:
    """A statement's pairs of winner and rival that the source has; NotTestable if it has none."""
    if one.table not in source.tables:
        raise NotTestable(_nothing_kept(one.table))
    names = list(source.tables[one.table].index)
    if one.table in measures.TABLES:
        names += measures.bounds([*one.winners, *one.rivals])
    found = []
    for row, rival in product(_rows(one.winners, names), _rows(one.rivals, names)):
        is_alike = row.split()[-1] == rival.split()[-1]
        if row != rival and (is_alike or not one.alike):
            found.append((row, rival))
    if not found:
        raise NotTestable("no pair of rows")
    return found


def _rows(patterns: list[str], names: list[str]) -> list[str]:
    """The names that match some of the patterns; NotTestable where no name does."""
    found = []
    for pattern in patterns:
        found += fnmatch.filter(names, pattern)
    if not found:
        raise NotTestable(f"no row {', '.join(map(repr, patterns))}")
    return found


def _nothing_kept(table: TableName) -> str:
    if str(table).startswith("fig"):
        return f"nothing is kept to judge {str(table).replace('fig', 'Fig. ', 1)} by"
    if isinstance(table, str) and table not in printed.FILES:
        return f"there is no {table}.csv: the notebook of that name writes it"
    return f"nothing is kept to judge table {table} by"


def _of_columns(
    table: pd.DataFrame, columns: str | Sequence[str], pair: str
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The lines of a difference that a statement is about, and the datasets that are not there.

    Where not all are there, only subsets of the paper's datasets are compared: another dataset may
    have the name of the paper's and other images.
    """
    if columns == "each":
        columns = [name for name in table.index if name not in evaluation.NOT_DATASETS]
    wanted = list(columns)
    missing: list[str] = []
    if not set(wanted) <= set(table.index):
        parts = {name: printed.SUBSETS.get(name) for name in wanted}
        there = [name for name in wanted if parts[name] in table.index]
        if there:
            missing = [name for name in wanted if name not in there]
            formatted = {parts[name]: OF_SUBSET.format(name, parts[name]) for name in there}
            table = table.rename(index=formatted)
            wanted = list(formatted.values())
    for name in wanted:
        if name not in table.index:
            raise NotTestable(f"{pair}: no {name}")
        if np.isnan(table.at[name, "p_greater"]):
            raise NotTestable(f"{pair}: one seed")
    return table.loc[wanted], tuple(missing)


def dataset_of(column: str) -> str:
    """The column of ours that a column of `comparisons` is."""
    found = SUBSET.fullmatch(column)
    return found[2] if found else column


def printed_column(column: str) -> str:
    """The column of the paper that a column of `comparisons` answers for."""
    found = SUBSET.fullmatch(column)
    if found:
        return found[1]
    whole = [name for name, part in printed.SUBSETS.items() if part == column]
    return whole[0] if whole else column


# ---- the judgement of a claim


@dataclass(frozen=True)
class Judgement:
    """The p-values of a claim, or of a statement, and the comparison that decides it."""

    supports: float  # p-value against "too few are above"
    contradicts: float  # p-value against "not too many are below"
    decides: pd.Series  # the line that `supports` is of


def judge(table: pd.DataFrame) -> Judgement | None:
    """The judgement of a claim by its `comparisons`; None where nothing was `compared`.

    All statements must hold: the weakest supports the claim, and any one contradicts it, by
    Bonferroni over the comparisons.
    """
    judged = []
    tests = 0
    for _, lines in compared(table).groupby("statement"):
        if lines["apart"].isna().all():
            judged.append(_judged_above(lines))
            tests += len(lines)
        else:
            judged.append(_judged_apart(lines))
            tests += 1
    if not judged:
        return None
    weakest = max(judged, key=lambda one: (one.supports, -one.decides["value"]))
    strongest_against = min(one.contradicts for one in judged)
    return Judgement(weakest.supports, min(1.0, tests * strongest_against), weakest.decides)


def _judged_above(lines: pd.DataFrame) -> Judgement:
    """The statement's `share` of the comparisons must be above 0; `contradicts` is of one of them.

    The p-value that at least k of n are above 0: Benjamini and Heller, 2008 (partial conjunction).
    """
    may_fail = len(lines) - math.ceil(lines["share"].iloc[0] * len(lines))
    weakest_first = lines.sort_values(["p_greater", "value"], ascending=[False, True])
    decides = weakest_first.iloc[may_fail]
    supports = min(1.0, (may_fail + 1) * decides["p_greater"])
    contradicts = lines["p_less"].nsmallest(may_fail + 1).iloc[-1]
    return Judgement(float(supports), float(contradicts), decides)


def _judged_apart(lines: pd.DataFrame) -> Judgement:
    """At least one comparison must be farther from 0 than `apart` points.

    `supports` is Bonferroni's of two sides of each; `contradicts`, that all are nearer, is the
    worst one's (two one-sided tests: Schuirmann, 1987; all must hold: Berger, 1982).
    """
    beyond = (lines["value"].abs() - lines["apart"]) / lines["error"].clip(lower=1e-10)
    farther = stats.t.sf(beyond, lines["dof"])
    nearer = stats.t.cdf(beyond, lines["dof"])
    supports = min(1.0, 2 * len(lines) * float(farther.min()))
    return Judgement(supports, float(nearer.max()), lines.iloc[int(np.argmin(farther))])
