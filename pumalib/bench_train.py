"""Speed and memory of a training step, method by method, against what their arithmetic allows: `python -m pumalib bench train`.

Candidates run by turns in one process, and the fastest turn of each counts: what a busy machine adds is no property of a
method.  Two references are among them: `timm` (the plain timm model, forward and backward: the floor for `full`) and `naive puma` (the
same PUMA from its equations one by one).  Floating-point operations are counted from the shapes (`count_flops`); what
`vpt` reaches tells how fast they can be had here, and with it what each method's count allows.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import losses, models, paths
from .models import EmbeddingModel
from .models.puma import PromptPool, StochasticAdapter

METHODS = ("full", "linear", "vpt", "lora", "adaptformer", "puma")
REFERENCES = ("timm", "naive puma")
PARTS = ("forward", "loss", "backward", "optimiser")
COLUMNS = [
    "method", "backbone", "size", "batch", "dtype", "compiled", "images_per_s", "step_ms", *(f"{part}_ms" for part in PARTS),
    "cpu_s", "peak_mb", "gflop_per_image", "matmul_peak_gflops", "share_of_peak", "allowed_vs_vpt", "reached_vs_vpt",
    "hours_100_epochs", "steps", "device", "threads", "torch", "python",
]  # fmt: skip
TRAIN_IMAGES = 141_404  # of the eight datasets (Table 1)


class PlainTimm(nn.Module):
    """The timm model as it comes, with a linear head."""

    def __init__(self, model: EmbeddingModel):
        super().__init__()
        self.backbone, self.head = model.backbone, model.head

    def forward(self, images: Tensor, gates: dict[str, Tensor]) -> Tensor:
        return F.normalize(self.head(self.backbone(images)).float(), dim=-1)


class NaivePuma(nn.Module):
    """PUMA as its equations stand: an einsum for each product, (B, M, D) for Eq. 8, closed adapters computed and zeroed."""

    def __init__(self, model: EmbeddingModel):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, gates: dict[str, Tensor]) -> Tensor:
        model, vit = self.model, self.model.backbone
        gates = gates["adapter"].to(images.device)
        patches = vit.patch_embed(images)
        query = patches.mean(1) + patches.amax(1)
        attended = torch.einsum("bd,md->bmd", query, model.prompt.attention)
        alpha = F.cosine_similarity(attended.float(), model.prompt.keys, dim=-1)
        prompt = torch.einsum("bm,mnd->bnd", alpha, model.prompt.prompts)
        x, prefix = vit._pos_embed(patches), vit.num_prefix_tokens
        x = vit.norm_pre(torch.cat([x[:, :prefix], prompt, x[:, prefix:]], dim=1))
        for block, adapters, gate in zip(vit.blocks, model.adapters, gates, strict=True):
            h = block.norm1(x)
            x = x + block.ls1(block.attn(h)) + self.adapter(adapters["attn"], h, gate[0])
            h = block.norm2(x)
            x = x + block.ls2(block.mlp(h)) + self.adapter(adapters["mlp"], h, gate[1])
        x = vit.norm(x)
        x = torch.cat([x[:, :prefix], x[:, prefix + prompt.shape[1] :]], dim=1)
        return F.normalize(model.head(vit.forward_head(x, pre_logits=True)).float(), dim=-1)

    @staticmethod
    def adapter(adapter: StochasticAdapter, h: Tensor, gate: Tensor) -> Tensor:
        hidden = F.relu(torch.einsum("bnd,rd->bnr", h, adapter.down.weight))
        return gate.view(-1, 1, 1) * adapter.scale * torch.einsum("bnr,dr->bnd", hidden, adapter.up.weight)


def count_flops(model: EmbeddingModel, every_row: bool = False) -> tuple[float, float]:
    """Floating-point operations of matrix products that an image needs in training: (forward, backward).

    Two for each multiplication and addition.  A gradient is counted where something trainable needs it; an adapter with
    keep probability p for the share p of images; attention's scores twice in backward, as its fast kernels compute
    them; the last layer for its class token alone, unless `every_row`.

    Raises:
        ValueError: the backbone is no vision transformer.
    """
    if not model.is_vit:
        raise ValueError(f"only vision transformers are counted, not {type(model.backbone).__name__}: give another --backbone")
    vit, method = model.backbone, model.method
    tuned, width = method.tune_backbone, vit.num_features
    total = [0.0, 0.0]

    def product(rows: float, inputs: int, outputs: int, to_input: bool, to_weight: bool, times: float = 1) -> None:
        flops = 2 * rows * inputs * outputs * times
        total[0] += flops
        total[1] += flops * (to_input + to_weight)

    patches = vit.patch_embed.num_patches
    product(patches, vit.patch_embed.proj.weight[0].numel(), width, False, tuned)
    if isinstance(model.prompt, PromptPool):
        product(1, width, method.prompts, tuned, True, times=2)  # inner products and norms of Eq. 8
        product(1, method.prompts, method.prompt_length * width, True, True)  # Eq. 9
    tokens = patches + vit.num_prefix_tokens + (method.prompt_length if model.prompt is not None else 0)
    live = tuned or model.prompt is not None  # whether a layer's input needs a gradient
    for layer, block in enumerate(vit.blocks):
        last = layer == len(vit.blocks) - 1
        rows = vit.num_prefix_tokens if last and model.reads_class_token and not every_row else tokens
        adapters = model.adapters[layer] if model.adapters is not None and layer < len(model.adapters) else {}
        lora = model.lora is not None
        product(tokens, width, 3 * width, live, tuned)
        for _ in method.lora_targets if lora else ():
            product(tokens, width, method.lora_rank, live, True)
            product(tokens, method.lora_rank, width, True, True)
        scores = 2 * rows * tokens * width
        total[0] += 2 * scores
        total[1] += 5 * scores * (live or lora)
        product(rows, width, width, live or lora, tuned)
        for branch in ("attn", "mlp"):
            if branch == "mlp":
                product(rows, width, block.mlp.fc1.out_features, live, tuned, times=2)
            if branch in adapters:
                product(rows, width, method.adapter_rank, live, True, times=method.adapter_keep)
                product(rows, method.adapter_rank, width, True, True, times=method.adapter_keep)
            live = live or lora or branch in adapters
    for place, linear in enumerate(m for m in model.head.modules() if isinstance(m, nn.Linear)):
        product(1, linear.in_features, linear.out_features, live or place > 0, True)
    return total[0], total[1]


@dataclass
class Candidate:
    """A model with its loss and optimiser, and what was measured of it."""

    name: str
    model: nn.Module
    draw_gates: Callable[[int], dict[str, Tensor]]
    loss: nn.Module
    optimiser: torch.optim.Optimizer
    flops: float  # per image, forward and backward
    seconds: list[dict[str, float]]
    peak: int = 0  # bytes


def candidate(name: str, backbone: str, size: int, classes: int, device: torch.device, compiled: bool) -> Candidate:
    """The candidate called `name`, untrained, its network compiled or not."""
    method = {"timm": "full", "naive puma": "puma"}.get(name, name)
    embedding = models.build(method, backbone, pretrained="random", image_size=size)
    wrapped = {"timm": PlainTimm, "naive puma": NaivePuma}.get(name)
    model = (wrapped(embedding) if wrapped else embedding).to(device).train()
    if compiled:
        model.compile()
    loss = losses.make("curricularface", classes, 128).to(device)
    trained = [p for p in (*model.parameters(), *loss.parameters()) if p.requires_grad]
    return Candidate(name, model, embedding.draw_gates, loss, torch.optim.AdamW(trained, lr=1e-4, weight_decay=1e-4),
                     sum(count_flops(embedding, every_row=name in REFERENCES)), [])  # fmt: skip


def step(c: Candidate, images: Tensor, labels: Tensor, dtype: torch.dtype, wait: Callable[[], None]) -> dict[str, float]:
    """One training step; seconds of its parts and, over all threads, of the CPU."""
    c.optimiser.zero_grad(set_to_none=True)
    wait()
    times, cpu = [time.perf_counter()], time.process_time()

    def lap() -> None:
        wait()
        times.append(time.perf_counter())

    with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        embeddings = c.model(images, c.draw_gates(len(images)))
    lap()
    value = c.loss(embeddings, labels)
    lap()
    value.backward()
    lap()
    c.optimiser.step()
    lap()
    return {p: b - a for p, a, b in zip(PARTS, times, times[1:], strict=False)} | {"cpu": time.process_time() - cpu}


def peak_memory(c: Candidate, images: Tensor, labels: Tensor, dtype: torch.dtype) -> int:
    """Bytes that training this candidate needs: parameters, buffers and optimiser state, and the most a step adds.

    On CUDA the allocator says what a step adds.  A CPU has no such counter: there it is the storage of what autograd
    keeps for the backward pass, and the gradients; the short-lived work space of single operations is left out.
    """
    tensors = [*c.model.parameters(), *c.model.buffers(), *c.loss.parameters(), *c.loss.buffers()]
    own = {t.untyped_storage().data_ptr() for t in tensors}
    tensors += [v for state in c.optimiser.state.values() for v in state.values() if isinstance(v, Tensor)]
    standing = sum(t.numel() * t.element_size() for t in tensors)
    c.optimiser.zero_grad(set_to_none=True)
    if images.is_cuda:
        torch.cuda.reset_peak_memory_stats(images.device)
        before = torch.cuda.memory_allocated(images.device)
        step(c, images, labels, dtype, torch.cuda.synchronize)
        return standing + torch.cuda.max_memory_allocated(images.device) - before
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step(c, images, labels, dtype, lambda: None)
    gradients = sum(p.grad.numel() * p.grad.element_size() for g in c.optimiser.param_groups for p in g["params"] if p.grad is not None)
    return standing + gradients + sum(kept.values())


def matmul_rate(device: torch.device, dtype: torch.dtype, wait, side: int) -> float:
    """Operations per second of one square matrix product."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    a @ b
    wait()
    start = time.perf_counter()
    a @ b
    wait()
    return 2 * side**3 / (time.perf_counter() - start)


def measure(names: list[str], backbone: str, size: int, batch: int, *, steps: int, classes: int, device: torch.device,
            dtype: torch.dtype, compiled: bool, matmul_side: int) -> pd.DataFrame:  # fmt: skip
    """A row for each candidate, with the columns `COLUMNS`; times are of its fastest turn, the matmul peak is the best of all turns."""
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(classes, (batch,), device=device)
    candidates = [candidate(name, backbone, size, classes, device, compiled) for name in names]
    for c in candidates:
        for _ in range(3 if compiled else 1):  # the first steps compile, allocate and choose kernels
            step(c, images, labels, dtype, wait)
        c.peak = peak_memory(c, images, labels, dtype)
    peak = 0.0
    for _ in range(steps):
        for c in candidates:
            c.seconds.append(step(c, images, labels, dtype, wait))
            peak = max(peak, matmul_rate(device, dtype, wait, matmul_side))
    best = {c.name: min(c.seconds, key=lambda turn: sum(turn[part] for part in PARTS)) for c in candidates}
    speed = {name: batch / sum(turn[part] for part in PARTS) for name, turn in best.items()}
    vpt = next((c for c in candidates if c.name == "vpt"), None)
    rows = []
    for c in candidates:
        parts, rate = best[c.name], speed[c.name]
        rows.append((
            c.name, backbone, size, batch, str(dtype).removeprefix("torch."), compiled, rate, 1000 * batch / rate,
            *(1000 * parts[part] for part in PARTS), parts["cpu"], c.peak / 1e6, c.flops / 1e9, peak / 1e9, c.flops * rate / peak,
            vpt.flops / c.flops if vpt else None, rate / speed["vpt"] if vpt else None, 100 * TRAIN_IMAGES / rate / 3600, steps,
            torch.cuda.get_device_name(device) if cuda else "cpu", torch.get_num_threads(), torch.__version__,
            platform.python_version(),
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=COLUMNS)


def bars(table: pd.DataFrame) -> list[tuple[str, float, bool]]:
    """What is asked of PUMA on this kind of device: (what, number, whether it holds); those whose rows are there."""
    rows = table.set_index("method")
    if "puma" not in rows.index:
        return []
    puma, found = rows.loc["puma"], []
    if puma["device"] == "cpu":
        if "vpt" in rows.index:
            share = puma["reached_vs_vpt"] / puma["allowed_vs_vpt"]
            found.append(("throughput beside vpt's, as a share of what the counts allow, at least 0.85", share, share >= 0.85))
        if "naive puma" in rows.index:
            ratio = puma["images_per_s"] / rows.at["naive puma", "images_per_s"]
            found.append(("throughput beside naive puma's, above 1", ratio, ratio > 1))
        return found
    if "full" in rows.index:
        ratio = puma["images_per_s"] / rows.at["full", "images_per_s"]
        memory = puma["peak_mb"] / rows.at["full", "peak_mb"]
        found += [("throughput beside full's, at least 1.15", ratio, ratio >= 1.15),
                  ("peak memory beside full's, at most 0.80", memory, memory <= 0.80)]  # fmt: skip
    found.append(("share of the measured matmul peak, at least 0.40", puma["share_of_peak"], puma["share_of_peak"] >= 0.40))
    return found


def main(argv: list[str] | None = None) -> Path:
    """Measure, print table and bars, write `results/bench/train-<device>.csv`; returns that path."""
    parser = argparse.ArgumentParser(prog="python -m pumalib bench train", description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", default="vit_small_patch16_224")
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument("--batch", type=int, help="default: 720 on a GPU, 16 elsewhere")
    parser.add_argument("--methods", nargs="+", default=[*REFERENCES, *METHODS], help="names of methods and references")
    parser.add_argument("--steps", type=int, default=10, help="turns that count")
    parser.add_argument("--classes", type=int, default=15_952, help="of the loss; default: the unified training set")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--compile", action="store_true", help="compile every network, the references too")
    parser.add_argument("--quick", action="store_true", help="a tiny size, to see that it runs")
    o = parser.parse_args(argv)
    device = torch.device(o.device)
    gpu = device.type == "cuda"
    sizes = dict(backbone=o.backbone, size=o.size, batch=o.batch or (720 if gpu else 16), steps=o.steps, classes=o.classes)
    if o.quick:
        sizes = dict(backbone="mini_vit", size=32, batch=4, steps=1, classes=20)
    torch.manual_seed(0)
    table = measure(o.methods, **sizes, device=device, compiled=o.compile, matmul_side=64 if o.quick else 8192 if gpu else 1024,
                    dtype=getattr(torch, o.dtype or ("bfloat16" if gpu else "float32")))  # fmt: skip
    print(table.drop(columns=["backbone", "size", "batch", "dtype", "compiled", *COLUMNS[-5:]]).to_string(index=False, float_format="%.3g"))
    for what, number, holds in bars(table):
        print(f"PUMA's {what}: {number:.3f}, {'holds' if holds else 'DOES NOT HOLD'}")
    print(f"hours_100_epochs is extrapolated from images_per_s to 100 epochs of {TRAIN_IMAGES:,} images: nobody trained that long here")
    path = paths.RESULTS / "bench" / f"train-{device.type}.csv"
    with paths.written_whole(path) as temporary:
        table.to_csv(temporary, index=False, float_format="%.5g")
    print(f"written to {path}")
    return path
