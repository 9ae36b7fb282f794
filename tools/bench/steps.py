"""Time, memory and operations of a training step of each method, against full fine-tuning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pumalib import losses, models
from pumalib.training import loop, memory

from .clock import Clock

# Training images of the eight datasets (Table 1).
TRAIN_IMAGES = 141_404


@dataclass(frozen=True)
class StepSetting:
    """Network, image size, precision and device of a training step."""

    backbone: str
    pixels: int
    dtype: torch.dtype
    device: torch.device


class PlainModel(nn.Module):
    """An unchanged timm model with a linear head: the least that full fine-tuning can cost."""

    def __init__(self, model: models.EmbeddingModel):
        super().__init__()
        self.backbone = model.backbone
        self.head = model.head

    def forward(self, images: Tensor, gates: object) -> Tensor:
        """Embeddings (B, dim) of images (B, 3, H, W).  `gates` are ignored: it has no adapters."""
        return F.normalize(self.head(self.backbone(images)).float(), dim=-1)


class TrainingStep:
    """An optimiser step, always on the same batch, of a method or of "timm", the plain model."""

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
        """Run one optimiser step."""
        self.optimizer.zero_grad(set_to_none=True)
        in_bfloat16 = self.setting.dtype == torch.bfloat16
        device = self.setting.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=in_bfloat16):
            embeddings = self.model(self.images, self.draw_gates(len(self.images)))
        self.loss(embeddings, self.labels).backward()
        self.optimizer.step()

    def operations(self) -> float:
        """Floating-point operations per image, forward and backward."""
        images, labels = self.images, self.labels
        # Of one: attention that is not fused would need the memory of a larger GPU for all.
        self.images, self.labels = images[:1], labels[:1]
        # The counter does not know every fused kernel.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.run()
        self.images, self.labels = images, labels
        return counter.get_total_flops()

    def memory(self) -> int:
        """Bytes that training needs.

        On CUDA the allocator's peak; on a CPU the sum of parameters, optimiser state, gradients and
        the tensors that autograd saves for the backward pass.
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
        """Bytes that autograd saves for the backward pass of a step, without weights."""
        return memory.saved_by_autograd(self.run, self._weights())


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class TrainingSizes:
    """Batch size, classes of the loss, and the side of the square matrices of a product."""

    batch: int
    classes: int
    matmul_side: int


def training_times(
    methods: Sequence[str], sizes: TrainingSizes, setting: StepSetting, clock: Clock
) -> pd.DataFrame:
    """Time a training step of each method in turns; "timm" and "full" must be among them.

    Returns a row per method with speed, memory, operations per image, and `share`: its operations
    per second relative to a large matrix product on this device.  `hours_100_epochs` extrapolates
    to the paper's training, without decoding.
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
    best = {name: turns.min() for name, turns in clock.interleaved(candidates).items()}
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
    """The name of a type as in the tables, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
