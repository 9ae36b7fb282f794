"""The tables that markers of pages ask for, each a function from `Kept`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from puma_study import figures, printed
from puma_study.figures.claimed import quantity_of
from puma_study.text import with_interval
from pumalib import evaluation

from .page_rows import WITHOUT, Difference, Kept

VERDICTS = ("supported", "contradicted", "undecided", "not testable")
NOT_RUN = "not run"
DIGEST = "survey_claims"  # the scorecard of notebook 25


def _pair(said: str) -> tuple[str, str]:
    row, sign, other = said.partition(" - ")
    if not sign:
        raise ValueError(f"{said!r}: write row - other")
    return row, other


def claimed_figure(kept: Kept) -> str:
    """The picture of `page_rows.claimed`, for a page in the project's folder."""
    said = "PUMA minus each rival, printed and measured"
    return f"![{said}](results/{kept.main_profile}/claimed_and_measured.png)"


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
    pairs: Sequence[str] | Mapping[str, str],
    profile: str = "",
    columns: Sequence[str] = evaluation.OVERALL,
) -> str:
    """Differences of pairs of rows with their intervals, and the paper's where it prints them.

    A pair is "row - other"; of a mapping the keys are what the pairs are called.
    """
    profile = kept.profile(profile)
    if not isinstance(pairs, Mapping):
        pairs = {_minus(kept, pair): pair for pair in pairs}
    found = {}
    for called, pair in pairs.items():
        found[called] = [kept.difference(*_pair(pair), profile, column) for column in columns]
    return _differences_table(found, columns)


def over_splits(
    kept: Kept, pairs: Sequence[str], columns: Sequence[str] = evaluation.OVERALL
) -> str:
    """Differences over all splits of the classes with their intervals, and the paper's."""
    found = {}
    for pair in pairs:
        on_splits = [kept.on_splits(*_pair(pair), column) for column in columns]
        found[_minus(kept, pair)] = [over_all for over_all, _ in on_splits]
    return _differences_table(found, columns)


def _differences_table(found: Mapping[str, Sequence[Difference]], columns: Sequence[str]) -> str:
    """A line for each name of `found`, with its difference in each column, and as printed."""
    shown = [_column(name) for name in columns]
    names = ["difference", *shown]
    lines = [[called, *[one.text for one in line]] for called, line in found.items()]
    for place, name in enumerate(shown):
        prints = [_number(line[place].paper, sign="+") for line in found.values()]
        if any(prints):
            names.append(f"paper: {name}")
            lines = [[*line, cell] for line, cell in zip(lines, prints, strict=True)]
    return markdown_table(names, lines)


def on_each_split(
    kept: Kept, pairs: Sequence[str], columns: Sequence[str] = evaluation.OVERALL
) -> str:
    """Differences on each split of the classes, the protocol's first, without intervals."""
    lines = []
    for pair in pairs:
        line = [_minus(kept, pair)]
        for column in columns:
            _, on_each = kept.on_splits(*_pair(pair), column)
            line.append(", ".join(_number(one.points, sign="+") for one in on_each))
        lines.append(line)
    return markdown_table(["difference", *map(_column, columns)], lines)


def _minus(kept: Kept, pair: str) -> str:
    """A pair as people read it: "PUMA minus full fine-tuning"."""
    row, other = _pair(pair)
    return f"{kept.row(row).name} minus {_inside(kept.row(other).name)}"


def verdicts(kept: Kept, profiles: Sequence[str], file: str = "claims") -> str:
    """How many claims of a scorecard have which verdict, a line per profile."""
    lines = []
    for profile in profiles:
        counts = _counts(kept.scorecard(kept.profile(profile), file))
        numbers = [str(counts[verdict]) for verdict in VERDICTS]
        lines.append([f"`{kept.profile(profile)}`", *numbers, str(counts["supportable"])])
    return markdown_table(["profile", *VERDICTS, "could have been supported"], lines)


def readings(kept: Kept, claims: Sequence[str] = (), profile: str = "") -> str:
    """Claims with the effect that the paper prints, ours, and whether ours leaves it possible.

    Of the comparison that decides each, in points; without `claims` all that were run.
    """
    table = kept.readings(kept.profile(profile))
    chosen = list(claims) or table.index[table["reading"] != NOT_RUN]
    lines = []
    for claim in table.loc[chosen].itertuples():
        printed_effect = f"{float(claim.paper):+.1f}" if claim.paper else ""
        said = _without_numbers(claim.claim)
        of = quantity_of(claim.column)
        lines.append([said, of, printed_effect, claim.ours, claim.reading])
    return markdown_table(["claim", "of", "paper", "here", "reading"], lines)


def _without_numbers(claim: str) -> str:
    """A claim without the effects in print, which have a column."""
    return claim.partition(" (in print by")[0]


def claims_table(kept: Kept, profiles: Sequence[str]) -> str:
    """The claims, whether they hold by the paper's own tables, and their verdicts by profile."""
    names = [kept.profile(profile) for profile in profiles]
    cards = [kept.scorecard(name) for name in names]
    lines = []
    for name, claim in cards[0].iterrows():
        found = [_marked(card.at[name, "here"]) for card in cards]
        lines.append([claim["section"], claim["claim"], claim["print"], *found])
    return markdown_table(["Sec.", "claim", "in print", *[f"`{name}`" for name in names]], lines)


def _marked(verdict: str) -> str:
    """A verdict, in bold where it decides, and "-" where there is none."""
    if verdict in ("supported", "contradicted"):
        return f"**{verdict}**"
    return verdict.replace("not testable", "-")


def statements(kept: Kept, profiles: Sequence[str]) -> str:
    """The digest's statements and their verdicts; an empty cell where the profile cannot test."""
    cards = {f"`{profile}`": kept.scorecard(profile, DIGEST) for profile in profiles}
    found = pd.DataFrame({title: card["here"] for title, card in cards.items()})
    found = found.replace("not testable", "")
    first = next(iter(cards.values()))
    lines = []
    for name, verdicts_here in found.iterrows():
        lines.append([first.at[name, "section"], first.at[name, "claim"], *verdicts_here])
    return markdown_table(["in the digest", "statement", *cards], lines)


def misprints(kept: Kept) -> str:
    """The printed harmonic means that their own columns do not give."""
    lines = []
    for number in printed.WITH_ACCURACIES:
        for row, cell in printed.inconsistent(number).iterrows():
            numbers = [f"{cell['printed']:.1f}", f"{cell['recomputed']:.1f}"]
            lines.append([f"Table {number}", row, *numbers])
    return markdown_table(["table", "row", "printed", "recomputed"], lines)


def _counts(scorecard: pd.DataFrame) -> dict[str, int]:
    """How many claims have each verdict, and how many could have been supported."""
    here = scorecard["here"]
    counts = {verdict: int((here == verdict).sum()) for verdict in VERDICTS}
    tested = here != "not testable"
    complete = scorecard["could_support"].astype(bool)
    counts["supportable"] = int((tested & complete).sum())
    return counts


def _column(name: str) -> str:
    """A column's heading: datasets as figures call them."""
    if name.startswith(WITHOUT):
        return WITHOUT + figures.shown(name.removeprefix(WITHOUT))
    return figures.shown(name)


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
    "claimed-figure": claimed_figure,
    "rows": rows_table,
    "differences": differences,
    "over-splits": over_splits,
    "on-each-split": on_each_split,
    "verdicts": verdicts,
    "readings": readings,
    "claims": claims_table,
    "statements": statements,
    "misprints": misprints,
}
