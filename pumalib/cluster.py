"""Runs on a Dask cluster: `train` sends them to any scheduler, `local` starts one on this machine.

    with cluster.local(4) as address:       # four processes here, a GPU each where there are GPUs
        cluster.train({folder: run, ...}, address)

Workers of other clusters are started with one thread and no limit on memory, as

    dask worker ADDRESS --nthreads 1 --memory-limit 0

for Dask otherwise gives a worker of one thread its share of the machine's memory by cores and kills it above
that.  It also sets OMP_NUM_THREADS, MKL_NUM_THREADS and OPENBLAS_NUM_THREADS to 1 where they are not set: set
them to train on CPUs.  One worker per GPU, with its own CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import dask
import distributed
import torch
from dask.system import CPU_COUNT
from distributed.client import CancelledError, ClosedClientError
from distributed.comm import CommClosedError
from tqdm import tqdm

from . import config, study
from .config import Run

_one_at_a_time = threading.Lock()  # a worker of several threads still trains one run: torch's seeds are the process's
_POLL = 1.0  # seconds between two looks for new workers


def train(missing: Mapping[Path, Run], address: str) -> None:
    """Train runs on the workers of a Dask scheduler, at most one on each, and return when all are finished.

    The run of a lost worker goes to another one, which resumes it from its checkpoint.  This relies on a file system
    that all machines see under the same path, and whose locks (flock) hold across machines and end with their
    process, as those of NFS 4 and of Lustre mounted with `flock` do: a worker that is lost to the scheduler but
    still alive keeps its lock, and the other waits.  After Ctrl-C the workers finish what they are at.

    Runs wait here, not in the scheduler: otherwise those queued behind one that kills its workers would be blamed too.
    So a cluster must be told its size (`scale`): one that adapts to what is queued sees only one run per worker.

    Args:
        missing: run of each folder, which is named by `study.run_folder`.
        address: of the scheduler, as tcp://host:8786, or the path of its scheduler file.

    Raises:
        RuntimeError: runs failed; all others are finished.  The message has the folder and error of the first.
        ConnectionError: no scheduler there, or it was lost; call again to go on.
    """
    for folder in missing:
        study.make_folder(folder)
    shared = os.path.commonpath([folder.parent for folder in missing])
    waiting, running, failed = list(missing.items()), {}, {}
    try:
        with (
            _connect(address) as client,
            client.as_current(),
            tempfile.NamedTemporaryFile(dir=shared, prefix=".shared-") as marker,
            tqdm(total=len(missing), desc="runs", unit="run") as progress,
        ):
            while waiting or running:
                workers = len(client.nthreads())
                progress.set_postfix_str(f"workers: {workers or 'none yet'}" + f", failed: {len(failed)}" * bool(failed))
                while waiting and len(running) < max(1, workers):
                    folder, run = waiting.pop(0)
                    # Never the same key twice, or the scheduler would answer with what it remembers of it.
                    key = f"{folder.name}-{uuid.uuid4().hex}"
                    future = client.submit(_train, run.to_json(), str(folder), marker.name, config.NUMBERS, key=key, pure=False)
                    running[future] = folder
                try:
                    done = distributed.wait(list(running), timeout=_POLL, return_when="FIRST_COMPLETED").done
                except TimeoutError:
                    continue
                for future in done:
                    folder = running.pop(future)
                    if error := future.exception():
                        failed[folder] = error
                    progress.update()
    except (CancelledError, ClosedClientError, CommClosedError) as error:
        raise ConnectionError(
            f"lost the Dask scheduler at {address}; call again when it is back: finished runs are kept, others go on"
        ) from error
    if failed:
        folder, error = next(iter(failed.items()))
        others = f"; also failed: {', '.join(other.name for other in failed if other != folder)}" if len(failed) > 1 else ""
        message = f"{len(failed)} of {len(missing)} runs failed, the others are finished. {folder}: {_explain(error)}{others}"
        raise RuntimeError(message) from error


def _train(text: str, folder: str, marker: str, numbers: int) -> None:
    """Runs on a worker: refuse what would not give the client's numbers in the client's folder, then train."""
    here, run, folder = f"worker on {socket.gethostname()}", Run.from_json(text), Path(folder)
    if not Path(marker).is_file():
        raise FileNotFoundError(f"the {here} does not see the client's {folder.parent}: results must be on a file system "
                                "that all machines share under one path; name such a place with PUMALIB_RESULTS")  # fmt: skip
    if numbers != config.NUMBERS:
        raise RuntimeError(f"the {here} has another pumalib, whose numbers differ (NUMBERS is {config.NUMBERS} there, "
                           f"{numbers} at the client): bring both to one revision and restart the workers")  # fmt: skip
    name = study.run_folder(run, folder.parent.name).name
    if name != folder.name:
        raise RuntimeError(f"the {here} would call this run {name}: its pumalib, datasets or weights are not the "
                           "client's; share the checkout and the folder of the datasets, or make them equal")  # fmt: skip
    multiprocessing.current_process().daemon = False  # Dask's workers are, and then could not start processes that decode
    with _one_at_a_time:
        study.train(run, folder)


def _connect(address: str) -> distributed.Client:
    try:
        if Path(address).is_file():
            return distributed.Client(scheduler_file=address, set_as_default=False)
        return distributed.Client(address, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ConnectionError(f"no Dask scheduler answers at {address!r} ({error}): start one with `dask scheduler`, or give "
                              "its address, as tcp://host:8786, or the path of its scheduler file") from error  # fmt: skip


def _explain(error: Exception) -> str:
    if isinstance(error, distributed.KilledWorker):
        return (
            f"{error.allowed_failures + 1} workers died while training it, the last at {error.last_worker.address}; their logs "
            "say why. Out of memory: a smaller training.micro_batch. Stopped from outside, as by a time limit: call "
            "again, it goes on from its checkpoint; or start the scheduler with a larger "
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES"
        )
    return f"{type(error).__name__}: {error}"


@contextmanager
def local(workers: int) -> Iterator[str]:
    """A cluster of processes on this machine, while the block runs; gives the scheduler's address.

    Each worker has a GPU of its own, or without GPUs an equal share of the cores.

    Raises:
        ValueError: fewer than one worker, or more than GPUs.
    """
    gpus = _gpus()
    if workers < 1:
        raise ValueError(f"{workers} workers: at least one is needed")
    if gpus and workers > len(gpus):
        raise ValueError(f"{workers} workers, but this machine shows {len(gpus)} GPUs and each worker needs its own: ask for fewer")
    threads = str(max(1, CPU_COUNT // workers))
    # tqdm: the client's line shows the progress; the workers write to the same terminal.
    common = dict(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, OPENBLAS_NUM_THREADS=threads, TQDM_DISABLE="1")
    quiet = dict(silence_logs=logging.ERROR)
    nannies = {}
    for i in range(workers):
        env = common | (dict(CUDA_VISIBLE_DEVICES=gpus[i]) if gpus else {})
        nannies[i] = dict(cls=distributed.Nanny, options=dict(nthreads=1, memory_limit=0, env=env, host="127.0.0.1", **quiet))
    scheduler = dict(cls=distributed.Scheduler, options=dict(host="127.0.0.1", dashboard=False, dashboard_address="127.0.0.1:0"))
    # Dask would also set the threads of this process, and so of the kernels it starts, to 1.
    with dask.config.set({"distributed.nanny.pre-spawn-environ": {}}):
        cluster = distributed.SpecCluster(workers=nannies, scheduler=scheduler, **quiet)
    try:
        yield cluster.scheduler_address
    finally:
        with suppress(TimeoutError):  # of a worker that was killed, but on a busy machine is not gone yet
            cluster.close()


def _gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may hold for each GPU that this process sees."""
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible.split(",") if visible else [str(i) for i in range(count)])[:count]
