"""A head that is computed, not trained: it whitens the features within classes."""

import torch
from torch import Tensor, nn

# Strength of the shrinkage: the isotropic prior counts as this many images per feature.  Chosen on
# held-out training classes of three datasets of photographs, docs/own-images.md.
PRIOR = 3


def fit(head: nn.Linear, features: Tensor, labels: Tensor) -> None:
    """Set a square linear head to the `whitening` of features (n, D) and their classes (n,).

    Raises ValueError as `whitening` does.
    """
    weight, bias = whitening(features, labels)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)


def whitening(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The map x -> W x + b that makes the within-class covariance isotropic.

    `features` (n, D) and `labels` (n,) give W (D, D) and b (D,), float64; the mean of all features
    becomes 0.  W is the inverse square root of the within-class covariance (Hatch et al.,
    Interspeech 2006; for image retrieval Mikolajczyk & Matas, ICCV 2007), shrunk towards a multiple
    of the identity (Ledoit & Wolf, J. Multivariate Analysis 2004), here with a weight that depends
    only on n and D.  W is symmetric, so it scales directions and does not rotate them.

    Raises ValueError if no class has two different images.
    """
    x = features.double()
    n, width = x.shape
    _, of_class = torch.unique(labels, return_inverse=True)
    counts = torch.bincount(of_class)
    sums = torch.zeros(len(counts), width, dtype=x.dtype).index_add_(0, of_class, x)
    means = sums / counts[:, None]

    within = x - means[of_class]
    covariance = within.T @ within / n
    mean_variance = covariance.trace() / width
    if mean_variance <= torch.finfo(features.dtype).eps * x.square().mean():
        raise ValueError(
            "head = 'whitened' needs a class with two images that differ: "
            "give more images, or use method 'pretrained', which needs none"
        )

    share = n / (n + PRIOR * width)
    shrunk = share * covariance + (1 - share) * mean_variance * torch.eye(width, dtype=x.dtype)
    values, directions = torch.linalg.eigh(shrunk)
    # For an isotropic covariance W is the identity.
    scales = (mean_variance / values).sqrt()
    weight = directions * scales @ directions.T
    return weight, -weight @ x.mean(0)
