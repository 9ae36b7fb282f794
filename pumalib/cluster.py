"""Work on a Dask cluster.

`run_each` sends calls to any scheduler's workers, `local` starts such workers on this machine.  See
docs/gpu.md for how to start workers on other machines, and what they must share.
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

# Environment variables that limit the cores of a worker.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Seconds after which lost workers of this machine are not expected to restart.
PATIENCE = 120
# The message then.
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
    """Call `function(*item)` for each of the named `items` on the workers of a Dask scheduler.

    Each worker does one item at a time; if a worker is lost, another gets its item.  `address` is
    the scheduler's address or its scheduler file; all workers must see the folder `shared`.
    Messages and the progress bar call an item a `unit`.

    Raises RuntimeError where some items failed, once all others are finished, and ConnectionError
    where no scheduler answers or it has no worker for `patience` seconds.
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
    """Call `function` for every item on the client's workers; return the errors by item name."""
    # Items wait here, not in the scheduler: it would also blame the items queued behind one that
    # kills its worker.
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
                # A new key for each call: the scheduler remembers results by key.
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
    """The finished futures, after waiting at most a second: new workers may have joined by then."""
    with suppress(TimeoutError):
        return list(distributed.wait(list(running), 1, "FIRST_COMPLETED").done)
    return []


def _standing(workers: int, failed: int) -> str:
    text = f"{workers or 'no'} workers"
    if failed:
        text += f", {failed} failed"
    return text


def _failure(failed: Mapping[str, BaseException], total: int, shared: Path, unit: str) -> str:
    """The message about failed items: the first one's error, and the names of all."""
    name, error = next(iter(failed.items()))
    cause = ""
    if isinstance(error, distributed.KilledWorker):
        cause = "out of memory (then choose a smaller micro_batch), or stopped (then call again)? "
    return (
        f"{len(failed)} of {total} {unit}s failed, the others are finished. "
        f"{shared / name}: {type(error).__name__}: {cause}{error}; failed: {', '.join(failed)}"
    )


def _call(marker: str, function: Callable, item: tuple) -> None:
    """On a worker: call `function(*item)`; FileNotFoundError if it lacks the client's files."""
    if not Path(marker).is_file():
        raise FileNotFoundError(
            f"the worker on {socket.gethostname()} does not see the client's "
            f"{Path(marker).parent}: results must be where all machines see them; "
            "name such a place with PUMALIB_RESULTS"
        )
    # A worker is a daemonic process, which could not start processes that decode images.
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
    """Run a cluster on this machine while the block runs, and give its address.

    Each worker is a process with its own GPU, or with an equal share of the cores.  Raises
    ValueError if there are fewer GPUs than workers, ConnectionError if the workers do not start.
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
    # Dask would also limit this process, and the kernels it starts, to one thread.
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
        # On a busy machine, a killed worker may take a while to disappear.
        with suppress(TimeoutError):
            cluster.close()


def _environments(workers: int) -> list[dict[str, str]]:
    """Environment variables of each worker: its number of threads and, if any, its GPU."""
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
