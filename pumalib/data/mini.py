"""`mini`: eight unlike, imbalanced datasets of small pictures, embedded in data/mini as sheets (see its README.md)."""

from functools import cache

import numpy as np
import pandas as pd
from PIL import Image

from .. import paths
from .table import COLUMNS, Benchmark

GAP = 2  # white pixels of a cell, right of its picture and below


def load(root=None, datasets: list[str] | None = None) -> Benchmark:
    """The embedded benchmark, or some of its datasets; `root` is not used.  ValueError: a damaged or missing file."""
    table, pixels = _read()
    return Benchmark("mini", table.copy(), pixels=pixels).select(datasets)


@cache
def _read() -> tuple[pd.DataFrame, np.ndarray]:
    file, parts = paths.MINI / "images.csv", []
    try:
        rows = pd.read_csv(file, keep_default_na=False, dtype={"column": int, "row": int})
        for dataset, places in rows.groupby("dataset", sort=False):
            file = paths.MINI / f"{dataset}.png"
            with Image.open(file) as image:
                sheet = np.asarray(image.convert("RGB"))
            cell = sheet.shape[1] // (places["column"].max() + 1)
            cells = sheet.reshape(len(sheet) // cell, cell, -1, cell, 3)
            parts.append(cells[places["row"], :-GAP, places["column"], :-GAP])
        rows["path"] = range(len(rows))
        rows["label"] = rows.groupby(["dataset", "class_name"], sort=False).ngroup()
        return rows[COLUMNS], np.concatenate(parts)
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise ValueError(f"{paths.shown(file)} is damaged ({error!r}); restore it: git checkout data/mini") from error
