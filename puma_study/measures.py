"""What notebooks measured beside accuracies, compared as claims compare rows.

A table of measures has a value for each row and column in each of several repetitions: the turns of
a timing, the seeds of a training.  Two rows are compared repetition by repetition; a row that is
called by a number is that number.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from pumalib import evaluation

from .contrasts import NotTestable


def read(name: str, file: Path) -> pd.DataFrame:
    """The measures of a file that is called `name`, one of `TABLES`.

    Columns: row, column, repetition and value.
    """
    return TABLES[name](pd.read_csv(file))


def rows(table: pd.DataFrame) -> list[str]:
    """The rows of a table that `read` returns."""
    return list(table["row"].unique())


def bounds(names: Iterable[str]) -> list[str]:
    """The names of rows that are numbers."""
    return [name for name in names if _is_number(name)]


def _is_number(name: str) -> bool:
    try:
        return math.isfinite(float(name))
    except ValueError:
        return False


def difference(table: pd.DataFrame, row: str, other: str) -> pd.DataFrame:
    """One row minus another, in the columns of `evaluation.contrast`, a line per column of both.

    By Student's t over the repetitions that both have.  A column with one of them has no p-values.
    Raises NotTestable where no column is common.
    """
    lines = {}
    for column, part in table.groupby("column", sort=False):
        values = part.pivot(index="repetition", columns="row", values="value")
        ours = _values(values, row)
        theirs = _values(values, other)
        if ours is None or theirs is None:
            continue
        gains = (ours - theirs).dropna()
        if len(gains):
            lines[column] = asdict(_repeated(gains.to_numpy()))
    if not lines:
        raise NotTestable(f"{row} and {other} were not measured in the same columns")
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("dataset")


def _values(values: pd.DataFrame, name: str) -> pd.Series | None:
    """A row's values by repetition; None where it has none."""
    if name in values:
        return values[name]
    if _is_number(name):
        return pd.Series(float(name), values.index)
    return None


def _repeated(gains: np.ndarray) -> evaluation.Contrast:
    """The mean of repeated differences; of a single one the value alone, the rest is NaN."""
    count = len(gains)
    error = np.nan
    if count > 1:
        error = float(gains.std(ddof=1)) / count**0.5
    return evaluation.student(float(gains.mean()), error, dof=count - 1.0)


# ---- the tables


def of_cost(table: pd.DataFrame) -> pd.DataFrame:
    """The times of 33_survey_losses_cost, a repetition being a turn.

    By what was `varied`: "exponent, <varied>", by least squares in log-log over the upper half of
    the sizes of a turn; and "log ms, <varied>", the natural logarithm of the milliseconds at the
    largest size that all losses have.
    """
    lines = []
    for varied, part in table.groupby("varied", sort=False):
        common = part.groupby("loss")["x"].max().min()
        for (loss, turn), times in part.groupby(["loss", "turn"], sort=False):
            by_size = times.set_index("x")["milliseconds"]
            lines.append((loss, f"exponent, {varied}", turn, exponent(by_size)))
            lines.append((loss, f"log ms, {varied}", turn, np.log(by_size[common])))
    return pd.DataFrame(lines, columns=COLUMNS)


def exponent(times: pd.Series) -> float:
    """Of the size, the index, in the time: the slope in log-log over the upper half of sizes."""
    upper = times.sort_index().tail(-(-len(times) // 2))
    return float(np.polyfit(np.log(upper.index.to_numpy()), np.log(upper.to_numpy()), 1)[0])


def of_gradients(table: pd.DataFrame) -> pd.DataFrame:
    """The shares of 31_survey_losses_gradients, a repetition being a seed.

    Rows are "<loss>, start" and "<loss>, end", the first and the last step.
    """
    ends = {"start": table["step"].min(), "end": table["step"].max()}
    parts = []
    for name, step in ends.items():
        at = table[table["step"] == step].drop(columns="step")
        long = at.melt(["loss", "seed"], var_name="column")
        parts.append(long.assign(row=long["loss"] + f", {name}", repetition=long["seed"]))
    return pd.concat(parts, ignore_index=True)[COLUMNS]


def of_constraint(table: pd.DataFrame) -> pd.DataFrame:
    """The violated triplets of 32_survey_losses_collapse, a repetition being a seed.

    Rows are "wide classes" and "narrow classes", as `is_wide` tells them apart; "violated" is the
    mean of their classes' shares.
    """
    widths = table.groupby("class")["width"].first()
    wide = table["class"].map(is_wide(widths))
    row = wide.map({True: "wide classes", False: "narrow classes"})
    shares = table.assign(row=row).groupby(["row", "seed"], sort=False)["violated"].mean()
    lines = shares.rename("value").rename_axis(["row", "repetition"]).reset_index()
    return lines.assign(column="violated")[COLUMNS]


def is_wide(widths: pd.Series) -> pd.Series:
    """Of each class whether its variance exceeds the squared distance to the nearest other class.

    `widths` has the ratio of the two.  Where less than a tenth of the classes are on one side of 1,
    those above the median are wide.
    """
    exceeds = widths > 1
    share = exceeds.mean()
    if min(share, 1 - share) >= FEWEST:
        return exceeds
    return widths > widths.median()


def of_collapse(table: pd.DataFrame) -> pd.DataFrame:
    """The last cosines of 32_survey_losses_collapse, a repetition being a seed.

    A row that ends below the frozen backbone is called "below frozen, <row>", so that a claim can
    be about all of them; seeds that logged no cosine have no value.
    """
    row = table["row"].mask(table["below"], "below frozen, " + table["row"])
    lines = table.assign(row=row, column="cosine")
    return lines.rename(columns={"seed": "repetition", "cosine": "value"})[COLUMNS]


def of_guidance(table: pd.DataFrame) -> pd.DataFrame:
    """The times of 22_language_guidance, a repetition being a turn.

    "log ms" is the natural logarithm of the milliseconds of a step of the loss, `alone` and
    `guided`, and of the `network`.  The row "guidance" is what it adds, as a "share of a training
    step": that of the network and of the loss alone.
    """
    times = table.pivot(index="turn", columns="step", values="milliseconds")
    added = times["guided"] - times["alone"]
    shares = added / (times["network"] + times["alone"])
    steps = np.log(times).reset_index().melt("turn", var_name="row").assign(column="log ms")
    share = shares.rename("value").reset_index()
    share = share.assign(row="guidance", column="share of a training step")
    lines = pd.concat([steps, share], ignore_index=True)
    return lines.rename(columns={"turn": "repetition"})[COLUMNS]


def of_images(table: pd.DataFrame) -> pd.DataFrame:
    """The natural logarithm of the images of 27_cost_on_faces, a repetition being a seed.

    Rows are losses.  A seed that never reached the target counts as all images that it saw, less
    than it needs: so a difference of two losses is stated too small, never too large.
    """
    lines = table.rename(columns={"loss": "row", "seed": "repetition"})
    return lines.assign(column="log images", value=np.log(table["images"]))[COLUMNS]


# The share of classes on the smaller side of 1 from which the two sides are compared.
FEWEST = 0.1
COLUMNS = ["row", "column", "repetition", "value"]
# By the name of the file.
TABLES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "survey_losses_cost": of_cost,
    "survey_losses_gradients": of_gradients,
    "survey_losses_constraint": of_constraint,
    "survey_losses_collapse": of_collapse,
    "language_guidance_cost": of_guidance,
    "cost_on_faces_images": of_images,
}
