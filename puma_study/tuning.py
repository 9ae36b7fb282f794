"""The same search for every method's own settings, on held-out training classes (docs/protocol.md).

Read `wanted` first: what is to be run next, given the scores that are known.  It and all that
judges scores are pure functions, so that a search goes on by itself from the runs that are kept
(`replay`), and is tested without any training.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from pumalib import config
from pumalib.config import Profile, Run, Training
from pumalib.data import unchanged
from pumalib.training import run_folder

from . import store
from .rows import run_all

# The rates that an optimum at an edge may lead to, and those that every method begins with.
SERIES = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
RATES = (3e-5, 1e-4, 3e-4, 1e-3)
# The methods of the trial, in the order in which they are searched.
METHODS = (
    "puma",
    "full",
    "lora",
    "adapter",
    "linear",
    "adapter-stochastic",
    "adaptformer",
    "prompt-pool",
    "vpt",
    "mlp3",
)
CHECKS = ("mirroring", "length", "convergence")
OF_MIRRORING = ("full", "puma", "lora", "linear")
OF_LENGTH = ("full", "puma")
# Differences in harmonic R@1 that count: 0.5 points.
NOTABLE = 0.005
# Times the profile's epochs: the length check's, and those whose gains show convergence.
LONGER = 2
DOUBLINGS = (2, 4, 8)
LONGEST = 16


class Knob(NamedTuple):
    """The one further setting that is searched; the first of its two values is the default."""

    name: str
    values: tuple[float, float]


def knob_of(method: str) -> Knob:
    """The knob of a method's family; ValueError for an unknown method."""
    chosen = config.method(method)
    if chosen.tune_backbone:
        return Knob("new_lr_factor", (10.0, 1.0))
    if chosen.adapter_rank:
        return Knob("adapter_scale", (0.1, 1.0))
    if chosen.lora_rank:
        return Knob("lora_scale", (1.0, 4.0))
    return Knob("loss_lr_factor", (1e4, 1e3))


class Setting(NamedTuple):
    """A base learning rate and the value of the knob."""

    rate: float
    value: float


@dataclass(frozen=True)
class Trial:
    """A training that a search may ask for."""

    row: str
    setting: Setting
    seed: int = 0
    # x the profile's epochs.
    times: int = 1
    # Whether images are mirrored in training where the profile's are not, and the reverse.
    turned: bool = False


# Harmonic R@1 of finished trials, as fractions; 0 where the loss was not finite.
Scores = Mapping[Trial, float]


@dataclass(frozen=True)
class Search:
    """What is searched: methods, the rates that each begins with, and the checks afterwards."""

    rows: tuple[str, ...] = METHODS
    rates: tuple[float, ...] = RATES
    checks: tuple[str, ...] = ("mirroring", "length")

    def __post_init__(self) -> None:
        for row in self.rows:
            knob_of(row)
        for check in self.checks:
            if check not in CHECKS:
                raise ValueError(f"unknown check {check!r}; known: {', '.join(CHECKS)}")
        require_neighbours(self.rates)


def require_neighbours(rates: tuple[float, ...]) -> None:
    """Raise ValueError where rates do not stand side by side in the series."""
    count = len(rates)
    neighbours = [SERIES[start : start + count] for start in range(len(SERIES))]
    if not rates or rates not in neighbours:
        given = ", ".join(f"{rate:g}" for rate in rates)
        known = ", ".join(f"{rate:g}" for rate in SERIES)
        raise ValueError(f"rates = {given}: take neighbours of the series {known}, in its order")


# ---- what is wanted next


def wanted(search: Search, scores: Scores) -> list[Trial]:
    """The trials to be run next, in the order of the protocol; none where the search is finished.

    First every row's rates at the first value of its knob, then the best two of them at the second
    value; then, row by row, what lies beyond an optimum at an edge, and second seeds; then the
    checks.
    """
    for stage in (_rates, _second_value, _edges_and_seeds):
        missing = _missing(stage(search, scores), scores)
        if missing:
            return missing
    checks = []
    if "mirroring" in search.checks:
        checks += _mirroring(search, scores)
    if "length" in search.checks:
        checks += _length(search, scores)
    missing = _missing(checks, scores)
    if missing or "convergence" not in search.checks:
        return missing
    return _missing(_convergence(search, scores), scores)


def _missing(trials: Iterable[Trial], scores: Scores) -> list[Trial]:
    return [trial for trial in dict.fromkeys(trials) if trial not in scores]


def _rates(search: Search, scores: Scores) -> list[Trial]:
    """Every row's rates at the first value of its knob."""
    trials = []
    for row in search.rows:
        first, _ = knob_of(row).values
        trials += [Trial(row, Setting(rate, first)) for rate in search.rates]
    return trials


def _second_value(search: Search, scores: Scores) -> list[Trial]:
    """Every row's best two rates of the first value at the second value of its knob."""
    trials = []
    for row in search.rows:
        first, second = knob_of(row).values
        at_first = {}
        for setting, score in _tried(row, scores).items():
            if setting.value == first and setting.rate in search.rates:
                at_first[setting] = score
        best_two = _ranked(row, at_first)[:2]
        trials += [Trial(row, Setting(setting.rate, second)) for setting in best_two]
    return trials


def _edges_and_seeds(search: Search, scores: Scores) -> list[Trial]:
    trials = []
    for row in search.rows:
        trials += _next_of_row(row, scores)
    return trials


def _next_of_row(row: str, scores: Scores) -> list[Trial]:
    """What a row with a whole grid lacks: a rate beyond its best, then seeds, then a rate again."""
    first = _tried(row, scores)
    ranked = _ranked(row, first)
    beyond = _beyond(ranked[0], first)
    if beyond is not None:
        return [Trial(row, beyond)]

    seconds = [Trial(row, setting, seed=1) for setting in ranked[:2]]
    missing = _missing(seconds, scores)
    if missing:
        return missing

    beyond = _beyond(_winner(row, scores), first)
    if beyond is not None:
        return [Trial(row, beyond)]
    return []


def _tried(row: str, scores: Scores, seed: int = 0, times: int = 1) -> dict[Setting, float]:
    """The scores of a row's settings at one seed and length."""
    found = {}
    for trial, score in scores.items():
        alike = (trial.row, trial.seed, trial.times, trial.turned)
        if alike == (row, seed, times, False):
            found[trial.setting] = score
    return found


def _ranked(row: str, tried: Mapping[Setting, float]) -> list[Setting]:
    """The settings from the best on; of equals the lower rate, then the knob's first value."""
    values = knob_of(row).values

    def rank(setting: Setting) -> tuple[float, float, int]:
        return -tried[setting], setting.rate, values.index(setting.value)

    return sorted(tried, key=rank)


def _beyond(best: Setting, tried: Iterable[Setting]) -> Setting | None:
    """The next of the series where the best is at an edge of what was tried at its knob value."""
    rates = _rates_at(best.value, tried)
    place = SERIES.index(best.rate)
    if best.rate == min(rates) and place > 0:
        return Setting(SERIES[place - 1], best.value)
    if best.rate == max(rates) and place + 1 < len(SERIES):
        return Setting(SERIES[place + 1], best.value)
    return None


def _rates_at(value: float, tried: Iterable[Setting]) -> list[float]:
    return [setting.rate for setting in tried if setting.value == value]


def _winner(row: str, scores: Scores) -> Setting:
    """The setting with the highest mean of two seeds, of those that have two."""
    first = _tried(row, scores)
    second = _tried(row, scores, seed=1)
    means = {setting: (first[setting] + score) / 2 for setting, score in second.items()}
    return _ranked(row, means)[0]


# ---- what is chosen


def searched(search: Search, scores: Scores) -> dict[str, Setting]:
    """The setting that the search gives each row; rows whose search goes on are left out."""
    for stage in (_rates, _second_value):
        if _missing(stage(search, scores), scores):
            return {}
    found = {}
    for row in search.rows:
        if not _next_of_row(row, scores):
            found[row] = _winner(row, scores)
    return found


def chosen(search: Search, scores: Scores) -> dict[str, Setting]:
    """The setting of each row in the end: that of the longer trials where these moved a rate."""
    found = searched(search, scores)
    if len(found) < len(search.rows) or not length_moves(search, scores):
        return found
    for row, setting in found.items():
        longer = _best_longer(row, setting, scores)
        if longer is not None:
            found[row] = longer
    return found


def length_moves(search: Search, scores: Scores) -> list[str]:
    """Of the rows that are run longer first, those whose best rate is another one then."""
    moved = []
    for row, setting in searched(search, scores).items():
        longer = _best_longer(row, setting, scores)
        if row in OF_LENGTH and longer is not None and longer.rate != setting.rate:
            moved.append(row)
    return moved


def _best_longer(row: str, setting: Setting, scores: Scores) -> Setting | None:
    """The best of a row's longer trials around a setting; None while one is missing."""
    if _missing(_longer_trials(row, setting, scores), scores):
        return None
    return _ranked(row, _tried(row, scores, times=LONGER))[0]


def _longer_trials(row: str, setting: Setting, scores: Scores) -> list[Trial]:
    """The longer trials of a row: three rates, and further ones until the best is inside."""
    place = SERIES.index(setting.rate)
    near = SERIES[max(0, place - 1) : place + 2]
    trials = [Trial(row, Setting(rate, setting.value), times=LONGER) for rate in near]
    if _missing(trials, scores):
        return trials
    longer = _tried(row, scores, times=LONGER)
    beyond = _beyond(_ranked(row, longer)[0], longer)
    if beyond is not None:
        trials.append(Trial(row, beyond, times=LONGER))
    return trials


def _length(search: Search, scores: Scores) -> list[Trial]:
    """Full and PUMA longer, at their best rate and around it; all rows where that moves a rate."""
    settings = searched(search, scores)
    rows = [row for row in search.rows if row in OF_LENGTH]
    if length_moves(search, scores):
        rows += [row for row in search.rows if row not in OF_LENGTH]
    trials = []
    for row in rows:
        trials += _longer_trials(row, settings[row], scores)
    return trials


def _mirroring(search: Search, scores: Scores) -> list[Trial]:
    settings = searched(search, scores)
    rows = [row for row in OF_MIRRORING if row in settings]
    return [Trial(row, settings[row], turned=True) for row in rows]


def mirroring_gain(search: Search, scores: Scores) -> float:
    """Mean harmonic R@1 of the other way of mirroring minus the profile's; NaN where not known."""
    gains = []
    for trial in _mirroring(search, scores):
        if trial not in scores:
            return np.nan
        gains.append(scores[trial] - scores[replace(trial, turned=False)])
    if not gains:
        return np.nan
    return float(np.mean(gains))


def _convergence(search: Search, scores: Scores) -> list[Trial]:
    """Full and PUMA at their settings ever longer, two seeds; the longest if they still gain."""
    trials = []
    for row in (row for row in search.rows if row in OF_LENGTH):
        lengths = list(DOUBLINGS)
        gains = doublings(row, search, scores)
        if gains.get(DOUBLINGS[-1], 0) >= NOTABLE:
            lengths.append(LONGEST)
        setting = chosen(search, scores)[row]
        for times in lengths:
            trials += [Trial(row, setting, seed, times) for seed in (0, 1)]
    return trials


def doublings(row: str, search: Search, scores: Scores) -> dict[int, float]:
    """By length what the last doubling up to it gained, mean of two seeds, as far as known."""
    setting = chosen(search, scores)[row]
    means = {}
    for times in (1, *DOUBLINGS, LONGEST):
        trials = [Trial(row, setting, seed, times) for seed in (0, 1)]
        if not _missing(trials, scores):
            means[times] = float(np.mean([scores[trial] for trial in trials]))
    return {times: mean - means[times // 2] for times, mean in means.items() if times // 2 in means}


# ---- from trials to kept runs


def run_for(trial: Trial, profile: Profile) -> Run:
    """The run of a trial, on the held-out training classes of the profile's benchmark."""
    knob = knob_of(trial.row)
    recipe: dict[str, Any] = {"lr": trial.setting.rate}
    settings: dict[str, Any] = {}
    if knob.name in {one.name for one in fields(Training)}:
        recipe[knob.name] = trial.setting.value
    else:
        settings[knob.name] = trial.setting.value
    if trial.times != 1:
        usual = profile.run(trial.row).training
        recipe["epochs"] = trial.times * usual.epochs
        if usual.schedule == "step":
            recipe["step_epochs"] = trial.times * usual.step_epochs
    data = replace(profile.data, holdout=True, flip=profile.data.flip != trial.turned)
    return profile.run(trial.row, training=recipe, data=data, seed=trial.seed, **settings)


AnyTrial = TypeVar("AnyTrial")


@dataclass(frozen=True)
class Progress(Generic[AnyTrial]):
    """How far a search is: the scores that count, their runs, and the trials it waits for."""

    scores: dict[AnyTrial, float]
    names: dict[AnyTrial, str]
    missing: dict[AnyTrial, str]


def replay(search: Search, profile: Profile) -> Progress[Trial]:
    """Go through the search by the kept runs of a profile, as far as they lead."""

    def asked(scores: Scores) -> list[Trial]:
        return wanted(search, scores)

    def run_of(trial: Trial) -> Run:
        return run_for(trial, profile)

    return go_through(asked, run_of, profile)


def go_through(
    next_trials: Callable[[Mapping[AnyTrial, float]], list[AnyTrial]],
    run_of: Callable[[AnyTrial], Run],
    profile: Profile,
) -> Progress[AnyTrial]:
    """Go through any search by the kept runs of a profile, as far as they lead.

    `next_trials` has what is wanted next, given the scores that are known, and `run_of` the run of
    a trial.  Runs whose loss was not finite count as 0.  Kept runs that the rule does not ask for
    do not count, so that every row has the same search.
    """
    kept = store.read(profile.name)
    failed = store.failures(profile.name)
    done: Progress[AnyTrial] = Progress({}, {}, {})
    while not done.missing:
        asked = next_trials(done.scores)
        if not asked:
            break
        with unchanged():
            names = [run_folder.run_name(run_of(trial)) for trial in asked]
        for trial, name in zip(asked, names, strict=True):
            if name in kept:
                done.scores[trial] = kept[name].accuracy("harmonic")
            elif name in failed:
                done.scores[trial] = 0.0
            else:
                done.missing[trial] = name
                continue
            done.names[trial] = name
    return done


def kept_accuracy(run: Run, profile: Profile, dataset: str = "harmonic") -> float:
    """R@1 of a run as a fraction; NaN where it is not kept."""
    record = store.read(profile.name).get(run_folder.run_name(run))
    if record is None:
        return np.nan
    return record.accuracy(dataset)


def train(trials: Iterable[Trial], profile: Profile) -> None:
    """Train what a search waits for; that a loss was not finite is kept, and counts as 0."""
    by_seed: dict[int, dict[str, Run]] = {}
    for trial in trials:
        by_seed.setdefault(trial.seed, {})[label(trial)] = run_for(trial, profile)
    for seed, rows in by_seed.items():
        at_seed = replace(profile, seeds=(seed,), side_seeds=(), further_seeds=())
        run_all(rows, at_seed, may_fail=rows)


def label(trial: Trial) -> str:
    """A trial in words, without its seed."""
    knob = knob_of(trial.row).name
    rate, value = trial.setting
    text = f"{trial.row}, lr {rate:g}, {knob} {value:g}"
    if trial.times != 1:
        text += f", {trial.times} x epochs"
    if trial.turned:
        text += ", mirroring turned"
    return text


# ---- the table


def table(search: Search, progress: Progress[Trial], profile: Profile) -> pd.DataFrame:
    """A line per trial: settings, harmonic and unified R@1 as fractions, run, and what is chosen.

    `chosen` is true for the trials on which a row's setting rests.  A loss that was not finite has
    harmonic 0 and no unified.  `open_loss` is that of `training.loop.open_loss`, NaN of runs from
    before it was kept.
    """
    kept = store.read(profile.name)
    settings = chosen(search, progress.scores)
    times = 1
    if length_moves(search, progress.scores):
        times = LONGER
    lines = []
    for trial, harmonic in progress.scores.items():
        name = progress.names[trial]
        unified = np.nan
        loss = None
        if name in kept:
            unified = kept[name].accuracy("unified")
            loss = kept[name].open_loss
        run = run_for(trial, profile)
        is_chosen = settings.get(trial.row) == trial.setting
        lines.append(
            {
                "row": trial.row,
                "rate": trial.setting.rate,
                "knob": knob_of(trial.row).name,
                "value": trial.setting.value,
                "seed": trial.seed,
                "epochs": run.training.epochs,
                "mirrored": run.data.flip,
                "harmonic": harmonic,
                "unified": unified,
                "open_loss": np.nan if loss is None else loss,
                "run": name,
                "chosen": is_chosen and trial.times == times and not trial.turned,
            }
        )
    return pd.DataFrame(lines, columns=COLUMNS)


COLUMNS = [
    "row",
    "rate",
    "knob",
    "value",
    "seed",
    "epochs",
    "mirrored",
    "harmonic",
    "unified",
    "open_loss",
    "run",
    "chosen",
]


def at_edge(tuned: pd.DataFrame) -> list[str]:
    """The rows of a `table` whose chosen rate is the lowest or highest of those tried.

    Tried, that is, at the same value of the knob and the same length.
    """
    found = []
    for row, best in tuned[tuned["chosen"]].groupby("row", sort=False).first().iterrows():
        is_alike = (
            (tuned["row"] == row)
            & (tuned["value"] == best["value"])
            & (tuned["epochs"] == best["epochs"])
        )
        rates = tuned["rate"][is_alike]
        if best["rate"] in (rates.min(), rates.max()):
            found.append(row)
    return found


def yaml_tuned(settings: Mapping[str, Setting]) -> str:
    """The block `recipes:` of a profile that has each row at its setting."""
    lines = ["recipes:"]
    for row, (rate, value) in settings.items():
        knob = knob_of(row).name
        lines.append(f"  {row}: {{lr: {yaml_number(rate)}, {knob}: {yaml_number(value)}}}")
    return "\n".join(lines)


def yaml_number(value: float) -> str:
    """As YAML 1.1 needs it to be a number: with a point before the exponent."""
    text = f"{value:g}"
    mantissa, e, exponent = text.partition("e")
    if e and "." not in mantissa:
        mantissa += ".0"
    return mantissa + e + exponent
