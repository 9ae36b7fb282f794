"""A pretended GPU: numbers are computed on the CPU, and every storage knows where it would lie.

In `with installed() as gpu`, torch finds one GPU.  A tensor that would lie there has a label on its
storage, which its views share and which the results of operations inherit.  As on a GPU,

- an operation on tensors of both devices raises RuntimeError, and `numpy()` TypeError;
- `gpu.waits` counts what makes Python wait for the device;
- `gpu.slow_copies` counts the copies to the device that are not pinned and non-blocking.

Both count by place, such as "training/watch.py:95", the nearest line of pumalib.  What this cannot
show: memory, speed, other rounding, and operations that CUDA lacks.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pumalib

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
CODE = str(Path(pumalib.__file__).parent)

# How often Python waits for these on a GPU: it needs a number, or the shape of a result.
WAITS = {
    aten._local_scalar_dense.default: 1,  # item(), float(), bool(), `if`
    aten.nonzero.default: 1,
    aten.masked_select.default: 1,
    aten._unique2.default: 1,
    aten.bincount.default: 1,
    aten.equal.default: 1,
    aten.repeat_interleave.Tensor: 1,
    aten.masked_fill.Tensor: 1,
    aten.masked_fill_.Tensor: 1,
    aten.multinomial.default: 2,  # it checks the weights, twice
}
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
# Operations that may have tensors of both devices.
COPIES = {aten.copy_.default, aten._foreach_copy_.default}
# On a CPU this checks its values, on a GPU not.
UNCHECKED = "one_hot"
FROM_HOST_DATA = ("tensor", "as_tensor", "asarray")


class PretendedGPU:
    """What happened so far, by place of the code."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.slow_copies: Counter[str] = Counter()

    def clear(self) -> None:
        self.waits.clear()
        self.slow_copies.clear()


# ---- labels


def is_on_gpu(value: object) -> bool:
    return _is_labelled(value, "on_gpu")


def _is_labelled(value: object, label: str) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return getattr(value.untyped_storage(), label, False)


def _label(tensor: Tensor, label: str, value: bool = True) -> Tensor:
    setattr(tensor.untyped_storage(), label, value)
    return tensor


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place() -> str:
    """The nearest line of pumalib that is being executed, else that of the caller."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(CODE):
        frame = frame.f_back
    file = frame.f_code.co_filename.removeprefix(f"{CODE}/")
    return f"{file}:{frame.f_lineno}"


class _Move(torch.autograd.Function):
    """A copy that lies elsewhere; its gradient returns."""

    @staticmethod
    def forward(ctx, tensor, there):
        ctx.here = is_on_gpu(tensor)
        return _label(tensor.detach().clone(), "on_gpu", there)

    @staticmethod
    def backward(ctx, gradient):
        return _label(gradient.detach().clone(), "on_gpu", ctx.here), None


# ---- what torch does


class _Functions(TorchFunctionMode):
    """Functions that name a device, or ask for it."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self.gpu = gpu
        # The function of tensors on the GPU that is running: its own new tensors lie there too.
        self.running = ""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__" and func.__self__ in (Tensor.device, Tensor.is_cuda):
            found = func(*args)
            if is_on_gpu(args[0]):
                found = GPU if func.__self__ is Tensor.device else True
            return found
        if name in self.METHODS:
            return self.METHODS[name](self, *args, **kwargs)
        if name in ("numpy", "__array__") and is_on_gpu(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

        is_pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            del kwargs["device"]
            if name in FROM_HOST_DATA and not (args and is_on_gpu(args[0])):
                self.gpu.slow_copies[_place()] += 1
            return _label(func(*args, **kwargs), "on_gpu")
        out = self._run(name, func, args, kwargs)
        if is_pinned:
            _label(out, "in_pinned_memory")
        return out

    def _cuda(self, tensor):
        return self._to(tensor, GPU)

    def _cpu(self, tensor):
        return self._to(tensor, torch.device("cpu"))

    def _pin_memory(self, tensor):
        return _label(tensor.clone(), "in_pinned_memory")

    def _is_pinned(self, tensor):
        return _is_labelled(tensor, "in_pinned_memory")

    def _tolist(self, tensor):
        if not is_on_gpu(tensor):
            return tensor.tolist()
        self.gpu.waits[_place()] += 1
        return _Move.apply(tensor, False).tolist()

    def _to(self, tensor, *args, **kwargs):
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if args and isinstance(args[0], Tensor):
            device = args[0].device if not is_on_gpu(args[0]) else GPU
        more = {}
        if memory_format is not None:
            more["memory_format"] = memory_format
        out = tensor.to(dtype or tensor.dtype, **more)
        if device is None or device.type == "meta":
            return out if device is None else out.to(device)
        there = device.type == "cuda"
        if is_on_gpu(tensor) == there:
            return out
        if not there and not non_blocking:
            self.gpu.waits[_place()] += 1
        is_fast = non_blocking and _is_labelled(tensor, "in_pinned_memory")
        if there and not is_fast:
            self.gpu.slow_copies[_place()] += 1
        return _Move.apply(out, there)

    METHODS = {  # noqa: RUF012 - a table, never changed
        "to": _to,
        "cuda": _cuda,
        "cpu": _cpu,
        "pin_memory": _pin_memory,
        "is_pinned": _is_pinned,
        "tolist": _tolist,
    }

    def _run(self, name, func, args, kwargs):
        before = self.running
        self.running = ""
        if "device" not in kwargs and any(map(is_on_gpu, _tensors((args, kwargs)))):
            self.running = name or "a function"
        try:
            return func(*args, **kwargs)
        finally:
            self.running = before


class _Operations(TorchDispatchMode):
    """Operations, those of the backward pass too."""

    def __init__(self, gpu: PretendedGPU, functions: _Functions) -> None:
        super().__init__()
        self.gpu = gpu
        self.functions = functions

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = _tensors((args, kwargs))
        on_gpu = [is_on_gpu(tensor) for tensor in given]
        if any(on_gpu):
            self._check(func, args, given, on_gpu)
        out = func(*args, **kwargs or {})
        is_new = not given and self.functions.running
        if (any(on_gpu) and func not in COPIES) or is_new:
            for tensor in _tensors(out):
                _label(tensor, "on_gpu")
        return out

    def _check(self, func, args, given, on_gpu):
        """Raise RuntimeError for tensors of two devices, and count waits and slow copies."""
        # A tensor without axes on the CPU is a number for CUDA.
        others = [tensor for tensor, there in zip(given, on_gpu) if tensor.ndim and not there]
        if func in COPIES:
            self._count_copy(args)
        elif func in INDEXING:
            self._count_index(args)
        elif others:
            shapes = [("cuda" if there else "cpu", *t.shape) for t, there in zip(given, on_gpu)]
            raise RuntimeError(f"{func}: expected all tensors on the same device, got {shapes}")
        if func in WAITS and self.functions.running != UNCHECKED:
            needs_value = func not in (aten.masked_fill.Tensor, aten.masked_fill_.Tensor)
            if needs_value or is_on_gpu(args[2]):
                self.gpu.waits[_place()] += WAITS[func]

    def _count_copy(self, args):
        target, source = args[0], args[1]
        is_slow = len(args) < 3 or not args[2] or not _is_labelled(source, "in_pinned_memory")
        if is_on_gpu(target) and isinstance(source, Tensor) and not is_on_gpu(source) and is_slow:
            self.gpu.slow_copies[_place()] += 1
        if not is_on_gpu(target) and is_on_gpu(source):
            self.gpu.waits[_place()] += 1

    def _count_index(self, args):
        for index in args[1]:
            if index is None:
                continue
            if not is_on_gpu(index):
                self.gpu.slow_copies[_place()] += 1
            elif index.dtype in (torch.bool, torch.uint8):
                # The number of true entries is the shape of the result.
                self.gpu.waits[_place()] += 1


class _Autocast(torch.autocast):
    def __init__(self, device_type, *args, **kwargs):
        super().__init__("cpu", *args, **kwargs)


@contextmanager
def _pretending(gpu: PretendedGPU) -> Iterator[None]:
    """Pretend in this thread."""
    functions = _Functions(gpu)
    with _Operations(gpu, functions), functions:
        yield


# ---- torch.cuda


def _fakes(gpu: PretendedGPU, memory: int) -> dict[str, object]:
    """Functions of `torch.cuda` for one GPU with `memory` bytes."""
    state = torch.zeros(16, dtype=torch.uint8)

    def wait(*args):
        gpu.waits[_place()] += 1

    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "device": lambda *_: nullcontext(),
        "get_device_name": lambda *_: "a pretended GPU",
        "get_device_capability": lambda *_: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda *_: (memory, memory),
        "get_rng_state": lambda *_: state,
        "set_rng_state": lambda *_: None,
        "synchronize": wait,
    }


@contextmanager
def installed(memory: int = 2**34) -> Iterator[PretendedGPU]:
    """Pretend, in all threads that begin in this context."""
    gpu = PretendedGPU()
    real_run = threading.Thread.run

    def run(thread):
        with _pretending(gpu):
            real_run(thread)

    with ExitStack() as stack:
        for name, fake in _fakes(gpu, memory).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(torch, "autocast", _Autocast))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run))
        capture_check = "_accelerator_graph_capture_health_check"
        stack.enter_context(mock.patch.object(torch.optim.Optimizer, capture_check, lambda _: None))
        stack.enter_context(_pretending(gpu))
        yield gpu
