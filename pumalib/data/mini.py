"""`mini`: eight different, imbalanced datasets of small pictures.

The checkout has them as sheets in data/mini (see its README.md).
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from .. import paths
from .table import COLUMNS, Benchmark, Reader

# White pixels of a cell, right of its picture and below it.
GAP = 2


def load(root: str | Path | None = None, datasets: Sequence[str] | None = None) -> Benchmark:
    """Read the benchmark, or some of its datasets, from the checkout; `root` is not used.

    Raises ValueError where a file is damaged or missing, or there is no checkout.
    """
    table, pixels = _read()
    return Benchmark("mini", table.copy(), pixels=pixels).select(datasets)


READER = Reader(load)


@cache
def _read() -> tuple[pd.DataFrame, np.ndarray]:
    """The table and the pixels (n, side, side, 3) uint8 of all datasets."""
    if not paths.MINI.is_dir():
        what = f"benchmark 'mini' needs the checkout, whose data/mini is not at {paths.MINI}"
        raise ValueError(f"{what}; clone the project, and set PUMALIB_ROOT to its folder")
    file = paths.MINI / "images.csv"
    parts = []
    try:
        rows = pd.read_csv(file, keep_default_na=False, dtype={"column": int, "row": int})
        for dataset, places in rows.groupby("dataset", sort=False):
            file = paths.MINI / f"{dataset}.png"
            parts.append(_pictures(file, places))
        rows["path"] = range(len(rows))
        rows["label"] = rows.groupby(["dataset", "class_name"], sort=False).ngroup()
        return rows[COLUMNS], np.concatenate(parts)
    # Decoders of damaged files raise nearly anything.
    except Exception as error:
        what = f"{paths.shown(file)} is damaged ({error!r})"
        raise ValueError(f"{what}; restore it: git checkout data/mini") from error


def _pictures(file: Path, places: pd.DataFrame) -> np.ndarray:
    """The pictures (n, side, side, 3) at these columns and rows of a sheet."""
    with Image.open(file) as image:
        sheet = np.asarray(image.convert("RGB"))
    columns = places["column"].max() + 1
    cell = sheet.shape[1] // columns
    rows = len(sheet) // cell
    # (rows of cells, y within a cell, columns of cells, x within a cell, 3)
    cells = sheet.reshape(rows, cell, -1, cell, 3)
    return cells[places["row"], :-GAP, places["column"], :-GAP]
