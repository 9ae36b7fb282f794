"""Losses of the paper and of the survey.

`list_losses()` returns the names, `make(name, num_classes, dim, **hyper)` a loss by its name,
`defaults(name)` its hyperparameters.

To add a loss, write a file here with a class (see `base.Loss`, or `pair.PairLoss`,
`proxy.ProxyLoss` and `wrappers.Wrapper`), and a line in `LOSSES`.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from . import base, miners, texts
from .base import Loss
from .hyperbolic import Hyp
from .pair import Contrastive, Margin, MultiSimilarity, NPair, PairLoss, SupCon, Triplet
from .proxy import ProxyAnchor, ProxyGML, ProxyLoss, ProxyNCA, ProxyNCApp
from .softmax import (
    ArcFace,
    CosFace,
    CrossEntropy,
    CurricularFace,
    NormalisedSoftmax,
    SoftTriple,
)
from .wrappers import XBM, Language, Wrapper

__all__ = [
    "LOSSES",
    "Loss",
    "PairLoss",
    "ProxyLoss",
    "Wrapper",
    "base",
    "defaults",
    "implicit_defaults",
    "list_losses",
    "make",
    "miners",
    "texts",
]

LOSSES: dict[str, type[Loss]] = {
    "contrastive": Contrastive,
    "triplet": Triplet,
    "npair": NPair,
    "margin": Margin,
    "ms": MultiSimilarity,
    "supcon": SupCon,
    "proxynca": ProxyNCA,
    "proxynca++": ProxyNCApp,
    "proxyanchor": ProxyAnchor,
    "proxygml": ProxyGML,
    "crossentropy": CrossEntropy,
    "normsoftmax": NormalisedSoftmax,
    "softtriple": SoftTriple,
    "cosface": CosFace,
    "arcface": ArcFace,
    "curricularface": CurricularFace,
    "hyp": Hyp,
    "xbm": XBM,
    "language": Language,
}

# Hash defaults: values that a run's hash omits.  The hash in the name of a kept run covers the
# settings that were given; all others had these values.  Never change a value here.  You may change
# the default of a class: its new runs then get new names, by `implicit_defaults`.  If you add a
# hyperparameter to an old loss, add it here with the value that leaves the loss as it was; a new
# loss needs no line.
HASH_DEFAULTS: dict[str, dict[str, Any]] = {
    "contrastive": {"pos_margin": 0.0, "neg_margin": 1.0},
    "triplet": {"margin": 0.05, "miner": "batchhard", "distance": "cosine", "direction": 0.0},
    "npair": {"l2": 0.02},
    "margin": {"margin": 0.2, "beta": 1.2, "variant": "paper"},
    "ms": {
        "alpha": 2.0,
        "beta": 50.0,
        "base": 0.5,
        "epsilon": 0.1,
        "variant": "paper",
        "direction": 0.0,
    },
    "supcon": {"temperature": 0.1},
    "proxynca": {"scale": 1.0, "direction": 0.0},
    "proxynca++": {"scale": 3.0, "variant": "paper"},
    "proxyanchor": {"alpha": 32.0, "margin": 0.1},
    "proxygml": {"proxies_per_class": 12, "ratio": 0.05, "weight": 0.3},
    "softtriple": {"centers": 10, "la": 20.0, "gamma": 0.1, "margin": 0.01, "tau": 0.0},
    "cosface": {"scale": 64.0, "margin": 0.35},
    "arcface": {"scale": 64.0, "margin": 0.5},
    "curricularface": {"scale": 32.0, "margin": 0.3, "variant": "paper"},
    "hyp": {"c": 0.1, "temperature": 0.2, "clip": 2.3, "variant": "paper"},
    "xbm": {"loss": "contrastive", "size": 4096, "warmup": 0},
    "language": {"loss": "ms", "texts": "words", "similarity": None, "weight": 7.5},
    "direction": {"loss": "triplet", "gamma": 0.3},
}

ALIASES = {"multisimilarity": "ms"}


def list_losses() -> list[str]:
    """The names of all losses, without aliases."""
    return [*LOSSES, "direction"]


def make(
    name: str,
    num_classes: int | None = None,
    dim: int | None = None,
    classes: Sequence[str] | None = None,
    **hyper: Any,
) -> Loss:
    """Make the loss `name` for `num_classes` classes and `dim` dimensions, with hyperparameters.

    Losses that learn class vectors need both numbers, "xbm" needs `dim`, "language" `num_classes`;
    other losses use them, if given, to check labels and embeddings.

    "xbm" and "language" wrap the loss named `loss` and pass hyperparameters that are not their own
    on to it; "language" needs the class names `classes` by label.  "direction" is the `loss`
    triplet (the default), proxynca or ms with direction regularisation of weight `gamma`: see
    `base.direction_cosines`.

    Raises ValueError for an unknown loss or hyperparameter, a bad value, or a missing number.

    >>> import torch
    >>> embeddings, labels = torch.eye(4), torch.tensor([0, 0, 1, 1])
    >>> make("triplet", margin=0.5)(embeddings, labels)
    tensor(0.5000)
    >>> make("cosface", num_classes=2, dim=4)(embeddings, labels).shape
    torch.Size([])
    """
    name = _known(name)
    if name == "direction":
        return _directed(num_classes, dim, classes, **hyper)
    loss_class = LOSSES[name]
    if issubclass(loss_class, Wrapper):
        own, handed_on = _split(name, hyper)
        inner_name = own.pop("loss", loss_class.default_loss)
        inner = make(inner_name, num_classes, dim, classes, **handed_on)
        return loss_class(inner, classes, **own)

    known = defaults(name)
    for key in hyper:
        if key not in known:
            names = ", ".join(known)
            raise ValueError(f"unknown {key!r} of {loss_class.__name__}; known: {names}")
    return loss_class(num_classes=num_classes, dim=dim, **hyper)


def defaults(name: str) -> dict[str, Any]:
    """The hyperparameters of a loss with their defaults, from its constructor.

    For "xbm", "language" and "direction" only their own, including `loss`, the name of the loss
    they wrap.  Raises ValueError for an unknown loss.
    """
    name = _known(name)
    if name == "direction":
        return _defaults_of(_directed, without=("num_classes", "dim", "classes"))
    loss_class = LOSSES[name]
    if issubclass(loss_class, Wrapper):
        own = _defaults_of(loss_class, without=("loss", "classes"))
        return {"loss": loss_class.default_loss, **own}
    return _defaults_of(loss_class, without=("num_classes", "dim"))


def implicit_defaults(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a loss that a run's hash must include beside the given `settings`.

    They are the defaults that differ from `HASH_DEFAULTS`, or all defaults of a loss without an
    entry there; {} if no default has changed.  Keys of a wrapped loss are
    "<loss>.<hyperparameter>".  Raises ValueError for an unknown loss.
    """
    name = _known(name)
    known = HASH_DEFAULTS.get(name, {})
    found = {}
    for key, value in defaults(name).items():
        changed = key not in known or known[key] != value
        if changed and key not in settings:
            found[key] = value

    if name == "direction" or issubclass(LOSSES[name], Wrapper):
        own, handed_on = _split(name, settings)
        if name == "direction":
            # The inner loss always gets gamma as its `direction`.
            handed_on["direction"] = own.get("gamma")
        inner_name = own.get("loss", defaults(name)["loss"])
        for key, value in implicit_defaults(inner_name, handed_on).items():
            found[f"{inner_name}.{key}"] = value
    return found


def _known(name: str) -> str:
    """The name of a loss without alias; ValueError if it is unknown."""
    name = ALIASES.get(name, name)
    if name not in list_losses():
        raise ValueError(f"unknown loss {name!r}; known: {', '.join(list_losses())}")
    return name


def _directed(
    num_classes: int | None,
    dim: int | None,
    classes: Sequence[str] | None,
    *,
    loss: str = "triplet",
    gamma: float = 0.3,
    **hyper: Any,
) -> Loss:
    """Make the loss "direction": another loss, whose setting `direction` is called gamma here."""
    if loss == "direction":
        raise ValueError("loss = 'direction': this loss holds another one, not itself")
    if "direction" in hyper:
        given = f"direction = {hyper['direction']!r}"
        raise ValueError(f"{given}: this loss has its weight of the direction as gamma; give that")
    return make(loss, num_classes, dim, classes, direction=gamma, **hyper)


def _split(name: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split settings into a wrapper's own and those for the loss that it wraps."""
    own_names = defaults(name)
    own = {key: value for key, value in settings.items() if key in own_names}
    rest = {key: value for key, value in settings.items() if key not in own_names}
    return own, rest


def _defaults_of(function: Any, without: tuple[str, ...]) -> dict[str, Any]:
    """The parameters of a function or class with their defaults, from its signature."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.name not in without and not takes_any:
            found[parameter.name] = parameter.default
    return found
