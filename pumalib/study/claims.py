"""The paper's claims (claims.yaml), judged by its own tables and by kept runs.

A claim says that some rows of a table are above others.  Both judges go the same way: rows are
compared in pairs (`print_gains` of two printed rows, `kept_gains` of two rows of kept runs), and
`evidence` joins the comparisons to p-values for the claim and against it.
"""

import fnmatch
import functools
import math
import re
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pandas as pd
import yaml

from .. import config, data, evaluation, paths
from . import printed
from .runs import NotTestable, difference

TableName = int | str  # a number, "8 and 5", or a figure as "fig 6"
# Of two rows, by column: value, low, high, and p-values against "not above 0" and "not below 0".
Gains = Callable[[Mapping, TableName, str, str, Mapping[str, float]], pd.DataFrame]

FROZEN = "frozen"
FULL = "universal CurricularFace"
LEVEL = 0.05  # of the corrected p-values
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


@dataclass(frozen=True)
class Claim:
    """What the paper says, in our words, as statements that must all hold."""

    name: str
    section: str
    text: str
    above: list[Statement]

    @property
    def named_pairs(self) -> int:
        """Pairs of winners and rivals as they are named."""
        return sum(len(one.winners) * len(one.rivals) for one in self.above)


@dataclass(frozen=True)
class Evidence:
    """What comparisons say of a claim; p-values are None where nothing could be compared."""

    above: float | None  # p-value against "not above": small supports
    below: float | None  # p-value against "not below": small contradicts
    why: str  # the comparison that decides, or why there is none
    pairs: int  # pairs of rows that were compared


def read_claims() -> list[Claim]:
    """The claims of data/paper/claims.yaml."""
    content = yaml.safe_load((paths.PAPER / "claims.yaml").read_text(encoding="utf-8"))
    found = []
    for one in content:
        statements = [Statement(**statement) for statement in one["above"]]
        found.append(Claim(one["name"], one["section"], one["text"], statements))
    return found


# ---- two rows compared


def print_gains(
    tables: Mapping, table: TableName, row: str, other: str, by: Mapping[str, float]
) -> pd.DataFrame:
    """As `evaluation.paired_difference`, of two rows of one of the paper's tables.

    A print has no chance: p-values are 0 or 1, for above by as many points as said, to rounding.
    """
    rows = tables[table].select_dtypes("number")
    rows = rows.drop(columns=list(printed.SETTINGS), errors="ignore")
    datasets = rows.columns.intersection(printed.PAPER_DATASETS)
    of_large = rows[datasets.intersection(printed.LARGE)]
    of_small = rows[datasets.difference(printed.LARGE)]
    rows["large"] = of_large.mean(axis=1, skipna=False)
    rows["small"] = of_small.mean(axis=1, skipna=False)
    rows["small - large"] = rows["small"] - rows["large"]

    value = rows.loc[row] - rows.loc[other]
    least = (pd.Series(by, dtype=float) - printed.ROUNDING).reindex(value.index, fill_value=0)
    above = (value <= least).astype(float).where(value.notna())
    gains = {
        "value": value / 100,
        "low": np.nan,
        "high": np.nan,
        "above": above,
        "below": 1 - above,
    }
    return pd.DataFrame(gains)


# Claims share their comparisons.
_difference = functools.lru_cache(4096)(difference)


def kept_gains(
    tables: Mapping,
    table: TableName,
    row: str,
    other: str,
    by: Mapping[str, float],
    *,
    profile: str,
    large: tuple[str, ...],
) -> pd.DataFrame:
    """`runs.difference` of two rows of kept runs.

    Raises NotTestable where they were tested on other queries, where one collapsed (it ends below
    the frozen backbone), or where full fine-tuning gains nothing over the frozen backbone.  `by` is
    for the print; here the direction alone is judged.
    """
    # Its own table first: Table 10 has other datasets.
    rows = ChainMap(tables[table], *tables.values())

    def gain(one: str, two: str) -> pd.DataFrame:
        return _difference(tuple(rows[one]), tuple(rows[two]), profile, large)

    for name in (row, other):
        frozen, full = reference_rows(name)
        if frozen not in rows:
            continue
        if full in rows and gain(full, frozen).at["harmonic", "low"] <= 0:
            raise NotTestable(
                "full fine-tuning is not above the frozen backbone: nothing here could show a gain"
            )
        if gain(name, frozen).at["harmonic", "high"] < 0:
            raise NotTestable(f"{name} collapsed: it ends below the frozen backbone")
    return gain(row, other)


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


# ---- the scorecard


def scorecard(profile: config.Profile, about: Collection | None = None) -> pd.DataFrame:
    """Every claim, or those `about` some tables, by name.

    Columns: `section`, `claim`, `table`, `print`, `here` and `why`.  `print` is holds, fails, or
    not printed.  `here`, with Holm's correction over all claims, is supported (all pairs of rows of
    the print were run and are above zero), contradicted (too many are below), undecided, or not
    testable.
    """
    claims = read_claims()
    printed_tables = printed.all_tables()
    kept_tables = _kept_tables(profile.name)
    compared_here = functools.partial(kept_gains, profile=profile.name, large=large(profile))

    lines = {}
    tests = {}
    for claim in claims:
        in_print = evidence(claim, printed_tables, print_gains)
        here = evidence(claim, kept_tables, compared_here)
        needed = in_print.pairs
        if needed == 0:
            # It is drawn, not printed: the pairs are those that it names.
            needed = claim.named_pairs
        if here.above is not None:
            tests[claim.name] = _chances(claim, here, needed)
        lines[claim.name] = {
            "section": claim.section,
            "claim": claim.text,
            "table": claim.above[0].table,
            "print": _verdict_of_print(in_print),
            "here": "not testable",
            "why": _why(here, needed),
        }
    table = pd.DataFrame.from_dict(lines, orient="index").rename_axis("name")

    for name, verdict in _verdicts_here(tests, list(table.index)).items():
        table.loc[name, "here"] = verdict
    if about:
        return table[table["table"].isin(about)]
    return table


def _kept_tables(profile: str) -> dict[TableName, pd.Series]:
    """Of each table that a notebook wrote for a profile, the names of the runs of each row."""
    tables = {}
    for number, name in printed.FILES.items():
        file = paths.RESULTS / profile / f"{name}.csv"
        if file.is_file():
            rows = pd.read_csv(file).drop_duplicates("row").set_index("row")
            tables[number] = rows["runs"].str.split()
    return tables


def _chances(claim: Claim, here: Evidence, needed: int) -> tuple[float, float]:
    """The p-values that count, `above` and `below`.

    Where not all pairs were run, a counterexample still refutes, but not what is said of a share.
    """
    assert here.above is not None
    assert here.below is not None
    if here.pairs >= needed:
        return here.above, here.below
    if any(one.share is not None for one in claim.above):
        return 1.0, 1.0
    return 1.0, here.below


def _why(here: Evidence, needed: int) -> str:
    if 0 < here.pairs < needed:
        return f"{here.why}; {here.pairs} of {needed} pairs of rows could be compared"
    return here.why


def _verdict_of_print(in_print: Evidence) -> str:
    if in_print.above is None:
        return "not printed"
    if in_print.above == 0:
        return "holds"
    return "fails"


def _verdicts_here(
    tests: Mapping[str, tuple[float, float]], names: Collection[str]
) -> dict[str, str]:
    """The verdict on each claim that could be tested, by its p-values `above` and `below`.

    All claims, `names`, count for the correction, those that could not be tested with a chance of
    1.
    """
    chances = dict.fromkeys(names, 1.0)
    for name, (above, below) in tests.items():
        chances[name] = min(1.0, 2 * min(above, below))
    corrected = evaluation.holm(chances)
    verdicts = {}
    for name, (above, below) in tests.items():
        verdicts[name] = _verdict_here(above, below, corrected[name])
    return verdicts


def _verdict_here(above: float, below: float, corrected: float) -> str:
    if corrected >= LEVEL:
        return "undecided"
    if above < below:
        return "supported"
    return "contradicted"


# ---- a claim


def evidence(claim: Claim, tables: Mapping, gains: Gains) -> Evidence:
    """What the comparisons of `gains` between rows of `tables` say of a claim."""
    try:
        compared = [_comparisons(one, tables, gains) for one in claim.above]
    except NotTestable as missing:
        return Evidence(None, None, str(missing), 0)

    total = sum(len(gain) for found in compared for gain in found)
    pairs = sum(len(found) for found in compared)
    below = 1.0
    deciding = []
    for one, found in zip(claim.above, compared, strict=True):
        table = pd.concat(found).rename_axis("column").reset_index()
        share = 1.0 if one.share is None else one.share
        may_fail = len(table) - math.ceil(share * len(table))
        # A p-value of "at least so many hold" (partial conjunction, Benjamini and Heller, 2008).
        table["above"] = (table["above"] * (may_fail + 1)).clip(upper=1)
        refuting = table["below"].nsmallest(may_fail + 1).iloc[-1]
        below = min(below, total * refuting)
        weakest_first = table.sort_values(["above", "value"], ascending=[False, True])
        deciding.append(weakest_first.iloc[may_fail])

    weakest = max(deciding, key=lambda line: (line["above"], -line["value"]))
    return Evidence(float(weakest["above"]), float(below), _said(weakest, total), pairs)


def _said(line: pd.Series, total: int) -> str:
    """The comparison that decides, in words: "PUMA over VPT, unified: +9.0 [+8.1, +9.9]"."""
    value, low, high = 100 * line[["value", "low", "high"]].astype(float)
    said = f"{line['pair']}, {line['column']}: {value:+.1f}"
    if math.isfinite(low):
        said += f" [{low:+.1f}, {high:+.1f}]"
    if total > 1:
        said += f"; it decides among {total}"
    return said


def _comparisons(one: Statement, tables: Mapping, gains: Gains) -> list[pd.DataFrame]:
    """The gains of each pair of rows that can be compared; NotTestable where there is none."""
    if one.table not in tables:
        raise NotTestable(_nothing_kept(one.table))
    names = list(tables[one.table].index)
    winners = _rows(one.winners, names)
    rivals = _rows(one.rivals, names)
    found = []
    why = NotTestable("no pair of rows")
    for row, other in product(winners, rivals):
        if row == other or (one.alike and row.split()[-1] != other.split()[-1]):
            continue
        try:
            gain = gains(tables, one.table, row, other, one.by)
        except NotTestable as error:
            why = error
            continue
        pair = f"{row} over {other}"
        found.append(_of_columns(gain, one.columns, pair))
    if not found:
        raise why
    return found


def _nothing_kept(table: TableName) -> str:
    if str(table).startswith("fig"):
        return f"nothing is kept to judge {str(table).replace('fig', 'Fig. ', 1)} by"
    return f"nothing is kept to judge table {table} by"


def _of_columns(gain: pd.DataFrame, columns: str | Sequence[str], pair: str) -> pd.DataFrame:
    """The lines of a gain that a statement is about, with the name of the pair."""
    if columns == "each":
        columns = [name for name in gain.index if name not in evaluation.NOT_DATASETS]
    for name in columns:
        if name not in gain.index or np.isnan(gain.at[name, "above"]):
            raise NotTestable(f"{pair}: no {name}, or one seed")
    return gain.loc[list(columns)].assign(pair=pair)


def _rows(patterns: list[str], names: list[str]) -> list[str]:
    """The rows that patterns name; NotTestable where a pattern names none."""
    found = []
    for pattern in patterns:
        rows = fnmatch.filter(names, pattern)
        if not rows:
            raise NotTestable(f"no row {pattern!r}")
        found += rows
    return found
