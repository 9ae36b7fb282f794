"""`train(run, folder)` trains a run into its folder; killed at any time, it resumes.

All randomness of a step comes from (seed, epoch, step).  Under torchrun only the first process
writes and evaluates.
"""

import math
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from tqdm import tqdm

from .. import data, evaluation, losses, models, paths, progress
from ..config import BY_MEMORY, Run, Training
from ..data import Benchmark, batches
from ..data.images import ImageError, View, to_device, unreadable
from ..data.table import warn_of_duplicates
from ..embedder import embed_rows, true_float32
from ..models import whitening
from . import checkpoint, held_out, memory, parallel, run_folder, watch
from .checkpoint import Reached
from .run_folder import CHECKPOINTS, SETTINGS, write_text
from .watch import Step

# Up to this many test images are decoded before training, which takes less than a minute: a damaged
# image is found now and not after days.
MOST_DECODED_BEFORE = 20_000
# `open_loss` uses this many images, or this share of the images trained if that is fewer: a forward
# pass of 2 % costs less than 3 % of any training.
OPEN_LOSS_IMAGES = 1000
OPEN_LOSS_SHARE = 0.02
# The losses of this many steps are read from a GPU at once: each reading waits for it.  More would
# save little, and let more batches pile up in memory.
READ_EVERY = 10
# A backend of torch.compile; on a CPU it needs a C++ compiler.
COMPILER = "inductor"
# By the setting `compile`: a mode of torch.compile; the second has CUDA graphs.
COMPILED = {True: "default", "graphs": "reduce-overhead"}
# From this compute capability on (Ampere) GPUs have bfloat16; older ones emulate it.
BFLOAT16_CAPABILITY = (8, 0)
# The project's folders that a run's numbers can depend on.
CODE_AND_INPUTS = ("pumalib", "puma_study", "notebooks", "data")


class NonFiniteLoss(ArithmeticError):  # noqa: N818 (a name that users know)
    """A loss, a weight or an embedding became NaN or infinite in training.

    The last good checkpoint stays.  `where` and `what` are short, such as "epoch 3, batch 7" and
    "the loss is nan"; `environment` is the run's, for its record.
    """

    where = ""
    what = ""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.environment: dict[str, Any] = {}


@dataclass
class Setup:
    """Everything that a run needs, ready to train."""

    run: Run
    benchmark: Benchmark
    labels: np.ndarray  # (n,) the class of each training image, 0 to C - 1
    model: models.EmbeddingModel
    loss: losses.base.Loss
    device: torch.device
    precision: str  # "float32" or "bfloat16"
    micro_batch: int  # images that pass the network at once; 0: the whole batch
    environment: dict[str, Any]  # facts to repeat the run, see `machine`
    scored: Benchmark | None = None  # its `test` split is scored during training


def train(run: Run, folder: Path, position: str = "") -> Path:
    """Train and evaluate `run`, or resume it in `folder`; a finished run is only read.

    The final model has the weights of the last epoch or, with `score_epochs`, of the best one.
    Float32 is float32 on a GPU too: TF32 is off.

    Returns `folder`.  It then holds `run.json`, `log.csv`, `model.safetensors` (the trained
    tensors) and, written last, the record `metrics.json`.  If other processes may train the same
    run, lock `run_folder.LOCK` before.  `position`, such as "run 3 of 9", is for the progress bar.

    Raises NonFiniteLoss, ValueError (settings, data or weights that do not fit, or another run in
    the folder), OSError (the folder cannot be written).
    """
    run_folder.require_same_settings(run, folder)
    if run_folder.is_finished(folder):
        return folder

    about = folder.name
    if position:
        about = f"{position} · {folder.name}"
    hidden = not parallel.is_first()
    bar_of_run = progress.bar(desc=about, unit="image", dynamic_ncols=True, disable=hidden)
    with true_float32(), bar_of_run as bar:
        setup = build(run, folder)
        try:
            _fit_and_finish(setup, folder, bar)
        except NonFiniteLoss as failure:
            failure.environment = setup.environment
            raise
    return folder


def _fit_and_finish(setup: Setup, folder: Path, bar: tqdm) -> None:
    reached = fit(setup, folder, bar)
    if not parallel.is_first():
        return
    bar.set_postfix_str("evaluating")
    loss = open_loss(setup)
    scores = evaluate(setup, folder)
    seconds = finish(setup, reached, scores, loss, folder)
    bar.set_postfix_str(f"finished, trained in {timedelta(0, round(seconds))}")


# ---- build


def build(run: Run, folder: Path) -> Setup:
    """Load the data, make loss and model from the run's seed, and write the run's settings."""
    device = choose_device(run.training.device)
    precision = choose_precision(run.training.precision, device)
    benchmark = data.load(run.data, run.seed)
    scored = None
    if run.training.score_epochs:
        scored = data.held_out(run.data)
    # Labels of the table, renumbered 0..C-1 over the training classes, as proxies need.
    classes, labels = np.unique(benchmark.train["label"].to_numpy(), return_inverse=True)
    names = benchmark.train.groupby("label")["class_name"].first().tolist()

    torch.manual_seed(run.seed)
    loss = losses.make(run.loss, len(classes), run.dim, names, **run.loss_settings)
    model = models.build(
        run.method,
        run.backbone,
        run.dim,
        pretrained=run.pretrained,
        image_size=run.data.image_size,
        pooling=run.pooling,
        normalise=loss.normalised_input,
    )
    _require_one_width(model, run)

    environment: dict[str, Any] = {}
    if parallel.is_first():
        _require_readable_test_images(benchmark)
        run_folder.make(folder)
        environment = machine(device, precision)
        environment["data"] = benchmark.digest
        if scored is not None:
            _require_readable_test_images(scored)
            environment["held_out"] = scored.digest
        warn_of_duplicates(benchmark)
        environment["weights"] = models.backbones.state_digest(model.backbone.state_dict())
        write_text(folder / SETTINGS, run.to_json())

    model = model.to(device).train()
    loss = loss.to(device).train()
    model.recompute = run.training.recompute
    if run.training.compile:
        model.compile(backend=COMPILER, mode=COMPILED[run.training.compile])
    if device.type == "cpu" and precision == "bfloat16":
        use_plain_attention(model)
    micro_batch = _micro_batch(run, model, loss, device, precision)
    if run.training.compile == "graphs" and micro_batch:
        # The next part of a batch would be written over the outputs and gradients of the last.
        raise ValueError(
            "compile = 'graphs' needs whole batches: micro_batch = 0, or compile = true"
        )
    setup = Setup(
        run, benchmark, labels, model, loss, device, precision, micro_batch, environment, scored
    )
    if run.method.head == "whitened":
        try:
            _whiten(setup, folder)
        except NonFiniteLoss as failure:
            failure.environment = environment
            raise
    return setup


def _micro_batch(
    run: Run, model: models.EmbeddingModel, loss: nn.Module, device: torch.device, precision: str
) -> int:
    """The images that pass the network at once: what the run says, or what fits into a GPU."""
    asked = run.training.micro_batch
    if asked != BY_MEMORY:
        return asked
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    mine = -(-run.training.batch_size // parallel.size())
    return memory.micro_batch(
        model, loss, count=mine, size=run.data.image_size, precision=precision, free=free
    )


def _whiten(setup: Setup, folder: Path) -> None:
    """Compute the head from the training images' features, with the test transform."""
    model = setup.model
    head = model.head
    assert isinstance(head, nn.Linear)
    normalise = model.normalise
    # The features without L2 normalisation; the head is still the identity.
    model.normalise = False
    features = embed_rows(
        model,
        setup.benchmark,
        setup.benchmark.train,
        setup.run.data,
        device=setup.device,
        workers=setup.run.training.workers,
    )
    model.normalise = normalise
    model.train()
    require_finite(folder, "before training", "a feature is not finite", features)
    whitening.fit(head, torch.from_numpy(features), torch.from_numpy(setup.labels))


def _require_one_width(model: models.EmbeddingModel, run: Run) -> None:
    """Raise ValueError if a trained model without a head has another width than `run.dim`."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if trains and model.dim != run.dim:
        raise ValueError(
            f"head = {run.method.head!r} leaves the backbone's {model.dim} features, "
            f"and dim = {run.dim}: "
            f"set dim = {model.dim}, or choose a head"
        )


def _require_readable_test_images(benchmark: Benchmark) -> None:
    """Raise the ImageError of the first unreadable test image, if there are few test images."""
    if benchmark.pixels is not None or len(benchmark.test) >= MOST_DECODED_BEFORE:
        return
    errors = unreadable(replace(benchmark, images=benchmark.test))
    for error in errors.values():
        raise ImageError(f"{error}; {batches.REMEDY}", error.why)


def use_plain_attention(model: nn.Module) -> None:
    """Use timm's plain attention: fused attention is three times slower in bfloat16 on a CPU."""
    for part in model.modules():
        part.fused_attn = False  # type: ignore[assignment]  # read by timm's Attention alone


# ---- fit


@dataclass
class _Fitting:
    """A training in progress."""

    setup: Setup
    optimizer: torch.optim.Optimizer
    folder: Path
    bar: tqdm
    reached: Reached
    watch: watch.Watch
    saved: float  # time of the last checkpoint, or of the start, by time.monotonic()
    steps: int  # in an epoch
    # Steps whose numbers were not read yet.
    unread: list[Step] = field(default_factory=list)

    @property
    def read_every(self) -> int:
        """After how many steps their numbers are read."""
        return READ_EVERY if self.setup.device.type == "cuda" else 1

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def fit(setup: Setup, folder: Path, bar: tqdm) -> Reached:
    """Train from the newest checkpoint of `folder` to the last epoch, or until patience is over.

    The model is then that of the last epoch or, with scores, of the best one.
    """
    recipe = setup.run.training
    if not any(p.requires_grad for p in setup.model.parameters()):
        # The model has no trained parameter, even if the loss has some.
        parallel.leave()
        return Reached(epoch=recipe.epochs)

    parallel.check_batch_norm(setup.model, setup.micro_batch)
    optimizer = make_optimizer(setup.model, setup.loss, recipe)
    reached = checkpoint.resume(folder, setup.model, setup.loss, optimizer)
    if parallel.size() > 1:
        parallel.require_same(_described(setup, reached))
    # Every epoch has as many batches, of as many images.
    chosen = _chosen_images(setup, epoch=0)
    steps = len(chosen)
    _begin_bar(bar, recipe, reached, chosen)
    with watch.watching(setup.model, setup.loss) as seen:
        fitting = _Fitting(setup, optimizer, folder, bar, reached, seen, time.monotonic(), steps)
        if _start_is_due(setup.run, reached):
            _score_start(fitting)
        with closing(_stream(setup, fitting.reached)) as stream:
            while not _is_over(recipe, fitting.reached):
                _epoch(fitting, stream)
    _take_best(setup, fitting.reached)
    parallel.leave()
    return fitting.reached


def _described(setup: Setup, reached: Reached) -> str:
    """Where a training is, and a digest of its weights: what its processes must have in common."""
    weights = models.backbones.state_digest(
        {**setup.model.state_dict(), **setup.loss.state_dict(prefix="loss.")}
    )
    return f"epoch {reached.epoch + 1}, step {reached.step + 1}, weights {weights[:8]}"


def _start_is_due(run: Run, reached: Reached) -> bool:
    """Whether to score before the first step: if epochs are scored and it starts from a model."""
    at_start = reached.epoch == 0 and reached.step == 0 and not reached.log
    is_trained = models.model_folder(run.pretrained) is not None
    return at_start and is_trained and run.training.score_epochs > 0


def _score_start(fitting: _Fitting) -> None:
    """Score the starting model as epoch 0: it is the result if no epoch is better."""
    setup = fitting.setup
    value = math.nan
    if parallel.is_first():
        fitting.bar.set_postfix_str("the start, held-out classes")
        value = _held_out_score(setup, fitting.folder, epoch=0)
    value = parallel.from_first(f"{fitting.folder.name}, score of the start", value)
    row = {
        "epoch": 0,
        "loss": None,
        held_out.SCORE: value,
        "lr": None,
        "images_per_second": None,
        "seconds": 0.0,
    }
    fitting.reached = Reached(log=[row], best=_best_weights(fitting, [row]))


def _is_over(recipe: Training, reached: Reached) -> bool:
    if reached.epoch == recipe.epochs:
        return True
    return held_out.patience_is_over(recipe, reached.log)


def _epoch(fitting: _Fitting, stream: Iterator[tuple[Tensor, np.ndarray]]) -> None:
    """Train the rest of the current epoch, with checkpoints on the way and at its end."""
    recipe = fitting.setup.run.training
    steps = fitting.steps
    clock = time.monotonic()
    for images, rows in islice(stream, steps - fitting.reached.step):
        reached = fitting.reached
        lr = learning_rate(recipe, reached.epoch, reached.step, steps)
        fitting.unread.append(_step(fitting, images, rows, lr))
        reached.step += 1
        epoch_is_over = reached.step == steps
        is_due = time.monotonic() - fitting.saved > recipe.checkpoint_seconds
        if epoch_is_over or is_due or len(fitting.unread) >= fitting.read_every:
            _read(fitting)

        now = time.monotonic()
        reached.seconds += now - clock
        clock = now
        speed = _show_progress(fitting, len(images) * parallel.size())
        where = f"epoch {reached.epoch + 1}, batch {reached.step}"
        if epoch_is_over:
            row = {
                "epoch": reached.epoch + 1,
                "loss": reached.loss / steps,
                **_scored_row(fitting),
                "lr": lr,
                "images_per_second": speed,
                "seconds": reached.seconds,
                **watch.means(reached.watched),
            }
            log = [*reached.log, row]
            best = _best_weights(fitting, log)
            fitting.reached = Reached(reached.epoch + 1, log=log, best=best)
        if parallel.is_first() and (epoch_is_over or is_due):
            _save(fitting, where)


def _read(fitting: _Fitting) -> None:
    """Read the numbers of the last steps from the device; NonFiniteLoss for a loss that is not."""
    reached = fitting.reached
    for step, (loss, seen) in zip(fitting.unread, watch.read(fitting.unread), strict=True):
        require_finite(fitting.folder, step.where, f"the loss is {loss}", loss)
        reached.loss += loss
        reached.watched = watch.added(reached.watched, seen)
        if seen and parallel.is_first():
            where = f"run {fitting.folder.name}, {step.where}"
            fitting.watch.warn_of_collapse(where, loss, seen["reach"])
    fitting.unread.clear()


def _scored_row(fitting: _Fitting) -> dict[str, float | None]:
    """The held-out score for an epoch's row of the log: {} without scoring, None if not due."""
    setup = fitting.setup
    recipe = setup.run.training
    epoch = fitting.reached.epoch + 1
    if not recipe.score_epochs:
        return {}
    if not held_out.is_due(recipe, epoch):
        return {held_out.SCORE: None}
    value = math.nan
    if parallel.is_first():
        fitting.bar.set_postfix_str(f"epoch {epoch}/{recipe.epochs}, held-out classes")
        value = _held_out_score(setup, fitting.folder, epoch)
    name = f"{fitting.folder.name}, score of epoch {epoch}"
    return {held_out.SCORE: parallel.from_first(name, value)}


def _held_out_score(setup: Setup, folder: Path, epoch: int) -> float:
    """Harmonic R@1 on the held-out classes; the random state and training mode do not change."""
    assert setup.scored is not None
    where = f"after epoch {epoch}"
    scores = _scores(setup, setup.scored, folder, where, "held-out")
    setup.model.train()
    table = scores.table(bootstrap=0)
    return float(table.at["harmonic", "R@1"])


def _best_weights(fitting: _Fitting, log: list[dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """The weights of the best epoch so far; `log` ends with the epoch that the model is at."""
    row = held_out.best(log)
    if row is None:
        return {}
    if row["epoch"] < log[-1]["epoch"]:
        return fitting.reached.best
    states = {
        "model": models.trainable_state(fitting.setup.model),
        "loss": fitting.setup.loss.state_dict(),
    }
    copies = {}
    for part, state in states.items():
        # Copies, because training changes the tensors in place.
        copies[part] = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
    return copies


def _take_best(setup: Setup, reached: Reached) -> None:
    """Load the weights of the best epoch into model and loss, if epochs were scored."""
    if not reached.best:
        return
    setup.model.load_state_dict(reached.best["model"], strict=False)
    setup.loss.load_state_dict(reached.best["loss"])


def _chosen_images(setup: Setup, epoch: int) -> list[np.ndarray]:
    """The training images of each batch of an epoch: this process's share."""
    recipe = setup.run.training
    seed = setup.run.seed
    if setup.loss.batches == "classes":
        classes, images = batches.class_sizes(recipe.batch_size, recipe.images_per_class)
        chosen = batches.class_batches(
            setup.labels.tolist(),
            classes,
            images,
            recipe.repeat_images,
            seed,
            epoch,
        )
    else:
        chosen = batches.random_batches(len(setup.labels), recipe.batch_size, seed, epoch)
    return parallel.share(chosen)


def _stream(setup: Setup, reached: Reached) -> Generator[tuple[Tensor, np.ndarray]]:
    """The batches from `reached` to the end of the last epoch."""

    def plans() -> Iterator[batches.Plan]:
        first = reached.step
        for epoch in range(reached.epoch, setup.run.training.epochs):
            yield batches.Plan(
                benchmark=setup.benchmark,
                rows=setup.benchmark.train,
                positions=_chosen_images(setup, epoch),
                view=view,
                seed=setup.run.seed,
                epoch=epoch,
                first=first,
                part=parallel.rank(),
                workers=setup.run.training.workers,
                device=setup.device,
            )
            first = 0

    view = View(setup.run.data, training=True, **models.backbones.transform(setup.model.backbone))
    return batches.in_turn(plans())


def _step(fitting: _Fitting, images: Tensor, rows: np.ndarray, lr: float) -> Step:
    """Take one optimizer step at this learning rate of the backbone."""
    setup = fitting.setup
    recipe = setup.run.training
    reached = fitting.reached
    for group in fitting.optimizer.param_groups:
        group["lr"] = lr * group["factor"]

    sequence = np.random.SeedSequence((setup.run.seed, reached.epoch, reached.step))
    generator = torch.manual_seed(int(sequence.generate_state(1)[0]))
    done = progress_before(recipe, reached.epoch, reached.step, fitting.steps)
    drawn = setup.model.draw_gates(len(images) * parallel.size(), generator, done)
    gates = {name: to_device(gate, setup.device) for name, gate in drawn.items()}
    targets = to_device(torch.from_numpy(setup.labels[rows]), setup.device)
    batch = parallel.Batch(images, targets, gates)

    fitting.optimizer.zero_grad(set_to_none=True)
    fitting.watch.begin()
    loss = parallel.backward(setup.model, setup.loss, batch, setup.micro_batch, setup.precision)
    if recipe.clip_value:
        nn.utils.clip_grad_value_(fitting.parameters, recipe.clip_value)
    fitting.optimizer.step()
    where = f"epoch {reached.epoch + 1}, batch {reached.step + 1}"
    return Step(where, loss, fitting.watch.seen)


def _save(fitting: _Fitting, where: str) -> None:
    require_finite(fitting.folder, where, "a weight is no longer finite", *fitting.parameters)
    checkpoint.save(
        fitting.folder,
        fitting.reached,
        fitting.setup.model,
        fitting.setup.loss,
        fitting.optimizer,
    )
    fitting.saved = time.monotonic()


def _begin_bar(bar: tqdm, recipe: Training, reached: Reached, chosen: list[np.ndarray]) -> None:
    """Set the bar to the number of images in all, and of those trained before a resume.

    `chosen` are the images of an epoch's batches.
    """
    images = sum(len(batch) for batch in chosen) * parallel.size()
    bar.total = recipe.epochs * images
    done = progress_before(recipe, reached.epoch, reached.step, len(chosen))
    bar.initial = round(bar.total * done)
    bar.n = bar.initial


def _show_progress(fitting: _Fitting, images: int) -> float:
    """Advance the bar by `images`; return the images per second of this epoch."""
    reached = fitting.reached
    epochs = fitting.setup.run.training.epochs
    if not fitting.unread:
        mean = reached.loss / reached.step
        said = f"epoch {reached.epoch + 1}/{epochs}, loss {mean:.3f}"
        best = held_out.best(reached.log)
        if best is not None:
            said += f", held-out R@1 {100 * best[held_out.SCORE]:.1f}% after epoch {best['epoch']}"
        fitting.bar.set_postfix_str(said, refresh=False)
    fitting.bar.update(images)
    return reached.step * images / reached.seconds


def make_optimizer(
    model: models.EmbeddingModel, loss: nn.Module, recipe: Training
) -> torch.optim.AdamW:
    """AdamW with three groups that have their own factors of the learning rate.

    The groups are the backbone, the new parameters, and the loss's parameters (Appendix A).
    """
    in_backbone = {id(p) for p in model.backbone.parameters()}
    backbone = [p for p in model.backbone.parameters() if p.requires_grad]
    new = [p for p in model.parameters() if p.requires_grad and id(p) not in in_backbone]
    of_loss = list(loss.parameters())

    groups: list[dict[str, Any]] = [
        {"params": backbone, "factor": 1.0},
        {"params": new, "factor": recipe.new_lr_factor},
        {"params": of_loss, "factor": recipe.loss_lr_factor},
    ]
    groups = [group for group in groups if group["params"]]
    # One kernel for all weights; on a CPU it would round otherwise.
    is_fused = groups[0]["params"][0].is_cuda
    return torch.optim.AdamW(
        groups, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=is_fused or None
    )


def progress_before(recipe: Training, epoch: int, step: int, steps: int) -> float:
    """The finished share of the training, 0 to 1, before a step; arguments of `learning_rate`."""
    return (epoch + step / steps) / recipe.epochs


def learning_rate(recipe: Training, epoch: int, step: int, steps: int) -> float:
    """The backbone's learning rate in step `step` of `steps` in epoch `epoch` (both from 0)."""
    if recipe.schedule == "constant":
        return recipe.lr
    if recipe.schedule == "step":
        return recipe.lr * recipe.step_factor ** (epoch // recipe.step_epochs)
    done = progress_before(recipe, epoch, step, steps)
    fallen = 0.5 * (1 + math.cos(math.pi * done))  # from 1 to 0
    factor = recipe.cosine_floor + (1 - recipe.cosine_floor) * fallen
    return recipe.lr * factor


def require_finite(folder: Path, where: str, what: str, *values: Any) -> None:
    """Raise NonFiniteLoss unless all `values` are finite; its message has `where` and `what`."""
    finite = [torch.as_tensor(value).isfinite().all() for value in values]
    if bool(torch.stack(finite).all()):
        return
    existing = [name for name in CHECKPOINTS if (folder / name).is_file()]
    kept = "no checkpoint yet"
    if existing:
        kept = existing[0]
    remedy = (
        "A smaller lr, clip_value or loss_lr_factor, or precision = 'float32', usually helps"
        " (as a new run)"
    )
    failure = NonFiniteLoss(
        f"run {folder.name}, {where}: {what}. Kept: {kept} in {folder}. {remedy}"
    )
    failure.where = where
    failure.what = what
    raise failure


# ---- evaluate and finish


def evaluate(setup: Setup, folder: Path) -> evaluation.Scores:
    """Score every test image; NonFiniteLoss if an embedding is not finite."""
    return _scores(setup, setup.benchmark, folder, "evaluation", "test")


def _scores(
    setup: Setup, benchmark: Benchmark, folder: Path, where: str, kind: str
) -> evaluation.Scores:
    """Score the test images of a benchmark; `where` and `kind` are for the error message."""
    test = benchmark.test
    embeddings = embed_rows(
        setup.model,
        benchmark,
        test,
        setup.run.data,
        device=setup.device,
        workers=setup.run.training.workers,
    )
    what = f"an embedding of a {kind} image is not finite"
    require_finite(folder, where, what, embeddings)
    return evaluation.scores(
        embeddings, test, evaluation.KS, distance=setup.loss.metric, device=setup.device
    )


@torch.no_grad()
def open_loss(setup: Setup) -> float | None:
    """The evaluation-mode training loss: the mean loss on training images, without augmentation.

    Model, gates and loss are in evaluation mode: no gate is closed, the loss learns nothing, and
    images pass the test transform.  The mean is over the first batches of the first epoch, drawn as
    in training: at least one, and as many as fit into `OPEN_LOSS_IMAGES` and `OPEN_LOSS_SHARE`
    of the images trained.  So runs with the same seed, batch size and kind of batches use the same
    images.  None if nothing was trained, or the loss is not finite.
    """
    if not any(p.requires_grad for p in setup.model.parameters()):
        return None
    setup.model.eval()
    setup.loss.eval()
    chosen = _open_loss_batches(setup)
    plan = batches.Plan(
        benchmark=setup.benchmark,
        rows=setup.benchmark.train,
        positions=chosen,
        view=View(setup.run.data, **models.backbones.transform(setup.model.backbone)),
        workers=setup.run.training.workers,
        device=setup.device,
    )
    gpus = [setup.device] if setup.device.type == "cuda" else []
    values = []
    # Some miners draw random numbers.
    with torch.random.fork_rng(gpus):
        torch.manual_seed(setup.run.seed)
        for images, rows in batches.batches(plan):
            targets = to_device(torch.from_numpy(setup.labels[rows]), setup.device)
            values.append(float(setup.loss(_embedded(setup, images), targets)))
    mean = float(np.mean(values))
    if not math.isfinite(mean):
        return None
    return mean


def _open_loss_batches(setup: Setup) -> list[np.ndarray]:
    """The training images of each batch for `open_loss`, as places in the table."""
    of_epoch = _chosen_images(setup, 0)
    size = len(of_epoch[0])
    trained = setup.run.training.epochs * len(of_epoch) * size
    most = min(OPEN_LOSS_IMAGES, OPEN_LOSS_SHARE * trained)
    return of_epoch[: max(1, int(most // size))]


def _embedded(setup: Setup, images: Tensor) -> Tensor:
    """Embed images (B, dim) in the precision of training, one micro-batch at a time."""
    parts = images.split(setup.micro_batch or len(images))
    enabled = setup.precision == "bfloat16"
    with torch.autocast(images.device.type, torch.bfloat16, enabled=enabled):
        return torch.cat([setup.model(part) for part in parts])


def finish(
    setup: Setup,
    reached: Reached,
    scores: evaluation.Scores,
    open_loss: float | None,
    folder: Path,
) -> float:
    """Write the model and the record, remove the checkpoints; return the seconds of training."""
    models.save(setup.model, setup.run, folder)
    seconds = sum(row["seconds"] for row in reached.log)
    speed = None
    if reached.log:
        speed = reached.log[-1]["images_per_second"]
    trainable, total = models.count_parameters(setup.model)
    table = scores.table().reset_index(names="dataset").round(8)
    content = {
        "run": asdict(setup.run),
        "environment": setup.environment,
        "log": reached.log,
        "open_loss": open_loss,
        "parameters": {"trainable": trainable, "total": total},
        "seconds": seconds,
        "images_per_second": speed,
        "table": table.to_dict("records"),
        **scores.packed(),
    }
    run_folder.write_record(folder, content)
    for name in CHECKPOINTS:
        (folder / name).unlink(missing_ok=True)
    return seconds


# ---- the machine


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the GPU if there is one.

    Raises ValueError, with a list of the devices of this machine, for another name.
    """
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    known = ["auto", "cpu"]
    if gpus:
        known += ["cuda", *gpus]
    elif torch.backends.mps.is_available():
        known += ["mps"]
    data.check_known("device", [name], known)
    if name != "auto":
        return torch.device(name)
    if gpus:
        return torch.device("cuda")
    return torch.device("cpu")


def choose_precision(name: str, device: torch.device) -> str:
    """The precision of the network, "float32" or "bfloat16"; "auto" is float32.

    Warns of a GPU that emulates bfloat16, which is slower than float32.
    """
    if name == "auto":
        return "float32"
    if name == "bfloat16" and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < BFLOAT16_CAPABILITY:
            warnings.warn(
                f"{device_name(device)} (compute capability {major}.{minor}) emulates bfloat16:"
                " -p precision=float32 is faster there, and gives runs of their own names",
                stacklevel=2,
            )
    return name


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def machine(device: torch.device, precision: str) -> dict[str, Any]:
    """Facts that a reader needs to repeat a run: versions, device, precision, revision."""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "timm": timm.__version__,
        "numpy": np.__version__,
        "device": device_name(device),
        "processes": parallel.size(),
        "threads": torch.get_num_threads(),
        "precision": precision,
        "revision": revision(),
    }


def revision() -> str | None:
    """The project's commit, or None without git or a checkout.

    "-dirty" is added if code or inputs (`CODE_AND_INPUTS`) differ from the commit, or have
    untracked files.  Changes of results and documentation do not count.
    """
    commit = _git("describe", "--always")
    if not commit:
        return None
    if _git("status", "--porcelain", "--", *CODE_AND_INPUTS):
        return f"{commit}-dirty"
    return commit


def _git(*arguments: str) -> str:
    """The output of a git command in the project; "" if it fails or git is missing."""
    git = shutil.which("git")
    if git is None:
        return ""
    # No locks, as other processes may write git's index at the same time.
    command = [git, "--no-optional-locks", "-C", str(paths.ROOT), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    return finished.stdout.strip()
