"""Pages whose numbers are those of kept runs: README.md, docs/results.md and the report.

A page is Markdown with markers, which are comments and not shown.  Read `write` first.  What stands
between a marker and its end is written anew from kept runs, in a line or as a table,

    PUMA is <!-- gap: puma - full -->5.7 points below<!-- end --> full fine-tuning.

    <!-- differences:
    pairs: [puma - full, puma - lora]
    -->
    <!-- end -->

and what a marker `holds` says is checked: `<!-- holds: puma < full, puma ~ stochastic -->` means
that one difference's interval lies below 0 and the other's has 0 in it.

A row is a key of `rows` in docs/pages.yaml, or `file/row` of a table of results/<profile>.  In a
line the column (unified where none is said) and the profile (the stage) follow after commas:
`gap: puma - full, harmonic, mini`.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from scipy import stats

from .. import evaluation, paths
from . import printed, results, runs, store

SETTINGS = "docs/pages.yaml"
JUDGED_PRINT = ("holds", "fails", "not printed")
VERDICTS = ("supported", "contradicted", "undecided", "not testable")

# What a marker has to write ends with the next comment, which must be its end.
OPENING = r"<!-- (?!holds:)(?P<kind>[a-z-]+):(?P<said>(?:(?!-->).)*)-->"
CONTENT = r"(?:(?!<!--).)*"
MARKER = re.compile(rf"(?P<start>{OPENING}){CONTENT}(?P<end><!-- end -->)", re.DOTALL)
CHECK = re.compile(r"<!-- holds: (?P<said>(?:(?!-->).)*) -->", re.DOTALL)

# Of a core at work, assumed and not measured.
WATTS = 15

# The signs of `holds`, by where the interval of a difference lies.
BELOW, ACROSS, ABOVE = "<", "~", ">"
COMPARISON = re.compile(r"\s*(?P<row>.+?) (?P<sign>[<~>]) (?P<other>.+?)\s*")


@dataclass(frozen=True)
class Row:
    """A row as pages speak of it: its name, where its runs are, and the table that prints it."""

    name: str
    file: str
    row: str
    table: int | None = None


class Gap(NamedTuple):
    """A row minus another in points, with its interval, and as the paper prints it (or NaN)."""

    points: float
    low: float
    high: float
    paper: float

    @property
    def sign(self) -> str:
        """Where its interval lies: below 0, across it, or above."""
        if self.high < 0:
            return BELOW
        if self.low > 0:
            return ABOVE
        return ACROSS


class Kept:
    """What pages ask of the kept runs, each answer computed once."""

    def __init__(self, stage: str | None = None) -> None:
        settings = yaml.safe_load((paths.ROOT / SETTINGS).read_text(encoding="utf-8"))
        self.stage: str = stage or settings["stage"]
        self.pages: list[str] = settings["pages"]
        self.rows = {key: Row(**row) for key, row in settings["rows"].items()}
        self.rivals: list[str] = settings["rivals"]
        self.scorecard = functools.cache(self._scorecard)
        self.results = functools.cache(self._results)
        self._difference = functools.cache(self._paired)
        self._files = functools.cache(_runs_of_rows)

    def row(self, key: str) -> Row:
        """A row by its key, or by `file/row`; ValueError where there is none."""
        if key in self.rows:
            return self.rows[key]
        file, slash, name = key.partition("/")
        if not slash:
            known = ", ".join(self.rows)
            raise ValueError(f"{SETTINGS} has no row {key!r}; it has {known}; or write file/row")
        return Row(name, file, name)

    def names(self, key: str, profile: str) -> list[str]:
        """The names of a row's runs; ValueError where none is kept."""
        row = self.row(key)
        known = self._files(profile, row.file)
        if row.row not in known:
            raise ValueError(f"results/{profile}/{row.file}.csv has no row {row.row!r}")
        return known[row.row]

    def _results(self, key: str, profile: str) -> results.Results:
        return results.collect({key: self.names(key, profile)}, profile)

    def levels(self, key: str, profile: str, column: str) -> pd.Series:
        """R@1 in percent: `value`, `low` and `high`, and the number of `seeds`."""
        tidy = self.results(key, profile).tidy
        line = tidy[(tidy["metric"] == "R@1") & (tidy["dataset"] == column)]
        if line.empty:
            raise ValueError(f"{key} in {profile} has no column {column!r}")
        numbers = line.iloc[0][["value", "low", "high"]].astype(float) * 100
        numbers["seeds"] = line.iloc[0]["seeds"]
        return numbers

    def gap(self, key: str, other: str, profile: str, column: str) -> Gap:
        """The difference of two rows; ValueError where there is no such row or column."""
        found = self._difference(key, other, profile)
        if column not in found.index:
            raise ValueError(f"there is no column {column!r}; there are {', '.join(found.index)}")
        line = 100 * found.loc[column].astype(float)
        points = round(line["value"], 1) + 0.0  # no -0.0
        paper = round(self.printed(key, column) - self.printed(other, column), 1)
        low = round(line["low"], 1) + 0.0
        high = round(line["high"], 1) + 0.0
        return Gap(points, low, high, paper)

    def _paired(self, key: str, other: str, profile: str) -> pd.DataFrame:
        return runs.difference(self.names(key, profile), self.names(other, profile), profile)

    def last_loss(self, key: str, profile: str) -> float:
        """A row's training loss of the last epoch, the mean of its seeds."""
        logs = [store.record(name, profile)["log"] for name in self.names(key, profile)]
        return float(np.mean([log[-1]["loss"] for log in logs]))

    def printed(self, key: str, column: str) -> float:
        """What the paper prints of a row, in percent; NaN where it prints nothing."""
        row = self.row(key)
        if row.table is None:
            return np.nan
        table = printed.table(row.table)
        if column not in table or row.row not in table.index:
            return np.nan
        return float(table.at[row.row, column])

    def recomputed(self, key: str) -> float:
        """The harmonic mean of the printed columns, where the printed one is another; else NaN."""
        row = self.row(key)
        if row.table is None:
            return np.nan
        wrong = printed.inconsistent(row.table)
        wrong = wrong[wrong["column"] == "harmonic"]
        if row.row not in wrong.index:
            return np.nan
        return float(wrong.at[row.row, "recomputed"])

    def printed_parameters(self, key: str) -> float:
        """The millions of trained parameters that the paper prints, or NaN."""
        return self.printed(key, "params_train_m")

    def _scorecard(self, profile: str) -> pd.DataFrame:
        """The scorecard that notebook 17 kept: to judge anew needs the profile's images."""
        path = _kept_file(profile, "claims")
        return pd.read_csv(path, index_col="name", dtype={"section": str})


def _runs_of_rows(profile: str, file: str) -> dict[str, list[str]]:
    """The names of the runs of each row of results/<profile>/<file>.csv."""
    path = _kept_file(profile, file)
    table = pd.read_csv(path, dtype={"row": str}).drop_duplicates("row").set_index("row")
    return table["runs"].str.split().to_dict()


def _kept_file(profile: str, name: str) -> Path:
    path = paths.RESULTS / profile / f"{name}.csv"
    if not path.is_file():
        raise ValueError(f"there is no {paths.shown(path)}: a notebook of the study writes it")
    return path


def claimed(kept: Kept) -> pd.DataFrame:
    """PUMA minus each rival, unified R@1 in points, the highest first.

    Columns: rival, points, low, high, and paper, as printed.
    """
    lines = []
    for key in kept.rivals:
        gap = kept.gap("puma", key, kept.stage, "unified")
        lines.append({"rival": kept.row(key).name, **gap._asdict()})
    return pd.DataFrame(lines).sort_values("points", ascending=False, ignore_index=True)


# ---- pages


def write(kept: Kept | None = None) -> list[Path]:
    """Write all pages anew, and return those that changed; ValueError as `written` has it."""
    kept = kept or Kept()
    changed = []
    for name in kept.pages:
        path = paths.ROOT / name
        before = path.read_text(encoding="utf-8")
        after = written(before, kept, name)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed


def written(text: str, kept: Kept, page: str = "the page") -> str:
    """A page with its markers filled.

    Raises ValueError, which names the page and the marker, where a marker cannot be read, asks for
    what is not kept, or says what does not hold.
    """

    def fill(found: re.Match) -> str:
        with _named(page, found["start"]):
            return found["start"] + _content(found["kind"], found["said"], kept) + found["end"]

    _check_markers(text, page)
    for found in CHECK.finditer(text):
        with _named(page, found[0]):
            check(found["said"], kept)
    return MARKER.sub(fill, text)


def without_markers(text: str) -> str:
    """A page without its comments, which other readers than GitHub may stumble over."""
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


class _named:  # noqa: N801 - read as a word: with _named(...)
    """Says in a ValueError which marker of which page it is about."""

    def __init__(self, page: str, marker: str) -> None:
        self.marker = f"{page}, {' '.join(marker.split())}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | KeyError | TypeError):
            raise ValueError(f"{self.marker}: {error}") from error


def _check_markers(text: str, page: str) -> None:
    """Markers are known, closed, and where Markdown takes them for what they are."""
    filled = list(MARKER.finditer(text))
    starts = {found.start() for found in filled}
    for found in re.finditer(OPENING, text, re.DOTALL):
        marker = f"{page}, {' '.join(found[0].split())}"
        if found["kind"] not in KINDS:
            raise ValueError(f"{marker}: no kind of marker; known: holds, {', '.join(KINDS)}")
        if found.start() not in starts:
            raise ValueError(f"{marker}: no <!-- end --> follows it")
    for found in filled:
        begins_line = text[: found.start()].rpartition("\n")[2].strip(" -*") == ""
        if begins_line and found["kind"] in IN_LINE:
            marker = f"{page}, {' '.join(found['start'].split())}"
            raise ValueError(f"{marker}: a line that begins with a comment is not Markdown")


def _content(kind: str, said: str, kept: Kept) -> str:
    if kind in IN_LINE:
        return IN_LINE[kind](kept, *_parts(said))
    arguments = yaml.safe_load(said) or {}
    return f"\n\n{BLOCKS[kind](kept, **arguments)}\n\n"


def _parts(said: str) -> list[str]:
    return [part.strip() for part in said.split(",")]


def check(said: str, kept: Kept) -> None:
    """Raise ValueError where a comparison, `puma < full, harmonic, mini; ...`, does not hold.

    Both overall columns are meant where none is said.
    """
    for one in said.split(";"):
        comparison, *rest = _parts(one)
        columns: tuple[str, ...] = evaluation.OVERALL
        profile = kept.stage
        if rest and rest[0]:
            columns = (rest[0],)
        if len(rest) > 1:
            profile = rest[1]
        found = COMPARISON.fullmatch(comparison)
        if found is None:
            raise ValueError(f"{comparison!r}: write row < other, row ~ other or row > other")
        for column in columns:
            gap = kept.gap(found["row"], found["other"], profile, column)
            if gap.sign != found["sign"]:
                numbers = f"{gap.points:+.1f} [{gap.low:+.1f}, {gap.high:+.1f}]"
                raise ValueError(f"{comparison} does not hold on {profile}: {column} {numbers}")


# ---- in a line


def _pair(said: str) -> tuple[str, str]:
    row, sign, other = said.partition(" - ")
    if not sign:
        raise ValueError(f"{said!r}: write row - other")
    return row, other


def gap_words(kept: Kept, said: str, column: str = "unified", profile: str = "") -> str:
    """As "5.7 points below", or "not told apart from" where the interval has 0 in it."""
    gap = kept.gap(*_pair(said), profile or kept.stage, column)
    if gap.sign == ACROSS:
        return "not told apart from"
    where = "above" if gap.sign == ABOVE else "below"
    return f"{abs(gap.points):.1f} points {where}"


def points(kept: Kept, said: str, column: str = "unified", profile: str = "") -> str:
    """A difference alone: "5.7", without its sign."""
    return f"{abs(kept.gap(*_pair(said), profile or kept.stage, column).points):.1f}"


def points_printed(kept: Kept, said: str, column: str = "unified") -> str:
    """The difference of two rows in the paper, without its sign."""
    row, other = _pair(said)
    return f"{abs(kept.printed(row, column) - kept.printed(other, column)):.1f}"


def level(kept: Kept, key: str, column: str = "unified", profile: str = "") -> str:
    """A row's R@1 in percent."""
    return f"{kept.levels(key, profile or kept.stage, column)['value']:.1f}"


def trained_share(kept: Kept, key: str, profile: str = "") -> str:
    """The share of its parameters that a row trains, in percent."""
    counts = kept.results(key, profile or kept.stage).parameters.iloc[0]
    return f"{100 * counts['trainable'] / counts['total']:.0f}%"


def count(kept: Kept, verdict: str, profile: str = "") -> str:
    """How many claims have a verdict; "all", "tested" and "supportable" count these."""
    return str(_counts(kept.scorecard(profile or kept.stage))[verdict])


def core_hours(kept: Kept, profile: str = "") -> str:
    """Hours of training of all kept runs of a profile, each on one core."""
    listed = runs.list_runs(profile or kept.stage)
    alone = listed[listed["members"] == 0]
    return f"{alone['seconds'].sum() / 3600:.1f}"


def kilowatt_hours(kept: Kept, *profiles: str) -> str:
    """What the training of all kept runs took, at an assumed `WATTS` a core."""
    hours = sum(float(core_hours(kept, profile)) for profile in profiles)
    return f"{hours * WATTS / 1000:.1f}"


def runs_kept(kept: Kept, profile: str = "") -> str:
    """How many runs of a profile are kept, ensembles apart."""
    listed = runs.list_runs(profile or kept.stage)
    return str(int((listed["members"] == 0).sum()))


def loss_order(kept: Kept, *keys: str) -> str:
    """The rank correlation of unified R@1 with the last training loss, over rows of the stage."""
    losses = [kept.last_loss(key, kept.stage) for key in keys]
    accuracies = [kept.levels(key, kept.stage, "unified")["value"] for key in keys]
    return f"{stats.spearmanr(accuracies, losses).statistic:.2f}"


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
    "printed": points_printed,
    "level": level,
    "trained": trained_share,
    "count": count,
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
    """Unified R@1 and trained parameters of some rows, here and as printed."""
    lines = []
    for key in rows:
        counts = kept.results(key, kept.stage).parameters.iloc[0]
        lines.append(
            [
                kept.row(key).name,
                level(kept, key),
                _number(kept.printed(key, "unified")),
                f"{counts['trainable'] / 1e6:.2f} M",
                _number(kept.printed_parameters(key), " M", 2),
            ]
        )
    names = ["", "Recall@1 here", "in the paper", "trained parameters here", "in the paper"]
    return _table(names, lines)


def rows_table(
    kept: Kept,
    rows: Sequence[str],
    profile: str = "",
    printed: bool = True,
    parameters: bool = True,
) -> str:
    """Unified and harmonic R@1 of some rows with their intervals, beside what the paper prints."""
    profile = profile or kept.stage
    names = [""]
    if parameters:
        names.append("trained / total")
    names += ["unified", "harmonic"]
    if printed:
        names += ["paper: unified", "paper: harmonic"]

    lines = []
    for key in rows:
        line = [kept.row(key).name]
        if parameters:
            counts = kept.results(key, profile).parameters.iloc[0] / 1e6
            line.append(f"{counts['trainable']:.2f} / {counts['total']:.2f} M")
        line += [_with_interval(*kept.levels(key, profile, one)) for one in evaluation.OVERALL]
        if printed:
            line += [_number(kept.printed(key, "unified")), _printed_harmonic(kept, key)]
        lines.append(line)
    return _table(names, lines)


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
    """Differences of pairs of rows with their intervals, beside those of the print."""
    profile = profile or kept.stage
    names = ["difference", *columns]
    if printed:
        names += [f"paper: {column}" for column in columns]
    lines = []
    for pair in pairs:
        row, other = _pair(pair)
        gaps = [kept.gap(row, other, profile, column) for column in columns]
        line = [f"{kept.row(row).name} minus {_inside(kept.row(other).name)}"]
        line += [_with_interval(gap.points, gap.low, gap.high, sign="+") for gap in gaps]
        if printed:
            line += [_number(gap.paper, sign="+") for gap in gaps]
        lines.append(line)
    return _table(names, lines)


def by_dataset(kept: Kept, pairs: Sequence[str], profile: str = "") -> str:
    """Differences of pairs of rows on each dataset."""
    profile = profile or kept.stage
    first = kept.results(_pair(pairs[0])[0], profile).wide()
    datasets = [name for name in first if name not in evaluation.OVERALL]
    return differences(kept, pairs, profile, datasets, printed=False)


def verdicts(kept: Kept, profiles: Sequence[str]) -> str:
    """How many claims have which verdict, a line per profile."""
    lines = []
    for profile in profiles:
        counts = _counts(kept.scorecard(profile))
        numbers = [str(counts[verdict]) for verdict in VERDICTS]
        lines.append([f"`{profile}`", *numbers, str(counts["supportable"])])
    return _table(["profile", *VERDICTS, "could have been supported"], lines)


def claims_table(kept: Kept, profiles: Sequence[str], prints: Sequence[str] = JUDGED_PRINT) -> str:
    """The claims, by the paper's own tables, of which `prints`, and by the runs of profiles."""
    first = kept.scorecard(profiles[0])
    lines = []
    for name, claim in first.iterrows():
        if claim["print"] in prints:
            found = [str(kept.scorecard(profile).at[name, "here"]) for profile in profiles]
            lines.append([f"Sec. {claim['section']}", claim["claim"], claim["print"], *found])
    return _table(["section", "claim", "in print", *[f"`{one}`" for one in profiles]], lines)


def misprints(kept: Kept) -> str:
    """The printed harmonic means that their own columns do not give."""
    lines = []
    for number in printed.WITH_ACCURACIES:
        for row, cell in printed.inconsistent(number).iterrows():
            numbers = [f"{cell['printed']:.1f}", f"{cell['recomputed']:.1f}"]
            lines.append([f"Table {number}", row, *numbers])
    return _table(["table", "row", "printed", "recomputed"], lines)


def _counts(scorecard: pd.DataFrame) -> dict[str, int]:
    """How many claims have each verdict, were tested, and could have been supported."""
    here = scorecard["here"]
    counts = {verdict: int((here == verdict).sum()) for verdict in VERDICTS}
    tested = here != "not testable"
    complete = ~scorecard["why"].str.contains("pairs of rows could be compared")
    counts["all"] = len(here)
    counts["tested"] = int(tested.sum())
    counts["supportable"] = int((tested & complete).sum())
    return counts


def _inside(name: str) -> str:
    """A name as it stands inside a sentence: "full fine-tuning", but "LoRA" and "VPT"."""
    first_word = name.split()[0]
    if first_word[1:].islower():
        return name[0].lower() + name[1:]
    return name


def _with_interval(value: float, low: float, high: float, *rest: float, sign: str = "") -> str:
    return f"{value:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def _number(value: float, unit: str = "", digits: int = 1, sign: str = "") -> str:
    """A printed number, or nothing where the paper prints none."""
    if np.isnan(value):
        return ""
    return f"{value:{sign}.{digits}f}{unit}"


def _table(names: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown; columns of numbers stand to the right."""
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
    "rows": rows_table,
    "differences": differences,
    "by-dataset": by_dataset,
    "verdicts": verdicts,
    "claims": claims_table,
    "misprints": misprints,
}
KINDS = (*IN_LINE, *BLOCKS)
