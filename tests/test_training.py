"""Training: the same gradient in parts, the same weights after a kill, and nothing lost when something breaks."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch

from pumalib import config, losses, models, paths, training

RECIPE = config.Training(epochs=2, batch_size=60, lr=1e-3, checkpoint_seconds=0, device="cpu")
DATA = config.Data(datasets=("digits", "aircraft"), image_size=32)
RUN = config.Run(data=DATA, pretrained="random", dim=16, training=RECIPE,
                 method=config.method("puma", prompts=4, adapter_rank=8))  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return training.train(RUN, tmp_path_factory.mktemp("runs") / "uninterrupted")


def weights(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def assert_same(folder, other):
    mine, its = weights(folder), weights(other)
    assert mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)
    table = [json.loads((f / "metrics.json").read_text())["table"] for f in (folder, other)]
    assert table[0] == table[1]


def test_a_finished_run_has_its_files_and_is_not_trained_again(uninterrupted):
    names = {f.name for f in uninterrupted.iterdir()}
    assert names == {"run.json", "environment.json", "log.csv", "metrics.json", "model.safetensors"}
    assert config.Run.from_json((uninterrupted / "run.json").read_text()) == RUN
    log = pd.read_csv(uninterrupted / "log.csv")
    assert list(log["epoch"]) == [1, 2] and log["loss"].iloc[1] < log["loss"].iloc[0]
    metrics = json.loads((uninterrupted / "metrics.json").read_text())
    assert [row["dataset"] for row in metrics["table"]] == ["digits", "aircraft", "unified", "harmonic"]
    before = (uninterrupted / "metrics.json").stat().st_mtime_ns
    training.train(RUN, uninterrupted)
    assert (uninterrupted / "metrics.json").stat().st_mtime_ns == before


def test_a_killed_run_goes_on_to_the_same_weights(uninterrupted, tmp_path):
    folder = tmp_path / "killed"
    (tmp_path / "run.json").write_text(RUN.to_json())
    program = ("import sys, pathlib; from pumalib import config, training; here = pathlib.Path(sys.argv[1]); "
               "training.train(config.Run.from_json((here / 'run.json').read_text()), here / 'killed')")  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint.previous.pt").is_file():  # two steps are done
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "metrics.json").exists()
    training.train(RUN, folder)
    assert_same(folder, uninterrupted)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(uninterrupted, tmp_path, monkeypatch):
    interrupt(tmp_path, monkeypatch, after=4)
    current = tmp_path / "checkpoint.pt"
    current.write_bytes(current.read_bytes()[:-1000])
    with pytest.warns(UserWarning, match="checkpoint.pt is damaged .* trying the one before it"):
        training.train(RUN, tmp_path)
    assert_same(tmp_path, uninterrupted)


def test_with_no_readable_checkpoint_it_says_that_it_starts_anew(uninterrupted, tmp_path, monkeypatch):
    interrupt(tmp_path, monkeypatch, after=3)
    for name in training.CHECKPOINTS:
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.warns(UserWarning) as caught:
        training.train(RUN, tmp_path)
    assert any("training starts from the beginning" in str(w.message) for w in caught)
    assert_same(tmp_path, uninterrupted)


def interrupt(folder, monkeypatch, after):
    """Train into `folder` and stop, as by Ctrl-C, in the step after so many."""
    real, calls = training.backward, []

    def stops(*args):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(training, "backward", stops)
        with pytest.raises(KeyboardInterrupt):
            training.train(RUN, folder)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    real, calls = training.backward, []

    def breaks(*args):
        calls.append(1)
        return real(*args) * (float("nan") if len(calls) == 3 else 1)

    monkeypatch.setattr(training, "backward", breaks)
    with pytest.raises(training.NonFiniteLoss, match=rf"run {tmp_path.name}, epoch 1, batch 3: the loss is nan. Kept: checkpoint.pt"):
        training.train(RUN, tmp_path)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["at"]["step"] == 2 and all(torch.isfinite(value).all() for value in state["model"].values())
    assert not (tmp_path / "metrics.json").exists()


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    run = replace(RUN, training=replace(RECIPE, lr=float("inf"), clip_value=0.0))
    with pytest.raises(training.NonFiniteLoss, match="a weight is no longer finite. Kept: no checkpoint yet"):
        training.train(run, tmp_path)


def test_a_full_disk_loses_nothing(uninterrupted, tmp_path, monkeypatch):
    real, calls = torch.save, []

    def fills(state, file):
        calls.append(1)
        if len(calls) == 3:
            file.write_bytes(b"half a checkp")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(state, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fills)
        with pytest.raises(OSError, match="cannot write .*checkpoint.pt: No space left on device; free some space, or .*PUMALIB_RESULTS"):
            training.train(RUN, tmp_path)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["at"]["step"] == 2
    assert not list(tmp_path.glob(".*tmp"))
    training.train(RUN, tmp_path)
    assert_same(tmp_path, uninterrupted)


@pytest.mark.parametrize("name, hyper", [("proxyanchor", {}), ("curricularface", {}), ("ms", {}), ("triplet", {})])
def test_micro_batches_give_the_gradient_of_the_whole_batch(name, hyper):
    gradients = []
    for micro_batch in (0, 5):
        torch.manual_seed(0)
        loss = losses.make(name, 4, 8, **hyper).double()
        model = models.build("puma", "mini_vit", 8, pretrained="random", prompts=4, adapter_rank=8).train().double()
        for adapter in model.adapters:
            torch.nn.init.normal_(adapter["mlp"].up.weight, std=0.1)
        images, targets = torch.randn(12, 3, 32, 32).double(), torch.arange(12) % 4
        gates = model.draw_gates(12, torch.Generator().manual_seed(0))
        value = training.backward(model, loss, images, targets, gates, micro_batch)
        named = [*model.named_parameters(), *loss.named_parameters()]
        gradients.append([value, *(p.grad for _, p in named if p.requires_grad)])
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    assert sum(bool(g.any()) for g in gradients[0]) > 5


def test_micro_batches_are_refused_with_batch_normalisation():
    model = models.build("full", "resnet18", 8, pretrained=False).train()
    with pytest.raises(ValueError, match="micro_batch would change what batch normalisation sees"):
        training.backward(model, losses.make("cosface", 4, 8), torch.randn(4, 3, 32, 32), torch.arange(4), {}, 2)


@pytest.mark.parametrize("method, factors", [("puma", {10.0, 1e4}), ("full", {1.0, 10.0, 1e4}), ("linear", {10.0, 1e4})])
def test_each_part_has_its_learning_rate_and_nothing_is_forgotten(method, factors):
    model = models.build(method, "mini_vit", 8, pretrained="random")
    loss = losses.make("curricularface", 4, 8)
    optimizer = training.make_optimizer(model, loss, RUN)
    assert {group["factor"] for group in optimizer.param_groups} == factors
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert given == {id(p) for p in [*model.parameters(), *loss.parameters()] if p.requires_grad}
    by_factor = {group["factor"]: {id(p) for p in group["params"]} for group in optimizer.param_groups}
    assert by_factor[1e4] == {id(p) for p in loss.parameters()}
    assert id(model.head.weight) in by_factor[10.0]


def test_schedules():
    def rates(**settings):
        run = replace(RUN, training=config.Training(lr=1.0, **settings))
        return [training.learning_rate(run, epoch, 0, 10) for epoch in range(run.training.epochs)]

    assert rates(schedule="constant", epochs=3) == [1, 1, 1]
    assert rates(schedule="step", epochs=5, step_epochs=2) == [1, 1, 0.5, 0.5, 0.25]
    np.testing.assert_allclose(rates(schedule="cosine", epochs=4), [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])


def test_gradients_are_clamped_by_value(monkeypatch, tmp_path):
    seen = []
    real = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        seen.append(max(float(p.grad.abs().max()) for g in self.param_groups for p in g["params"] if p.grad is not None))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    training.train(replace(RUN, training=replace(RECIPE, epochs=1, clip_value=0.01)), tmp_path)
    assert max(seen) == pytest.approx(0.01)


def test_two_seeds_differ_and_one_repeats(uninterrupted, tmp_path):
    again = training.train(RUN, tmp_path / "again")
    assert_same(again, uninterrupted)
    other = training.train(replace(RUN, seed=1), tmp_path / "other")
    assert not torch.equal(weights(other)["head.weight"], weights(uninterrupted)["head.weight"])


def test_written_whole_leaves_nothing_half_written(tmp_path):
    file = tmp_path / "a" / "file.txt"
    with paths.written_whole(file) as temporary:
        temporary.write_text("one")
    with pytest.raises(RuntimeError):
        with paths.written_whole(file) as temporary:
            temporary.write_text("tw")
            raise RuntimeError
    assert file.read_text() == "one" and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("loss", ["hyp", "npair", "xbm", "triplet"])
def test_losses_on_raw_outputs_or_pairs_train_and_are_evaluated_by_their_own_metric(loss, tmp_path):
    run = replace(RUN, loss=loss, training=replace(RECIPE, epochs=1), method=config.METHODS["linear"])
    folder = training.train(run, tmp_path)
    table = json.loads((folder / "metrics.json").read_text())["table"]
    assert all(0 < row["R@1"] <= 1 for row in table)


def test_hyp_retrieves_by_poincare_distance():
    loss = losses.make("hyp", 3, 2)
    near_origin, far, other = torch.tensor([[0.2, 0.0], [2.0, 0.0], [0.2, 0.3]]).double()
    distances = loss.metric(near_origin[None], torch.stack([far, other]))[0]
    assert distances[1] < distances[0]  # a cosine would say otherwise: `far` has the same direction
    torch.testing.assert_close(distances, loss.distance(loss.project(near_origin[None]), loss.project(torch.stack([far, other])))[0])
