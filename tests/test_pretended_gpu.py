"""Everything that trains, embeds or searches runs on a GPU, as far as that shows without one.

`pretended_gpu` says what its GPU refuses and what it counts.
"""

from dataclasses import replace
from itertools import product

import matplotlib
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from pretended_gpu import installed, is_on_gpu
from tqdm import tqdm

from puma_study import figures
from pumalib import config, embedder, evaluation, index, losses, models, paths, training
from pumalib.data import batches, images
from pumalib.evaluation import search
from pumalib.training import loop, memory, parallel, run_folder

DATA = config.Data(datasets=("aircraft",), image_size=48, shots=2)
RECIPE = config.Training(epochs=1, batch_size=20, lr=1e-3, device="cuda")
SMALL = {"adapter_rank": 4, "lora_rank": 4, "prompts": 4}
RUN = config.Run(
    data=DATA,
    backbone="mini_vit_64",
    pretrained="random",
    dim=16,
    method=config.method("puma", prompts=4, adapter_rank=4),
    training=RECIPE,
)
LINEAR = replace(RUN, method=config.METHODS["linear"])
TRAINED = [name for name in config.METHODS if name not in ("pretrained", "whitened")]

# Losses with settings, and how often a step waits for the GPU because of them.
LOSSES = {
    # A draw of negatives: for the number of positive pairs, and torch checks the weights twice.
    "margin": ({}, 3),
    "ms, code": ({"variant": "code"}, 3),
    "triplet, random": ({"miner": "random"}, 3),
    # For the number of positive pairs.
    "triplet, all": ({"miner": "all", "direction": 0.3}, 1),
    "triplet, semihard": ({"miner": "semihard", "distance": "euclidean"}, 1),
    # For the number of anchors that have a positive.
    "npair": ({}, 1),
    "margin, code": ({"variant": "code"}, 0),
    "margin, all": ({"variant": "all"}, 0),
    "xbm, warmup": ({"warmup": 1}, 0),
    "curricularface, code": ({"variant": "code"}, 0),
    "proxynca++, code": ({"variant": "code"}, 0),
    "hyp, code": ({"variant": "code"}, 0),
    "direction, ms": ({"loss": "ms"}, 0),
    "direction, proxynca": ({"loss": "proxynca"}, 0),
    "softtriple, tau": ({"tau": 0.2}, 0),
}
for plain in losses.list_losses():
    LOSSES.setdefault(plain, ({}, 0))


@pytest.fixture
def gpu():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with installed() as pretended:
        yield pretended
    torch.set_num_threads(threads)


def fit(run, folder):
    """Train without evaluation; returns the setup and the log."""
    setup = loop.build(run, folder)
    with tqdm(disable=True) as bar:
        return setup, loop.fit(setup, folder, bar).log


def counted(run, folder, gpu, steps=2):
    """Train a few steps; the waits and the slow copies of each but the first.

    The first step also checks the labels.
    """
    real = loop._step
    seen = []

    def step(*arguments):
        gpu.clear()
        found = real(*arguments)
        seen.append((gpu.waits.total(), gpu.slow_copies.total()))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_step", step)
        patch.setattr(loop, "_chosen_images", lambda setup, epoch: [np.arange(20)] * steps)
        setup, _ = fit(run, folder)
    assert all(map(is_on_gpu, setup.model.parameters()))
    return seen[1:]


# ---- training


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_of_every_method_waits_for_nothing(name, gpu, tmp_path):
    method = config.METHODS[name]
    smaller = {key: min(value, getattr(method, key)) for key, value in SMALL.items()}
    run = replace(RUN, method=config.method(method, **smaller))
    assert counted(run, tmp_path, gpu) == [(0, 0)]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:proxygml")
def test_a_step_of_every_loss_waits_as_often_as_is_written(name, gpu, tmp_path):
    settings, waits = LOSSES[name]
    run = replace(LINEAR, loss=name.partition(",")[0], loss_settings=settings)
    assert counted(run, tmp_path, gpu) == [(waits, 0)]


@pytest.mark.parametrize(
    "recipe",
    [{"micro_batch": 7}, {"recompute": True}, {"precision": "bfloat16"}, {"clip_value": 0}],
    ids=str,
)
def test_a_step_of_every_recipe_waits_for_nothing(recipe, gpu, tmp_path):
    run = replace(RUN, training=replace(RECIPE, **recipe))
    assert counted(run, tmp_path, gpu) == [(0, 0)]


def test_as_many_images_as_fit_pass_at_once_with_the_same_gradient(gpu, tmp_path, monkeypatch):
    whole = loop.build(RUN, tmp_path / "whole")
    assert whole.micro_batch == 0, "16 GB hold twenty images"
    of_image = memory.saved_by_an_image(whole.model, 48, "float32")
    parameters = [*whole.model.parameters(), *whole.loss.parameters()]
    trained = 12 * sum(one.numel() for one in parameters if one.requires_grad)

    by_memory = replace(RUN, training=config.Training(**vars(RECIPE) | {"micro_batch": "auto"}))
    enough = (trained + 8.5 * of_image) / memory.SHARE
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (enough, enough))
    setup, parts = fit(by_memory, tmp_path / "parts")
    assert setup.micro_batch == 8
    _, log = fit(RUN, tmp_path / "log")
    assert parts[0]["loss"] == pytest.approx(log[0]["loss"], rel=1e-5)
    assert run_folder.run_name(by_memory) == run_folder.run_name(RUN)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (trained, trained))
    with pytest.raises(ValueError, match=r"an image of 48 px needs .* GB .* recompute = true"):
        loop.build(by_memory, tmp_path / "little")


def test_the_losses_of_ten_steps_are_read_at_once(gpu, tmp_path, monkeypatch):
    real = loop._read
    reads = []

    def read(fitting):
        gpu.clear()
        count = len(fitting.unread)
        real(fitting)
        reads.append((count, gpu.waits.total()))

    monkeypatch.setattr(loop, "_read", read)
    monkeypatch.setattr(loop, "_chosen_images", lambda setup, epoch: [np.arange(20)] * 12)
    _, log = fit(LINEAR, tmp_path / "gpu")
    assert reads == [(10, 1), (2, 1)], "one wait each"

    monkeypatch.setattr(loop, "READ_EVERY", 1)
    reads.clear()
    _, each = fit(LINEAR, tmp_path / "each")
    assert reads == [(1, 1)] * 12
    for row in (*log, *each):
        del row["seconds"], row["images_per_second"]
    assert log == each, "the same sums in the same order"


def test_a_loss_that_is_not_finite_names_its_step_though_it_is_read_later(
    gpu, tmp_path, monkeypatch
):
    real = parallel.backward
    calls = []

    def backward(*arguments):
        calls.append(1)
        value = real(*arguments)
        return value * float("nan") if len(calls) == 3 else value

    monkeypatch.setattr(parallel, "backward", backward)
    monkeypatch.setattr(loop, "_chosen_images", lambda setup, epoch: [np.arange(20)] * 12)
    with pytest.raises(training.NonFiniteLoss, match=r"epoch 1, batch 3: the loss is nan"):
        fit(LINEAR, tmp_path)
    assert len(calls) == 10
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_whole_run_is_that_of_the_cpu_also_after_a_stop(gpu, tmp_path, monkeypatch):
    scored = replace(RECIPE, epochs=2, score_epochs=1, checkpoint_seconds=1e-9)
    run = replace(RUN, data=replace(DATA, holdout=True), training=scored)
    real = torch.optim.AdamW.step
    calls = []

    def step(optimizer):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(optimizer)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.optim.AdamW, "step", step)
        training.train(run, tmp_path / "stopped")
    training.train(run, tmp_path / "stopped")
    training.train(run, tmp_path / "whole")
    on_cpu = replace(run, training=replace(scored, device="cpu"))
    training.train(on_cpu, tmp_path / "cpu")

    stopped, whole, cpu = (
        run_folder.read_record(tmp_path / name) for name in ("stopped", "whole", "cpu")
    )
    assert whole["environment"]["device"] == "a pretended GPU"
    assert run_folder.run_name(run) == run_folder.run_name(on_cpu)
    assert whole["environment"]["precision"] == cpu["environment"]["precision"] == "float32"
    assert stopped["table"] == whole["table"]
    assert whole["log"][-1]["loss"] == pytest.approx(cpu["log"][-1]["loss"], rel=1e-4)
    assert whole["open_loss"] == pytest.approx(cpu["open_loss"], rel=1e-3)

    # An embedder and an index of it, on the GPU.
    pictures = np.random.default_rng(0).integers(0, 256, (4, 48, 48, 3), dtype=np.uint8)
    vectors = []
    for device in ("cuda", "cpu"):
        model = embedder.load(tmp_path / "whole", device=device)
        assert is_on_gpu(next(model.model.parameters())) == (device == "cuda")
        vectors.append(model.embed(pictures, progress=False))
    np.testing.assert_allclose(*vectors, atol=1e-6)

    (tmp_path / "images").mkdir()
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / "images" / f"{number}.png")
    found = []
    for device in ("cuda", "cpu"):
        model = embedder.load(tmp_path / "whole", device=device)
        folder = index.FolderIndex(model, tmp_path / "images", store=tmp_path / device)
        folder.update()
        found.append(folder.search(tmp_path / "images" / "2.png", 3)["path"].tolist())
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


@pytest.mark.parametrize("name", ["pretrained", "whitened"])
def test_a_head_that_is_computed_is_that_of_the_cpu(name, gpu, tmp_path):
    tables = []
    for device in ("cuda", "cpu"):
        recipe = replace(RECIPE, device=device)
        run = replace(RUN, method=config.METHODS[name], dim=64, training=recipe)
        training.train(run, tmp_path / device)
        tables.append(pd.DataFrame(run_folder.read_record(tmp_path / device)["table"]))
    pd.testing.assert_frame_equal(*tables, atol=1e-3)


def test_images_are_trained_and_embedded_in_true_float32(gpu, tmp_path, monkeypatch):
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    assert before != "ieee", "it is so anyway: this shows nothing"
    seen = []
    real = models.EmbeddingModel.forward

    def forward(*arguments):
        seen.append(conv.fp32_precision)
        return real(*arguments)

    monkeypatch.setattr(models.EmbeddingModel, "forward", forward)
    model = embedder.Embedder(loop.build(LINEAR, tmp_path / "built").model, LINEAR)
    model.embed(np.zeros((1, 48, 48, 3), np.uint8), progress=False)
    assert seen == ["ieee"]
    monkeypatch.setattr(loop, "_fit_and_finish", lambda setup, folder, bar: fit(LINEAR, folder))
    training.train(LINEAR, tmp_path / "trained")
    assert len(seen) > 1
    assert set(seen) == {"ieee"}
    assert conv.fp32_precision == before


@pytest.mark.parametrize("name", ["auto", "float32", "bfloat16"])
def test_one_name_is_one_precision_on_every_device(name, gpu, recwarn):
    on_gpu = loop.choose_precision(name, torch.device("cuda"))
    assert on_gpu == loop.choose_precision(name, torch.device("cpu"))
    assert not recwarn


def test_a_gpu_that_emulates_bfloat16_is_warned_of(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.warns(UserWarning, match=r"compute capability 7\.5.* -p precision=float32"):
        loop.choose_precision("bfloat16", torch.device("cuda"))


def test_batches_of_worker_processes_come_ahead_pinned_and_without_a_wait(gpu, tmp_path):
    benchmark = loop.data.load(DATA, 0)
    view = images.View(DATA, (0.5,) * 3, (0.5,) * 3, training=True)
    plan = batches.Plan(benchmark, benchmark.train, [np.arange(70)] * 3, view, seed=1)
    expected = list(batches.batches(plan))
    gpu.clear()
    found = list(batches.batches(replace(plan, workers=2, device="cuda")))
    assert (gpu.waits.total(), gpu.slow_copies.total()) == (0, 0)
    assert len(found) == 3
    for (mine, rows), (its, same_rows) in zip(found, expected, strict=True):
        assert is_on_gpu(mine)
        assert torch.equal(mine.cpu(), its)
        assert np.array_equal(rows, same_rows)


# ---- search


@pytest.mark.parametrize("block", [search.BLOCK, 7000])
def test_a_search_on_the_gpu_finds_what_that_of_the_cpu_finds(block, gpu, monkeypatch):
    """At the size of the paper's whole gallery; ties are those of duplicates."""
    monkeypatch.setattr(search, "BLOCK", block * 40)
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((146_665, 128)).astype(np.float32)
    vectors[1000:1040] = vectors[7]
    queries = np.array([7, 1003, 5, 146_664, 90_000])
    table = pd.DataFrame({"dataset": "all", "split": "test"}, index=range(len(vectors)))
    on_cpu = evaluation.neighbours(vectors, table, queries, k=50)
    on_gpu = evaluation.neighbours(vectors, table, queries, k=50, device="cuda")
    assert gpu.waits.total() > 0, "it was searched on the CPU: this shows nothing"
    assert np.array_equal(on_cpu, on_gpu)
    assert on_gpu[0, :40].tolist() == list(range(1000, 1040)), "ties in the order of the table"


# ---- notebooks


@pytest.fixture(scope="module")
def few_images(tmp_path_factory):
    """The settings of two datasets of four classes of ten images."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    names = ["first", "second"]
    for dataset, label in product(names, "abcd"):
        folder = root / dataset / label
        folder.mkdir(parents=True)
        for number in range(10):
            picture = rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(picture).save(folder / f"{number}.png")
    return {"benchmark": "folders", "root": str(root), "datasets": names}


@pytest.mark.parametrize(
    "stem, parameters",
    [("00_quickstart", {"methods": ["puma"]}), ("13_prompt_analysis", {})],
)
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_runs(stem, parameters, few_images, gpu, tmp_path, monkeypatch):
    matplotlib.use("agg")
    # Drawing a figure takes as long as training, and asks no GPU.
    monkeypatch.setattr(figures, "save", lambda *_: None)
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    notebook = nbformat.read(paths.NOTEBOOKS / f"{stem}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    space = {"__name__": "notebook", "display": lambda *_: None}
    for number, cell in enumerate(cells):
        exec(compile(cell.source, f"{stem}, cell {number}", "exec"), space)
        if number == 0:
            space.update(parameters, profile="smoke", overrides=few_images)
    assert gpu.waits.total() > 0, "nothing ran on the GPU: this shows nothing"
    records = list(tmp_path.rglob("metrics.json"))
    assert records
    for file in records:
        environment = run_folder.read_record(file.parent)["environment"]
        assert environment["device"] == "a pretended GPU"


# ---- mistakes on purpose: each is noticed


def test_a_tensor_of_the_cpu_in_a_loss_is_refused(gpu, tmp_path, monkeypatch):
    real = losses.base.Loss.forward

    def forward(loss, embeddings, labels):
        return real(loss, embeddings, labels) + torch.ones(20).mean(0, keepdim=True).sum(0) * 0

    def mixed(loss, embeddings, labels):
        return real(loss, embeddings * torch.ones(20, 1), labels)

    monkeypatch.setattr(losses.base.Loss, "forward", forward)
    # A number without axes is allowed on CUDA too.
    assert counted(LINEAR, tmp_path / "number", gpu) == [(0, 0)]
    monkeypatch.setattr(losses.base.Loss, "forward", mixed)
    with pytest.raises(RuntimeError, match="expected all tensors on the same device"):
        counted(LINEAR, tmp_path / "mixed", gpu)


@pytest.mark.parametrize(
    "mistake, expected",
    {
        "item": (lambda x: x.sum().item(), (1, 0)),
        "float": (lambda x: float(x.sum()), (1, 0)),
        "if": (lambda x: 1 if x.sum() > 0 else 2, (1, 0)),
        "tolist": (lambda x: x.tolist(), (1, 0)),
        "cpu": (lambda x: x.detach().cpu(), (1, 0)),
        "nonzero": (lambda x: (x > 0).nonzero(), (1, 0)),
        "mask": (lambda x: x[x > 0], (1, 0)),
        "unique": (lambda x: x.unique(), (1, 0)),
        "blocking copy": (lambda x: torch.ones(3).pin_memory().to(x.device), (0, 1)),
        "pageable copy": (lambda x: torch.ones(3).to(x.device, non_blocking=True), (0, 1)),
        "new tensor": (lambda x: torch.tensor([1.0], device=x.device), (0, 1)),
        "index of the CPU": (lambda x: x[torch.arange(3)], (0, 1)),
        "copied into": (lambda x: torch.empty_like(x[0]).copy_(torch.ones(16)), (0, 1)),
        "nothing": (lambda x: x + 1, (0, 0)),
        "good copy": (lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True), (0, 0)),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wait_and_a_slow_copy_in_a_step_are_counted(
    mistake, expected, gpu, tmp_path, monkeypatch
):
    make, count = expected
    real = losses.base.Loss.forward

    def forward(loss, embeddings, labels):
        make(embeddings)
        return real(loss, embeddings, labels)

    monkeypatch.setattr(losses.base.Loss, "forward", forward)
    assert counted(LINEAR, tmp_path, gpu) == [count]


def test_numpy_of_a_gpus_tensor_is_refused(gpu):
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        np.asarray(torch.ones(2, device="cuda"))
