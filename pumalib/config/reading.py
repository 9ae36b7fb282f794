"""Reading settings: the types of fields, YAML, and messages for wrong values.

pydantic checks whatever comes in, by YAML, `-p` or Python.
"""

import copy
import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from typing import Annotated, Any

import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from yaml.composer import ComposerError

CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)


# ---- types of fields


def no_bool(value: Any) -> Any:
    """Refuse true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def ordered(pair: tuple) -> tuple:
    """Refuse a pair whose first number is the larger."""
    if pair[0] > pair[1]:
        raise ValueError("the first number must not be above the second")
    return pair


def once(values: tuple) -> tuple:
    """Refuse repeated values."""
    if len(set(values)) < len(values):
        raise ValueError("give each once")
    return values


def distinct(values: tuple) -> tuple:
    """Refuse repeated values, and an empty list."""
    if not values or len(set(values)) < len(values):
        raise ValueError("give one or more, each once")
    return values


_Number = BeforeValidator(no_bool)
Count = Annotated[int, _Number, Field(ge=0, le=10**9)]
Positive = Annotated[int, _Number, Field(ge=1, le=10**6)]
Number = Annotated[float, _Number, Field(allow_inf_nan=False)]
Amount = Annotated[Number, Field(ge=0)]
Rate = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Dimensions = Annotated[Positive, Field(le=65536)]

# Of a row: more would take years, and a list of millions fills the memory.
MOST_SEEDS = 1000
Seeds = Annotated[tuple[Count, ...], Field(max_length=MOST_SEEDS)]

_THE_SAME = object()


def added(hash_default: Any, default: Any = _THE_SAME) -> Any:
    """A field that is newer than kept runs: a run's hash leaves it out at its `hash_default`.

    That is what all runs before it had, and never changes; `default`, the same at first, may.
    """
    if default is _THE_SAME:
        default = hash_default

    def fresh() -> Any:
        return copy.deepcopy(default)

    return field(default_factory=fresh, metadata={"hash_default": hash_default})


def is_asked_for(info: ValidationInfo) -> bool:
    """Whether these settings are for a new run; those of a kept run are only read."""
    return not (info.context or {}).get("kept")


# ---- YAML


# Each one multiplies the expanded text: 20 make it at most 1,600 times as long.
MOST_ALIASES = 20


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key that is given twice: the first value would be lost.

    Nor are there many aliases: forty, of mappings that are merged, take seconds.
    """

    aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MOST_ALIASES:
                message = f"more than {MOST_ALIASES} aliases (*): write out what they stand for"
                raise ComposerError(None, None, message, self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                message = f"the key {short(key.value)} stands twice"
                raise ComposerError(None, None, message, key.start_mark)
            seen.add((key.tag, key.value))
        return node


# YAML 1.2 reads 3e-4 as a number, PyYAML (1.1) as a text, since it has no point.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(text: str) -> Any:
    """The value of a YAML text; ValueError, in one line, if it is not YAML or repeats a key."""
    try:
        # A SafeLoader: it makes numbers, texts, lists and dictionaries alone.
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from None


# ---- checks and their messages


def checked(where: str, cls: Any, content: Any, kept: bool = False) -> Any:
    """Convert plain `content` to the type `cls`.

    Raises ValueError, pydantic's complaint as one line that names field, value and what is allowed.
    What is only refused today is taken where `kept` says that a finished run had it.
    """
    try:
        return TypeAdapter(cls).validate_python(content, context={"kept": kept})
    except ValidationError as error:
        first = error.errors()[0]
    # Outside of the `except`, so that pydantic's own message is not shown too.
    raise ValueError(_complaint(where, cls, first))


def _complaint(where: str, cls: Any, error: Mapping[str, Any]) -> str:
    place = [str(part) for part in error["loc"]]
    if error["type"] == "unexpected_keyword_argument":
        *above, key = place
        owner = cls
        for section in above:
            owner = next(one.type for one in fields(owner) if one.name == section)
        return f"{', '.join([where, *above])}: {unknown(key, names_of(owner))}"
    message = error["msg"].removeprefix("Value error, ")
    message = re.sub("^(Input|String) should", "it should", message).replace("tuple", "list")
    if not place:
        return f"{where}: {message}"
    return f"{where}: {'.'.join(place)} = {short(error['input'])}: {message}"


def short(value: Any) -> str:
    """`repr` of a value, cut where it is long: aliases in YAML make gigabytes of a few lines."""
    short = reprlib.Repr()
    short.maxlevel = 3
    short.maxlist = short.maxtuple = short.maxdict = 8
    short.maxstring = short.maxother = 200
    try:
        text = short.repr(value)
    # Python does not write numbers of thousands of digits.
    except ValueError:
        return f"a large {type(value).__name__}"
    if len(text) > 400:
        return f"{text[:400]} ..."
    return text


def changed(value: Any, changes: Mapping[str, Any], where: str) -> Any:
    """A dataclass with some fields changed, checked again."""
    return checked(where, type(value), {**vars(value), **changes})


def names_of(cls: Any) -> list[str]:
    """The names of a dataclass's fields."""
    return [one.name for one in fields(cls)]


def only_fields(changes: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """The `changes` that are fields of `cls`."""
    return {name: changes[name] for name in names_of(cls) if name in changes}


def without(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The settings without the `names`."""
    return {name: value for name, value in settings.items() if name not in names}


def require_known(where: str, names: Iterable[str], known: list[str]) -> None:
    """Raise ValueError, which lists the known, where one of the `names` is none of them."""
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: {unknown(name, known)}")


def unknown(name: str, known: Iterable[str], kind: str = "setting") -> str:
    """The message for an unknown name: the nearest known one, and all of them."""
    near = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {short(name)}; {meant}known: {', '.join(known)}"
