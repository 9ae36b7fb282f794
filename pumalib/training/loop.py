"""Training: `train(run, folder)` fills a run's folder, can be killed anywhere, and goes on where it was.
All randomness of a step comes from (seed, epoch, step).  Under torchrun the first process alone writes and evaluates."""

import json
import math
import shutil
import subprocess
import sys
import time
import warnings
import zipfile
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import timm
import torch
from torch import nn
from tqdm import tqdm

from .. import data, evaluation, losses, models, paths
from ..config import Run, Training
from ..data import batches
from ..data.images import unreadable
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


def train(run: Run, folder: Path, position: str = "") -> Path:
    """Train and evaluate `run`, or go on where `folder` left off, and return `folder`; a finished one is only read.
    It leaves `run.json`, `log.csv`, `model.safetensors` (what was trained) and, written last, the record of all in
    `metrics.json`.  Where others may want the same run, lock `run_folder.LOCK`.  `position` is such as "run 3
    of 9".  Raises NonFiniteLoss or, where the folder cannot be written, OSError."""
    if (folder / FINISHED).is_file():
        return folder
    about = " · ".join(filter(None, (position, folder.name)))
    with tqdm(desc=about, unit="image", dynamic_ncols=True, disable=not parallel.first()) as bar:
        # ---- build
        recipe, device = run.training, choose_device(run.training.device)
        precision = {"auto": "bfloat16" if device.type == "cuda" else "float32"}.get(recipe.precision, recipe.precision)
        benchmark = data.load(run.data, run.seed)
        # Proxies are numbered 0..C-1 over the training classes, whatever labels the table gives them.
        classes, labels = np.unique(benchmark.train["label"].to_numpy(), return_inverse=True)
        torch.manual_seed(run.seed)
        names = benchmark.train.groupby("label")["class_name"].first().tolist()
        loss = losses.make(run.loss, len(classes), run.dim, names, **run.loss_settings)
        options = {"image_size": run.data.image_size, "normalise": loss.normalised_input}
        model = models.build(run.method, run.backbone, run.dim, pretrained=run.pretrained, **options)
        if parallel.first():
            if benchmark.pixels is None and len(benchmark.test) < 20_000:  # within a minute, not after days of training
                for error in unreadable(replace(benchmark, images=benchmark.test)).values():
                    raise error
            run_folder.make(folder)
            weights = models.backbones.state_digest(model.backbone.state_dict())
            environment = machine(device, precision) | {"data": benchmark.digest, "weights": weights}
            write_text(folder / "run.json", run.to_json())
        model, loss = model.to(device).train(), loss.to(device).train()
        for part in model.modules() if (device.type, precision) == ("cpu", "bfloat16") else ():
            part.fused_attn = False  # read by timm's Attention: the fused one takes three times as long there
        model.recompute = recipe.recompute

        # ---- fit
        at = Reached(epoch=recipe.epochs)  # a method without parameters has nothing to train
        if any(p.requires_grad for p in model.parameters()):
            parallel.check(model, recipe.micro_batch)
            optimizer = make_optimizer(model, loss, recipe)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            at = resume(folder, model, loss, optimizer)
        view, saved = batches.View(run.data, *models.backbones.normalisation(model.backbone), True), time.monotonic()
        while at.epoch < recipe.epochs:
            if loss.batches == "classes":
                sizes = batches.class_sizes(recipe.batch_size, recipe.images_per_class)
                chosen = batches.class_batches(labels, *sizes, recipe.repeat_images, run.seed, at.epoch)
            else:
                chosen = batches.random_batches(len(labels), recipe.batch_size, run.seed, at.epoch)
            chosen = parallel.share(chosen)
            place = {"epoch": at.epoch, "first": at.step, "part": parallel.rank(), "workers": recipe.workers}
            plan = batches.Plan(benchmark, benchmark.train, chosen, view, run.seed, device=device, **place)
            stream = batches.batches(plan)
            if bar.total is None:
                bar.total = recipe.epochs * sum(map(len, chosen)) * parallel.size()
                bar.n = bar.initial = round(bar.total * (at.epoch + at.step / len(chosen)) / recipe.epochs)
            clock = time.monotonic()
            for images, rows in stream:
                epoch, where = at.epoch + 1, f"epoch {at.epoch + 1}, batch {at.step + 1}"
                lr = learning_rate(recipe, at.epoch, at.step, len(chosen))
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["factor"]
                seed = np.random.SeedSequence((run.seed, at.epoch, at.step)).generate_state(1)[0]
                gates = model.draw_gates(len(images) * parallel.size(), torch.manual_seed(int(seed)))
                targets = torch.from_numpy(labels[rows]).to(device)
                optimizer.zero_grad(set_to_none=True)
                value = parallel.backward(model, loss, images, targets, gates, recipe.micro_batch, precision)
                require_finite(folder, where, f"the loss is {value}", value)
                if recipe.clip_value:
                    nn.utils.clip_grad_value_(parameters, recipe.clip_value)
                optimizer.step()
                at.loss, at.step = at.loss + value, at.step + 1
                at.seconds, clock = at.seconds + time.monotonic() - clock, time.monotonic()
                mean, speed = at.loss / at.step, at.step * len(images) * parallel.size() / at.seconds
                bar.set_postfix_str(f"epoch {epoch}/{recipe.epochs}, loss {mean:.3f}", refresh=False)
                bar.update(len(images) * parallel.size())
                if at.step == len(chosen):
                    row = {"epoch": epoch, "loss": mean, "lr": lr, "images_per_second": speed, "seconds": at.seconds}
                    at = Reached(epoch, log=[*at.log, row])
                if parallel.first() and (at.step == 0 or clock - saved > recipe.checkpoint_seconds):
                    require_finite(folder, where, "a weight is no longer finite", *parameters)
                    save(folder, at, model, loss, optimizer)
                    saved = time.monotonic()
        parallel.leave()
        if not parallel.first():
            return folder

        # ---- evaluate
        bar.set_postfix_str("evaluating")
        embeddings = embed(model, benchmark, benchmark.test, run.data, device=device, workers=recipe.workers)
        require_finite(folder, "evaluation", "an embedding of a test image is not finite", embeddings)
        scores = evaluation.scores(embeddings, benchmark.test, evaluation.KS, distance=loss.metric, device=device)

        # ---- write
        models.save(model, run, folder)
        seconds, speed = sum(row["seconds"] for row in at.log), at.log[-1]["images_per_second"] if at.log else None
        parameters = dict(zip(("trainable", "total"), models.count_parameters(model)))
        table = scores.table().reset_index(names="dataset").round(8).to_dict("records")
        record = {"run": asdict(run), "environment": environment, "log": at.log, "parameters": parameters}
        record |= {"seconds": seconds, "images_per_second": speed, "table": table, **scores.packed()}
        write_text(folder / FINISHED, json.dumps(record))
        for name in CHECKPOINTS:
            (folder / name).unlink(missing_ok=True)
        bar.set_postfix_str(f"finished, trained in {timedelta(0, round(seconds))}")
    return folder


def embed(model, benchmark, rows: pd.DataFrame, settings, *, device="cpu", workers: int = 0, prompt_weights=False):
    """Embeddings (n, dim) float32 of rows of a benchmark, by the test view of `settings`, a `config.Data`.
    With `prompt_weights`, of a model with a prompt pool, these and the weights (n, M) of its prompts."""
    view = batches.View(settings, *models.backbones.normalisation(model.backbone))
    parts = np.split(np.arange(len(rows)), range(256, len(rows), 256))
    plan = batches.Plan(benchmark, rows, parts, view, workers=workers, device=device)
    shown, model = batches.batches(plan), model.eval()
    with torch.inference_mode():
        outputs = [model(images, prompt_weights=True) for images, _ in shown]
    embeddings, weights = (p if p[0] is None else torch.cat(p).float().cpu().numpy() for p in zip(*outputs))
    return (embeddings, weights) if prompt_weights else embeddings


def make_optimizer(model: nn.Module, loss: nn.Module, recipe: Training) -> torch.optim.AdamW:
    """AdamW over three groups with their factors of the learning rate: backbone, new parameters, loss."""
    inside = {id(p) for p in model.backbone.parameters()}
    backbone = [p for p in model.backbone.parameters() if p.requires_grad]
    new = [p for p in model.parameters() if id(p) not in inside]
    groups = [(backbone, 1.0), (new, recipe.new_lr_factor), (list(loss.parameters()), recipe.loss_lr_factor)]
    groups = [{"params": params, "factor": factor} for params, factor in groups if params]
    return torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=recipe.weight_decay)


def learning_rate(recipe: Training, epoch: int, step: int, steps: int) -> float:
    """The rate of backbone weights in step `step` of `steps` of epoch `epoch` (both from 0)."""
    fallen = 0.5 * (1 + math.cos(math.pi * (epoch + step / steps) / recipe.epochs))  # from 1 to 0
    cosine = recipe.cosine_floor + (1 - recipe.cosine_floor) * fallen
    factors = {"constant": 1, "step": recipe.step_factor ** (epoch // recipe.step_epochs), "cosine": cosine}
    return recipe.lr * factors[recipe.schedule]


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
    parameters = enumerate(p for group in optimizer.param_groups for p in group["params"])
    expected = models.trainable_state(model) | loss.state_dict() | dict(parameters)
    for file in (folder / name for name in CHECKPOINTS if (folder / name).is_file()):
        try:
            state = _whole(file, {key: tensor.shape for key, tensor in expected.items()})
        except ValueError as error:
            warnings.warn(f"{file} is damaged ({error}); the one before it is taken, or the beginning", stacklevel=2)
            continue
        model.load_state_dict(state["model"], strict=False)
        loss.load_state_dict(state["loss"])
        optimizer.load_state_dict(state["optimizer"])
        return Reached(**state["at"])
    return Reached()


def _whole(file: Path, shapes: dict) -> dict:
    """The content of a checkpoint if its check sums are right and its tensors have these shapes, else ValueError."""
    try:
        with zipfile.ZipFile(file) as content:  # torch.load does not look at check sums
            if bad := content.testzip():
                raise ValueError(f"the check sum of {bad} is wrong")
        state = torch.load(file, map_location="cpu", weights_only=True)
        moments = {number: moment["exp_avg"] for number, moment in state["optimizer"]["state"].items()}
        found = {key: tensor.shape for key, tensor in (state["model"] | state["loss"] | moments).items()}
        if found != shapes or state["at"].keys() != asdict(Reached()).keys():
            raise ValueError("its tensors have other names or shapes")
        return state
    except Exception as error:  # a damaged file raises nearly anything
        raise ValueError(f"{type(error).__name__}: {error}") from error


def require_finite(folder: Path, where: str, what: str, *values) -> None:
    """Raise NonFiniteLoss, which says `what` was met `where` and what is kept, unless all `values` are finite."""
    if not all(bool(torch.as_tensor(value).isfinite().all()) for value in values):
        kept = next((name for name in CHECKPOINTS if (folder / name).is_file()), "no checkpoint yet")
        remedy = "A smaller lr, clip_value or loss_lr_factor, or precision = 'float32', usually helps (as a new run)"
        raise NonFiniteLoss(f"run {folder.name}, {where}: {what}. Kept: {kept} in {folder}. {remedy}")


def choose_device(name: str) -> torch.device:
    """The device called `name`, "auto" being the GPU if there is one; a ValueError lists those that are here."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    data.check_known("device", [name], ["auto", "cpu", *(["cuda", *gpus] if gpus else mps)])
    return torch.device(("cuda" if gpus else "cpu") if name == "auto" else name)


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def machine(device: torch.device, precision: str) -> dict:
    """What else a reader needs to repeat a run: versions, device, precision, revision of the project."""
    git = ["git", "-C", str(paths.ROOT), "describe", "--always", "--dirty"]
    revision = shutil.which("git") and subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    versions = {"python": sys.version.split()[0]} | {m.__name__: m.__version__ for m in (torch, timm, np)}
    place = {"device": device_name(device), "processes": parallel.size(), "threads": torch.get_num_threads()}
    return versions | place | {"precision": precision, "revision": revision or None}
