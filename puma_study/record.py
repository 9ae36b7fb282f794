"""Records of runs: of a finished run, an ensemble, or a failed run.

A line of a file of kept runs is a record in JSON: the run's name, its settings `run` (an ensemble
has `members`), its numbers, and a digest of all that.  A run that failed, as its loss was not
finite, says `where` and `what` in place of numbers.
"""

import json
import re
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np
import pandas as pd
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from pumalib import evaluation, models
from pumalib.config import Run, short_hash
from pumalib.training import run_folder

# A run's name becomes a path: "puma-proxynca++-1a2b3c4d" may, "..", "a/b" and ".hidden" may not.
_NAME = re.compile(r"(?!damaged-)[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
# Settings are nested two deep; what goes through them by recursion would not survive a thousand.
_DEEPEST = 20
# Counts and seconds are below: 10^400 cannot even be computed with.
_LARGEST = 10**15
# Two fractions that differ by less are equal: kept ones have eight digits.
_ROUNDED = 1e-6


def checked_name(name: Any) -> str:
    """Return `name` if a run may be called so, else raise ValueError: it becomes a path."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{str(name)[:80]!r} cannot be the name of a run: "
            "at most 200 letters, digits and . _ + -, the first a letter or a digit"
        )
    return name


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it holds what is no text")
    return text


def _amount(value: Any) -> int | float:
    """Return a number that is not too large; a whole one stays whole, as it was written."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LARGEST:
        raise ValueError("it is no number that a run has")
    return value


def _shallow(value: Any, depth: int = 0) -> Any:
    """Return settings that are not nested too deeply."""
    if depth > _DEEPEST:
        raise ValueError("they are nested too deeply")
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list):
        parts = value
    for part in parts:
        _shallow(part, depth + 1)
    return value


Name = Annotated[str, BeforeValidator(checked_name)]
Settings = Annotated[dict[str, Any], AfterValidator(_shallow)]
Count = Annotated[int, Field(ge=0, lt=_LARGEST)]
Amount = Annotated[int | float, PlainValidator(_amount)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _InOrder(BaseModel):
    """Content that is written with its keys in the order in which they came.

    Lines of different ages have them in different orders.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", serialize_by_alias=True)
    _keys: tuple[str, ...]

    @model_validator(mode="wrap")
    @classmethod
    def _note_order(cls, content: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(content)
        made._keys = tuple(content)
        return made

    @model_serializer(mode="wrap")
    def _in_order(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written = handler(self)
        return {key: written[key] for key in self._keys}


class Accuracies(_InOrder):
    """The accuracies of a dataset, "unified" or "harmonic", as fractions."""

    # Further ones, as R@2, and the bounds of intervals, as R@1_low.
    __pydantic_extra__: dict[str, Fraction] = Field(init=False)
    dataset: str
    accuracy: Fraction = Field(alias="R@1")
    queries: Count
    excluded: Count = 0


class Environment(_InOrder):
    """The versions, the device, and the digests of data and weights of a training."""

    device: Annotated[str, AfterValidator(_printable)]
    # Digests of its images, and of the held-out ones if they choose the epoch.
    data: str = ""
    held_out: str = ""


class Parameters(_InOrder):
    """How many parameters a model has, and how many of them are trained."""

    trainable: Count
    total: Count


class Record(_InOrder):
    """What finished and failed runs have in common."""

    name: Name
    environment: Environment

    @classmethod
    def of(cls, content: Any) -> Self:
        """A record of this content; ValueError, in one line that names the key: it is none."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
        # Outside of the `except`, so that pydantic's own message is not shown too.
        raise ValueError(_complaint(first))

    @classmethod
    def read(cls, line: str) -> Self:
        """The record of a line; ValueError, which says why: the line is damaged."""
        try:
            content = json.loads(line)
            if content.pop("digest") != short_hash(content):
                raise ValueError("its digest is another")
            return cls.of(content)
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(str(error)) from error

    def content(self) -> dict[str, Any]:
        """The content of its line, without the digest."""
        return self.model_dump()

    def line(self) -> str:
        """The line that `read` takes, without its end."""
        content = self.content()
        return json.dumps(content | {"digest": short_hash(content)})


def _complaint(error: Any) -> str:
    message = error["msg"].removeprefix("Value error, ")
    place = ".".join(str(part) for part in error["loc"])
    if place in ("", "name"):
        return message
    return f"its {place!r}: {message}"


class FailedRun(Record, extra="forbid"):
    """The record of a run whose loss was not finite: it has no numbers."""

    run: Settings
    where: str
    what: str

    @cached_property
    def settings(self) -> Run:
        """The settings of the run."""
        return Run.from_dict(self.run)

    @property
    def summary(self) -> str:
        """What happened: "puma-ms-1a2b3c4d (epoch 3, batch 7: the loss is nan)"."""
        return f"{self.name} ({self.where}: {self.what})"


class FinishedRun(Record):
    """The record of a finished run, or of an ensemble: the one has a `run`, the other `members`."""

    run: Settings | None = None
    members: Annotated[list[Name], Field(min_length=1)] | None = None
    log: list[dict[str, Any]] = []
    open_loss: float | None = None
    parameters: Parameters
    seconds: Amount
    images_per_second: Amount | None
    table: list[Accuracies]
    packed_hits: dict[str, str] = Field(alias="hits")
    packed_classes: dict[str, str] = Field(alias="classes")

    @classmethod
    def rounded(cls, content: dict[str, Any]) -> Self:
        """A record of this content, its name first and its numbers rounded to 8 digits.

        The settings stay as they are.  ValueError as of `of`.
        """
        numbers = {key: value for key, value in content.items() if key != "run"}
        short = json.loads(json.dumps(numbers), parse_float=_eight_digits)
        return cls.of({"name": content["name"], **content, **short})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.run is None) == (self.members is None):
            raise ValueError("its 'run', or the 'members' of an ensemble, must be there")
        _check_table(self)
        check_name_of(self)
        return self

    @cached_property
    def settings(self) -> Run:
        """The settings of the run; ValueError where it is an ensemble."""
        if self.run is None:
            members = ", ".join(self.members or ())
            raise ValueError(f"{self.name} is an ensemble of {members}: name one of them")
        return Run.from_dict(self.run)

    @cached_property
    def accuracies(self) -> dict[str, float]:
        """R@1 by dataset, unified and harmonic, as fractions."""
        return {row.dataset: row.accuracy for row in self.table}

    def accuracy(self, dataset: str) -> float:
        """R@1 of a dataset, "unified" or "harmonic", as a fraction."""
        return self.accuracies[dataset]

    @cached_property
    def queries(self) -> dict[str, int]:
        """The number of queries by dataset, unified and harmonic."""
        return {row.dataset: row.queries for row in self.table}

    def values(self, metric: str) -> dict[str, float]:
        """A metric, as "MAP@R", by dataset, unified and harmonic; KeyError where it is not kept."""
        if metric == "R@1":
            return self.accuracies
        return {row.dataset: (row.model_extra or {})[metric] for row in self.table}

    @cached_property
    def seedless(self) -> str:
        """A hash of all settings but the seed: runs that share it are one row.

        Settings that there were not yet when it was kept have their hash defaults.
        """
        run = replace(self.settings, seed=0)
        return run.fingerprint(str(run.data.split), run.pretrained)

    def scores(self) -> pd.DataFrame:
        """All accuracies as fractions, a row per dataset, unified and harmonic."""
        return pd.DataFrame([row.model_dump() for row in self.table]).set_index("dataset")

    def hits(self) -> dict[str, np.ndarray]:
        """R@1 (0 or 1) of every query: (queries,) per dataset and for "unified"."""
        bits = self._unpacked("hits", self.packed_hits)
        return {dataset: hit.astype(float) for dataset, hit in bits.items()}

    def classes(self) -> dict[str, np.ndarray]:
        """The number of every query's class: (queries,) by dataset, like `hits`."""
        bits = self._unpacked("classes", self.packed_classes)
        return {dataset: is_first.astype(float).cumsum() for dataset, is_first in bits.items()}

    def _unpacked(self, key: str, packed: dict[str, str]) -> dict[str, np.ndarray]:
        """What `evaluation.Scores.packed` wrote as `key`: (queries,) by dataset."""
        found = {}
        for dataset, text in packed.items():
            if dataset not in self.queries:
                raise ValueError(f"its {key!r} of {dataset!r} fit no row of its 'table'")
            try:
                found[dataset] = evaluation.unpack(text, self.queries[dataset])
            except ValueError as error:
                raise ValueError(f"its {key!r} of {dataset!r}: {error}") from error
        return found

    def agrees(self, other: Self) -> bool:
        """Whether two records have the same numbers: accuracies, and the hits of every query.

        Bounds of intervals do not count: they follow from the hits, and from how classes are drawn.
        """
        if self.packed_hits != other.packed_hits:
            return False
        return _without_bounds(self) == _without_bounds(other)


def _eight_digits(text: str) -> float:
    return float(f"{float(text):.8g}")


def _without_bounds(record: FinishedRun) -> list[dict[str, Any]]:
    rows = []
    for row in record.table:
        numbers = row.model_dump()
        rows.append({key: numbers[key] for key in numbers if not key.endswith(("_low", "_high"))})
    return rows


# ---- what must fit together


def _check_table(record: FinishedRun) -> None:
    """Raise ValueError unless hits and classes fit the table's rows and give its R@1."""
    names = [row.dataset for row in record.table]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"its 'table' has {name!r} twice")
    for overall in evaluation.OVERALL:
        if overall not in names:
            raise ValueError(f"its 'table' has no row {overall!r}")

    hits = record._unpacked("hits", record.packed_hits)
    classes = record._unpacked("classes", record.packed_classes)
    for key, parts in {"hits": hits, "classes": classes}.items():
        # The harmonic mean follows from the datasets, and has no queries of its own.
        without = record.queries.keys() - parts.keys() - {"harmonic"}
        if without:
            raise ValueError(f"its {key!r} lack those of {min(without)!r}")
    for dataset, of_queries in hits.items():
        _check_close(record, dataset, float(of_queries.mean()), "its hits")

    own = [name for name in names if name not in evaluation.OVERALL]
    queries = sum(record.queries[name] for name in own)
    if record.queries["unified"] != queries:
        raise ValueError(f"its datasets have {queries} queries, and not those of 'unified'")
    accuracies = np.array([record.accuracy(name) for name in own])
    _check_close(record, "harmonic", float(evaluation.harmonic_mean(accuracies)), "its datasets")


def _check_close(record: FinishedRun, dataset: str, expected: float, by: str) -> None:
    """Raise ValueError where R@1 of a row is not what follows from the rest of the record."""
    listed = record.accuracy(dataset)
    # Not "above": NaN is not close.
    if not abs(expected - listed) <= _ROUNDED:
        raise ValueError(f"its R@1 of {dataset!r} is {listed}, by {by} {expected:.8g}")


def check_name_of(record: FinishedRun) -> None:
    """Raise ValueError unless the name of a finished run follows from its settings and data.

    Where images were drawn by the seed, or weights or texts are files that may be other ones here,
    its hash cannot be made again: `rows.run_all` and `runs verify` look at those.
    """
    if record.members is not None:
        expected = run_folder.ensemble_name(record.members)
    else:
        expected = _expected_name(record)
    if record.name != expected:
        raise ValueError(f"by its settings it would be called {expected}")


def _expected_name(record: FinishedRun) -> str:
    """The name of a run by its settings and by the digest of its data."""
    run = record.settings
    digest = _needed(record.environment, "data")
    if run.training.score_epochs:
        digest += _needed(record.environment, "held_out")
    _, _, fingerprint = record.name.rpartition("-")
    kind = f"{run.method.name}-{run.loss}-{fingerprint}"
    is_of_a_file = run.pretrained not in models.saved.WITHOUT_FILE or "texts" in run.loss_settings
    if run.data.shots or is_of_a_file:
        return kind
    return run_folder.name_by_digests(run, digest, run_folder.weights_digest(run))


def _needed(environment: Environment, key: str) -> str:
    if key not in environment.model_fields_set:
        raise ValueError(f"its 'environment' has no {key!r}")
    return getattr(environment, key)
