"""Split a batch: among parallel processes (torchrun), and into micro-batches in sequence.

Every process embeds an equal part of each batch and computes the loss of the whole batch from all
embeddings.  It backpropagates the gradient of its own part; the sum of gradients over processes
equals that of a single process.
"""

import os
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

# How long a process waits for the first one, which may wait for a run's lock, or score.
PATIENCE = timedelta(days=1)
# How long it waits for the others within a step: one that takes longer hangs, or is dead.
STEP = timedelta(minutes=10)
# How often the first process looks for them until then, in seconds.
LOOK = 0.05

_store: dist.Store | None = None


@dataclass(frozen=True)
class Batch:
    """This process's part of a batch, with the gates of the whole batch."""

    images: Tensor  # (b, 3, H, W)
    targets: Tensor  # (b,)
    gates: dict[str, Tensor]  # as `EmbeddingModel.draw_gates` makes them, for the whole batch


def is_first() -> bool:
    """Whether this process is the one that writes: torchrun's first, or the only one.

    This holds before `join` and after `leave` too.
    """
    return int(os.environ.get("RANK", "0")) == 0


def size() -> int:
    """The number of processes that share each batch."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def rank() -> int:
    """The rank of this process among those that share each batch, from 0."""
    if size() == 1:
        return 0
    return dist.get_rank()


def join(device: torch.device) -> None:
    """Connect to the other processes if torchrun started several; on CUDA each uses one GPU.

    Raises ValueError if there are fewer GPUs than processes, or `device` names a GPU, RuntimeError
    if another process does not come.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    backend = "gloo"
    gpu = None
    if device.type == "cuda":
        backend = "nccl"
        gpu = _own_gpu(device)
    global _store
    outer, place, processes = next(dist.rendezvous("env://", timeout=PATIENCE))
    store = dist.PrefixStore(_word_of_all(outer, place, processes), outer)
    dist.init_process_group(
        backend, store=store, rank=place, world_size=processes, timeout=STEP, device_id=gpu
    )
    _store = store
    dist.barrier()


def _word_of_all(store: dist.Store, place: int, processes: int) -> str:
    """A word that these processes alone have: the first one's, once all have asked for it.

    torchrun's store outlives processes that it restarts: without a name of their own the new ones
    would find the addresses of the dead.
    """
    mine = uuid.uuid4().hex
    if place > 0:
        store.set(f"{place} asks", mine)
        answer = f"answer to {mine}"
        store.wait([answer], PATIENCE)
        word = store.get(answer).decode()
        store.set(f"{place} knows {word}", "yes")
        return word

    until = time.monotonic() + STEP.total_seconds()
    absent = set(range(1, processes))
    while absent:
        if time.monotonic() > until:
            raise RuntimeError(f"processes {sorted(absent)} of {processes} did not come in {STEP}")
        for other in sorted(absent):
            if store.check([f"{other} knows {mine}"]):
                absent.discard(other)
            elif store.check([f"{other} asks"]):
                asked = store.get(f"{other} asks").decode()
                store.set(f"answer to {asked}", mine)
        time.sleep(LOOK)
    return mine


def _own_gpu(device: torch.device) -> torch.device:
    """The GPU of this process's local rank, set as the current device."""
    local = int(os.environ["LOCAL_RANK"])
    there = torch.cuda.device_count()
    if device.index is not None or local >= there:
        raise ValueError(
            f"torchrun gives each process a GPU: device = 'auto', --nproc-per-node {there} at most"
        )
    gpu = torch.device("cuda", local)
    torch.cuda.set_device(gpu)
    return gpu


def leave() -> None:
    """Disconnect from the other processes, once all have reached this point."""
    if size() > 1:
        dist.barrier()
        dist.destroy_process_group()


def require_same(described: str) -> None:
    """Raise ValueError, in all processes, unless all describe what they have by the same words."""
    if size() == 1:
        return
    gathered = [""] * size()
    dist.all_gather_object(gathered, described)
    if len(set(gathered)) == 1:
        return
    each = "; ".join(f"process {number}: {words}" for number, words in enumerate(gathered))
    raise ValueError(
        f"the processes that train a run together begin differently ({each}): they need the same"
        " code, data and results folder, see PUMALIB_RESULTS"
    )


def share(batches: list[np.ndarray]) -> list[np.ndarray]:
    """This process's part of each batch: equal parts, in the order of ranks.

    Raises ValueError if a batch cannot be divided equally.
    """
    processes = size()
    for batch in batches:
        if len(batch) % processes:
            remedy = "choose a batch_size that is a multiple of them, or another --nproc-per-node"
            raise ValueError(
                f"a batch of {len(batch)} images cannot be divided equally among {processes}"
                f" processes: {remedy}"
            )
    return [np.split(batch, processes)[rank()] for batch in batches]


def gather(part: Tensor) -> Tensor:
    """Gather equal parts (b, ...) of all processes to (b x size(), ...), by rank, no gradient."""
    part = part.detach()
    if size() == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def from_first(name: str, value: float) -> float:
    """The `value` of the first process, by a name used once; the others wait for it.

    They wait longer than for a step.
    """
    if size() == 1:
        return value
    assert _store is not None
    if is_first():
        _store.set(name, value.hex())
    _store.wait([name], PATIENCE)
    return float.fromhex(_store.get(name).decode())


def check_batch_norm(model: nn.Module, micro_batch: int) -> None:
    """Raise ValueError if trained batch normalisation would see only part of a batch."""
    if not micro_batch and size() == 1:
        return
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                "a part of a batch is not what batch normalisation should see:"
                " micro_batch = 0, one process"
            )


def backward(
    model: nn.Module,
    loss: nn.Module,
    batch: Batch,
    micro_batch: int = 0,
    precision: str = "float32",
) -> Tensor:
    """Return the loss of one batch, a scalar, and leave its gradients in `model` and `loss`.

    Both are the same in all processes.  `micro_batch` images at a time pass the network, twice:
    first for the embeddings, then to backpropagate the gradient with respect to them (Gao et al.,
    "Scaling deep contrastive learning batch size under memory limited setup", 2021); 0: the whole
    batch at once.
    `precision` "bfloat16" is autocast for the network; losses are computed in float32.
    """
    if 0 < micro_batch < len(batch.images):
        value = _in_parts(model, loss, batch, micro_batch, precision)
    else:
        value = _whole(model, loss, batch, precision)
    if size() > 1:
        _sum_over_processes(model, loss)
    return value


def _whole(model: nn.Module, loss: nn.Module, batch: Batch, precision: str) -> Tensor:
    """All images of this process at once, with one graph of the embeddings."""
    part = _embed(model, batch, slice(None), precision)
    value, gradient = _gradient_of_loss(loss, part, batch)
    part.backward(gradient)
    return value


def _in_parts(
    model: nn.Module, loss: nn.Module, batch: Batch, micro_batch: int, precision: str
) -> Tensor:
    """A few images at a time: embed them without a graph, then again for the gradient."""
    count = len(batch.images)
    places = [slice(at, min(at + micro_batch, count)) for at in range(0, count, micro_batch)]
    with torch.no_grad():
        parts = [_embed(model, batch, place, precision) for place in places]
    value, gradient = _gradient_of_loss(loss, torch.cat(parts), batch)
    for place in places:
        _embed(model, batch, place, precision).backward(gradient[place])
    return value


def _embed(model: nn.Module, batch: Batch, place: slice, precision: str) -> Tensor:
    """Embeddings of some of this process's images, with their own gates."""
    count = len(batch.images)
    before = rank() * count
    start, stop, _ = place.indices(count)
    mine = slice(before + start, before + stop)
    gates = {}
    for name, gate in batch.gates.items():
        if gate.shape[-1] > 1:
            gate = gate[..., mine]
        # A last axis of 1 is one gate for all images.
        gates[name] = gate
    images = batch.images[place]
    enabled = precision == "bfloat16"
    with torch.autocast(images.device.type, torch.bfloat16, enabled=enabled):
        return model(images, gates)


def _gradient_of_loss(loss: nn.Module, part: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of the whole batch, and its gradient with respect to this process's embeddings."""
    embeddings = gather(part).requires_grad_()
    value = loss(embeddings, gather(batch.targets))
    value.backward()
    assert embeddings.grad is not None
    start = rank() * len(part)
    return value.detach(), embeddings.grad[start : start + len(part)]


def _sum_over_processes(model: nn.Module, loss: nn.Module) -> None:
    """Sum the network's gradients over processes; the loss's are equal in all already."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(total)
    nn.utils.vector_to_parameters(total, gradients)
    for p in loss.parameters():
        # On GPUs some sums differ in their last bits.
        assert p.grad is not None
        dist.broadcast(p.grad, 0)
