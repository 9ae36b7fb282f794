"""Losses of the paper and of the survey: `make(name, num_classes, dim, **hyper)` returns one of `NAMES`."""

from .base import Loss
from .hyperbolic import Hyp
from .margin_softmax import ArcFace, CosFace, CurricularFace
from .pair import Contrastive, Margin, MultiSimilarity, NPair, SupCon, Triplet
from .proxy import ProxyAnchor, ProxyGML, ProxyNCA, ProxyNCApp, SoftTriple
from .wrappers import XBM, Language

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
_WRAPPERS = {"xbm": (XBM, "contrastive"), "language": (Language, "ms")}
NAMES = (*_LOSSES, *_WRAPPERS, "direction")


def make(name: str, num_classes: int, dim: int, **hyper) -> Loss:
    """The loss `name` for `num_classes` classes and embeddings of `dim` dimensions.

    `hyper` are values for its class's `hyper`.  "xbm" and "language" wrap the loss that `loss` names (by default
    contrastive and ms) and hand on to it what they do not know.  "direction" is the `loss` triplet (by default),
    proxynca or ms with direction regularisation of weight `gamma`, 0.3, see `base.direction_cosines`.
    Raises ValueError for an unknown name or hyperparameter, listing the known ones, or a bad value.
    """
    if name == "direction":
        return make(hyper.pop("loss", "triplet"), num_classes, dim, direction=hyper.pop("gamma", 0.3), **hyper)
    if name in _WRAPPERS:
        wrapper, inner = _WRAPPERS[name]
        inner = hyper.pop("loss", inner)
        own = {key: hyper.pop(key) for key in wrapper.hyper if key in hyper}
        return wrapper(make(inner, num_classes, dim, **hyper), **own)
    if name not in _LOSSES:
        raise ValueError(f"unknown loss {name!r}; known: {', '.join(NAMES)}")
    return _LOSSES[name](num_classes, dim, **hyper)
