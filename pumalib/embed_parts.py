"""Embed a folder on the workers of a Dask cluster: each a part of it, then all into one index.

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

# Images of a part: minutes of a worker's time, which is what a lost one costs.
PART = 2000
# In the index's own folder, until all are taken in.
PARTS = "parts"


@dataclass(frozen=True)
class Source:
    """Where a worker finds the model: as `embedder.named` takes it, folders and files in full."""

    model: str
    pretrained: str | None = None


def update(index: FolderIndex, source: Source, address: str) -> Counts:
    """As `index.update`, but what is new or changed is embedded by workers.

    `address` is the scheduler's or its scheduler file.  Parts that are finished are kept where it
    is stopped: the same call goes on.  Raises as `index.update` and `cluster.run_each`.
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


def embed_part(  # noqa: PLR0917 - all that a worker is told
    source: Source,
    folder: str,
    store: str,
    model_hash: str,
    workers: int,
    part: pd.DataFrame,
    file: str,
) -> None:
    """Runs on a worker: embed some images of the folder into a file of numpy, written whole.

    Raises ValueError where the worker's model is another than the client's.
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
            # In the order of the vectors, which is that of the part.
            files=json.dumps(done.to_dict("list")),
            unreadable=json.dumps(embedded.unreadable),
        )


@functools.lru_cache(maxsize=1)
def _model(source: Source) -> embedder.Embedder:
    """The model, which a worker loads once."""
    device = training.choose_device("auto")
    return embedder.named(source.model, source.pretrained, device)


def _digest(part: pd.DataFrame) -> str:
    """What tells parts apart: the names, sizes and times of change of their files."""
    return hashlib.sha256(part.to_csv(index=False).encode()).hexdigest()[:16]


class _Stored:
    """What workers have written, a part at a time in memory."""

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
        self.files = pd.concat(lines, ignore_index=True) if lines else empty

    def take(self, wanted: pd.DataFrame) -> Iterator[EmbeddedFiles]:
        """The vectors of files as they are now, in parts."""
        for start in range(0, len(wanted), PART):
            yield self._take(wanted.iloc[start : start + PART])

    def _take(self, wanted: pd.DataFrame) -> EmbeddedFiles:
        """A part of `take`; what has changed since is embedded here."""
        found = wanted.merge(self.files, how="left", on=list(COLUMNS))
        was_read = found["file"].notna().to_numpy()
        is_left = found["path"].isin(self.unreadable).to_numpy() & ~was_read
        again = wanted[~was_read & ~is_left]

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
    """Several in one."""
    unreadable: dict[str, str] = {}
    read = []
    for part in parts:
        unreadable |= part.unreadable
        read += part.read
    # One without rows, should there be no part.
    vectors = np.concatenate([np.zeros((0, dim), np.float32), *[part.vectors for part in parts]])
    return EmbeddedFiles(vectors, read, unreadable)
