"""Settings by method and rates by loss, searched on held-out training classes (docs/protocol.md).

One search, `replay`, `train` and `table`, over two grids: `MethodGrid` for a rate and one further
hyperparameter of each method, `LossGrid` for one rate of each family of losses.  Read the grids'
`wanted` first: what is to be run next, given the scores that are known.  It and all that judges
scores are pure functions, so that a search goes on by itself from the runs that are kept, and is
tested without any training.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import pandas as pd

from pumalib import config
from pumalib.config import Profile, Run, Training
from pumalib.data import check_known, unchanged
from pumalib.training import run_folder

from . import store
from .rows import run_all

# The rates that an optimum at an edge may lead to.
SERIES = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


def require_neighbours(rates: tuple[float, ...]) -> None:
    """Raise ValueError unless the rates are neighbours in the series."""
    count = len(rates)
    neighbours = [SERIES[start : start + count] for start in range(len(SERIES))]
    if not rates or rates not in neighbours:
        given = ", ".join(f"{rate:g}" for rate in rates)
        known = ", ".join(f"{rate:g}" for rate in SERIES)
        raise ValueError(f"rates = {given}: take neighbours of the series {known}, in its order")


def _missing(trials: Iterable[Any], scores: Mapping[Any, float]) -> list[Any]:
    """The trials without a known score, each once."""
    return [trial for trial in dict.fromkeys(trials) if trial not in scores]


# ---- one search for both grids


class Trial(Protocol):
    """A training that a search may ask for."""

    @property
    def seed(self) -> int:
        """The seed of its run."""


AnyTrial = TypeVar("AnyTrial", bound=Trial)


class Grid(Protocol[AnyTrial]):
    """A grid to search.  Scores are harmonic R@1 as fractions; 0 where the loss was not finite."""

    @property
    def columns(self) -> list[str]:
        """The columns of the `table`."""

    def pending(self, scores: Mapping[AnyTrial, float]) -> list[AnyTrial]:
        """The trials to be run next; none where the search is finished."""

    def run_for(self, trial: AnyTrial, profile: Profile) -> Run:
        """The run of a trial, on the held-out training classes of the profile's benchmark."""

    def label(self, trial: AnyTrial) -> str:
        """A trial in words, without its seed."""

    def described(self, trial: AnyTrial, run: Run) -> dict[str, Any]:
        """The columns of the `table` that describe a trial."""

    def decisive(self, scores: Mapping[AnyTrial, float]) -> list[AnyTrial]:
        """The trials that decide the choice."""


@dataclass(frozen=True)
class Progress(Generic[AnyTrial]):
    """How far a search is: the scores that count, their runs, and the trials it waits for."""

    scores: dict[AnyTrial, float]
    names: dict[AnyTrial, str]
    missing: dict[AnyTrial, str]


def replay(grid: Grid[AnyTrial], profile: Profile) -> Progress[AnyTrial]:
    """Go through a search by the kept runs of a profile, as far as they lead.

    Runs whose loss was not finite count as 0.  Kept runs that the rule does not ask for do not
    count, so that every row has the same search.
    """
    kept = store.read(profile.name)
    failed = store.failures(profile.name)
    done: Progress[AnyTrial] = Progress({}, {}, {})
    while not done.missing:
        asked = grid.pending(done.scores)
        if not asked:
            break
        with unchanged():
            names = [run_folder.run_name(grid.run_for(trial, profile)) for trial in asked]
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


def train(grid: Grid[AnyTrial], trials: Iterable[AnyTrial], profile: Profile) -> None:
    """Train the missing trials of a search; one whose loss is not finite is kept and scores 0."""
    by_seed: dict[int, dict[str, Run]] = {}
    for trial in trials:
        by_seed.setdefault(trial.seed, {})[grid.label(trial)] = grid.run_for(trial, profile)
    for seed, rows in by_seed.items():
        at_seed = replace(profile, seeds=(seed,), side_seeds=(), further_seeds=())
        run_all(rows, at_seed, may_fail=rows)


def table(grid: Grid[AnyTrial], progress: Progress[AnyTrial], profile: Profile) -> pd.DataFrame:
    """A row per trial: its settings, harmonic and unified R@1 as fractions, run, and `chosen`.

    `chosen` is true for the trials that decide the choice.  A loss that was not finite has harmonic
    0 and no unified.  `open_loss`, where a grid has that column, is the loss in evaluation mode
    (`training.loop.open_loss`), NaN for older runs.
    """
    kept = store.read(profile.name)
    decisive = grid.decisive(progress.scores)
    lines = []
    for trial, harmonic in progress.scores.items():
        name = progress.names[trial]
        unified = np.nan
        loss = None
        if name in kept:
            unified = kept[name].accuracy("unified")
            loss = kept[name].open_loss
        line = {
            **grid.described(trial, grid.run_for(trial, profile)),
            "harmonic": harmonic,
            "unified": unified,
            "open_loss": np.nan if loss is None else loss,
            "run": name,
            "chosen": trial in decisive,
        }
        lines.append(line)
    return pd.DataFrame(lines, columns=grid.columns)


def kept_accuracy(run: Run, profile: Profile, dataset: str = "harmonic") -> float:
    """R@1 of a run as a fraction; NaN where it is not kept."""
    record = store.read(profile.name).get(run_folder.run_name(run))
    if record is None:
        return np.nan
    return record.accuracy(dataset)


def yaml_recipes(recipes: Mapping[str, Mapping[str, float]]) -> str:
    """The block `recipes:` of a profile."""
    lines = ["recipes:"]
    for name, settings in recipes.items():
        text = ", ".join(f"{key}: {_yaml_number(value)}" for key, value in settings.items())
        lines.append(f"  {name}: {{{text}}}")
    return "\n".join(lines)


def _yaml_number(value: float) -> str:
    """As YAML 1.1 needs it to be a number: with a point before the exponent."""
    text = f"{value:g}"
    mantissa, e, exponent = text.partition("e")
    if e and "." not in mantissa:
        mantissa += ".0"
    return mantissa + e + exponent


# ---- settings by method

RATES = (3e-5, 1e-4, 3e-4, 1e-3)
# The methods of the trial, in the order in which they are searched.
METHODS = (
    "puma",
    "full",
    "lora",
    "adapter",
    "linear",
    "adapter-stochastic",
    "lora-stochastic",
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
# Multiples of the profile's epochs: for the length check, and for the convergence check.
LONGER = 2
DOUBLINGS = (2, 4, 8)
LONGEST = 16


class Hyperparameter(NamedTuple):
    """The one further setting that is searched; the first of its two values is the default."""

    name: str
    values: tuple[float, float]


def hyperparameter_of(method: str) -> Hyperparameter:
    """The hyperparameter of a method's family; ValueError for an unknown method."""
    chosen = config.method(method)
    if chosen.tune_backbone:
        return Hyperparameter("new_lr_factor", (10.0, 1.0))
    if chosen.adapter_rank:
        return Hyperparameter("adapter_scale", (0.1, 1.0))
    if chosen.lora_rank:
        return Hyperparameter("lora_scale", (1.0, 4.0))
    return Hyperparameter("loss_lr_factor", (1e4, 1e3))


class Setting(NamedTuple):
    """A base learning rate and the value of the hyperparameter."""

    rate: float
    value: float


@dataclass(frozen=True)
class MethodTrial:
    """A training that a search may ask for."""

    row: str
    setting: Setting
    seed: int = 0
    # x the profile's epochs.
    times: int = 1
    # Whether images are mirrored in training where the profile's are not, and the reverse.
    turned: bool = False


MethodScores = Mapping[MethodTrial, float]


@dataclass(frozen=True)
class MethodGrid:
    """Methods, the rates that each begins with, and the checks afterwards."""

    rows: tuple[str, ...] = METHODS
    rates: tuple[float, ...] = RATES
    checks: tuple[str, ...] = ("mirroring", "length")

    def __post_init__(self) -> None:
        for row in self.rows:
            hyperparameter_of(row)
        for check in self.checks:
            if check not in CHECKS:
                raise ValueError(f"unknown check {check!r}; known: {', '.join(CHECKS)}")
        require_neighbours(self.rates)

    @property
    def columns(self) -> list[str]:
        """The columns of the `table`."""
        of_trial = ["row", "rate", "hyperparameter", "value", "seed", "epochs", "mirrored"]
        return [*of_trial, "harmonic", "unified", "open_loss", "run", "chosen"]

    def pending(self, scores: MethodScores) -> list[MethodTrial]:
        """The trials to be run next, as the protocol orders them; none where the search has ended.

        First every row's rates at the first value of its hyperparameter, then the best two of them
        at the second value; then, row by row, what lies beyond an optimum at an edge, and second
        seeds; then the checks.
        """
        for stage in (self._rates, self._second_value, self._edges_and_seeds):
            missing = _missing(stage(scores), scores)
            if missing:
                return missing
        checks = []
        if "mirroring" in self.checks:
            checks += self._mirroring(scores)
        if "length" in self.checks:
            checks += self._length(scores)
        missing = _missing(checks, scores)
        if missing or "convergence" not in self.checks:
            return missing
        return _missing(self._convergence(scores), scores)

    def _rates(self, scores: MethodScores) -> list[MethodTrial]:
        """Every row's rates at the first value of its hyperparameter."""
        trials = []
        for row in self.rows:
            first, _ = hyperparameter_of(row).values
            trials += [MethodTrial(row, Setting(rate, first)) for rate in self.rates]
        return trials

    def _second_value(self, scores: MethodScores) -> list[MethodTrial]:
        """Every row's best two rates of the hyperparameter's first value at its second value."""
        trials = []
        for row in self.rows:
            first, second = hyperparameter_of(row).values
            at_first = {}
            for setting, score in _tried(row, scores).items():
                if setting.value == first and setting.rate in self.rates:
                    at_first[setting] = score
            best_two = _ranked(row, at_first)[:2]
            trials += [MethodTrial(row, Setting(setting.rate, second)) for setting in best_two]
        return trials

    def _edges_and_seeds(self, scores: MethodScores) -> list[MethodTrial]:
        trials = []
        for row in self.rows:
            trials += _next_of_row(row, scores)
        return trials

    def searched(self, scores: MethodScores) -> dict[str, Setting]:
        """The setting that the search gives each row; rows whose search goes on are left out."""
        for stage in (self._rates, self._second_value):
            if _missing(stage(scores), scores):
                return {}
        found = {}
        for row in self.rows:
            if not _next_of_row(row, scores):
                found[row] = _winner(row, scores)
        return found

    def chosen(self, scores: MethodScores) -> dict[str, Setting]:
        """Each row's final setting: from the longer trials where they moved a rate."""
        found = self.searched(scores)
        if len(found) < len(self.rows) or not self.length_moves(scores):
            return found
        for row, setting in found.items():
            longer = _best_longer(row, setting, scores)
            if longer is not None:
                found[row] = longer
        return found

    def length_moves(self, scores: MethodScores) -> list[str]:
        """The rows of `OF_LENGTH` whose best rate changes when they are trained longer."""
        moved = []
        for row, setting in self.searched(scores).items():
            longer = _best_longer(row, setting, scores)
            if row in OF_LENGTH and longer is not None and longer.rate != setting.rate:
                moved.append(row)
        return moved

    def _length(self, scores: MethodScores) -> list[MethodTrial]:
        """Full and PUMA longer, at and around their best rate; all rows where that moves a rate."""
        settings = self.searched(scores)
        rows = [row for row in self.rows if row in OF_LENGTH]
        if self.length_moves(scores):
            rows += [row for row in self.rows if row not in OF_LENGTH]
        trials = []
        for row in rows:
            trials += _longer_trials(row, settings[row], scores)
        return trials

    def _mirroring(self, scores: MethodScores) -> list[MethodTrial]:
        settings = self.searched(scores)
        rows = [row for row in OF_MIRRORING if row in settings]
        return [MethodTrial(row, settings[row], turned=True) for row in rows]

    def mirroring_gain(self, scores: MethodScores) -> float:
        """Mean harmonic R@1 of the other way of mirroring minus the profile's; NaN: not known."""
        gains = []
        for trial in self._mirroring(scores):
            if trial not in scores:
                return np.nan
            gains.append(scores[trial] - scores[replace(trial, turned=False)])
        if not gains:
            return np.nan
        return float(np.mean(gains))

    def _convergence(self, scores: MethodScores) -> list[MethodTrial]:
        """Full and PUMA ever longer at their settings, two seeds; longest if they still gain."""
        trials = []
        for row in (row for row in self.rows if row in OF_LENGTH):
            lengths = list(DOUBLINGS)
            gains = self.doublings(row, scores)
            if gains.get(DOUBLINGS[-1], 0) >= NOTABLE:
                lengths.append(LONGEST)
            setting = self.chosen(scores)[row]
            for times in lengths:
                trials += [MethodTrial(row, setting, seed, times) for seed in (0, 1)]
        return trials

    def doublings(self, row: str, scores: MethodScores) -> dict[int, float]:
        """The gain of the last doubling, by length: mean of two seeds, where known."""
        setting = self.chosen(scores)[row]
        means = {}
        for times in (1, *DOUBLINGS, LONGEST):
            trials = [MethodTrial(row, setting, seed, times) for seed in (0, 1)]
            if not _missing(trials, scores):
                means[times] = float(np.mean([scores[trial] for trial in trials]))
        return {
            times: mean - means[times // 2] for times, mean in means.items() if times // 2 in means
        }

    def run_for(self, trial: MethodTrial, profile: Profile) -> Run:
        """The run of a trial, on the held-out training classes of the profile's benchmark."""
        further = hyperparameter_of(trial.row)
        recipe: dict[str, Any] = {"lr": trial.setting.rate}
        settings: dict[str, Any] = {}
        if further.name in {one.name for one in fields(Training)}:
            recipe[further.name] = trial.setting.value
        else:
            settings[further.name] = trial.setting.value
        if trial.times != 1:
            usual = profile.run(trial.row).training
            recipe["epochs"] = trial.times * usual.epochs
            if usual.schedule == "step":
                recipe["step_epochs"] = trial.times * usual.step_epochs
        data = replace(profile.data, holdout=True, flip=profile.data.flip != trial.turned)
        return profile.run(trial.row, training=recipe, data=data, seed=trial.seed, **settings)

    def label(self, trial: MethodTrial) -> str:
        """A trial in words, without its seed."""
        further = hyperparameter_of(trial.row).name
        rate, value = trial.setting
        text = f"{trial.row}, lr {rate:g}, {further} {value:g}"
        if trial.times != 1:
            text += f", {trial.times} x epochs"
        if trial.turned:
            text += ", mirroring turned"
        return text

    def described(self, trial: MethodTrial, run: Run) -> dict[str, Any]:
        """The columns of the `table` that describe a trial."""
        return {
            "row": trial.row,
            "rate": trial.setting.rate,
            "hyperparameter": hyperparameter_of(trial.row).name,
            "value": trial.setting.value,
            "seed": trial.seed,
            "epochs": run.training.epochs,
            "mirrored": run.data.flip,
        }

    def decisive(self, scores: MethodScores) -> list[MethodTrial]:
        """The trials that decide the choice."""
        settings = self.chosen(scores)
        times = 1
        if self.length_moves(scores):
            times = LONGER
        found = []
        for trial in scores:
            is_chosen = settings.get(trial.row) == trial.setting
            if is_chosen and trial.times == times and not trial.turned:
                found.append(trial)
        return found

    def recipes(self, scores: MethodScores) -> dict[str, dict[str, float]]:
        """The choice as `recipes` of a profile."""
        found = {}
        for row, (rate, value) in self.chosen(scores).items():
            found[row] = {"lr": rate, hyperparameter_of(row).name: value}
        return found


def _next_of_row(row: str, scores: MethodScores) -> list[MethodTrial]:
    """The next trials of a row with a whole grid: a rate beyond its best, seeds, a rate again."""
    first = _tried(row, scores)
    ranked = _ranked(row, first)
    beyond = _beyond(ranked[0], first)
    if beyond is not None:
        return [MethodTrial(row, beyond)]

    seconds = [MethodTrial(row, setting, seed=1) for setting in ranked[:2]]
    missing = _missing(seconds, scores)
    if missing:
        return missing

    beyond = _beyond(_winner(row, scores), first)
    if beyond is not None:
        return [MethodTrial(row, beyond)]
    return []


def _tried(row: str, scores: MethodScores, seed: int = 0, times: int = 1) -> dict[Setting, float]:
    """The scores of a row's settings at one seed and length."""
    found = {}
    for trial, score in scores.items():
        alike = (trial.row, trial.seed, trial.times, trial.turned)
        if alike == (row, seed, times, False):
            found[trial.setting] = score
    return found


def _ranked(row: str, tried: Mapping[Setting, float]) -> list[Setting]:
    """The settings from the best on; of equals the lower rate, then the first value."""
    values = hyperparameter_of(row).values

    def rank(setting: Setting) -> tuple[float, float, int]:
        return -tried[setting], setting.rate, values.index(setting.value)

    return sorted(tried, key=rank)


def _beyond(best: Setting, tried: Iterable[Setting]) -> Setting | None:
    """The next rate of the series if the best one is at an edge of those tried at its value."""
    rates = _rates_at(best.value, tried)
    place = SERIES.index(best.rate)
    if best.rate == min(rates) and place > 0:
        return Setting(SERIES[place - 1], best.value)
    if best.rate == max(rates) and place + 1 < len(SERIES):
        return Setting(SERIES[place + 1], best.value)
    return None


def _rates_at(value: float, tried: Iterable[Setting]) -> list[float]:
    return [setting.rate for setting in tried if setting.value == value]


def _winner(row: str, scores: MethodScores) -> Setting:
    """The setting with the highest mean of two seeds, among settings with two."""
    first = _tried(row, scores)
    second = _tried(row, scores, seed=1)
    means = {setting: (first[setting] + score) / 2 for setting, score in second.items()}
    return _ranked(row, means)[0]


def _best_longer(row: str, setting: Setting, scores: MethodScores) -> Setting | None:
    """The best of a row's longer trials around a setting; None while one is missing."""
    if _missing(_longer_trials(row, setting, scores), scores):
        return None
    return _ranked(row, _tried(row, scores, times=LONGER))[0]


def _longer_trials(row: str, setting: Setting, scores: MethodScores) -> list[MethodTrial]:
    """The longer trials of a row: three rates, and further ones until the best is inside."""
    place = SERIES.index(setting.rate)
    near = SERIES[max(0, place - 1) : place + 2]
    trials = [MethodTrial(row, Setting(rate, setting.value), times=LONGER) for rate in near]
    if _missing(trials, scores):
        return trials
    longer = _tried(row, scores, times=LONGER)
    beyond = _beyond(_ranked(row, longer)[0], longer)
    if beyond is not None:
        trials.append(MethodTrial(row, beyond, times=LONGER))
    return trials


def at_edge(tuned: pd.DataFrame) -> list[str]:
    """The rows of a `table` whose chosen rate is the lowest or highest of those tried.

    Tried, that is, at the same value of the hyperparameter and the same length.
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


# ---- rates by loss

# The survey's losses: pair-based and proxy-based.
FAMILIES = {
    "pair": ("contrastive", "triplet", "npair", "ms", "supcon"),
    "proxy": ("proxynca", "proxyanchor", "proxygml", "softtriple", "crossentropy", "normsoftmax"),
}
# The losses whose scores choose the rate of their family.
CHOOSE = (
    *("contrastive", "triplet", "npair", "ms"),
    *("proxynca", "proxyanchor", "softtriple", "crossentropy"),
)
LOSS_RATES = (3e-5, 1e-4, 3e-4)


class LossTrial(NamedTuple):
    """A loss at its defaults, and a base rate."""

    loss: str
    rate: float
    seed: int = 0


LossScores = Mapping[LossTrial, float]


@dataclass(frozen=True)
class LossGrid:
    """The method that is trained, the losses that choose, and the rates that they begin with.

    The rate that suits one loss may sink another (docs/protocol.md, "The survey on real images").
    Some losses of a family are trained at neighbouring rates; the family's rate is the one with the
    highest mean of their harmonic R@1, of equals the lower; where it is at an edge of what was
    tried, the next of the series is tried, for all of them.
    """

    method: str = "full"
    losses: tuple[str, ...] = CHOOSE
    rates: tuple[float, ...] = LOSS_RATES

    def __post_init__(self) -> None:
        known = [name for members in FAMILIES.values() for name in members]
        check_known("loss", self.losses, known)
        require_neighbours(self.rates)

    def choosing(self) -> dict[str, list[str]]:
        """By family the losses that choose for it; a family that has none of them is left out."""
        found = {}
        for family, members in FAMILIES.items():
            own = [name for name in members if name in self.losses]
            if own:
                found[family] = own
        return found

    @property
    def columns(self) -> list[str]:
        """The columns of the `table`."""
        return ["family", "loss", "rate", "harmonic", "unified", "run", "chosen"]

    def pending(self, scores: LossScores) -> list[LossTrial]:
        """The trials to be run next; none where the search is finished."""
        first = [LossTrial(loss, rate) for loss in self.losses for rate in self.rates]
        missing = _missing(first, scores)
        if missing:
            return missing
        further = []
        for losses in self.choosing().values():
            for rate in _rates_beyond(losses, scores):
                further += [LossTrial(loss, rate) for loss in losses]
        return _missing(further, scores)

    def chosen(self, scores: LossScores) -> dict[str, float]:
        """The rate of each family; {} before the search has ended."""
        if self.pending(scores):
            return {}
        found = {}
        for family, losses in self.choosing().items():
            found[family] = best_rate(mean_by_rate(losses, scores))
        return found

    def run_for(self, trial: LossTrial, profile: Profile) -> Run:
        """The run of a trial, on the held-out training classes of the profile's benchmark."""
        data = replace(profile.data, holdout=True)
        recipe = {"lr": trial.rate}
        return profile.run(
            self.method, loss=trial.loss, data=data, training=recipe, seed=trial.seed
        )

    def label(self, trial: LossTrial) -> str:
        """A trial in words, without its seed."""
        return f"{trial.loss}, lr {trial.rate:g}"

    def described(self, trial: LossTrial, run: Run) -> dict[str, Any]:
        """The columns of the `table` that describe a trial."""
        return {"family": family_of(trial.loss), "loss": trial.loss, "rate": trial.rate}

    def decisive(self, scores: LossScores) -> list[LossTrial]:
        """The trials that decide the choice."""
        rates = self.chosen(scores)
        return [trial for trial in scores if rates.get(family_of(trial.loss)) == trial.rate]

    def recipes(self, scores: LossScores) -> dict[str, dict[str, float]]:
        """The choice as `recipes` of a profile: each loss at its family's rate."""
        found = {}
        for family, rate in self.chosen(scores).items():
            for loss in FAMILIES[family]:
                found[f"{self.method}/{loss}"] = {"lr": rate}
        return found


def family_of(loss: str) -> str:
    """The family of a loss."""
    return next(family for family, members in FAMILIES.items() if loss in members)


def _rates_beyond(losses: list[str], scores: LossScores) -> list[float]:
    """The untried neighbours of the best rate."""
    means = mean_by_rate(losses, scores)
    place = SERIES.index(best_rate(means))
    near = SERIES[max(0, place - 1) : place + 2]
    return [rate for rate in near if rate not in means]


def mean_by_rate(losses: list[str], scores: LossScores) -> dict[float, float]:
    """The mean score of some losses at each rate that all of them have."""
    means = {}
    for rate in SERIES:
        trials = [LossTrial(loss, rate) for loss in losses]
        if all(trial in scores for trial in trials):
            means[rate] = float(np.mean([scores[trial] for trial in trials]))
    return means


def best_rate(means: Mapping[float, float]) -> float:
    """The rate with the highest mean, of equals the lower."""
    return min(means, key=lambda rate: (-means[rate], rate))
