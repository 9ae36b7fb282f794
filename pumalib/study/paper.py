"""What the paper prints: its tables, its numbers of parameters counted again, and its claims (claims.yaml), judged.
`data/paper/table<n>.csv` transcribes Tables 1 to 12 as printed, "Ours" as "PUMA"; what is unreadable is empty, or
restored: Table 1's counts from the datasets (`source`), the check marks of Table 3 (`marks`) from the parameters."""

import fnmatch
import functools
import math
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from itertools import product

import numpy as np
import pandas as pd
import torch
import yaml

from .. import config, data, evaluation, paths
from ..models import build, count_parameters
from . import kept
from .kept import NotTestable

DATASETS = ("cub", "cars", "sop", "inshop", "nabirds", "dogs", "flowers", "aircraft")
LARGE = ("sop", "inshop")  # "large-scale datasets such as SOP and In-Shop", Sec. 5.1
OVERALL = ("unified", "harmonic")
SETTINGS = ("params_train_m", "params_total_m", "dim")  # the columns of numbers that are no accuracies
_NAMES = yaml.safe_load((paths.PAPER / "names.yaml").read_text(encoding="utf-8"))  # explained there
LOSSES, METHODS, BACKBONES, FILES = (_NAMES[kind] for kind in ("losses", "methods", "backbones", "files"))
ROUNDING = 0.05  # half a unit of the last printed digit


def table(number: int) -> pd.DataFrame:
    """Table `number` (1 to 12) of the paper, indexed by `row`; accuracies in percent, parameters in millions."""
    return pd.read_csv(paths.PAPER / f"table{number}.csv", index_col="row")


def comparable(printed: pd.DataFrame, datasets) -> pd.DataFrame:
    """`printed` without its single datasets unless all `datasets` are the paper's: names may coincide, images do not."""
    single = [column for column in printed if column.split("_")[0] in DATASETS]
    return printed if set(datasets) <= set(DATASETS) else printed.drop(columns=single)


def inconsistent(number: int) -> pd.DataFrame:
    """Rows of Table `number` whose printed harmonic mean is not that of the printed columns, to their rounding.
    Columns: `column` (harmonic, or one per metric in Table 12), `printed`, `recomputed`."""
    printed, found = table(number), []
    for column in [name for name in printed if name.startswith("harmonic") and not name.endswith("_change")]:
        values = printed[[name for part in DATASETS if (name := part + column.removeprefix("harmonic")) in printed]]
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
            method = "puma" if number == 6 else METHODS.get(printed.get("method", row), "full")
            layers = str(printed.get("adapter_layers", "all")).removeprefix("first ")
            backbone, dim = BACKBONES[printed.get("backbone", "ViT-S/16")], int(printed.get("dim", 128))
            models = len(DATASETS) if printed.get("group") == "specific" else 1
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


CLAIMS = yaml.safe_load((paths.PAPER / "claims.yaml").read_text(encoding="utf-8"))
FROZEN, FULL = "frozen", "universal CurricularFace"


def print_gains(tables: Mapping, table, row: str, other: str, by: Mapping) -> pd.DataFrame:
    """As `evaluation.paired_difference`, of two rows of one of the paper's tables: above zero or not, to rounding."""
    rows = tables[table].select_dtypes("number").drop(columns=list(SETTINGS), errors="ignore")
    datasets = rows.columns.intersection(DATASETS)
    rows["large"] = rows[datasets.intersection(LARGE)].mean(axis=1, skipna=False)
    rows["small"] = rows[datasets.difference(LARGE)].mean(axis=1, skipna=False)
    rows["small - large"] = rows["small"] - rows["large"]
    value = rows.loc[row] - rows.loc[other]
    least = (pd.Series(by, dtype=float) - ROUNDING).reindex(value.index, fill_value=0)
    above = (value <= least).astype(float).where(value.notna())
    return pd.DataFrame({"value": value / 100, "low": np.nan, "high": np.nan, "above": above, "below": 1 - above})


_difference = functools.lru_cache(4096)(kept.difference)  # claims share their comparisons


def kept_gains(profile: str, large: tuple, tables: Mapping, table, row: str, other: str, by: Mapping) -> pd.DataFrame:
    """`kept.difference` of two rows of kept runs; NotTestable: other queries, a collapsed row, or full tuning gains nothing."""
    rows = ChainMap(tables[table], *tables.values())  # its own first: Table 10 has other datasets

    def gain(one: str, two: str) -> pd.DataFrame:
        return _difference(tuple(rows[one]), tuple(rows[two]), profile, large)

    for name in (row, other):
        scale = name[at : at + 5] if (at := name.find("ViT-")) >= 0 else ""  # Tables 4 and 6; others have one backbone
        frozen, full = (f"frozen {scale}", f"CurricularFace {scale}/16 128") if scale else (FROZEN, FULL)
        if frozen in rows and full in rows and gain(full, frozen).at["harmonic", "low"] <= 0:
            raise NotTestable("full fine-tuning is not above the frozen backbone: nothing here could show a gain")
        if frozen in rows and gain(name, frozen).at["harmonic", "high"] < 0:
            raise NotTestable(f"{name} collapsed: it ends below the frozen backbone")
    return gain(row, other)


def large(profile: config.Profile) -> tuple[str, ...]:
    """The two datasets with most training images; none where no dataset has four times those of another (paper: 17)."""
    sizes = data.load(profile.data).train["dataset"].value_counts()
    return tuple(sizes.index[:2]) if sizes.max() > 4 * sizes.min() and len(sizes) > 2 else ()


def scorecard(profile: config.Profile, about: Collection | None = None) -> pd.DataFrame:
    """Every claim, or those `about` some tables, by name: `section`, `claim`, `table`, `print`, `here` and `why`.
    `print` is holds, fails, or not printed.  `here`, with Holm's correction over all claims, is supported (all pairs of
    rows of the print were run and are above zero), contradicted (too many are below), undecided, or not testable."""
    files = {number: paths.RESULTS / profile.name / f"{name}.csv" for number, name in FILES.items()}
    tables = {number: pd.read_csv(file).drop_duplicates("row") for number, file in files.items() if file.is_file()}
    runs = {number: rows.set_index("row")["runs"].str.split() for number, rows in tables.items()}
    prints, gains = printed(), functools.partial(kept_gains, profile.name, large(profile))
    columns, lines, tests = ["section", "claim", "table", "print", "here", "why"], {}, {}
    for claim in CLAIMS:
        above, below, why, run = evidence(claim, runs, gains)
        fails, _, _, needed = evidence(claim, prints, print_gains)
        needed = needed or sum(len(one["winners"]) * len(one["rivals"]) for one in claim["above"])  # drawn, not printed
        if above is not None:  # where not all were run a counterexample still refutes, but not what is said of a share
            some = 1.0 if any("share" in one for one in claim["above"]) else below
            tests[claim["name"]] = (above, below) if run >= needed else (1.0, some)
        why += f"; {run} of {needed} pairs of rows could be compared" * (0 < run < needed)
        said = {None: "not printed", 0.0: "holds", 1.0: "fails"}[fails]
        lines[claim["name"]] = claim["section"], claim["text"], claim["above"][0]["table"], said, "not testable", why
    table = pd.DataFrame.from_dict(lines, orient="index", columns=columns).rename_axis("name")
    chances = evaluation.holm({name: min(1.0, 2 * min(tests.get(name, (1.0,)))) for name in table.index})
    for name, (above, below) in tests.items():
        table.loc[name, "here"] = ("contradicted", "supported")[above < below] if chances[name] < 0.05 else "undecided"
    return table[table["table"].isin(about or list(table["table"]))]


def printed() -> dict[int | str, pd.DataFrame]:
    """The paper's tables with accuracies, and Tables 8 and 5 as one."""
    tables = {number: table(number) for number in range(2, 13)}
    return tables | {"8 and 5": pd.concat([tables[8], tables[5].drop(index=tables[8].index, errors="ignore")])}


def evidence(claim: dict, tables: Mapping, gains: Callable) -> tuple[float | None, float | None, str, int]:
    """p-values of a claim, against "not above" and "not below", what decides it or why nothing does, and pairs of rows."""
    try:
        pairs = [_comparisons(one, tables, gains) for one in claim["above"]]
    except NotTestable as missing:
        return None, None, str(missing), 0
    parts, total, below = [], sum(len(gain) for found in pairs for gain in found), 1.0
    for one, found in zip(claim["above"], pairs, strict=True):
        part = pd.concat(found).rename_axis("column").reset_index()
        place = len(part) - math.ceil(one.get("share", 1) * len(part))  # so many may fail
        part["above"] = (part["above"] * (place + 1)).clip(upper=1)
        below = min(below, total * part["below"].nsmallest(place + 1).iloc[-1])
        parts.append(part.sort_values(["above", "value"], ascending=[False, True]).iloc[place])
    weakest = max(parts, key=lambda part: (part["above"], -part["value"]))
    value, low, high = 100 * weakest[["value", "low", "high"]].astype(float)
    said = f"{weakest['pair']}, {weakest['column']}: {value:+.1f}" + f" [{low:+.1f}, {high:+.1f}]" * math.isfinite(low)
    said += f"; it decides among {total}" * (total > 1)
    return float(weakest["above"]), float(below), said, sum(map(len, pairs))


def _comparisons(one: dict, tables: Mapping, gains: Callable) -> list[pd.DataFrame]:
    if one["table"] not in tables:
        raise NotTestable(f"nothing is kept to judge table {one['table']} by".replace("table fig", "Fig. "))
    found, why = [], NotTestable("no pair of rows")
    for row, other in product(*(_rows(one[side], list(tables[one["table"]].index)) for side in ("winners", "rivals"))):
        if row == other or (one.get("alike") and row.split()[-1] != other.split()[-1]):
            continue
        try:
            gain = gains(tables, one["table"], row, other, one.get("by", {}))
        except NotTestable as error:
            why = error
            continue
        columns = one.get("columns", OVERALL)
        columns = [name for name in gain.index if name not in evaluation.NOT_DATASETS] if columns == "each" else columns
        if lost := [name for name in columns if name not in gain.index or np.isnan(gain.at[name, "above"])]:
            raise NotTestable(f"{row} over {other}: no {lost[0]}, or one seed")
        found.append(gain.loc[list(columns)].assign(pair=f"{row} over {other}"))
    if not found:
        raise why
    return found


def _rows(patterns: list[str], names: list[str]) -> list[str]:
    """The rows that patterns name; NotTestable where there is none of one."""
    found = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
    for pattern in (pattern for pattern, rows in found.items() if not rows):
        raise NotTestable(f"no row {pattern!r}")
    return [row for rows in found.values() for row in rows]
