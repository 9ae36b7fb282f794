"""Training: the same weights after a kill, and nothing lost when something breaks.

A line says how far it is.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from pumalib import config, data, losses, models, training
from pumalib.training import checkpoint, loop, parallel, run_folder

RECIPE = config.Training(epochs=2, batch_size=20, lr=1e-3, checkpoint_seconds=1e-9, device="cpu")
DATA = config.Data(datasets=("aircraft", "flowers"), image_size=48, shots=2)
PUMA = config.method("puma", prompts=4, adapter_rank=8)
RUN = config.Run(data=DATA, pretrained="random", dim=16, training=RECIPE, method=PUMA)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return training.train(RUN, tmp_path_factory.mktemp("runs") / "uninterrupted")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Stopped, as by Ctrl-C, in the fourth step: both checkpoints stand there."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        break_step(patch, 4, KeyboardInterrupt())
        training.train(RUN, folder)
    return folder


@pytest.fixture
def folder(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


@pytest.fixture
def parts():
    torch.manual_seed(0)
    model = models.build(PUMA, "mini_vit", 16, pretrained="random")
    loss = losses.make("curricularface", data.load(DATA).train["label"].nunique(), 16)
    return model, loss, loop.make_optimizer(model, loss, RECIPE)


def break_step(patch, number, outcome):
    """In this step raise `outcome`, or return it as the loss."""
    outcomes = [*[mock.DEFAULT] * (number - 1), outcome]
    patch.setattr(parallel, "backward", mock.Mock(wraps=parallel.backward, side_effect=outcomes))


def assert_same(folder, other):
    mine, its = (safetensors.torch.load_file(f / "model.safetensors") for f in (folder, other))
    assert mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)
    mine, its = map(run_folder.read_record, (folder, other))
    assert (mine["table"], mine["hits"]) == (its["table"], its["hits"])


def test_a_finished_run_has_its_files_and_is_only_read(uninterrupted):
    names = {f.name for f in uninterrupted.iterdir()}
    assert names == {"run.json", "log.csv", "metrics.json", "model.safetensors"}
    record = run_folder.read_record(uninterrupted)
    assert record == json.loads(json.dumps(record)) and config.Run.from_dict(record["run"]) == RUN
    first, second = record["log"]
    assert (
        list(first) == ["epoch", "loss", "lr", "images_per_second", "seconds"]
        and second["loss"] < first["loss"]
    )
    assert [row["dataset"] for row in record["table"]] == [
        "aircraft",
        "flowers",
        "unified",
        "harmonic",
    ]
    before = {f: f.stat().st_mtime_ns for f in (uninterrupted, *uninterrupted.iterdir())}
    training.train(RUN, uninterrupted)
    assert before == {f: f.stat().st_mtime_ns for f in (uninterrupted, *uninterrupted.iterdir())}


def test_a_method_without_parameters_trains_nothing(tmp_path):
    run = replace(RUN, method=config.METHODS["pretrained"], loss="ms")
    record = run_folder.read_record(training.train(run, tmp_path))
    assert record["log"] == [] and record["seconds"] == 0 and record["images_per_second"] is None


@pytest.mark.parametrize(
    "text", ["", "[]", "null", 10**5 * "[", '{"half": "a rec', '{"run": {"dim": 0}}']
)
def test_a_damaged_record_names_its_file_and_the_remedy(tmp_path, text):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"metrics.json is damaged .*remove the folder .*trained again"
    ):
        run_folder.read_record(tmp_path)


def test_a_record_that_was_edited_is_refused(uninterrupted, tmp_path):
    text = (uninterrupted / "metrics.json").read_text()
    record = json.loads(text)
    record["table"][0]["MAP@R"] += 0.1
    (tmp_path / "metrics.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"metrics.json is damaged .*changed after it was written"):
        run_folder.read_record(tmp_path)
    del record["digest"]  # as in folders from before there was one
    (tmp_path / "metrics.json").write_text(json.dumps(record))
    assert run_folder.read_record(tmp_path)["table"] == record["table"]


def test_leftovers_of_dead_processes_are_swept_and_no_others(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for process in (dead.pid, os.getpid()):
        (tmp_path / f".checkpoint.pt.{process}.tmp").touch()
    run_folder.make(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == [f".checkpoint.pt.{os.getpid()}.tmp"]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot make .*PUMALIB_RESULTS"):
        run_folder.make(tmp_path / "file" / "run")


def test_a_killed_run_goes_on_to_the_same_weights(uninterrupted, tmp_path):
    folder = tmp_path / "killed"
    (tmp_path / "run.json").write_text(RUN.to_json())
    program = (
        "import json, sys, pathlib\n"
        "from pumalib import config, training\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "run = config.Run.from_dict(json.loads((here / 'run.json').read_text()))\n"
        "training.train(run, here / 'killed')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint.previous.pt").is_file():  # two steps are done
        assert process.poll() is None and time.monotonic() < deadline, (
            "the run ended before it could be killed"
        )
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "metrics.json").exists()
    assert_same(training.train(RUN, folder), uninterrupted)


DAMAGE = {
    "missing part": lambda state: state.pop("optimizer"),
    "renamed tensor": lambda state: state["model"].update(other=state["model"].pop("head.bias")),
    "other shape": lambda state: state["loss"].update(proxies=state["loss"]["proxies"][1:]),
    "missing moments": lambda state: state["optimizer"]["state"].pop(0),
    "missing position": lambda state: state["at"].pop("step"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_checkpoint_of_something_else_gives_way_to_the_one_before(damage, folder, parts):
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    DAMAGE[damage](state)
    torch.save(state, folder / "checkpoint.pt")
    with pytest.warns(
        UserWarning, match=rf"{folder}/checkpoint.pt is damaged .* the one before it"
    ):
        assert checkpoint.resume(folder, *parts).step == 2


def test_with_no_whole_checkpoint_it_starts_anew_and_names_both(folder, parts):
    for name in run_folder.CHECKPOINTS:
        (folder / name).write_bytes((folder / name).read_bytes()[:-1000])
    with pytest.warns(UserWarning, match="or the beginning") as caught:
        assert checkpoint.resume(folder, *parts) == checkpoint.Reached()
    assert [
        name in str(w.message) for name, w in zip(run_folder.CHECKPOINTS, caught, strict=True)
    ] == [True, True]


def test_a_flipped_bit_is_noticed_and_the_run_goes_on_and_says_how_far_it_is(
    uninterrupted, folder, capsys
):
    content = bytearray((folder / "checkpoint.pt").read_bytes())
    content[len(content) // 2] ^= 1  # within a tensor
    (folder / "checkpoint.pt").write_bytes(content)
    assert torch.load(folder / "checkpoint.pt", weights_only=True), (
        "torch.load noticed: this test shows nothing"
    )
    with pytest.warns(UserWarning, match="the check sum of .* is wrong"):
        training.train(RUN, folder, "run 3 of 9")
    assert_same(folder, uninterrupted)
    last = capsys.readouterr().err.strip().split("\r")[-1]
    assert last.startswith("run 3 of 9 · run: 100%") and "finished, trained in " in last


def test_a_full_disk_loses_nothing(folder, parts):
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        with pytest.raises(
            OSError, match="cannot write .*checkpoint.pt: .*; free some space .*PUMALIB_RESULTS"
        ):
            checkpoint.save(folder, checkpoint.Reached(), *parts)
        with pytest.raises(OSError, match="cannot write .*model.safetensors: .*; free some space"):
            models.save(parts[0], RUN, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert before == {f.name: f.read_bytes() for f in folder.iterdir()}


def test_what_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    loss, weights, embeddings = (tmp_path / name for name in ("loss", "weights", "embeddings"))
    break_step(monkeypatch, 3, float("nan"))
    message = "run loss, epoch 1, batch 3: the loss is nan. Kept: checkpoint.pt .*A smaller lr"
    with pytest.raises(training.NonFiniteLoss, match=message):
        training.train(RUN, loss)
    kept = torch.load(loss / "checkpoint.pt", weights_only=True)
    assert kept["at"]["step"] == 2 and not (loss / "metrics.json").exists()
    monkeypatch.undo()
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self: self.param_groups[0]["params"][0].data.fill_(torch.inf),
    )
    with pytest.raises(
        training.NonFiniteLoss, match="a weight is no longer finite. Kept: no checkpoint yet"
    ):
        training.train(RUN, weights)
    monkeypatch.setattr(
        loop, "embed_rows", lambda *args, **options: np.full((len(args[2]), 16), np.nan)
    )
    with pytest.raises(
        training.NonFiniteLoss, match="run embeddings, evaluation: an embedding .*A smaller lr"
    ):
        training.train(replace(RUN, method=config.METHODS["pretrained"]), embeddings)
    assert {f.name for f in embeddings.iterdir()} == {"run.json"}


def test_an_unreadable_test_image_stops_before_training(tmp_path):
    for number in range(16):
        file = tmp_path / "images" / "birds" / f"class{number // 4}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (48, 48), (16 * number, 0, 0)).save(file)
    file.write_bytes(b"no image")  # of the last class, a test class
    settings = config.Data(benchmark="folders", root=str(tmp_path / "images"), image_size=48)
    with pytest.raises(ValueError, match=r"15.png"):
        training.train(
            replace(RUN, data=settings, training=replace(RECIPE, batch_size=4)), tmp_path / "run"
        )
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU; `make gpu` runs it")


@pytest.mark.parametrize("micro_batch", [0, 8])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("precision, bound", [("float32", 2e-3), ("bfloat16", 0.03)])
def test_every_device_and_precision_learns_the_same(
    device, precision, bound, micro_batch, uninterrupted, tmp_path
):
    recipe = replace(RECIPE, device=device, precision=precision, micro_batch=micro_batch)
    record = run_folder.read_record(training.train(replace(RUN, training=recipe), tmp_path))
    mine, its = (
        [row["loss"] for row in r["log"]] for r in (record, run_folder.read_record(uninterrupted))
    )
    assert mine == pytest.approx(its, rel=bound) and (mine != its or precision == "float32")


def test_devices():
    assert training.choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("gpu", "cuda:x", "cuda:99", "meta", ""):
        with pytest.raises(ValueError, match=f"unknown device '{name}'; known: auto, cpu"):
            training.choose_device(name)


@pytest.mark.parametrize("method, factors", [("puma", {10.0, 1e4}), ("full", {1.0, 10.0, 1e4})])
def test_each_part_has_its_learning_rate_and_nothing_is_forgotten(method, factors):
    model = models.build(method, "mini_vit", 8, pretrained="random")
    loss = losses.make("curricularface", 4, 8)
    optimizer = loop.make_optimizer(model, loss, RECIPE)
    by_factor = {
        group["factor"]: {id(p) for p in group["params"]} for group in optimizer.param_groups
    }
    trained = {id(p) for p in [*model.parameters(), *loss.parameters()] if p.requires_grad}
    assert by_factor.keys() == factors and set.union(*by_factor.values()) == trained
    assert (
        by_factor[1e4] == {id(p) for p in loss.parameters()}
        and id(model.head.weight) in by_factor[10.0]
    )


def test_schedules():
    def rates(**settings):
        recipe = config.Training(lr=1.0, **settings)
        return [loop.learning_rate(recipe, epoch, 0, 10) for epoch in range(recipe.epochs)]

    assert rates(schedule="constant", epochs=3) == [1, 1, 1]
    assert rates(schedule="step", epochs=5, step_epochs=2) == [1, 1, 0.5, 0.5, 0.25]
    cosine = np.array([1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])
    np.testing.assert_allclose(
        rates(schedule="cosine", epochs=4, cosine_floor=0.2), 0.2 + 0.8 * cosine
    )


def test_gradients_are_clamped_by_value(monkeypatch, tmp_path):
    seen = []

    def step(self):
        seen.append(max(float(p.grad.abs().max()) for g in self.param_groups for p in g["params"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(KeyboardInterrupt):
        training.train(replace(RUN, training=replace(RECIPE, clip_value=0.01)), tmp_path)
    assert seen == [pytest.approx(0.01)]


@pytest.mark.parametrize("name", losses.list_losses())
def test_every_parameter_of_a_loss_has_a_gradient(name):
    """Else its moments would be missing in a checkpoint."""
    settings = {"similarity": torch.eye(4).tolist()} if name == "language" else {}
    loss = losses.make(name, 4, 8, **settings)
    loss(torch.randn(12, 8, requires_grad=True), torch.arange(12) % 4).backward()
    assert all(p.grad is not None for p in loss.parameters())
