"""Training: the same weights after a kill, and nothing lost when something breaks.

A line says how far it is.
"""

import copy
import json
import multiprocessing
import resource
import shutil
import subprocess
import time
import warnings
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from tqdm import tqdm

from pumalib import config, data, embedder, losses, models, training
from pumalib.training import checkpoint, loop, parallel, run_folder, watch

RECIPE = config.Training(epochs=2, batch_size=20, lr=1e-3, checkpoint_seconds=1e-9, device="cpu")
DATA = config.Data(datasets=("aircraft", "flowers"), image_size=48, shots=2)
PUMA = config.method("puma", prompts=4, adapter_rank=8)
# The smallest of timm's vision transformers.
RUN = config.Run(
    data=DATA, backbone="test_vit", pretrained="random", dim=16, training=RECIPE, method=PUMA
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return training.train(RUN, tmp_path_factory.mktemp("runs") / "uninterrupted")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run interrupted in its fourth step, as by Ctrl-C, which has left both checkpoints."""
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
    model = models.build(PUMA, RUN.backbone, 16, pretrained="random")
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
    seen = ["cosine", "norm", "norm_sd"]  # CurricularFace has no terms that are zero
    assert (
        list(first) == ["epoch", "loss", "lr", "images_per_second", "seconds", *seen]
        and second["loss"] < first["loss"]
    )
    assert record["open_loss"] > 0
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
    assert record["open_loss"] is None


@pytest.mark.parametrize(
    "text", ["", "[]", "null", 10**5 * "[", '{"half": "a rec', '{"run": {"dim": 0}}']
)
def test_a_damaged_record_names_its_file_and_the_remedy(tmp_path, text):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"metrics.json is damaged .*remove the folder .*trained again"
    ):
        run_folder.read_record(tmp_path)


@pytest.mark.parametrize("changes", [{"seed": 1}, {"loss": "triplet"}], ids=str)
def test_a_folder_with_another_run_is_refused(uninterrupted, folder, changes):
    """Finished or begun: its weights would be taken for those that are asked for."""
    other = replace(RUN, **changes)
    for place in (uninterrupted, folder):
        with pytest.raises(ValueError, match=r"holds another run \(puma, curricularface, seed 0"):
            training.train(other, place)


def test_a_whole_record_is_not_removed(uninterrupted, tmp_path, monkeypatch):
    """One that cannot be read for now, and one of a newer version."""
    file = tmp_path / "metrics.json"
    shutil.copy(uninterrupted / "metrics.json", file)
    with monkeypatch.context() as patch:
        patch.setattr(type(file), "read_text", mock.Mock(side_effect=PermissionError))
        with pytest.raises(ValueError, match=r"metrics.json is damaged or missing"):
            run_folder.is_finished(tmp_path)
    record = run_folder.read_record(tmp_path)
    record["run"]["of a newer version"] = 1
    run_folder.write_record(tmp_path, record)
    with pytest.raises(ValueError, match="of a newer version"):
        run_folder.is_finished(tmp_path)
    assert file.is_file()


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


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot make .*PUMALIB_RESULTS"):
        run_folder.make(tmp_path / "file" / "run")


def test_a_killed_run_goes_on_to_the_same_weights(uninterrupted, tmp_path):
    folder = tmp_path / "killed"
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=training.train, args=(RUN, folder))
    process.start()
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint.previous.pt").is_file():  # two steps are done
        assert process.is_alive() and time.monotonic() < deadline, (
            "the run ended before it could be killed"
        )
        time.sleep(0.002)
    process.kill()
    process.join()
    assert not (folder / "metrics.json").exists()
    assert_same(training.train(RUN, folder), uninterrupted)


# ---- The loss with every gate open


def untrained(tmp_path, **changes):
    """A setup whose adapters do something, as after a training."""
    setup = loop.build(replace(RUN, **changes), tmp_path)
    torch.manual_seed(7)
    for parameter in setup.model.adapters.parameters():
        parameter.data.normal_(std=0.1)
    return setup


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_the_open_loss_is_that_of_the_test_view_with_open_gates(variant, tmp_path):
    setup = untrained(tmp_path, loss_settings={"variant": variant})
    setup.loss.t.fill_(0.3)
    rows = loop._chosen_images(setup, 0)[0]
    state = copy.deepcopy(setup.loss.state_dict())
    before = torch.get_rng_state()

    value = loop.open_loss(setup)

    train = setup.benchmark.train
    vectors = embedder.embed_rows(setup.model, setup.benchmark, train.iloc[rows], DATA)
    targets = torch.from_numpy(setup.labels[rows])
    expected = setup.loss.eval()(torch.from_numpy(vectors), targets)
    assert value == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(torch.get_rng_state(), before), "no number was drawn"
    for key, tensor in setup.loss.state_dict().items():
        assert torch.equal(tensor, state[key])

    setup.model.adapters.gate = replace(setup.model.adapters.gate, keep=1.0)
    assert loop.open_loss(setup) == pytest.approx(value, rel=1e-5), "p divides: open is open"
    setup.model.adapters.gate = replace(setup.model.adapters.gate, keep=0.0)
    assert abs(loop.open_loss(setup) - value) > 1e-3, "the adapters do nothing: this shows nothing"


def test_the_open_loss_of_a_miner_that_draws_is_the_same_again_and_draws_nothing(tmp_path):
    setup = untrained(tmp_path, loss="margin")
    before = torch.get_rng_state()
    values = {loop.open_loss(setup) for _ in range(2)}
    assert len(values) == 1 and values.pop() > 0
    assert torch.equal(torch.get_rng_state(), before)
    classes = [len(set(setup.labels[rows])) for rows in loop._open_loss_batches(setup)]
    assert classes == [5], "as this loss has its batches: five classes of four images"


@pytest.mark.parametrize(
    "epochs, count, batches",
    [(1, 500, 1), (100, 500, 10), (100, 5000, 20), (10**4, 100, 2), (25, 100, 1), (75, 100, 2)],
)
def test_the_open_loss_sees_two_percent_or_a_thousand_images(epochs, count, batches, tmp_path):
    recipe = replace(RECIPE, epochs=epochs, batch_size=50)
    setup = loop.build(replace(RUN, training=recipe), tmp_path)
    setup.labels = np.zeros(count, int)
    seen = loop._open_loss_batches(setup)
    assert len(seen) == batches
    assert len(set(np.concatenate(seen))) == 50 * batches, "each image once"


def test_an_open_loss_that_is_not_finite_is_none(tmp_path, monkeypatch):
    setup = untrained(tmp_path)
    monkeypatch.setattr(setup.loss, "compute", lambda x, labels: x.sum() * torch.inf)
    assert loop.open_loss(setup) is None


# ---- What is seen beside the loss


def test_a_batch_is_seen_as_it_is():
    """Against the (N, N) cosines; terms of the loss by hand."""
    model = models.build("linear", "mini_vit", 2, pretrained="random")
    loss = losses.make("contrastive", neg_margin=0.5)
    # After the head: lengths 3, 1, 2 and 2.
    outputs = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    directions = torch.nn.functional.normalize(outputs)
    with watch.watching(model, loss) as seen:
        seen.begin()
        model.head.forward = lambda features: outputs
        model.head(None)
        loss(directions, torch.tensor([0, 0, 1, 2]))
        model.head(None)  # once more, as for the gradients of micro-batches
    cosines = directions @ directions.T
    assert {name: value.item() for name, value in seen.seen.items()} == {
        "reach": pytest.approx(2**0.5),
        "cosine": pytest.approx(float(cosines[~torch.eye(4, dtype=bool)].mean())),
        "norm": 2.0,
        "norm_sd": pytest.approx(np.std([3, 1, 2, 2])),
        "zero_share": 1.0,  # the two of a class coincide, no others are nearer than 0.5
    }
    assert not model.head._forward_hooks and not loss._forward_hooks


def rows_of_log(folder):
    """The log without the columns that depend on the machine's speed."""
    rows = []
    for row in run_folder.read_record(folder)["log"]:
        rows.append({k: v for k, v in row.items() if k not in ("images_per_second", "seconds")})
    return rows


def test_what_is_seen_is_the_same_after_a_stop_and_by_micro_batches(
    uninterrupted, folder, tmp_path
):
    training.train(RUN, folder)
    assert rows_of_log(folder) == rows_of_log(uninterrupted)
    parts = replace(RUN, training=replace(RECIPE, micro_batch=7))
    for mine, its in zip(
        rows_of_log(training.train(parts, tmp_path / "parts")), rows_of_log(uninterrupted)
    ):
        assert mine == {key: pytest.approx(value, rel=1e-3) for key, value in its.items()}


def test_a_checkpoint_from_before_goes_on_and_logs_what_it_sees(uninterrupted, folder):
    for name in run_folder.CHECKPOINTS:
        state = torch.load(folder / name, weights_only=True)
        del state["at"]["watched"]
        for row in state["at"]["log"]:
            for key in ("cosine", "norm", "norm_sd"):
                del row[key]
        torch.save(state, folder / name)
    training.train(RUN, folder)
    assert_same(folder, uninterrupted)
    _, last = rows_of_log(folder)
    assert last["loss"] == rows_of_log(uninterrupted)[1]["loss"]
    assert -1 <= last["cosine"] <= 1, "of the batches since"


def test_a_collapse_is_named_once_while_it_happens(tmp_path, monkeypatch):
    linear = config.method("linear")
    recipe = replace(RECIPE, lr=1e-9)
    collapsed = replace(RUN, method=linear, training=recipe)
    build = models.build

    def build_collapsed(*arguments, **options):
        model = build(*arguments, **options)
        model.head.weight.data.mul_(1e-5)
        return model

    monkeypatch.setattr(models, "build", build_collapsed)
    message = r"run all, epoch 1, batch 1: all embeddings of this batch are within 0.01 of each"
    with pytest.warns(UserWarning, match=message) as caught:
        training.train(collapsed, tmp_path / "all")
    said = [str(one.message) for one in caught if "within 0.01" in str(one.message)]
    assert len(said) == 1
    assert "collapses to a point (loss " in said[0] and "A smaller lr" in said[0]
    assert run_folder.read_record(tmp_path / "all")["log"][0]["cosine"] > 0.9999
    monkeypatch.undo()
    with warnings.catch_warnings(action="error"):
        training.train(collapsed, tmp_path / "none")


def test_one_image_has_no_cosine_and_no_collapse(tmp_path):
    one = replace(RUN, training=replace(RECIPE, batch_size=1, images_per_class=1, epochs=1))
    with warnings.catch_warnings(action="error"):
        (row,) = rows_of_log(training.train(one, tmp_path))
    assert "cosine" not in row


GATED = replace(RUN, training=replace(RECIPE, epochs=3, batch_size=12))


def gates_of(run, folder, monkeypatch, stop=None):
    """Train, and return the gates of each step as texts; Ctrl-C in step `stop`."""
    seen = []
    backward = parallel.backward

    def spied(model, loss, batch, *others):
        if len(seen) + 1 == stop:
            raise KeyboardInterrupt
        seen.append(str({name: gate.tolist() for name, gate in batch.gates.items()}))
        return backward(model, loss, batch, *others)

    with monkeypatch.context() as patch:
        patch.setattr(parallel, "backward", spied)
        try:
            training.train(run, folder)
        except KeyboardInterrupt:
            assert stop is not None
    return seen


@pytest.fixture(scope="module")
def always(tmp_path_factory):
    """The gates of each step where they are always drawn."""
    with pytest.MonkeyPatch.context() as patch:
        return gates_of(GATED, tmp_path_factory.mktemp("runs") / "constant", patch)


@pytest.mark.parametrize("schedule", ["early", "late"])
def test_gates_follow_their_schedule_also_after_a_stop(schedule, always, tmp_path, monkeypatch):
    changed = replace(PUMA, adapter_schedule=schedule)
    run = replace(GATED, method=changed)
    steps = len(always)
    assert steps % 2 == 0 and steps >= 6, "halves of an odd number of steps show nothing"
    expected = [*always[: steps // 2], *["{}"] * (steps // 2)]
    if schedule == "late":
        expected = [*["{}"] * (steps // 2), *always[steps // 2 :]]
    whole = gates_of(run, tmp_path / "whole", monkeypatch)
    assert whole == expected

    # Stopped behind the switch, within an epoch.
    stop = steps // 2 + 2
    before = gates_of(run, tmp_path / "stopped", monkeypatch, stop)
    after = gates_of(run, tmp_path / "stopped", monkeypatch)
    assert (len(before), before + after) == (stop - 1, whole)
    assert_same(tmp_path / "stopped", tmp_path / "whole")


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
    real = parallel.backward
    factors = iter([1.0, 1.0, torch.nan])
    monkeypatch.setattr(parallel, "backward", lambda *given: real(*given) * next(factors))
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
    with pytest.raises(ValueError, match=r"15.png: cannot .*; replace it, or .*drop_unreadable="):
        training.train(
            replace(RUN, data=settings, training=replace(RECIPE, batch_size=4)), tmp_path / "run"
        )
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A small project of one commit."""
    for name in ("pumalib/code.py", "notebooks/01.ipynb", "data/split.csv", "results/kept.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first\n")
    (tmp_path / "README.md").write_text("first\n")
    (tmp_path / ".gitignore").write_text("data/raw/\n")
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(loop.paths, "ROOT", tmp_path)
    return tmp_path


def test_a_revision_is_dirty_where_code_or_inputs_are(repository):
    command = ["git", "rev-parse", "--short", "HEAD"]
    told = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    commit = told.stdout.strip()
    assert loop.revision() == commit

    for name in ("results/kept.jsonl", "README.md", "results/new.csv", "data/raw/image.jpg"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("another\n")
        assert loop.revision() == commit, name

    for name in ("pumalib/code.py", "notebooks/01.ipynb", "data/split.csv", "pumalib/new.py"):
        file = repository / name
        before = file.read_text() if file.is_file() else None
        file.write_text("another\n")
        assert loop.revision() == f"{commit}-dirty", name
        if before is None:
            file.unlink()
        else:
            file.write_text(before)
        assert loop.revision() == commit, name


def test_where_there_is_no_commit_there_is_no_revision(tmp_path, monkeypatch):
    monkeypatch.setattr(loop.paths, "ROOT", tmp_path)
    assert loop.revision() is None
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert loop.revision() is None
    monkeypatch.setenv("PATH", "")
    assert loop.revision() is None


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


@pytest.mark.parametrize("compiled", [True, "graphs"])
@pytest.mark.filterwarnings("ignore:eager backend ignoring extra kwargs")
def test_a_compiled_network_learns_the_same_under_another_name(
    uninterrupted, tmp_path, monkeypatch, compiled
):
    """By dynamo's graphs alone: kernels take a minute to compile, and CUDA graphs need a GPU."""
    monkeypatch.setattr(loop, "COMPILER", "eager")
    run = replace(RUN, training=replace(RECIPE, compile=compiled))
    setup = loop.build(run, tmp_path)
    with tqdm(disable=True) as bar:
        mine = loop.fit(setup, tmp_path, bar).log
    its = run_folder.read_record(uninterrupted)["log"]
    assert [row["loss"] for row in mine] == pytest.approx([row["loss"] for row in its], rel=1e-5)
    assert training.run_name(run) != training.run_name(RUN)
    off = replace(RUN, training=replace(RECIPE, compile=False))
    assert training.run_name(off) == training.run_name(RUN)


def test_cuda_graphs_need_whole_batches(tmp_path):
    run = replace(RUN, training=replace(RECIPE, compile="graphs", micro_batch=8))
    with pytest.raises(ValueError, match=r"'graphs' needs whole batches: micro_batch = 0"):
        loop.build(run, tmp_path)


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
