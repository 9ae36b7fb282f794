"""Work on a Dask cluster.

`run_each` sends calls to any scheduler's workers, `local` starts such workers on this machine.  How
workers elsewhere are started, and what they must share, stands in docs/clusters.md.
"""

import logging
import math
import multiprocessing
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import dask
import distributed
import torch
from dask.system import CPU_COUNT
from distributed.client import CancelledError, ClosedClientError
from distributed.comm import CommClosedError

from .progress import bar
from .training import run_folder

# Variables by which a worker is told how many cores it may use.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Seconds after which workers of this machine that are gone do not come back by themselves.
PATIENCE = 120
# What is said of them then.
ENDED = (
    "they were ended, maybe for want of memory (then ask for fewer, or a smaller micro_batch); "
    "call again: what is finished is kept, the rest goes on"
)

# A worker of several threads still trains one run: torch's seeds are the process's.
_one_at_a_time = threading.Lock()


def run_each(
    function: Callable,
    items: Mapping[str, tuple],
    address: str,
    shared: Path,
    *,
    unit: str = "run",
    patience: float = math.inf,
) -> None:
    """Call `function(*item)` for every item, by name, on the workers of a Dask scheduler.

    Each worker does one at a time; the item of a lost one goes to another.  `address` is the
    scheduler's or its scheduler file; all workers must see the folder `shared`.  What is shown
    calls an item a `unit`.

    Raises RuntimeError where some failed, when all others are finished, and ConnectionError where
    no scheduler answers, or where for `patience` seconds it has no worker.
    """
    run_folder.make(shared)
    try:
        with (
            _connect(address) as client,
            client.as_current(),
            tempfile.NamedTemporaryFile(dir=shared, prefix=".shared-") as marker,
        ):
            failed = _call_each(client, marker.name, function, items, unit=unit, patience=patience)
    except (CancelledError, ClosedClientError, CommClosedError) as error:
        remedy = f"call again when it is back: finished {unit}s are kept, others go on"
        raise ConnectionError(f"lost the Dask scheduler at {address}; {remedy}") from error
    if failed:
        first = next(iter(failed.values()))
        raise RuntimeError(_failure(failed, len(items), shared, unit)) from first


def _call_each(
    client: distributed.Client,
    marker: str,
    function: Callable,
    items: Mapping[str, tuple],
    *,
    unit: str,
    patience: float,
) -> dict[str, BaseException]:
    """Call `function` for every item on the client's workers; by name what some raised."""
    # Items wait here, not in the scheduler, where those queued behind one that kills its workers
    # would be blamed too.
    waiting = list(items.items())
    running: dict[distributed.Future, str] = {}
    failed: dict[str, BaseException] = {}
    seen = time.monotonic()
    with bar(total=len(items), desc=f"{unit}s", unit=unit) as progress:
        while waiting or running:
            workers = len(client.nthreads())
            if workers:
                seen = time.monotonic()
            elif time.monotonic() - seen > patience:
                raise ConnectionError(f"for {patience:.0f} s there was no worker: {ENDED}")
            progress.set_postfix_str(_standing(workers, len(failed)))
            while waiting and len(running) < max(1, workers):
                name, item = waiting.pop(0)
                # Never the same key twice: the scheduler remembers what it was.
                key = f"{name}-{uuid.uuid4().hex}"
                future = client.submit(_call, marker, function, item, key=key, pure=False)
                running[future] = name
            for future in _finished(running):
                name = running.pop(future)
                error = future.exception()
                if error is not None:
                    failed[name] = error
                progress.update()
    return failed


def _finished(running: Mapping[distributed.Future, str]) -> list[distributed.Future]:
    """Those that are done; it waits a second for one, since workers may have come by then."""
    with suppress(TimeoutError):
        return list(distributed.wait(list(running), 1, "FIRST_COMPLETED").done)
    return []


def _standing(workers: int, failed: int) -> str:
    text = f"{workers or 'no'} workers"
    if failed:
        text += f", {failed} failed"
    return text


def _failure(failed: Mapping[str, BaseException], total: int, shared: Path, unit: str) -> str:
    """What is said of failed items: the first one's error, and the names of all."""
    name, error = next(iter(failed.items()))
    cause = ""
    if isinstance(error, distributed.KilledWorker):
        cause = "out of memory (then choose a smaller micro_batch), or stopped (then call again)? "
    return (
        f"{len(failed)} of {total} {unit}s failed, the others are finished. "
        f"{shared / name}: {type(error).__name__}: {cause}{error}; failed: {', '.join(failed)}"
    )


def _call(marker: str, function: Callable, item: tuple) -> None:
    """Runs on a worker: call `function(*item)` if the worker sees the client's files."""
    if not Path(marker).is_file():
        raise FileNotFoundError(
            f"the worker on {socket.gethostname()} does not see the client's "
            f"{Path(marker).parent}: results must be where all machines see them; "
            "name such a place with PUMALIB_RESULTS"
        )
    # A daemonic process, as a worker is, could not start processes that decode.
    multiprocessing.current_process().daemon = False
    with _one_at_a_time:
        function(*item)


def _connect(address: str) -> distributed.Client:
    try:
        if Path(address).is_file():
            return distributed.Client(scheduler_file=address, set_as_default=False)
        return distributed.Client(address, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"no Dask scheduler answers at {address!r} ({error}): start one with `dask scheduler`, "
            "or give its address, as tcp://host:8786, or its scheduler file"
        ) from error


@contextmanager
def local(workers: int) -> Iterator[str]:
    """A cluster here while the block runs; gives its address.

    Its workers are processes with a GPU each, or an equal share of the cores.  Raises ValueError:
    there are fewer GPUs than workers.  Raises ConnectionError: they were ended as they started.
    """
    nannies = {}
    for number, environment in enumerate(_environments(workers)):
        options = {
            "env": environment,
            "nthreads": 1,
            "memory_limit": 0,
            "host": "127.0.0.1",
            "silence_logs": logging.ERROR,
        }
        nannies[number] = {"cls": distributed.Nanny, "options": options}
    address = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": distributed.Scheduler, "options": address}
    # Dask would also set the threads of this process, and so of the kernels it starts, to 1.
    with dask.config.set({"distributed.nanny.pre-spawn-environ": {}}):
        try:
            cluster = distributed.SpecCluster(
                workers=nannies, scheduler=scheduler, silence_logs=logging.ERROR
            )
        except RuntimeError as error:
            raise ConnectionError(f"the workers did not start ({error}): {ENDED}") from error
    try:
        yield cluster.scheduler_address
    finally:
        # A worker that was killed may, on a busy machine, not be gone yet.
        with suppress(TimeoutError):
            cluster.close()


def _environments(workers: int) -> list[dict[str, str]]:
    """For each worker the variables that give it its threads and, if there are any, its GPU."""
    share = str(max(1, CPU_COUNT // workers))
    threads = dict.fromkeys(THREADS, share)
    gpus = _gpus()
    if not gpus:
        return [threads] * workers
    if workers > len(gpus):
        raise ValueError(
            f"{workers} jobs, but this machine shows {len(gpus)} GPUs and each needs its own: "
            "ask for fewer"
        )
    return [{**threads, "CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:workers]]


def _gpus() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")[:count]
    return [str(number) for number in range(count)]
