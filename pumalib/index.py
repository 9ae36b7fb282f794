"""A folder of images as an index: searched by an image, and kept as the folder is.

index = FolderIndex(embedder.load(run_folder), "/data/photos", store="/data/photos-index")
print(index.update())
print(index.search("holiday/beach.jpg", 5))
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import faiss
import numpy as np
import pandas as pd
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from . import paths
from .data import check_known, folders
from .data.table import cache_name
from .embedder import Embedder
from .models import backbones
from .progress import bar

INDEX_FILE = "index.faiss"
TABLE_FILE = "files.csv"
# Images after which the index is written, at least: an interrupted update goes on from there.  As
# it grows it is written after a tenth of what it holds: writing stays a small part of the work.
PART = 1000
# The index that is built beside the exact one, by name, as faiss calls it for n vectors.
APPROXIMATE = {"ivf": "IVF{lists},Flat", "hnsw": "HNSW16,Flat"}
# How far they search: lists of the IVF, candidates of the graph.
PROBES = 32
CANDIDATES = 128
# Images that are compared with all others in one call.
BLOCK = 1000
# The columns of the table of files, and their types.
COLUMNS = {"path": str, "size": "int64", "mtime": "int64"}


def list_images(folder: Path) -> pd.DataFrame:
    """List the image files of a folder, at any depth, sorted by path.

    Columns: path (relative to `folder`), size (bytes) and mtime (ns).  Images are known by their
    extension; hidden files, and those in hidden folders, are left out.  Raises FileNotFoundError
    without the folder.  Raises ValueError where it holds no image: a disk that is not there should
    not be taken for a folder whose images have all gone.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    rows = []
    for file in folder.rglob("*"):
        path = file.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in path.parts)
        if is_hidden or file.suffix.lower() not in folders.EXTENSIONS:
            continue
        state = file.stat()
        rows.append((path.as_posix(), state.st_size, state.st_mtime_ns))
    if not rows:
        raise ValueError(f"{folder} holds no image at any depth ({', '.join(folders.EXTENSIONS)})")
    return pd.DataFrame(rows, columns=list(COLUMNS)).sort_values("path", ignore_index=True)


@dataclass(frozen=True)
class Counts:
    """How many images of a folder an update found in which state."""

    unchanged: int
    new: int
    changed: int
    gone: int
    unreadable: int


@dataclass(frozen=True)
class EmbeddedFiles:
    """What became of some files."""

    vectors: np.ndarray  # (n, dim), of length 1, of the files that could be read
    read: list[str]  # these files
    unreadable: dict[str, str]  # the others, and the kind of error


def default_store(folder: Path) -> Path:
    """Where the index of a folder is kept unless somebody says where: in `paths.CACHE`."""
    return paths.CACHE / "index" / cache_name(folder)


class FolderIndex:
    """The images of a folder, to be searched by cosine, kept on disk and up to date.

    `kind` "flat" searches exactly: it compares with every vector.  "ivf" and "hnsw" compare with a
    part of them, which misses some neighbours and pays beyond some 100,000 images; each update
    that has changed anything builds them anew from the exact index, which is kept all the same.

    Images are decoded by `workers` threads, 0: by none.  `store` is a folder for what is written,
    one for each folder of images.  In it each model has a folder of its own, named by a hash of
    its weights, settings and image transform, so that vectors of two models never meet.  Images
    are known by their path below `folder`, their size and their time of change: a folder that was
    moved with the times of its files keeps its index, as long as `store` is the same.

    `table` lists the images in the index: columns path, size (bytes) and mtime (ns), by a number
    that an image keeps until it changes.  What was written before is there at once; `update`
    brings it to the present state.
    """

    table: pd.DataFrame
    # An IndexIDMap2 of faiss, whose types do not know that it takes arrays.
    _vectors: Any
    # What is searched: the same, or an approximate index beside it.
    _searched: Any
    _next_number: int

    def __init__(
        self,
        embedder: Embedder,
        folder: str | Path,
        store: str | Path,
        *,
        kind: str = "flat",
        workers: int = 0,
    ):
        check_known("kind of index", [kind], ("flat", *APPROXIMATE))
        self.kind = kind
        self.workers = workers
        self.embedder = embedder
        # Photographs are turned as their EXIF data says, however the model was tested.
        turned = replace(embedder.run.data, upright=True)
        self._upright = Embedder(embedder.model, replace(embedder.run, data=turned))
        self.folder = paths.find(folder)
        self.store = paths.resolve(store) / _model_hash(embedder)
        self._read()

    def missing(self) -> pd.DataFrame:
        """The images that `update` would embed, as of `list_images`: new and changed ones."""
        now = list_images(self.folder)
        self._read()
        known = self.table.reset_index().merge(now)
        return now[~now["path"].isin(known["path"])]

    def update(self, embed: Callable[[pd.DataFrame], EmbeddedFiles] | None = None) -> Counts:
        """Bring the index to the present state of the folder.

        Only new and changed images are embedded; what is done is written after every 1,000 of
        them or, where it holds more, a tenth of these.  Prints the name of each image that cannot
        be read: it is not in the index, and is tried again by the next update.  `embed` takes rows
        of `list_images` and stands in for `embed_files`.  Raises FileNotFoundError and ValueError
        as of `list_images`, ValueError where no image can be read.
        """
        now = list_images(self.folder)
        self._read()
        known = self.table.reset_index().merge(now)["id"]
        stale = self.table.drop(known)
        if len(stale):
            self._remove(stale)

        missing = now[~now["path"].isin(self.table["path"])]
        embed = embed or self.embed_files
        unreadable: dict[str, str] = {}
        start = 0
        while start < len(missing):
            end = start + max(PART, len(self.table) // 10)
            files = missing.iloc[start:end]
            unreadable.update(self._add(files, embed(files)))
            start = end
        for path, why in unreadable.items():
            print(f"left out: {path} cannot be read as an image ({why})")
        if self.table.empty:
            raise ValueError(f"none of the images in {self.folder} can be read")
        self._build_approximate()

        changed = int(self.table["path"].isin(stale["path"]).sum())
        return Counts(
            unchanged=len(known),
            new=len(self.table) - len(known) - changed,
            changed=changed,
            gone=int((~stale["path"].isin(now["path"])).sum()),
            unreadable=len(unreadable),
        )

    def search(self, image: str | Path | Image.Image | np.ndarray, k: int = 7) -> pd.DataFrame:
        """Find the `k` images nearest to an image: columns path and cosine, most similar first.

        `image` is a file (its absolute path, or relative to the folder), a PIL image or an array
        (H, W, 3) uint8.  A file of the folder is left out of its own answer.  Raises ValueError
        where it cannot be read, or where the index is empty.
        """
        self._refuse_if_empty()
        # One more than asked for: the image itself may be among them.
        count = min(k + 1, len(self.table))
        cosines, numbers = self._searched.search(self._embed_query(image), count)
        # An approximate index may find fewer, and says -1.
        is_found = numbers[0] >= 0
        found = self.table.loc[numbers[0][is_found], ["path"]].assign(cosine=cosines[0][is_found])
        if isinstance(image, (str, Path)):
            file = self.folder / image
            found = found[[self.folder / path != file for path in found["path"]]]
        return found.head(k).reset_index(drop=True)

    def near_duplicates(self, threshold: float = 0.95) -> pd.DataFrame:
        """Find all pairs of images whose cosine is above `threshold`, most similar first.

        Columns: one and other, the two paths, and cosine.  Raises ValueError where the index is
        empty.
        """
        self._refuse_if_empty()
        numbers = self.table.index.to_numpy()
        vectors = self.vectors()
        parts = []
        for start in range(0, len(numbers), BLOCK):
            block = slice(start, start + BLOCK)
            ends, cosines, others = self._vectors.range_search(vectors[block], threshold)
            counts = np.diff(ends.astype(int))
            found = pd.DataFrame(
                {"one": np.repeat(numbers[block], counts), "other": others, "cosine": cosines}
            )
            # Each pair is found from both of its sides, and each image finds itself.
            parts.append(found[found["one"] < found["other"]])
        pairs = pd.concat(parts).sort_values("cosine", ascending=False, ignore_index=True)
        for side in ("one", "other"):
            pairs[side] = self.table["path"].loc[pairs[side]].to_numpy()
        return pairs

    def duplicate_groups(self, threshold: float = 0.95) -> pd.DataFrame:
        """Find groups of images that are joined by pairs whose cosine is above `threshold`.

        A row per image, the largest group first, in a group by path.  Columns: group (from 1), path
        and cosine, which is that to the nearest image of its group.  Two images of a group may be
        less alike than `threshold` where others lie between them.  Raises ValueError where the
        index is empty.
        """
        pairs = self.near_duplicates(threshold)
        both_ways = pd.concat([pairs, pairs.rename(columns={"one": "other", "other": "one"})])
        nearest = both_ways.groupby("one")["cosine"].max()
        place = pd.Series(range(len(nearest)), nearest.index)
        edges = (place[pairs["one"]], place[pairs["other"]])
        links = coo_array((np.ones(len(pairs)), edges), shape=(len(nearest), len(nearest)))
        _, component = connected_components(links, directed=False)

        images = pd.DataFrame(
            {"component": component, "path": nearest.index, "cosine": nearest.to_numpy()}
        )
        images["size"] = images.groupby("component")["path"].transform("size")
        images["first"] = images.groupby("component")["path"].transform("min")
        images = images.sort_values(
            ["size", "first", "path"], ascending=[False, True, True], ignore_index=True
        )
        images["group"] = pd.factorize(images["component"])[0] + 1
        return images[["group", "path", "cosine"]]

    def likely_wrong_labels(self, k: int = 5) -> pd.DataFrame:
        """Find images that lie in one folder and look like those of another, the surest first.

        The label of an image is its folder.  Its `k` nearest images vote, exactly: it is listed
        where more than half of them lie in one other folder.  Images of a folder too small to win
        that vote (less than k / 2 others in it) are not judged, and those in no folder neither are
        nor vote.  Columns: path, label, suggested (the other folder), votes (for it) and of (how
        many voted).  Raises ValueError where the index is empty or `k` is less than 1.
        """
        if k < 1:
            raise ValueError(f"k = {k}; it must be a whole number of at least 1")
        self._refuse_if_empty()
        folder = self.table["path"].map(lambda path: PurePosixPath(path).parent.as_posix())
        is_labelled = (folder != ".").to_numpy()
        names = self.table["path"][is_labelled].to_numpy()
        labels = folder[is_labelled].to_numpy()
        columns = ["path", "label", "suggested", "votes", "of"]
        voters = min(k, len(labels) - 1)
        if voters < 1:
            return pd.DataFrame(columns=columns)

        neighbours = _nearest(self.vectors()[is_labelled], voters)
        others = pd.Series(labels).groupby(labels).transform("size").to_numpy() - 1
        rows = []
        for place in np.flatnonzero(others > voters / 2):
            suggested, votes = Counter(labels[neighbours[place]]).most_common(1)[0]
            if suggested != labels[place] and votes > voters / 2:
                rows.append((names[place], labels[place], suggested, votes, voters))
        found = pd.DataFrame(rows, columns=columns)
        return found.sort_values(["votes", "path"], ascending=[False, True], ignore_index=True)

    def vectors(self) -> np.ndarray:
        """Get the embeddings of all images, (n, dim) float32 of length 1, as ordered in `table`."""
        # A tensor where faiss.contrib.torch_utils, as of pytorch-metric-learning, is imported.
        stored = np.asarray(self._vectors.index.reconstruct_n(0, self._vectors.ntotal))
        places = pd.Index(faiss.vector_to_array(self._vectors.id_map)).get_indexer(self.table.index)
        return stored[places]

    def write_vectors(self, file: Path) -> None:
        """Write the embeddings into a file of numpy, by path: `numpy.load(file)`.

        It holds `vectors` (n, dim) float32, of length 1, and `paths` (n,), relative to the folder.
        """
        places = np.argsort(self.table["path"].to_numpy(dtype=str))
        names = self.table["path"].to_numpy(dtype=str)[places]
        with paths.written_whole(file) as temporary, temporary.open("wb") as opened:
            np.savez(opened, vectors=self.vectors()[places], paths=names)

    # ---- embedding

    def embed_files(self, files: pd.DataFrame) -> EmbeddedFiles:
        """Embed images of the folder, rows of `list_images`, and change nothing."""
        return self._embed(files["path"])

    def _embed(self, files: Iterable[str]) -> EmbeddedFiles:
        """Embed files of the folder, turned as their EXIF data says."""
        names = list(files)
        # Read a batch at a time: a folder need not fit into memory.
        given = bar([self.folder / name for name in names], desc="embedding", unit="image", delay=1)
        embedded = self._upright.embed_readable(given, progress=False, workers=self.workers)
        # Of vectors of length 1 the inner product is the cosine.
        faiss.normalize_L2(embedded.vectors)
        read = [names[place] for place in embedded.places]
        unreadable = {names[place]: why for place, why in embedded.unreadable.items()}
        return EmbeddedFiles(embedded.vectors, read, unreadable)

    def _embed_query(self, image: str | Path | Image.Image | np.ndarray) -> np.ndarray:
        """Embed one image: (1, dim), of length 1."""
        if isinstance(image, (str, Path)):
            embedded = self._embed([os.fspath(image)])
            if embedded.unreadable:
                (why,) = embedded.unreadable.values()
                raise ValueError(f"{image} cannot be read as an image ({why})")
            return embedded.vectors
        vector = self._upright.embed([image], progress=False)
        faiss.normalize_L2(vector)
        return vector

    def _refuse_if_empty(self) -> None:
        if self.table.empty:
            raise ValueError(f"{self.store} holds no image yet: call update() first")

    # ---- what is in the index, and on disk

    def _add(self, files: pd.DataFrame, embedded: EmbeddedFiles) -> dict[str, str]:
        """Take in new files and write the index; return those that cannot be read, and why."""
        last = self._next_number + len(embedded.read)
        numbers = pd.RangeIndex(self._next_number, last, name="id")
        self._vectors.add_with_ids(embedded.vectors, numbers.to_numpy())
        added = files[files["path"].isin(embedded.read)].set_index(numbers)
        self.table = pd.concat([self.table, added])
        self._next_number = last
        self._write()
        return embedded.unreadable

    def _remove(self, files: pd.DataFrame) -> None:
        """Take files of the table out of the index and write it."""
        self._vectors.remove_ids(files.index.to_numpy())
        self.table = self.table.drop(files.index)
        self._write()

    def _build_approximate(self) -> None:
        """Build and write the approximate index of this kind, unless that of these images is there.

        Its numbers are those of the table; a set of other numbers belongs to an earlier state.
        """
        if self.kind == "flat" or self._searched is not self._vectors:
            return
        count = len(self.table)
        factory = APPROXIMATE[self.kind].format(lists=max(1, round(count**0.5)))
        built = faiss.index_factory(
            self.embedder.model.dim, f"IDMap2,{factory}", faiss.METRIC_INNER_PRODUCT
        )
        vectors = self.vectors()
        built.train(vectors)
        built.add_with_ids(vectors, self.table.index.to_numpy())
        _write_faiss(built, self._approximate_file)
        self._searched = _with_breadth(built)

    @property
    def _approximate_file(self) -> Path:
        return self.store / f"{self.kind}.faiss"

    def _find_approximate(self) -> Any:
        """The approximate index of this kind, where that of these images is there; else None."""
        if self.kind == "flat" or not self._approximate_file.is_file():
            return None
        found: Any = faiss.read_index(str(self._approximate_file))
        numbers = faiss.vector_to_array(found.id_map)
        if np.array_equal(np.sort(numbers), np.sort(self.table.index.to_numpy())):
            return _with_breadth(found)
        return None

    def _write(self) -> None:
        """Write vectors and table, each whole.

        Should the machine stop between the two, `_read` drops what is in only one of them.
        """
        self._searched = self._vectors
        _write_faiss(self._vectors, self.store / INDEX_FILE)
        with paths.written_whole(self.store / TABLE_FILE) as temporary:
            self.table.to_csv(temporary)

    def _read(self) -> None:
        """Take what stands in both files of the store, or nothing where they were never written."""
        if not (self.store / TABLE_FILE).is_file():
            self._vectors = faiss.IndexIDMap2(faiss.IndexFlatIP(self.embedder.model.dim))
            self._searched = self._vectors
            self.table = pd.DataFrame(columns=list(COLUMNS)).astype(COLUMNS).rename_axis("id")
            self._next_number = 0
            return
        vectors: Any = faiss.read_index(str(self.store / INDEX_FILE))
        table = pd.read_csv(
            self.store / TABLE_FILE, index_col="id", dtype={"id": "int64", **COLUMNS}
        )
        numbers = faiss.vector_to_array(vectors.id_map)
        # A number that stood in either of them is not given again.
        self._next_number = 1 + max([-1, *numbers.tolist(), *table.index.tolist()])
        vectors.remove_ids(np.setdiff1d(numbers, table.index))
        self._vectors = vectors
        self.table = table[table.index.isin(numbers)]
        self._searched = self._find_approximate() or self._vectors


def _nearest(vectors: np.ndarray, k: int) -> np.ndarray:
    """The places (n, k) of the vectors of largest cosine to each of `vectors`, itself apart."""
    everything = faiss.IndexFlatIP(vectors.shape[1])
    everything.add(vectors)
    parts = []
    for start in bar(range(0, len(vectors), BLOCK), desc="comparing", unit="block", delay=1):
        block = vectors[start : start + BLOCK]
        _, places = everything.search(block, k + 1)
        itself = np.arange(start, start + len(block))[:, None]
        # Among many copies of an image it may not be found itself: then the last one goes.
        is_itself = places == itself
        is_itself[~is_itself.any(axis=1), -1] = True
        parts.append(places[~is_itself].reshape(len(block), k))
    return np.concatenate(parts)


def _write_faiss(index: Any, file: Path) -> None:
    with paths.written_whole(file) as temporary, temporary.open("wb") as opened:
        # By Python's file: given a path, faiss does not notice that the last bytes of an index did
        # not fit on the disk.
        writer = faiss.PyCallbackIOWriter(opened.write)  # type: ignore[attr-defined]
        faiss.write_index(index, writer)


def _with_breadth(index: Any) -> Any:
    """An approximate index that searches as far as is said above."""
    inner: Any = faiss.downcast_index(index.index)
    if isinstance(inner, faiss.IndexIVF):
        inner.nprobe = PROBES
    else:
        inner.hnsw.efSearch = CANDIDATES
    return index


def _model_hash(embedder: Embedder) -> str:
    """A hash of what changes the vector of an image: weights, settings and image transform.

    Where images lay that the model was trained on does not change it (`config.Run.identity`).
    """
    weights = backbones.state_digest(embedder.model.state_dict())
    normalisation = [list(embedder.view.mean), list(embedder.view.std)]
    return embedder.run.identity("", weights, {"normalisation": normalisation})
