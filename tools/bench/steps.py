"""Training steps of methods beside plain fine-tuning: time, memory and operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pumalib import losses, models
from pumalib.training import loop

from .clock import Clock

# Training images of the eight datasets (Table 1).
TRAIN_IMAGES = 141_404


@dataclass(frozen=True)
class StepSetting:
    """The network of a training step, and how it computes."""

    backbone: str
    pixels: int
    dtype: torch.dtype
    device: torch.device


class PlainModel(nn.Module):
    """A timm model as it comes, with a linear head: the floor of full fine-tuning."""

    def __init__(self, model: models.EmbeddingModel):
        super().__init__()
        self.backbone = model.backbone
        self.head = model.head

    def forward(self, images: Tensor, gates: object) -> Tensor:
        """Embed images (B, 3, H, W): (B, dim).  There is nothing that gates could switch."""
        return F.normalize(self.head(self.backbone(images)).float(), dim=-1)


class TrainingStep:
    """An optimiser step of a method, or of "timm", the plain model, on the same batch each time."""

    def __init__(self, name: str, images: Tensor, labels: Tensor, setting: StepSetting):
        self.images = images
        self.labels = labels
        self.setting = setting
        is_plain = name == "timm"
        built = models.build(
            "full" if is_plain else name,
            setting.backbone,
            pretrained="random",
            image_size=setting.pixels,
        )
        built.to(setting.device)
        self.draw_gates = built.draw_gates
        self.model: nn.Module = built
        if is_plain:
            self.model = PlainModel(built)
        self.model.train()
        classes = int(labels.max()) + 1
        self.loss = losses.make("curricularface", classes, 128).to(setting.device)

        parameters = [*self.model.parameters(), *self.loss.parameters()]
        trained = [p for p in parameters if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=1e-4)
        if setting.device.type == "cpu" and setting.dtype == torch.bfloat16:
            loop.use_plain_attention(self.model)

    def run(self) -> None:
        """Do the step."""
        self.optimizer.zero_grad(set_to_none=True)
        in_bfloat16 = self.setting.dtype == torch.bfloat16
        device = self.setting.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=in_bfloat16):
            embeddings = self.model(self.images, self.draw_gates(len(self.images)))
        self.loss(embeddings, self.labels).backward()
        self.optimizer.step()

    def operations(self) -> float:
        """Count floating-point operations of an image, forward and backward."""
        # Fused kernels are not all counted.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.run()
        return counter.get_total_flops() / len(self.images)

    def memory(self) -> int:
        """Count the bytes that training needs.

        On CUDA the allocator's peak.  On a CPU parameters, optimiser state, gradients, and what
        autograd keeps for the backward pass.
        """
        standing = _bytes_of([*self._weights(), *self._optimizer_state()])
        self.optimizer.zero_grad(set_to_none=True)
        if self.setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.setting.device)
            before = torch.cuda.memory_allocated(self.setting.device)
            self.run()
            peak = torch.cuda.max_memory_allocated(self.setting.device)
            return standing + peak - before
        kept = self._kept_by_autograd()
        return standing + _bytes_of(self._gradients()) + kept

    def _weights(self) -> list[Tensor]:
        found: list[Tensor] = []
        for module in (self.model, self.loss):
            found.extend(module.parameters())
            found.extend(module.buffers())
        return found

    def _optimizer_state(self) -> list[Tensor]:
        found: list[Tensor] = []
        for state in self.optimizer.state.values():
            found.extend(value for value in state.values() if isinstance(value, Tensor))
        return found

    def _gradients(self) -> list[Tensor]:
        found: list[Tensor] = []
        for group in self.optimizer.param_groups:
            found.extend(p.grad for p in group["params"] if p.grad is not None)
        return found

    def _kept_by_autograd(self) -> int:
        """Bytes kept for the backward pass of a step, weights not counted."""
        weights = {tensor.untyped_storage().data_ptr() for tensor in self._weights()}
        kept = {}

        def remember(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            self.run()
        return sum(kept.values())


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class TrainingSizes:
    """Images in a step, classes of the loss, and the side of a large matrix product."""

    batch: int
    classes: int
    matmul_side: int


def training_times(
    methods: Sequence[str], sizes: TrainingSizes, setting: StepSetting, clock: Clock
) -> pd.DataFrame:
    """Time a training step of each method ("timm" and "full" must be among them), by turns.

    A row per method; beside the speed stand its memory, its operations, and what share they are
    of those that one large matrix product reaches here.  `hours_100_epochs` is extrapolated to
    the paper's training, decoding not included.
    """
    torch.manual_seed(0)
    shape = (sizes.batch, 3, setting.pixels, setting.pixels)
    images = torch.randn(*shape, device=setting.device)
    labels = torch.randint(sizes.classes, (sizes.batch,), device=setting.device)
    square = (sizes.matmul_side, sizes.matmul_side)
    a = torch.randn(*square, device=setting.device, dtype=setting.dtype)
    b = torch.randn(*square, device=setting.device, dtype=setting.dtype)

    steps = {name: TrainingStep(name, images, labels, setting) for name in methods}
    operations = {}
    memory = {}
    for name, step in steps.items():
        operations[name] = step.operations()
        memory[name] = step.memory()

    candidates: dict[str, Callable[[], object]] = {name: step.run for name, step in steps.items()}
    candidates["matmul"] = lambda: a @ b
    best = {name: turns.min() for name, turns in clock.by_turns(candidates).items()}
    matmul_rate = 2 * sizes.matmul_side**3 / best["matmul"]

    rows = []
    for name in methods:
        images_per_second = sizes.batch / best[name]
        rows.append(
            {
                "method": name,
                "backbone": setting.backbone,
                "size": setting.pixels,
                "batch": sizes.batch,
                "dtype": dtype_name(setting.dtype),
                "images_per_s": images_per_second,
                "beside_full": best["full"] / best[name],
                "memory_mb": memory[name] / 1e6,
                "memory_beside_full": memory[name] / memory["full"],
                "gflop_per_image": operations[name] / 1e9,
                "matmul_gflops": matmul_rate / 1e9,
                "share": operations[name] * images_per_second / matmul_rate,
                "hours_100_epochs": 100 * TRAIN_IMAGES / images_per_second / 3600,
            }
        )
    return pd.DataFrame(rows)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type in a table: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
