"""Several processes train one run as one process does: same gradient, same weights, same folder."""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from pumalib import config, distributed, models, paths, study, training
from pumalib.__main__ import main

RECIPE = config.Training(epochs=2, batch_size=60, lr=1e-3, checkpoint_seconds=0, device="cpu", clip_value=0.0)
RUN = config.Run(data=config.Data(datasets=("digits", "aircraft"), image_size=32), pretrained="random", dim=16,
                 method=config.method("puma", prompts=4, adapter_rank=8), training=RECIPE)  # fmt: skip
RUNS = {  # proxies and a running mean; pairs; a memory; pairs drawn at random; and a part that does not fit into memory
    "curricularface": RUN,
    "ms": replace(RUN, loss="ms"),
    "xbm": replace(RUN, loss="xbm", method=config.method("puma+lora-stochastic", prompts=4, adapter_rank=8, lora_rank=4)),
    "triplet": replace(RUN, loss="triplet", loss_settings=dict(miner="random")),
    "micro": replace(RUN, training=replace(RECIPE, micro_batch=7)),
}
ODD = replace(RUN, training=replace(RECIPE, batch_size=61))


class Stop(Exception):
    """Instead of the optimiser's step."""


def interrupted(run, folder, steps):
    """Train so many steps in one process and stop; the checkpoint stays."""
    real, calls = torch.optim.AdamW.step, []

    def step(self, *args, **kwargs):
        calls.append(1)
        if len(calls) > steps:
            raise Stop
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        with pytest.raises(Stop):
            training.train(run, folder)


def next_gradients(run, folder):
    """The loss, the gradient of all that is trained, and the loss's state, in the step after the checkpoint in `folder`."""
    kept = {}

    class Looks(training._Training):
        def __init__(self, *args):
            super().__init__(*args)
            named = [*self.model.named_parameters(), *self.loss.named_parameters(prefix="loss")]
            self.optimizer.step = lambda: self.look({name: p.grad for name, p in named if p.requires_grad})

        def look(self, gradients):
            kept.update(gradients, **{f"state of loss: {name}": b for name, b in self.loss.named_buffers()})
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_Training", Looks)
        with pytest.raises(Stop):
            training.train(run, folder)
    return kept


def one_of_two(rank, folder, port):
    """A process of two: the gradients of every run, and the message about batches that do not divide."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.join(torch.device("cpu"))
    torch.save({name: next_gradients(run, folder / name) for name, run in RUNS.items()}, folder / f"{rank}.pt")
    with pytest.raises(ValueError) as error:
        training.train(ODD, folder / "odd")
    (folder / f"{rank}.txt").write_text(str(error.value))
    first = distributed.leave()
    assert first == (rank == 0)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """Of one process and of each of two, all going on from the same checkpoint; and where they were written."""
    folder = tmp_path_factory.mktemp("gradients")
    for name, run in RUNS.items():
        interrupted(run, folder / name, steps=3)
    alone = {}
    for name, run in RUNS.items():
        shutil.copytree(folder / name, folder / "alone" / name)
        alone[name] = next_gradients(run, folder / "alone" / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(one_of_two, (folder, port), nprocs=2)
    return alone, [torch.load(folder / f"{rank}.pt") for rank in (0, 1)], folder


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_have_the_gradient_of_one(name, gradients):
    alone, both, _ = gradients
    assert alone[name].keys() == both[0][name].keys()
    for key, expected in alone[name].items():
        ours, theirs = both[0][name][key], both[1][name][key]
        assert torch.equal(ours, theirs), key
        assert expected.any(), f"{key} is zero: nothing is compared"
        assert (ours - expected).float().norm() <= 1e-5 * expected.float().norm(), key


def test_micro_batches_of_two_processes_have_the_gradient_of_the_whole_batch(gradients):
    alone, both, _ = gradients
    for key, expected in alone["curricularface"].items():
        # ten times the bound above: sums over parts of parts round differently
        assert (both[0]["micro"][key] - expected).norm() <= 1e-4 * expected.norm(), key


def test_batches_that_do_not_divide_are_refused(gradients):
    _, _, folder = gradients
    for rank in (0, 1):
        message = (folder / f"{rank}.txt").read_text()
        assert message.startswith("a batch of 61 images cannot be divided equally among 2 processes: choose a batch_size")


@pytest.mark.parametrize("name", [name for name, method in config.METHODS.items() if name != "pretrained"])
def test_every_parameter_has_a_gradient_even_with_all_gates_closed(name):
    model = models.build(name, "mini_vit", 8, pretrained="random", image_size=32).train()
    gates = {key: torch.zeros_like(gate) for key, gate in model.draw_gates(2).items()}
    model(torch.randn(2, 3, 32, 32), gates).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)  # else DDP would wait for it


def test_batch_normalisation_is_refused(monkeypatch):
    monkeypatch.setattr(distributed, "size", lambda: 2)
    with pytest.raises(ValueError, match="several processes would change what batch normalisation sees"):
        distributed.network(models.build("full", "resnet18", 8, pretrained=False).train())


# ---- the command -----------------------------------------------------------------------------------------------

COMMAND = ["train", "puma", "--profile", "smoke", "--seed", "3", "-s", "adapter_keep=0.7", "-p", "datasets=[birds, digits]",
           "-p", "epochs=2", "-p", "device=cpu"]  # fmt: skip


def torchrun(results: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pumalib"]
    environment = {**os.environ, "PUMALIB_RESULTS": str(results), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *COMMAND], env=environment, cwd=paths.ROOT, capture_output=True, text=True)


def chosen():
    profile = config.profile("smoke", datasets=["birds", "digits"], epochs=2, device="cpu", seeds=[3])
    return profile.run("puma", seed=3, adapter_keep=0.7), profile


def test_one_process_and_two_end_alike_in_the_folder_of_the_notebooks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "one")
    run, profile = chosen()
    one = study.run_folder(run, "smoke")
    assert main(COMMAND) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(paths.shown(one)) and "R@1: birds 0." in printed

    started = tmp_path / "two" / one.relative_to(paths.RESULTS)  # one process begins, two go on
    interrupted(replace(run, training=replace(run.training, checkpoint_seconds=0)), started, steps=4)
    assert torch.load(started / "checkpoint.pt")["at"]["step"] == 4
    ended = torchrun(tmp_path / "two")
    assert ended.returncode == 0, ended.stderr
    assert f"{started}\nR@1: birds 0." in ended.stdout and ended.stdout.count("R@1") == 1
    assert {f.name for f in started.iterdir()} == {f.name for f in one.iterdir()}

    weights = [safetensors.torch.load_file(folder / "model.safetensors") for folder in (one, started)]
    assert weights[0].keys() == weights[1].keys()
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, rtol=0, atol=1e-4, msg=name)
    tables = [json.loads((folder / "metrics.json").read_text())["table"] for folder in (one, started)]
    for ours, theirs in zip(*tables, strict=True):
        assert ours["dataset"] == theirs["dataset"] and ours["R@1"] == pytest.approx(theirs["R@1"], abs=0.005)

    monkeypatch.setattr(paths, "RESULTS", tmp_path / "two")
    monkeypatch.setattr(training, "_Training", None)  # training anything fails
    results = study.run_all({"PUMA": profile.run("puma", adapter_keep=0.7)}, profile)
    assert results.folders["PUMA"] == [started]


@pytest.mark.parametrize("wrong, message", [
    (["-s", "adapter_kep=0.3"], "did you mean 'adapter_keep'"),
    (["-p", "epocs=3"], "did you mean 'epochs'"),
    (["-p", "lr=1e-4"], "lr = '1e-4' should be float"),
    (["-p", "epochs"], "'epochs' is no setting: write NAME=VALUE"),
    (["-p", "datasets=[birds"], "the value is no YAML"),
])  # fmt: skip
def test_wrong_settings_are_refused(wrong, message, capsys):
    assert main(["train", "puma", *wrong]) == 1
    assert message in capsys.readouterr().err


def test_shares_are_equal_parts_in_order(monkeypatch):
    monkeypatch.setattr(distributed, "size", lambda: 3)
    shares = []
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(distributed.share([np.arange(6), np.arange(9)]))
    assert [np.concatenate(parts).tolist() for parts in zip(*shares)] == [list(range(6)), list(range(9))]
