"""What texts say of classes: similarities for the `language` loss."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

from .. import paths


def similarities(source: str, classes: Sequence[str]) -> np.ndarray:
    """Cosines (C, C) of the texts of `classes`, from "words": their names, as weighted bags of words.  Or from a file: a
    CSV with `class_name` and `text`, or `class_name` and the numbers of an embedding, an npz with `names` and `vectors`.
    Or from a text model of sentence-transformers, a hub's name or a folder, of "a photo of a <name>" (Roth, CVPR 2022).
    ValueError: a class without text, a damaged file, no such model, or none installed."""
    words, names = TfidfVectorizer(token_pattern=r"\w+").fit_transform, list(classes)
    if source == "words":
        vectors = words(names).toarray()
    elif file := _file(source):
        table = _table(file)
        if lost := sorted(set(names) - set(table.index)):
            raise ValueError(f"{file} has nothing on {len(lost)} of the classes, for instance {lost[0]!r}; add it")
        table = table.loc[names]
        vectors = words(table["text"]).toarray() if "text" in table else table.to_numpy(float)
    else:
        vectors = _encode(source, [f"a photo of a {name}" for name in names])
    return normalize(vectors) @ normalize(vectors).T


def digest(source: str) -> str:
    """What the file `source` holds, as SHA-256; "" where it names no file."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if (file := _file(source)) else ""


def _file(source: str) -> Path | None:
    file = paths.resolve(source)
    if source.endswith((".csv", ".npz")) and not file.is_file():
        raise ValueError(f"texts = {source!r}: there is no file {file}")
    return file if file.is_file() else None


def _table(file: Path) -> pd.DataFrame:
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                return pd.DataFrame(arrays["vectors"], arrays["names"], dtype=float)
        table = pd.read_csv(file, index_col="class_name")
        return table if "text" in table else table.astype(float)
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"{file} is no table of texts or embeddings by class_name ({error})") from error


def _encode(source: str, texts: list[str]) -> np.ndarray:
    try:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(paths.resolve(source)) if paths.resolve(source).is_dir() else source)
        return model.encode(texts)
    except Exception as error:  # not installed, unknown, or no network
        known = 'known: "words", a .csv or .npz file, a model of sentence-transformers (pip install ".[language]")'
        raise ValueError(f"texts = {source!r} cannot be used ({type(error).__name__}: {error}); {known}") from error
