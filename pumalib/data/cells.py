"""Read CSV files that people write by hand, as text: files of labels and of splits."""

import csv
from collections.abc import Iterable
from pathlib import Path

import pandas as pd


def read_cells(file: Path) -> pd.DataFrame:
    """Read a CSV with a header, every cell as text, "NA" and "007" too.

    Returns a row per line that is not blank, indexed by its line number in the file.  Raises
    ValueError, which names the file and if possible the line, where it is no CSV in UTF-8 (with or
    without BOM), two columns have one name, or a line has another number of cells; OSError where it
    cannot be read.
    """
    # Reading from a pipe would wait for ever.
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is no file of UTF-8 CSV: it is a folder, a pipe or a device")
    with file.open(encoding="utf-8-sig", newline="") as opened:
        lines = csv.reader(opened, strict=True)
        try:
            numbered = [(lines.line_num, cells) for cells in lines]
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: no file of UTF-8 CSV ({error})") from None
        except csv.Error as error:
            where = f"{file}, line {lines.line_num}"
            raise ValueError(f"{where}: no file of UTF-8 CSV ({error})") from None

    filled = [(number, cells) for number, cells in numbered if any(map(str.strip, cells))]
    if not filled:
        raise ValueError(f"{file} is empty; its first line must name columns")
    _, columns = filled.pop(0)
    if len(set(columns)) < len(columns):
        raise ValueError(f"{file}: columns {columns}; each name can stand once")
    for number, cells in filled:
        if len(cells) != len(columns):
            what = f"{len(cells)} cells for the {len(columns)} columns {', '.join(columns)}"
            remedy = "a cell that holds a comma must stand in double quotes"
            raise ValueError(f"{file}, line {number}: {what}; {remedy}")
    rows = [cells for _, cells in filled]
    return pd.DataFrame(rows, [number for number, _ in filled], columns, dtype=object)


def check_cells(file: Path, rows: pd.DataFrame, columns: Iterable[str]) -> None:
    """Raise ValueError, which names the line, if a cell of these `columns` of `rows` is empty."""
    for column in columns:
        empty = rows.index[rows[column].str.strip() == ""]
        if len(empty):
            others = f" (and {len(empty) - 1:,} more lines)" if len(empty) > 1 else ""
            remedy = "fill it, or remove the line"
            raise ValueError(f"{file}, line {empty[0]}: no {column}{others}; {remedy}")


def check_once(file: Path, keys: pd.Series, what: str) -> None:
    """Raise ValueError, which names both lines, if two rows are about the same `what`."""
    again = keys.index[keys.duplicated()]
    if len(again):
        key = keys[again[0]]
        before = keys.index[keys == key][0]
        where = f"{file}, line {again[0]}: {key}"
        raise ValueError(f"{where}: this {what} was given before, in line {before}; keep one line")
