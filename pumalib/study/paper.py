"""What the paper prints: its tables, its claims judged against any table, its numbers of parameters counted again.

`data/paper/table<n>.csv` transcribes Tables 1 to 12 (percentages as printed; empty where the print is unreadable;
the authors' "Ours" is "PUMA").  In our copy Table 1 is damaged: its counts are restored from the datasets' own
files (`source`: counted there, or quoted) and what is readable stands in `printed_*`.  Table 3's check marks are
damaged too: rows with `marks` "restored" are told by their numbers of parameters.
"""

import fnmatch
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd
import torch
import yaml

from .. import config, paths
from ..models import build, count_parameters

DATASETS = ("cub", "cars", "sop", "inshop", "nabirds", "dogs", "flowers", "aircraft")
LARGE = ("sop", "inshop")  # "large-scale datasets such as SOP and In-Shop", Sec. 5.1
OVERALL = ("unified", "harmonic")
SETTINGS = ("params_train_m", "params_total_m", "dim")  # the columns of numbers that are no accuracies
SCALES = ("ViT-S/16 128", "ViT-S/16 512", "ViT-B/16 128")  # Table 4
EFFICIENT = ["Linear Emb.", "MLP-3 Emb.", "VPT", "LoRA", "AdaptFormer"]
LOSSES = {  # the paper's name of a loss: ours
    **{name: name.lower() for name in ("Triplet", "Margin", "MS", "SupCon", "SoftTriple", "CosFace", "ArcFace", "Hyp")},
    "PA": "proxyanchor",
    "ProxyNCA++": "proxynca++",
    "CurricularFace": "curricularface",
}
ROUNDING = 0.05  # half a unit of the last printed digit
CLAIMS = yaml.safe_load((paths.PAPER / "claims.yaml").read_text(encoding="utf-8"))

Tables = Mapping[int | str, pd.DataFrame]
Judged = tuple[bool, dict]


def table(number: int) -> pd.DataFrame:
    """Table `number` (1 to 12) of the paper, indexed by `row`; accuracies in percent, parameters in millions."""
    path = paths.PAPER / f"table{number}.csv"
    if not path.is_file():
        raise ValueError(f"the paper has no table {number!r}: {path} does not exist; known: 1 to 12")
    return pd.read_csv(path, index_col="row")


def comparable(printed: pd.DataFrame, datasets) -> pd.DataFrame:
    """`printed` without its single datasets unless all `datasets` are the paper's: names may coincide, images do not."""
    if set(datasets) <= set(DATASETS):
        return printed
    return printed[[column for column in printed if column.split("_")[0] not in DATASETS]]


def inconsistent(number: int) -> pd.DataFrame:
    """Rows of Table `number` whose printed harmonic mean is not that of the printed columns, to their rounding.

    Columns: `column` (harmonic, or one per metric in Table 12), `printed`, `recomputed`.
    """
    printed = table(number)
    found = []
    for column in [name for name in printed if name.startswith("harmonic") and not name.endswith("_change")]:
        parts = [dataset + column.removeprefix("harmonic") for dataset in DATASETS]
        values = printed[[name for name in parts if name in printed]]
        # The mean grows with each of its parts: the extremes of their rounding bound it.
        low, high = (_harmonic(values + step) + step for step in (-ROUNDING, ROUNDING))
        for row in printed.index[~printed[column].between(low, high) & printed[column].notna()]:
            found.append((row, column, printed.at[row, column], _harmonic(values)[row]))
    return pd.DataFrame(found, columns=["row", "column", "printed", "recomputed"]).set_index("row")


def _harmonic(values: pd.DataFrame) -> pd.Series:
    return values.notna().sum(axis=1) / (1 / values).sum(axis=1)


class Missing(LookupError):
    """A table, row or column that a claim needs and the results lack."""


def claims(tables: Tables, large: tuple[str, ...] = LARGE) -> pd.DataFrame:
    """Judge every claim of `data/paper/claims.yaml` against `tables`.

    Args:
        tables: by the paper's number (2, 3, ...), or "fig6", "fig7" for what it only draws; each in the form of
            `table(number)`: its row names, accuracies in percent (`100 * results.wide()`).  The rows of fig6 are
            "PUMA 4", "linear 4", "full 4" for 4 shots, those of fig7 "p = 0.5".  A claim about every row of a kind
            is judged by those that are there, and `numbers` says how many (`rivals`).
            `{n: table(n) for n in range(1, 13)}` judges the paper by its own numbers.
        large: the datasets that count as large; all others are small.

    Returns:
        A row per claim, by name: `section`, `claim`, `holds` (True, False, or None where the tables lack what it is
        about) and `numbers`, a dict with the numbers that decided it, or with what is `missing`.
    """
    found = []
    for claim in CLAIMS:
        try:
            if "judge" in claim:
                holds, numbers = JUDGES[claim["judge"]](tables, large)
            else:
                judged = [_above(tables, large, **comparison) for comparison in claim["above"]]
                holds = all(one for one, _ in judged)
                numbers = {key: number for _, part in judged for key, number in part.items()}
            holds = bool(holds)
        except Missing as missing:
            holds, numbers = None, {"missing": str(missing)}
        found.append((claim["name"], claim["section"], claim["text"], holds, numbers))
    result = pd.DataFrame(found, columns=["name", "section", "claim", "holds", "numbers"], dtype=object)
    return result.set_index("name")


def _rows(tables: Tables, numbers, names: list[str]) -> pd.DataFrame:
    """The rows `names` (patterns with * allowed) of a table, or of several on top of each other."""
    numbers = numbers if isinstance(numbers, list) else [numbers]
    absent = [number for number in numbers if number not in tables]
    if absent:
        raise Missing(f"table {absent[0]}")
    data = pd.concat([tables[number] for number in numbers])
    data = data[~data.index.duplicated()]
    matches = {name: fnmatch.filter(data.index, name) for name in names}
    for name, rows in matches.items():
        if not rows:
            raise Missing(f"table {numbers[0]}, row {name!r}")
    return data.loc[list(dict.fromkeys(row for rows in matches.values() for row in rows))]


def _accuracy(rows: pd.DataFrame, columns, large: tuple[str, ...]) -> pd.DataFrame:
    """These columns of `rows`; "each" is every dataset, "small" and "large" are means of datasets."""
    datasets = [name for name in rows.select_dtypes("number") if name not in (*OVERALL, *SETTINGS)]
    groups = {"small": [n for n in datasets if n not in large], "large": [n for n in datasets if n in large]}
    if {"small", "large"} & set(columns) and not all(groups.values()):
        raise Missing(f"a small and a large dataset among {', '.join(datasets)}")
    found = {}
    for name in datasets if columns == "each" else columns:
        if name not in groups and (name not in rows or rows[name].isna().all()):
            raise Missing(f"column {name!r}")
        found[name] = rows[groups.get(name, [name])].astype(float).mean(axis=1, skipna=False)
    return pd.DataFrame(found)


def _above(tables: Tables, large, table, winners, rivals, columns=OVERALL, by=0.0, share=1.0) -> Judged:
    """Each of `winners` is above each of `rivals`, by `by` points to rounding, on a `share` of the columns."""
    ours = _accuracy(_rows(tables, table, winners), columns, large)
    theirs = _accuracy(_rows(tables, table, rivals).drop(index=winners, errors="ignore"), columns, large)
    if ours.isna().any(axis=None):
        raise Missing(f"table {table}, a number of {', '.join(winners)}")
    gains = ours.min() - theirs.max()
    numbers = {f"{c}: {ours[c].idxmin()} over {theirs[c].idxmax()}": round(float(gain), 2) for c, gain in gains.items()}
    return ((gains > 0) & (gains > by - ROUNDING)).mean() >= share, numbers | {"rivals": len(theirs)}


def _images(tables: Tables, large: tuple[str, ...]) -> Judged:
    counts = _rows(tables, 1, list(DATASETS))[["train_samples", "test_samples"]].sum().to_dict()
    return counts == {"train_samples": 141_404, "test_samples": 148_595}, counts


def _frugal(tables: Tables, large: tuple[str, ...]) -> Judged:
    rows = _accuracy(_rows(tables, 2, ["PUMA", "specific CurricularFace"]), SETTINGS[:2], large)
    train, total = (100 * rows.loc["PUMA"] / rows.loc["specific CurricularFace"]).tolist()
    numbers = {"trainable %": round(train, 2), "times fewer": round(100 / train, 1), "total %": round(total, 2)}
    return train < 1.5 + ROUNDING and total < 13.9 + ROUNDING, numbers


def _small_suffer(tables: Tables, large: tuple[str, ...]) -> Judged:
    after = _accuracy(_rows(tables, 2, ["universal *"]), ["small", "large"], large)
    before = _accuracy(_rows(tables, 2, ["specific *"]), ["small", "large"], large)
    before.index = before.index.str.replace("specific", "universal")
    change = (after - before).dropna()
    if change.empty:
        raise Missing("table 2, a loss both specific and universal")
    mean = change.mean().round(2)
    return mean["small"] < min(0, mean["large"]), mean.to_dict() | {"losses": len(change)}


def _lean_to_large(tables: Tables, large: tuple[str, ...]) -> Judged:
    rows = _accuracy(_rows(tables, 2, ["LoRA", "AdaptFormer", "PUMA"]), ["small", "large"], large)
    behind = (rows.loc[["LoRA", "AdaptFormer"]] - rows.loc["PUMA"]).round(2)
    return (behind["small"] < behind["large"]).all(), behind.T.to_dict()


def _only_efficient(tables: Tables, large: tuple[str, ...]) -> Judged:
    full = _accuracy(_rows(tables, 2, ["specific *", "universal *"]), ["harmonic"], large)["harmonic"]
    scores = _accuracy(_rows(tables, 2, [*EFFICIENT, "PUMA"]), ["harmonic"], large)["harmonic"]
    beaten = {name: int((full < score).sum()) for name, score in scores.items()}
    return [name for name in beaten if beaten[name] > len(full) / 2] == ["PUMA"], {"fully tuned": len(full), **beaten}


JUDGES: dict[str, Callable[[Tables, tuple[str, ...]], Judged]] = {
    judge.__name__[1:]: judge for judge in (_images, _frugal, _small_suffer, _lean_to_large, _only_efficient)
}

BACKBONES = {
    f"ViT-{size}/16": f"vit_{name}_patch16_224.augreg_in21k"
    for size, name in {"Ti": "tiny", "S": "small", "B": "base", "L": "large"}.items()
}
METHODS = {  # the paper's row names -> ours; a loss's name in Tables 2 and 4 means full fine-tuning
    **{name: name.lower() for name in ("VPT", "LoRA", "AdaptFormer", "PUMA")},
    "Linear Emb.": "linear",
    "MLP-3 Emb.": "mlp3",
    "PUMA + LoRA": "puma+lora",
    "single": "vpt",
    "conditional": "prompt-pool",
    "static": "adapter",
    "stochastic": "adapter-stochastic",
    "single + static": "vpt+adapter",
    "conditional + stochastic": "puma",
    "Stochastic LoRA": "lora-stochastic",
    "PUMA + Stochastic LoRA": "puma+lora-stochastic",
}


def parameters() -> pd.DataFrame:
    """Trainable and total parameters of each row of Tables 2, 3, 4, 6 and 7, counted from models, beside the paper's.

    Returns:
        Columns: `table`, `row` (as in `table`), `method`, `backbone`, `dim`, `adapter_layers`, `models` (eight for
        a specific model per dataset), `trainable`, `total` (numbers of parameters of all `models`),
        `paper_trainable_m`, `paper_total_m` (millions; empty where not printed), `agrees` (to the paper's rounding).
    """
    rows = []
    for number in (2, 3, 4, 6, 7):
        for row, printed in table(number).astype(object).iterrows():
            # Table 6 names a row by its backbone, the others by the method.
            method = "puma" if number == 6 else METHODS.get(printed.get("method", row), "full")
            layers = str(printed.get("adapter_layers", "all")).removeprefix("first ")
            backbone, dim = BACKBONES[printed.get("backbone", "ViT-S/16")], int(printed.get("dim", 128))
            models = len(DATASETS) if printed.get("group") == "specific" else 1
            ours = [models * count for count in _count(method, backbone, dim, layers)]
            paper = [printed.get(name) for name in SETTINGS[:2]]
            agrees = all(p is None or _rounds_to(n, p) for n, p in zip(ours, paper, strict=True))
            rows.append((number, row, method, backbone, dim, layers, models, *ours, *paper, agrees))
    columns = (
        "table row method backbone dim adapter_layers models trainable total paper_trainable_m paper_total_m agrees"
    )
    return pd.DataFrame(rows, columns=columns.split())


def write_parameters() -> Path:
    """Write `parameters()` to `results/parameters.csv`."""
    file = paths.RESULTS / "parameters.csv"
    with paths.written_whole(file) as temporary:
        parameters().to_csv(temporary, index=False)
    return file


@functools.cache
def _count(method: str, backbone: str, dim: int, layers: str) -> tuple[int, int]:
    chosen = config.method(method, **({} if layers == "all" else {"adapter_layers": int(layers)}))
    with torch.device("meta"):  # shapes without memory: ViT-L too is counted in a second
        return count_parameters(build(chosen, backbone, dim, pretrained=False))


def _rounds_to(count: int, printed: float) -> bool:
    digits = len(str(printed).partition(".")[2])
    return abs(count / 1e6 - printed) <= 0.5 * 10**-digits
