"""What pages ask of the kept runs: rows by short names, their accuracies, and differences."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from puma_study import contrasts, figures, printed, results, store
from puma_study.text import with_interval
from pumalib import config, evaluation, paths
from pumalib.evaluation import Averages

# The profile whose numbers README.md shows: the trial of docs/protocol.md.
MAIN_PROFILE = "photos-8"
# In place of a profile, between two: what the second changes in a difference.
AGAINST = " against "
# Column names of the harmonic mean without one dataset begin so.
WITHOUT = "harmonic without "


@dataclass(frozen=True)
class Row:
    """A row of a page: its name, its row in results/<profile>/<file>.csv, and that in print.

    `table` is the paper's table that prints it, under `printed` if that is another name than `row`.
    """

    name: str
    file: str
    row: str
    table: int | None = None
    printed: str = ""

    @property
    def in_print(self) -> str:
        """The name of the row in the paper's table."""
        return self.printed or self.row


# The rows that pages speak of by a short name, each a row of results/<profile>/<file>.csv.  The
# number is that of the paper's table which prints it.
_METHODS = (
    ("frozen", "Frozen backbone", "frozen", None),
    ("linear", "Linear embedding", "Linear Emb.", 2),
    ("mlp3", "MLP-3", "MLP-3 Emb.", 2),
    ("vpt", "Visual prompt (VPT)", "VPT", 2),
    ("pool", "Prompt pool", "conditional", 3),
    ("lora", "LoRA", "LoRA", 2),
    ("stochastic-lora", "Stochastic LoRA", "Stochastic LoRA", 7),
    ("adaptformer", "AdaptFormer", "AdaptFormer", 2),
    ("static", "Adapter, static", "static", 3),
    ("stochastic", "Adapter, stochastic", "stochastic", 3),
    ("puma", "PUMA", "PUMA", 2),
    ("full", "Full fine-tuning", "universal CurricularFace", 2),
)
_MODELS = (
    ("full-ms", "Full fine-tuning, Multi-similarity", "universal MS", 2),
    ("full-cosface", "Full fine-tuning, CosFace", "universal CosFace", 2),
    ("full-pa", "Full fine-tuning, Proxy-Anchor", "universal PA", 2),
    ("specific", "Full fine-tuning, a model per dataset", "specific CurricularFace", 2),
)
ROWS = {key: Row(name, "adaptation_methods", row, table) for key, name, row, table in _METHODS}
ROWS |= {key: Row(name, "main_results", row, table) for key, name, row, table in _MODELS}
ROWS["full-3e-5"] = Row(
    "Full fine-tuning, rate 3e-5",
    "training_length",
    "full x 1",
    table=2,
    printed="universal CurricularFace",
)

# What PUMA is drawn against in the figure of README.md, by profile.
RIVALS = {
    "photos-8": (
        "linear",
        "pool",
        "vpt",
        "mlp3",
        "stochastic",
        "adaptformer",
        "static",
        "stochastic-lora",
        "lora",
        "full",
        "full-3e-5",
    )
}

# The test shares of the paper's Table 1 in the parts of docs/protocol.md.
SHARES = {
    "photos-8": (
        ("cars_196", 60502),
        ("groceries", 26830),
        ("birds_cub50", 25653),
        ("flowers_17", 9929),
        ("objects_caltech", 8131),
        ("animals_tinyimagenet", 5924),
        ("clothes", 5000),
        ("faces_orl", 4696),
    )
}


class Difference(NamedTuple):
    """A row minus another in points, with its interval, and as the paper prints it (or NaN)."""

    points: float
    low: float
    high: float
    paper: float

    @property
    def text(self) -> str:
        """As "+5.7 [+4.7, +6.7]"."""
        return with_interval(self.points, self.low, self.high, sign="+")


class Kept:
    """The numbers of kept runs that pages use, each computed once.

    `main_profile` counts where a marker names no profile.
    """

    def __init__(self, main_profile: str = MAIN_PROFILE) -> None:
        self.main_profile = main_profile
        self.rows = dict(ROWS)
        self.scorecard = functools.cache(self._scorecard)
        self.readings = functools.cache(_readings)
        self.results = functools.cache(self._results)
        self._contrast = functools.cache(self._contrasted)
        self._files = functools.cache(_runs_of_rows)

    def profile(self, name: str) -> str:
        """A profile by its name; without a name the main one."""
        return name or self.main_profile

    def row(self, key: str) -> Row:
        """A row by its key, or by `file/row`; ValueError where there is none."""
        if key in self.rows:
            return self.rows[key]
        file, slash, name = key.partition("/")
        if not slash:
            known = ", ".join(self.rows)
            raise ValueError(f"there is no row {key!r}; there are {known}; or write file/row")
        return Row(figures.shown(name), file, name)

    def names(self, key: str, profile: str) -> list[str]:
        """The names of a row's runs; ValueError where no run is kept."""
        row = self.row(key)
        known = self.rows_of(profile, row.file)
        if row.row not in known:
            raise ValueError(f"results/{profile}/{row.file}.csv has no row {row.row!r}")
        return known[row.row]

    def rows_of(self, profile: str, file: str) -> dict[str, list[str]]:
        """The names of the runs of each row of results/<profile>/<file>.csv."""
        return self._files(profile, file)

    def _results(self, key: str, profile: str) -> results.Results:
        return results.collect({key: self.names(key, profile)}, profile)

    def levels(self, key: str, profile: str, column: str) -> pd.Series:
        """R@1 in percent: `value`, `low` and `high`, and the number of `seeds`."""
        tidy = self.results(key, profile).tidy
        line = tidy[(tidy["metric"] == "R@1") & (tidy["dataset"] == column)]
        if line.empty:
            raise ValueError(f"{key} in {profile} has no column {column!r}")
        numbers = line.iloc[0][["value", "low", "high"]].astype(float) * 100
        numbers["seeds"] = line.iloc[0]["seeds"]
        return numbers

    def difference(self, key: str, other: str, profile: str, column: str) -> Difference:
        """The difference of two rows; ValueError where there is no such row or column.

        With a profile "one against other" it is their difference in the one minus that in the
        other, which have the same test images (`contrasts.interaction`).
        """
        table = self._contrast(key, other, profile)
        if column not in table.index:
            raise ValueError(f"there is no column {column!r}; there are {', '.join(table.index)}")
        # No -0.0.
        line = contrasts.in_points(table).loc[column].round(1) + 0.0
        paper = np.nan
        if AGAINST not in profile:
            paper = self._printed_difference(key, other, column)
        return Difference(line["points"], line["low"], line["high"], paper)

    def on_splits(self, key: str, other: str, column: str) -> tuple[Difference, list[Difference]]:
        """The difference of two rows over all splits of the classes, and on each, the first first.

        As notebook 34 kept them for the main profile; ValueError where it has no such pair or
        column.
        """
        table = self.table("class_splits", self.main_profile)
        pair = f"{self.row(key).name} minus {self.row(other).name}"
        mine = table[(table["pair"] == pair) & (table["dataset"] == column)]
        if mine.empty:
            raise ValueError(f"class_splits.csv has no {column!r} of {pair!r}")
        paper = self._printed_difference(key, other, column)
        # No -0.0.
        numbers = mine[["points", "low", "high"]].round(1) + 0.0
        found = [
            Difference(line.points, line.low, line.high, paper) for line in numbers.itertuples()
        ]
        is_over_all = mine["split"].str.startswith("over ").tolist()
        over_all = found.pop(is_over_all.index(True))
        return over_all, found

    def _printed_difference(self, key: str, other: str, column: str) -> float:
        return round(self.printed(key, column) - self.printed(other, column), 1)

    def _contrasted(self, key: str, other: str, profile: str) -> pd.DataFrame:
        profiles = profile.split(AGAINST)
        ours = [self.names(key, one) for one in profiles]
        theirs = [self.names(other, one) for one in profiles]
        large = config.profile(profiles[0]).large or ()
        if len(profiles) > 1:
            return contrasts.interaction(ours, theirs, profiles, large)
        averages = Averages(large=large)
        if profile in SHARES:
            datasets = tuple(name for name, _ in SHARES[profile])
            averages = Averages(large=large, without=datasets, shares=SHARES[profile])
        return contrasts.difference(ours[0], theirs[0], profile, averages)

    def open_loss(self, key: str, profile: str) -> float:
        """A row's loss on training images as `training.loop.open_loss` has it, mean of its seeds.

        NaN where one of them has none: nothing was trained, or it is from before that was kept.
        """
        records = [store.record(name, profile) for name in self.names(key, profile)]
        losses = [record.open_loss for record in records]
        return float(np.mean([np.nan if loss is None else loss for loss in losses]))

    def printed(self, key: str, column: str) -> float:
        """The paper's value of a row, in percent; NaN where it prints none."""
        row = self.row(key)
        if row.table is None:
            return np.nan
        return printed.value(row.table, row.in_print, column)

    def recomputed(self, key: str) -> float:
        """The harmonic mean of the printed columns, where the printed one is another; else NaN."""
        row = self.row(key)
        if row.table is None:
            return np.nan
        wrong = printed.inconsistent(row.table)
        wrong = wrong[wrong["column"] == "harmonic"]
        if row.in_print not in wrong.index:
            return np.nan
        return float(wrong.at[row.in_print, "recomputed"])

    def table(self, file: str, profile: str) -> pd.DataFrame:
        """A table that a notebook wrote; ValueError if it is not kept."""
        return pd.read_csv(_kept_file(profile, file))

    def _scorecard(self, profile: str, file: str = "claims") -> pd.DataFrame:
        """The scorecard that notebook 17 or 25 kept: to judge anew needs the profile's images."""
        path = _kept_file(profile, file)
        return pd.read_csv(path, index_col="name", dtype={"section": str})


def _readings(profile: str) -> pd.DataFrame:
    """`study.readings` as notebook 17 kept them: a line per claim, by its name."""
    path = _kept_file(profile, "claims_readings")
    return pd.read_csv(path, index_col="name", dtype={"section": str}, keep_default_na=False)


def _runs_of_rows(profile: str, file: str) -> dict[str, list[str]]:
    """The names of the runs of each row of results/<profile>/<file>.csv."""
    path = _kept_file(profile, file)
    table = pd.read_csv(path, dtype={"row": str}).drop_duplicates("row").set_index("row")
    return table["runs"].str.split().to_dict()


def _kept_file(profile: str, name: str) -> Path:
    path = paths.RESULTS / profile / f"{name}.csv"
    if not path.is_file():
        raise ValueError(f"there is no {paths.shown(path)}: a notebook of the study writes it")
    return path


def claimed(kept: Kept) -> pd.DataFrame:
    """PUMA minus each rival in points of R@1, the highest by unified R@1 first.

    Columns: panel (unified or harmonic), rival, points, low, high, and paper, as printed.
    """
    lines = []
    for column in evaluation.OVERALL:
        for key in RIVALS[kept.main_profile]:
            difference = kept.difference("puma", key, kept.main_profile, column)
            lines.append({"panel": column, "rival": kept.row(key).name, **difference._asdict()})
    table = pd.DataFrame(lines)
    unified = table[table["panel"] == evaluation.OVERALL[0]]
    order = unified.sort_values("points", ascending=False)["rival"].tolist()
    place = table["rival"].map(order.index)
    return table.loc[place.sort_values(kind="stable").index].reset_index(drop=True)
