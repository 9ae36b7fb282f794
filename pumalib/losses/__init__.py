"""Losses of the paper and of the survey.

`make(name, num_classes, dim, **hyper)` returns the loss of that name, `list_losses()` the names,
`defaults(name)` its hyperparameters.

A loss of your own: a file here with a class (see `base.Loss`, or `pair.PairLoss`, `proxy.ProxyLoss`
and `wrappers.Wrapper`), and its line in `LOSSES`.
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
    "list_losses",
    "make",
    "miners",
    "texts",
    "unsaid",
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

# What the names of kept runs leave unsaid: the hash in a run's name holds the settings that were
# given, and for the others stand these.  Never change a number here.  Change the default of a class
# as you like: its new runs then get new names, by `unsaid`.  A hyperparameter that an old loss gets
# is added here with the value that leaves the loss as it was; a new loss needs no line.
LEFT_UNSAID: dict[str, dict[str, Any]] = {
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
    """The names that `make` knows, without aliases."""
    return [*LOSSES, "direction"]


def make(
    name: str,
    num_classes: int | None = None,
    dim: int | None = None,
    classes: Sequence[str] | None = None,
    **hyper: Any,
) -> Loss:
    """The loss `name` of `num_classes` classes and `dim` dimensions, with its hyperparameters.

    Losses that learn class vectors need both numbers, "xbm" needs `dim`, "language" `num_classes`;
    other losses check labels and embeddings by them where they are given.

    "xbm" and "language" wrap the loss named `loss` and hand on to it what they do not know;
    "language" wants the names `classes` by label.  "direction" is the `loss` triplet (by default),
    proxynca or ms with direction regularisation of weight `gamma`: `base.direction_cosines`.

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
    """The hyperparameters of a loss with their defaults, as its constructor has them.

    Of "xbm", "language" and "direction" their own, with the name `loss` of what they wrap.
    Raises ValueError for an unknown loss.
    """
    name = _known(name)
    if name == "direction":
        return _defaults_of(_directed, without=("num_classes", "dim", "classes"))
    loss_class = LOSSES[name]
    if issubclass(loss_class, Wrapper):
        own = _defaults_of(loss_class, without=("loss", "classes"))
        return {"loss": loss_class.default_loss, **own}
    return _defaults_of(loss_class, without=("num_classes", "dim"))


def unsaid(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the name of a run must say of its loss beside the `settings` that were given.

    These are the defaults that are not those of `LEFT_UNSAID`, and of a loss that is not there all
    of them; {} for every loss whose defaults are still the same.  What a wrapped loss adds is
    written as "<loss>.<hyperparameter>".  Raises ValueError for an unknown loss.
    """
    name = _known(name)
    known = LEFT_UNSAID.get(name, {})
    said = {}
    for key, value in defaults(name).items():
        changed = key not in known or known[key] != value
        if changed and key not in settings:
            said[key] = value

    if name == "direction" or issubclass(LOSSES[name], Wrapper):
        own, handed_on = _split(name, settings)
        if name == "direction":
            # Given to the inner loss, whatever its default: it is gamma.
            handed_on["direction"] = own.get("gamma")
        inner_name = own.get("loss", defaults(name)["loss"])
        for key, value in unsaid(inner_name, handed_on).items():
            said[f"{inner_name}.{key}"] = value
    return said


def _known(name: str) -> str:
    """The name of a loss as `LOSSES` has it."""
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
    """The loss "direction": another one, whose setting `direction` is here called gamma."""
    if loss == "direction":
        raise ValueError("loss = 'direction': this loss holds another one, not itself")
    if "direction" in hyper:
        given = f"direction = {hyper['direction']!r}"
        raise ValueError(f"{given}: this loss has its weight of the direction as gamma; give that")
    return make(loss, num_classes, dim, classes, direction=gamma, **hyper)


def _split(name: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of a wrapper itself, and those that it hands on."""
    own_names = defaults(name)
    own = {key: value for key, value in settings.items() if key in own_names}
    rest = {key: value for key, value in settings.items() if key not in own_names}
    return own, rest


def _defaults_of(function: Any, without: tuple[str, ...]) -> dict[str, Any]:
    """The parameters of a function or class with their defaults, by its signature."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.name not in without and not takes_any:
            found[parameter.name] = parameter.default
    return found
