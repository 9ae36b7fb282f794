"""Training: `train(run, folder)` fills a run's folder, can be killed anywhere, and goes on where it was.

All randomness of a step comes from (seed, epoch, step), never from what happened before it; so a resumed run
draws what an uninterrupted one draws, and a checkpoint holds no random state.  Under torchrun several processes
train one run (`distributed`): all go through the same steps, and the first one alone writes and evaluates.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import timm
import torch
from torch import Tensor, nn
from tqdm import tqdm

from . import config, data, distributed, evaluation, losses, models, paths
from .config import Run
from .data import Benchmark, decoding, loading, packing, sampling
from .distributed import backward
from .models import EmbeddingModel

KS = (1, 2, 4, 8, 10, 20, 100)  # the k of every R@k the paper prints, and 8
FINISHED = "metrics.json"  # written last: a folder that has it is complete
CHECKPOINTS = ("checkpoint.pt", "checkpoint.previous.pt")


class NonFiniteLoss(ArithmeticError):
    """Training met a loss or a weight that is not finite; the last good checkpoint is kept."""


def train(run: Run, folder: Path) -> Path:
    """Train and evaluate `run`, or go on where `folder` left off, and return `folder`.

    It leaves `run.json`, `environment.json`, `log.csv` (per epoch: loss, lr, images/s, seconds),
    `model.safetensors` (what was trained, nothing else) and, written last, `metrics.json`; `checkpoint.pt`
    stands there while unfinished.

    Raises:
        NonFiniteLoss: naming run, epoch and batch.
        OSError: the folder cannot be written; what stood there is kept.
        ValueError, FileNotFoundError: of data, models and losses.
    """
    if (folder / FINISHED).is_file():
        return folder
    device = choose_device(run.training.device)
    benchmark = data_of(run)
    # Proxies are numbered 0..C-1 over the training classes, whatever labels the table gives them.
    classes, labels = np.unique(benchmark.train["label"].to_numpy(), return_inverse=True)

    torch.manual_seed(run.seed)
    loss = losses.make(run.loss, len(classes), run.dim, **run.loss_settings)
    model = models.build(run.method, run.backbone, run.dim, pretrained=run.pretrained,
                         image_size=run.data.image_size, normalise=loss.normalised_input)  # fmt: skip
    trains = any(p.requires_grad for p in model.parameters())
    environment = describe(run, model, benchmark, device)
    model, loss = model.to(device).train(), loss.to(device).train()
    model.recompute = run.training.recompute
    if run.training.compile:
        model.compile()
    _write(folder / "run.json", run.to_json())
    _write(folder / "environment.json", json.dumps(environment, indent=2))

    log = _fit(_Training(run, folder, model, loss), benchmark, labels) if trains else []
    if not distributed.leave():
        return folder
    embeddings = embed(model, benchmark, benchmark.test, run.data, device=device)
    scores = evaluation.scores(embeddings, benchmark.test, KS, distance=loss.metric, device=device)
    models.save(model, run, folder)
    trainable, total = models.count_parameters(model)
    finish(folder, scores, trainable=trainable, total=total, seconds=sum(row["seconds"] for row in log),
           images_per_second=log[-1]["images_per_second"] if log else None)  # fmt: skip
    for name in CHECKPOINTS:
        (folder / name).unlink(missing_ok=True)
    return folder


def _fit(training: _Training, benchmark: Benchmark, labels: np.ndarray) -> list[dict]:
    """Train from where the checkpoint stands to the end; the log of all epochs."""
    run, at = training.run, training.resume()
    steps = len(distributed.share(plan_epoch(labels, training.loss.batches, run, 0)))
    with tqdm(total=run.training.epochs * steps, initial=at.epoch * steps + at.step, unit="batch", leave=False,
              desc=training.folder.name, disable=distributed.rank() > 0 or "TQDM_DISABLE" in os.environ,
              mininterval=0.2 if sys.stderr.isatty() else 5) as progress:  # fmt: skip
        while training.at.epoch < run.training.epochs:
            training.epoch(benchmark, labels, progress)
    return training.at.log


def finish(folder: Path, scores: evaluation.Scores, *, trainable: int, total: int, seconds: float,
           images_per_second: float | None) -> None:  # fmt: skip
    """Write `metrics.json`: numbers of parameters, seconds of training, the table of accuracies, each query's R@1."""
    table = scores.table().reset_index(names="dataset").to_dict("records")
    metrics = dict(
        parameters=dict(trainable=trainable, total=total), seconds=seconds, images_per_second=images_per_second,
        table=[{key: round(v, 8) if isinstance(v, float) else v for key, v in line.items()} for line in table],
        hits=scores.packed(),
    )  # fmt: skip
    _write(folder / FINISHED, json.dumps(metrics).replace("}, {", "},\n{"))


@dataclass
class _Position:
    """How far a training is: before step `step` of epoch `epoch`, with what the epoch has summed so far."""

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    images: int = 0
    seconds: float = 0.0
    log: list = field(default_factory=list)


class _Training:
    """What is carried from step to step: model, loss, optimiser and position; and its checkpoints."""

    def __init__(self, run: Run, folder: Path, model: EmbeddingModel, loss: nn.Module):
        self.run, self.folder, self.model, self.loss = run, folder, model, loss
        self.network = distributed.network(model)
        self.optimizer = make_optimizer(model, loss, run)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.at = _Position()

    def epoch(self, benchmark: Benchmark, labels: np.ndarray, progress: tqdm) -> None:
        """Train from the position to the end of its epoch; log it and write a checkpoint."""
        run, at, recipe = self.run, self.at, self.run.training
        plan = distributed.share(plan_epoch(labels, self.loss.batches, run, at.epoch))
        mean, std = models.backbones.normalisation(self.model.backbone)
        device = next(self.model.parameters()).device
        batches = loading.batches(
            benchmark, benchmark.train, plan, train=True, size=run.data.image_size, mean=mean, std=std, labels=labels,
            seed=run.seed, epoch=at.epoch, start=at.step, workers=recipe.workers, crop_scale=run.data.crop_scale,
            flip=run.data.flip, pin=device.type == "cuda", device=device, part=distributed.rank(),
        )  # fmt: skip
        checked = clock = time.monotonic()
        for images, targets, _ in batches:
            lr = learning_rate(run, at.epoch, at.step, len(plan))
            self.step(images, targets, lr)
            now = time.monotonic()
            at.seconds, clock = at.seconds + now - clock, now
            at.images, at.step = at.images + len(images) * distributed.size(), at.step + 1
            progress.set_postfix_str(f"loss {at.loss / at.step:.3f}, {at.images / at.seconds:.0f} images/s", refresh=False)
            progress.update()
            if now - checked > recipe.checkpoint_seconds and at.step < len(plan):
                self.checkpoint()
                checked = time.monotonic()
        row = dict(epoch=at.epoch + 1, loss=at.loss / len(plan), lr=lr, images_per_second=at.images / at.seconds,
                   seconds=at.seconds)  # fmt: skip
        self.at = _Position(epoch=at.epoch + 1, log=[*at.log, row])
        _write(self.folder / "log.csv", pd.DataFrame(self.at.log).to_csv(index=False))
        self.checkpoint()

    def step(self, images: Tensor, targets: Tensor, lr: float) -> None:
        """One step of the optimiser."""
        run, at = self.run, self.at
        generator = torch.manual_seed(int(np.random.SeedSequence((run.seed, at.epoch, at.step)).generate_state(1)[0]))
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        self.optimizer.zero_grad(set_to_none=True)
        gates = self.model.draw_gates(len(images) * distributed.size(), generator)
        value = backward(
            self.network, self.loss, images, targets, gates, run.training.micro_batch, precision(run, images.device)
        ).item()
        if not math.isfinite(value):
            raise self.not_finite(f"the loss is {value}")
        if run.training.clip_value:
            nn.utils.clip_grad_value_(self.parameters, run.training.clip_value)
        self.optimizer.step()
        at.loss += value

    def not_finite(self, what: str) -> NonFiniteLoss:
        kept = [name for name in CHECKPOINTS if (self.folder / name).is_file()]
        return NonFiniteLoss(
            f"run {self.folder.name}, epoch {self.at.epoch + 1}, batch {self.at.step + 1}: {what}. "
            f"Kept: {kept[0] if kept else 'no checkpoint yet'} in {self.folder}. A smaller lr, clip_value or "
            "loss_lr_factor, or precision = 'float32', usually helps; a changed run starts anew in its own folder"
        )

    def checkpoint(self) -> None:
        """Write `checkpoint.pt`, keeping the one before; refuse to save weights that are not finite."""
        if distributed.rank() > 0:
            return
        if not all(bool(torch.isfinite(p).all()) for p in self.parameters):
            raise self.not_finite("a weight is no longer finite")
        state = dict(
            model=models.trainable_state(self.model), loss=self.loss.state_dict(),
            optimizer=self.optimizer.state_dict(), at=asdict(self.at),
        )  # fmt: skip
        current, previous = (self.folder / name for name in CHECKPOINTS)
        with paths.written_whole(current) as file:
            torch.save(state, file)
            if current.is_file():
                current.replace(previous)

    def resume(self) -> _Position:
        """Go to where the newest readable checkpoint stands, if there is one; returns the position."""
        for name in CHECKPOINTS:
            file = self.folder / name
            if not file.is_file():
                continue
            try:
                state = torch.load(file, map_location="cpu", weights_only=True)
                at = _Position(**state["at"])
            except Exception as error:  # a damaged file raises nearly anything
                warnings.warn(f"{file} is damaged ({type(error).__name__}); trying the one before it", stacklevel=2)
                continue
            self.model.load_state_dict(state["model"], strict=False)
            self.loss.load_state_dict(state["loss"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.at = at
            return at
        if any((self.folder / name).is_file() for name in CHECKPOINTS):
            warnings.warn(f"no checkpoint in {self.folder} can be read: training starts from the beginning", stacklevel=2)
        return self.at


def make_optimizer(model: EmbeddingModel, loss: nn.Module, run: Run) -> torch.optim.AdamW:
    """AdamW over three groups with their factors of the learning rate: backbone, new parameters, loss."""
    recipe = run.training
    backbone = [p for p in model.backbone.parameters() if p.requires_grad]
    inside = {id(p) for p in model.backbone.parameters()}
    new = [p for p in model.parameters() if id(p) not in inside]
    groups = [(backbone, 1.0), (new, recipe.new_lr_factor), (list(loss.parameters()), recipe.loss_lr_factor)]
    return torch.optim.AdamW(
        [dict(params=params, factor=factor) for params, factor in groups if params],
        lr=recipe.lr, weight_decay=recipe.weight_decay,
    )  # fmt: skip


def learning_rate(run: Run, epoch: int, step: int, steps: int) -> float:
    """The rate of backbone weights in step `step` of `steps` of epoch `epoch` (both from 0)."""
    recipe = run.training
    if recipe.schedule == "step":
        return recipe.lr * recipe.step_factor ** (epoch // recipe.step_epochs)
    if recipe.schedule == "cosine":
        return recipe.lr * 0.5 * (1 + math.cos(math.pi * (epoch + step / steps) / recipe.epochs))
    return recipe.lr


def plan_epoch(labels: np.ndarray, batches: str, run: Run, epoch: int) -> list[np.ndarray]:
    """Positions of the images of each batch: random for proxy losses, P classes x K images for pair losses."""
    size, per_class = run.training.batch_size, run.training.images_per_class
    if batches == "classes":
        return sampling.class_batches(labels, max(2, size // per_class), per_class, run.seed, epoch)
    return sampling.random_batches(len(labels), size, run.seed, epoch)


def embed(model: EmbeddingModel, benchmark: Benchmark, rows: pd.DataFrame, settings: config.Data, *,
          device: torch.device | str = "cpu", batch_size: int = 256, prompt_weights: bool = False):  # fmt: skip
    """Embeddings (n, dim) float32 of some rows of a benchmark, by the test transform.

    With `prompt_weights`, of a model with a prompt pool: embeddings and the weights (n, M) of its prompts.
    """
    mean, std = models.backbones.normalisation(model.backbone)
    batches = loading.batches(
        benchmark, rows, sampling.ordered_batches(len(rows), batch_size), train=False, size=settings.image_size,
        mean=mean, std=std, resize=settings.resize, device=device,
    )  # fmt: skip
    model = model.eval()
    with torch.inference_mode():
        outputs = [model(images, prompt_weights=True) for images, _, _ in batches]
    embeddings, weights = (part if part[0] is None else torch.cat(part).float().cpu().numpy() for part in zip(*outputs))
    return (embeddings, weights) if prompt_weights else embeddings


@lru_cache(maxsize=16)
def load_data(settings: config.Data, seed: int = 0) -> Benchmark:
    """The benchmark a run asks for; `seed` draws its shots."""
    root = None if settings.root is None else paths.resolve(settings.root)
    benchmark = data.load(settings.benchmark, root, settings.datasets)
    benchmark = packing.use(benchmark) if settings.packed else benchmark
    benchmark = decoding.drop_unreadable(benchmark) if settings.drop_unreadable else benchmark
    benchmark = benchmark.holdout() if settings.holdout else benchmark
    if not settings.shots:
        return benchmark
    few = sampling.few_shot(benchmark.train, settings.shots, seed)
    return replace(benchmark, images=pd.concat([few, benchmark.test], ignore_index=True))


def data_of(run: Run) -> Benchmark:
    """The benchmark of a run, with the shots its seed draws."""
    return load_data(run.data, run.seed if run.data.shots else 0)


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the GPU if there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def precision(run: Run, device: torch.device) -> torch.dtype:
    """bfloat16 or float32; "auto" is bfloat16 on CUDA."""
    name = run.training.precision
    name = ("bfloat16" if device.type == "cuda" else "float32") if name == "auto" else name
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def describe(run: Run, model: EmbeddingModel, benchmark: Benchmark, device: torch.device) -> dict:
    """What a reader needs to repeat the run: versions, device, revision, and digests of data and weights."""
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=paths.ROOT, capture_output=True, text=True)
        revision = git.stdout.strip() or None
    except OSError:  # no git on this machine
        revision = None
    return dict(
        python=platform.python_version(), torch=torch.__version__, timm=timm.__version__, numpy=np.__version__,
        device=device_name(device), processes=distributed.size(),
        threads=torch.get_num_threads(),
        precision=str(precision(run, device)).removeprefix("torch."), revision=revision,
        data=benchmark.digest(), form=benchmark.form, weights=models.backbones.state_digest(model.backbone),
    )  # fmt: skip


def _write(file: Path, text: str) -> None:
    """Write a file in the first process."""
    if distributed.rank() > 0:
        return
    with paths.written_whole(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
