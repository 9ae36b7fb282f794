"""What every loss shares: the contract of `forward`, and geometry without NaN or overflow."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Loss(nn.Module):
    """A metric learning loss over `num_classes` classes and `dim`-dimensional embeddings.

    `forward(embeddings, labels)` takes (N, D) floats of any dtype and (N,) integers in 0..C-1 and returns a
    scalar: `compute(x, labels)` in float32 (float64 if the input or a parameter is), whatever the autocast state.
    """

    hyper, choices = {}, {}  # hyperparameters with their defaults; the values of those that are names
    batches = "random"  # the batches it wants, or "classes": some classes, several images of each
    normalised_input = True  # False where it needs the model's output before L2 normalisation; others normalise it
    metric = "cosine"  # how to compare outputs, or a function of (q, D) and (g, D) outputs to (q, g) distances

    def __init__(self, num_classes: int, dim: int, **hyper):
        super().__init__()
        self.num_classes, self.dim, self._labels_seen = num_classes, dim, False
        for key, value in (self.hyper | hyper).items():
            if key not in self.hyper:
                raise ValueError(
                    f"unknown {key!r} of {type(self).__name__}; its hyperparameters: {', '.join(self.hyper)}"
                )
            if value not in self.choices.get(key, [value]):
                raise ValueError(f"unknown {key} {value!r}; known: {', '.join(self.choices[key])}")
            setattr(self, key, value)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        self._check(embeddings, labels)
        double = torch.float64 in {embeddings.dtype, *(parameter.dtype for parameter in self.parameters())}
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.compute(embeddings.double() if double else embeddings.float(), labels.long())

    def average(self, outputs: Tensor) -> Tensor:
        """The mean (N, D) of the outputs (K, N, D) of K models, as `metric` compares them."""
        return outputs.mean(0)

    def _check(self, x: Tensor, labels: Tensor) -> None:
        if x.ndim != 2 or x.shape[1] != self.dim or not x.is_floating_point():
            raise ValueError(f"embeddings must be floats of shape (N, {self.dim}), got {x.dtype} {tuple(x.shape)}")
        numbers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
        if labels.shape != x.shape[:1] or not len(labels) or not numbers:
            got = f"{labels.dtype} {tuple(labels.shape)} for embeddings {tuple(x.shape)}"
            raise ValueError(f"labels must be integers of shape (N,) with N >= 1 as the embeddings, got {got}")
        tensors = {"embeddings": x, "labels": labels, **dict(self.named_parameters()), **dict(self.named_buffers())}
        if len({tensor.device for tensor in tensors.values()}) > 1:
            places = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
            raise ValueError(f"everything must be on one device, got {places}; move them with .to(device)")
        low, high = labels.aminmax()
        inside = (low >= 0) & (high < self.num_classes)
        if self._labels_seen and labels.is_cuda:
            torch._assert_async(inside, f"labels outside 0..{self.num_classes - 1}")  # waits for nothing
        elif not inside:
            raise ValueError(f"labels must lie in 0..{self.num_classes - 1}, got {low.item()}..{high.item()}")
        self._labels_seen = True


class ProxyLoss(Loss):
    """A loss with learnable class vectors `proxies` (C x K, D), the K of one class adjacent; they start as N(0, std^2).

    Only their direction counts, but the shorter they are, the faster a step of the optimiser turns them.
    """

    std = 1.0

    def __init__(self, num_classes: int, dim: int, **hyper):
        super().__init__(num_classes, dim, **hyper)
        self.proxies = nn.Parameter(self.initial())

    def initial(self) -> Tensor:
        return self.std * torch.randn(self.num_classes, self.dim)

    def cosines(self, x: Tensor) -> Tensor:
        """The cosines (N, C x K) of embeddings (N, D) and proxies."""
        return unit(x) @ unit(self.proxies.to(x.dtype)).T


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

    Direction regularisation of weight gamma (Mohan et al., CVPR 2020; second-hand, their paper was not at hand): no
    negative is pushed away from the anchor straight through the positive.  Triplet: [d_ap - d_an + margin - gamma
    kappa]+.  ProxyNCA, a = x, p = p_y, n = p_c: the negative's exponent is -(d_c + gamma kappa).  MS, p the anchor's
    hardest positive: the negative's exponent is beta (s_an - base - gamma kappa).
    """
    product = p @ n.T - a @ n.T - (p * a).sum(1, keepdim=True) + a.square().sum(1, keepdim=True)
    lengths = euclidean(a, n) * sqrt_or_zero((p - a).square().sum(1, keepdim=True))
    return torch.where(lengths > 0, product / lengths.masked_fill(lengths == 0, 1), 0)
