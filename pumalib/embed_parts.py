"""Embed a folder on the workers of a Dask cluster, part by part, and merge the parts in one index.

All machines must see the folder of images, the model and the index's store under the same paths.
"""

import functools
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from . import cluster, embedder, paths, training
from .index import COLUMNS, Counts, EmbeddedFiles, FolderIndex

# Images per part: a few minutes' work, which is all that a lost worker costs.
PART = 2000
# The folder of finished parts, in the index's own, until they are merged.
PARTS = "parts"


@dataclass(frozen=True)
class Source:
    """The model for a worker: arguments of `embedder.named`, with full paths."""

    model: str
    pretrained: str | None = None


def update(index: FolderIndex, source: Source, address: str) -> Counts:
    """Update an index like `index.update`, but let workers embed the new and changed images.

    `address` is the scheduler's address or its scheduler file.  If it is stopped, finished parts
    stay on disk and the same call goes on.  Raises as `index.update` and `cluster.run_each`.
    """
    place = index.store / PARTS
    missing = index.missing()
    parts = [missing.iloc[start : start + PART] for start in range(0, len(missing), PART)]
    items = {}
    for part in parts:
        file = place / f"{_digest(part)}.npz"
        if not file.is_file():
            name = f"{file.stem}-{len(part)}-images"
            arguments = (source, str(index.folder), str(index.store.parent))
            items[name] = (*arguments, index.store.name, index.workers, part, str(file))
    if items:
        cluster.run_each(embed_part, items, address, place, unit="part")
    counts = index.update(_Stored(index, place).take)
    shutil.rmtree(place, ignore_errors=True)
    return counts


def embed_part(  # noqa: PLR0917 - all that a worker needs
    source: Source,
    folder: str,
    store: str,
    model_hash: str,
    workers: int,
    part: pd.DataFrame,
    file: str,
) -> None:
    """On a worker: embed some images of the folder and write them to a NumPy file.

    Raises ValueError if the worker's model is not the client's.
    """
    model = _model(source)
    index = FolderIndex(model, folder, store, workers=workers)
    if index.store.name != model_hash:
        raise ValueError(
            f"the worker's model {source.model!r} is another than the client's: "
            "give all machines the same weights and the same version of timm"
        )
    embedded = _joined(list(index.embed_files(part)), model.model.dim)
    done = part[part["path"].isin(embedded.read)]
    with paths.written_whole(Path(file)) as temporary, temporary.open("wb") as opened:
        np.savez(
            opened,
            vectors=embedded.vectors,
            # In the order of the part, like the vectors.
            files=json.dumps(done.to_dict("list")),
            unreadable=json.dumps(embedded.unreadable),
        )


@functools.lru_cache(maxsize=1)
def _model(source: Source) -> embedder.Embedder:
    """The model; a worker loads it once."""
    device = training.choose_device("auto")
    return embedder.named(source.model, source.pretrained, device)


def _digest(part: pd.DataFrame) -> str:
    """A digest of the names, sizes and modification times of a part's files."""
    return hashlib.sha256(part.to_csv(index=False).encode()).hexdigest()[:16]


class _Stored:
    """The parts that workers have written; only one at a time is in memory."""

    def __init__(self, index: FolderIndex, place: Path):
        self.index = index
        lines = []
        self.unreadable: dict[str, str] = {}
        for file in sorted(place.glob("*.npz")):
            with np.load(file) as part:
                table = pd.DataFrame(json.loads(str(part["files"])), columns=list(COLUMNS))
                self.unreadable |= json.loads(str(part["unreadable"]))
            lines.append(table.assign(file=str(file), row=np.arange(len(table))))
        empty = pd.DataFrame(columns=[*COLUMNS, "file", "row"])
        stored = pd.concat(lines, ignore_index=True) if lines else empty
        # Parts overlap if files came between two calls.
        self.files = stored.drop_duplicates(list(COLUMNS), ignore_index=True)

    def take(self, files: pd.DataFrame) -> Iterator[EmbeddedFiles]:
        """Yield the vectors of files in their present state, part by part."""
        for start in range(0, len(files), PART):
            yield self._take(files.iloc[start : start + PART])

    def _take(self, files: pd.DataFrame) -> EmbeddedFiles:
        """One part of `take`; files that have changed since are embedded here."""
        found = files.merge(self.files, how="left", on=list(COLUMNS))
        was_read = found["file"].notna().to_numpy()
        is_left = found["path"].isin(self.unreadable).to_numpy() & ~was_read
        again = files[~was_read & ~is_left]

        dim = self.index.embedder.model.dim
        here = list(self.index.embed_files(again)) if len(again) else []
        vectors = np.zeros((int(was_read.sum()), dim), np.float32)
        taken = found[was_read].reset_index(drop=True)
        for file, rows in taken.groupby("file"):
            with np.load(str(file)) as part:
                vectors[rows.index] = part["vectors"][rows["row"].astype(int)]
        unreadable = {path: self.unreadable[path] for path in found["path"][is_left]}
        stored = EmbeddedFiles(vectors, taken["path"].tolist(), unreadable)
        return _joined([stored, *here], dim)


def _joined(parts: list[EmbeddedFiles], dim: int) -> EmbeddedFiles:
    """Merge the parts into one, in their order."""
    unreadable: dict[str, str] = {}
    read = []
    for part in parts:
        unreadable |= part.unreadable
        read += part.read
    # An array without rows, in case there is no part.
    vectors = np.concatenate([np.zeros((0, dim), np.float32), *[part.vectors for part in parts]])
    return EmbeddedFiles(vectors, read, unreadable)
