"""One batch in parts: processes side by side (`torchrun -m pumalib train`), and micro-batches one after another.
Every process embeds an equal part of each batch and computes the loss of the whole batch from the embeddings of
all; it carries the gradient of its own part back through the network, and the sum over processes is that of one."""

import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn


def first() -> bool:
    """Whether this process writes: torchrun's first, before `join` and after `leave` too, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def size() -> int:
    """How many processes share each batch."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if size() > 1 else 0


def join(device: torch.device) -> None:
    """Meet the other processes if torchrun started several; on CUDA each takes the GPU of its local rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    gpu = torch.device("cuda", local) if device.type == "cuda" else None
    if gpu and (device.index is not None or local >= there):
        raise ValueError(f"torchrun gives each process a GPU: device = 'auto', --nproc-per-node {there} at most")
    if gpu:
        torch.cuda.set_device(gpu)
    wait = timedelta(days=1)  # the first process may have to wait for the run's lock, and the others for it
    dist.init_process_group("nccl" if gpu else "gloo", timeout=wait, device_id=gpu)
    dist.barrier()


def leave() -> None:
    """Part from the other processes when all have come so far."""
    if size() > 1:
        dist.barrier()
        dist.destroy_process_group()


def share(batches: list[np.ndarray]) -> list[np.ndarray]:
    """This process's part of each batch, equal parts in the order of the ranks; a ValueError where one has none."""
    if odd := [len(batch) for batch in batches if len(batch) % size()]:
        remedy = "choose a batch_size that is a multiple of them, or another --nproc-per-node"
        raise ValueError(f"a batch of {odd[0]} images cannot be divided equally among {size()} processes: {remedy}")
    return [np.split(batch, size())[rank()] for batch in batches]


def gather(part: Tensor) -> Tensor:
    """The equal parts (b, ...) of all processes as (b x size(), ...), in the order of the ranks, without gradient."""
    if size() == 1:
        return part.detach()
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size())]
    dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts)


def check(model: nn.Module, micro_batch: int) -> None:
    """Raise ValueError if `model` trains batch normalisation, which would see a part of the batch only."""
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules())
    if norms and (micro_batch or size() > 1):
        raise ValueError("a part of a batch is not what batch normalisation should see: micro_batch = 0, one process")


def backward(model, loss, images, targets, gates, micro_batch: int = 0, precision: str = "float32") -> float:
    """The loss of one batch, its gradients left in `model` and `loss`, the same in all processes.
    `images` (b, 3, H, W) and `targets` (b,) are this process's part, `gates` those of the whole batch.  `micro_batch`
    images at a time pass the network, twice: for the embeddings alone, then to carry on the gradient with respect to
    them (Gao et al., "Scaling deep contrastive learning batch size under memory limited setup", 2021).  `precision`
    "bfloat16" is autocast for the network; losses compute in float32."""
    count, start, step = len(images), rank() * len(images), micro_batch or len(images)

    def embed(at: int) -> Tensor:
        mine = slice(start + at, start + min(at + step, count))
        own = {name: gate[..., mine] if gate.shape[-1] > 1 else gate for name, gate in gates.items()}
        with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            return model(images[at : at + step], own)

    with torch.set_grad_enabled(step >= count):  # in one part its graph can be kept
        parts = [embed(at) for at in range(0, count, step)]
    embeddings = gather(torch.cat(parts)).requires_grad_()
    value = loss(embeddings, gather(targets))
    value.backward()
    for at, gradient in zip(range(0, count, step), embeddings.grad[start : start + count].split(step)):
        (parts[0] if step >= count else embed(at)).backward(gradient)
    if size() > 1:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        total = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(total)
        nn.utils.vector_to_parameters(total, gradients)
        for p in loss.parameters():
            dist.broadcast(p.grad, 0)  # some sums on GPUs differ in their last bits
    return value.item()
