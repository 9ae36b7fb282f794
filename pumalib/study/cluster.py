"""Work on a Dask cluster: `run_each` sends calls to any scheduler's workers, `local` starts such workers on this machine.
How workers elsewhere are started, and what they must share, stands in docs/clusters.md."""

import logging
import multiprocessing
import os
import socket
import tempfile
import threading
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
from tqdm import tqdm

from ..training import run_folder

_one_at_a_time = threading.Lock()  # a worker of several threads still trains one run: torch's seeds are the process's


def run_each(function: Callable, items: Mapping[str, tuple], address: str, shared: Path) -> None:
    """Call `function(*item)` for every item, by name, on the workers of a Dask scheduler, one at a time on each.
    `address` is the scheduler's or its scheduler file; all workers must see the folder `shared`; the item of a lost one
    goes to another.  Raises RuntimeError: some failed, all others are finished; ConnectionError: no scheduler."""
    # Items wait here, not in the scheduler, where those queued behind one that kills its workers would be blamed too.
    waiting, running, failed = list(items.items()), {}, {}
    run_folder.make(shared)
    try:
        with (
            _connect(address) as client,
            client.as_current(),
            tempfile.NamedTemporaryFile(dir=shared, prefix=".shared-") as marker,
            tqdm(total=len(items), desc="runs", unit="run") as progress,
        ):
            while waiting or running:
                workers = len(client.nthreads())
                progress.set_postfix_str(f"{workers or 'no'} workers" + f", {len(failed)} failed" * bool(failed))
                while waiting and len(running) < max(1, workers):
                    name, item = waiting.pop(0)
                    key = f"{name}-{uuid.uuid4().hex}"  # never the same twice: the scheduler remembers what it was
                    running[client.submit(_call, marker.name, function, item, key=key, pure=False)] = name
                with suppress(TimeoutError):  # after a second it looks for new workers
                    for future in distributed.wait(list(running), 1, "FIRST_COMPLETED").done:
                        name = running.pop(future)
                        if error := future.exception():
                            failed[name] = error
                        progress.update()
    except (CancelledError, ClosedClientError, CommClosedError) as error:
        remedy = "call again when it is back: finished runs are kept, others go on"
        raise ConnectionError(f"lost the Dask scheduler at {address}; {remedy}") from error
    if failed:
        name, error = next(iter(failed.items()))
        told = f"{len(failed)} of {len(items)} runs failed, the others are finished. {shared / name}: {type(error).__name__}: "
        if isinstance(error, distributed.KilledWorker):
            told += "out of memory (then choose a smaller micro_batch), or stopped (then call again)? "
        raise RuntimeError(f"{told}{error}; failed: {', '.join(failed)}") from error


def _call(marker: str, function: Callable, item: tuple) -> None:
    """Runs on a worker, in whose daemonic process no process that decodes could be started."""
    if not Path(marker).is_file():
        said = f"the worker on {socket.gethostname()} does not see the client's {Path(marker).parent}: results must be"
        raise FileNotFoundError(f"{said} where all machines see them; name such a place with PUMALIB_RESULTS")
    multiprocessing.current_process().daemon = False
    with _one_at_a_time:
        function(*item)


def _connect(address: str) -> distributed.Client:
    where = {"scheduler_file": address} if Path(address).is_file() else {"address": address}
    try:
        return distributed.Client(**where, set_as_default=False)
    except (OSError, ValueError) as error:
        remedy = "start one with `dask scheduler`, or give its address, as tcp://host:8786, or its scheduler file"
        raise ConnectionError(f"no Dask scheduler answers at {address!r} ({error}): {remedy}") from error


@contextmanager
def local(workers: int) -> Iterator[str]:
    """A cluster here while the block runs: processes with a GPU each, or an equal share of the cores; gives its address."""
    count = torch.cuda.device_count()
    if count and workers > count:
        raise ValueError(f"{workers} jobs, but this machine shows {count} GPUs and each needs its own: ask for fewer")
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]
    threads = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"
    share = dict.fromkeys(threads, str(max(1, CPU_COUNT // workers)))
    envs = [share | {"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:workers]] or [share] * workers
    options = {"nthreads": 1, "memory_limit": 0, "host": "127.0.0.1", "silence_logs": logging.ERROR}
    nannies = {n: {"cls": distributed.Nanny, "options": {"env": env, **options}} for n, env in enumerate(envs)}
    address = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": distributed.Scheduler, "options": address}
    # Dask would also set the threads of this process, and so of the kernels it starts, to 1.
    with dask.config.set({"distributed.nanny.pre-spawn-environ": {}}):
        cluster = distributed.SpecCluster(workers=nannies, scheduler=scheduler, silence_logs=logging.ERROR)
    try:
        yield cluster.scheduler_address
    finally:
        with suppress(TimeoutError):  # of a worker that was killed, but on a busy machine is not gone yet
            cluster.close()
