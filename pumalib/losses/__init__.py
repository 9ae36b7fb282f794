"""Losses of the paper and of the survey: `make(name, num_classes, dim, **hyper)` returns one of `NAMES`.

Every loss is a module `forward(embeddings (N, D), labels (N,)) -> scalar` (see `base.Loss`); its learnable
class vectors are `loss.proxies`, and `loss.batches` says which batches it wants ("random" or "classes").
"""

from __future__ import annotations

import inspect

from .base import Loss
from .hyperbolic import Hyp
from .margin_softmax import ArcFace, CosFace, CurricularFace
from .memory import XBM
from .pair import Contrastive, Margin, MultiSimilarity, NPair, SupCon, Triplet
from .proxy import ProxyAnchor, ProxyGML, ProxyNCA, ProxyNCApp, SoftTriple
from .regularisers import Language, direction

_LOSSES = {
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
    "softtriple": SoftTriple,
    "cosface": CosFace,
    "arcface": ArcFace,
    "curricularface": CurricularFace,
    "hyp": Hyp,
}
_WRAPPERS = {"xbm": (XBM, "contrastive"), "language": (Language, "ms"), "direction": (direction, "triplet")}
NAMES = (*_LOSSES, *_WRAPPERS)


def make(name: str, num_classes: int, dim: int, **hyper) -> Loss:
    """Build the loss `name` for `num_classes` classes and embeddings of `dim` dimensions.

    `hyper` are the keyword arguments of its class.  "xbm", "language" and "direction" wrap the loss that
    `loss` names (by default contrastive, ms, triplet) and pass on to it what they do not know themselves.

    Raises:
        ValueError: an unknown name or hyperparameter (the message lists the known ones), or a bad value.
    """
    if name in _WRAPPERS:
        wrapper, inner = _WRAPPERS[name]
        parameters = list(inspect.signature(wrapper).parameters.values())[1:]
        missing = [p.name for p in parameters if p.default is p.empty and p.name not in hyper]
        if missing:
            raise ValueError(f"loss {name!r} needs {', '.join(missing)}")
        own = {p.name: hyper.pop(p.name) for p in parameters if p.name in hyper}
        return wrapper(make(hyper.pop("loss", inner), num_classes, dim, **hyper), **own)
    if name not in _LOSSES:
        raise ValueError(f"unknown loss {name!r}; known: {', '.join(NAMES)}")
    known = list(inspect.signature(_LOSSES[name]).parameters)[2:]
    unknown = [key for key in hyper if key not in known]
    if unknown:
        raise ValueError(f"unknown hyperparameter {', '.join(map(repr, unknown))} of {name}; known: {', '.join(known)}")
    return _LOSSES[name](num_classes, dim, **hyper)
