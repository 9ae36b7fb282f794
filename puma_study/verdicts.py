"""The scorecard: every claim of the paper or the survey, judged by the print and by kept runs."""

import fnmatch
import functools
import math
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from pumalib import config, evaluation

from . import measures, printed
from .claims import (
    PAPER,
    Claim,
    Judgement,
    Kept,
    Paper,
    Statement,
    compared,
    comparisons,
    judge,
    kept,
    read_claims,
)
from .text import with_interval

LEVEL = 0.05  # of the corrected p-values
POWER = 0.8  # with which a comparison finds the differences of `smallest_found`


def scorecard(
    profile: config.Profile, about: Collection | None = None, file: str = PAPER
) -> pd.DataFrame:
    """A line for every claim of a `file` of data/paper, or for the claims `about` some tables.

    Columns, beside `section`, `claim` and `table`:

    - `print`: holds, fails, or not printed.
    - `here`, with Holm's correction over all claims: supported (all pairs of rows of the print were
      run and are above zero), contradicted (too many are below), undecided, or not testable.
    - `why`: the comparison that decides, in words; `decided_by`, its pair of rows; `value`, `low`,
      `high` and `in_points`, its numbers; `own_low` and `own_high`, its interval by the two rows'
      own seeds alone.
    - The columns of `_rows_run` and `_rests_on`: what was compared.
    - `withheld`: why pairs of rows that were run were not compared; `datasets_missing`: the claim
      is about them, and they are not there; `below_frozen`: rows that were compared and end below
      the frozen backbone.
    - `shared_with`: the other claims that compare one of its pairs of runs.
    """
    claims = read_claims(file)
    paper = Paper(printed.all_tables())
    runs = kept(profile, claims)
    here = {claim.name: comparisons(claim, runs) for claim in claims}
    judged = {name: judge(table) for name, table in here.items()}
    all_in_print = _comparisons_in_print(file)

    # Every claim counts for the correction.
    of_rows = {}
    rests_on = {}
    p_values = {}
    for claim in claims:
        name = claim.name
        of_rows[name] = _rows_run(claim, paper, runs)
        pairs_needed = _pairs_needed(claim, all_in_print[name])
        level = LEVEL / len(claims)
        rests_on[name] = _rests_on(here[name], pairs_needed, of_rows[name]["rows_missing"], level)
        judgement = judged[name]
        if judgement is not None:
            p_values[name] = _p_values(claim, judgement, rests_on[name]["could_support"])
    verdicts_here = _verdicts_here(p_values, list(judged))
    deciding = _deciding(judged)
    sharing = _sharing(here)

    lines = {}
    for claim in claims:
        name = claim.name
        of_table = claim.above[0].table if claim.above else ""
        if about and of_table not in about:
            continue
        table = here[name]
        judgement = judged[name]
        lines[name] = {
            "section": claim.section,
            "claim": claim.text,
            "table": of_table,
            "print": _verdict_of_print(all_in_print[name]),
            "here": verdicts_here.get(name, "not testable"),
            "why": _why(table, judgement, rests_on[name]["pairs_needed"]),
            **of_rows[name],
            "withheld": _withheld(table),
            "datasets_missing": ", ".join(_missing(compared(table))),
            "below_frozen": _below_frozen(claim, table, runs),
            **rests_on[name],
            **_numbers(judgement),
            **_own_seeds(claim, judgement, runs),
            "decided_by": deciding[name],
            "shared_with": sharing[name],
        }
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("name")


@functools.cache  # the print stays as it is
def _comparisons_in_print(file: str) -> dict[str, pd.DataFrame]:
    paper = Paper(printed.all_tables())
    return {claim.name: comparisons(claim, paper) for claim in read_claims(file)}


def _verdict_of_print(in_print: pd.DataFrame) -> str:
    judgement = judge(in_print)
    if judgement is None:
        return "not printed"
    if judgement.supports == 0:
        return "holds"
    return "fails"


def _p_values(claim: Claim, judgement: Judgement, is_complete: bool) -> tuple[float, float]:
    """The p-values that count, for the claim and against it.

    Where not all pairs were run, or not on all datasets, a counterexample still refutes a claim
    about every pair.  It does not refute a claim about a share of them, nor that one of them lies
    apart: the missing ones may decide it.
    """
    if is_complete:
        return judgement.supports, judgement.contradicts
    if any(one.share < 1 or not math.isnan(one.apart) for one in claim.above):
        return 1.0, 1.0
    return 1.0, judgement.contradicts


def _verdicts_here(
    p_values: Mapping[str, tuple[float, float]], names: Collection[str]
) -> dict[str, str]:
    """The verdict on each claim that could be tested, by its p-values for it and against it.

    All claims, `names`, count for the correction: one that could not be tested has the p-value 1.
    """
    two_sided = dict.fromkeys(names, 1.0)
    for name, (supports, contradicts) in p_values.items():
        two_sided[name] = min(1.0, 2 * min(supports, contradicts))
    corrected = evaluation.holm(two_sided)
    verdicts = {}
    for name, (supports, contradicts) in p_values.items():
        if corrected[name] >= LEVEL:
            verdicts[name] = "undecided"
        elif supports < contradicts:
            verdicts[name] = "supported"
        else:
            verdicts[name] = "contradicted"
    return verdicts


# ---- the comparison that decides


def _why(table: pd.DataFrame, judgement: Judgement | None, pairs_needed: int) -> str:
    """The comparison that decides and the pairs that are missing, or why nothing was compared.

    As "PUMA over VPT, unified: +9.0 [+8.1, +9.9]; it decides among 2".
    """
    if judgement is None:
        return table["why_not"].iloc[-1]
    found = compared(table)
    line = judgement.decides
    parts = [f"{line['row']} over {line['rival']}, {line['column']}: {_formatted(line)}"]
    if len(found) > 1:
        parts.append(f"it decides among {len(found)}")
    if _pairs(found) < pairs_needed:
        parts.append(f"{_pairs(found)} of {pairs_needed} pairs of rows could be compared")
    if _missing(found):
        parts.append(f"no {', '.join(_missing(found))}")
    return "; ".join(parts)


def _formatted(line: pd.Series) -> str:
    digits = 1 if line["in_points"] else 2
    if math.isfinite(line["low"]):
        return with_interval(line["value"], line["low"], line["high"], sign="+", digits=digits)
    return f"{line['value']:+.{digits}f}"


def _numbers(judgement: Judgement | None) -> dict[str, Any]:
    """The numbers of the comparison that decides, as columns of the scorecard."""
    if judgement is None:
        return {"value": math.nan, "low": math.nan, "high": math.nan, "in_points": False}
    return judgement.decides[["value", "low", "high", "in_points"]].to_dict()


def _own_seeds(claim: Claim, judgement: Judgement | None, runs: Kept) -> dict[str, float]:
    """The interval of the comparison that decides without pooling, as columns of the scorecard."""
    if judgement is None:
        return {"own_low": math.nan, "own_high": math.nan}
    line = judgement.decides
    table = claim.above[line["statement"]].table
    own = runs.by_own_seeds(table, line["row"], line["rival"], line["column"])
    return {"own_low": own["low"], "own_high": own["high"]}


def _deciding(judged: Mapping[str, Judgement | None]) -> dict[str, str]:
    """The pair of rows that decides each claim, pairs of the same runs under one name."""
    names: dict[Hashable, str] = {}
    deciding = {}
    for claim, judgement in judged.items():
        deciding[claim] = ""
        if judgement is not None:
            line = judgement.decides
            label = f"{line['row']} and {line['rival']}"
            deciding[claim] = names.setdefault(line["pair"], label)
    return deciding


# ---- the comparisons behind a verdict


def _rests_on(
    table: pd.DataFrame, pairs_needed: int, rows_missing: str, level: float
) -> dict[str, Any]:
    """The number and precision of a claim's comparisons, as columns of the scorecard.

    `pairs` of rows that were compared, of `pairs_needed`; `could_support`, whether they were all,
    on all datasets; `contrasts`, pairs of runs among them that are not the same under another
    name.  Of `comparisons` (a pair in a column) `on_its_side` are above 0, or farther from it than
    the claim's `apart`; `side_low` are so with their whole interval, `side_high` with a part of it:
    so many are on the claim's side at least and at most, each comparison taken at 95 %.
    `smallest_found`, in points (measures as they are): the difference that the least precise of
    them would find with 80 % power at Holm's strictest `level`.
    """
    found = compared(table)
    is_complete = _pairs(found) >= pairs_needed and not _missing(found) and not rows_missing
    smallest_found = math.nan
    if len(found):
        of_each = evaluation.smallest_found(
            found["error"].to_numpy(), found["dof"].to_numpy(), level, POWER
        )
        smallest_found = round(float(np.max(of_each)), 2)
    apart = found["apart"].fillna(0)
    either = found["apart"].notna()
    is_there = (found["value"] > apart) | (either & (found["value"] < -apart))
    is_surely = (found["low"] > apart) | (either & (found["high"] < -apart))
    is_maybe = (found["high"] >= apart) | (either & (found["low"] <= -apart))
    return {
        "pairs": _pairs(found),
        "pairs_needed": pairs_needed,
        "could_support": pairs_needed > 0 and is_complete,
        "contrasts": found["pair"].nunique(),
        "comparisons": len(found),
        "on_its_side": int(is_there.sum()),
        "side_low": int(is_surely.sum()),
        "side_high": int(is_maybe.sum()),
        "smallest_found": smallest_found,
    }


def _pairs(found: pd.DataFrame) -> int:
    """How many pairs of rows were compared."""
    return len(found.drop_duplicates(["statement", "row", "rival"]))


def _pairs_needed(claim: Claim, in_print: pd.DataFrame) -> int:
    """How many pairs of rows a claim is about: the printed ones, or as the claim names them."""
    printed_pairs = _pairs(compared(in_print))
    if printed_pairs == 0:
        # It is drawn, not printed.
        return claim.named_pairs
    return printed_pairs


def _missing(found: pd.DataFrame) -> list[str]:
    """The datasets that the claim is about and that are not there."""
    return list(dict.fromkeys(name for names in found["missing"] for name in names))


def _withheld(table: pd.DataFrame) -> str:
    """Why pairs of rows were not compared, each reason once."""
    is_withheld = table["row"].notna() & (table["why_not"] != "")
    return "; ".join(table.loc[is_withheld, "why_not"].unique())


def _below_frozen(claim: Claim, table: pd.DataFrame, runs: Kept) -> str:
    """The rows that were compared and end below the frozen backbone."""
    below: dict[str, None] = {}
    for line in compared(table).drop_duplicates(["statement", "row", "rival"]).itertuples():
        of_line = claim.above[line.statement].table
        for row in (line.row, line.rival):
            if runs.ends_below_frozen(of_line, row):
                below[row] = None
    return ", ".join(below)


def _rows_run(claim: Claim, paper: Paper, runs: Kept) -> dict[str, str]:
    """`rows_run`, those of the claim's rows that were run here, and `rows_missing`, the others."""
    run: dict[str, None] = {}
    missing: dict[str, None] = {}
    for one in claim.above:
        kept_rows = list(runs.tables.get(one.table, pd.Series(dtype=object)).index)
        if one.table in runs.measured:
            kept_rows += measures.bounds([*one.winners, *one.rivals])
        for name in _rows_of(one, paper, kept_rows):
            if name in kept_rows:
                run[name] = None
            else:
                missing[name] = None
    return {"rows_run": ", ".join(run), "rows_missing": ", ".join(missing)}


def _rows_of(one: Statement, paper: Paper, kept_rows: list[str]) -> list[str]:
    """The rows that a statement is about: the printed ones, or as the statement names them."""
    known = kept_rows
    if one.table in paper.tables:
        known = list(paper.tables[one.table].index)
    found = []
    for pattern in [*one.winners, *one.rivals]:
        found += fnmatch.filter(known, pattern) or [pattern]
    return found


def _sharing(here: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """The other claims with which each claim shares a comparison of the same runs."""
    pairs = {name: set(compared(table)["pair"]) for name, table in here.items()}
    sharing = {}
    for name, mine in pairs.items():
        others = [other for other in pairs if other != name and mine & pairs[other]]
        sharing[name] = ", ".join(others)
    return sharing
