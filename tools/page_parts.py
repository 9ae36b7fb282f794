"""What markers of pages write, each a function from `Kept`: words and numbers, and tables."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from puma_study import printed, runs
from puma_study.text import with_interval
from pumalib import evaluation, paths

from .page_rows import ABOVE, ACROSS, Kept

JUDGED_PRINT = ("holds", "fails", "not printed")
VERDICTS = ("supported", "contradicted", "undecided", "not testable")
SURVEY = "survey_claims"  # the scorecard of notebook 25
# Of a core at work, assumed and not measured.
WATTS = 15


# ---- in a line


def _pair(said: str) -> tuple[str, str]:
    row, sign, other = said.partition(" - ")
    if not sign:
        raise ValueError(f"{said!r}: write row - other")
    return row, other


def gap_words(kept: Kept, said: str, column: str = "unified", profile: str = "") -> str:
    """A difference in words: "5.7 points below"; "not told apart from" if 0 is in the interval."""
    difference = kept.difference(*_pair(said), kept.profile(profile), column)
    if difference.sign == ACROSS:
        return "not told apart from"
    where = "above" if difference.sign == ABOVE else "below"
    return f"{abs(difference.points):.1f} points {where}"


def points(kept: Kept, said: str, column: str = "unified", profile: str = "") -> str:
    """A difference alone: "5.7", without its sign."""
    return f"{abs(kept.difference(*_pair(said), kept.profile(profile), column).points):.1f}"


def level(kept: Kept, key: str, column: str = "unified", profile: str = "") -> str:
    """A row's R@1 in percent."""
    return f"{kept.levels(key, kept.profile(profile), column)['value']:.1f}"


def count(kept: Kept, verdict: str, profile: str = "") -> str:
    """How many claims have a verdict; "all", "tested" and "supportable" count these."""
    return str(_counts(kept.scorecard(kept.profile(profile)))[verdict])


def core_hours(kept: Kept, profile: str = "") -> str:
    """Hours of training of all kept runs of a profile, each on one core."""
    listed = runs.list_runs(kept.profile(profile))
    alone = listed[listed["members"] == 0]
    return f"{alone['seconds'].sum() / 3600:.1f}"


def kilowatt_hours(kept: Kept, *profiles: str) -> str:
    """The core-hours and energy of all kept runs, at an assumed `WATTS` a core."""
    hours = sum(float(core_hours(kept, profile)) for profile in profiles)
    return f"{hours * WATTS / 1000:.1f}"


def runs_kept(kept: Kept, profile: str = "") -> str:
    """How many runs of a profile are kept, ensembles apart."""
    listed = runs.list_runs(kept.profile(profile))
    return str(int((listed["members"] == 0).sum()))


def loss_order(kept: Kept, *keys: str) -> str:
    """The rank correlation of unified R@1 with the last training loss, over rows of the stage."""
    losses = [kept.last_loss(key, kept.stage) for key in keys]
    accuracies = [kept.levels(key, kept.stage, "unified")["value"] for key in keys]
    return f"{stats.spearmanr(accuracies, losses).statistic:.2f}"


def verdict(kept: Kept, claim: str, profile: str = "") -> str:
    """The verdict of a claim, as "contradicted"; ValueError for an unknown claim."""
    scorecard = kept.scorecard(kept.profile(profile))
    if claim not in scorecard.index:
        raise ValueError(f"there is no claim {claim!r}; there are {', '.join(scorecard.index)}")
    return str(scorecard.at[claim, "here"])


def number(kept: Kept, file: str, column: str, form: str, *where: str) -> str:
    """A number of a table that is none of runs, as "1,200" (form d), "17.4" (.1f) or "97%" (.0%).

    Of results/<stage>/<file>.csv, in the one line `where` columns have values, each as
    `column = value`; ValueError where it is no single line.  Of another profile's table `file` is
    "<profile>/<file>".
    """
    profile, _, table_name = file.rpartition("/")
    chosen = kept.table(table_name, profile or kept.stage)
    for condition in _with_commas(where, chosen.columns):
        name, sign, value = condition.partition(" = ")
        if not sign:
            raise ValueError(f"{condition!r}: write column = value")
        chosen = chosen[_column(chosen, name).astype(str) == value]
    if len(chosen) != 1:
        raise ValueError(f"{len(chosen)} lines of {file}.csv have {', '.join(where)}")
    found = float(_column(chosen, column).iloc[0])
    if form == "d":
        return f"{found:,.0f}"
    return format(found, form)


def _with_commas(where: Sequence[str], columns: Collection[str]) -> list[str]:
    """Conditions whose values had commas, at which a marker is split, put together again.

    A part that does not begin with a column is the rest of a value.
    """
    conditions: list[str] = []
    for part in where:
        if conditions and part.partition(" = ")[0] not in columns:
            conditions[-1] += f", {part}"
        else:
            conditions.append(part)
    return conditions


def _column(table: pd.DataFrame, name: str) -> pd.Series:
    if name not in table:
        raise ValueError(f"there is no column {name!r}; there are {', '.join(table)}")
    return table[name]


def print_count(kept: Kept, judged: str) -> str:
    """How many claims the paper's own tables bear out ("holds") or not ("fails")."""
    return str(int((kept.scorecard(kept.stage)["print"] == judged).sum()))


def misprint_count(kept: Kept, *_: str) -> str:
    """How many printed harmonic means do not follow from their columns."""
    return str(sum(len(printed.inconsistent(number)) for number in printed.WITH_ACCURACIES))


def parameters_differ(kept: Kept, *_: str) -> str:
    """How many of the paper's rows have other numbers of parameters than are counted here."""
    counted = pd.read_csv(paths.RESULTS / "parameters.csv")
    return str(int((~counted["agrees"]).sum()))


def parameters_rows(kept: Kept, *_: str) -> str:
    """How many of the paper's rows have their parameters counted here."""
    return str(len(pd.read_csv(paths.RESULTS / "parameters.csv")))


IN_LINE: dict[str, Callable[..., str]] = {
    "gap": gap_words,
    "points": points,
    "level": level,
    "count": count,
    "verdict": verdict,
    "number": number,
    "hours": core_hours,
    "kilowatt-hours": kilowatt_hours,
    "runs": runs_kept,
    "loss-order": loss_order,
    "print-count": print_count,
    "misprint-count": misprint_count,
    "parameters-differ": parameters_differ,
    "parameters-rows": parameters_rows,
}


# ---- tables


def headline(kept: Kept, rows: Sequence[str]) -> str:
    """R@1 of some rows, here and as printed, and their trained parameters here."""
    names = ["", "unified here", "in the paper", "harmonic here", "in the paper", "trained here"]
    lines = []
    for key in rows:
        line = [kept.row(key).name]
        for column in evaluation.OVERALL:
            line += [level(kept, key, column), _number(kept.printed(key, column))]
        counts = kept.results(key, kept.stage).parameters.iloc[0]
        line.append(f"{counts['trainable'] / 1e6:.2f} M")
        lines.append(line)
    return markdown_table(names, lines)


def claimed_figure(kept: Kept) -> str:
    """The picture of `page_rows.claimed`, for a page in the project's folder."""
    said = "PUMA minus each rival, printed and measured"
    return f"![{said}](results/{kept.stage}/claimed_and_measured.png)"


def rows_table(
    kept: Kept,
    rows: Sequence[str],
    profile: str = "",
    *,
    printed: bool = True,
    parameters: bool = True,
    losses: bool = False,
) -> str:
    """Unified and harmonic R@1 of rows with their intervals, and the paper's values.

    With `losses` also the loss on training images, without augmentation and with gates open.
    """
    profile = kept.profile(profile)
    names = [""]
    if losses:
        names.append("training loss")
    if parameters:
        names.append("trained / total")
    names += ["unified", "harmonic"]
    if printed:
        names += ["paper: unified", "paper: harmonic"]

    lines = []
    for key in rows:
        line = [kept.row(key).name]
        if losses:
            line.append(_number(kept.open_loss(key, profile), digits=2))
        if parameters:
            counts = kept.results(key, profile).parameters.iloc[0] / 1e6
            line.append(f"{counts['trainable']:.2f} / {counts['total']:.2f} M")
        for one in evaluation.OVERALL:
            value, low, high, *_ = kept.levels(key, profile, one)
            line.append(with_interval(value, low, high))
        if printed:
            line += [_number(kept.printed(key, "unified")), _printed_harmonic(kept, key)]
        lines.append(line)
    return markdown_table(names, lines)


def _printed_harmonic(kept: Kept, key: str) -> str:
    said = _number(kept.printed(key, "harmonic"))
    recomputed = kept.recomputed(key)
    if np.isnan(recomputed):
        return said
    return f"{said} (recomputed {recomputed:.1f})"


def differences(
    kept: Kept,
    pairs: Sequence[str],
    profile: str = "",
    columns: Sequence[str] = evaluation.OVERALL,
    printed: bool = True,
) -> str:
    """Differences of pairs of rows with their intervals, and the paper's."""
    profile = kept.profile(profile)
    names = ["difference", *columns]
    if printed:
        names += [f"paper: {column}" for column in columns]
    lines = []
    for pair in pairs:
        row, other = _pair(pair)
        differences = [kept.difference(row, other, profile, column) for column in columns]
        line = [f"{kept.row(row).name} minus {_inside(kept.row(other).name)}"]
        line += [one.text for one in differences]
        if printed:
            line += [_number(one.paper, sign="+") for one in differences]
        lines.append(line)
    return markdown_table(names, lines)


def by_dataset(kept: Kept, pairs: Sequence[str], profile: str = "") -> str:
    """Differences of pairs of rows on each dataset."""
    profile = kept.profile(profile)
    first = kept.results(_pair(pairs[0])[0], profile).wide()
    datasets = [name for name in first if name not in evaluation.OVERALL]
    return differences(kept, pairs, profile, datasets, printed=False)


def verdicts(kept: Kept, profiles: Sequence[str], file: str = "claims") -> str:
    """How many claims of a scorecard have which verdict, a line per profile."""
    lines = []
    for profile in profiles:
        counts = _counts(kept.scorecard(kept.profile(profile), file))
        numbers = [str(counts[verdict]) for verdict in VERDICTS]
        lines.append([f"`{kept.profile(profile)}`", *numbers, str(counts["supportable"])])
    return markdown_table(["profile", *VERDICTS, "could have been supported"], lines)


def claims_table(kept: Kept, profiles: Sequence[str], prints: Sequence[str] = JUDGED_PRINT) -> str:
    """The claims, by the paper's own tables, of which `prints`, and by the runs of profiles."""
    names = [kept.profile(profile) for profile in profiles]
    first = kept.scorecard(names[0])
    lines = []
    for name, claim in first.iterrows():
        if claim["print"] in prints:
            found = [str(kept.scorecard(profile).at[name, "here"]) for profile in names]
            lines.append([f"Sec. {claim['section']}", claim["claim"], claim["print"], *found])
    return markdown_table(["section", "claim", "in print", *[f"`{one}`" for one in names]], lines)


def statements(kept: Kept, profiles: Sequence[str]) -> str:
    """The survey's statements and their verdicts; an empty cell where the profile cannot test."""
    cards = {f"`{profile}`": kept.scorecard(profile, SURVEY) for profile in profiles}
    found = pd.DataFrame({title: card["here"] for title, card in cards.items()})
    found = found.replace("not testable", "")
    first = next(iter(cards.values()))
    lines = []
    for name, verdicts_here in found.iterrows():
        lines.append([first.at[name, "section"], first.at[name, "claim"], *verdicts_here])
    return markdown_table(["in its summary", "statement", *cards], lines)


def tuned(kept: Kept, profile: str = "") -> str:
    """The setting that the search gave each method, as notebook 91 kept it (`search.py`).

    Harmonic R@1 on held-out training classes, in percent: the mean of the setting's seeds, and the
    lowest and highest of all settings that were tried likewise, with the first seed.
    """
    table = kept.table("tuning", kept.profile(profile))
    lines = []
    for method, found in table[table["chosen"]].groupby("row", sort=False):
        setting = found.iloc[0]
        alike = table
        for column in ("row", "seed", "epochs", "mirrored"):
            alike = alike[alike[column] == setting[column]]
        tried = 100 * alike["harmonic"]
        lines.append(
            [
                f"`{method}`",
                f"{setting['rate']:g}",
                f"`{setting['knob']}` {setting['value']:g}",
                f"{100 * found['harmonic'].mean():.1f}",
                f"{tried.min():.1f} to {tried.max():.1f}",
                str(len(tried)),
            ]
        )
    names = ["method", "base rate", "knob", "held-out harmonic", "of all tried", "settings tried"]
    return markdown_table(names, lines)


def misprints(kept: Kept) -> str:
    """The printed harmonic means that their own columns do not give."""
    lines = []
    for number in printed.WITH_ACCURACIES:
        for row, cell in printed.inconsistent(number).iterrows():
            numbers = [f"{cell['printed']:.1f}", f"{cell['recomputed']:.1f}"]
            lines.append([f"Table {number}", row, *numbers])
    return markdown_table(["table", "row", "printed", "recomputed"], lines)


def _counts(scorecard: pd.DataFrame) -> dict[str, int]:
    """How many claims have each verdict, were tested, and could have been supported."""
    here = scorecard["here"]
    counts = {verdict: int((here == verdict).sum()) for verdict in VERDICTS}
    tested = here != "not testable"
    if "could_support" in scorecard:
        complete = scorecard["could_support"].astype(bool)
    else:
        complete = ~scorecard["why"].str.contains("pairs of rows could be compared")
    counts["all"] = len(here)
    counts["tested"] = int(tested.sum())
    counts["supportable"] = int((tested & complete).sum())
    return counts


def _inside(name: str) -> str:
    """A name for the middle of a sentence: "full fine-tuning", but "LoRA" and "VPT"."""
    first_word = name.split()[0]
    if first_word[1:].islower():
        return name[0].lower() + name[1:]
    return name


def _number(value: float, unit: str = "", digits: int = 1, sign: str = "") -> str:
    """A printed number, or nothing where the paper prints none."""
    if np.isnan(value):
        return ""
    return f"{value:{sign}.{digits}f}{unit}"


def markdown_table(names: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; columns of numbers are aligned to the right."""
    head = f"| {' | '.join(names)} |"
    columns = zip(*lines, strict=True)
    sides = "|".join("---:" if _are_numbers(column) else ":---" for column in columns)
    body = [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]
    return "\n".join([head, f"|{sides}|", *body])


def _are_numbers(cells: Sequence[str]) -> bool:
    """Whether cells begin as numbers do, or are empty."""
    return all(not cell or cell.lstrip("+-")[:1].isdecimal() for cell in cells)


BLOCKS: dict[str, Callable[..., str]] = {
    "headline": headline,
    "claimed-figure": claimed_figure,
    "rows": rows_table,
    "differences": differences,
    "by-dataset": by_dataset,
    "verdicts": verdicts,
    "claims": claims_table,
    "statements": statements,
    "misprints": misprints,
    "tuned": tuned,
}
