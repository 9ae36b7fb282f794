"""Accuracies of embeddings that anybody made: from arrays, or from two files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .metrics import KS, scores

# The one dataset of labels that are given without datasets.
ALONE = "all"
# The columns that a file of labels may have.
COLUMNS = ("path", "label", "dataset", "split")


def evaluate(
    vectors: Any,
    labels: Sequence | np.ndarray,
    datasets: Sequence[str] | np.ndarray | None = None,
    *,
    queries: Sequence | np.ndarray | None = None,
    gallery: Sequence | np.ndarray | None = None,
) -> pd.DataFrame:
    """R@k, RP and MAP@R of embeddings (n, dim) with intervals: `pumalib.evaluate`."""
    for name, values in (("labels", labels), ("datasets", datasets)):
        if values is not None and len(values) != len(vectors):
            raise ValueError(f"{len(values)} {name} for {len(vectors)} vectors; one each is needed")
    images = pd.DataFrame({"label": np.asarray(labels)})
    images["dataset"] = ALONE if datasets is None else np.asarray(datasets)
    is_query = _chosen("queries", queries, len(vectors))
    in_gallery = _chosen("gallery", gallery, len(vectors))
    images["split"] = np.where(is_query, np.where(in_gallery, "test", "query"), "gallery")
    is_used = is_query | in_gallery
    if not is_used.all():
        vectors = vectors[is_used]
        images = images[is_used].reset_index(drop=True)
    table = scores(vectors, images, KS).table()
    if datasets is None:
        return table.loc[[ALONE]]
    return table


def _chosen(name: str, rows: Sequence | np.ndarray | None, count: int) -> np.ndarray:
    """(count,) whether each row is among `rows`, numbers or truth values; None: all are."""
    if rows is None:
        return np.ones(count, dtype=bool)
    given = np.asarray(rows)
    if given.dtype == bool:
        if given.shape != (count,):
            raise ValueError(f"{name} of shape {given.shape} for {count} vectors; one each")
        return given
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"{name} must be row numbers, or True and False for each row")
    if len(given) == 0 or given.min() < 0 or given.max() >= count:
        raise ValueError(f"{name} must name one or more rows from 0 to {count - 1}")
    chosen = np.zeros(count, dtype=bool)
    chosen[given] = True
    return chosen


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
        return evaluate(embedded, [str(Path(name).parent) for name in names])

    table = _read_labels(labels)
    if "path" in table and names is not None:
        table = table.drop_duplicates("path").set_index("path").reindex(names)
        missing = table.index[table["label"].isna()]
        if len(missing):
            what = f"{labels}: no label for {len(missing):,} of {len(names):,} vectors"
            raise ValueError(f"{what}, the first {missing[0]!r}; add lines, or embed fewer images")
    elif len(table) != len(embedded):
        what = f"{labels} has {len(table):,} lines for {len(embedded):,} vectors of {vectors}"
        raise ValueError(f"{what}; one each is needed, or a column path and an .npz with `paths`")
    split = table["split"].to_numpy() if "split" in table else np.full(len(table), "test")
    unknown = set(split) - {"query", "gallery", "test"}
    if unknown:
        what = f"{labels}: split {min(map(str, unknown))!r}"
        raise ValueError(f"{what}; it must be query, gallery or test")
    datasets = table["dataset"].to_numpy() if "dataset" in table else None
    return evaluate(
        embedded,
        table["label"].to_numpy(),
        datasets,
        queries=split != "gallery",
        gallery=split != "query",
    )


def _read_vectors(file: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """The vectors of a file, and their paths where it has them."""
    try:
        content = np.load(file)
    except ValueError as error:
        raise ValueError(f"{file} is no file of numpy: {error}") from None
    if isinstance(content, np.ndarray):
        return content, None
    if "vectors" not in content:
        raise ValueError(f"{file} holds {', '.join(content)}; expected `vectors`, and `paths`")
    return content["vectors"], content.get("paths")


def _read_labels(file: Path) -> pd.DataFrame:
    try:
        table = pd.read_csv(file, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    # pandas' own errors are ValueErrors.
    except ValueError as error:
        raise ValueError(f"{file}: no file of UTF-8 CSV ({error})") from None
    if "label" not in table:
        expected = f"label, and any of {', '.join(COLUMNS)}"
        raise ValueError(f"{file}: columns {list(table)}; expected {expected}")
    return table
