"""Parts that a method can add to a vision transformer, yours included.

PUMA's parts (`puma`), one prompt for all images (`vpt`) and LoRA (`lora`) are examples.  To add a
part, write a file `pumalib/models/<name>.py` with two classes, and a line in `config.METHODS`,
`Method("my-method", part="<name>", part_settings={...})`:

- `Settings`, a frozen dataclass whose defaults switch the part on;
- `Part`, a subclass of the `Part` below, constructed as `Part(settings, shapes)`.

`tests/test_parts.py` has three published methods as examples: (IA)3, BitFit and SSF.
"""

import dataclasses
import difflib
import importlib
import pkgutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pydantic.dataclasses
import torch
from torch import Tensor, nn

from .. import config

BRANCHES = ("attn", "mlp")
# The modules of the backbone with a weight or a bias, and the activation inside an MLP, in order:
# the first before all layers, the last after them, the others in each layer.
PLACES = ("patch_embed", "norm1", "qkv", "proj", "norm2", "fc1", "act", "fc2", "norm")
PLACES_OF_A_LAYER = PLACES[1:-1]


@dataclass(frozen=True)
class Shapes:
    """The sizes of a backbone of plain blocks."""

    # D, the number of features of a token.
    width: int
    # L, the number of blocks.
    layers: int
    # Features between the two linear layers of an MLP.
    hidden: int
    # Attention heads.
    heads: int

    def layers_at(self, place: str) -> int:
        """How often one of `PLACES` occurs: once in each layer, or once in all."""
        if place in PLACES_OF_A_LAYER:
            return self.layers
        return 1

    def features(self, place: str) -> int:
        """The number of features per token at one of `PLACES`; "qkv" has all three side by side.

        >>> Shapes(width=384, layers=12, hidden=1536, heads=6).features("qkv")
        1152
        """
        if place == "qkv":
            return 3 * self.width
        if place in ("fc1", "act"):
            return self.hidden
        return self.width


class Part(nn.Module):
    """A module that a method adds to a vision transformer.

    A subclass overrides the hooks it needs; the others change nothing.  Its parameters are trained,
    unless it freezes them itself; all parameters and buffers are saved.

    Shapes: B images, N tokens, D width of the backbone; `layer` counts from 0.
    """

    # The key of this part's gates in the dict of a step.
    gate_name = "part"
    # The finished share of the training, 0 to 1, when gates are drawn.
    progress = 0.0
    # Whether the class token's position embedding is added to the tokens before the first layer.
    at_class_position = False

    def tokens(
        self, patches: Tensor, layer: int, gates: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Tokens (B, n, D) to put after the class token before `layer`, or None for no change.

        `patches` (B, N, D) are the embedded patches without their positions.  Tokens for a later
        layer replace the part's earlier ones.  The second value is the weights (B, M) of an image
        for M prompts, or None.
        """

    def qkv(
        self, layer: int, h: Tensor, products: list[Tensor], gates: Tensor | None
    ) -> list[Tensor]:
        """Change query, key and value (B, N, D) of all heads, computed from the normalised `h`."""
        return products

    def activations(self, layer: int, place: str, x: Tensor, gates: Tensor | None) -> Tensor:
        """Change the activations `x` at one of `PLACES`, (B, N, `shapes.features(place)`).

        `layer` is 0 at "patch_embed", which has no class token, and at "norm" (the identity in a
        backbone that normalises after pooling).  At the last MLP, N may be the class token alone.
        """
        return x

    def addition(
        self, layer: int, branch: str, h: Tensor, out: Tensor, gates: Tensor | None
    ) -> Tensor | None:
        """The term to add to one of `BRANCHES`, (B, N, D) or (D,), or None for nothing.

        `h` (B, N, D) is the normalised input of the branch, and `out` (B, N, D) its output.  At the
        last MLP, N may be the class token alone.
        """

    def draw_gates(self, images: int, generator: torch.Generator | None) -> Tensor | None:
        """Draw the gates of one step, (..., images) or (..., 1), or None for a part without gates.

        They are random in training; in evaluation (`self.training` is false) they are constants
        in their place.  The other hooks get them as `gates`; None means that all are open.
        """


def own_part(method: config.Method, shapes: Shapes) -> Part:
    """Make the part of the module that `method.part` names.

    Raises ValueError if there is no such part, or it does not have `method.part_settings`.
    """
    part: Part = _module(method.part).Part(_settings(method), shapes)
    return part


def part_settings(method: config.Method) -> dict[str, Any]:
    """All settings of a method's own part, defaults included; {} without such a part.

    Raises ValueError as `own_part` does.
    """
    if not method.part:
        return {}
    return dataclasses.asdict(_settings(method))


def with_own_settings(
    method: str | config.Method, settings: Mapping[str, Any], known: Collection[str] = ()
) -> dict[str, Any]:
    """The settings by name, with those of the method's own part collected in `part_settings`.

    `known` are other allowed names, which stay as they are.  Raises ValueError for an unknown name,
    for a name that both the method and its part have, and as `own_part` does.
    """
    chosen = config.method(method)
    part = settings.get("part", chosen.part)
    if not part:
        return dict(settings)

    own = [field.name for field in dataclasses.fields(_module(part).Settings)]
    of_method = config.settings_of_method()
    gathered = dict(settings.get("part_settings", chosen.part_settings))
    others = {}
    for name, value in settings.items():
        if name in own and (name in of_method or name in known):
            what = f"{name!r} is a setting of method {chosen.name!r} and of its part {part!r}"
            raise ValueError(f"{what}: rename it in the Settings of the part")
        if name in own:
            gathered[name] = value
        elif name in of_method or name in known:
            others[name] = value
        else:
            near = difflib.get_close_matches(name, [*own, *of_method], 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            listed = f"of part {part!r}: {', '.join(own) or 'none'}; of a method: "
            raise ValueError(
                f"method {chosen.name!r}: unknown setting {name!r}; {meant}{listed}"
                + ", ".join(of_method)
            )
    if gathered:
        others["part_settings"] = gathered
    return others


def _settings(method: config.Method) -> Any:
    """The part's `Settings`, checked."""
    where = f"method {method.name!r}, part {method.part!r}"
    return config.checked(where, _strict(_module(method.part).Settings), method.part_settings)


def _module(name: str) -> ModuleType:
    package = sys.modules[__package__]
    # Only modules of this package are imported, also for a name with dots.
    names = [found.name for found in pkgutil.iter_modules(package.__path__)]
    if name not in names:
        parts = [other for other in names if _is_part(_imported(other))]
        near = ", ".join(difflib.get_close_matches(name, parts)) or "none"
        place = f"a part is a file {__package__.replace('.', '/')}/<part>.py"
        raise ValueError(f"unknown part {name!r}; near: {near}; {place}")
    module = _imported(name)
    if not _is_part(module):
        needs = "a dataclass Settings and a class Part, a subclass of pumalib.models.parts.Part"
        raise ValueError(f"{module.__name__} is no part of a method: that needs {needs}")
    return module


def _imported(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{name}")


def _is_part(module: ModuleType) -> bool:
    if not dataclasses.is_dataclass(getattr(module, "Settings", None)):
        return False
    made = getattr(module, "Part", None)
    return isinstance(made, type) and issubclass(made, Part)


def _strict(settings: type) -> Any:
    """The dataclass with checks of its fields by pydantic; unknown fields are refused."""
    if pydantic.dataclasses.is_pydantic_dataclass(settings):
        return settings
    return pydantic.dataclasses.dataclass(frozen=True, config=config.CHECKED)(settings)
