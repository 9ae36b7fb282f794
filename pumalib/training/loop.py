"""Training: `train(run, folder)` fills a run's folder, can be killed anywhere, and goes on where it was.

All randomness of a step comes from (seed, epoch, step), never from what happened before it; so a resumed run
draws what an uninterrupted one draws, and a checkpoint holds no random state.  Under torchrun several processes
train one run (`parallel`): all go through the same steps, and the first one alone writes and evaluates.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
import timm
import torch
from torch import nn

from .. import data, evaluation, losses, models, paths
from ..config import Run
from ..data import batches
from . import parallel, run_folder
from .run_folder import CHECKPOINTS, FINISHED, write_text


class NonFiniteLoss(ArithmeticError):
    """Training met a loss, a weight or an embedding that is not finite; the last good checkpoint is kept."""


@dataclass
class Reached:
    """How far a training is: before step `step` of epoch `epoch`, with what the epoch has summed so far."""

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    log: list = field(default_factory=list)


def train(run: Run, folder: Path, position: str = "", live: bool | None = None) -> Path:
    """Train and evaluate `run`, or go on where `folder` left off, and return `folder`; a finished one is only read.

    It leaves `run.json`, `environment.json`, `log.csv`, `model.safetensors` (what was trained, nothing else) and,
    written last, `metrics.json`.  Where others may want the same run, hold `run_folder.lock(folder)`.

    Args:
        position: of this run among others, such as "run 3 of 9", and `live`: see `Progress`.

    Raises:
        NonFiniteLoss: naming run, epoch and batch.
        OSError: the folder cannot be written; what stood there is kept.
        ValueError, FileNotFoundError: of device, data, models and losses.
    """
    if (folder / FINISHED).is_file():
        return folder
    with Progress(position, folder.name, live=live) as progress:
        # ---- build
        recipe, device, first = run.training, choose_device(run.training.device), parallel.rank() == 0
        automatic = "bfloat16" if device.type == "cuda" else "float32"
        precision = automatic if recipe.precision == "auto" else recipe.precision
        benchmark = data.load(run.data, run.seed)
        if benchmark.pixels is None and len(benchmark.test) < 20_000:  # within a minute, not after days of training
            progress.say("decoding the test images")
            for error in batches.unreadable(replace(benchmark, images=benchmark.test)).values():
                raise error
        # Proxies are numbered 0..C-1 over the training classes, whatever labels the table gives them.
        classes, labels = np.unique(benchmark.train["label"].to_numpy(), return_inverse=True)
        torch.manual_seed(run.seed)
        loss = losses.make(run.loss, len(classes), run.dim, **run.loss_settings)
        options = {"image_size": run.data.image_size, "normalise": loss.normalised_input}
        model = models.build(run.method, run.backbone, run.dim, pretrained=run.pretrained, **options)
        if first:
            digests = {"data": benchmark.digest(), "weights": models.backbones.state_digest(model.backbone)}
            run_folder.make(folder)
            write_text(folder / "run.json", run.to_json())
            write_text(folder / "environment.json", json.dumps(machine(device, precision) | digests, indent=2))
        model, loss = model.to(device).train(), loss.to(device).train()
        model.recompute = recipe.recompute
        if recipe.compile:
            model.compile()

        # ---- fit
        at = Reached(epoch=recipe.epochs)  # a method without parameters has nothing to train
        if any(p.requires_grad for p in model.parameters()):
            parallel.check(model, recipe.micro_batch)
            optimizer = make_optimizer(model, loss, run)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            at = resume(folder, model, loss, optimizer)
        view, saved = batches.train_view(run.data, *models.backbones.normalisation(model.backbone)), time.monotonic()
        while at.epoch < recipe.epochs:
            chosen = parallel.share(epoch_batches(labels, loss.batches, run, at.epoch))
            plan = batches.Plan(chosen, run.seed, at.epoch, at.step, parallel.rank(), recipe.workers, device)
            clock = time.monotonic()
            for images, rows in batches.batches(benchmark, benchmark.train, plan, view):
                where = f"epoch {at.epoch + 1}, batch {at.step + 1}"
                lr = learning_rate(run, at.epoch, at.step, len(chosen))
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["factor"]
                seed = np.random.SeedSequence((run.seed, at.epoch, at.step)).generate_state(1)[0]
                gates = model.draw_gates(len(images) * parallel.size(), torch.manual_seed(int(seed)))
                targets = torch.from_numpy(labels[rows]).to(device)
                optimizer.zero_grad(set_to_none=True)
                value = parallel.backward(model, loss, images, targets, gates, recipe.micro_batch, precision)
                if not math.isfinite(value):
                    raise not_finite(folder, where, f"the loss is {value}")
                if recipe.clip_value:
                    nn.utils.clip_grad_value_(parameters, recipe.clip_value)
                optimizer.step()

                at.loss, at.step = at.loss + value, at.step + 1
                at.seconds, clock = at.seconds + time.monotonic() - clock, time.monotonic()
                mean, speed = at.loss / at.step, at.step * len(images) * parallel.size() / at.seconds
                left = duration(at.seconds / at.step * ((recipe.epochs - at.epoch) * len(chosen) - at.step))
                epoch = f"epoch {at.epoch + 1}/{recipe.epochs}"
                progress.say(epoch, f"loss {mean:.3f}", f"{speed:.0f} images/s", f"{left} left")
                if at.step == len(chosen):
                    row = {
                        "epoch": at.epoch + 1,
                        "loss": mean,
                        "lr": lr,
                        "images_per_second": speed,
                        "seconds": at.seconds,
                    }
                    at = Reached(epoch=at.epoch + 1, log=[*at.log, row])
                if first and (at.step == 0 or clock - saved > recipe.checkpoint_seconds):
                    if not all(bool(torch.isfinite(p).all()) for p in parameters):
                        raise not_finite(folder, where, "a weight is no longer finite")
                    save(folder, at, model, loss, optimizer)
                    saved = time.monotonic()
        if not parallel.leave():
            return folder

        # ---- evaluate
        progress.say("evaluating")
        embeddings = embed(model, benchmark, benchmark.test, run.data, device=device, workers=recipe.workers)
        if not np.isfinite(embeddings).all():
            raise not_finite(folder, "evaluation", "an embedding of a test image is not finite")
        scores = evaluation.scores(embeddings, benchmark.test, evaluation.KS, distance=loss.metric, device=device)

        # ---- write
        models.save(model, run, folder)
        seconds, speed = sum(row["seconds"] for row in at.log), at.log[-1]["images_per_second"] if at.log else None
        parameters = dict(zip(("trainable", "total"), models.count_parameters(model)))
        table = scores.table().reset_index(names="dataset").round(8).to_dict("records")
        metrics = {"parameters": parameters, "seconds": seconds, "images_per_second": speed, "table": table}
        text = json.dumps(metrics | {"hits": scores.packed()})
        write_text(folder / FINISHED, text.replace("}, {", "},\n{"))
        for name in CHECKPOINTS:
            (folder / name).unlink(missing_ok=True)
        progress.say(f"finished, trained in {duration(seconds)}")
    return folder


def embed(model, benchmark, rows: pd.DataFrame, settings, *, device="cpu", workers: int = 0, prompt_weights=False):
    """Embeddings (n, dim) float32 of some rows of a benchmark, by the test view of `settings`, a `config.Data`.

    With `prompt_weights`, of a model with a prompt pool: embeddings and the weights (n, M) of its prompts.
    """
    view = batches.test_view(settings, *models.backbones.normalisation(model.backbone))
    plan = batches.Plan(batches.ordered_batches(len(rows), 256), workers=workers, device=device)
    model = model.eval()
    with torch.inference_mode():
        outputs = [model(images, prompt_weights=True) for images, _ in batches.batches(benchmark, rows, plan, view)]
    embeddings, weights = (p if p[0] is None else torch.cat(p).float().cpu().numpy() for p in zip(*outputs))
    return (embeddings, weights) if prompt_weights else embeddings


def make_optimizer(model: nn.Module, loss: nn.Module, run: Run) -> torch.optim.AdamW:
    """AdamW over three groups with their factors of the learning rate: backbone, new parameters, loss."""
    recipe, inside = run.training, {id(p) for p in model.backbone.parameters()}
    backbone = [p for p in model.backbone.parameters() if p.requires_grad]
    new = [p for p in model.parameters() if id(p) not in inside]
    groups = [(backbone, 1.0), (new, recipe.new_lr_factor), (list(loss.parameters()), recipe.loss_lr_factor)]
    groups = [{"params": params, "factor": factor} for params, factor in groups if params]
    return torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=recipe.weight_decay)


def learning_rate(run: Run, epoch: int, step: int, steps: int) -> float:
    """The rate of backbone weights in step `step` of `steps` of epoch `epoch` (both from 0)."""
    recipe = run.training
    if recipe.schedule == "step":
        return recipe.lr * recipe.step_factor ** (epoch // recipe.step_epochs)
    if recipe.schedule == "cosine":
        return recipe.lr * 0.5 * (1 + math.cos(math.pi * (epoch + step / steps) / recipe.epochs))
    return recipe.lr


def epoch_batches(labels: np.ndarray, kind: str, run: Run, epoch: int) -> list[np.ndarray]:
    """Positions of the images of each batch: random for proxy losses, P classes x K images for pair losses."""
    size, per_class = run.training.batch_size, run.training.images_per_class
    if kind == "classes":
        return batches.class_batches(labels, max(2, size // per_class), per_class, run.seed, epoch)
    return batches.random_batches(len(labels), size, run.seed, epoch)


def save(folder: Path, at: Reached, model: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write `checkpoint.pt`, keeping the one before, and the log of whole epochs."""
    state = {"model": models.trainable_state(model), "loss": loss.state_dict(), "optimizer": optimizer.state_dict()}
    current, previous = (folder / name for name in CHECKPOINTS)
    with paths.written_whole(current) as temporary:
        with temporary.open("wb") as file:  # given a path, torch raises RuntimeError where the disk is full
            torch.save(state | {"at": asdict(at)}, file)
        if current.is_file():
            current.replace(previous)
    if at.log:  # after the checkpoint: what is logged is never trained again
        write_text(folder / "log.csv", pd.DataFrame(at.log).to_csv(index=False))


def resume(folder: Path, model: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer) -> Reached:
    """Go to where the newest whole checkpoint of this very model stands; a warning names those that are damaged."""
    found = [folder / name for name in CHECKPOINTS if (folder / name).is_file()]
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    expected = _shapes(models.trainable_state(model), loss.state_dict(), parameters, asdict(Reached()))
    for file in found:
        try:
            state = _whole(file, expected)
        except ValueError as error:
            then = "training starts from the beginning" if file == found[-1] else "trying the one before it"
            warnings.warn(f"{file} is damaged ({error}); {then}", stacklevel=2)
            continue
        model.load_state_dict(state["model"], strict=False)
        loss.load_state_dict(state["loss"])
        optimizer.load_state_dict(state["optimizer"])
        return Reached(**state["at"])
    return Reached()


def _whole(file: Path, expected: list[dict]) -> dict:
    """The content of a checkpoint if its check sums are right and its tensors those `expected`, else ValueError."""
    try:
        with zipfile.ZipFile(file) as content:  # torch.load does not look at check sums
            if bad := content.testzip():
                raise ValueError(f"the check sum of {bad} is wrong")
        state = torch.load(file, map_location="cpu", weights_only=True)
        moments = {number: moment["exp_avg"] for number, moment in state["optimizer"]["state"].items()}
        if _shapes(state["model"], state["loss"], moments, state["at"]) != expected:
            raise ValueError("its tensors have other names or shapes")
        return state
    except Exception as error:  # a damaged file raises nearly anything
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _shapes(*parts: dict) -> list[dict]:
    return [{key: getattr(value, "shape", None) for key, value in part.items()} for part in parts]


def not_finite(folder: Path, where: str, what: str) -> NonFiniteLoss:
    kept = next((name for name in CHECKPOINTS if (folder / name).is_file()), "no checkpoint yet")
    return NonFiniteLoss(
        f"run {folder.name}, {where}: {what}. Kept: {kept} in {folder}. A smaller lr, clip_value or loss_lr_factor, "
        "or precision = 'float32', usually helps; a changed run starts anew in its own folder"
    )


def choose_device(name: str) -> torch.device:
    """The device called `name`, "auto" being the GPU if there is one, or a ValueError that says what is here."""
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    kind, _, index = ("cuda" if count["cuda"] else "cpu").partition(":") if name == "auto" else name.partition(":")
    if kind not in count or not (index or "0").isdecimal():
        raise ValueError(f"unknown device {name!r}; known: auto, cpu, cuda, cuda:0, cuda:1, ..., mps")
    if int(index or 0) >= count[kind]:
        raise ValueError(f"device {name!r} is not here, torch sees {count[kind]} of its kind; use 'auto'")
    return torch.device(f"{kind}:{index}" if index else kind)


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def machine(device: torch.device, precision: str) -> dict:
    """What else a reader needs to repeat a run: versions, device, precision, revision of the project."""
    git = ["git", "-C", str(paths.ROOT), "describe", "--always", "--dirty"]
    revision = (
        subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() if shutil.which("git") else ""
    )
    versions = {"python": platform.python_version()} | {m.__name__: m.__version__ for m in (torch, timm, np)}
    place = {"device": device_name(device), "processes": parallel.size(), "threads": torch.get_num_threads()}
    return versions | place | {"precision": precision, "revision": revision or None}


class Progress:
    """A line about a run on stderr, at its start, at its end and, by a thread, in between.

    It is redrawn each second if `live` (None: on a terminal or in a notebook), else printed every 30 seconds.
    """

    def __init__(self, *about: str, live: bool | None = None):
        screen = sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel")
        self.live, self.about, self.said = screen if live is None else live, [a for a in about if a], ["starting"]
        self.ended, self.thread, self.width = threading.Event(), threading.Thread(target=self._repeat, daemon=True), 0

    def __enter__(self) -> Self:
        self._write()
        self.thread.start()
        return self

    def __exit__(self, kind, *_) -> None:
        self.ended.set()
        self.thread.join()
        self.said = [*self.said, f"stopped by {kind.__name__}"] if kind else self.said
        self._write("\n")

    def say(self, *parts: str) -> None:
        self.said = parts

    def _repeat(self) -> None:
        while not self.ended.wait(1 if self.live else 30):
            self._write()

    def _write(self, end: str = "") -> None:
        parts, columns = [*self.about, *self.said], shutil.get_terminal_size((200, 24)).columns
        while self.live and len(parts) > 2 and len(" · ".join(parts)) >= columns:
            del parts[1]  # the end tells most
        line = " · ".join(parts)
        text, self.width = "\r" + line.ljust(self.width) + end if self.live else line + "\n", len(line)
        if parallel.first():
            print(text, end="", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """For people: "45 s", "1 min 20 s", "2 h 5 min"."""
    minutes, seconds = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
