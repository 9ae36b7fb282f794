"""Rows of kept runs compared, in pairs: same queries, same seeds."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from pumalib import evaluation
from pumalib.evaluation import Averages

from . import seeds, store
from .record import FinishedRun

Hits = Mapping[str, np.ndarray]
# From the name and the profile of a run: numbers for the classes of its queries, or larger groups.
Units = Callable[[str, str | Path], Hits]

PLAIN = Averages()


class NotTestable(ValueError):  # noqa: N818 - a verdict of the scorecard, not a fault
    """What is asked cannot be told from the runs, rows or columns that there are."""


@dataclass(frozen=True)
class Row:
    """A row of a contrast: the names of its seeds' runs, their profile, and its sign."""

    names: tuple[str, ...]
    profile: str | Path
    sign: int = 1


def difference(
    ours: Collection[str],
    theirs: Collection[str],
    profile: str | Path,
    averages: Averages = PLAIN,
    *,
    other: str | Path | None = None,
    units: Units = store.classes,
) -> pd.DataFrame:
    """One row minus another, each given by the names of its seeds' runs, as `contrast` has it.

    `theirs` are of the profile `other`, if that is another one.
    """
    their_profile = profile if other is None else other
    rows = [Row(tuple(ours), profile), Row(tuple(theirs), their_profile, -1)]
    return contrast(rows, averages, units)


def level(
    names: Collection[str],
    profile: str | Path,
    averages: Averages = PLAIN,
    units: Units = store.classes,
) -> pd.DataFrame:
    """The accuracies of one row by themselves, as `contrast` has them."""
    return contrast([Row(tuple(names), profile)], averages, units)


def interaction(
    ours: Sequence[Collection[str]],
    theirs: Sequence[Collection[str]],
    profiles: Sequence[str | Path],
    large: Sequence[str],
) -> pd.DataFrame:
    """What two profiles change in the difference of two rows, as `contrast` has it.

    `ours` and `theirs` are the names of each row's runs in the first profile and in the second; the
    profiles share their test images.  The line "small - large", of the datasets `large` in both,
    is above 0 where `ours` favours what is small under the first more than under the second: with
    the paper's proportions and the reversed ones, whichever datasets are small
    (docs/protocol.md, "Imbalance").
    """
    first, second = profiles
    rows = [
        Row(tuple(ours[0]), first),
        Row(tuple(theirs[0]), first, -1),
        Row(tuple(ours[1]), second, -1),
        Row(tuple(theirs[1]), second),
    ]
    return contrast(rows, Averages(large=tuple(large)))


def contrast(
    rows: Sequence[Row], averages: Averages = PLAIN, units: Units = store.classes
) -> pd.DataFrame:
    """`evaluation.contrast` of kept rows, with what `seeds.spread` knows of each.

    Seeds that all rows have count.  `units` are drawn by the bootstrap: classes, or with
    `groups.numbers` the groups of classes.  Rows that share a run are compared seed by seed alone:
    their errors are no independent ones.  Raises NotTestable where there is no common seed, or the
    rows were tested on unlike queries.
    """
    by_seed = [_by_seed(row) for row in rows]
    common = [seed for seed in by_seed[0] if all(seed in records for records in by_seed)]
    if not common:
        told = []
        for row, records in zip(rows, by_seed, strict=True):
            told.append(f"{' '.join(row.names)} (seeds {_listed(records)})")
        raise NotTestable(f"{' and '.join(told)} have no seed in common")

    distinct = {name for row in rows for name in row.names}
    are_independent = len(distinct) == sum(len(row.names) for row in rows)
    terms = []
    for row, records in zip(rows, by_seed, strict=True):
        hits = {seed: records[seed].hits() for seed in common}
        spread = None
        if are_independent:
            spread = seeds.spread(list(records.values()), row.profile, averages)
        terms.append(evaluation.Term(hits, row.sign, spread))

    some_runs = [records[common[0]].name for records in by_seed]
    _require_same_queries(terms, some_runs)
    drawn = units(some_runs[0], rows[0].profile)
    return evaluation.contrast(terms, drawn, averages)


def of_runs(
    one: tuple[str, str | Path], other: tuple[str, str | Path], averages: Averages = PLAIN
) -> pd.DataFrame:
    """One run minus another, each a name and a profile, query by query, whatever their seeds."""
    terms = [
        evaluation.Term({0: store.record(*one).hits()}),
        evaluation.Term({0: store.record(*other).hits()}, -1),
    ]
    _require_same_queries(terms, [one[0], other[0]])
    return evaluation.contrast(terms, store.classes(*one), averages)


def _by_seed(row: Row) -> dict[int, FinishedRun]:
    """The records of a row by their seeds, an ensemble's being that of its members."""
    found: dict[int, FinishedRun] = {}
    records = store.records(row.names, row.profile)
    for name in row.names:
        record = records[name]
        seed = _seed_of(record, row.profile)
        if seed in found:
            raise NotTestable(
                f"{found[seed].name} and {name} are of one row and have one seed, {seed}"
            )
        found[seed] = record
    return found


def _seed_of(record: FinishedRun, profile: str | Path) -> int:
    if record.members is not None:
        record = store.record(record.members[0], profile)
    return record.settings.seed


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def _require_same_queries(terms: Sequence[evaluation.Term], names: Sequence[str]) -> None:
    """Raise NotTestable unless all hits are of the same queries; `names` has a run of each term."""
    expected: dict[str, int] = {}
    for term, name in zip(terms, names, strict=True):
        for hits in term.hits.values():
            counts = {dataset: len(queries) for dataset, queries in hits.items()}
            expected = expected or counts
            if counts != expected:
                raise NotTestable(
                    f"{names[0]} and {name} were tested on other queries: "
                    "`runs list` shows their data"
                )
