"""What the paper prints: its tables, and its claims judged against any table, its own included.

`data/paper/table<n>.csv` transcribes Tables 1 to 12 (percentages as printed; empty where the print is unreadable;
the authors' "Ours" is "PUMA").  In our copy Table 1 is damaged: its counts are restored from the datasets' own
files (`source`: counted there, or quoted) and what is readable stands in `printed_*`.  Table 3's check marks are
damaged too: rows with `marks` "restored" are told by their numbers of parameters.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd

from . import paths

DATASETS = ("cub", "cars", "sop", "inshop", "nabirds", "dogs", "flowers", "aircraft")
LARGE = ("sop", "inshop")  # "large-scale datasets such as SOP and In-Shop", Sec. 5.1
OVERALL = ("unified", "harmonic")
LOSSES = {  # the paper's name of a loss: ours
    "Triplet": "triplet", "Margin": "margin", "MS": "ms", "SupCon": "supcon", "PA": "proxyanchor",
    "ProxyNCA++": "proxynca++", "SoftTriple": "softtriple", "CosFace": "cosface", "ArcFace": "arcface",
    "CurricularFace": "curricularface", "Hyp": "hyp",
}  # fmt: skip
SETTINGS = ("params_train_m", "params_total_m", "dim")  # the columns of numbers that are no accuracies
ROUNDING = 0.05  # half a unit of the last printed digit

Tables = Mapping[int | str, pd.DataFrame]
Judge = Callable[[Tables, tuple[str, ...]], tuple[bool, dict]]


def table(number: int) -> pd.DataFrame:
    """Table `number` (1 to 12) of the paper, indexed by `row`; accuracies in percent, parameters in millions."""
    path = paths.PAPER / f"table{number}.csv"
    if not path.is_file():
        raise ValueError(f"the paper has no table {number!r}: {path} does not exist; known: 1 to 12")
    return pd.read_csv(path, index_col="row")


def comparable(printed: pd.DataFrame, datasets) -> pd.DataFrame:
    """`printed` without its columns of single datasets, unless all `datasets` are the paper's: a name may coincide, images do not."""
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


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that a table can confirm or refute.

    Attributes:
        name: short and unique.
        section: where the paper says it.
        text: the claim in our words; "above" is meant strictly.
        judge: from (tables, large datasets) to (holds, the numbers that decide it).
    """

    name: str
    section: str
    text: str
    judge: Judge


class Missing(LookupError):
    """A table, row or column that a claim needs and the results lack."""


def claims(tables: Tables, large: tuple[str, ...] = LARGE) -> pd.DataFrame:
    """Judge every claim of the paper against `tables`.

    Args:
        tables: by the paper's number (2, 3, ...), or "fig6", "fig7" for what it only draws; each in the form of
            `table(number)`: its row names, accuracies in percent (`100 * results.wide()`).  The rows of fig6 are
            "PUMA 4", "linear 4", "full 4" for 4 shots, those of fig7 "p = 0.5".  A claim about every row of a kind
            is judged by those that are there, and `numbers` says how many (`rivals`).
            `{n: table(n) for n in range(1, 13)}` judges the paper by its own numbers.
        large: the datasets that count as large; all others are small.

    Returns:
        A row per claim: `section`, `claim`, `holds` (True, False, or None where the tables lack what it is about)
        and `numbers`, a dict with the numbers that decided it, or with what is `missing`.
    """
    found = []
    for claim in CLAIMS:
        try:
            holds, numbers = claim.judge(tables, large)
        except Missing as missing:
            holds, numbers = None, {"missing": str(missing)}
        found.append((claim.name, claim.section, claim.text, None if holds is None else bool(holds), numbers))
    result = pd.DataFrame(found, columns=["name", "section", "claim", "holds", "numbers"], dtype=object)
    return result.set_index("name")


def _rows(tables: Tables, numbers, names: list[str]) -> pd.DataFrame:
    """The rows `names` (patterns with * allowed) of a table, or of several on top of each other."""
    numbers = numbers if isinstance(numbers, tuple) else (numbers,)
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
    groups = {"small": [name for name in datasets if name not in large], "large": [n for n in datasets if n in large]}
    if {"small", "large"} & set(columns) and not all(groups.values()):
        raise Missing(f"a small and a large dataset among {', '.join(datasets)}")
    found = {}
    for name in datasets if columns == "each" else columns:
        if name not in groups and (name not in rows or rows[name].isna().all()):
            raise Missing(f"column {name!r}")
        found[name] = rows[groups.get(name, [name])].astype(float).mean(axis=1, skipna=False)
    return pd.DataFrame(found)


def _above(number, winners: list[str], rivals: list[str], columns=OVERALL, by=0.0, share=1.0) -> Judge:
    """Each of `winners` is above each of `rivals`, by `by` points to rounding, on a `share` of the columns."""

    def judge(tables: Tables, large: tuple[str, ...]) -> tuple[bool, dict]:
        ours = _accuracy(_rows(tables, number, winners), columns, large)
        theirs = _accuracy(_rows(tables, number, rivals).drop(index=winners, errors="ignore"), columns, large)
        if ours.isna().any(axis=None):
            raise Missing(f"table {number}, a number of {', '.join(winners)}")
        gains = ours.min() - theirs.max()
        numbers = {
            f"{name}: {ours[name].idxmin()} over {theirs[name].idxmax()}": round(float(gain), 2)
            for name, gain in gains.items()
        }
        return ((gains > 0) & (gains > by - ROUNDING)).mean() >= share, numbers | {"rivals": len(theirs)}

    return judge


def _all(*judges: Judge) -> Judge:
    def judge(tables: Tables, large: tuple[str, ...]) -> tuple[bool, dict]:
        results = [one(tables, large) for one in judges]
        return all(holds for holds, _ in results), {key: n for _, numbers in results for key, n in numbers.items()}

    return judge


def _images(tables: Tables, large: tuple[str, ...]) -> tuple[bool, dict]:
    counts = _rows(tables, 1, list(DATASETS))[["train_samples", "test_samples"]].sum().to_dict()
    return counts == {"train_samples": 141_404, "test_samples": 148_595}, counts


def _frugal(tables: Tables, large: tuple[str, ...]) -> tuple[bool, dict]:
    rows = _accuracy(_rows(tables, 2, ["PUMA", "specific CurricularFace"]), ["params_train_m", "params_total_m"], large)
    train, total = (100 * rows.loc["PUMA"] / rows.loc["specific CurricularFace"]).tolist()
    numbers = {"trainable %": round(train, 2), "times fewer": round(100 / train, 1), "total %": round(total, 2)}
    return train < 1.5 + ROUNDING and total < 13.9 + ROUNDING, numbers


def _small_suffer(tables: Tables, large: tuple[str, ...]) -> tuple[bool, dict]:
    after = _accuracy(_rows(tables, 2, ["universal *"]), ["small", "large"], large)
    before = _accuracy(_rows(tables, 2, ["specific *"]), ["small", "large"], large)
    before.index = before.index.str.replace("specific", "universal")
    change = (after - before).dropna()
    if change.empty:
        raise Missing("table 2, a loss both specific and universal")
    mean = change.mean().round(2)
    return mean["small"] < min(0, mean["large"]), mean.to_dict() | {"losses": len(change)}


def _lean_to_large(tables: Tables, large: tuple[str, ...]) -> tuple[bool, dict]:
    rows = _accuracy(_rows(tables, 2, ["LoRA", "AdaptFormer", "PUMA"]), ["small", "large"], large)
    behind = (rows.loc[["LoRA", "AdaptFormer"]] - rows.loc["PUMA"]).round(2)
    return (behind["small"] < behind["large"]).all(), behind.T.to_dict()


def _only_efficient(tables: Tables, large: tuple[str, ...]) -> tuple[bool, dict]:
    full = _accuracy(_rows(tables, 2, ["specific *", "universal *"]), ["harmonic"], large)["harmonic"]
    scores = _accuracy(_rows(tables, 2, [*EFFICIENT, "PUMA"]), ["harmonic"], large)["harmonic"]
    beaten = {name: int((full < score).sum()) for name, score in scores.items()}
    return [name for name in beaten if beaten[name] > len(full) / 2] == ["PUMA"], {"fully tuned": len(full), **beaten}


EFFICIENT = ["Linear Emb.", "MLP-3 Emb.", "VPT", "LoRA", "AdaptFormer"]
PAIRS = ["Triplet", "Margin", "MS"]
PROXIES = ["PA", "SoftTriple", "CosFace", "ArcFace", "CurricularFace"]  # ProxyNCA++ apart, Sec. C.1
SHOTS = (1, 2, 4, 8, 16)
SCALES = ("ViT-S/16 128", "ViT-S/16 512", "ViT-B/16 128")
HARMONIC = ("harmonic",)

# fmt: off
CLAIMS = tuple(Claim(*fields) for fields in (
    ("images", "5.1", "The eight datasets have 141,404 training and 148,595 test images", _images),
    ("frugal", "1", "PUMA has 1.5 % of the trainable and 13.9 % of all parameters of eight specific models", _frugal),
    ("beats-specific", "5.2", "PUMA is above every specific model, unified and harmonic",
     _above(2, ["PUMA"], ["specific *"])),
    ("beats-specific-each", "5.2", "PUMA is above every specific model on each dataset but In-Shop and Dogs",
     _above(2, ["PUMA"], ["specific *"], ("cub", "cars", "sop", "nabirds", "flowers", "aircraft"))),
    ("beats-universal", "5.2", "PUMA is above every fully tuned universal model, unified and harmonic",
     _above(2, ["PUMA"], ["universal *"])),
    ("margin-over-universal", "5.2", "... by 3.4 points unified and 4.6 harmonic",
     _all(_above(2, ["PUMA"], ["universal *"], ("unified",), by=3.4),
          _above(2, ["PUMA"], ["universal *"], HARMONIC, by=4.6))),
    ("small-suffer", "5.2", "Full universal tuning costs small datasets accuracy, more than large ones", _small_suffer),
    ("beats-efficient", "5.2", "PUMA is above every other parameter-efficient method, unified and harmonic",
     _above(2, ["PUMA"], EFFICIENT)),
    ("only-efficient", "5.2", "Only PUMA, of the parameter-efficient, beats most fully tuned models", _only_efficient),
    ("few-parameters", "5.2", "Linear and VPT fall short of full tuning on Cars, SOP, In-Shop and Aircraft",
     _above(2, ["universal CurricularFace"], ["Linear Emb.", "VPT"], ("cars", "sop", "inshop", "aircraft"))),
    ("lean-to-large", "5.2", "LoRA and AdaptFormer trail PUMA on small datasets more than on large", _lean_to_large),
    ("arcface", "5.2", "A large margin, ArcFace's, costs much in universal training (here: 10 points)",
     _above(2, ["specific ArcFace"], ["universal ArcFace"], HARMONIC, by=10)),
    ("pair-losses", "5.2", "With full tuning, pair-based losses are below SoftTriple and CurricularFace",
     _above(2, ["universal SoftTriple", "universal CurricularFace"], [f"universal {name}" for name in PAIRS])),
    ("few-shot-linear", "5.2", "PUMA is above linear probing at every number of shots",
     _all(*(_above("fig6", [f"PUMA {shots}"], [f"linear {shots}"], HARMONIC) for shots in SHOTS))),
    ("few-shot-full", "5.2", "PUMA is above full fine-tuning at every number of shots",
     _all(*(_above("fig6", [f"PUMA {shots}"], [f"full {shots}"], HARMONIC) for shots in SHOTS))),
    ("conditional-prompt", "5.3", "The conditional prompt is above the single one on most datasets",
     _above(3, ["conditional"], ["single"], "each", share=0.51)),
    ("stochastic-adapter", "5.3", "The stochastic adapter is above the static one on every dataset",
     _above(3, ["stochastic"], ["static"], "each")),
    ("adapter-over-prompt", "5.3", "Adapters do more than prompts",
     _above(3, ["static", "stochastic"], ["single", "conditional"])),
    ("both-parts", "5.3", "Prompt pool and stochastic adapter together are above either alone",
     _above(3, ["conditional + stochastic"], ["conditional", "stochastic"])),
    ("every-scale", "5.3", "PUMA is above CurricularFace at every backbone and embedding dimension",
     _all(*(_above(4, [f"PUMA {scale}"], [f"CurricularFace {scale}"]) for scale in SCALES))),
    ("small-model", "5.3", "PUMA on ViT-S with 128 dimensions is above CurricularFace with 512 or with ViT-B",
     _above(4, [f"PUMA {SCALES[0]}"], [f"CurricularFace {scale}" for scale in SCALES[1:]])),
    ("curricularface-best", "B.1", "CurricularFace is PUMA's best loss", _above(5, ["CurricularFace"], ["*"])),
    ("pair-losses-puma", "B.1", "With PUMA too, pair-based losses are below proxy-based ones",
     _above(5, PROXIES, [*PAIRS, "SupCon"])),
    ("proxynca", "C.1", "ProxyNCA++ is below Triplet, Margin and MS", _above(5, PAIRS, ["ProxyNCA++"])),
    ("half", "B.2", "Unified accuracy is highest at keep probability 0.5",
     _above("fig7", ["p = 0.5"], ["p = *"], ("unified",))),
    ("bigger", "B.3", "The bigger the backbone the better",
     _all(_above(6, ["ViT-B"], ["ViT-S"]), _above(6, ["ViT-L"], ["ViT-B"]))),
    ("first-layers", "B.3", "On ViT-L, adapters on the first 12 layers only are better for small datasets",
     _above(6, ["ViT-L first 12"], ["ViT-L"], ("small", "harmonic"))),
    ("lora", "B.4", "LoRA and stochastic LoRA are below PUMA", _above(7, ["PUMA"], ["LoRA", "Stochastic LoRA"])),
    ("stochastic-lora", "B.4", "Stochasticity helps LoRA", _above(7, ["Stochastic LoRA"], ["LoRA"])),
    ("lora-on-puma", "B.4", "Stochastic LoRA on PUMA raises SOP, In-Shop and NABirds and lowers the others",
     _all(_above(7, ["PUMA + Stochastic LoRA"], ["PUMA"], ("sop", "inshop", "nabirds")),
          _above(7, ["PUMA"], ["PUMA + Stochastic LoRA"], ("cub", "cars", "dogs", "flowers", "aircraft")))),
    ("memory", "C.1", "A cross-batch memory helps Triplet and MS",
     _all(_above(8, ["Triplet + XBM"], ["Triplet"]), _above(8, ["MS + XBM"], ["MS"]))),
    ("memory-falls-short", "C.1", "... and leaves them below the proxy-based losses",
     _above((8, 5), PROXIES, ["Triplet + XBM", "MS + XBM"])),
    ("only-puma-gains", "C.3", "PUMA gains from universal training, where CurricularFace loses",
     _all(_above(9, ["universal PUMA"], ["specific PUMA"], HARMONIC),
          _above(9, ["specific CurricularFace"], ["universal CurricularFace"], HARMONIC))),
    ("four-universal", "D.1", "On four datasets PUMA is 3.1 points above universal models unified, 4.4 harmonic",
     _all(_above(10, ["PUMA"], ["universal *"], ("unified",), by=3.1),
          _above(10, ["PUMA"], ["universal *"], HARMONIC, by=4.4))),
    ("four-specific", "D.1", "On four datasets PUMA is 17.3 points above specific models unified, 0.9 harmonic",
     _all(_above(10, ["PUMA"], ["specific *"], ("unified",), by=17.3),
          _above(10, ["PUMA"], ["specific *"], HARMONIC, by=0.9))),
    ("four-cnn", "D.1", "On four datasets PUMA is above every CNN model", _above(10, ["PUMA"], ["cnn *"], HARMONIC)),
    ("other-metrics", "D.2", "PUMA's harmonic MAP@R and RP are above those of the best baselines",
     _above(12, ["PUMA"], ["specific *", "universal *"], ("harmonic_map", "harmonic_rp"))),
))
# fmt: on
