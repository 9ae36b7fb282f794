"""Rows of kept runs compared on the same queries.

`contrast` is the one function that compares rows; `difference` and `interaction` give it the usual
ones, by the names of their runs, and `kept_difference` and `kept_interaction` by their settings.
Every comparison is one table: a line per dataset, "unified", "harmonic" and what `averages` asks
for; columns value, low and high (95 %), p_greater and p_less, error and dof, as
`evaluation.contrast` has them, and the number of seeds, of the row with fewest.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from pumalib import evaluation
from pumalib.config import Profile, Run
from pumalib.evaluation import Averages, Spread
from pumalib.training import run_folder

from . import store
from .record import FinishedRun

Hits = Mapping[str, np.ndarray]
# From the name and the profile of a run: numbers for the classes of its queries, or larger groups.
Units = Callable[[str, str | Path], Hits]

PLAIN = Averages()


class NotTestable(ValueError):  # noqa: N818 - a verdict of the scorecard, not a fault
    """The runs, rows or columns at hand cannot answer the question."""


@dataclass(frozen=True)
class Row:
    """A row of a contrast: the names of its seeds' runs, their profile, and its sign."""

    names: tuple[str, ...]
    profile: str | Path
    sign: int = 1


def contrast(
    rows: Sequence[Row],
    averages: Averages = PLAIN,
    units: Units = store.classes,
    *,
    own_seeds: bool = False,
) -> pd.DataFrame:
    """The signed sum of rows' accuracies, as the table that the module's docstring describes.

    Each row is the mean over all its seeds, and has their `spread`, pooled over the profile's rows,
    or with `own_seeds` by its own alone (Welch): seeds' errors are independent.
    Rows that share a run, or have one seed, are compared seed by seed, by the seeds that all have.
    The bootstrap draws `units`: classes, or with `groups.numbers` the groups of classes.  Raises
    NotTestable where such rows have no common seed, or the rows were tested on unlike queries.
    """
    by_seed = [_by_seed(row) for row in rows]
    distinct = {name for row in rows for name in row.names}
    are_independent = len(distinct) == sum(len(row.names) for row in rows)
    have_spreads = all(len(records) > 1 for records in by_seed)
    spreads: list[Spread | None] = [None] * len(rows)
    if are_independent and have_spreads:
        for place, (row, records) in enumerate(zip(rows, by_seed, strict=True)):
            of_row = list(records.values())
            if own_seeds:
                spreads[place] = _own_spread(of_row, averages)
            else:
                spreads[place] = spread(of_row, row.profile, averages)
    else:
        by_seed = _of_common_seeds(rows, by_seed)

    terms = []
    some_runs = []
    for row, records, of_seeds in zip(rows, by_seed, spreads, strict=True):
        hits = {seed: record.hits() for seed, record in records.items()}
        terms.append(evaluation.Term(hits, row.sign, of_seeds))
        some_runs.append((next(iter(records.values())).name, row.profile))
    return _of_terms(terms, some_runs, averages, units)


def _of_common_seeds(
    rows: Sequence[Row], by_seed: Sequence[dict[int, FinishedRun]]
) -> list[dict[int, FinishedRun]]:
    """The records of the seeds that all rows have; NotTestable where there is none."""
    common = [seed for seed in by_seed[0] if all(seed in records for records in by_seed)]
    if not common:
        formatted = []
        for row, records in zip(rows, by_seed, strict=True):
            seeds = ", ".join(str(seed) for seed in records)
            formatted.append(f"{' '.join(row.names)} (seeds {seeds})")
        raise NotTestable(f"{' and '.join(formatted)} have no seed in common")
    return [{seed: records[seed] for seed in common} for records in by_seed]


def difference(
    ours: Collection[str],
    theirs: Collection[str],
    profile: str | Path,
    averages: Averages = PLAIN,
    *,
    units: Units = store.classes,
    own_seeds: bool = False,
) -> pd.DataFrame:
    """One row minus another, each given by the names of its seeds' runs: their `contrast`."""
    rows = [Row(tuple(ours), profile), Row(tuple(theirs), profile, -1)]
    return contrast(rows, averages, units, own_seeds=own_seeds)


def by_seeds(
    ours: Collection[str], theirs: Collection[str], profile: str | Path, metric: str
) -> pd.DataFrame:
    """One row minus another, like `difference`, in a metric without kept hits, as "MAP@R".

    The error is that of the seeds alone: what other seeds would give on these test classes.  Raises
    NotTestable where a row has one seed, or a run that both have.
    """
    if set(ours) & set(theirs):
        raise NotTestable("rows that share a run cannot be compared by their seeds")
    means = []
    spreads = []
    counts = []
    for names in (ours, theirs):
        records = list(_by_seed(Row(tuple(names), profile)).values())
        of_row = spread(records, profile, PLAIN, metric)
        if of_row is None:
            raise NotTestable(f"{records[0].name} has one seed")
        scores = pd.DataFrame([_accuracies(record, PLAIN, metric) for record in records])
        means.append(scores.mean())
        spreads.append(of_row)
        counts.append(len(records))

    lines = {}
    for name in means[0].index:
        level = [one.value.get(name, mean[name]) for one, mean in zip(spreads, means, strict=True)]
        of_seeds = [one.variance[name] / count for one, count in zip(spreads, counts, strict=True)]
        dof = [one.dof[name] for one in spreads]
        lines[name] = evaluation.with_errors(
            level[0] - level[1], 0.0, np.array(of_seeds), np.array(dof), tested=True
        )
    table = pd.DataFrame(list(lines.values()), list(lines)).rename_axis("dataset")
    return table.assign(seeds=min(counts))


def interaction(
    ours: Sequence[Collection[str]],
    theirs: Sequence[Collection[str]],
    profiles: Sequence[str | Path],
    large: Sequence[str],
) -> pd.DataFrame:
    """What two profiles change in the difference of two rows: the first minus the second.

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


def of_runs(one: tuple[str, str | Path], other: tuple[str, str | Path]) -> pd.DataFrame:
    """One run minus another, each a name and a profile, query by query; their seeds may differ."""
    terms = [
        evaluation.Term({0: store.record(*one).hits()}),
        evaluation.Term({0: store.record(*other).hits()}, -1),
    ]
    return _of_terms(terms, [one, other], PLAIN, store.classes)


def in_points(table: pd.DataFrame) -> pd.DataFrame:
    """A table of `contrast` in points of accuracy: points, low, high and seeds."""
    points = 100 * table[["value", "low", "high"]]
    return points.rename(columns={"value": "points"}).assign(seeds=table["seeds"])


def over_splits(tables: Collection[pd.DataFrame]) -> pd.DataFrame:
    """A difference over several splits of the classes, from its table `in_points` on each.

    points is the mean over the splits; low and high are its 95% interval by Student's t over them;
    seeds is their number.  The splits differ in their classes for training, their test classes and
    their seeds, so the interval has all three in it.  Raises ValueError for a single split.
    """
    points = pd.concat([table["points"] for table in tables], axis=1)
    splits = points.shape[1]
    if splits < 2:
        raise ValueError("one split of the classes says nothing about others: give two or more")
    mean = points.mean(axis=1)
    error = points.std(axis=1, ddof=1) / np.sqrt(splits)
    half_width = stats.t.ppf(0.975, splits - 1) * error
    columns = {"points": mean, "low": mean - half_width, "high": mean + half_width}
    return pd.DataFrame(columns).assign(seeds=splits)


def _by_seed(row: Row) -> dict[int, FinishedRun]:
    """The records of a row by seed; the seed of an ensemble is its members'."""
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


def _of_terms(
    terms: Sequence[evaluation.Term],
    runs: Sequence[tuple[str, str | Path]],
    averages: Averages,
    units: Units,
) -> pd.DataFrame:
    """`evaluation.contrast` with the number of seeds; `runs` has a run of each term."""
    _require_same_queries(terms, runs)
    table = evaluation.contrast(terms, units(*runs[0]), averages)
    return table.assign(seeds=min(len(term.hits) for term in terms))


def _require_same_queries(
    terms: Sequence[evaluation.Term], runs: Sequence[tuple[str, str | Path]]
) -> None:
    """Raise NotTestable unless all terms have as many queries, in classes of the same sizes.

    `runs` has a run of each term.  Other images of as many classes, all as large, are not noticed.
    """
    expected = store.classes(*runs[0])
    counts = {dataset: len(queries) for dataset, queries in expected.items()}
    for term, (name, profile) in zip(terms, runs, strict=True):
        classes = store.classes(name, profile)
        same_classes = classes.keys() == expected.keys() and all(
            np.array_equal(classes[key], expected[key]) for key in expected
        )
        same_counts = all(
            counts == {dataset: len(queries) for dataset, queries in hits.items()}
            for hits in term.hits.values()
        )
        if not (same_classes and same_counts):
            raise NotTestable(
                f"{runs[0][0]} and {name} were tested on other queries: "
                "`runs list` shows their data"
            )


# ---- rows by their settings, of any profile


def kept_seeds(run: Run, profile: Profile) -> dict[int, str]:
    """The names of the kept runs that are `run` at one of the profile's seeds, by seed.

    Raises store.NotKept if there is none, ValueError or OSError if its data or weights are not on
    this machine, so that its name is unknown.
    """
    kept = store.read(profile.name)
    found = {}
    for seed in (*profile.seeds, *profile.further_seeds):
        name = run_folder.run_name(replace(run, seed=seed))
        if name in kept:
            found[seed] = name
    if not found:
        raise store.NotKept(f"{profile.name}: no run of {run.method.name} as it is wanted is kept")
    return found


def kept_difference(
    ours: Run, theirs: Run, profile: Profile, averages: Averages = PLAIN
) -> pd.DataFrame:
    """R@1 of one run minus another's, each over all its kept seeds, `in_points`.

    `ours` and `theirs` are columns too: the names of the runs.  Errors as of `kept_seeds` and
    `contrast`.
    """
    our_names = kept_seeds(ours, profile)
    their_names = kept_seeds(theirs, profile)
    table = difference(our_names.values(), their_names.values(), profile.name, averages)
    return in_points(table).assign(
        ours=" ".join(our_names.values()), theirs=" ".join(their_names.values())
    )


def kept_interaction(
    ours: Sequence[Run], theirs: Sequence[Run], profiles: Sequence[Profile], large: Sequence[str]
) -> pd.DataFrame:
    """What a second list of training images changes in a difference, `in_points`.

    `ours` and `theirs` are a run under the first list and one under the second, of the two
    profiles: the `interaction` of them.  Errors as of `kept_seeds` and `contrast`.
    """
    our_names = [kept_seeds(run, profile).values() for run, profile in zip(ours, profiles)]
    their_names = [kept_seeds(run, profile).values() for run, profile in zip(theirs, profiles)]
    names = [profile.name for profile in profiles]
    return in_points(interaction(our_names, their_names, names, large))


def kept_accuracies(run: Run, profile: Profile) -> pd.Series:
    """R@1 in percent by dataset, mean of the kept seeds; errors as of `kept_seeds`."""
    of_seeds = []
    for name in kept_seeds(run, profile).values():
        of_seeds.append(100 * store.record(name, profile.name).scores()["R@1"])
    return pd.concat(of_seeds, axis=1).mean(axis=1)


# ---- the spread of a row's seeds

# (dataset, queries) of each dataset, and of "unified".
Queries = tuple[tuple[str, int], ...]


def spread(
    records: Sequence[FinishedRun], profile: str | Path, averages: Averages, metric: str = "R@1"
) -> Spread | None:
    """The spread of a row's seeds, from the records of their runs; None for a single seed.

    All rows of a profile that were tested on the same queries help each other
    (`evaluation.pooled_spreads`), so that keeping further rows can change an interval a little.
    A row is all runs that differ by their seed alone.  Rows with few images a class are pooled
    among themselves: their seeds draw the images too, which adds to their spread.
    """
    if len(records) < 2:
        return None
    if records[0].members is not None:
        return _of_ensemble(records, averages, metric)
    rows = _of_rows(profile, store.states(profile), _queries(records[0]), averages, metric)
    return rows[records[0].seedless]


def _own_spread(records: Sequence[FinishedRun], averages: Averages) -> Spread:
    """The spread of a row's seeds by these seeds alone."""
    if records[0].members is not None:
        return _of_ensemble(records, averages, "R@1")
    variance = pd.DataFrame([_accuracies(record, averages) for record in records]).var(ddof=1)
    return Spread(variance, pd.Series(len(records) - 1.0, variance.index))


def _of_ensemble(records: Sequence[FinishedRun], averages: Averages, metric: str) -> Spread:
    tables = pd.DataFrame([_accuracies(record, averages, metric) for record in records])
    datasets = [name for name, _ in _queries(records[0]) if name != "unified"]
    own = {name: tables[name].to_numpy() for name in datasets}
    searched_in_all = tables.columns.intersection(["unified", evaluation.WEIGHTED])
    together = {name: tables[name].to_numpy() for name in searched_in_all}
    return evaluation.ensemble_spread(own, together, averages)


@lru_cache(maxsize=32)
def _of_rows(
    profile: str | Path,
    states: tuple[store.State, ...],
    queries: Queries,
    averages: Averages,
    metric: str,
) -> dict[str, Spread]:
    """The spreads of all rows of a profile with these queries, by their settings.

    `states` of its files are part of the cache's key: changed files are read again.
    """
    of_all_images: dict[str, list[dict[str, float]]] = {}
    of_drawn_images: dict[str, list[dict[str, float]]] = {}
    for record in store.read(profile).values():
        if record.members is not None or _queries(record) != queries:
            continue
        alike = of_drawn_images if _draws_images(record) else of_all_images
        alike.setdefault(record.seedless, []).append(_accuracies(record, averages, metric))

    judged = [name for name, _ in queries] + ["harmonic"]
    spreads: dict[str, Spread] = {}
    for alike in (of_all_images, of_drawn_images):
        tables = {row: pd.DataFrame(accuracies) for row, accuracies in alike.items()}
        spreads |= evaluation.pooled_spreads(tables, judged)
    return spreads


def _draws_images(record: FinishedRun) -> bool:
    """Whether a run's seed draws its training images too (`shots` of each class)."""
    return record.settings.data.shots > 0


def _queries(record: FinishedRun) -> Queries:
    return tuple((name, count) for name, count in record.queries.items() if name != "harmonic")


def _accuracies(record: FinishedRun, averages: Averages, metric: str = "R@1") -> dict[str, float]:
    """A metric of a run: by dataset, unified, harmonic, and R@1 by the other averages."""
    if metric != "R@1":
        try:
            return record.values(metric)
        except KeyError:
            raise NotTestable(f"{record.name} was kept without its {metric}") from None
    if averages.shares:
        return _from_hits(record, averages)
    own = {
        name: value for name, value in record.accuracies.items() if name not in evaluation.OVERALL
    }
    return record.accuracies | evaluation.averaged(own, averages)


def _from_hits(record: FinishedRun, averages: Averages) -> dict[str, float]:
    columns = {name: queries[:, np.newaxis] for name, queries in record.hits().items()}
    means = evaluation.resampled(columns, record.classes(), 0, averages=averages)
    return {name: float(mean[0, 0]) for name, mean in means.items()}
