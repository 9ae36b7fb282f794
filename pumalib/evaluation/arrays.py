"""Accuracies of embeddings from any model, given as arrays or as two files."""

import zipfile
import zlib
from collections import defaultdict
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

# The name of the one dataset where none are given.
ALONE = "all"
# The columns that a file of labels may have.
COLUMNS = ("path", "label", "dataset", "split")
# The splits that such a file may name.
OF_TEST = ("query", "gallery", "test")


def evaluate(
    vectors: Any,
    labels: Sequence | np.ndarray,
    datasets: Sequence[str] | np.ndarray | None = None,
    *,
    queries: Sequence | np.ndarray | None = None,
    gallery: Sequence | np.ndarray | None = None,
) -> pd.DataFrame:
    """R@k, RP and MAP@R of embeddings (n, dim) with intervals; see `pumalib.evaluate`."""
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
    """Convert a list, array, Series or tensor to an array (n,).

    A missing value stays missing; NumPy alone would turn it into the text "nan".
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
    """Turn a 0-dimensional array or tensor into a number."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        return value.item()
    return value


def _one_each(name: str, values: Any, count: int) -> np.ndarray:
    """Check the names of classes or datasets, one per vector: (count,)."""
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
    """Raise ValueError if names mix text and numbers: 1 and "1" may be one class."""
    texts = [value for value in given if isinstance(value, str)]
    others = [value for value in given if not isinstance(value, str)]
    if texts and others:
        what = f"{name} mix text and numbers, such as {texts[0]!r} and {others[0]!r}"
        raise ValueError(f"{what}; make all of them text, or all numbers")


def _chosen(name: str, rows: Any, count: int) -> np.ndarray:
    """(count,) whether `rows`, row numbers or booleans, choose each row; None: all are chosen."""
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
    """`rows` as an array of numbers or booleans; a 0 or 1 for each row counts as booleans.

    Where there are two rows, 0 and 1 are their numbers.
    """
    given = _flat(name, rows)
    missing = np.flatnonzero(pd.isna(given))
    if len(missing):
        raise ValueError(f"{name}: the value in place {missing[0]} is missing; fill it")
    # pandas' nullable types become objects.
    given = np.asarray(given.tolist())
    is_number = given.dtype.kind in "iuf"
    if is_number and len(given) == count > 2 and np.isin(given, (0, 1)).all():
        return given.astype(bool)
    return given


def _require_directions(vectors: Tensor, is_used: np.ndarray) -> None:
    """Raise ValueError if a used vector is zero: it has no cosine with any other."""
    is_zero = (vectors == 0).all(1).cpu().numpy()
    zero = np.flatnonzero(is_zero & is_used)
    if len(zero):
        what = f"{len(zero):,} of {len(vectors):,} vectors are zero, first that of row {zero[0]}"
        raise ValueError(f"{what}; they have no direction: leave them out")


# ---- from files


def evaluate_files(vectors: Path, labels: Path | None = None) -> pd.DataFrame:
    """`evaluate` a file of vectors with a file of labels.

    `vectors` is an .npz with `vectors` (n, dim) and, to match labels by path, `paths` (n,); or an
    .npy.  `labels` is a CSV with the column label, and path unless its lines are in the order of
    the vectors (an .npy has no paths); it may have the columns dataset, and split: query, gallery
    or test, which is both.  Without it the class of an image is its folder.  Raises ValueError,
    which names the file, if the files do not fit each other; OSError if one cannot be read.
    """
    embedded, names = _read_vectors(vectors)
    if labels is None:
        if names is None:
            raise ValueError(f"{vectors} has no `paths`: name a file of labels too")
        return evaluate(embedded, _classes_by_folder(vectors, names))

    table = _read_labels(labels)
    if "path" in table:
        if names is None:
            what = f"{labels} has the column path, and {vectors} no `paths` to match it with"
            remedy = "give an .npz with `paths`, or remove the column if its lines are in order"
            raise ValueError(f"{what}; {remedy}")
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
    """The class of each image, its folder; ValueError if the folders are no classes."""
    remedy = "name a file of labels too"
    classes = [PurePath(name).parent.as_posix() for name in names]
    if "." in classes:
        loose = str(names[classes.index(".")])
        raise ValueError(f"{file}: {loose!r} lies in no folder that would be its class; {remedy}")
    at_depth = defaultdict(set)
    for name in set(classes):
        for depth, folder in enumerate(name.split("/")):
            at_depth[depth].add(folder)
    for depth, names_there in at_depth.items():
        splits = folders.called_like_splits(names_there, wholly=depth > 0)
        if splits:
            what = f"{file}: the folders {' and '.join(splits)} are called like splits"
            raise ValueError(f"{what}, and a class of both would be taken for two; {remedy}")
    return classes


def _read_vectors(file: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """The vectors of a file, and their paths or None."""
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is no file of numpy: it is a folder, a pipe or a device")
    try:
        # Mapped: a header that claims terabytes is refused before they are allocated.
        content = np.load(file, mmap_mode="r")
        if isinstance(content, np.ndarray):
            return content, None
        with content:
            names = list(content)
            vectors = content.get("vectors")
            of_files = content.get("paths")
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file} is no file of numpy: {error}") from None
    if vectors is None:
        raise ValueError(f"{file} holds {', '.join(names)}; expected `vectors`, and `paths`")
    return vectors, of_files


def _read_labels(file: Path) -> pd.DataFrame:
    """The lines of a file of labels, indexed by line number; ValueError at the first bad line."""
    table = read_cells(file)
    # A misspelt column would be ignored: without `path` lines would be matched by their order.
    if "label" not in table or not set(table) <= set(COLUMNS):
        expected = f"label, and any of {', '.join(COLUMNS)}; rename or remove others"
        raise ValueError(f"{file}: columns {list(table)}; expected {expected}")
    check_cells(file, table, list(table))
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
    """Raise ValueError if a name begins or ends with a blank: "cat " and "cat" would differ."""
    padded = names[names != names.str.strip()]
    if len(padded):
        what = f"{file}, line {padded.index[0]}: {names.name} {padded.iloc[0]!r}"
        raise ValueError(f"{what} begins or ends with a blank; remove it")
