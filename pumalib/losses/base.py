"""What every loss shares: the contract of `forward`, geometry without NaN, one fused matrix product."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class Loss(nn.Module):
    """A metric learning loss over `num_classes` classes and `dim`-dimensional embeddings.

    `forward(embeddings, labels)` takes (N, D) floats of any dtype and (N,) integers in 0..C-1 and returns a
    scalar, computed in float32 (float64 if the input or a parameter is) whatever the autocast state.

    Attributes:
        batches: the batches it wants: "random", or "classes" (some classes, several images of each).
        normalised_input: False where the definition needs the model's output before L2 normalisation;
            all other losses normalise their input themselves.
        metric: how embeddings trained with it are compared: "cosine", or a function of (q, D) and (g, D) outputs
            that returns (q, g) distances.
    """

    batches = "random"
    normalised_input = True
    metric = "cosine"

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.num_classes, self.dim = num_classes, dim
        self._labels_seen = False

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        self._check(embeddings, labels)
        double = torch.float64 in {embeddings.dtype, *(parameter.dtype for parameter in self.parameters())}
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.compute(embeddings.double() if double else embeddings.float(), labels.long())

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of checked input: x (N, D) float32 or float64, labels (N,) int64."""
        raise NotImplementedError

    def average(self, outputs: Tensor) -> Tensor:
        """The mean (N, D) of the outputs (K, N, D) of K models, as `metric` compares them."""
        return outputs.mean(0)

    def _check(self, embeddings: Tensor, labels: Tensor) -> None:
        if embeddings.ndim != 2 or embeddings.shape[1] != self.dim or not embeddings.is_floating_point():
            raise ValueError(
                f"embeddings must be floats of shape (N, {self.dim}), got {embeddings.dtype} {tuple(embeddings.shape)}"
            )
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ValueError(f"labels must be integers, got {labels.dtype}")
        if labels.shape != embeddings.shape[:1] or not len(labels):
            raise ValueError(
                f"labels must have shape (N,) with N >= 1 as the embeddings, got {tuple(labels.shape)} "
                f"for embeddings {tuple(embeddings.shape)}"
            )
        devices = {"embeddings": embeddings.device, "labels": labels.device}
        for name, tensor in itertools.chain(self.named_parameters(), self.named_buffers()):
            devices[name] = tensor.device
        if len(set(devices.values())) > 1:
            places = ", ".join(f"{name} on {device}" for name, device in devices.items())
            raise ValueError(f"everything must be on one device, got {places}; move them with .to(device)")
        low, high = labels.aminmax()
        inside = (low >= 0) & (high < self.num_classes)
        if self._labels_seen and labels.device.type == "cuda":
            torch._assert_async(inside, f"labels outside 0..{self.num_classes - 1}")  # waits for nothing
        elif not inside:
            raise ValueError(
                f"labels must lie in 0..{self.num_classes - 1}, got {low.item()}..{high.item()}"
            )
        self._labels_seen = True


class ProxyLoss(Loss):
    """A loss with learnable class vectors `proxies` (C x K, D), the K of one class adjacent.

    They start as N(0, std^2), by default N(0, 1) as in pytorch-metric-learning; only their direction counts,
    but the shorter they are, the faster a step of the optimiser turns them.
    """

    def __init__(self, num_classes: int, dim: int, per_class: int = 1, std: float = 1):
        super().__init__(num_classes, dim)
        self.proxies = nn.Parameter(std * torch.randn(num_classes * per_class, dim))

    def unit_proxies(self, like: Tensor) -> Tensor:
        return F.normalize(self.proxies.to(like.dtype))


def check_choice(kind: str, name: str, known) -> None:
    """Raise ValueError unless `name` is one of the `known` values of the hyperparameter `kind`."""
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(known)}")


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = x.abs().amax(1, keepdim=True).clamp_min_(1)
        scaled = x / scale
        length = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
        length.masked_fill_(length < 1e-12, torch.inf)
        y = scaled.div_(length)
        ctx.save_for_backward(y, length.mul_(scale))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, length = ctx.saved_tensors
        return torch.addcmul(grad, y, (grad * y).sum(1, keepdim=True), value=-1).div_(length)


def unit(x: Tensor) -> Tensor:
    """Rows of x with length 1; huge rows do not overflow, a zero row stays zero and gets no gradient."""
    return _Unit.apply(x)


def rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index]; as an embedding, whose backward pass on a CPU takes a quarter of that of index_select."""
    return F.embedding(index, x)


def mean_of_nonzero(terms: Tensor, keep: Tensor) -> Tensor:
    """Mean of those terms that `keep` marks and that are positive; zero if there are none."""
    terms = terms.masked_fill(~keep, 0)
    return terms.sum() / (terms > 0).sum().clamp_min(1)


def log_sum_exp(z: Tensor, keep: Tensor, one: bool = False) -> Tensor:
    """log of the sum of exp(z) over the kept entries of each row, plus 1 if `one`: (N, 1); 0 for a row without any."""
    z = z.masked_fill(~keep, -torch.inf)
    top = z.detach().amax(1, keepdim=True)
    top = top.clamp_min(0) if one else top.masked_fill(top == -torch.inf, 0)
    rest = (-top).exp() if one else (~keep).all(1, keepdim=True)
    return ((z - top).exp().sum(1, keepdim=True) + rest).log() + top


def rounding(x: Tensor) -> float:
    """What a squared distance of unit vectors may be off by in the precision of x; no distance can be told from 0."""
    return 8 * torch.finfo(x.dtype).eps


def sqrt_or_zero(x: Tensor) -> Tensor:
    """Square root of numbers of order 1; what is below their rounding error counts as zero, without gradient."""
    zero = x <= rounding(x)
    return x.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Distances (N, M) between the unit rows of a and b; coincident rows have no gradient."""
    return sqrt_or_zero(2 - 2 * a @ b.mT)


def direction_cosines(a: Tensor, p: Tensor, n: Tensor) -> Tensor:
    """cos(n_j - a_i, p_i - a_i), (..., R, M), of a, p (..., R, D), n (..., M, D); 0 where two of the three coincide."""
    product = p @ n.mT - a @ n.mT - (p * a).sum(-1, keepdim=True) + a.square().sum(-1, keepdim=True)
    lengths = euclidean(a, n) * sqrt_or_zero((p - a).square().sum(-1, keepdim=True))
    coincident = lengths == 0
    return (product / lengths.masked_fill(coincident, 1)).masked_fill(coincident, 0)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, symmetric, x, p, *rest):
        value, slope, *slopes = function(x @ p.T, *rest)
        _, _, x_needed, p_needed, *_ = ctx.needs_input_grad
        if x is p:  # one product does for both
            slope, p_needed = slope.mul_(2) if symmetric else slope + slope.T, False
        ctx.save_for_backward(slope @ p if x_needed else None, slope.T @ x if p_needed else None, *slopes)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, None, *(None if slope is None else grad * slope for slope in ctx.saved_tensors)


def fused(function, x: Tensor, p: Tensor, *rest: Tensor, symmetric: bool = False) -> Tensor:
    """`function(x @ p.T, *rest)[0]`, differentiable in x (N, D), p (M, D) and `rest`, but not twice.

    `function` also returns its derivatives with respect to each argument, and may overwrite the matrix.  Where x is
    p and the derivative a symmetric matrix, `symmetric` saves adding its transpose.
    At 16,000 classes reading and writing the (N, M) matrix is most of the cost; autograd would do that four
    times more often, and keep several copies of it.
    """
    return _Fused.apply(function, symmetric, x, p, *rest)


class _WithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value, slope):
        ctx.save_for_backward(slope)
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None


def with_slope(x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """The number `value`, differentiable in x with the derivative `slope` that was computed along with it."""
    return _WithSlope.apply(x, value, slope)


def cross_entropy(x: Tensor, p: Tensor, labels: Tensor, shift: Tensor | float = 0.0) -> Tensor:
    """Mean cross-entropy of the logits x @ p.T, `shift` (N,) or a number added to the target's: x (N, D), p (C, D)."""
    column = labels[:, None]

    def value_and_slopes(z, shift):
        z.scatter_add_(1, column, shift[:, None])
        target = z.gather(1, column)
        total = softmax_(z)
        z.scatter_add_(1, column, torch.full_like(target, -1))
        return (total - target).sum(), z, z.gather(1, column)[:, 0]

    shift = torch.as_tensor(shift, dtype=x.dtype, device=x.device).expand(len(x))
    return fused(value_and_slopes, x, p, shift) / len(x)


def softmax_(z: Tensor) -> Tensor:
    """Turn the rows of z into their softmax, in place; returns their log-sum-exp (N, 1)."""
    top = z.amax(1, keepdim=True)
    total = z.sub_(top).exp_().sum(1, keepdim=True)
    z.div_(total)
    return total.log_().add_(top)
