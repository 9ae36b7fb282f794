"""Runs on a Dask cluster of real processes: the same numbers, also when workers are killed, and clear words when not."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import dask
import distributed
import pandas as pd
import pytest
import torch

from pumalib import cluster, config, paths, study, training

PROFILE = config.Profile(
    "test", data=config.Data(datasets=("digits",), image_size=32), pretrained="random", dim=16,
    rank_scale=0.1, training=config.Training(epochs=1, batch_size=60, lr=1e-3, device="cpu"),
)  # fmt: skip
WORKERS = 2


@pytest.fixture(scope="module")
def address():
    with cluster.local(WORKERS) as address:
        yield address


@pytest.fixture
def same_threads():
    """As many threads here as a worker has: sums in another order differ in the last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, cluster.CPU_COUNT // WORKERS))
    yield
    torch.set_num_threads(before)


def folder_of(root, run):
    return root / "test" / "runs" / study.run_folder(run, "test").name


def table(folder):
    return json.loads((folder / "metrics.json").read_text())["table"]


def test_workers_train_to_the_same_table(address, same_threads, monkeypatch, tmp_path):
    rows = {"Linear": PROFILE.run("linear"), "MLP": PROFILE.run("mlp3")}
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "here")
    here = study.run_all(rows, PROFILE)
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "there")
    monkeypatch.setattr(training, "_Training", None)  # this process can train no more
    monkeypatch.setenv("PUMALIB_DASK", address)
    there = study.run_all(rows, PROFILE)
    pd.testing.assert_frame_equal(here.tidy, there.tidy)
    assert not list((tmp_path / "there").rglob(".shared-*"))


LONG = PROFILE.run("linear", training=dict(epochs=10, checkpoint_seconds=0.0))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return training.train(LONG, tmp_path_factory.mktemp("uninterrupted"))


@contextmanager
def scheduler_allows(client, failures):
    def allow(dask_scheduler, failures):
        before, dask_scheduler.allowed_failures = dask_scheduler.allowed_failures, failures
        return before

    before = client.run_on_scheduler(allow, failures=failures)
    yield
    client.run_on_scheduler(allow, failures=before)


@pytest.mark.parametrize("failures", [3, 0])
def test_the_run_of_a_killed_worker_goes_on_from_its_checkpoint(failures, address, same_threads, uninterrupted, tmp_path):
    folder, raised = folder_of(tmp_path, LONG), []

    def call():
        try:
            cluster.train({folder: LONG}, address)
        except RuntimeError as error:
            raised.append(str(error))

    with distributed.Client(address, set_as_default=False) as client, scheduler_allows(client, failures):
        processes = client.run(os.getpid)
        calling = threading.Thread(target=call)
        calling.start()
        deadline = time.monotonic() + 120
        while not (folder / "log.csv").is_file() or not (folder / "checkpoint.previous.pt").is_file():  # an epoch is done
            assert calling.is_alive() and time.monotonic() < deadline, "the run ended before its worker could be killed"
            time.sleep(0.01)
        (worker,) = [worker for worker, keys in client.processing().items() if keys]
        os.kill(processes[worker], signal.SIGKILL)
        assert not (folder / "metrics.json").exists()
        log = (folder / "log.csv").read_text()  # with seconds, which no second training would repeat
        calling.join(timeout=120)
    if failures == 0:
        assert folder.name in raised[0] and "1 workers died" in raised[0] and "goes on from its checkpoint" in raised[0]
        cluster.train({folder: LONG}, address)
    else:
        assert not raised
    assert (folder / "log.csv").read_text().startswith(log)
    assert table(folder) == table(uninterrupted)


def test_a_failing_run_does_not_stop_the_others(address, tmp_path):
    bad = PROFILE.run("linear", training=dict(lr=1e30, clip_value=0.0))
    runs = {folder_of(tmp_path, run): run for run in (bad, PROFILE.run("linear"), PROFILE.run("linear", seed=1))}
    failing, *others = runs
    with pytest.raises(RuntimeError, match=rf"1 of 3 runs failed, the others are finished. {failing}: NonFiniteLoss: .*epoch 1"):
        cluster.train(runs, address)
    assert all((folder / "metrics.json").is_file() for folder in others)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs a path that processes see differently")
def test_a_worker_that_does_not_see_the_folder_is_told(address, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the workers stay where they were started
    run = PROFILE.run("linear")
    with pytest.raises(RuntimeError, match="does not see the client's /proc/self/cwd/.* name such a place with PUMALIB_RESULTS"):
        cluster.train({folder_of(Path("/proc/self/cwd"), run): run}, address)
    folder = folder_of(tmp_path, run)
    assert folder.is_dir() and not (folder / "run.json").exists()
    cluster.train({folder: run}, address)  # the error is not remembered
    assert (folder / "metrics.json").is_file()


def test_a_worker_that_would_give_other_numbers_is_refused(address, monkeypatch, tmp_path):
    run = PROFILE.run("linear")
    folder = folder_of(tmp_path, run)
    with pytest.raises(RuntimeError, match=f"would call this run {folder.name}"):
        cluster.train({folder.with_name("linear-of-other-data"): run}, address)
    monkeypatch.setattr(config, "NUMBERS", 99)
    with pytest.raises(RuntimeError, match="another pumalib, .* 99 at the client.* restart the workers"):
        cluster.train({folder: run}, address)


def test_no_scheduler(tmp_path):
    run = PROFILE.run("linear")
    with dask.config.set({"distributed.comm.timeouts.connect": "200ms"}):
        for nowhere in ("tcp://127.0.0.1:9", "scheduler.json"):
            with pytest.raises(ConnectionError, match=f"no Dask scheduler answers at '{nowhere}'"):
                cluster.train({folder_of(tmp_path, run): run}, nowhere)


def test_a_scheduler_found_by_its_file_and_lost(tmp_path):
    run, file = PROFILE.run("linear"), tmp_path / "scheduler.json"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    scheduler = subprocess.Popen([*command, "--dashboard-address", "127.0.0.1:0", "--scheduler-file", file], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120

    def lose():
        while not list((tmp_path / "test").rglob(".shared-*")) and time.monotonic() < deadline:  # not connected yet
            time.sleep(0.05)
        scheduler.kill()

    while not file.is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    losing = threading.Thread(target=lose)
    losing.start()
    with dask.config.set({"distributed.comm.timeouts.connect": "5s"}):
        with pytest.raises(ConnectionError, match="lost the Dask scheduler at .*scheduler.json; call again"):
            cluster.train({folder_of(tmp_path, run): run}, str(file))
    losing.join()
    scheduler.wait()


def test_local_workers_share_the_machine(address):
    def sees():
        import torch

        return os.environ["OMP_NUM_THREADS"], torch.get_num_threads()

    threads = max(1, cluster.CPU_COUNT // WORKERS)
    with distributed.Client(address, set_as_default=False) as client:
        assert set(client.nthreads().values()) == {1} and len(client.nthreads()) == WORKERS
        assert list(client.run(sees).values()) == [(str(threads), threads)] * WORKERS


def test_each_local_worker_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    with cluster.local(2) as address, distributed.Client(address, set_as_default=False) as client:
        assert sorted(client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).values()) == ["3", "7"]
    with pytest.raises(ValueError, match="3 workers, but this machine shows 2 GPUs"), cluster.local(3):
        pass
