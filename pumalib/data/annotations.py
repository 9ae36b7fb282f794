"""Annotation files as datasets are distributed with them; each error names the file, the line and the remedy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.io import loadmat


def numbered_lines(file: Path) -> list[tuple[int, str]]:
    """Numbered lines, without the empty ones."""
    try:
        text = file.read_text("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"annotation file {file} is missing; unpack the dataset again") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not a text file ({error}); unpack the dataset again") from None
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def pairs(file: Path) -> dict[str, str]:
    """Files of lines "key value"; the value may hold spaces."""
    found: dict[str, str] = {}
    for number, line in numbered_lines(file):
        key, _, value = line.strip().partition(" ")
        if not value:
            raise ValueError(f"{file}, line {number}: {line!r}; expected two values")
        if key in found:
            raise ValueError(f"{file}, line {number}: {key!r} is given twice")
        found[key] = value.strip()
    return found


def matlab(file: Path, name: str) -> np.ndarray:
    """Variable `name` of a Matlab file, one-dimensional."""
    if not file.is_file():
        raise ValueError(f"annotation file {file} is missing; unpack the dataset again")
    try:
        return np.atleast_1d(loadmat(file, squeeze_me=True, variable_names=[name])[name])
    except Exception as error:  # a damaged file raises many things, one without the variable a KeyError
        raise ValueError(f"{file}: no readable variable {name!r} ({error}); unpack the dataset again") from None


def class_number(value, count: int, where: str) -> int:
    """A class number from 1 to `count`; text, or of any type in which Matlab stores numbers."""
    try:
        number = int(value)
        if number == float(value) and 1 <= number <= count:
            return number
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{where}: class {value} is not in 1 to {count}")
