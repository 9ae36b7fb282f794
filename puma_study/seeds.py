"""How far the seeds of kept rows lie apart, with the help of the other rows of a profile.

A row is here what its settings say: kept runs that differ by their seed alone.  All rows of a
profile that were tested on the same queries help each other (`evaluation.pooled_spreads`), so that
keeping further rows can change an interval a little.  Rows with few images a class, whose seeds
draw the images too, help each other alone: they lie farther apart by what the images add.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from pumalib import evaluation
from pumalib.evaluation import Averages, Spread

from . import store
from .record import FinishedRun

# (dataset, queries) of each dataset, and of "unified".
Queries = tuple[tuple[str, int], ...]


def spread(
    records: Sequence[FinishedRun], profile: str | Path, averages: Averages
) -> Spread | None:
    """What is known of the seeds of a row, given by the record of each seed's run.

    None where it is one seed.
    """
    if len(records) < 2:
        return None
    if records[0].members is not None:
        return _of_ensemble(records, averages)
    rows = _of_rows(profile, store.states(profile), _queries(records[0]), averages)
    return rows[_settings(records[0])]


def _of_ensemble(records: Sequence[FinishedRun], averages: Averages) -> Spread:
    tables = pd.DataFrame([_accuracies(record, averages) for record in records])
    datasets = [name for name, _ in _queries(records[0]) if name != "unified"]
    own = {name: tables[name].to_numpy() for name in datasets}
    searched_in_all = tables.columns.intersection(["unified", evaluation.WEIGHTED])
    together = {name: tables[name].to_numpy() for name in searched_in_all}
    return evaluation.ensemble_spread(own, together, averages)


@lru_cache(maxsize=32)
def _of_rows(
    profile: str | Path, states: tuple[store.State, ...], queries: Queries, averages: Averages
) -> dict[str, Spread]:
    """The spreads of all rows of a profile with these queries, by their settings.

    `states` are those of its files: where they change it is another question.
    """
    of_all_images: dict[str, list[dict[str, float]]] = {}
    of_drawn_images: dict[str, list[dict[str, float]]] = {}
    for record in store.read(profile).values():
        if record.members is not None or _queries(record) != queries:
            continue
        alike = of_drawn_images if _draws_images(record) else of_all_images
        alike.setdefault(_settings(record), []).append(_accuracies(record, averages))

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


def _settings(record: FinishedRun) -> str:
    """A hash of all settings of a run but its seed.

    Settings that there were not yet when it was kept have their hash defaults.
    """
    run = replace(record.settings, seed=0)
    return run.identity(str(run.data.split), run.pretrained)


def _accuracies(record: FinishedRun, averages: Averages) -> dict[str, float]:
    """R@1 of a run: by dataset, unified, harmonic, and by the other averages."""
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
