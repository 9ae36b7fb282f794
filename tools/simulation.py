"""Coverage and false positives of contrasts in simulated studies, by estimator of seed variance.

`python -m tools.simulation` prints them for the estimators in `RULES`, for several kinds of studies
with 3 and 5 seeds, in a quarter of an hour.  `tests/test_statistics.py` asserts them on fewer.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from pumalib import evaluation
from pumalib.evaluation import Spread, Term, contrast, holm, pooled_spreads

CLASSES = {"a": 30, "b": 30, "c": 30}
PER_CLASS = 6
LEVEL = 0.05
COLUMN = "unified"
JUDGED = [*CLASSES, "unified", "harmonic"]


@dataclass(frozen=True)
class World:
    """A kind of study: each query is correct with a probability that is a sum of random parts.

    Their standard deviations: `ease` of a class, how well a class `suits` a row, and `of_seed`, a
    seed of a row on a dataset.  For the last `unstable` rows `of_seed` is multiplied by `times`.
    With `fewer` all rows but the first have so many seeds, which asks for spreads.
    """

    rows: int = 12
    seeds: int = 3
    ease: float = 0.15
    suits: float = 0.02
    of_seed: float = 0.04
    effect: float = 0.0  # added to the first row alone
    unstable: int = 0
    times: float = 3.0
    fewer: int = 0


def draw(world, rng):
    """Correct (1.0) or not (0.0) for each query, by row and seed, and the queries' classes."""
    numbers = {}
    for place, (name, count) in enumerate(CLASSES.items()):
        numbers[name] = np.repeat(np.arange(count), PER_CLASS) + 1000 * place
    numbers["unified"] = np.concatenate(list(numbers.values()))

    rows: list[dict] = []
    for place in range(world.rows):
        seeds = world.fewer if world.fewer and place > 0 else world.seeds
        rows.append({seed: {} for seed in range(seeds)})
    for name, count in CLASSES.items():
        ease = rng.normal(0.5, world.ease, count)
        for place, row in enumerate(rows):
            suits = rng.normal(0, world.suits, count)
            spread = world.of_seed
            if place >= world.rows - world.unstable:
                spread *= world.times
            for hits in row.values():
                rate = ease + suits + world.effect * (place == 0) + rng.normal(0, spread)
                hits[name] = (rng.random((count, PER_CLASS)) < rate[:, None]).ravel().astype(float)
    for row in rows:
        for hits in row.values():
            hits["unified"] = np.concatenate([hits[name] for name in CLASSES])
    return rows, numbers


def tables_of(rows):
    """Accuracies by row: tables (seeds, columns)."""
    tables = {}
    for place, row in enumerate(rows):
        lines = []
        for hits in row.values():
            means = {name: queries.mean() for name, queries in hits.items()}
            own = {name: means[name] for name in CLASSES}
            lines.append({**means, **evaluation.averaged(own)})
        tables[place] = pd.DataFrame(lines)
    return tables


# ---- estimators of the variance over seeds, by row


def contrast_itself(tables):
    """None by row: the contrast's own variance over seeds is used."""
    return dict.fromkeys(tables)


def each_row(tables):
    """Each row's own variance."""
    spreads = {}
    for row, table in tables.items():
        variance = table.var(ddof=1)
        spreads[row] = Spread(variance, pd.Series(len(table) - 1.0, variance.index))
    return spreads


def pooled_alone(tables):
    """For every stable row the mean variance of the stable rows."""
    return _for_stable(tables, lambda own, pooled, dof: (pooled, len(own) * dof))


def moderated(tables):
    """The stable rows' variances, shrunk to a prior that is estimated from them (Smyth, 2004)."""
    return _for_stable(tables, _moderated)


def _moderated(own, pooled, dof):
    logs = np.log(own.clip(lower=1e-9))
    corrected = logs - special.digamma(dof / 2) + np.log(dof / 2)
    excess = corrected.var(ddof=1) - special.polygamma(1, dof / 2)
    prior = np.array([_prior_dof(one) for one in excess])
    shift = special.digamma(prior / 2) - np.log(prior / 2)
    scale = np.exp(corrected.mean() + shift)
    variance = (prior * scale + dof * own) / (prior + dof)
    together = np.minimum(prior + dof, len(own) * dof)
    return variance, pd.Series(together, own.columns)


def _prior_dof(excess):
    """The degrees of freedom d with trigamma(d / 2) = excess; at most 200, also without excess."""
    many = np.linspace(0.5, 200, 4000)
    return many[np.argmin(np.abs(special.polygamma(1, many / 2) - max(excess, 0)))]


def _for_stable(tables, rule):
    """Spreads by `rule` for rows that `pooled_spreads` calls stable, and its own for others."""
    chosen = pooled_spreads(tables, JUDGED)
    most = max(spread.dof[COLUMN] for spread in chosen.values())
    stable = [row for row, spread in chosen.items() if spread.dof[COLUMN] == most]
    own = pd.DataFrame([tables[row].var(ddof=1) for row in stable], stable)
    dof = len(next(iter(tables.values()))) - 1
    variance, together = rule(own, own.mean(), dof)
    spreads = dict(chosen)
    for row in stable:
        mine = variance.loc[row] if isinstance(variance, pd.DataFrame) else variance
        spreads[row] = Spread(mine, pd.Series(together, own.columns))
    return spreads


def chosen(tables):
    """`pooled_spreads`: a stable row's variance is the larger of its own and the pooled one."""
    return pooled_spreads(tables, JUDGED)


RULES = {
    "contrast itself": contrast_itself,
    "each row": each_row,
    "pooled alone": pooled_alone,
    "moderated": moderated,
    "chosen": chosen,
}


# ---- coverage and error rates


def rates(world, studies, rules=("chosen",), seed=0):
    """Rates by rule, over contrasts of the first row with all others, or with all unstable ones.

    `covered`: intervals that contain the true effect; `refused`: p-values below `LEVEL`; `strict`:
    below `LEVEL / 37`, Holm's first step in a study of 37 claims; `family`: studies with a p-value
    below `LEVEL` after Holm's correction; `width`: the mean half-width of the intervals.
    """
    rng = np.random.default_rng(seed)
    others = range(world.rows - world.unstable if world.unstable else 1, world.rows)
    found: dict[str, list] = {rule: [] for rule in rules}
    for _ in range(studies):
        rows, numbers = draw(world, rng)
        tables = tables_of(rows)
        for rule, lines in found.items():
            spreads = RULES[rule](tables)
            compared = []
            for other in others:
                terms = [Term(rows[0], 1, spreads[0]), Term(rows[other], -1, spreads[other])]
                compared.append(contrast(terms, numbers).loc[COLUMN])
            lines.append(_rates_of(pd.DataFrame(compared), world.effect))
    return pd.DataFrame({rule: pd.DataFrame(lines).mean() for rule, lines in found.items()}).T


def _rates_of(lines, effect):
    p = 2 * lines[["p_greater", "p_less"]].min(axis=1)
    chances = {str(number): chance for number, chance in enumerate(p)}
    return {
        "covered": lines["low"].le(effect).mul(lines["high"].ge(effect)).mean(),
        "refused": p.lt(LEVEL).mean(),
        "strict": p.lt(LEVEL / 37).mean(),
        "family": float(min(holm(chances).values()) < LEVEL),
        "width": lines["high"].sub(lines["low"]).mean() / 2,
    }


WORLDS: dict[str, dict[str, Any]] = {
    "stable rows": {},
    "the last two of twelve unstable, and compared": {"unstable": 2},
    "the first row 8 points above": {"effect": 0.08},
    "classes matter as much as seeds": {"suits": 0.15},
    # Like rows with few images, which are pooled with each other alone.
    "the last of four unstable, and compared": {"rows": 4, "unstable": 1, "times": 4.0},
    "the last two of four unstable, and compared": {"rows": 4, "unstable": 2, "times": 4.0},
    "the last two of eight unstable, and compared": {"rows": 8, "unstable": 2, "times": 4.0},
}


if __name__ == "__main__":
    for label, changes in WORLDS.items():
        for seeds in (3, 5):
            studies = 600 if "unstable" in changes else 120
            found = rates(World(seeds=seeds, **changes), studies, RULES)
            print(f"{label}, {seeds} seeds, {studies} studies")
            print((100 * found).round(2).to_string(), flush=True)
