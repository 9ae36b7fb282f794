"""Chance in accuracies: the bootstrap over classes, the spread over seeds, contrasts in pairs.

Read `contrast` first.  Two errors are in it, and add: that of the test classes, by bootstrap, and
that of the seeds, of which a few runs alone say little: `pooled_spreads` lets rows help each other.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from scipy import special, stats

# The rows of a table that are over all datasets.
OVERALL = ("unified", "harmonic")
# Unified accuracy where each dataset counts by a given share.
WEIGHTED = "weighted unified"
# What is no dataset: the columns and rows besides those of single datasets.
NOT_DATASETS = (*OVERALL, "large", "small", "small - large", WEIGHTED)
# Resamples behind a difference's interval.
BOOTSTRAP = 1000
# A row is unstable if its seeds lie farther apart than those of one stable row in a hundred.
UNSTABLE = 0.01
# Of the search for stable rows, which settles after three or four.
ROUNDS = 100

Row = TypeVar("Row", bound=Hashable)
# R@1 of every query, (queries,) per dataset and for "unified".
Hits = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Averages:
    """What is averaged over datasets besides unified and harmonic accuracy."""

    # Their mean, that of the other datasets, and "small - large".
    large: tuple[str, ...] = ()
    # For each of these datasets the harmonic mean of the others, "harmonic without <dataset>".
    without: tuple[str, ...] = ()
    # (dataset, share) for unified accuracy where each dataset counts by its share, `WEIGHTED`.
    shares: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Spread:
    """How far the accuracies of a row lie apart from seed to seed, by column of a comparison."""

    variance: pd.Series  # of one seed
    freedom: pd.Series  # degrees of freedom of the variance
    # Where seeds can be chosen for each dataset by itself: the mean over all choices.
    value: pd.Series = field(default_factory=lambda: pd.Series(dtype=float))


@dataclass(frozen=True)
class Term:
    """A row of a contrast: its hits by seed, how often it counts, and what is known of its seeds.

    Without `spread` the seeds' error is that of the contrast itself, seed by seed.
    """

    hits: Mapping[int, Hits]
    sign: int = 1
    spread: Spread | None = None


# ---- means over queries


def harmonic_mean(accuracies: np.ndarray) -> np.ndarray:
    """Over the first axis; 0 where one accuracy is 0 (Sec. 5.1)."""
    with np.errstate(divide="ignore"):
        return len(accuracies) / (1 / np.asarray(accuracies, dtype=float)).sum(0)


def averaged(own: Mapping[str, Any], averages: Averages = Averages()) -> dict[str, Any]:
    """Averages over datasets, by name, of `own` accuracies: numbers or arrays of one shape.

    `harmonic`; where some but not all datasets are large `large`, `small` and `small - large`; and
    a harmonic mean without each of the datasets that `averages` names.

    Raises ValueError where it names one that there is not, or the only one.
    """
    means = {"harmonic": harmonic_mean(np.stack(list(own.values())))}
    of_large = [accuracy for name, accuracy in own.items() if name in averages.large]
    of_small = [accuracy for name, accuracy in own.items() if name not in averages.large]
    if of_large and of_small:
        means["large"] = np.mean(of_large, axis=0)
        means["small"] = np.mean(of_small, axis=0)
        means["small - large"] = means["small"] - means["large"]

    for left_out in averages.without:
        others = [accuracy for name, accuracy in own.items() if name != left_out]
        if left_out not in own or not others:
            raise ValueError(
                f"no harmonic mean without {left_out!r}: the datasets are {', '.join(own)}"
            )
        means[f"harmonic without {left_out}"] = harmonic_mean(np.stack(others))
    return means


def resampled(
    values: Mapping[str, np.ndarray],
    classes: Mapping[str, np.ndarray],
    bootstrap: int,
    seed: int = 0,
    averages: Averages = Averages(),
) -> dict[str, np.ndarray]:
    """Means over the queries of each dataset, (1 + bootstrap, columns): as they are, and resampled.

    `values` has by dataset (queries, columns), and last "unified", the queries of all datasets in
    their order; `classes` likewise the class (queries,) of each.  Classes are drawn with
    replacement, with all their queries: queries of a class are alike, classes are independent.
    Where they are not either, `classes` has the numbers of larger groups, which are drawn instead.
    "unified" is drawn with the datasets' classes.  Last come those of `averaged` and `WEIGHTED`.
    """
    means = {}
    weights: dict[str, np.ndarray] = {}
    for place, (name, own_values) in enumerate(values.items()):
        if name == "unified":
            weight = np.concatenate(list(weights.values()), axis=1)
        else:
            weight = _weights(len(np.unique(classes[name])), bootstrap, seed, place)
            weights[name] = weight
        means[name] = _weighted_means(weight, own_values, classes[name])
    own = {name: mean for name, mean in means.items() if name != "unified"}
    means.update(averaged(own, averages))
    if averages.shares:
        means[WEIGHTED] = _by_shares(values, classes, weights, dict(averages.shares))
    return means


@lru_cache(32)  # comparisons of a study share them
def _weights(count: int, bootstrap: int, seed: int, place: int) -> np.ndarray:
    """(1 + bootstrap, count) how often each class counts: once, then as drawn with replacement."""
    rng = np.random.default_rng((seed, place))
    drawn = rng.multinomial(count, np.full(count, 1 / count), bootstrap)
    return np.concatenate([np.ones((1, count)), drawn])


def _weighted_means(weight: np.ndarray, values: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """(samples, columns) means of `values` (queries, columns), each class as often as it counts."""
    _, codes = np.unique(classes, return_inverse=True)
    queries = np.ones(len(values))
    sums = [np.bincount(codes, column) for column in (*values.T, queries)]
    totals = weight @ np.stack(sums, axis=1)
    return totals[:, :-1] / totals[:, -1:]


def _by_shares(
    values: Mapping[str, np.ndarray],
    classes: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray],
    shares: Mapping[str, float],
) -> np.ndarray:
    """Unified accuracy (samples, columns) as if the queries were the datasets' by these shares.

    Every query is searched among all images, as they are.
    """
    if set(shares) != set(weights) or min(shares.values()) < 0 or sum(shares.values()) <= 0:
        raise ValueError(
            f"shares {shares}: give each of {', '.join(weights)} its share, none below 0"
        )
    total = np.zeros(1)
    first = 0
    for name, weight in weights.items():
        last = first + len(classes[name])
        mean = _weighted_means(weight, values["unified"][first:last], classes[name])
        total = total + shares[name] / sum(shares.values()) * mean
        first = last
    return total


def interval(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> dict[str, float]:
    """Mean and sd over seeds of `values` (seeds,) with a 95 % interval.

    `low` and `high` (seeds,) are each seed's bootstrap interval.  Two half-widths add as
    independent errors: the queries' (mean over seeds, which share them), and t sd / sqrt(n).
    """
    count = len(values)
    mean = float(values.mean())
    sd = float("nan")
    of_seeds = 0.0
    if count > 1:
        sd = float(values.std(ddof=1))
        of_seeds = float(stats.t.ppf(0.975, count - 1)) * sd / count**0.5
    below = float(np.hypot(np.mean(values - low), of_seeds))
    above = float(np.hypot(np.mean(high - values), of_seeds))
    return {"value": mean, "low": mean - below, "high": mean + above, "sd": sd}


# ---- the seeds


def pooled_spreads(rows: Mapping[Row, pd.DataFrame], judged: Collection[str]) -> dict[Row, Spread]:
    """How far the seeds of each row lie apart, with the help of the other rows.

    `rows` have a table (seeds, columns) of accuracies each, all the same columns; those with one
    seed are left out.  Seeds of a row that is stable vary as those of all stable rows together
    (their variances' mean, each by its degrees of freedom, which add), or as its own if that is
    more.  A row is unstable, and keeps its own, if in one of the columns `judged` its variance is
    above the 99 % point of F over that mean.  One that is the same with every seed stays so.

    Why: three seeds lie as close as a tenth of their true spread by luck, in one row of a hundred,
    and an interval that believes them misses too often.  Pooling is the usual error of an analysis
    of variance; that the own variance counts where it is larger was chosen by simulation
    (tests/simulation.py) against pooling alone and against shrinkage to a prior (Smyth, "Linear
    models and empirical Bayes methods", 2004; robust: Phipson et al., 2016), which miss more often
    where rows differ in spread.
    """
    several = {row: table for row, table in rows.items() if len(table) > 1}
    if not several:
        return {}
    variances = pd.DataFrame([table.var(ddof=1) for table in several.values()])
    freedom = np.array([len(table) - 1 for table in several.values()])
    # By the accuracies themselves: the mean of equal ones is rounded, and their variance not 0.
    varies = np.array([bool((table.nunique() > 1).any()) for table in several.values()])
    stable = np.zeros(len(variances), bool)
    stable[varies] = _stable(variances.loc[varies, list(judged)].to_numpy(), freedom[varies])
    together = freedom[stable].sum()
    pooled = _pooled(variances.to_numpy(), freedom, stable)

    spreads = {}
    for number, row in enumerate(several):
        own = variances.iloc[number]
        if stable[number]:
            spreads[row] = Spread(own.clip(lower=pooled), pd.Series(together, own.index))
        else:
            spreads[row] = Spread(own, pd.Series(freedom[number], own.index))
    return spreads


def _stable(variances: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """(rows,) whether the seeds of a row vary as those of most, in all columns."""
    # Unstable rows, which are not known yet, do not move a median.
    half = stats.chi2.ppf(0.5, freedom) / freedom
    typical = np.median(variances / half[:, None], axis=0)
    stable = np.ones(len(variances), bool)
    for _ in range(ROUNDS):
        highest = stats.f.ppf(1 - UNSTABLE, freedom, freedom[stable].sum())
        now = (variances <= highest[:, None] * typical).all(axis=1)
        typical = _pooled(variances, freedom, now)
        if (now == stable).all():
            break
        stable = now
    return stable


def _pooled(variances: np.ndarray, freedom: np.ndarray, stable: np.ndarray) -> np.ndarray:
    """(columns,) the mean of the stable rows' variances, each by its degrees of freedom."""
    if not stable.any():
        return np.full(variances.shape[1], np.inf)
    return np.average(variances[stable], axis=0, weights=freedom[stable])


def ensemble_spread(
    own: Mapping[str, np.ndarray],
    together: Mapping[str, np.ndarray],
    averages: Averages = Averages(),
) -> Spread:
    """The spread of an ensemble, a model per dataset, whose members' seeds are free of each other.

    `own` has by dataset the accuracies (seeds,) of its member; `together`, as "unified", those
    (seeds,) of the ensembles of one seed: their embeddings are averaged before the search, so that
    other choices of members cannot be told from hits.  Averages of `own` are taken over every
    choice of members' seeds: their value is the mean over them, to second order, and the members'
    variances add, each by what its seeds change while the others stand at their means.
    """
    values = {}
    variances = {}
    freedom = {}
    for name, accuracies in {**own, **together}.items():
        values[name] = float(accuracies.mean())
        variances[name] = float(accuracies.var(ddof=1))
        freedom[name] = len(accuracies) - 1.0
    seeds = len(next(iter(own.values())))

    means = {name: np.full(seeds, accuracies.mean()) for name, accuracies in own.items()}
    at_means = averaged(means, averages)
    moved = [averaged({**means, name: accuracies}, averages) for name, accuracies in own.items()]
    for name, level in at_means.items():
        changes = np.stack([one[name] - level for one in moved])
        of_members = changes.var(axis=1, ddof=1)
        values[name] = float(level[0] + changes.mean(axis=1).sum())
        variances[name] = float(of_members.sum())
        freedom[name] = _satterthwaite(of_members, np.full(len(own), seeds - 1.0))
    return Spread(pd.Series(variances), pd.Series(freedom), pd.Series(values))


def _satterthwaite(variances: np.ndarray, freedom: np.ndarray, known: float = 0.0) -> float:
    """Degrees of freedom of a sum of estimated variances, and of one that counts as `known`."""
    uncertain = (variances**2 / freedom).sum()
    if uncertain == 0:
        return np.inf
    return float((variances.sum() + known) ** 2 / uncertain)


# ---- contrasts


def paired_difference(
    ours: Mapping[int, Hits],
    theirs: Mapping[int, Hits],
    classes: Hits,
    large: Collection[str] = (),
) -> pd.DataFrame:
    """Accuracy of one model minus another's, seed by seed: the `contrast` of two models."""
    return contrast([Term(ours), Term(theirs, -1)], classes, Averages(large=tuple(large)))


@dataclass(frozen=True)
class Contrast:
    """A line of `contrast`."""

    value: float
    low: float
    high: float
    above: float  # p-value of "not above 0"
    below: float  # p-value of "not below 0"
    error: float  # standard error of the value
    freedom: float  # degrees of freedom of the error


def contrast(terms: Sequence[Term], classes: Hits, averages: Averages = Averages()) -> pd.DataFrame:
    """A sum of models' accuracies, each with its sign: on the same queries, with the same seeds.

    `classes` and `averages` as for `resampled`.  A row per dataset, `unified`, `harmonic` and the
    other averages.  Columns: those of `Contrast`, the interval being of 95 %.

    The classes' bootstrap error of the mean and the seeds' add (what both have counts once), by
    Student's t with Satterthwaite's degrees of freedom.  The seeds' is that of the terms' spreads,
    which add as of independent rows; where one is not known, the spread over seeds of the contrast
    itself.  One seed has no p-values.

    Raises ValueError where the terms' seeds differ, or there is none.
    """
    seeds = _common_seeds(terms)
    hits = {}
    for name in terms[0].hits[seeds[0]]:
        columns = [term.hits[seed][name] for term in terms for seed in seeds]
        hits[name] = np.stack(columns, axis=1)
    lines = {}
    for name, mean in resampled(hits, classes, BOOTSTRAP, averages=averages).items():
        # (terms, 1 + bootstrap, seeds)
        by_term = np.stack(np.split(mean, len(terms), axis=1))
        lines[name] = asdict(_contrast(name, terms, by_term))
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("dataset")


def _common_seeds(terms: Sequence[Term]) -> list[int]:
    first = sorted(terms[0].hits)
    for term in terms:
        if not first or sorted(term.hits) != first:
            raise ValueError(
                f"seeds {first} cannot be paired with seeds {sorted(term.hits)}: "
                "give both sides the same"
            )
    return first


def _contrast(name: str, terms: Sequence[Term], means: np.ndarray) -> Contrast:
    """A line of `contrast` from the means (terms, 1 + bootstrap, seeds) of its terms."""
    seeds = means.shape[2]
    signs = np.array([term.sign for term in terms])
    gain = np.tensordot(signs, means, axes=1)
    of_classes = _of_classes(gain[1:])
    value = gain[0].mean()

    spreads = [term.spread for term in terms if term.spread is not None]
    of_seeds = np.zeros(1)
    freedom = np.ones(1)
    if len(spreads) == len(terms):
        value = _value(name, terms, means)
        of_seeds = np.array([spread.variance[name] for spread in spreads]) / seeds
        freedom = np.array([spread.freedom[name] for spread in spreads])
    elif seeds > 1:
        of_seeds = gain[0].var(ddof=1, keepdims=True) / seeds
        freedom = np.array([seeds - 1.0])
    tested = seeds > 1
    return _student(value, of_classes, of_seeds, freedom, tested)


def _of_classes(gain: np.ndarray) -> float:
    """The variance of the mean over seeds that is due to the classes, from (bootstrap, seeds).

    That a class suits one seed and not another is in the bootstrap's variance, and in that over
    seeds again: it is taken out here, as of crossed factors (Cameron, Gelbach and Miller, "Robust
    inference with multiway clustering", 2011).
    """
    seeds = gain.shape[1]
    mean = gain.mean(axis=1)
    variance = mean.var(ddof=1)
    if seeds == 1:
        return variance
    of_seeds_within_classes = (gain - mean[:, np.newaxis]).var(axis=0, ddof=1).mean()
    return max(0.0, variance - of_seeds_within_classes / (seeds - 1))


def _value(name: str, terms: Sequence[Term], means: np.ndarray) -> float:
    """The sum of the terms: of each its mean over seeds, or over all choices of seeds."""
    total = 0.0
    for term, mean in zip(terms, means, strict=True):
        level = mean[0].mean()
        if term.spread is not None:
            level = term.spread.value.get(name, level)
        total += term.sign * level
    return total


def _student(
    value: float, of_classes: float, of_seeds: np.ndarray, freedom: np.ndarray, tested: bool
) -> Contrast:
    """Student's t: the classes' error counts as known, the variances `of_seeds` as estimated."""
    error = float(np.sqrt(of_classes + of_seeds.sum()))
    together = _satterthwaite(of_seeds, freedom, of_classes)
    width = stats.t.ppf(0.975, together) * error
    above = np.nan
    below = np.nan
    if tested:
        t = value / max(error, 1e-12)
        above = stats.t.sf(t, together)
        below = stats.t.cdf(t, together)
    return Contrast(value, value - width, value + width, above, below, error, together)


def smallest_found(
    error: np.ndarray, freedom: np.ndarray, level: float, power: float = 0.8
) -> np.ndarray:
    """The difference that a two-sided test at `level` finds with this `power`.

    By the noncentral t, for standard errors with their degrees of freedom, of one shape.
    """
    refusal = stats.t.ppf(1 - level / 2, freedom)
    return special.nctdtrinc(freedom, 1 - power, refusal) * error


def holm(chances: Mapping[str, float]) -> dict[str, float]:
    """p-values corrected for their number (Holm, 1979)."""
    names = sorted(chances, key=lambda name: chances[name])
    corrected = {}
    highest = 0.0
    for rank, name in enumerate(names):
        scaled = (len(names) - rank) * chances[name]
        highest = max(highest, scaled)
        corrected[name] = min(1.0, highest)
    return corrected
