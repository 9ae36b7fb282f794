"""Chance in accuracies: bootstrap over classes, spread over seeds, paired contrasts of models.

Read `contrast` first.  It adds two errors: that of the test classes, by bootstrap, and that of the
seeds.  A few seeds estimate their own spread poorly, so `pooled_spreads` pools it over rows.
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from scipy import special, stats

# The rows of a table that summarise all datasets.
OVERALL = ("unified", "harmonic")
# Unified accuracy where each dataset counts by a given share.
WEIGHTED = "weighted unified"
# The arithmetic mean over datasets.
MEAN = "arithmetic mean"
# Names of columns and rows that are not single datasets.
NOT_DATASETS = (*OVERALL, "large", "small", "small - large", WEIGHTED, MEAN)
# Resamples behind a difference's interval.
BOOTSTRAP = 1000
# Those behind a correlation's.
OF_CORRELATION = 2000
# A row is unstable if its seeds vary more than those of 99 % of stable rows.
UNSTABLE = 0.01
# The most rounds of the search for stable rows, which settles after three or four.
ROUNDS = 100

Row = TypeVar("Row", bound=Hashable)
# R@1 of every query, (queries,) per dataset and for "unified".
Hits = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Averages:
    """Which averages over datasets to compute besides unified and harmonic accuracy."""

    # Large datasets: gives their mean, the mean of the others, and "small - large".
    large: tuple[str, ...] = ()
    # For each of these datasets the harmonic mean of the others, "harmonic without <dataset>".
    without: tuple[str, ...] = ()
    # The arithmetic mean over datasets, `MEAN`.
    mean: bool = False
    # (dataset, share) for unified accuracy where each dataset counts by its share, `WEIGHTED`.
    shares: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Spread:
    """The variance of a row's accuracies over seeds, by column of a comparison."""

    variance: pd.Series  # of one seed
    dof: pd.Series  # degrees of freedom of the variance
    # If members of an ensemble can combine any seeds: the mean over all combinations.
    value: pd.Series = field(default_factory=lambda: pd.Series(dtype=float))


@dataclass(frozen=True)
class Term:
    """A row of a contrast: its hits by seed, its sign, and the spread of its seeds.

    Without `spread`, the seeds' error is estimated from the contrast itself, seed by seed.
    """

    hits: Mapping[int, Hits]
    sign: int = 1
    spread: Spread | None = None


# ---- means over queries


def harmonic_mean(accuracies: np.ndarray) -> np.ndarray:
    """The harmonic mean over the first axis; 0 where one accuracy is 0 (Sec. 5.1)."""
    with np.errstate(divide="ignore"):
        return len(accuracies) / (1 / np.asarray(accuracies, dtype=float)).sum(0)


def harmonic_shares(accuracies: pd.Series) -> pd.Series:
    """What share each dataset has in the gradient of the harmonic mean: numbers that sum to 1.

    A point of R@1 on a dataset moves the mean by 1 / accuracy^2, up to a factor that all share, so
    that the lowest datasets carry it.  NaN where an accuracy is 0.
    """
    slopes = 1 / accuracies**2
    return slopes / slopes.sum()


def averaged(own: Mapping[str, Any], averages: Averages = Averages()) -> dict[str, Any]:
    """Averages, by name, of the datasets' `own` accuracies: numbers or arrays of one shape.

    `harmonic`; `large`, `small` and `small - large` if some but not all datasets are large; the
    arithmetic `MEAN`; and for each dataset in `averages.without` the harmonic mean of the others.

    Raises ValueError if `averages.without` names an unknown dataset, or the only one.
    """
    means = {"harmonic": harmonic_mean(np.stack(list(own.values())))}
    of_large = [accuracy for name, accuracy in own.items() if name in averages.large]
    of_small = [accuracy for name, accuracy in own.items() if name not in averages.large]
    if of_large and of_small:
        means["large"] = np.mean(of_large, axis=0)
        means["small"] = np.mean(of_small, axis=0)
        means["small - large"] = means["small"] - means["large"]

    if averages.mean:
        means[MEAN] = np.mean(list(own.values()), axis=0)
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
    """Mean over the queries of each dataset, then of each resample: (1 + bootstrap, columns).

    `values` has for each dataset (queries, columns), and last "unified", the queries of all
    datasets in order; `classes` has the class of each query, (queries,), likewise, and numbers
    those of "unified" dataset by dataset.  A resample draws classes with replacement, each with
    all its queries: queries of a class are alike, classes are independent.  If classes are not
    independent either, `classes` numbers larger groups instead.  "unified" uses the classes drawn
    for the datasets.  The averages of `averaged` and `WEIGHTED` come last.
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
    """(1 + bootstrap, count) the weight of each class: 1, then how often each resample draws it."""
    rng = np.random.default_rng((seed, place))
    drawn = rng.multinomial(count, np.full(count, 1 / count), bootstrap)
    return np.concatenate([np.ones((1, count)), drawn])


def _weighted_means(weight: np.ndarray, values: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """(samples, columns) means of `values` (queries, columns), weighted by class."""
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
    """Unified accuracy (samples, columns) with each dataset's queries weighted by its share.

    The gallery is not weighted: every query is searched among all images.
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
    """Mean and sd over seeds of `values` (seeds,), with a 95 % interval.

    `low` and `high` (seeds,) are the bootstrap interval of each seed.  Two half-widths add as
    independent errors: that of the queries (the mean over seeds, which share the queries), and
    t sd / sqrt(n) of the seeds.
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
    """The variance over seeds of each row, pooled over the rows.

    Each of `rows` has a table (seeds, columns) of accuracies, all with the same columns; rows with
    one seed are left out.  A stable row gets the pooled variance of all stable rows (the mean,
    weighted by degrees of freedom, which add up), or its own if that is larger.  A row is unstable
    if its variance exceeds the 99 % point of F times the pooled one in any of the columns `judged`;
    it gets its own.  So does a row whose accuracies are the same with every seed.

    Why: in one row of a hundred, three seeds lie by luck within a tenth of their true spread, and
    an interval that relies on them misses the truth too often.  Pooling is the usual error estimate
    of an analysis of variance.  Taking the larger of own and pooled variance was chosen by
    simulation (tools/simulation.py) over pooling alone and over shrinkage to a prior (Smyth,
    "Linear models and empirical Bayes methods", 2004; robust: Phipson et al., 2016), which miss
    more often if rows differ in spread.
    """
    several = {row: table for row, table in rows.items() if len(table) > 1}
    if not several:
        return {}
    variances = pd.DataFrame([table.var(ddof=1) for table in several.values()])
    dof = np.array([len(table) - 1 for table in several.values()])
    # Not by `variances`: rounding of the mean gives equal accuracies a variance above 0.
    varies = np.array([bool((table.nunique() > 1).any()) for table in several.values()])
    stable = np.zeros(len(variances), bool)
    stable[varies] = _stable(variances.loc[varies, list(judged)].to_numpy(), dof[varies])
    together = dof[stable].sum()
    pooled = _pooled(variances.to_numpy(), dof, stable)

    spreads = {}
    for number, row in enumerate(several):
        own = variances.iloc[number]
        if stable[number]:
            spreads[row] = Spread(own.clip(lower=pooled), pd.Series(together, own.index))
        else:
            spreads[row] = Spread(own, pd.Series(dof[number], own.index))
    return spreads


def _stable(variances: np.ndarray, dof: np.ndarray) -> np.ndarray:
    """(rows,) whether the seeds of a row vary no more than those of most rows, in all columns."""
    # A median is robust against the unstable rows, which are not known yet.
    half = stats.chi2.ppf(0.5, dof) / dof
    typical = np.median(variances / half[:, None], axis=0)
    stable = np.ones(len(variances), bool)
    for _ in range(ROUNDS):
        highest = stats.f.ppf(1 - UNSTABLE, dof, dof[stable].sum())
        now = (variances <= highest[:, None] * typical).all(axis=1)
        typical = _pooled(variances, dof, now)
        if (now == stable).all():
            break
        stable = now
    return stable


def _pooled(variances: np.ndarray, dof: np.ndarray, stable: np.ndarray) -> np.ndarray:
    """(columns,) the mean variance of the stable rows, weighted by degrees of freedom."""
    if not stable.any():
        return np.full(variances.shape[1], np.inf)
    return np.average(variances[stable], axis=0, weights=dof[stable])


def ensemble_spread(
    own: Mapping[str, np.ndarray],
    together: Mapping[str, np.ndarray],
    averages: Averages = Averages(),
) -> Spread:
    """The spread of an ensemble of one model per dataset, whose seeds can be combined freely.

    `own` has for each dataset the accuracies (seeds,) of its member.  `together` has accuracies
    (seeds,), such as "unified", of ensembles whose members have the same seed: they average
    embeddings before the search, so that other combinations of seeds cannot be computed from hits.
    Averages of `own` refer to all combinations of seeds: the value is the mean over them, to second
    order, and the members' variances add, each measured by varying the seeds of one member while
    the others are at their means.
    """
    values = {}
    variances = {}
    dof = {}
    for name, accuracies in {**own, **together}.items():
        values[name] = float(accuracies.mean())
        variances[name] = float(accuracies.var(ddof=1))
        dof[name] = len(accuracies) - 1.0
    seeds = len(next(iter(own.values())))

    means = {name: np.full(seeds, accuracies.mean()) for name, accuracies in own.items()}
    at_means = averaged(means, averages)
    moved = [averaged({**means, name: accuracies}, averages) for name, accuracies in own.items()]
    for name, level in at_means.items():
        changes = np.stack([one[name] - level for one in moved])
        of_members = changes.var(axis=1, ddof=1)
        values[name] = float(level[0] + changes.mean(axis=1).sum())
        variances[name] = float(of_members.sum())
        dof[name] = _satterthwaite(of_members, np.full(len(own), seeds - 1.0))
    return Spread(pd.Series(variances), pd.Series(dof), pd.Series(values))


def _satterthwaite(variances: np.ndarray, dof: np.ndarray, known: float = 0.0) -> float:
    """Degrees of freedom of a sum of estimated variances and a `known` one (Satterthwaite)."""
    uncertain = (variances**2 / dof).sum()
    if uncertain == 0:
        return np.inf
    return float((variances.sum() + known) ** 2 / uncertain)


# ---- contrasts


@dataclass(frozen=True)
class Contrast:
    """A line of `contrast`."""

    value: float
    low: float
    high: float
    p_greater: float  # p-value of the alternative "greater than 0"
    p_less: float  # p-value of the alternative "less than 0"
    error: float  # standard error of the value
    dof: float  # degrees of freedom of the error
    class_error: float = math.nan  # the part of the error that is of the test classes


def contrast(terms: Sequence[Term], classes: Hits, averages: Averages = Averages()) -> pd.DataFrame:
    """The signed sum of models' accuracies, each the mean over its seeds, on the same queries.

    `classes` and `averages` as for `resampled`.  A row per dataset, `unified`, `harmonic` and the
    other averages.  Columns: those of `Contrast`, with a 95 % interval.

    The bootstrap error over classes and the error over seeds add (their common part counts once),
    by Student's t with Satterthwaite's degrees of freedom.  The error over seeds is the sum of the
    terms' spreads, each divided by the number of its seeds, as of independent rows.  If a term has
    no spread, the terms are paired seed by seed, and the error is the spread of the contrast itself
    over seeds; with one seed there are no p-values.

    Raises ValueError if a term has no seeds, or terms without spreads have not the same ones.
    """
    are_independent = all(term.spread is not None for term in terms)
    _check_seeds(terms, are_independent)
    hits = {}
    for name in next(iter(terms[0].hits.values())):
        columns = [term.hits[seed][name] for term in terms for seed in sorted(term.hits)]
        hits[name] = np.stack(columns, axis=1)
    counts = [len(term.hits) for term in terms]
    lines = {}
    for name, mean in resampled(hits, classes, BOOTSTRAP, averages=averages).items():
        # Of each term (1 + bootstrap, seeds).
        by_term = np.split(mean, np.cumsum(counts)[:-1], axis=1)
        if are_independent:
            lines[name] = _of_independent_rows(name, terms, by_term)
        else:
            lines[name] = _seed_by_seed(terms, by_term)
    return pd.DataFrame(list(lines.values()), list(lines)).rename_axis("dataset")


def _check_seeds(terms: Sequence[Term], are_independent: bool) -> None:
    first = sorted(terms[0].hits)
    for term in terms:
        if not term.hits:
            raise ValueError("a row without seeds cannot be compared")
        if sorted(term.hits) != first and not are_independent:
            raise ValueError(
                f"seeds {first} cannot be paired with seeds {sorted(term.hits)}: "
                "give both sides the same"
            )


def _of_independent_rows(name: str, terms: Sequence[Term], means: Sequence[np.ndarray]) -> Contrast:
    """A line of `contrast` from the means (1 + bootstrap, seeds) of terms with spreads."""
    value = 0.0
    of_samples = np.zeros(len(means[0]) - 1)
    shared = 0.0
    of_seeds = []
    dof = []
    for term, mean in zip(terms, means, strict=True):
        assert term.spread is not None
        value += term.sign * term.spread.value.get(name, mean[0].mean())
        of_samples += term.sign * mean[1:].mean(axis=1)
        shared += _shared_with_seeds(mean[1:])
        of_seeds.append(term.spread.variance[name] / len(term.hits))
        dof.append(term.spread.dof[name])
    of_classes = max(0.0, float(of_samples.var(ddof=1)) - shared)
    tested = min(len(term.hits) for term in terms) > 1
    return with_errors(value, of_classes, np.array(of_seeds), np.array(dof), tested)


def _seed_by_seed(terms: Sequence[Term], means: Sequence[np.ndarray]) -> Contrast:
    """A line of `contrast` from the means (1 + bootstrap, seeds) of terms with the same seeds."""
    signs = np.array([term.sign for term in terms])
    gain = np.tensordot(signs, np.stack(means), axes=1)
    seeds = gain.shape[1]
    of_classes = float(gain[1:].mean(axis=1).var(ddof=1))
    of_seeds = np.zeros(1)
    if seeds > 1:
        of_classes = max(0.0, of_classes - _shared_with_seeds(gain[1:]))
        of_seeds = gain[0].var(ddof=1, keepdims=True) / seeds
    dof = np.array([max(seeds - 1.0, 1.0)])
    return with_errors(gain[0].mean(), of_classes, of_seeds, dof, tested=seeds > 1)


def _shared_with_seeds(samples: np.ndarray) -> float:
    """The part of the classes' variance that is in the variance over seeds too.

    `samples` are means (bootstrap, seeds).  What a class does with one seed and not with another is
    in both, and counts once, as for crossed factors (Cameron, Gelbach and Miller, "Robust inference
    with multiway clustering", 2011).
    """
    seeds = samples.shape[1]
    if seeds == 1:
        return 0.0
    within = samples - samples.mean(axis=1)[:, np.newaxis]
    return float(within.var(axis=0, ddof=1).mean()) / (seeds - 1)


def with_errors(
    value: float, of_classes: float, of_seeds: np.ndarray, dof: np.ndarray, tested: bool
) -> Contrast:
    """A value with its interval, from the variance of classes and those of each row's seeds.

    `of_seeds` (rows,) are variances of means over seeds, estimated with `dof` (rows,) degrees of
    freedom (Satterthwaite); that of classes counts as known.
    """
    error = float(np.sqrt(of_classes + of_seeds.sum()))
    together = _satterthwaite(of_seeds, dof, of_classes)
    line = student(float(value), error, together, tested)
    return replace(line, class_error=float(np.sqrt(of_classes)))


def student(value: float, error: float, dof: float, tested: bool = True) -> Contrast:
    """Student's t of a value with its standard error; without p-values unless it is `tested`."""
    # What `stats.t` calls, to the bit, at a hundredth of its time: a scorecard asks thousands.
    width = special.stdtrit(dof, 0.975) * error
    p_greater = np.nan
    p_less = np.nan
    if tested:
        t = value / max(error, 1e-12)
        p_greater = special.stdtr(dof, -t)
        p_less = special.stdtr(dof, t)
    return Contrast(value, value - width, value + width, p_greater, p_less, error, dof)


def rank_correlation(
    x: Sequence[float], y: Sequence[float], groups: Sequence[str], seed: int = 0
) -> tuple[float, float, float]:
    """Spearman's correlation with a 95 % interval, groups drawn with replacement.

    Points of one group, as one dataset under two backbones, are drawn together.  The interval is
    NaN with fewer than four groups, and the correlation with fewer than three points; both are
    where `x` or `y` is constant.
    """
    frame = pd.DataFrame({"x": list(x), "y": list(y), "group": list(groups)})
    if len(frame) < 3:
        return np.nan, np.nan, np.nan
    value = float(stats.spearmanr(frame["x"], frame["y"]).statistic)
    parts = [part[["x", "y"]].to_numpy() for _, part in frame.groupby("group")]
    if len(parts) < 4:
        return value, np.nan, np.nan

    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(OF_CORRELATION):
        chosen = rng.integers(len(parts), size=len(parts))
        points = np.concatenate([parts[number] for number in chosen])
        # One point alone has no ranks to compare.
        if len(np.unique(points[:, 0])) > 1 and len(np.unique(points[:, 1])) > 1:
            drawn.append(stats.spearmanr(points[:, 0], points[:, 1]).statistic)
    if not drawn:
        return value, np.nan, np.nan
    low, high = np.percentile(drawn, [2.5, 97.5])
    return value, float(low), float(high)


def smallest_found(
    error: np.ndarray, dof: np.ndarray, level: float, power: float = 0.8
) -> np.ndarray:
    """The smallest difference that a two-sided test at `level` detects with this `power`.

    By the noncentral t.  `error` are standard errors, `dof` their degrees of freedom, in arrays
    of one shape.
    """
    refusal = stats.t.ppf(1 - level / 2, dof)
    return special.nctdtrinc(dof, 1 - power, refusal) * error


def holm(chances: Mapping[str, float]) -> dict[str, float]:
    """p-values corrected for multiple testing (Holm, 1979), by name.

    NaN, of what could not be tested, stays NaN, and counts among the tests.
    """
    names = sorted(chances, key=lambda name: (np.isnan(chances[name]), chances[name]))
    corrected = {}
    highest = 0.0
    for rank, name in enumerate(names):
        scaled = (len(names) - rank) * chances[name]
        if np.isnan(scaled):
            corrected[name] = np.nan
            continue
        highest = max(highest, scaled)
        corrected[name] = min(1.0, highest)
    return corrected
