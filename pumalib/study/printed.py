"""What the paper prints: its tables, and its numbers of parameters counted again.
`data/paper/table<n>.csv` transcribes Tables 1 to 12 as printed, "Ours" as "PUMA"; what is unreadable is empty, or
restored: Table 1's counts from the datasets (`source`), the check marks of Table 3 (`marks`) from the parameters."""

import functools

import pandas as pd
import torch
import yaml

from .. import config, evaluation, paths
from ..models import build, count_parameters

PAPER_DATASETS = ("cub", "cars", "sop", "inshop", "nabirds", "dogs", "flowers", "aircraft")
LARGE = ("sop", "inshop")  # "large-scale datasets such as SOP and In-Shop", Sec. 5.1
SETTINGS = ("params_train_m", "params_total_m", "dim")  # the columns of numbers that are no accuracies
_NAMES = yaml.safe_load((paths.PAPER / "names.yaml").read_text(encoding="utf-8"))  # explained there
LOSSES, METHOD_OF_ROW, BACKBONES, FILES = (_NAMES[kind] for kind in ("losses", "methods", "backbones", "files"))
ROUNDING = 0.05  # half a unit of the last printed digit


def table(number: int) -> pd.DataFrame:
    """Table `number` (1 to 12) of the paper, indexed by `row`; accuracies in percent, parameters in millions."""
    return pd.read_csv(paths.PAPER / f"table{number}.csv", index_col="row")


def comparable(printed: pd.DataFrame, datasets) -> pd.DataFrame:
    """`printed` without its single datasets unless all `datasets` are the paper's: names may coincide, images do not."""
    single = [column for column in printed if column.split("_")[0] in PAPER_DATASETS]
    return printed if set(datasets) <= set(PAPER_DATASETS) else printed.drop(columns=single)


def inconsistent(number: int) -> pd.DataFrame:
    """Rows of Table `number` whose printed harmonic mean is not that of the printed columns, to their rounding.
    Columns: `column` (harmonic, or one per metric in Table 12), `printed`, `recomputed`."""
    printed, found = table(number), []
    for column in [name for name in printed if name.startswith("harmonic") and not name.endswith("_change")]:
        values = printed[[name for part in PAPER_DATASETS if (name := part + column.removeprefix("harmonic")) in printed]]
        # The mean grows with each of its parts: the extremes of their rounding bound it.
        low, mean, high = (evaluation.harmonic_mean(values.T + step) + step for step in (-ROUNDING, 0, ROUNDING))
        wrong = ~printed[column].between(low, high) & printed[column].notna()
        found += zip(printed.index[wrong], [column] * wrong.sum(), printed[column][wrong], mean[wrong])
    return pd.DataFrame(found, columns=["row", "column", "printed", "recomputed"]).set_index("row")


def parameters() -> pd.DataFrame:
    """Trainable and total parameters of each row of Tables 2, 3, 4, 6 and 7, counted from `models` (eight for a model
    per dataset), beside the paper's, `paper_*_m` in millions, empty where not printed; `agrees`: to its rounding."""
    rows = []
    for number in (2, 3, 4, 6, 7):
        for row, printed in table(number).astype(object).iterrows():
            method = "puma" if number == 6 else METHOD_OF_ROW.get(printed.get("method", row), "full")
            layers = str(printed.get("adapter_layers", "all")).removeprefix("first ")
            backbone, dim = BACKBONES[printed.get("backbone", "ViT-S/16")], int(printed.get("dim", 128))
            models = len(PAPER_DATASETS) if printed.get("group") == "specific" else 1
            ours = [models * count for count in _count(method, backbone, dim, layers)]
            paper = [printed.get(name) for name in SETTINGS[:2]]
            digits = [10 ** -len(str(number).partition(".")[2]) for number in paper]  # of the print
            agrees = all(p is None or abs(n / 1e6 - p) <= d / 2 for n, p, d in zip(ours, paper, digits, strict=True))
            rows.append((number, row, method, backbone, dim, layers, models, *ours, *paper, agrees))
    columns = ["table", "row", "method", "backbone", "dim", "adapter_layers", "models"]
    columns += ["trainable", "total", "paper_trainable_m", "paper_total_m", "agrees"]
    return pd.DataFrame(rows, columns=columns)


@functools.cache
def _count(method: str, backbone: str, dim: int, layers: str) -> tuple[int, int]:
    chosen = config.method(method, **({} if layers == "all" else {"adapter_layers": int(layers)}))
    with torch.device("meta"):  # shapes without memory: ViT-L too is counted in a second
        return count_parameters(build(chosen, backbone, dim, pretrained=False))


def all_tables() -> dict[int | str, pd.DataFrame]:
    """The paper's tables with accuracies, and Tables 8 and 5 as one."""
    tables = {number: table(number) for number in range(2, 13)}
    return tables | {"8 and 5": pd.concat([tables[8], tables[5].drop(index=tables[8].index, errors="ignore")])}
