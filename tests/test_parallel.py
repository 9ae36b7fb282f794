"""One batch in parts: two or four processes and micro-batches train as one process does.

The one process has the whole batch.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.multiprocessing import start_processes

from pumalib import config, losses, models, training
from pumalib.training import held_out, loop, parallel, run_folder

PUMA = config.method("puma", prompts=4, adapter_rank=8)
LORA = config.method("puma+lora-stochastic", prompts=4, adapter_rank=8, lora_rank=4)
RECIPE = config.Training(
    epochs=1, batch_size=20, lr=1e-3, checkpoint_seconds=1e-9, device="cpu", clip_value=0
)
DATA = config.Data(datasets=("aircraft", "flowers"), image_size=48, shots=2)
RUN = config.Run(
    data=DATA, backbone="test_vit", pretrained="random", dim=16, method=PUMA, training=RECIPE
)
# proxies and a running mean; pairs; a memory; pairs drawn at random; every weight;
# and micro-batches
RUNS = {
    "curricularface": RUN,
    "ms": replace(RUN, loss="ms"),
    "xbm": replace(RUN, loss="xbm", method=LORA),
    "triplet": replace(RUN, loss="triplet", loss_settings={"miner": "random"}),
    "full": replace(RUN, method=config.METHODS["full"]),
    "micro": replace(RUN, training=replace(RECIPE, micro_batch=7)),
}
ODD = replace(RUN, training=replace(RECIPE, batch_size=21))


def stopped(run, folder, steps):
    """Train a number of steps and stop.

    Returns the gradients and the loss's state of the step after.
    """
    real_backward, real_step, kept, calls = parallel.backward, torch.optim.AdamW.step, {}, []

    def backward(model, loss, *args):
        value = real_backward(model, loss, *args)
        named = [*model.named_parameters(), *loss.named_parameters(prefix="loss")]
        kept.update({name: p.grad.clone() for name, p in named if p.requires_grad})
        kept.update({f"state of loss: {name}": buffer for name, buffer in loss.named_buffers()})
        return value

    def step(self):
        calls.append(1)
        if len(calls) > steps:
            raise KeyboardInterrupt
        return real_step(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parallel, "backward", backward)
        patch.setattr(torch.optim.AdamW, "step", step)
        training.train(run, folder)
    return kept


def start(work, folder, processes=2):
    """Run `work` in processes, each with its rank, the folder, a free port and their number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = (folder, port, processes)
    start_processes(work, given, nprocs=processes, start_method="forkserver")


def join(rank, port, processes):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    parallel.join(torch.device("cpu"))


def one_of_four(rank, folder, port, processes):
    """A process of four: gradients of every run."""
    join(rank, port, processes)
    found = {name: stopped(run, folder / name, 0) for name, run in RUNS.items()}
    torch.save(found, folder / f"{rank}.pt")
    parallel.leave()


def one_of_two(rank, folder, port, processes):
    """A process of two.

    Gradients of every run, the message about odd batches, and a run to its end.
    """
    join(rank, port, processes)
    torch.save(
        {name: stopped(run, folder / name, 0) for name, run in RUNS.items()}, folder / f"{rank}.pt"
    )
    with pytest.raises(ValueError) as error:
        training.train(ODD, folder / "odd")
    (folder / f"{rank}.txt").write_text(str(error.value))
    with pytest.raises(ValueError) as error:
        training.train(RUN, folder / f"apart-{rank}")
    (folder / f"apart-{rank}.txt").write_text(str(error.value))
    training.train(RUN, folder / "curricularface")
    assert parallel.size() == 1 and parallel.is_first() == (rank == 0)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """Of one process, of each of two and of each of four, and where those of two were written.

    All go on from the same checkpoint.
    """
    folder, alone = tmp_path_factory.mktemp("gradients"), {}
    for name, run in RUNS.items():
        stopped(run, folder / name, 1)
        alone[name] = stopped(run, shutil.copytree(folder / name, folder / "alone" / name), 0)
    by_four = shutil.copytree(folder, folder / "four")
    # One of two folders has a checkpoint.
    shutil.copytree(folder / "curricularface", folder / "apart-0")
    start(one_of_two, folder)
    start(one_of_four, by_four, 4)
    shared = {
        2: [torch.load(folder / f"{rank}.pt") for rank in range(2)],
        4: [torch.load(by_four / f"{rank}.pt") for rank in range(4)],
    }
    return alone, shared, folder


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", RUNS)
def test_several_processes_have_the_gradient_of_one(name, processes, gradients):
    alone, shared, _ = gradients
    mine, *others = (found[name] for found in shared[processes])
    assert alone[name].keys() == mine.keys()
    bound = 1e-4 if name == "micro" else 1e-5  # sums over parts of parts round differently
    for key, expected in alone[name].items():
        for its in others:
            assert torch.equal(mine[key], its[key]), key
        assert expected.any(), f"{key} is zero: nothing is compared"
        assert (mine[key] - expected).float().norm() <= bound * expected.float().norm(), key


def test_two_processes_go_on_to_the_weights_of_one_and_refuse_odd_batches(gradients):
    alone = training.train(RUN, gradients[2] / "alone" / "curricularface")
    both = gradients[2] / "curricularface"
    assert {f.name for f in both.iterdir()} == {f.name for f in alone.iterdir()}
    assert run_folder.read_record(both)["environment"]["processes"] == 2
    ours, expected = (
        safetensors.torch.load_file(folder / "model.safetensors") for folder in (both, alone)
    )
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=1e-4, msg=name)
    for rank in (0, 1):
        message = (gradients[2] / f"{rank}.txt").read_text()
        assert message.startswith(
            "a batch of 21 images cannot be divided equally among 2 processes: choose a batch"
        )


def test_processes_that_begin_differently_are_refused_in_all(gradients):
    messages = {(gradients[2] / f"apart-{rank}.txt").read_text() for rank in (0, 1)}
    (message,) = messages
    assert re.search(
        r"\(process 0: epoch 1, step 2, weights (\w+); process 1: epoch 1, step 1, ", message
    )
    assert "PUMALIB_RESULTS" in message


SCORED = replace(
    RUN,
    data=replace(DATA, holdout=True),
    training=replace(RECIPE, epochs=4, score_epochs=1, patience=1),
)


def scored_by_two(rank, folder, port, processes):
    """A process of two that trains `SCORED`; only the first one may look at held-out classes."""
    join(rank, port, processes)
    scored = []
    real = loop._held_out_score

    def falling(setup, place, epoch):
        scored.append(real(setup, place, epoch))
        return 1 / (1 + epoch)

    loop._held_out_score = falling
    training.train(SCORED, folder / "two")
    (folder / f"scores-{rank}.txt").write_text(str(len(scored)))


def test_two_processes_stop_together_by_the_scores_of_the_first(tmp_path):
    start(scored_by_two, tmp_path)
    assert (tmp_path / "scores-0.txt").read_text() == "2"
    assert (tmp_path / "scores-1.txt").read_text() == "0"
    log = run_folder.read_record(tmp_path / "two")["log"]
    assert [row[held_out.SCORE] for row in log] == [1 / 2, 1 / 3], "to the last bit"

    # The first of the two epochs was the better one.
    recipe = replace(SCORED.training, epochs=1, patience=0)
    one = training.train(replace(SCORED, training=recipe), tmp_path / "one")
    ours, expected = (
        safetensors.torch.load_file(folder / "model.safetensors")
        for folder in (tmp_path / "two", one)
    )
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=1e-4, msg=name)


DIES = """
import os, signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from test_parallel import RUN
from pumalib.training import loop, run_folder, train_together

torch.set_num_threads(1)
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
folder = Path(sys.argv[1])
steps = folder.with_name(f"steps-{{rank}}-{{attempt}}.txt")
real = loop._step
def step(fitting, *arguments):
    with steps.open("a") as file:
        print(fitting.reached.step, file=file)
    if (rank, attempt, fitting.reached.step) == ("1", "0", 1):
        while not (folder / "checkpoint.pt").is_file():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(fitting, *arguments)
loop._step = step
train_together(RUN, folder, run_folder.held(folder))
"""


def test_a_process_that_dies_ends_all_and_torchrun_goes_on(tmp_path):
    program = tmp_path / "dies.py"
    program.write_text(DIES.format(tests=str(Path(__file__).parent)))
    folder = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    asked = ["--nproc-per-node=2", "--max-restarts=1", program, folder]
    done = subprocess.run([*torchrun, *asked], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr, "no message says which process died"
    for rank in (0, 1):
        first, second = (tmp_path / f"steps-{rank}-{attempt}.txt" for attempt in (0, 1))
        assert first.read_text().split()[:2] == ["0", "1"]
        assert second.read_text().split()[0] == "1", "it did not go on from the checkpoint"
    (row,) = run_folder.read_record(folder)["log"]
    alone = training.train(RUN, tmp_path / "alone")
    (expected,) = run_folder.read_record(alone)["log"]
    assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    "name", [name for name in config.METHODS if name not in ("pretrained", "whitened")]
)
def test_every_parameter_has_a_gradient_even_with_all_gates_closed(name):
    model = models.build(name, "mini_vit", 8, pretrained="random").train()
    gates = {key: torch.zeros_like(gate) for key, gate in model.draw_gates(2).items()}
    model(torch.randn(2, 3, 48, 48), gates).sum().backward()
    assert all(
        p.grad is not None for p in model.parameters() if p.requires_grad
    )  # else processes could differ


@pytest.mark.parametrize("name", ["proxyanchor", "curricularface", "ms", "triplet"])
@pytest.mark.parametrize("micro_batch", [0, 5])
def test_the_gradient_is_that_of_autograd_on_the_whole_batch(name, micro_batch):
    gradients = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        loss = losses.make(name, 4, 8).double()
        model = (
            models.build("puma", "mini_vit", 8, pretrained="random", prompts=4, adapter_rank=8)
            .train()
            .double()
        )
        for adapter in model.adapters:
            torch.nn.init.normal_(adapter["mlp"].up.weight, std=0.1)
        images, targets = torch.randn(12, 3, 48, 48).double(), torch.arange(12) % 4
        gates = model.draw_gates(12, torch.Generator().manual_seed(0))
        if by_hand:
            value = loss(model(images, gates), targets)
            value.backward()
        else:
            batch = parallel.Batch(images, targets, gates)
            value = parallel.backward(model, loss, batch, micro_batch)
        named = [*model.named_parameters(), *loss.named_parameters()]
        gradients.append([value.detach().float(), *(p.grad for _, p in named if p.requires_grad)])
    for expected, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert sum(bool(g.any()) for g in gradients[0]) > 5


def test_batch_normalisation_is_refused(monkeypatch):
    model = models.build("full", "resnet18", 8, pretrained=False).train()
    parallel.check_batch_norm(model, micro_batch=0)
    for processes, micro_batch in ((1, 2), (2, 0)):
        monkeypatch.setattr(parallel, "size", lambda processes=processes: processes)
        with pytest.raises(ValueError, match="batch normalisation"):
            parallel.check_batch_norm(model, micro_batch)
