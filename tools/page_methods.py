"""What docs/which-method.md is written from: gains over the frozen backbone, by images and by data.

Each is a table over several profiles, or over the datasets of one.  What is not kept yet is left
out and named, so the same page takes it when it is.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from puma_study import store
from pumalib import evaluation, paths

from .page_parts import markdown_table
from .page_rows import SETTINGS, Difference, Kept

FROZEN = "frozen"
ALL_IMAGES = "adaptation_methods"
FEW_IMAGES = "few_shot"
NOT_RUN = "not run"
NOT_MEASURED = "not measured"


def by_images(
    kept: Kept, profiles: Sequence[str], methods: Sequence[str], shots: Sequence[int]
) -> str:
    """Unified R@1 of methods minus the frozen backbone's by images a class, and which is highest.

    `methods` are names as the rows of 11_few_shot begin, as "PUMA 4".
    """
    lines = []
    for profile in _kept(profiles, FEW_IMAGES):
        for count in shots:
            rows = [f"{FEW_IMAGES}/{method} {count}" for method in methods]
            differences = [
                _difference(kept, row, f"{FEW_IMAGES}/{FROZEN} 0", profile) for row in rows
            ]
            if any(differences):
                frozen = kept.levels(f"{FEW_IMAGES}/{FROZEN} 0", profile, "unified")["value"]
                cells = [_cell(one) for one in differences]
                place = [f"`{profile}`", str(count), f"{frozen:.1f}"]
                lines.append([*place, *cells, _highest(methods, differences)])
    names = ["profile", "images a class", "frozen", *methods, "highest"]
    return _with_missing(names, lines, profiles, FEW_IMAGES)


def by_method(kept: Kept, profiles: Sequence[str], rows: Sequence[str]) -> str:
    """What methods gain over the frozen backbone with all images, and what their training took.

    Minutes are the mean of the runs that are kept, by the device that they were trained on.
    """
    lines = []
    for profile in _kept(profiles, ALL_IMAGES):
        for row in rows:
            differences = [
                _difference(kept, row, FROZEN, profile, column) for column in evaluation.OVERALL
            ]
            if all(differences):
                cells = [_cell(one) for one in differences]
                took = [_images(kept, row, profile), *_minutes(kept, row, profile)]
                lines.append([f"`{profile}`", kept.row(row).name, *cells, *took])
    names = ["profile", "method", *[f"{one}, over frozen" for one in evaluation.OVERALL]]
    names += ["images shown", "minutes, CPU", "minutes, GPU"]
    return _with_missing(names, lines, profiles, ALL_IMAGES)


def by_distance(kept: Kept, profiles: Sequence[str], rows: Sequence[str]) -> str:
    """What rows gain over the frozen backbone on each dataset, the best known to it first.

    Each dataset is searched alone.
    """
    lines = []
    for profile in _kept(profiles, ALL_IMAGES):
        there = [row for row in rows if _difference(kept, row, FROZEN, profile)]
        columns = kept.results(FROZEN, profile).wide()
        datasets = [name for name in columns if name not in evaluation.OVERALL]
        levels = {one: kept.levels(FROZEN, profile, one)["value"] for one in datasets}
        for dataset in sorted(datasets, key=lambda one: -levels[one]):
            differences = [
                _difference(kept, row, FROZEN, profile, dataset) if row in there else None
                for row in rows
            ]
            names = [kept.row(row).name for row in rows]
            place = [f"`{profile}`", dataset, f"{levels[dataset]:.1f}"]
            lines.append(
                [*place, *[_cell(one) for one in differences], _highest(names, differences)]
            )
    names = ["profile", "dataset", "frozen", *[kept.row(row).name for row in rows], "highest"]
    return _with_missing(names, lines, profiles, ALL_IMAGES)


# ---- cells


def _difference(
    kept: Kept, row: str, other: str, profile: str, column: str = "unified"
) -> Difference | None:
    """A row minus another; None where one of them is not kept."""
    for one in (row, other):
        place = kept.row(one)
        if place.row not in kept.rows_of(profile, place.file):
            return None
    return kept.difference(row, other, profile, column)


def _cell(difference: Difference | None) -> str:
    if difference is None:
        return NOT_RUN
    if np.isnan(difference.low):
        return f"{difference.points:+.1f}"
    return difference.text


def _highest(names: Sequence[str], differences: Sequence[Difference | None]) -> str:
    """The name with the highest mean; "frozen" where none is above it."""
    points = {FROZEN: 0.0}
    for name, difference in zip(names, differences, strict=True):
        if difference is not None:
            points[name] = difference.points
    return max(points, key=lambda name: points[name])


def _images(kept: Kept, row: str, profile: str) -> str:
    """How many images a run of the row is shown in training, repeats counted."""
    record = store.record(kept.names(row, profile)[0], profile)
    shown = sum(epoch["images_per_second"] * epoch["seconds"] for epoch in record.log)
    return f"{round(shown):,}"


def _minutes(kept: Kept, row: str, profile: str) -> tuple[str, str]:
    """The mean minutes of training of the row's runs, on CPUs and on GPUs."""
    by_device: dict[bool, list[float]] = {True: [], False: []}
    for name in kept.names(row, profile):
        record = store.record(name, profile)
        on_cpu = record.environment.device == "cpu"
        by_device[on_cpu].append(record.seconds / 60)
    return _mean(by_device[True]), _mean(by_device[False])


def _mean(minutes: Sequence[float]) -> str:
    if not minutes:
        return NOT_MEASURED
    return f"{np.mean(minutes):.1f}"


# ---- what is kept


def _has(profile: str, file: str) -> bool:
    return Path(paths.RESULTS / profile / f"{file}.csv").is_file()


def _kept(profiles: Iterable[str], file: str) -> list[str]:
    return [profile for profile in profiles if _has(profile, file)]


def _with_missing(
    names: Sequence[str], lines: Sequence[Sequence[str]], profiles: Sequence[str], file: str
) -> str:
    """A table, and below it the profiles of which nothing is kept; ValueError without a line."""
    if not lines:
        raise ValueError(f"no profile of {', '.join(profiles)} has rows of {file}.csv, {SETTINGS}")
    text = markdown_table(names, lines)
    missing = [f"`{profile}`" for profile in profiles if not _has(profile, file)]
    if missing:
        text += f"\n\nNot kept yet: {', '.join(missing)}."
    return text


BLOCKS: dict[str, Callable[..., str]] = {
    "by-images": by_images,
    "by-method": by_method,
    "by-distance": by_distance,
}
