"""From the table to batches: which images form a batch, and the processes that decode them.

Order and augmentation depend on (seed, epoch, place) alone: neither the number of processes nor the
batch that a training resumes at changes them.
"""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, tee
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from .images import ImageError, View, decode, normalise, pixels
from .table import Benchmark

# Keep the random streams apart.
_ORDER = 1
_AUGMENT = 2
_SHOTS = 3
# Images that a worker process decodes at a time, so that all of them share a batch.
_CHUNK = 64
# Batches that a thread collects from the worker processes while a GPU trains.
_AHEAD = 2
# What helps where an image of a benchmark cannot be read.
REMEDY = (
    "replace it, or leave such images out by drop_unreadable (-p drop_unreadable=true); "
    "`python -m pumalib data verify --benchmark <its name> --root <its folder>` lists all such"
)
# Decoded images of at most this many pixels stay in memory, and at most this many (1 GB in all).
_SMALL_PIXELS = 128 * 128
_SMALL_COUNT = 20_000
_small: dict[tuple[str, bool, int], Image.Image] = {}


# ---- which images form a batch


def random_batches(count: int, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Cut a fresh permutation of `range(count)` into batches.

    An incomplete last batch is dropped unless it is the only one.
    """
    order = np.random.default_rng((_ORDER, seed, epoch)).permutation(count)
    last_start = max(1, count - batch_size + 1)
    return [order[start : start + batch_size] for start in range(0, last_start, batch_size)]


def class_sizes(batch_size: int, images_per_class: int) -> tuple[int, int]:
    """The number of classes in a batch of the pair-based losses, and of images per class.

    Raises ValueError where two classes do not fit into `batch_size`: with one there is no negative
    pair.
    """
    classes = batch_size // images_per_class
    if classes < 2:
        what = f"images_per_class = {images_per_class} and batch_size = {batch_size}"
        why = "a batch needs images of two classes or more"
        larger = f"raise batch_size to {2 * images_per_class} or more"
        if batch_size < 2:
            raise ValueError(f"{what}: {why}; {larger}")
        raise ValueError(f"{what}: {why}; {larger}, or lower images_per_class to {batch_size // 2}")
    return classes, images_per_class


def class_batches(  # noqa: PLR0917 - notebooks give these by place
    labels: Sequence[int], classes: int, images: int, repeat: bool, seed: int, epoch: int
) -> list[np.ndarray]:
    """Draw batches of P `classes` x K `images`, class by class, for the pair-based losses.

    Appendix A has 180 x 4.  A class is drawn twice only if there are too few classes.  Each time
    its images are drawn anew: one is drawn twice only if the class has too few, or with `repeat`,
    which draws with replacement, as the authors' code does.
    """
    rng = np.random.default_rng((_ORDER, seed, epoch))
    members = list(pd.Series(labels).groupby(np.asarray(labels)).indices.values())
    drawn = []
    for _ in range(max(1, len(labels) // (classes * images))):
        chosen = np.resize(rng.permutation(len(members)), classes)
        parts = []
        for number in chosen:
            if repeat:
                parts.append(rng.choice(members[number], images))
            else:
                parts.append(_draw(rng, members[number], images))
        drawn.append(np.concatenate(parts))
    return drawn


def few_shot(images: pd.DataFrame, shots: int, seed: int) -> pd.DataFrame:
    """Draw `shots` training rows of each class; a row is repeated only if the class has fewer.

    With one seed, the images of fewer shots are among those of more.
    """
    train = images[images["split"] == "train"]
    rows = []
    for number, members in enumerate(train.groupby("label").indices.values()):
        rng = np.random.default_rng((_SHOTS, seed, number))
        rows.append(_draw(rng, members, shots))
    return train.iloc[np.concatenate(rows)].reset_index(drop=True)


def _draw(rng: np.random.Generator, members: np.ndarray, count: int) -> np.ndarray:
    """Draw `count` of `members`: each at most once or, if there are too few, at least once."""
    picked = rng.permutation(members)[:count]
    again = rng.choice(members, count - len(picked))
    return np.concatenate([picked, again])


# ---- from positions to tensors


@dataclass(frozen=True, eq=False)
class Plan:
    """Which batches to make, from which images, and with how many processes.

    `positions` has for each batch an array of places in the table `rows`.  Batches from number
    `first` on are made, the same as if the earlier ones had been made too.  Where processes that
    train share a batch in equal parts, `positions` are those of part number `part`.
    """

    benchmark: Benchmark
    rows: pd.DataFrame
    positions: Sequence[np.ndarray]
    view: View
    seed: int = 0
    epoch: int = 0
    first: int = 0
    part: int = 0
    workers: int = 0  # processes that decode; 0: this one
    device: torch.device | str = "cpu"


def batches(plan: Plan) -> Generator[tuple[Tensor, np.ndarray]]:
    """Yield images (B, 3, size, size) float32, normalised, and their places (B,) in `plan.rows`.

    Images are on `plan.device`.  Raises ImageError where one cannot be read.
    """
    return in_turn([plan])


def in_turn(plans: Iterable[Plan]) -> Generator[tuple[Tensor, np.ndarray]]:
    """Yield the `batches` of one plan after another, all decoded by the same processes.

    The plans have their own positions, epoch and `first`; all else is that of the first plan.
    """
    plans = iter(plans)
    plan = next(plans)
    device = torch.device(plan.device)
    # Both are read lazily: one for what to decode, one for what to yield.
    to_decode, to_fill = tee(chunk for one in chain([plan], plans) for chunk in _numbered(one))
    with _decoded_chunks(plan, to_decode) as chunks:
        filled = _filled(plan, to_fill, chunks, pin=device.type == "cuda")
        if device.type == "cuda" and plan.workers:
            filled = _ahead(filled, _AHEAD)
        with closing(filled):
            for shown, mine in filled:
                images = shown.to(device, non_blocking=device.type == "cuda")
                yield normalise(images, plan.view), mine


def _numbered(plan: Plan) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """The places (B,) of each batch, and its chunks to decode.

    A chunk is (b, 2) int64: positions, and seeds of the augmentation.
    """
    for place, positions in enumerate(plan.positions[plan.first :], plan.first):
        mine = np.asarray(positions)
        rng = np.random.default_rng((_AUGMENT, plan.seed, plan.epoch, place))
        seeds = rng.integers(2**63, size=(plan.part + 1, len(mine)))[plan.part]
        whole = np.stack([mine, seeds], 1)
        yield mine, np.split(whole, range(_CHUNK, len(mine), _CHUNK))


def _filled(
    plan: Plan,
    numbered: Iterator[tuple[np.ndarray, list[np.ndarray]]],
    chunks: Iterator[np.ndarray | str],
    pin: bool,
) -> Generator[tuple[Tensor, np.ndarray]]:
    """The decoded pixels (B, 3, size, size) uint8 of each batch, with its places (B,)."""
    size = plan.view.settings.image_size
    for mine, _ in numbered:
        batch = torch.empty((len(mine), 3, size, size), dtype=torch.uint8, pin_memory=pin)
        for start in range(0, len(batch), _CHUNK):
            chunk = next(chunks)
            if isinstance(chunk, str):
                raise ImageError(f"{chunk}; {REMEDY}")
            batch[start : start + _CHUNK] = torch.from_numpy(chunk)
        yield batch, mine


def _ahead(items: Iterator, count: int) -> Generator:
    """Yield the same items, of which a thread makes up to `count` before they are asked for."""
    use_same_gpu = partial(torch.cuda.set_device, torch.cuda.current_device())
    with ThreadPoolExecutor(1, initializer=use_same_gpu) as thread:
        waiting = deque(thread.submit(next, items, None) for _ in range(count))
        try:
            while (item := waiting.popleft().result()) is not None:
                waiting.append(thread.submit(next, items, None))
                yield item
        finally:
            for one in waiting:
                one.cancel()


@contextmanager
def _decoded_chunks(
    plan: Plan, numbered: Iterator[tuple[np.ndarray, list[np.ndarray]]]
) -> Iterator[Iterator[np.ndarray | str]]:
    """Decode the chunks of all batches in order, by processes that end with this context."""
    decoder: Any = _Decoder(plan.benchmark.pixels, _places(plan), plan.view)
    loader: DataLoader[np.ndarray | str] = DataLoader(
        decoder,
        sampler=chain.from_iterable(chunks for _, chunks in numbered),
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=plan.workers,
        worker_init_fn=_end_with_parent,
        # Otherwise it would draw from the training's random state.
        generator=torch.Generator(),
    )
    chunks = iter(loader)
    try:
        yield chunks
    finally:
        # The loader ends its workers when it is garbage-collected; a traceback may prevent that.
        if plan.workers:
            chunks._shutdown_workers()  # type: ignore[attr-defined]  # not public


def _places(plan: Plan) -> np.ndarray:
    """The path of each row's image, or its row of the embedded pixels.

    Paths are one array of bytes: reading 100,000 str in forked workers would copy their memory.
    """
    if plan.benchmark.pixels is not None:
        return np.array(list(plan.rows["path"]))
    root = plan.benchmark.root
    return np.array([os.fsencode(f"{root}/{path}") for path in plan.rows["path"]])


@dataclass(frozen=True)
class _Decoder:
    """What a worker process needs to decode a chunk."""

    embedded: np.ndarray | None
    places: np.ndarray
    view: View

    def __getitem__(self, chunk: np.ndarray) -> np.ndarray | str:
        """Decode a chunk: (b, 3, size, size) uint8, or the message of an ImageError.

        An array and not a tensor, as torch's shared memory is too small in many containers; a
        message and not the error, as the frames of a pickled error may keep the workers alive.
        """
        shown = []
        for place, seed in zip(self.places[chunk[:, 0]], chunk[:, 1].tolist()):
            try:
                if self.embedded is None:
                    image = _decoded(os.fsdecode(place), self.view.upright)
                else:
                    image = self.embedded[place]
            except ImageError as error:
                return str(error)
            shown.append(pixels(image, self.view, seed))
        return np.stack(shown)


def _as_it_is(chunk: Any) -> Any:
    """A chunk, where the loader would make a tensor of it."""
    return chunk


def _decoded(path: str, upright: bool) -> Image.Image:
    """`decode`; a small image is decoded once for all epochs and runs of this process.

    Worker processes cache nothing: each would need the memory.
    """
    key = (path, upright, _time_of_change(path))
    if key in _small:
        return _small[key]
    image = decode(path, upright)
    is_small = image.width * image.height <= _SMALL_PIXELS
    if is_small and len(_small) < _SMALL_COUNT and get_worker_info() is None:
        _small[key] = image
    return image


def _time_of_change(path: str) -> int:
    """The modification time of a file in nanoseconds; 0 if it does not exist."""
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def _end_with_parent(worker: int) -> None:
    """End this worker process soon after the training process, even if that was killed.

    multiprocessing knows which process trains: with a fork server it is not the one that forked
    this worker.  If it has already ended, this one ends at once.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
