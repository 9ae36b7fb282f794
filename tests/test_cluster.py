"""Runs on a Dask cluster of real processes: the same numbers, also when workers are killed."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import dask
import distributed
import forks
import pandas as pd
import pytest
import torch

import puma_study as study
from puma_study import store
from pumalib import cluster, config, paths, training
from pumalib.training import run_folder

PROFILE = config.Profile(
    "test",
    data=config.Data(datasets=("photos",), image_size=48),
    backbone="test_vit",
    pretrained="random",
    dim=16,
    training=config.Training(epochs=1, batch_size=60, lr=1e-3, device="cpu"),
)
LINEAR, WORKERS = PROFILE.run("linear"), 2


@pytest.fixture(scope="module")
def address():
    forks.ready()
    with cluster.local(WORKERS) as address:
        yield address


@pytest.fixture(autouse=True)
def same_threads(monkeypatch, tmp_path):
    """As many threads here as a worker has: sums in another order differ in the last digits."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "there")
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, cluster.CPU_COUNT // WORKERS))
    yield
    torch.set_num_threads(before)


def test_workers_train_to_the_same_table(address, monkeypatch, tmp_path):
    rows = {"Linear": LINEAR, "MLP": PROFILE.run("mlp3")}
    there = study.run_all(rows, replace(PROFILE, dask=address))
    assert not list(tmp_path.rglob(".shared-*"))
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "here")
    pd.testing.assert_frame_equal(study.run_all(rows, PROFILE).tidy, there.tidy)


def test_the_run_of_a_killed_worker_goes_on_from_its_checkpoint(address, monkeypatch, tmp_path):
    long = PROFILE.run("linear", training={"epochs": 10, "checkpoint_seconds": 1e-3})
    folder, results = store.folder(run_folder.run_name(long), "test"), []
    with distributed.Client(address, set_as_default=False) as client:
        processes = client.run(os.getpid)
        profile = replace(PROFILE, dask=address)
        calling = threading.Thread(
            target=lambda: results.append(study.run_all({"x": long}, profile))
        )
        calling.start()
        deadline = time.monotonic() + 300
        while not (folder / "log.csv").is_file() or not (folder / "log.csv").read_text().strip():
            assert calling.is_alive() and time.monotonic() < deadline, (
                "it ended before its worker could be killed"
            )
            time.sleep(0.01)
        (worker,) = [worker for worker, keys in client.processing().items() if keys]
        os.kill(processes[worker], signal.SIGKILL)
        log = (
            folder / "log.csv"
        ).read_text()  # with seconds, which no second training would repeat
        calling.join(timeout=300)
    assert len(log.splitlines()) < 11 and (folder / "log.csv").read_text().startswith(log)
    training.train(long, tmp_path / "uninterrupted")
    whole = training.run_folder.read_record(tmp_path / "uninterrupted")["table"]
    pd.testing.assert_frame_equal(
        *(pd.DataFrame(t) for t in (store.record(folder.name, "test").content()["table"], whole))
    )
    assert results[0].names == {"x": [folder.name]}


def test_a_failing_run_does_not_stop_the_others(address):
    bad = PROFILE.run("linear", training={"lr": 1e30, "clip_value": 0.0})
    rows = {"bad": bad, "good": LINEAR}
    name = run_folder.run_name(bad)
    with pytest.raises(store.Failed, match=rf"{name} \(epoch 1, batch \d+: the loss is "):
        study.run_all(rows, replace(PROFILE, dask=address))
    assert set(store.read("test")) == {run_folder.run_name(LINEAR)}
    assert set(store.failures("test")) == {name}


def test_an_error_of_a_worker_is_told_when_the_others_are_finished(address):
    one_class = {"batch_size": 4, "images_per_class": 4}
    bad = PROFILE.run("linear", loss="ms", training=one_class)
    rows = {"bad": bad, "good": LINEAR}
    said = (
        "1 of 2 runs failed, the others are finished. "
        f".*{run_folder.run_name(bad)}: ValueError: .*a batch needs images of two classes"
    )
    with pytest.raises(RuntimeError, match=said):
        study.run_all(rows, replace(PROFILE, dask=address))
    assert set(store.read("test")) == {run_folder.run_name(LINEAR)}


def test_a_worker_that_would_give_other_numbers_is_refused(address, monkeypatch, tmp_path):
    monkeypatch.setattr(run_folder, "run_name", lambda run: "linear-of-other-data")
    said = r"would call this run linear-curricularface-\w{8}: .*share checkout"
    with pytest.raises(RuntimeError, match=said):
        study.run_all({"x": LINEAR}, replace(PROFILE, dask=address))
    monkeypatch.chdir(tmp_path)  # the workers stay where they were started
    said = r"does not see the client's .*name such a place with PUMALIB_RESULTS"
    with pytest.raises(RuntimeError, match=said):
        cluster.run_each(print, {"x": ("x",)}, address, Path("/proc/self/cwd/mine"))


def test_no_scheduler():
    with dask.config.set({"distributed.comm.timeouts.connect": "200ms"}):
        for nowhere in ("tcp://127.0.0.1:9", "scheduler.json"):
            with pytest.raises(ConnectionError, match=f"no Dask scheduler answers at '{nowhere}'"):
                study.run_all({"x": LINEAR}, replace(PROFILE, dask=nowhere))


def test_where_no_worker_comes_it_ends_and_says_so(tmp_path):
    here = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": distributed.Scheduler, "options": here}
    with (
        distributed.SpecCluster(workers={}, scheduler=scheduler) as alone,
        pytest.raises(
            ConnectionError, match=r"for 1 s there was no worker: .*call again: what is finished"
        ),
    ):
        address = alone.scheduler_address
        cluster.run_each(print, {"x": ("x",)}, address, tmp_path / "there", patience=1)


def test_a_scheduler_is_lost(tmp_path):
    def lose():
        while not list((tmp_path / "there").rglob(".shared-*")):
            time.sleep(0.05)
        local.__exit__(None, None, None)

    local = cluster.local(1)
    address = local.__enter__()
    threading.Thread(target=lose).start()
    with pytest.raises(ConnectionError, match=f"lost the Dask scheduler at {address}; call again"):
        cluster.run_each(time.sleep, {"x": (300,)}, address, tmp_path / "there")


def test_workers_that_are_ended_as_they_start_are_told(monkeypatch):
    def start(**options):
        raise RuntimeError("Nanny failed to start.")

    monkeypatch.setattr(distributed, "SpecCluster", start)
    with (
        pytest.raises(ConnectionError, match=r"Nanny failed to start\.\): .*call again: what is"),
        cluster.local(2),
    ):
        pass


def test_local_workers_share_the_machine(monkeypatch):
    """By processes that import torch themselves: it counts the threads then."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    anew = {"distributed.worker.multiprocessing-method": "spawn"}
    with (
        dask.config.set(anew),
        cluster.local(WORKERS) as two,
        distributed.Client(two, set_as_default=False) as client,
    ):
        threads = max(1, cluster.CPU_COUNT // WORKERS)
        assert set(client.run(torch.get_num_threads).values()) == {threads}
        assert list(client.nthreads().values()) == [1] * WORKERS
        assert sorted(client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).values()) == ["3", "7"]
    with pytest.raises(ValueError, match="3 jobs, but this machine shows 2 GPUs"), cluster.local(3):
        pass
