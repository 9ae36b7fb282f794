"""`mini`: eight small, unlike, imbalanced retrieval datasets of 32 px images, embedded in data/mini.

A sheet, <dataset>.png, shows every picture of a dataset, a class in neighbouring cells of a row; images.csv says what
each cell is.  data/mini/make made them, data/mini/README.md names the sources.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
from PIL import Image

from .. import paths
from .table import COLUMNS, Benchmark

_SIDE, _CELL = 32, 34  # pixels: a picture, and its cell of a sheet with the gap on the right and below


def load(root=None, datasets: list[str] | None = None) -> Benchmark:
    """The embedded benchmark; `root` is not used, `datasets` as in `pumalib.data.read`.

    Raises:
        ValueError: images.csv or a sheet is missing or damaged.
    """
    table, pixels = _read()
    return Benchmark("mini", table.copy(), pixels=pixels).select(datasets)


@cache
def _read() -> tuple[pd.DataFrame, np.ndarray]:
    file = paths.MINI / "images.csv"
    try:
        rows = pd.read_csv(file, keep_default_na=False, dtype={"column": int, "row": int})
        parts = []
        for dataset, places in rows.groupby("dataset", sort=False):
            file = paths.MINI / f"{dataset}.png"
            with Image.open(file) as sheet:
                grid = np.asarray(sheet).reshape(sheet.height // _CELL, _CELL, sheet.width // _CELL, _CELL, 3)
            parts.append(grid[places["row"], :_SIDE, places["column"], :_SIDE])
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise ValueError(
            f"{paths.shown(file)} is missing or damaged ({type(error).__name__}: {error}); "
            "restore it from the repository: git checkout data/mini"
        ) from error
    rows["path"] = range(len(rows))
    rows["label"] = rows.groupby(["dataset", "class_name"], sort=False).ngroup()
    return rows[COLUMNS], np.concatenate(parts)
