"""The tables that the paper prints, and its parameter counts, counted again.

`data/paper/table<n>.csv` transcribes Tables 1 to 12 as printed, "Ours" as "PUMA".  Unreadable cells
are empty, or restored: Table 1's counts from the datasets (`source`), the check marks of Table 3
(`marks`) from the parameters.  `names.yaml` maps printed names to ours.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import torch
import yaml

from pumalib import config, evaluation, paths
from pumalib.models import backbones, build, count_parameters

PAPER_DATASETS = ("cub", "cars", "sop", "inshop", "nabirds", "dogs", "flowers", "aircraft")
LARGE = ("sop", "inshop")  # "large-scale datasets such as SOP and In-Shop", Sec. 5.1
SETTINGS = ("params_train_m", "params_total_m", "dim")  # columns of numbers that are no accuracies
ROUNDING = 0.05  # half a unit of the last printed digit
# Metrics but R@1, by the end of the names of their columns in Table 12.
METRICS = {"_map": "MAP@R", "_rp": "RP"}
WITH_ACCURACIES = range(2, 13)  # Tables 2 to 12
WITH_PARAMETERS = (2, 3, 4, 6, 7)


def _read_names() -> dict[str, dict[Any, str]]:
    """Our names for printed losses, methods, backbones and more; empty outside a checkout."""
    if not paths.IN_CHECKOUT:
        return defaultdict(dict)
    return yaml.safe_load((paths.PAPER / "names.yaml").read_text(encoding="utf-8"))


_NAMES = _read_names()
LOSSES: dict[str, str] = _NAMES["losses"]
METHOD_OF_ROW: dict[str, str] = _NAMES["methods"]
BACKBONES: dict[str, str] = _NAMES["backbones"]
FILES: dict[int | str, str] = _NAMES["files"]
SUBSETS: dict[str, str] = _NAMES["subsets"]


def table(number: int) -> pd.DataFrame:
    """Table `number` (1 to 12) of the paper, indexed by `row`.

    Accuracies are in percent, parameters in millions.
    """
    return pd.read_csv(paths.PAPER / f"table{number}.csv", index_col="row")


def value(number: int, row: str, column: str) -> float:
    """A number of Table `number`; NaN where it prints no such row or column."""
    printed = table(number)
    if row not in printed.index or column not in printed:
        return float("nan")
    return float(printed.at[row, column])


def all_tables() -> dict[int | str, pd.DataFrame]:
    """The paper's tables with accuracies by number, and Tables 8 and 5 joined."""
    tables: dict[int | str, pd.DataFrame] = {number: table(number) for number in WITH_ACCURACIES}
    without_repeated = tables[5].drop(index=tables[8].index, errors="ignore")
    tables["8 and 5"] = pd.concat([tables[8], without_repeated])
    return tables


def comparable(printed: pd.DataFrame, datasets: Iterable[str]) -> pd.DataFrame:
    """`printed` without columns of single datasets, unless all `datasets` are the paper's.

    Another dataset may have the name of the paper's and other images.
    """
    if set(datasets) <= set(PAPER_DATASETS):
        return printed
    single = [column for column in printed if column.split("_")[0] in PAPER_DATASETS]
    return printed.drop(columns=single)


def inconsistent(number: int) -> pd.DataFrame:
    """Rows of Table `number` whose printed harmonic mean contradicts the printed accuracies.

    Columns: `column` (harmonic, or one per metric in Table 12), `printed`, `recomputed`.  A mean is
    right if accuracies that round to the printed ones can give it.
    """
    printed = table(number)
    found = []
    for column in printed:
        if not column.startswith("harmonic") or column.endswith("_change"):
            continue
        metric = column.removeprefix("harmonic")
        datasets = [name + metric for name in PAPER_DATASETS if name + metric in printed]
        values = printed[datasets].T
        # The mean grows with each of its parts: the extremes of their rounding bound it.
        low = evaluation.harmonic_mean(values - ROUNDING) - ROUNDING
        mean = evaluation.harmonic_mean(values)
        high = evaluation.harmonic_mean(values + ROUNDING) + ROUNDING
        wrong = ~printed[column].between(low, high) & printed[column].notna()
        stated = printed[column][wrong]
        for row, value, recomputed in zip(stated.index, stated, mean[wrong], strict=True):
            found.append((row, column, value, recomputed))
    columns = ["row", "column", "printed", "recomputed"]
    return pd.DataFrame(found, columns=columns).set_index("row")


@dataclass
class CountedRow:
    """A row of the paper whose parameters were counted again."""

    table: int
    row: str
    method: str
    backbone: str
    dim: int
    adapter_layers: str  # "all", or how many from the first
    models: int  # eight for a model per dataset
    trainable: int
    total: int
    paper_trainable_m: Any  # in millions, None where not printed
    paper_total_m: Any
    agrees: bool  # to the rounding of the print


def parameters(tables: Iterable[int] = WITH_PARAMETERS) -> pd.DataFrame:
    """Trainable and total parameters of each row of these tables, counted from `models`.

    A row per row of the print, with the columns of `CountedRow`.
    """
    rows = []
    for number in tables:
        for row, printed in table(number).astype(object).iterrows():
            rows.append(asdict(_counted(number, str(row), printed)))
    return pd.DataFrame(rows)


def _counted(number: int, row: str, printed: pd.Series) -> CountedRow:
    method = METHOD_OF_ROW.get(printed.get("method", row), "full")
    if number == 6:
        method = "puma"
    layers = str(printed.get("adapter_layers", "all")).removeprefix("first ")
    backbone = BACKBONES[printed.get("backbone", "ViT-S/16")]
    dim = int(printed.get("dim", 128))
    models = 1
    if printed.get("group") == "specific":
        models = len(PAPER_DATASETS)

    of_one = count(method, backbone, dim, layers)
    trainable = models * of_one[0]
    total = models * of_one[1]
    in_print = (printed.get("params_train_m"), printed.get("params_total_m"))
    agrees = _agrees(trainable, in_print[0]) and _agrees(total, in_print[1])
    return CountedRow(
        number, row, method, backbone, dim, layers, models, trainable, total, *in_print, agrees
    )


def _agrees(count: int, printed: Any) -> bool:
    """Whether a count rounds to the printed number of millions; True if none is printed."""
    if printed is None:
        return True
    decimals = str(printed).partition(".")[2]
    last_digit = 10 ** -len(decimals)
    return abs(count / 1e6 - printed) <= last_digit / 2


@functools.cache
def count(
    method: str, backbone: str = backbones.PAPER_BACKBONE, dim: int = 128, layers: str = "all"
) -> tuple[int, int]:
    """(trainable, total) parameters of one model; adapters in `layers`, "all" or the first few."""
    chosen = config.method(method)
    if layers != "all":
        chosen = config.method(method, adapter_layers=int(layers))
    # On "meta" shapes take no memory: ViT-L too is counted in a second.
    with torch.device("meta"):
        return count_parameters(build(chosen, backbone, dim, pretrained=False))
