"""A folder of images as a search index on disk, which `update` brings up to date.

index = FolderIndex(embedder.load(run_folder), "/data/photos", store="/data/photos-index")
print(index.update())
print(index.search("holiday/beach.jpg", 5))
"""

import hashlib
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import faiss
import numpy as np
import pandas as pd
from filelock import FileLock, Timeout
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from . import paths
from .data import check_known, folders
from .data.table import cache_name
from .embedder import Embedder
from .models import backbones
from .progress import bar

# File names and vectors are in one file, written whole, so that they always match.
INDEX_FILE = "index.npz"
# Held by the process that updates.
LOCK_FILE = "index.lock"
# Files of earlier versions, which could give a number twice: they are not read.
OLD_FILES = ("index.faiss", "files.csv", "ivf.faiss", "hnsw.faiss")
# The least seconds between two writes of the index during an update.  If a write takes long, the
# pause is ten times as long, so that writing stays a small part of the work.
SECONDS = 30
WRITING_SHARE = 10
# The approximate indexes by name, with their faiss factory string.
APPROXIMATE = {"ivf": "IVF{lists},Flat", "hnsw": "HNSW16,Flat"}
# How many lists of the IVF, and candidates of the graph, they search.
PROBES = 32
CANDIDATES = 128
# Images compared with all others in one call.
BLOCK = 1000
# The columns of the table of files, and their types.
COLUMNS = {"path": str, "size": "int64", "mtime": "int64", "inode": "uint64"}


def list_images(folder: Path) -> pd.DataFrame:
    """List the image files in a folder and its subfolders, sorted by path.

    Columns: path (relative to `folder`), size (bytes), mtime (ns) and inode.  `data.folders.walk`
    decides which files are images.  Raises FileNotFoundError without the folder, ValueError where
    it holds no image: an unmounted disk should not look like a folder whose images are all
    deleted.
    """
    return _listed(folder, folders.LeftOut())


def _listed(folder: Path, left_out: folders.LeftOut) -> pd.DataFrame:
    """`list_images`; adds files that look like images and are not used to `left_out`."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    rows = []
    for path, state in folders.walk(folder, left_out):
        # Images from one archive may have the same size and time: if two swap names, only the inode
        # shows it.
        rows.append((path, state.st_size, state.st_mtime_ns, state.st_ino))
    if not rows:
        what = f"{folder} holds no image at any depth ({', '.join(folders.EXTENSIONS)})"
        raise ValueError("; ".join([what, *left_out.lines()]))
    found = pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)
    return found.sort_values("path", ignore_index=True)


@dataclass(frozen=True)
class Counts:
    """The number of images that an update found in each state."""

    unchanged: int
    new: int
    changed: int
    gone: int
    unreadable: int


@dataclass(frozen=True)
class EmbeddedFiles:
    """Embeddings of the readable files, and why the others could not be read."""

    vectors: np.ndarray  # (n, dim), of length 1, of the readable files
    read: list[str]  # the paths of these files
    unreadable: dict[str, str]  # the reason for each other file, by path


# A function that embeds rows of `list_images`, part by part.
EmbedFiles = Callable[[pd.DataFrame], Iterable[EmbeddedFiles]]


def default_store(folder: Path) -> Path:
    """The default place of a folder's index, in `paths.CACHE`."""
    return paths.CACHE / "index" / cache_name(folder)


class FolderIndex:
    """An index on disk of a folder's images, for search by cosine.

    `kind` "flat" is exact: it compares with every vector.  "ivf" and "hnsw" compare with some of
    them, which misses some neighbours and pays beyond some 100,000 images; an update that changes
    anything builds them again from the exact index, which always exists.

    `workers` threads decode images; 0: no threads.  `store` is the folder of the index, one for
    each folder of images.  In it each model has a subfolder, named by a hash of its weights,
    settings and image transform, so that vectors of two models never mix.  An image is identified
    by its path below `folder`, size, modification time and inode: a renamed folder has the same
    index if `store` is the same, a copied folder is embedded again.

    `table` lists the images in the index, with the columns of `list_images`, by a number that
    stays the same until the image changes.  An index on disk is loaded at once; `update` brings it
    up to date.  Only one update writes at a time: a second waits for the first, and says so.
    """

    table: pd.DataFrame
    # A faiss.IndexIDMap2: its type hints do not allow arrays.
    _vectors: Any
    # The index that `search` uses: the same, or an approximate one.
    _searched: Any
    # The next free number, never given before.
    _next_number: int
    # Whether there are changes that are not yet on disk.
    _is_changed: bool

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
        self.folder = paths.find(folder)
        self.store = paths.resolve(store) / _model_hash(embedder)
        self._read()

    def missing(self) -> pd.DataFrame:
        """The new and changed images, which `update` would embed, as rows of `list_images`."""
        now = list_images(self.folder)
        self._read()
        known = self.table.reset_index().merge(now)
        return now[~now["path"].isin(known["path"])]

    def update(self, embed: EmbedFiles | None = None) -> Counts:
        """Update the index to the folder's present images, and count them by state.

        Only new and changed images are embedded.  The index is written every half minute and on an
        interrupt, so that the next update goes on from there.  Prints how many files
        `data.folders.walk` leaves out, and the name of each unreadable image: it is not in the
        index, and the next update tries it again.  `embed`, a function of rows of `list_images`,
        replaces `embed_files`.  Raises the errors of `list_images`, and ValueError if no image can
        be read.
        """
        with self._only_writer():
            return self._update(embed or self.embed_files)

    @contextmanager
    def _only_writer(self) -> Iterator[None]:
        """Hold the lock of the store; if another process holds it, say so and wait."""
        self.store.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.store / LOCK_FILE)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"waiting for another process that updates this index, {self.store}")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _update(self, embed: EmbedFiles) -> Counts:
        left_out = folders.LeftOut()
        now = _listed(self.folder, left_out)
        for line in left_out.lines():
            print(line)
        self._read()
        known = self.table.reset_index().merge(now)["id"]
        stale = self.table.drop(known)
        missing = now[~now["path"].isin(self.table["path"].loc[known])]
        unreadable: dict[str, str] = {}
        try:
            if len(stale):
                self._remove(stale)
            if len(missing):
                self._add_all(missing, embed, unreadable)
        except BaseException:
            self._write()
            # Back to the state on disk: a step may have been interrupted half-way.
            self._read()
            raise
        if self._is_changed:
            self._write()
        for path, why in unreadable.items():
            name = paths.printable(path)
            print(f"left out: {name} cannot be read as an image ({why})")
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

    def _add_all(self, missing: pd.DataFrame, embed: EmbedFiles, unreadable: dict) -> None:
        """Embed the missing files, add them, and write the index now and then."""
        rows = missing.set_index("path")
        pause: float = SECONDS
        written = time.monotonic()
        for part in embed(missing):
            self._add(rows, part)
            unreadable.update(part.unreadable)
            begun = time.monotonic()
            if begun - written >= pause:
                self._write()
                written = time.monotonic()
                pause = max(SECONDS, WRITING_SHARE * (written - begun))

    def search(self, image: str | Path | Image.Image | np.ndarray, k: int = 7) -> pd.DataFrame:
        """Find the `k` images nearest to an image: columns path and cosine, most similar first.

        `image` is a file (its absolute path, or relative to the folder), a PIL image or an array
        (H, W, 3) uint8.  A file of the folder does not find itself.  Raises ValueError if the
        image cannot be read or the index is empty.
        """
        self._refuse_if_empty()
        # One more than needed: the image itself may be among them.
        count = min(k + 1, len(self.table))
        cosines, numbers = self._searched.search(self._embed_query(image), count)
        # An approximate index may find fewer, and fills up with -1.
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
        """Find groups of images that are connected by pairs whose cosine is above `threshold`.

        A row per image, the largest group first, sorted by path within a group.  Columns: group
        (from 1), path, and cosine (to the nearest image of its group).  Two images of a group may
        have a lower cosine if other images connect them.  Raises ValueError where the index is
        empty.
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
        """Find images that look like the images of another folder, those with the most votes first.

        The label of an image is its folder.  Its `k` nearest images, by exact search, vote with
        their labels: it is listed if more than half of them are in one other folder.  An image
        whose folder is too small to win a vote (at most k / 2 others in it) is not judged; an image
        in no folder is not judged and has no vote; a warning counts both.  Columns: path, label,
        suggested (the other folder), votes (for it) and of (the number of voters).  Raises
        ValueError where the index is empty or `k` is less than 1.
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
        is_judged = others > voters / 2
        unjudged = len(self.table) - np.count_nonzero(is_judged)
        if unjudged:
            why = f"no folder, or one with at most {voters // 2} others; a lower k judges more"
            warnings.warn(f"{unjudged:,} images are not judged: they lie in {why}", stacklevel=2)
        rows = []
        for place in np.flatnonzero(is_judged):
            suggested, votes = Counter(labels[neighbours[place]]).most_common(1)[0]
            if suggested != labels[place] and votes > voters / 2:
                rows.append((names[place], labels[place], suggested, votes, voters))
        found = pd.DataFrame(rows, columns=columns)
        return found.sort_values(["votes", "path"], ascending=[False, True], ignore_index=True)

    def vectors(self) -> np.ndarray:
        """The embeddings of all images, (n, dim) float32 of length 1, in the order of `table`."""
        # It is a tensor if somebody, such as pytorch-metric-learning, imported
        # faiss.contrib.torch_utils.
        stored = np.asarray(self._vectors.index.reconstruct_n(0, self._vectors.ntotal))
        places = pd.Index(faiss.vector_to_array(self._vectors.id_map)).get_indexer(self.table.index)
        return stored[places]

    def write_vectors(self, file: str | Path) -> None:
        """Write the embeddings, sorted by path, into a NumPy file for `numpy.load(file)`.

        A relative `file` is one of the project's folder.

        It holds `vectors` (n, dim) float32, of length 1, and `paths` (n,), relative to the folder.
        """
        places = np.argsort(self.table["path"].to_numpy(dtype=str))
        names = self.table["path"].to_numpy(dtype=str)[places]
        whole = paths.written_whole(paths.resolve(file))
        with whole as temporary, temporary.open("wb") as opened:
            np.savez(opened, vectors=self.vectors()[places], paths=names)

    # ---- embedding

    def embed_files(self, files: pd.DataFrame) -> Iterator[EmbeddedFiles]:
        """Embed `files`, rows of `list_images`, batch by batch; the index does not change."""
        names = files["path"].tolist()
        # Images are read batch by batch: a folder need not fit into memory.
        given = bar([self.folder / name for name in names], desc="embedding", unit="image", delay=1)
        for part in self.embedder.embed_parts(given, workers=self.workers):
            # The inner product of vectors of length 1 is their cosine.
            faiss.normalize_L2(part.vectors)
            read = [names[place] for place in part.places]
            unreadable = {names[place]: why for place, why in part.unreadable.items()}
            yield EmbeddedFiles(part.vectors, read, unreadable)

    def _embed_query(self, image: str | Path | Image.Image | np.ndarray) -> np.ndarray:
        """Embed one image: (1, dim), of length 1."""
        given = self.folder / image if isinstance(image, (str, Path)) else image
        found = self.embedder.embed_readable([given], progress=False)
        for why in found.unreadable.values():
            raise ValueError(f"{image} cannot be read as an image ({why})")
        faiss.normalize_L2(found.vectors)
        return found.vectors

    def _refuse_if_empty(self) -> None:
        if self.table.empty:
            raise ValueError(f"{self.store} holds no image yet: call update() first")

    # ---- the contents of the index, in memory and on disk

    # A step may be interrupted anywhere: at every moment each file of the table has its vector, and
    # no number is used twice.

    def _add(self, files: pd.DataFrame, embedded: EmbeddedFiles) -> None:
        """Add the embedded files; `files` has their rows by path."""
        self._is_changed = True
        first = self._next_number
        self._next_number = first + len(embedded.read)
        numbers = pd.RangeIndex(first, self._next_number, name="id")
        added = files.loc[embedded.read].reset_index().set_index(numbers)
        self._vectors.add_with_ids(embedded.vectors, numbers.to_numpy())
        self.table = pd.concat([self.table, added])
        self._searched = self._vectors

    def _remove(self, files: pd.DataFrame) -> None:
        """Remove these rows of the table from the index."""
        self._is_changed = True
        self.table = self.table.drop(files.index)
        self._vectors.remove_ids(files.index.to_numpy())
        self._searched = self._vectors

    def _build_approximate(self) -> None:
        """Build and write the approximate index of this kind, unless it is up to date.

        Its file has a digest of the vectors and numbers that it was built from.
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
        _write_arrays(
            self._approximate_file,
            built_from=np.array(self._digest()),
            index=faiss.serialize_index(built),
        )
        self._searched = _with_breadth(built)

    @property
    def _approximate_file(self) -> Path:
        return self.store / f"{self.kind}.npz"

    def _find_approximate(self) -> Any:
        """The approximate index of this kind, if it was built from these vectors; else None."""
        if self.kind == "flat":
            return None
        arrays = _read_arrays(self._approximate_file)
        if arrays is None or str(arrays.get("built_from")) != self._digest():
            return None
        return _with_breadth(faiss.deserialize_index(arrays["index"]))

    def _digest(self) -> str:
        """A digest of the vectors and their numbers."""
        digest = hashlib.sha256(self.table.index.to_numpy(np.int64).tobytes())
        digest.update(self.vectors().tobytes())
        return digest.hexdigest()

    def _write(self) -> None:
        """Write the table and the vectors as one file."""
        table = self.table
        files = json.dumps({"number": table.index.tolist(), **table.to_dict("list")})
        _write_arrays(
            self.store / INDEX_FILE,
            vectors=self.vectors(),
            files=np.frombuffer(files.encode(), np.uint8),
            next_number=np.array(self._next_number),
        )
        self._is_changed = False
        for name in OLD_FILES:
            (self.store / name).unlink(missing_ok=True)

    def _read(self) -> None:
        """Read the index from the store; it is empty if the file is missing or damaged."""
        arrays = _read_arrays(self.store / INDEX_FILE) or {}
        files = json.loads(bytes(arrays["files"])) if arrays else {"number": [], "path": []}
        numbers = pd.Index(files.pop("number"), dtype="int64", name="id")
        self.table = pd.DataFrame(files, columns=list(COLUMNS)).astype(COLUMNS).set_index(numbers)
        dim = self.embedder.model.dim
        self._vectors = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
        if arrays:
            self._vectors.add_with_ids(arrays["vectors"], numbers.to_numpy())
        self._next_number = int(arrays.get("next_number", 0))
        self._is_changed = False
        self._searched = self._vectors
        self._searched = self._find_approximate() or self._vectors


def _nearest(vectors: np.ndarray, k: int) -> np.ndarray:
    """The places (n, k) of the `k` other vectors with the largest cosine to each vector."""
    everything = faiss.IndexFlatIP(vectors.shape[1])
    everything.add(vectors)
    parts = []
    for start in bar(range(0, len(vectors), BLOCK), desc="comparing", unit="block", delay=1):
        block = vectors[start : start + BLOCK]
        _, places = everything.search(block, k + 1)
        itself = np.arange(start, start + len(block))[:, None]
        # An image with many copies may not find itself: then its last neighbour is dropped.
        is_itself = places == itself
        is_itself[~is_itself.any(axis=1), -1] = True
        parts.append(places[~is_itself].reshape(len(block), k))
    return np.concatenate(parts)


def _write_arrays(file: Path, **arrays: np.ndarray) -> None:
    # Through Python's file: given a path, faiss does not notice a disk that is full at the last
    # bytes.
    with paths.written_whole(file) as temporary, temporary.open("wb") as opened:
        np.savez(opened, **arrays)  # type: ignore[arg-type]


def _read_arrays(file: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a file; None if it is missing or, with a warning, if it is damaged.

    NumPy writes a checksum of each array and checks it.
    """
    try:
        with np.load(file) as opened:
            return dict(opened)
    except FileNotFoundError:
        return None
    except PermissionError:
        raise
    # A damaged archive raises nearly anything.
    except Exception as error:
        warnings.warn(f"{file} is damaged ({error}) and made anew", stacklevel=2)
        return None


def _with_breadth(index: Any) -> Any:
    """Set how far an approximate index searches: `PROBES` or `CANDIDATES`."""
    inner: Any = faiss.downcast_index(index.index)
    if isinstance(inner, faiss.IndexIVF):
        inner.nprobe = PROBES
    else:
        inner.hnsw.efSearch = CANDIDATES
    return index


def _model_hash(embedder: Embedder) -> str:
    """A hash of all that determines an image's vector: weights, settings and image transform.

    The folder of the training images does not change it (`config.Run.fingerprint`).
    """
    weights = backbones.state_digest(embedder.model.state_dict())
    view = embedder.view
    of_view: dict[str, Any] = {"normalisation": [list(view.mean), list(view.std)]}
    if view.settings.resize == "timm":
        # They are the installed timm's.
        of_view["crop"] = [view.crop_share, view.crop_mode, view.interpolation]
    return embedder.run.fingerprint("", weights, of_view)
