"""What every loss shares: the contract of `forward`, and geometry without NaN or overflow."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import Amount, Count, checked


class Loss(nn.Module):
    """A loss `compute(x, labels)`; `class Some(Loss, margin=0.1, variant=("paper", "code"))` has these hyperparameters.
    Of names the first is the default; "code" is the loss as PUMA's authors released it."""

    batches = "random"  # the batches it wants, or "classes": some classes, several images of each
    normalised_input = True  # False where it needs the model's output before L2 normalisation; others normalise it
    metric = "cosine"  # how to compare outputs, or a function of (q, D) and (g, D) outputs to (q, g) distances

    def __init_subclass__(cls, **hyper):
        cls.hyper = hyper or getattr(cls, "hyper", {})

    def __init__(self, num_classes: int, dim: int, **hyper):
        super().__init__()
        self.num_classes, self.dim, self._labels_seen = num_classes, dim, False
        if unknown := [key for key in hyper if key not in self.hyper]:
            raise ValueError(f"unknown {unknown[0]!r} of {type(self).__name__}; known: {', '.join(self.hyper)}")
        for key, default in self.hyper.items():
            names = default if isinstance(default, tuple) else ()
            value = hyper.get(key, names[0] if names else default)
            if names and value not in names:
                raise ValueError(f"unknown {key} {value!r}; known: {', '.join(names)}")
            if isinstance(default, (int, float)):
                value = checked(f"{key} = {value!r}", Count if isinstance(default, int) else Amount, value)
            setattr(self, key, value)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """A scalar, in float32 (float64 if the input or a parameter is), whatever the autocast state.
        Embeddings are (N, dim), labels integers (N,) in 0..num_classes-1; else ValueError."""
        x, shape = embeddings, tuple(embeddings.shape)
        if x.ndim != 2 or x.shape[1] != self.dim or not x.is_floating_point():
            raise ValueError(f"embeddings must be floats of shape (N, {self.dim}), got {x.dtype} {shape}")
        integers = torch.can_cast(labels.dtype, torch.long) and labels.dtype != torch.bool
        if labels.shape != shape[:1] or not len(x) or not integers:
            got = f"{labels.dtype} {tuple(labels.shape)} for embeddings {shape}"
            raise ValueError(f"labels must be integers of shape (N,) with N >= 1 as the embeddings, got {got}")
        low, high = labels.aminmax()
        inside = (low >= 0) & (high < self.num_classes)
        if self._labels_seen and labels.is_cuda:
            torch._assert_async(inside, f"labels outside 0..{self.num_classes - 1}")  # waits for nothing
        elif not inside:
            raise ValueError(f"labels must lie in 0..{self.num_classes - 1}, got {low.item()}..{high.item()}")
        self._labels_seen = True
        double = torch.float64 in {x.dtype, *(parameter.dtype for parameter in self.parameters())}
        with torch.autocast(x.device.type, enabled=False):
            return self.compute(x.double() if double else x.float(), labels.long())

    def average(self, outputs: Tensor) -> Tensor:
        """The mean (N, D) of the outputs (K, N, D) of K models, as `metric` compares them."""
        return outputs.mean(0)


def unit(x: Tensor) -> Tensor:
    """Rows of x with length 1; huge rows do not overflow, a zero row stays zero and gets no gradient."""
    x = x / x.detach().abs().amax(1, keepdim=True).clamp_min(1)
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x / length.masked_fill(length < 1e-12, torch.inf)


def mean_of_nonzero(terms: Tensor) -> Tensor:
    """Mean of the positive ones of terms >= 0; zero if there are none."""
    return terms.sum() / (terms > 0).sum().clamp_min(1)


def log_one_plus_sum_exp(z: Tensor, keep: Tensor) -> Tensor:
    """log(1 + sum exp) (N,) over the kept entries of each row of z (N, M)."""
    return F.pad(z.masked_fill(~keep, -torch.inf), (0, 1)).logsumexp(1)


def sqrt_or_zero(x: Tensor) -> Tensor:
    """Square root of numbers of order 1; what is below their rounding error counts as zero, without gradient."""
    zero = x <= 8 * torch.finfo(x.dtype).eps
    return x.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Distances (N, M) between the unit rows of a and b; coincident rows have no gradient."""
    return sqrt_or_zero(2 - 2 * a @ b.T)


def direction_cosines(a: Tensor, p: Tensor, n: Tensor) -> Tensor:
    """kappa_ij = cos(n_j - a_i, p_i - a_i), (N, M), of unit rows a, p (N, D), n (M, D); 0 where two coincide.
    A loss takes `direction` times it from a negative's violation (Mohan, CVPR 2020, second-hand; see notebook 23)."""
    product = p @ n.T - a @ n.T - (p * a).sum(1, keepdim=True) + a.square().sum(1, keepdim=True)
    lengths = euclidean(a, n) * sqrt_or_zero((p - a).square().sum(1, keepdim=True))
    return torch.where(lengths > 0, product / lengths.masked_fill(lengths == 0, 1), 0)
