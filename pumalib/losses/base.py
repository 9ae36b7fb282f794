"""The base class of losses, with checks of settings and geometry without NaN."""

from collections.abc import Callable, Collection
from typing import Annotated

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import Amount, Count, Rate, checked


class Loss(nn.Module):
    """A loss of embeddings x (N, dim) and the labels (N,) of their classes.

    A subclass defines `compute`, and a constructor that takes `num_classes`, `dim` and its own
    hyperparameters, each with a default.  A loss that does not need `num_classes` and `dim` may
    leave them None: labels may then be any integers >= 0, embeddings of any length.
    """

    # The batches it needs: "random", or "classes" for several images of each of some classes.
    batches: str = "random"
    # False if it needs the model's output before L2 normalisation.
    normalised_input: bool = True
    # How to compare outputs: a name, or a function of outputs (q, D), (g, D) to distances (q, g).
    metric: str | Callable[[Tensor, Tensor], Tensor] = "cosine"

    def __init__(self, num_classes: int | None = None, dim: int | None = None) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.dim = dim
        self._labels_seen = False
        self._zero_share: Tensor | None = None

    def compute(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss for checked embeddings x (N, dim), float32 or float64, and int64 labels (N,)."""
        raise NotImplementedError

    def forward(self, embeddings: Tensor, labels: Tensor | ArrayLike) -> Tensor:
        """The loss, a scalar, of embeddings (N, dim) and integer labels (N,) in 0..num_classes-1.

        It is float32 (float64 if the input or a parameter is), also under autocast.  Labels may be
        a list or an array too.  Raises ValueError for other embeddings or labels.
        """
        self._check_embeddings(embeddings)
        labels = self._integers(labels, embeddings)
        self._check_range(labels)
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.compute(embeddings.to(self._precision(embeddings)), labels)

    def average(self, outputs: Tensor) -> Tensor:
        """The mean (N, D) of the outputs (K, N, D) of K models, in the space of `metric`."""
        return outputs.mean(0)

    def share_of_zeros(self) -> Tensor | None:
        """The share of zero terms, which have no gradient, in the last batch; a scalar.

        It is 1 if there was no term.  None if the loss has no zero terms, or does not count them.
        """
        return self._zero_share

    def _note_zeros(self, nonzero: Tensor, terms: Tensor | int) -> None:
        """Store the share of zeros, from the numbers of nonzero terms and of all terms."""
        # From a number no tensor is made: that would be a copy to the device.
        all_terms = terms.clamp_min(1) if isinstance(terms, Tensor) else max(1, terms)
        self._zero_share = 1 - nonzero.detach() / all_terms

    def _check_embeddings(self, embeddings: Tensor) -> None:
        if not isinstance(embeddings, Tensor):
            got = type(embeddings).__name__
            raise ValueError(f"embeddings must be a tensor, which keeps gradients, got {got}")
        shape = tuple(embeddings.shape)
        rows_fit = embeddings.ndim == 2 and self.dim in (None, shape[1])
        if not rows_fit or not embeddings.is_floating_point():
            dim = "D" if self.dim is None else self.dim
            raise ValueError(
                f"embeddings must be floats of shape (N, {dim}), got {embeddings.dtype} {shape}"
            )

    def _integers(self, labels: Tensor | ArrayLike, embeddings: Tensor) -> Tensor:
        """The labels as int64 on the device of the embeddings; ValueError if they do not fit."""
        if not isinstance(labels, Tensor):
            try:
                labels = torch.as_tensor(np.asarray(labels), device=embeddings.device)
            except (TypeError, ValueError) as error:
                raise ValueError(f"labels must be integers of shape (N,) ({error})") from None
        integers = torch.can_cast(labels.dtype, torch.long) and labels.dtype != torch.bool
        one_each = labels.shape == embeddings.shape[:1]
        if not integers or not one_each or len(embeddings) == 0:
            got = f"{labels.dtype} {tuple(labels.shape)} for embeddings {tuple(embeddings.shape)}"
            raise ValueError(
                f"labels must be integers of shape (N,) with N >= 1 as the embeddings, got {got}"
            )
        return labels.long()

    def _check_range(self, labels: Tensor) -> None:
        low, high = labels.aminmax()
        if self.num_classes is None:
            inside = low >= 0
            allowed = "0.."
        else:
            inside = (low >= 0) & (high < self.num_classes)
            allowed = f"0..{self.num_classes - 1}"

        if self._labels_seen and labels.is_cuda:
            # The device raises it some time later, so that no step waits for the check.
            torch._assert_async(inside, f"labels outside {allowed}")
        elif not inside:
            raise ValueError(f"labels must lie in {allowed}, got {low.item()}..{high.item()}")
        self._labels_seen = True

    def _precision(self, embeddings: Tensor) -> torch.dtype:
        dtypes = {embeddings.dtype}
        dtypes.update(parameter.dtype for parameter in self.parameters())
        if torch.float64 in dtypes:
            return torch.float64
        return torch.float32


# ---- checks of hyperparameters: each returns the value, or raises ValueError with its name


def amount(name: str, value: float) -> float:
    """The hyperparameter `name`, which must be a finite number >= 0."""
    return checked(f"{name} = {value!r}", Amount, value)


def divisor(name: str, value: float) -> float:
    """The hyperparameter `name`, which must be a finite number > 0, as a divisor."""
    return checked(f"{name} = {value!r}", Rate, value)


def count(name: str, value: int) -> int:
    """The hyperparameter `name`, which must be an integer >= 0."""
    return checked(f"{name} = {value!r}", Count, value)


def one_or_more(name: str, value: int) -> int:
    """The hyperparameter `name`, which must be an integer >= 1."""
    return checked(f"{name} = {value!r}", Annotated[Count, Field(ge=1)], value)


def choice(name: str, value: str, known: Collection[str]) -> str:
    """The hyperparameter `name`, which must be one of the `known`."""
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")
    return value


def classes_and_dim(loss: str, num_classes: int | None, dim: int | None) -> tuple[int, int]:
    """Both numbers; ValueError if one is missing, as a loss with class vectors needs both."""
    if num_classes is None or dim is None:
        raise ValueError(f"{loss} learns vectors of classes: it needs num_classes and dim")
    if num_classes < 1 or dim < 1:
        got = f"num_classes = {num_classes}, dim = {dim}"
        raise ValueError(f"{got}: they should be greater than or equal to 1")
    return num_classes, dim


# ---- geometry


def unit(x: Tensor) -> Tensor:
    """The rows of x scaled to length 1.

    Huge rows do not overflow; a zero row stays zero and gets no gradient.
    """
    largest = x.detach().abs().amax(1, keepdim=True)
    x = x / largest.clamp_min(1)
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x / length.masked_fill(length < 1e-12, torch.inf)


def mean_of_nonzero(terms: Tensor) -> Tensor:
    """The mean of the nonzero terms, where terms are >= 0; zero if there are none."""
    return terms.sum() / (terms > 0).sum().clamp_min(1)


def log_one_plus_sum_exp(z: Tensor, keep: Tensor) -> Tensor:
    """log(1 + sum exp) (N,) over the entries of each row of z (N, M) where `keep` is true."""
    kept = z.masked_fill(~keep, -torch.inf)
    # The extra column of zeros is the 1 in the logarithm.
    return F.pad(kept, (0, 1)).logsumexp(1)


def sqrt_or_zero(x: Tensor) -> Tensor:
    """The square root of numbers of order 1.

    Numbers below the rounding error count as zero and get no gradient.
    """
    zero = x <= 8 * torch.finfo(x.dtype).eps
    return x.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Distances (N, M) between the unit rows of a and b; coincident rows have no gradient."""
    return sqrt_or_zero(2 - 2 * a @ b.T)


def direction_cosines(a: Tensor, p: Tensor, n: Tensor) -> Tensor:
    """kappa_ij = cos(n_j - a_i, p_i - a_i), (N, M), of unit rows a, p (N, D), n (M, D).

    It is 0 if two of the three coincide.  A loss subtracts `direction` times it from a negative's
    violation (Mohan, CVPR 2020, second-hand; see notebook 23).
    """
    # (n - a) . (p - a) for all pairs, without the (N, M, D) differences.
    product = p @ n.T - a @ n.T - (p * a).sum(1, keepdim=True) + a.square().sum(1, keepdim=True)
    to_negative = euclidean(a, n)
    to_positive = sqrt_or_zero((p - a).square().sum(1, keepdim=True))
    lengths = to_negative * to_positive
    cosines = product / lengths.masked_fill(lengths == 0, 1)
    return torch.where(lengths > 0, cosines, 0)
