"""What the notebooks on the survey's losses share.

The losses of their rows, the triplets of a batch, frozen features, and linear embeddings of these
that are trained step by step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from pumalib import data, embedder, losses, models
from pumalib.config import Profile, Training
from pumalib.data import batches
from pumalib.losses.base import Loss

# The loss of each row, with the settings that differ from its defaults.
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "contrastive": ("contrastive", {}),
    "triplet batchhard": ("triplet", {}),
    "triplet all": ("triplet", {"miner": "all"}),
    "triplet semihard": ("triplet", {"miner": "semihard"}),
    "triplet random": ("triplet", {"miner": "random"}),
    "npair": ("npair", {}),
    "ms": ("ms", {}),
    "proxynca": ("proxynca", {}),
    "proxyanchor": ("proxyanchor", {}),
    "proxygml": ("proxygml", {}),
    "softtriple": ("softtriple", {}),
    # the plain cross-entropy that the survey starts from, and its normalised form
    "crossentropy": ("crossentropy", {}),
    "normsoftmax": ("normsoftmax", {}),
}
# Seeds of the linear heads, which take seconds.
HEAD_SEEDS = list(range(10))
# Classes in a head's batch at most, for the sake of the cube of its triplets.
MOST_CLASSES = 16


def loss_of(name: str) -> tuple[str, Mapping[str, Any]]:
    """The loss of a row and its settings; any other name is a loss with its defaults.

    ValueError: there is no loss of that name.
    """
    data.check_known("loss", [name], {*LOSSES, *losses.list_losses()})
    return LOSSES.get(name, (name, {}))


def make(name: str, num_classes: int, dim: int) -> Loss:
    """The loss of a row, made for `num_classes` classes and embeddings of length `dim`."""
    loss, settings = loss_of(name)
    return losses.make(loss, num_classes, dim, **settings)


# ---- the triplets of a batch


def masks(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The positives and the negatives of each anchor, both (N, N), for labels (N,)."""
    same = labels[:, None] == labels
    positive = same.clone().fill_diagonal_(False)
    return positive, ~same


def all_triplets(positive: Tensor, negative: Tensor) -> Tensor:
    """Which of (N, N, N), anchor by positive by negative, are triplets."""
    return positive[:, :, None] & negative[:, None, :]


def hinges(d: Tensor, margin: float) -> Tensor:
    """The hinges (N, N, N) of distances d (N, N), for every combination, triplet or not."""
    return (d[:, :, None] - d[:, None, :] + margin).relu()


# ---- frozen features, and linear heads on them


def frozen_features(
    profile: Profile, images: pd.DataFrame, *, normalise: bool = True
) -> np.ndarray:
    """Features (n, D) of rows of a profile's benchmark by its frozen backbone, in the test view."""
    frozen = models.build(
        "pretrained",
        profile.backbone,
        profile.dim,
        pretrained=profile.pretrained,
        image_size=profile.data.image_size,
        pooling=profile.pooling,
        normalise=normalise,
    )
    return embedder.embed_rows(frozen, data.load(profile.data), images, profile.data)


class Heads(NamedTuple):
    """How linear embeddings of frozen features are trained, by AdamW at a constant rate."""

    profile: Profile
    recipe: Training
    steps: int
    seeds: list[int]
    # Of a batch: classes, and images of each.
    classes: int
    images: int

    def features(self) -> tuple[Tensor, Tensor]:
        """Frozen features of the training images, (n, D), and their labels, (n,).

        They are not normalised, as a head sees them.
        """
        train = data.load(self.profile.data).train
        features = frozen_features(self.profile, train, normalise=False)
        labels = np.unique(train["label"], return_inverse=True)[1]
        return torch.from_numpy(features), torch.from_numpy(labels)

    def drawn(
        self, name: str, seed: int, features: Tensor, labels: Tensor
    ) -> tuple[Loss, nn.Linear]:
        """A loss, and a linear embedding of `features` (n, D) as it is drawn."""
        torch.manual_seed(seed)
        loss = make(name, int(labels.max()) + 1, self.profile.dim)
        head = nn.Linear(features.shape[1], self.profile.dim)
        return loss, head

    def train(
        self, loss: Loss, head: nn.Linear, features: Tensor, labels: Tensor, seed: int
    ) -> Iterator[int]:
        """Train `head`; gives the number of each step before it, and in the end `steps`.

        Raises ValueError for a loss with parameters, such as proxies: they would not be trained.
        """
        if list(loss.parameters()):
            raise ValueError("a loss with parameters is not trained here: give a loss of pairs")
        rate = self.recipe.lr * self.recipe.new_lr_factor
        decay = self.recipe.weight_decay
        optimizer = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=decay)
        shape = (self.classes, self.images, self.recipe.repeat_images)
        in_list = labels.tolist()
        step = 0
        while True:
            for batch in batches.class_batches(in_list, *shape, seed, epoch=step):
                yield step
                if step == self.steps:
                    return
                optimizer.zero_grad()
                loss(head(features[batch]), labels[batch]).backward()
                optimizer.step()
                step += 1

    def probes(self, labels: Tensor, epoch: int, *, repeat_images: bool) -> list[np.ndarray]:
        """Batches to measure on, the same for all seeds and steps: positions in `labels`."""
        shape = (self.classes, self.images, repeat_images)
        return batches.class_batches(labels.tolist(), *shape, seed=10**6, epoch=epoch)

    def about(self) -> dict[str, Any]:
        """All settings that change the numbers of heads, for the name of their cached table."""
        profile = self.profile
        few = profile.name == "smoke"
        about = {
            "data": data.load(profile.data).digest,
            "view": asdict(profile.data),
            "weights": [profile.backbone, profile.pretrained, profile.dim],
            "recipe": [self.steps, self.classes, self.images, self.recipe.lr, few],
            "seeds": list(self.seeds),
        }
        # The usual settings are left out: so tables from before they counted keep their names.
        usual = Training()
        for name in ("new_lr_factor", "weight_decay", "repeat_images"):
            if getattr(self.recipe, name) != getattr(usual, name):
                about[name] = getattr(self.recipe, name)
        return about


def heads(profile: Profile, steps: int | None = None) -> Heads:
    """The heads of a profile: 1000 steps where none are given, in "smoke" 30 and fewer seeds."""
    few = profile.name == "smoke"
    if not steps:
        steps = 30 if few else 1000
    recipe = profile.run("linear").training
    images = recipe.images_per_class
    classes = min(MOST_CLASSES, max(2, recipe.batch_size // images))
    seeds = list(profile.seeds) if few else HEAD_SEEDS
    return Heads(profile, recipe, steps, seeds, classes, images)
