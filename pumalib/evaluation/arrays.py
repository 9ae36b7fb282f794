"""Accuracies of embeddings that anybody made: from arrays, or from two files."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_list_like
from torch import Tensor

from ..data import folders
from ..data.cells import check_cells, check_once, read_cells
from .metrics import KS, scores
from .search import as_vectors

# The one dataset of labels that are given without datasets.
ALONE = "all"
# The columns that a file of labels may have.
COLUMNS = ("path", "label", "dataset", "split")
# The splits that it may name.
OF_TEST = ("query", "gallery", "test")


def evaluate(
    vectors: Any,
    labels: Sequence | np.ndarray,
    datasets: Sequence[str] | np.ndarray | None = None,
    *,
    queries: Sequence | np.ndarray | None = None,
    gallery: Sequence | np.ndarray | None = None,
) -> pd.DataFrame:
    """R@k, RP and MAP@R of embeddings (n, dim) with intervals: `pumalib.evaluate`."""
    vectors = as_vectors(vectors)
    if vectors.ndim != 2:
        raise ValueError(f"vectors of shape {tuple(vectors.shape)}; (n, dim) is needed")
    count = len(vectors)
    images = pd.DataFrame({"label": _one_each("labels", labels, count)})
    images["dataset"] = ALONE
    if datasets is not None:
        images["dataset"] = _one_each("datasets", datasets, count)
    is_query = _chosen("queries", queries, count)
    in_gallery = _chosen("gallery", gallery, count)
    images["split"] = np.where(is_query, np.where(in_gallery, "test", "query"), "gallery")

    is_used = is_query | in_gallery
    _require_directions(vectors, is_used)
    if not is_used.all():
        vectors = vectors[np.flatnonzero(is_used)]
        images = images[is_used].reset_index(drop=True)
    table = scores(vectors, images, KS).table()
    if datasets is None:
        return table.loc[[ALONE]]
    return table


def _flat(name: str, values: Any) -> np.ndarray:
    """What somebody gives as a list, array, Series or tensor, as an array (n,).

    What is missing stays missing, where numpy makes "nan" of it.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    is_list = is_list_like(values, allow_sets=False) and not isinstance(values, Mapping)
    if not is_list or getattr(values, "ndim", 1) != 1:
        got = f"a {type(values).__name__}"
        if hasattr(values, "shape"):
            got = f"of shape {tuple(values.shape)}"
        raise ValueError(f"{name}: {got}; a list or an array (n,) is needed")
    if not hasattr(values, "dtype"):
        values = [_plain(value) for value in values]
    return pd.Series(values).to_numpy()


def _plain(value: Any) -> Any:
    """A number instead of an array or tensor of no dimension."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        return value.item()
    return value


def _one_each(name: str, values: Any, count: int) -> np.ndarray:
    """(count,) names of classes or datasets, one for each vector."""
    given = _flat(name, values)
    if len(given) != count:
        raise ValueError(f"{len(given)} {name} for {count} vectors; one each is needed")
    if given.dtype == object:
        present = given[~pd.isna(given)]
        nested = [value for value in present if is_list_like(value)]
        if nested:
            raise ValueError(f"{name} hold {nested[0]!r}; one name or number each is needed")
        _require_one_kind(name, present)
    return given


def _require_one_kind(name: str, given: np.ndarray) -> None:
    """Raise ValueError where some names are text and others are not: 1 and "1" may be one class."""
    texts = [value for value in given if isinstance(value, str)]
    others = [value for value in given if not isinstance(value, str)]
    if texts and others:
        what = f"{name} mix text and numbers, such as {texts[0]!r} and {others[0]!r}"
        raise ValueError(f"{what}; make all of them text, or all numbers")


def _chosen(name: str, rows: Any, count: int) -> np.ndarray:
    """(count,) whether each row is among `rows`, numbers or truth values; None: all are."""
    if rows is None:
        return np.ones(count, dtype=bool)
    given = _numbers_or_truths(name, rows, count)
    if given.dtype == bool:
        if len(given) != count:
            raise ValueError(f"{name} of shape {given.shape} for {count} vectors; one each")
        if not given.any():
            raise ValueError(f"{name} chooses no row; one or more must be True")
        return given
    if not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"{name} must be row numbers, or True and False for each row")
    if len(given) == 0 or given.min() < 0 or given.max() >= count:
        raise ValueError(f"{name} must name one or more rows from 0 to {count - 1}")
    numbers, times = np.unique(given, return_counts=True)
    if times.max() > 1:
        what = f"{name} names row {numbers[times > 1][0]} more than once"
        raise ValueError(f"{what}; name a row once, or give True and False for each row")
    chosen = np.zeros(count, dtype=bool)
    chosen[given] = True
    return chosen


def _numbers_or_truths(name: str, rows: Any, count: int) -> np.ndarray:
    """What chooses rows; as many zeros and ones as there are rows are truth values."""
    given = _flat(name, rows)
    missing = np.flatnonzero(pd.isna(given))
    if len(missing):
        raise ValueError(f"{name}: the value in place {missing[0]} is missing; fill it")
    # Of pandas' nullable kinds come objects.
    given = np.asarray(given.tolist())
    is_number = given.dtype.kind in "iuf"
    if is_number and len(given) == count and np.isin(given, (0, 1)).all():
        return given.astype(bool)
    return given


def _require_directions(vectors: Tensor, is_used: np.ndarray) -> None:
    """Raise ValueError where a vector is zero: it has a cosine with none."""
    is_zero = (vectors == 0).all(1).cpu().numpy()
    zero = np.flatnonzero(is_zero & is_used)
    if len(zero):
        what = f"{len(zero):,} of {len(vectors):,} vectors are zero, first that of row {zero[0]}"
        raise ValueError(f"{what}; they have no direction: leave them out")


# ---- from files


def evaluate_files(vectors: Path, labels: Path | None = None) -> pd.DataFrame:
    """`evaluate` of a file of vectors and one of labels.

    `vectors` is an .npz with `vectors` (n, dim) and, where labels are to be found by them, `paths`
    (n,); or an .npy.  `labels` is a CSV with the column label, and path unless its lines are in the
    order of the vectors; it may have the columns dataset, and split: query, gallery or test, which
    is both.  Without it the folder of an image is its class.  Raises ValueError, which names the
    file, for what does not fit; OSError where a file cannot be read.
    """
    embedded, names = _read_vectors(vectors)
    if labels is None:
        if names is None:
            raise ValueError(f"{vectors} has no `paths`: name a file of labels too")
        return evaluate(embedded, _classes_by_folder(vectors, names))

    table = _read_labels(labels)
    if "path" in table and names is not None:
        table = table.set_index("path").reindex(names)
        missing = table.index[table["label"].isna()]
        if len(missing):
            what = f"{labels}: no label for {len(missing):,} of {len(names):,} vectors"
            raise ValueError(f"{what}, the first {missing[0]!r}; add lines, or embed fewer images")
    elif len(table) != len(embedded):
        what = f"{labels} has {len(table):,} lines for {len(embedded):,} vectors of {vectors}"
        raise ValueError(f"{what}; one each is needed, or a column path and an .npz with `paths`")
    split = table["split"].to_numpy() if "split" in table else np.full(len(table), "test")
    datasets = table["dataset"].to_numpy() if "dataset" in table else None
    return evaluate(
        embedded,
        table["label"].to_numpy(),
        datasets,
        queries=split != "gallery",
        gallery=split != "query",
    )


def _classes_by_folder(file: Path, names: np.ndarray) -> list[str]:
    """The folder of each image; ValueError where that is no class."""
    remedy = "name a file of labels too"
    classes = [PurePath(name).parent.as_posix() for name in names]
    if "." in classes:
        loose = str(names[classes.index(".")])
        raise ValueError(f"{file}: {loose!r} lies in no folder that would be its class; {remedy}")
    splits = folders.called_like_splits({name.split("/")[0] for name in classes})
    if splits:
        what = f"{file}: the folders {' and '.join(splits)} are called like splits"
        raise ValueError(f"{what}, and a class of both would be taken for two; {remedy}")
    return classes


def _read_vectors(file: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """The vectors of a file, and their paths where it has them."""
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is no file of numpy: it is a folder, a pipe or a device")
    try:
        # Mapped: a header that says terabytes is refused before they are asked for.
        content = np.load(file, mmap_mode="r")
    except ValueError as error:
        raise ValueError(f"{file} is no file of numpy: {error}") from None
    if isinstance(content, np.ndarray):
        return content, None
    if "vectors" not in content:
        raise ValueError(f"{file} holds {', '.join(content)}; expected `vectors`, and `paths`")
    return content["vectors"], content.get("paths")


def _read_labels(file: Path) -> pd.DataFrame:
    """The lines of a file of labels, indexed by their numbers; ValueError at the first bad one."""
    table = read_cells(file)
    if "label" not in table:
        expected = f"label, and any of {', '.join(COLUMNS)}"
        raise ValueError(f"{file}: columns {list(table)}; expected {expected}")
    check_cells(file, table, [column for column in COLUMNS if column in table])
    if "path" in table:
        check_once(file, table["path"], "image")
    for column in ("label", "dataset"):
        if column in table:
            _require_no_outer_blanks(file, table[column])
    if "split" in table:
        unknown = table["split"][~table["split"].isin(OF_TEST)]
        if len(unknown):
            what = f"{file}, line {unknown.index[0]}: split {unknown.iloc[0]!r}"
            raise ValueError(f"{what}; it must be query, gallery or test")
    return table


def _require_no_outer_blanks(file: Path, names: pd.Series) -> None:
    """Raise ValueError where a name ends in a blank: "cat " and "cat" would be two classes."""
    padded = names[names != names.str.strip()]
    if len(padded):
        what = f"{file}, line {padded.index[0]}: {names.name} {padded.iloc[0]!r}"
        raise ValueError(f"{what} begins or ends with a blank; remove it")
