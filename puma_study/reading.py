"""What a reader asks of each number: whether the effect that the paper prints is still possible.

`reading` says so of one comparison; `readings` of every claim, by the comparison that decides it,
with the reason where it was not judged and what would decide it; `pair_readings` of every
comparison.  The intervals are of one comparison each; the verdict, `here`, is corrected over all
claims (`verdicts`).
"""

import fnmatch
import math
from typing import Any

import numpy as np
import pandas as pd

from pumalib import config, evaluation

from . import printed, store
from .claims import (
    PAPER,
    Claim,
    Kept,
    Paper,
    compared,
    comparisons,
    judge,
    kept,
    printed_column,
    read_claims,
)
from .text import with_interval
from .verdicts import LEVEL, POWER, scorecard

AS_PRINTED = "as printed"
SMALLER = "smaller than printed"
LARGER = "larger than printed"
AS_CLAIMED = "as claimed"  # clearly so, and the paper prints no size
NO_DIFFERENCE = "no clear difference, printed effect excluded"
OPPOSITE = "opposite"
UNCERTAIN = "too uncertain to say"
NOT_RUN = "not run"
# From the best for the paper to the worst.
READINGS = (
    LARGER,
    AS_PRINTED,
    AS_CLAIMED,
    SMALLER,
    UNCERTAIN,
    NO_DIFFERENCE,
    OPPOSITE,
    NOT_RUN,
)
# The most seeds of a row that are called possible.
MOST_SEEDS = 100
PAIR_COLUMNS = [
    "name",
    "row",
    "rival",
    "column",
    "paper",
    "value",
    "low",
    "high",
    "in_points",
    "ours",
    "reading",
]


def reading(low: float, high: float, paper: float) -> str:
    """What an interval says of a difference that the claim has above 0, and `paper` prints.

    A clear difference excludes 0.  A printed effect is inside to the rounding of its two numbers;
    NaN where no size is printed, so that the direction alone is read.  A print may itself be below
    0: then it is the side of the print that counts.
    """
    is_clear = low > 0 or high < 0
    if math.isnan(paper):
        if not is_clear:
            return UNCERTAIN
        return AS_CLAIMED if low > 0 else OPPOSITE

    rounding = 2 * printed.ROUNDING
    is_inside = low - rounding <= paper <= high + rounding
    if not is_clear:
        return UNCERTAIN if is_inside else NO_DIFFERENCE
    if is_inside:
        return AS_PRINTED
    if (low > 0) != (paper >= 0):
        return OPPOSITE
    nearest = min(abs(low), abs(high))
    return LARGER if nearest > abs(paper) else SMALLER


def reading_apart(low: float, high: float, apart: float) -> str:
    """What an interval says of a difference that the claim has farther from 0 than `apart`.

    Either way; the opposite is that it is nearer.
    """
    if low > apart or high < -apart:
        return AS_CLAIMED
    if -apart < low and high < apart:
        return OPPOSITE
    return UNCERTAIN


def pair_readings(profile: config.Profile, file: str = PAPER) -> pd.DataFrame:
    """A line per claim, pair of rows and column that were compared; columns `PAIR_COLUMNS`.

    Differences in points, measures in their own units (`in_points`); `paper` is NaN where no size
    is printed; `ours` is the difference with its interval, as text.
    """
    claims = read_claims(file)
    runs = kept(profile, claims)
    paper = Paper(printed.all_tables())
    parts = [_of_claim(claim, comparisons(claim, runs), paper) for claim in claims]
    return pd.concat(parts, ignore_index=True)


def _of_claim(claim: Claim, table: pd.DataFrame, paper: Paper) -> pd.DataFrame:
    """The lines of `pair_readings` of one claim; without a line where nothing was compared."""
    lines = []
    for _, line in table[table["why_not"] == ""].iterrows():
        lines.append({"name": claim.name, **_read(claim, line, paper)})
    return pd.DataFrame(lines, columns=PAIR_COLUMNS)


def _read(claim: Claim, line: pd.Series, paper: Paper) -> dict[str, Any]:
    """A line of `comparisons` beside the print, as columns of `pair_readings`."""
    in_print = _printed_effect(claim, line, paper)
    digits = 1 if line["in_points"] else 2
    ours = with_interval(line["value"], line["low"], line["high"], sign="+", digits=digits)
    numbers = line[["row", "rival", "column", "value", "low", "high", "in_points"]].to_dict()
    if math.isnan(line["apart"]):
        found = reading(line["low"], line["high"], in_print)
    else:
        found = reading_apart(line["low"], line["high"], line["apart"])
    return {**numbers, "paper": in_print, "ours": ours, "reading": found}


def _printed_effect(claim: Claim, line: pd.Series, paper: Paper) -> float:
    """The difference of two printed numbers in points; NaN where they are not printed."""
    one = claim.above[line["statement"]]
    table = paper.tables.get(one.table)
    if table is None or not {line["row"], line["rival"]} <= set(table.index):
        return math.nan
    effects = paper.difference(claim, one, line["row"], line["rival"])["value"]
    return round(float(effects.get(printed_column(line["column"]), math.nan)), 2)


def readings(profile: config.Profile, file: str = PAPER) -> pd.DataFrame:
    """A line per claim of a `file`, by name: the reading of the comparison that decides it.

    Columns: `section`, `claim`, `print` and `here` of `verdicts.scorecard`; `reading`; `pair` and
    `column`, what decides; `paper`, `value`, `low`, `high`, `in_points` and `ours`, its numbers as
    of `pair_readings`; `all_read`, how often each reading was given to the claim's comparisons;
    `reason`, why it was not judged, or not wholly; and `needs`, what would decide it and whether
    that could be had here.
    """
    claims = read_claims(file)
    runs = kept(profile, claims)
    paper = Paper(printed.all_tables())
    card = scorecard(profile, file=file)
    lines = {}
    for claim in claims:
        table = comparisons(claim, runs)
        verdict = card.loc[claim.name]
        judgement = judge(table)
        decisive: dict[str, Any] = {"reading": NOT_RUN, "pair": "", "column": "", "paper": math.nan}
        decisive |= {"value": math.nan, "low": math.nan, "high": math.nan}
        decisive |= {"in_points": True, "ours": ""}
        if judgement is not None:
            decisive |= _read(claim, judgement.decides, paper)
            decisive["pair"] = f"{decisive.pop('row')} over {decisive.pop('rival')}"
        counts = _of_claim(claim, compared(table), paper)["reading"].value_counts()
        lines[claim.name] = {
            "section": claim.section,
            "claim": claim.text,
            "print": verdict["print"],
            **decisive,
            "all_read": ", ".join(f"{one} {counts[one]}" for one in READINGS if one in counts),
            "reason": _reason(claim, verdict, paper),
            "here": verdict["here"],
            "needs": _needs(claim, verdict, table, runs, len(claims)),
        }
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("name")


# ---- why not, and what would help


def _reason(claim: Claim, verdict: pd.Series, paper: Paper) -> str:
    """Why a claim was not judged, or not wholly, in words; "" where it was."""
    if claim.untestable:
        return claim.untestable
    parts = []
    if verdict["rows_missing"]:
        parts.append(f"not run here: {_not_run(claim, verdict, paper)}")
    if verdict["withheld"]:
        parts.append(verdict["withheld"])
    elif verdict["pairs"] == 0 and not verdict["rows_missing"]:
        parts.append(verdict["why"])
    if verdict["datasets_missing"]:
        parts.append(f"not in this benchmark: {verdict['datasets_missing']}")
    if verdict["below_frozen"]:
        parts.append(f"below the frozen backbone: {verdict['below_frozen']}")
    if claim.asks:
        parts.append(claim.asks)
    return "; ".join(parts)


def _not_run(claim: Claim, verdict: pd.Series, paper: Paper) -> str:
    """The rows that were not run, those of a pattern together: "specific * (9 of 9)"."""
    missing = verdict["rows_missing"].split(", ")
    found: dict[str, None] = {}
    for one in claim.above:
        printed_rows = list(paper.tables[one.table].index) if one.table in paper.tables else []
        for pattern in [*one.winners, *one.rivals]:
            rows = fnmatch.filter(printed_rows, pattern) or [pattern]
            of_pattern = [row for row in rows if row in missing]
            if of_pattern and "*" in pattern:
                found[f"{pattern} ({len(of_pattern)} of {len(rows)})"] = None
            else:
                found.update(dict.fromkeys(of_pattern))
    return ", ".join(found)


def _needs(
    claim: Claim, verdict: pd.Series, table: pd.DataFrame, runs: Kept, number_of_claims: int
) -> str:
    """What would decide a claim, and whether it could be had here."""
    if verdict["here"] in ("supported", "contradicted"):
        return "decided"
    if claim.untestable:
        return "nothing that is here"
    judgement = judge(table)
    # One pair is enough against most claims; for a claim, or of a share, all must be there.
    asks_for_all = judgement is None or judgement.decides["value"] > 0
    asks_for_all |= any(one.share < 1 or not math.isnan(one.apart) for one in claim.above)
    if judgement is None or (asks_for_all and not verdict["could_support"]):
        return _rows_needed(claim, verdict)
    return _seeds_needed(claim, judgement.decides, runs, LEVEL / number_of_claims)


def _rows_needed(claim: Claim, verdict: pd.Series) -> str:
    """The runs or data without which a claim was not judged, or not wholly."""
    if claim.needs:
        return claim.needs
    if verdict["datasets_missing"]:
        return f"{verdict['datasets_missing']}, which are not in this benchmark; not here"
    if "collapsed" in verdict["withheld"]:
        return "a setting at which no row collapses; could be searched here"
    return "its rows, by the notebooks that write them"


def _seeds_needed(claim: Claim, line: pd.Series, runs: Kept, level: float) -> str:
    """How many seeds a row would decide, were the difference as large as found, and their time."""
    table = claim.above[line["statement"]].table
    names = [runs.runs(table, row) for row in (line["row"], line["rival"])]
    if not all(names):
        return "more repetitions of the measure; could be had here"
    counts = [len(of_row) for of_row in names]
    effect = abs(line["value"])
    if not math.isnan(line["apart"]):
        effect = abs(effect - line["apart"])
    of_classes = line["class_error"] ** 2
    of_seeds = max(line["error"] ** 2 - of_classes, 0.0)
    for seeds in range(min(counts) + 1, MOST_SEEDS + 1):
        # Each row's variance of its mean shrinks with its own seeds; the rows' spreads count alike.
        left = sum(1 / max(seeds, count) for count in counts) / sum(1 / count for count in counts)
        error = math.sqrt(of_classes + of_seeds * left)
        found = evaluation.smallest_found(np.array(error), np.array(line["dof"]), level, POWER)
        if found <= effect:
            hours = _hours(names, seeds, runs.profile)
            return (
                f"about {seeds} seeds a row, were the difference as found; "
                f"{max(1, round(hours))} h of a machine as that of these runs"
            )
    return "more test classes as well as seeds, were the difference as found; not here"


def _hours(names: list[list[str]], seeds: int, profile: str) -> float:
    """Hours of training until each row has this number of `seeds`."""
    seconds = 0.0
    for of_row in names:
        each = [store.record(name, profile).seconds for name in of_row]
        seconds += max(0, seeds - len(of_row)) * float(np.mean(each))
    return seconds / 3600
