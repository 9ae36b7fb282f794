"""Time and memory of losses: of single steps, in trainings, and at the class counts of faces.

Bytes are counted from tensors, not read from the process, so they are equal on every machine.
"""

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from pumalib import losses, models
from pumalib.config import Profile
from pumalib.data import batches
from pumalib.losses.base import Loss
from pumalib.training.loop import make_optimizer

# A weight, its gradient, and AdamW's two moments.
COPIES = 4


class Held(NamedTuple):
    """Bytes that a loss holds during a training step.

    `learnt`: its proxies with their gradients and AdamW's moments; `saved`: tensors that forward
    saves for backward, without embeddings and proxies.
    """

    learnt: int
    saved: int


def bytes_held(loss: Loss, x: Tensor, labels: Tensor) -> Held:
    """The bytes that `loss` holds in a step with embeddings x (N, dim) and labels (N,)."""
    learnt = {one.untyped_storage().data_ptr(): one.nbytes for one in loss.parameters()}
    saved: dict[int, int] = {}
    # Keep saved tensors alive: the address of a freed one could be given to another.
    alive = []

    def note(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in learnt and place != x.untyped_storage().data_ptr():
            saved[place] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss(x, labels)
    return Held(COPIES * sum(learnt.values()), sum(saved.values()))


def milliseconds(loss: Loss, x: Tensor, labels: Tensor, turns: int) -> float:
    """CPU milliseconds of forward, backward and AdamW's step on the proxies: the best of `turns`.

    One turn more warms up.  Other work on the machine disturbs CPU time less than wall time.
    """
    optimizer = None
    if list(loss.parameters()):
        optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-4)
    spent = []
    for _ in range(turns + 1):
        begin = time.process_time()
        loss(x, labels).backward()
        if optimizer is not None:
            optimizer.step()
        spent.append(1000 * (time.process_time() - begin))
        x.grad = None
        loss.zero_grad()
    return min(spent[1:])


def step_costs(
    kinds: Mapping[str, tuple[str, Mapping[str, Any]]],
    counts: Sequence[int],
    most: Mapping[str, int],
    turns: int,
) -> pd.DataFrame:
    """A line per loss and number of classes: `ms` of a step, bytes `learnt` and `saved`.

    A step is of 128 random embeddings of 32 classes.  `kinds` has, by the name of a row, a loss and
    its settings; `most` the most classes of rows that cannot have all of `counts`.
    """
    lines = []
    for name, (kind, settings) in kinds.items():
        for count in counts:
            if count > most.get(name, count):
                continue
            torch.manual_seed(0)
            x = torch.randn(128, 128, requires_grad=True)
            labels = torch.arange(128) % 32
            loss = losses.make(kind, count, 128, **settings)
            held = bytes_held(loss, x, labels)
            spent = milliseconds(loss, x, labels, turns)
            lines.append({"loss": name, "classes": count, "ms": spent, **held._asdict()})
    return with_machine(pd.DataFrame(lines))


def extended(counts: Sequence[float], values: Sequence[float], count: float) -> float:
    """The value at `count`, extrapolated by the line through the last two measurements.

    Raises ValueError for fewer than two.
    """
    if len(counts) < 2:
        raise ValueError(f"{len(counts)} measurements: a line needs two")
    slope = (values[-1] - values[-2]) / (counts[-1] - counts[-2])
    return values[-1] + slope * (count - counts[-1])


def share_of_pairs(loss: Loss, x: Tensor, labels: Tensor) -> float:
    """The share of a batch's N (N - 1) pairs of images whose cosine has a gradient.

    For a loss over pairs of cosines; NaN for one without pairs, such as those with proxies.
    """
    pairs = getattr(loss, "pairs", None)
    if pairs is None:
        return float("nan")
    x = nn.functional.normalize(x.detach(), dim=1)
    itself = torch.eye(len(x), dtype=torch.bool)
    same = labels[:, None] == labels
    with torch.enable_grad():
        # With the unit vectors as references, the anchors themselves are the cosines, so that the
        # gradient is with respect to these.
        cosines = (x @ x.T).requires_grad_()
        value = pairs(cosines, itself.float(), same & ~itself, ~same)
        (gradient,) = torch.autograd.grad(value, cosines)
    return float((gradient[~itself] != 0).float().mean())


class Spent(NamedTuple):
    """The cost of a training up to a step: CPU seconds in all, and in the loss alone.

    `images` were seen; `pairs` is the mean of `share_of_pairs`, NaN before the first step.
    """

    step: int
    seconds: float
    seconds_of_loss: float
    images: int
    pairs: float


def timed_training(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    *,
    shape: tuple[int, int, bool],
    seed: int,
    steps: int,
) -> Iterator[Spent]:
    """Train on `images` (n, 3, size, size); gives the cost before each step and at the end.

    `shape` of a batch: its classes, images of each, and whether an image may be drawn twice.
    """
    seconds = 0.0
    seconds_of_loss = 0.0
    asked: list[float] = []
    classes, of_each, _ = shape
    in_list = labels.tolist()
    for step in range(steps + 1):
        pairs = float(np.mean(asked)) if asked else float("nan")
        yield Spent(step, seconds, seconds_of_loss, step * classes * of_each, pairs)
        if step == steps:
            break
        batch, *_ = batches.class_batches(in_list, *shape, seed, epoch=step)
        begin = time.process_time()
        x = model(images[batch])
        begin_of_loss = time.process_time()
        value = loss(x, labels[batch])
        seconds_of_loss += time.process_time() - begin_of_loss
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        seconds += time.process_time() - begin
        asked.append(share_of_pairs(loss, x, labels[batch]))


def images_until(training: pd.DataFrame, target: float) -> tuple[float, bool]:
    """The images of a training until its score was `target`, and whether it ever was.

    `training` has a line per measurement: step, images and `reported`, the score.  Between the
    measurement before the target and the one that reached it the images are read off a straight
    line.  A training that never arrives has all images that it saw, fewer than it needs.
    """
    training = training.sort_values("step")
    scores = training["reported"].to_numpy()
    images = training["images"].to_numpy(float)
    there = np.flatnonzero(scores >= target)
    if len(there) == 0:
        return images[-1], False
    if there[0] == 0:
        # Before any step; its logarithm is asked for.
        return 1.0, True
    last_two = [there[0] - 1, there[0]]
    return float(np.interp(target, scores[last_two], images[last_two])), True


def network_step(profile: Profile, count: int, part: int) -> Callable[[], None]:
    """A function that takes a training step of a profile's network, every weight tuned.

    Forward and backward of `count` random images, in parts of at most `part`, then AdamW's step.
    """
    model = models.build(
        "full",
        profile.backbone,
        profile.dim,
        pretrained=profile.pretrained,
        image_size=profile.data.image_size,
    )
    loss_without_weights = losses.make("ms")
    optimizer = make_optimizer(model, loss_without_weights, profile.run("full").training)
    side = profile.data.image_size
    images = torch.randn(count, 3, side, side)

    def step() -> None:
        optimizer.zero_grad()
        for some in images.split(part):
            model(some).square().mean().backward()
        optimizer.step()

    return step


def in_turns(
    steps: Mapping[str, Callable[[], None]], turns: int, times: Mapping[str, int]
) -> pd.DataFrame:
    """CPU milliseconds of steps, by turns that alternate between them: a line per step and turn.

    A turn more warms up.  Each turn is the mean of `times[name]` calls, one unless given.
    """
    lines = []
    for turn in range(turns + 1):
        for name, step in steps.items():
            count = times.get(name, 1)
            begin = time.process_time()
            for _ in range(count):
                step()
            spent = 1000 * (time.process_time() - begin) / count
            lines.append({"step": name, "turn": turn, "milliseconds": spent})
    table = pd.DataFrame(lines)
    return with_machine(table[table["turn"] > 0])


def with_machine(table: pd.DataFrame) -> pd.DataFrame:
    """A table of times with the columns machine, torch and threads of this process."""
    machine = platform.processor() or platform.machine()
    return table.assign(machine=machine, torch=torch.__version__, threads=torch.get_num_threads())


def machines(table: pd.DataFrame) -> str:
    """The machines in the columns that `with_machine` added, a line per machine."""
    lines = []
    for host in table[["machine", "torch", "threads"]].drop_duplicates().itertuples():
        lines.append(f"measured on {host.machine}, torch {host.torch}, {host.threads} threads")
    return "\n".join(lines)
