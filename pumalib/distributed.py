"""One batch in parts: processes side by side, one GPU each, and micro-batches one after another.

    torchrun --nproc-per-node 4 -m pumalib train puma --profile paper -s adapter_keep=0.3 -p epochs=50

Every process embeds an equal part of each batch; the embeddings are gathered, and every process computes the loss
of the whole batch.  The gradient is that of one process: the backward pass of `gather` sums over the processes,
which all have the same loss (x W), and DistributedDataParallel averages over them (/ W).
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import yaml
from filelock import FileLock
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import config, paths

PATIENCE = timedelta(days=1)  # the first process may have to wait for the run's lock, and the others for it


def rank() -> int:
    """The number of this process; 0 is the first, which alone writes and evaluates, and the only one without torchrun."""
    return dist.get_rank() if _together() else 0


def size() -> int:
    """How many processes share each batch."""
    return dist.get_world_size() if _together() else 1


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()


def join(device: torch.device) -> None:
    """Meet the other processes if torchrun started several; on CUDA each takes the GPU of its local rank.

    Raises:
        ValueError: `device` is one certain GPU, or there are fewer GPUs than processes.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    options = {}
    if device.type == "cuda":
        if device.index is not None:
            raise ValueError(f"under torchrun each process takes its own GPU: device = '{device}' must be 'auto' or 'cuda'")
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise ValueError(f"more processes than GPUs: torchrun --nproc-per-node can be at most {there} here")
        options["device_id"] = torch.device("cuda", local)
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE, **options)
    dist.barrier()


def leave() -> bool:
    """Part from the other processes when all have come so far; whether this one is the first."""
    first = rank() == 0
    if _together():
        dist.barrier()
        dist.destroy_process_group()
    return first


def share(batches: list[np.ndarray]) -> list[np.ndarray]:
    """This process's part of each batch: equal parts, in the order of the ranks.

    Raises:
        ValueError: a batch does not divide by the number of processes.
    """
    odd = next((len(batch) for batch in batches if len(batch) % size()), None)
    if odd is not None:
        raise ValueError(
            f"a batch of {odd} images cannot be divided equally among {size()} processes: choose a batch_size that is "
            "a multiple of them, or another --nproc-per-node"
        )
    return [np.split(batch, size())[rank()] for batch in batches]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(size())[rank()]


def gather(part: Tensor) -> Tensor:
    """The equal parts (b, ...) of all processes as (b x size(), ...), in the order of the ranks.

    Its backward pass sums the gradients of all processes: where all compute one and the same loss L of what was
    gathered, each gets size() x dL/dpart.
    """
    return part if size() == 1 else _Gather.apply(part)


def network(model: nn.Module) -> nn.Module:
    """What `backward` calls: `model` itself, or with several processes its DistributedDataParallel.

    Raises:
        ValueError: the model trains batch normalisation, which would see a part of the batch only.
    """
    if size() == 1:
        return model
    if _sees_the_batch(model):
        raise ValueError("several processes would change what batch normalisation sees: train this backbone on one")
    return DistributedDataParallel(model)  # every parameter has a gradient in every step, also with all gates closed


def _sees_the_batch(model: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules())


def backward(model: nn.Module, loss: nn.Module, images: Tensor, targets: Tensor, gates: dict[str, Tensor],
             micro_batch: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:  # fmt: skip
    """The loss of one batch, its gradients left in `model` and `loss`, the same in all processes.

    With `micro_batch` the part of this process passes the network in smaller parts, twice: once without a graph
    for the embeddings and the gradient of the loss with respect to them, once to carry that gradient on (Gao et
    al., 2021, "Scaling deep contrastive learning batch size under memory limited setup").  The gradient is that of
    the whole batch, also for losses that compare its images with one another.

    Args:
        model: from `network`.
        images: (b, 3, H, W), the part of this process; without torchrun the batch.
        targets: (b,) of this part, from 0 to C - 1.
        gates: of the whole batch, from `draw_gates(b x size())`.
        micro_batch: images per forward pass; 0: all.
        dtype: bfloat16 turns autocast on for the network; losses compute in float32 in any case.
    """
    mine = slice(rank() * len(images), (rank() + 1) * len(images))
    gates = {name: gate[..., mine] if gate.shape[-1] > 1 else gate for name, gate in gates.items()}
    targets = gather(targets)

    def embed_part(part: slice) -> Tensor:
        own = {name: gate[..., part] if gate.shape[-1] > 1 else gate for name, gate in gates.items()}
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            return model(images[part], own)

    step = micro_batch or len(images)
    parts = [slice(first, first + step) for first in range(0, len(images), step)]
    if len(parts) == 1:
        value = loss(gather(embed_part(parts[0])), targets)
        value.backward()
        _agree(loss)
        return value.detach()
    if model.training and _sees_the_batch(model):
        raise ValueError("micro_batch would change what batch normalisation sees: use 0 with this backbone")
    with torch.no_grad():
        embeddings = gather(torch.cat([embed_part(part) for part in parts]))
    embeddings.requires_grad_()
    value = loss(embeddings, targets)
    value.backward()
    _agree(loss)
    gradient = embeddings.grad[mine]
    with nullcontext() if size() == 1 else model.no_sync():
        for part in parts:
            embed_part(part).backward(gradient[part])
    if size() > 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)  # the sum: each process has carried its part of one gradient
    return value.detach()


def _agree(loss: nn.Module) -> None:
    """Give all processes the first one's gradient of the loss's parameters: some GPU sums differ in their last bits."""
    if size() > 1:
        for parameter in loss.parameters():
            if parameter.grad is not None:
                dist.broadcast(parameter.grad, 0)


def main(argv: list[str]) -> int:
    """Train one run into the folder where notebooks look for it, and print the folder and R@1."""
    from . import study, training  # they stand above what is above

    parser = argparse.ArgumentParser(
        prog="[torchrun --nproc-per-node N -m] pumalib train", description=main.__doc__ + "  Under torchrun each "
        "process takes a GPU (or the CPU) and an equal part of every batch; `workers` are those of each process.",
    )  # fmt: skip
    parser.add_argument("method", help=f"one of {', '.join(config.METHODS)}")
    parser.add_argument("--profile", default="smoke", help="name or YAML file (default: %(default)s)")
    parser.add_argument("--loss", default="curricularface", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    named = dict(action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("-s", **named, help="a setting of the method, for example adapter_keep=0.3")
    parser.add_argument("-p", **named, help="a change of the profile, for example root=/data or micro_batch=90")
    chosen = parser.parse_args(argv)
    profile, settings = config.profile(chosen.profile, **_settings(chosen.p)), _settings(chosen.s)
    config.method(chosen.method, **settings)  # refuses what is no setting of a method
    run = profile.run(chosen.method, loss=chosen.loss, seed=chosen.seed, **settings)
    run = config.Run.from_json(run.to_json())  # refuses values of a wrong type

    folder = study.run_folder(run, profile.name)
    study.make_folder(folder)
    first = int(os.environ.get("RANK", 0)) == 0
    with FileLock(folder / ".lock") if first else nullcontext():  # taken before the others are let in
        join(training.choose_device(run.training.device))
        training.train(run, folder)
    leave()  # if nothing was left to train
    if first:
        table = json.loads((folder / training.FINISHED).read_text(encoding="utf-8"))["table"]
        print(paths.shown(folder))
        print("R@1:", ", ".join(f"{row['dataset']} {row['R@1']:.3f}" for row in table))
    return 0


def _settings(pairs: list[str]) -> dict:
    """{"name": value} of "name=value", the values read as YAML."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise ValueError(f"{pair!r} is no setting: write NAME=VALUE")
        try:
            settings[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"{pair!r}: the value is no YAML: {error}") from None
    return settings
