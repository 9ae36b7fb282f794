"""Similarities of classes from texts, for the `language` loss."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import paths

if TYPE_CHECKING:
    import pandas as pd

INSTALL = 'pip install "pumalib[language]"'

# Prefixes of class folders: "001.", "n01443537_".
_NUMBER_BEFORE = re.compile(r"^(n\d{8}|\d+)[._]+(?=\D)")
# Separators of words in class folders.
_BETWEEN_WORDS = re.compile(r"[\s_.-]+")
# TfidfVectorizer settings: bags of words, and bags of three to five consecutive letters.
_WORDS: dict[str, Any] = {"token_pattern": r"\w+"}
_LETTERS: dict[str, Any] = {"analyzer": "char_wb", "ngram_range": (3, 5)}


def similarities(source: str, classes: Sequence[str]) -> np.ndarray:
    """Cosines (C, C) between the `classes`, from the texts or embeddings that `source` names.

    "words": bags of words of the class names, weighted by TF-IDF.  "characters": the same with
    three to five consecutive letters, so that "Albatross" is similar to "Albatrosses".  See
    `readable`.
    A file: a CSV with `class_name` and `text`, or with `class_name` and the numbers of an
    embedding, or an npz with `names` and `vectors`.
    A sentence-transformers model, by its name on the hub or its folder: embeddings of
    "a photo of a <name>" (Roth et al., CVPR 2022).

    Raises ValueError for a class without words or with a zero vector, a damaged file, an unknown
    model, or a missing package.
    """
    try:
        from sklearn.preprocessing import normalize
    except ImportError as error:
        raise ValueError(f"texts are compared with scikit-learn: {INSTALL} ({error})") from error

    vectors = np.asarray(_vectors(source, list(classes)))
    has_direction = vectors.any(axis=1) & np.isfinite(vectors).all(axis=1)
    if not has_direction.all():
        name = classes[int(np.argmin(has_direction))]
        raise ValueError(
            f"texts = {source!r}: class {name!r} has no word in its text, or a vector that is zero "
            "or not finite; give it another"
        )
    unit_vectors = normalize(vectors)
    return unit_vectors @ unit_vectors.T


def readable(name: str) -> str:
    """The words of a class folder's name: three in "001_Black_footed_Albatross".

    A number or a WordNet id before the name is left out.
    """
    words = _BETWEEN_WORDS.split(_NUMBER_BEFORE.sub("", name))
    return " ".join(word for word in words if word)


def digest(source: str) -> str:
    """SHA-256 of the contents of the file or folder `source`; "" if it is neither."""
    file = _file(source)
    if file is not None:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    folder = paths.resolve(source)
    if source and folder.is_dir():
        return _folder_digest(folder)
    return ""


def _folder_digest(folder: Path) -> str:
    """SHA-256 of a text model's files and their relative paths."""
    sha = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            sha.update(f"{file.relative_to(folder).as_posix()} {digest}\n".encode())
    return sha.hexdigest()


def _vectors(source: str, names: list[str]) -> np.ndarray:
    """The vectors (C, D) of the names, one each."""
    read = [readable(name) for name in names]
    if source == "words":
        return _bags(read, **_WORDS)
    if source == "characters":
        return _bags(read, **_LETTERS)
    file = _file(source)
    if file is None:
        return _encode(source, [f"a photo of a {name}" for name in read])
    table = _read(file)
    lost = sorted(set(names) - set(table.index))
    if lost:
        raise ValueError(
            f"{file} has nothing on {len(lost)} of the classes, for instance {lost[0]!r}; add it"
        )
    table = table.loc[names]
    if "text" in table:
        return _bags(table["text"], **_WORDS)
    return table.to_numpy(float)


def _bags(texts: Sequence[str], **settings: Any) -> np.ndarray:
    """TF-IDF vectors (n, D) of texts; `settings` are those of scikit-learn's TfidfVectorizer."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(**settings).fit_transform(texts).toarray()


def is_missing(source: str) -> bool:
    """Whether `source` names a file that does not exist."""
    return source.endswith((".csv", ".npz")) and not paths.resolve(source).is_file()


def _file(source: str) -> Path | None:
    """The file that `source` names, or None."""
    file = paths.resolve(source)
    if is_missing(source):
        raise ValueError(f"texts = {source!r}: there is no file {file}")
    return file if file.is_file() else None


def _read(file: Path) -> "pd.DataFrame":
    """Read a table indexed by class name: a column `text`, or the numbers of an embedding."""
    import pandas as pd

    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                return pd.DataFrame(arrays["vectors"], arrays["names"], dtype=float)
        # Names such as 001 and NA are texts.
        table = pd.read_csv(file, dtype=str, keep_default_na=False).set_index("class_name")
        twice = table.index[table.index.duplicated()]
        if len(twice):
            raise ValueError(f"class {twice[0]!r} stands twice")
        if "text" in table:
            without = table.index[table["text"].str.strip() == ""]
            if len(without):
                raise ValueError(f"class {without[0]!r} has no text")
            return table
        return table.astype(float)
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(
            f"{file} is no table of texts or embeddings by class_name ({error})"
        ) from error


def _encode(source: str, texts: list[str]) -> np.ndarray:
    """Embed texts by a sentence-transformers model."""
    model = source
    folder = paths.resolve(source)
    if folder.is_dir():
        model = str(folder)
    try:
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(model).encode(texts)
    except Exception as error:
        # Not installed, unknown, damaged or no network: the libraries raise many kinds of errors.
        known = (
            f'"words", "characters", a .csv or .npz file, a sentence-transformers model ({INSTALL})'
        )
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"texts = {source!r} cannot be used ({reason}); known: {known}") from error
