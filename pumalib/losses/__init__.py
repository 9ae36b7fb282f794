"""Losses of the paper and of the survey: `make(name, num_classes, dim, **hyper)` returns one of `NAMES`."""

from collections.abc import Sequence

from .base import Loss
from .pair import XBM, Contrastive, Hyp, Language, Margin, MultiSimilarity, NPair, SupCon, Triplet
from .proxy import (
    ArcFace,
    CosFace,
    CurricularFace,
    ProxyAnchor,
    ProxyGML,
    ProxyNCA,
    ProxyNCApp,
    SoftTriple,
)

_PAIR = {"contrastive": Contrastive, "triplet": Triplet, "npair": NPair, "margin": Margin, "ms": MultiSimilarity}
_PROXY = {"proxynca": ProxyNCA, "proxynca++": ProxyNCApp, "proxyanchor": ProxyAnchor, "proxygml": ProxyGML}
_SOFTMAX = {"softtriple": SoftTriple, "cosface": CosFace, "arcface": ArcFace, "curricularface": CurricularFace}
_LOSSES = _PAIR | {"supcon": SupCon} | _PROXY | _SOFTMAX | {"hyp": Hyp}
_WRAPPERS = {"xbm": (XBM, "contrastive"), "language": (Language, "ms")}  # and what they wrap by default
NAMES = (*_LOSSES, *_WRAPPERS, "direction")


def make(name: str, num_classes: int, dim: int, classes: Sequence[str] | None = None, **hyper) -> Loss:
    """The loss `name`, with values for its class's `hyper`; ValueError: an unknown name of either, or a bad value.
    "xbm" and "language" wrap the loss named `loss` and hand on to it what they do not know; "language" wants the names
    `classes` by label.  "direction" is the `loss` triplet (by default), proxynca or ms with direction regularisation of
    weight `gamma`: `base.direction_cosines`."""
    if name == "direction":
        return make(hyper.pop("loss", "triplet"), num_classes, dim, direction=hyper.pop("gamma", 0.3), **hyper)
    if name in _WRAPPERS:
        wrapper, inner = _WRAPPERS[name]
        own = {key: hyper.pop(key) for key in wrapper.hyper if key in hyper}
        own |= {"classes": classes} if wrapper is Language else {}
        return wrapper(make(hyper.pop("loss", inner), num_classes, dim, classes, **hyper), **own)
    if name not in _LOSSES:
        raise ValueError(f"unknown loss {name!r}; known: {', '.join(NAMES)}")
    return _LOSSES[name](num_classes, dim, **hyper)
