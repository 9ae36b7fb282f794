"""What a method may add to a vision transformer: `Part`, and the part of a module of its own.

PUMA's parts (`puma`), one prompt for all images (`vpt`) and LoRA (`lora`) are such parts.  Another
one is a file `pumalib/models/<name>.py` with two classes, and a line in `config.METHODS`,
`Method("my-method", part="<name>", part_settings={...})`:

- `Settings`, a frozen dataclass whose defaults switch the part on;
- `Part`, a subclass of the `Part` below, constructed as `Part(settings, width, layers)`.
"""

import dataclasses
import difflib
import importlib
import pkgutil
import sys
from types import ModuleType
from typing import Any

import pydantic.dataclasses
import torch
from torch import Tensor, nn

from .. import config

BRANCHES = ("attn", "mlp")


class Part(nn.Module):
    """Something that a method adds to a vision transformer.

    A subclass overrides the hooks it needs; each by itself changes nothing.  Its parameters are
    trained but those that it freezes itself, and all of them are saved, with its buffers.

    Shapes: B images, N tokens, D width of the backbone; `layer` counts from 0.
    """

    # The key of this part's gates among those of a step.
    gate_name = "part"
    # The share of the training, 0 to 1, that is done when gates are drawn.
    progress = 0.0
    # Whether the class token's position embedding is added to the tokens before the first layer.
    at_class_position = False

    def tokens(
        self, patches: Tensor, layer: int, gates: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Tokens (B, n, D) to put after the class token before `layer`, or None for no change.

        `patches` (B, N, D) are the embedded patches without their positions.  Tokens given before
        a later layer take the place of those from before.  The second value is the weights (B, M)
        by which an image chose among M prompts, or None.
        """

    def qkv(
        self, layer: int, h: Tensor, products: list[Tensor], gates: Tensor | None
    ) -> list[Tensor]:
        """Change query, key and value of all heads, (B, N, D) each, of the normalised input `h`."""
        return products

    def addition(
        self, layer: int, branch: str, h: Tensor, out: Tensor, gates: Tensor | None
    ) -> Tensor | None:
        """What to add to a branch of `BRANCHES`, (B, N, D) or (D,), or None for nothing.

        `h` (B, N, D) is the normalised input of the branch, and `out` (B, N, D) what it gives.
        At the last MLP, N may be the class token alone.
        """

    def draw_gates(self, images: int, generator: torch.Generator | None) -> Tensor | None:
        """Draw the gates of one step, (..., images) or (..., 1), or None where it has none.

        They are random in training, and say in evaluation (`self.training` is false) what stands
        for them.  The other hooks are given them as `gates`; None there means that all are open.
        """


def own_part(method: config.Method, width: int, layers: int) -> Part:
    """Make the part of a module of its own that `method.part` names.

    Raises ValueError where there is no such part, or where `method.part_settings` are not its own.
    """
    part: Part = _module(method.part).Part(_settings(method), width, layers)
    return part


def part_settings(method: config.Method) -> dict[str, Any]:
    """All settings of a method's own part, with the defaults of those that it leaves out.

    {} where it has no such part.  Raises ValueError as `own_part` does.
    """
    if not method.part:
        return {}
    return dataclasses.asdict(_settings(method))


def _settings(method: config.Method) -> Any:
    """The part's `Settings`, checked."""
    where = f"method {method.name!r}, part {method.part!r}"
    return config.checked(where, _strict(_module(method.part).Settings), method.part_settings)


def _module(name: str) -> ModuleType:
    package = sys.modules[__package__]
    # Only what lies in the package is imported, whatever the name.
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
    """A dataclass that checks its fields, and refuses those it does not have."""
    if pydantic.dataclasses.is_pydantic_dataclass(settings):
        return settings
    return pydantic.dataclasses.dataclass(frozen=True, config=config.CHECKED)(settings)
