"""The scorecard: every claim of the paper or the survey, judged by the print and by kept runs."""

import fnmatch
import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import asdict

import numpy as np
import pandas as pd

from pumalib import config, evaluation

from . import measures, printed
from .claims import PAPER, Claim, Evidence, Kept, Print, Statement, evidence, kept, read_claims

LEVEL = 0.05  # of the corrected p-values
POWER = 0.8  # with which a comparison finds the differences of `smallest_found`


def scorecard(
    profile: config.Profile, about: Collection | None = None, file: str = PAPER
) -> pd.DataFrame:
    """Every claim of a `file`, as of `claims.read_claims`, or those `about` some tables, by name.

    Columns: `section`, `claim`, `table`, `print`, `here` and `why`.  `print` is holds, fails, or
    not printed.  `here`, with Holm's correction over all claims, is supported (all pairs of rows of
    the print were run and are above zero), contradicted (too many are below), undecided, or not
    testable.  What it rests on: the columns of `_rows_run` and `_rests_on`; `withheld`, why pairs
    of rows that were run were not compared; `decided_by`, the pair of rows of `why`; `value`,
    `low`, `high` and `in_points`, its `claims.Effect`; and `shared_with`, the other claims that
    compare one of its pairs of runs.
    """
    claims = read_claims(file)
    in_print = Print(printed.all_tables())
    runs = kept(profile, claims)

    lines = {}
    tests = {}
    found_here = {}
    for claim in claims:
        said = evidence(claim, in_print)
        here = evidence(claim, runs)
        needed = said.pairs
        if needed == 0:
            # It is drawn, not printed: the pairs are those that it names.
            needed = claim.named_pairs
        of_rows = _rows_run(claim, in_print, runs)
        is_complete = here.is_complete(needed) and not of_rows["rows_missing"]
        if here.above is not None:
            tests[claim.name] = _chances(claim, here, is_complete)
        found_here[claim.name] = here
        lines[claim.name] = {
            "section": claim.section,
            "claim": claim.text,
            "table": claim.above[0].table if claim.above else "",
            "print": _verdict_of_print(said),
            "here": "not testable",
            "why": _why(here, needed),
            **of_rows,
            "withheld": "; ".join(here.withheld),
            **_rests_on(here, needed, is_complete, LEVEL / len(claims)),
            **asdict(here.effect),
        }
    table = pd.DataFrame.from_dict(lines, orient="index").rename_axis("name")

    for name, verdict in _verdicts_here(tests, list(table.index)).items():
        table.loc[name, "here"] = verdict
    table["decided_by"] = pd.Series(_deciding(found_here))
    table["shared_with"] = pd.Series(_sharing(found_here))
    if about:
        return table[table["table"].isin(about)]
    return table


def _chances(claim: Claim, here: Evidence, is_complete: bool) -> tuple[float, float]:
    """The p-values that count, `above` and `below`.

    Where not all pairs were run, or not on all datasets, a counterexample still refutes, but not
    what is said of a share, nor that one of them lies apart: what was not run may be that one.
    """
    assert here.above is not None
    assert here.below is not None
    if is_complete:
        return here.above, here.below
    if any(one.share is not None or one.apart is not None for one in claim.above):
        return 1.0, 1.0
    return 1.0, here.below


def _why(here: Evidence, needed: int) -> str:
    parts = [here.why]
    if 0 < here.pairs < needed:
        parts.append(f"{here.pairs} of {needed} pairs of rows could be compared")
    if here.missing:
        parts.append(f"no {', '.join(here.missing)}")
    return "; ".join(parts)


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


# ---- what a verdict rests on


def _rests_on(
    here: Evidence, needed: int, is_complete: bool, level: float
) -> dict[str, float | int | bool]:
    """What was compared for a claim, as columns of the scorecard.

    `pairs` of rows that were compared, of `pairs_needed`; `could_support`, whether they were all,
    on all datasets; `contrasts`, pairs of runs among them that are not the same under another
    name.  Of `comparisons` (a pair in a column) `on_its_side` are above 0; `side_low` have an
    interval wholly above 0, `side_high` one not wholly below: so many are on the claim's side at
    least and at most, each comparison taken at 95 %.  `smallest_found`, in points (measures as they
    are): the difference that the least precise of them would find with 80 % power at Holm's
    strictest `level`.
    """
    found: dict[str, float | int | bool] = {
        "pairs": here.pairs,
        "pairs_needed": needed,
        "could_support": needed > 0 and is_complete,
        "contrasts": len({pair.contrast for pair in here.compared}),
        "comparisons": 0,
        "on_its_side": 0,
        "side_low": 0,
        "side_high": 0,
        "smallest_found": math.nan,
    }
    if here.pairs == 0:
        return found

    lines = pd.concat([pair.gains.assign(scale=pair.scale) for pair in here.compared])
    smallest = evaluation.smallest_found(
        lines["error"].to_numpy(), lines["dof"].to_numpy(), level, POWER
    )
    found["comparisons"] = len(lines)
    found["on_its_side"] = int((lines["value"] > 0).sum())
    found["side_low"] = int((lines["low"] > 0).sum())
    found["side_high"] = int((lines["high"] >= 0).sum())
    found["smallest_found"] = round(float(np.max(lines["scale"] * smallest)), 2)
    return found


def _rows_run(claim: Claim, in_print: Print, runs: Kept) -> dict[str, str]:
    """`rows_run`, those of the claim's rows that were run here, and `rows_missing`, the others."""
    run: dict[str, None] = {}
    missing: dict[str, None] = {}
    for one in claim.above:
        kept_rows = list(runs.tables.get(one.table, pd.Series(dtype=object)).index)
        if one.table in runs.measured:
            kept_rows += measures.bounds([*one.winners, *one.rivals])
        for name in _rows_of(one, in_print, kept_rows):
            if name in kept_rows:
                run[name] = None
            else:
                missing[name] = None
    return {"rows_run": ", ".join(run), "rows_missing": ", ".join(missing)}


def _rows_of(one: Statement, in_print: Print, kept_rows: list[str]) -> list[str]:
    """The rows that a statement is about: those of the print, or as they are named."""
    known = kept_rows
    if one.table in in_print.tables:
        known = list(in_print.tables[one.table].index)
    found = []
    for pattern in [*one.winners, *one.rivals]:
        found += fnmatch.filter(known, pattern) or [pattern]
    return found


def _deciding(found: Mapping[str, Evidence]) -> dict[str, str]:
    """The pair of rows that decides each claim, pairs of the same runs under one name."""
    names: dict[Hashable, str] = {}
    deciding = {}
    for claim, here in found.items():
        deciding[claim] = ""
        if here.decides is not None:
            label = " and ".join([here.decides.row, here.decides.other])
            deciding[claim] = names.setdefault(here.decides.contrast, label)
    return deciding


def _sharing(found: Mapping[str, Evidence]) -> dict[str, str]:
    """The other claims with which each claim shares a comparison of the same runs."""
    compared = {name: {pair.contrast for pair in here.compared} for name, here in found.items()}
    sharing = {}
    for name, mine in compared.items():
        others = [other for other in compared if other != name and mine & compared[other]]
        sharing[name] = ", ".join(others)
    return sharing
