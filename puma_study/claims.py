"""The claims of the paper and of the survey, and what printed tables or kept runs say of them.

A claim says that some rows of a table are above others.  Both judges go the same way, `Print` of
printed rows and `Kept` of rows of kept runs: rows are compared in pairs, and `evidence` joins the
comparisons to p-values for the claim and against it.  `verdicts` makes the scorecard of them.
What is no accuracy, as times and shares of gradients, comes by `measures`.
"""

import fnmatch
import functools
import math
import re
from collections import ChainMap
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

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
# A dataset is large if there are some with so many times the images of others (paper: 17 times).
LARGE_RATIO = 4
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
    share: float | None = None  # of the comparisons that must hold; None: all
    by: dict[str, float] = field(default_factory=dict)  # points, for the print
    # Not above: in one comparison at least they lie more than so many points apart, either way.
    apart: float | None = None


@dataclass(frozen=True)
class Claim:
    """What the paper says, in our words, as statements that must all hold."""

    name: str
    section: str
    text: str
    above: list[Statement]
    collapse: bool = False  # it is about rows that collapse, which others must not do
    quote: str = ""  # of what it is taken from, word for word
    untestable: str = ""  # why nothing here can judge it; it has no statements then

    @property
    def named_pairs(self) -> int:
        """Pairs of winners and rivals as they are named."""
        return sum(len(one.winners) * len(one.rivals) for one in self.above)


@dataclass(frozen=True)
class Pair:
    """A winner and a rival that were compared."""

    row: str
    other: str
    # A line per column that the statement is about: at least value, low, high, and p-values against
    # "not above 0" and "not below 0".
    gains: pd.DataFrame
    # What was compared, whatever the rows are called, and whichever should win.
    contrast: frozenset[Hashable]
    # What a value is multiplied by to be told: fractions are told as points, measures as they are.
    scale: float = 100.0
    # Datasets that the statement is about too, and that are not there.
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As "PUMA over VPT"."""
        return f"{self.row} over {self.other}"


class Judge(Protocol):
    """Tables with rows, and a way to compare two of them."""

    @property
    def tables(self) -> Mapping[TableName, Any]:
        """By name, each with an index of rows."""

    def gains(self, claim: Claim, one: Statement, row: str, other: str) -> pd.DataFrame:
        """One row above the other, in the columns of `evaluation.paired_difference`.

        Raises NotTestable where they cannot be compared.
        """

    def identity(self, table: TableName, row: str) -> Hashable:
        """What a row is, whatever it is called."""


@dataclass(frozen=True)
class Effect:
    """The difference that decides a claim, with its interval; NaN where none is told."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    # Whether it is a difference of accuracies, in points, and not one of measures.
    in_points: bool = False


@dataclass(frozen=True)
class Evidence:
    """What comparisons say of a claim; p-values are None where nothing could be compared."""

    above: float | None  # p-value against "not above": small supports
    below: float | None  # p-value against "not below": small contradicts
    why: str  # the comparison that decides, or why there is none
    compared: list[Pair] = field(default_factory=list)
    decides: Pair | None = None  # the pair of `why`
    effect: Effect = field(default_factory=Effect)  # the numbers of `why`
    withheld: list[str] = field(default_factory=list)  # why other pairs of rows were not compared

    @property
    def pairs(self) -> int:
        """How many pairs of rows were compared."""
        return len(self.compared)

    @property
    def missing(self) -> list[str]:
        """The datasets that the claim is about and that are not there."""
        return list(dict.fromkeys(name for pair in self.compared for name in pair.missing))

    def is_complete(self, needed: int) -> bool:
        """Whether all was compared: so many pairs of rows, on every dataset."""
        return self.pairs >= needed and not self.missing


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
class Print:
    """The paper's own tables as a judge."""

    tables: Mapping[TableName, pd.DataFrame]

    def gains(self, claim: Claim, one: Statement, row: str, other: str) -> pd.DataFrame:
        """Two printed rows: p-values are 0 or 1, for above by as many points as said, to rounding.

        A print has no chance, and no interval.
        """
        rows = _with_groups(self.tables[one.table])
        value = rows.loc[row] - rows.loc[other]
        points = pd.Series(one.by, dtype=float) - printed.ROUNDING
        least = points.reindex(value.index, fill_value=0)
        p_greater = (value <= least).astype(float).where(value.notna())
        gains = {
            "value": value / 100,
            "low": np.nan,
            "high": np.nan,
            "p_greater": p_greater,
            "p_less": 1 - p_greater,
        }
        return pd.DataFrame(gains)

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
    """The kept runs of a profile as a judge."""

    profile: str
    # Of each table the names of the runs of each row.
    tables: Mapping[TableName, pd.Series]
    large: tuple[str, ...] = ()
    # Tables of measures, which have no runs: of each the values of each row, `measures.read`.
    measured: Mapping[TableName, pd.DataFrame] = field(default_factory=dict)

    def gains(self, claim: Claim, one: Statement, row: str, other: str) -> pd.DataFrame:
        """The difference of two rows of kept runs; the direction alone is judged, not `by`.

        Raises NotTestable where they were tested on other queries, where full fine-tuning gains
        nothing over the frozen backbone, or where one of them collapsed: it ends below the frozen
        backbone.  A claim about collapse is judged all the same.
        """
        if one.table in self.measured:
            return measures.difference(self.measured[one.table], row, other)
        # Its own table first: Table 10 has other datasets.
        tables = [self.tables[one.table], *self.tables.values()]
        rows = ChainMap(*tables)
        for name in (row, other):
            frozen, full = reference_rows(name)
            if frozen not in rows:
                continue
            for table in tables:
                if full in table and frozen in table:
                    self._require_gain(table[full], table[frozen])
                    break
            if not claim.collapse:
                self._require_no_collapse(name, rows[name], rows[frozen])
        return self._difference(rows[row], rows[other])

    def identity(self, table: TableName, row: str) -> Hashable:
        """A row is its runs; of measures it is its name."""
        if table in self.measured:
            return table, row
        return frozenset(self.tables[table][row])

    def _require_gain(self, full: list[str], frozen: list[str]) -> None:
        if self._difference(full, frozen).at["harmonic", "low"] <= 0:
            raise NotTestable(
                "full fine-tuning is not above the frozen backbone: nothing here could show a gain"
            )

    def _require_no_collapse(self, name: str, row: list[str], frozen: list[str]) -> None:
        if self._difference(row, frozen).at["harmonic", "high"] < 0:
            raise NotTestable(f"{name} collapsed: it ends below the frozen backbone")

    def _difference(self, ours: list[str], theirs: list[str]) -> pd.DataFrame:
        states = store.states(self.profile)
        return _difference(tuple(ours), tuple(theirs), self.profile, self.large, states)


@functools.lru_cache(4096)  # claims share their comparisons
def _difference(
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
    profile: str,
    large: tuple[str, ...],
    states: tuple[store.State, ...],
) -> pd.DataFrame:
    """A difference of kept rows; `states` are those of the profile's files."""
    return contrasts.difference(ours, theirs, profile, Averages(large=large))


def kept(profile: config.Profile, claims: Sequence[Claim] = ()) -> Kept:
    """The runs of the tables that notebooks wrote for a profile.

    These are the paper's, and those that `claims` call by the names of their files.
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


# ---- a claim


def evidence(claim: Claim, judge: Judge) -> Evidence:
    """What a judge's comparisons say of a claim."""
    if claim.untestable:
        return Evidence(None, None, claim.untestable)
    compared = []
    withheld: list[str] = []
    try:
        for one in claim.above:
            compared.append(_compared(claim, one, judge, withheld))
    except NotTestable as missing:
        return Evidence(None, None, str(missing), withheld=withheld)

    judged = [_judged(one, pairs) for one, pairs in zip(claim.above, compared, strict=True)]
    comparisons = sum(one.comparisons for one in judged)
    # All must hold: the weakest statement supports, and any one contradicts.
    weakest = max(judged, key=lambda one: (one.above, -one.decides["value"]))
    effect = _effect(weakest.decides)
    strongest_against = min(one.below for one in judged)
    tests = sum(one.tests_against for one in judged)
    return Evidence(
        above=weakest.above,
        below=min(1.0, tests * strongest_against),
        why=_said(weakest.decides, effect, comparisons),
        compared=[pair for pairs in compared for pair in pairs],
        decides=weakest.decides["of"],
        effect=effect,
        withheld=withheld,
    )


@dataclass(frozen=True)
class _Judged:
    """What the comparisons of one statement say."""

    above: float  # p-value against "too few are above"
    below: float  # p-value against "not too many are below", of one comparison
    decides: pd.Series  # the comparison that `above` is of
    comparisons: int
    tests_against: int  # by how many `below` is to be corrected


def _judged(one: Statement, pairs: list[Pair]) -> _Judged:
    """So many comparisons must hold as the statement says.

    p-values of "at least so many" as in Benjamini and Heller, 2008 (partial conjunction).
    """
    lines = pd.concat([pair.gains.assign(of=pair) for pair in pairs])
    lines = lines.rename_axis("column").reset_index()
    if one.apart is not None:
        return _judged_apart(one.apart, lines)
    must_hold = len(lines)
    if one.share is not None:
        must_hold = math.ceil(one.share * len(lines))
    may_fail = len(lines) - must_hold

    weakest_first = lines.sort_values(["p_greater", "value"], ascending=[False, True])
    decides = weakest_first.iloc[may_fail]
    above = min(1.0, (may_fail + 1) * decides["p_greater"])
    below = lines["p_less"].nsmallest(may_fail + 1).iloc[-1]
    return _Judged(float(above), float(below), decides, len(lines), len(lines))


def _judged_apart(points: float, lines: pd.DataFrame) -> _Judged:
    """One comparison at least is farther from 0 than so many points, or all are nearer.

    `above` is Bonferroni's of two sides of each; `below`, that all are nearer, is that of the
    worst (two one-sided tests: Schuirmann, 1987; all must hold: Berger, 1982).
    """
    scales = lines["of"].map(lambda pair: pair.scale)
    beyond = (lines["value"].abs() - points / scales) / lines["error"].clip(lower=1e-12)
    farther = stats.t.sf(beyond, lines["dof"])
    nearer = stats.t.cdf(beyond, lines["dof"])
    decides = lines.iloc[int(np.argmin(farther))]
    above = min(1.0, 2 * len(lines) * float(farther.min()))
    return _Judged(above, float(nearer.max()), decides, len(lines), 1)


def _effect(line: pd.Series) -> Effect:
    """The numbers of the comparison that decides."""
    scale = line["of"].scale
    value, low, high = scale * line[["value", "low", "high"]].astype(float)
    return Effect(value, low, high, in_points=scale == 100)


def _said(line: pd.Series, effect: Effect, comparisons: int) -> str:
    """The comparison that decides, in words: "PUMA over VPT, unified: +9.0 [+8.1, +9.9]"."""
    decimals = 1 if effect.in_points else 2
    said = f"{line['of'].name}, {line['column']}: {effect.value:+.{decimals}f}"
    if math.isfinite(effect.low):
        said += f" [{effect.low:+.{decimals}f}, {effect.high:+.{decimals}f}]"
    if comparisons > 1:
        said += f"; it decides among {comparisons}"
    return said


def _compared(claim: Claim, one: Statement, judge: Judge, withheld: list[str]) -> list[Pair]:
    """The pairs of a statement that can be compared; NotTestable where there is none.

    Adds to `withheld` why others cannot, each reason once.
    """
    if one.table not in judge.tables:
        raise NotTestable(_nothing_kept(one.table))
    found = []
    why = NotTestable("no pair of rows")
    names = list(judge.tables[one.table].index)
    scale = 100.0
    if one.table in measures.TABLES:
        names += measures.bounds([*one.winners, *one.rivals])
        scale = 1.0
    for row, other in _pairs(one, names):
        try:
            gains = judge.gains(claim, one, row, other)
            lines, missing = _of_columns(gains, one.columns, f"{row} over {other}")
        except NotTestable as error:
            why = error
            if str(error) not in withheld:
                withheld.append(str(error))
            continue
        sides = [judge.identity(one.table, name) for name in (row, other)]
        found.append(Pair(row, other, lines, frozenset(sides), scale, missing))
    if not found:
        raise why
    return found


def _pairs(one: Statement, names: list[str]) -> Iterator[tuple[str, str]]:
    """A statement's winners and rivals among the rows that there are."""
    winners = _rows(one.winners, names)
    rivals = _rows(one.rivals, names)
    for row, other in product(winners, rivals):
        if row == other:
            continue
        if one.alike and row.split()[-1] != other.split()[-1]:
            continue
        yield row, other


def _rows(patterns: list[str], names: list[str]) -> list[str]:
    """The rows that patterns name, as far as they are there; NotTestable where none is."""
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
    gains: pd.DataFrame, columns: str | Sequence[str], pair: str
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The lines of a gain that a statement is about, and the datasets that are not there.

    Where not all are there, subsets of the paper's datasets stand for them, and no other: a name
    may coincide where images do not.
    """
    if columns == "each":
        columns = [name for name in gains.index if name not in evaluation.NOT_DATASETS]
    wanted = list(columns)
    missing: list[str] = []
    if not set(wanted) <= set(gains.index):
        parts = {name: printed.SUBSETS.get(name) for name in wanted}
        there = [name for name in wanted if parts[name] in gains.index]
        if there:
            missing = [name for name in wanted if name not in there]
            told = {parts[name]: f"{name} (its subset {parts[name]})" for name in there}
            gains = gains.rename(index=told)
            wanted = list(told.values())
    for name in wanted:
        if name not in gains.index:
            raise NotTestable(f"{pair}: no {name}")
        if np.isnan(gains.at[name, "p_greater"]):
            raise NotTestable(f"{pair}: one seed")
    return gains.loc[wanted], tuple(missing)
