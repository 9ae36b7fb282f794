"""What `python -m pumalib runs` does: list, compare, verify and remove the runs in `results/<profile>/runs`."""

from __future__ import annotations

import argparse
import os
import shutil
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pandas as pd
from filelock import FileLock, Timeout

from . import paths, training, verifying
from .kept import Kept, differing, find, select, shown
from .models.saving import FILE as MODEL
from .results import OVERALL, collect

HIDDEN = ".removed"  # ends the name of a folder that is being deleted


def _list(runs: list[Kept], chosen) -> int:
    """one line per run (the default)"""
    table = overview(runs)
    for _, part in table.groupby("profile", sort=False):
        print(f"{paths.shown(paths.RESULTS / part['profile'].iloc[0] / 'runs')}: {len(part)}\n")
        print(_text(part.drop(columns="profile")), end="\n\n")
    if chosen.csv:
        file = paths.resolve(chosen.csv)
        with paths.written_whole(file) as temporary:
            table.to_csv(temporary, index=False)
        print(f"written: {paths.shown(file)}")
    return 0


def overview(runs: list[Kept]) -> pd.DataFrame:
    """A line per run; `differs` has the settings that tell runs of one method and loss apart."""
    groups = defaultdict(list)
    for k in runs:
        groups[_group(k)].append(k.settings)
    apart = {group: differing(settings) for group, settings in groups.items()}
    lines = []
    for k in runs:
        s, device, (state, metrics) = k.settings, None, _state(k)
        differs = [key for key in apart[_group(k)] if key in s and key not in ("seed", "data.datasets", "training.epochs")]
        r1 = {row["dataset"]: 100 * row["R@1"] for row in metrics.get("table", ())}
        with suppress(OSError, ValueError):
            device = k.read("environment.json").get("device")
        lines.append({
            "profile": k.profile, "name": k.folder.name, "method": s.get("method.name"), "loss": s.get("loss"),
            "seed": s.get("seed"), "datasets": shown(s["data.datasets"]) if s else None, "epochs": s.get("training.epochs"),
            "unified R@1 %": r1.get("unified"), "harmonic R@1 %": r1.get("harmonic"),
            "minutes": metrics["seconds"] / 60 if metrics else None, "state": state, "device": device, "MiB": _mib(k.folder),
            "differs": " ".join(f"{key.rsplit('.', 1)[-1]}={shown(s[key])}" for key in differs),
        })  # fmt: skip
    return pd.DataFrame(lines, dtype=object)


def _group(k: Kept) -> tuple:
    return k.profile, k.settings.get("method.name"), k.settings.get("loss"), len(k.members)


def _state(k: Kept) -> tuple[str, dict]:
    """In words, and `metrics.json` if it is whole."""
    metrics, problems = {}, [k.damage] if k.damage else []
    if k.finished:
        problems += verifying.metrics_problems(k)
        metrics = {} if problems else k.read(training.FINISHED)
    if problems:
        state = f"damaged: {problems[0]}" if k.finished else f"unfinished, {problems[0]}"
    elif k.finished:
        state = f"finished, ensemble of {len(k.members)}" if k.members else "finished"
        state += "" if k.members or (k.folder / MODEL).is_file() else ", numbers only"
    elif k.members:
        state = f"unfinished, ensemble of {len(k.members)}"
    else:
        log = k.folder / "log.csv"
        done = len(log.read_text(encoding="utf-8").splitlines()) - 1 if log.is_file() else 0
        state = f"unfinished: epoch {done} of {k.runs[0].training.epochs}"
    return f"{state}, locked by a running process" if _held(k.folder) else state, metrics


def _held(folder: Path) -> bool:
    lock = folder / ".lock"
    if lock.is_file():  # else nobody holds it, and asking would make it
        try:
            with FileLock(lock, timeout=0):
                pass
        except Timeout:
            return True
        except PermissionError:  # a folder that is not ours to write
            pass
    return False


def _mib(folder: Path) -> float:
    size = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a running process renames its files
            size += file.stat().st_size
    return size / 2**20


def _text(table: pd.DataFrame) -> str:
    """A table for people: numbers to the right with one decimal, text to the left, empty columns left out."""
    columns = []
    for name in table:
        values = [None if v is None or v != v else v for v in table[name]]
        if not any(v not in (None, "") for v in values):
            continue
        cells = [name, *("" if v is None else f"{v:.1f}" if isinstance(v, float) else str(v) for v in values)]
        right = all(v is None or isinstance(v, (int, float)) for v in values)
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns))


def _compare(runs: list[Kept], chosen) -> int:
    """settings that differ, and R@1 side by side with the paired difference from the first"""
    if len(runs) < 2:
        raise ValueError(f"compare needs two runs or more; the filters leave {len(runs)}")
    letters = dict(zip((chr(ord("A") + i) for i in range(len(runs))), runs))
    for letter, k in letters.items():
        print(f"{letter}  {k.label}")
    settings = [k.settings for k in runs]
    lines = [
        {"setting": key, **{letter: shown(s[key]) if key in s else "default" for letter, s in zip(letters, settings)}}
        for key in differing(settings)
    ]
    print("\n" + (_text(pd.DataFrame(lines)) if lines else "the settings are equal") + "\n")
    for k in runs:
        if problem := k.damage or ("" if k.runs else "its members are missing") or ("" if k.finished else "it is not finished") or next(verifying.metrics_problems(k), ""):
            raise ValueError(f"{k.label} has no R@1 to compare: {problem}")
        _check_same_queries(runs[0], k)
    results = collect({letter: [k.folder] for letter, k in letters.items()}, runs[0].profile)
    table = (100 * results.wide("R@1")).T.rename_axis(None, axis="columns")
    for letter in list(letters)[1:]:
        gains = results.difference(letter, "A")
        table[f"{letter} - A"] = [f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}] {d.verdict}"
                                  for d in gains.loc[table.index].itertuples()]  # fmt: skip
    print(_text(table.reset_index(names="R@1 %")))
    print("\nIntervals: 95%, over the queries alone, for each side is one training; other seeds may differ more.")
    return 0


def _check_same_queries(first: Kept, other: Kept) -> None:
    """Raise ValueError unless both were tested on the same queries in the same order."""
    a, b = first.runs[0].data, other.runs[0].data
    # The digest tells changed images, where it must be equal: few shots are drawn by seed, an ensemble has its first member's.
    alike = not (a.shots or b.shots or first.members or other.members) and (a.datasets, a.packed) == (b.datasets, b.packed)
    said = []
    for k, data in ((first, a), (other, b)):
        queries = [f"{row['dataset']} ({row['queries']})" for row in k.read(training.FINISHED)["table"] if row["dataset"] not in OVERALL]
        digest = f", digest {k.read('environment.json').get('data', '')[:8]}" if alike else ""
        said.append(f"{', '.join(queries)} of {data.benchmark}{', holdout' if data.holdout else ''}{digest}")
    if said[0] != said[1]:
        raise ValueError(
            f"{first.label} was tested on the queries of {said[0]}; {other.label} on those of {said[1]}: "
            "runs that were not tested on the same queries cannot be compared in pairs"
        )


def _verify(runs: list[Kept], chosen) -> int:
    """check names, numbers and models of finished runs"""
    found, doubts = defaultdict(list), 0
    finished = [k for k in runs if k.finished]
    for k in finished:
        for problem in verifying.problems(k, chosen.evaluate):
            if isinstance(problem, verifying.Doubt):
                doubts += 1
            else:
                found[k.label].append(problem)
            print(f"{k.label}: {problem}")
    left_out = f" ({len(runs) - len(finished)} unfinished left out)" if len(finished) < len(runs) else ""
    count = sum(map(len, found.values()))
    print(f"{_count(len(finished), 'finished run')} verified{left_out}: "
          + (f"{_count(count, 'problem')} in {_count(len(found), 'run')}" if count else "no problem")
          + (f"; {_count(doubts, 'check')} could not be made here" if doubts else ""))  # fmt: skip
    if chosen.evaluate:
        print(f"Evaluated again: every accuracy within {verifying.TOLERANCE} (fraction), or two queries, of what is stored.")
    return 1 if found else 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _remove(runs: list[Kept], chosen) -> int:
    """remove runs, or only their models; shows what would go unless --yes is given"""
    if not (chosen.patterns or chosen.where or chosen.outdated or chosen.unfinished or chosen.all):
        raise ValueError("this would remove every run: say which (patterns, -w, --outdated, --unfinished), or --all")
    going = [k for k in runs if not (chosen.unfinished and k.finished)]
    if chosen.outdated:
        going = [k for k in going if _surely_outdated(k)]
    if chosen.models:
        going = [k for k in going if k.finished and (k.folder / MODEL).is_file()]
    what = f", only {MODEL}" if chosen.models else ""
    total, gone = 0.0, 0
    for k in going:
        mib = (k.folder / MODEL).stat().st_size / 2**20 if chosen.models else _mib(k.folder)
        try:
            done = _take_away(k, chosen) if chosen.yes else not _held(k.folder)
        except Timeout:
            done = False
        if done:
            print(f"{'removed' if chosen.yes else 'would remove'} {k.label}{what} ({mib:.1f} MiB)")
            total, gone = total + mib, gone + 1
        else:
            print(f"skipped {k.label}: a running process holds it")
    left = _delete_hidden({k.folder.parent for k in runs}) if chosen.yes else []
    for folder in left:
        print(f"could not delete {folder}: delete it by hand")
    runs_said = _count(gone, "model" if chosen.models else "run")
    print(f"removed {runs_said}, {total:.1f} MiB" if chosen.yes else f"would remove {runs_said}, {total:.1f} MiB; add --yes to do it")
    return 1 if left else 0


def _surely_outdated(k: Kept) -> bool:
    try:
        return bool(k.runs and verifying.outdated(k))
    except (ValueError, OSError) as error:
        print(f"kept {k.label}: cannot tell whether it is outdated: {error}")
        return False


def _take_away(k: Kept, chosen) -> bool:
    """Delete the model, or hide the folder, while no other process can hold it; False if it is to be kept."""
    with FileLock(k.folder / ".lock", timeout=0):
        if chosen.unfinished and k.finished:  # in the meantime
            return False
        if chosen.models:
            (k.folder / MODEL).unlink()
        else:  # at once, so that no run is ever half there
            k.folder.rename(k.folder.with_name(f".{k.folder.name}.{os.getpid()}{HIDDEN}"))
    return True


def _delete_hidden(folders: set[Path]) -> list[Path]:
    """Delete what was hidden, now or by a removal that was killed; returns what cannot be deleted."""
    hidden = [path for folder in folders for path in folder.glob(f".*{HIDDEN}")]
    for path in hidden:
        shutil.rmtree(path, ignore_errors=True)
    return [path for path in hidden if path.exists()]


COMMANDS = {"list": _list, "compare": _compare, "verify": _verify, "remove": _remove}


def main(argv: list[str]) -> int:
    """Run one command; 0 if all went well."""
    parser = argparse.ArgumentParser(prog="python -m pumalib runs", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    subs = {name: commands.add_parser(name, help=command.__doc__, description=command.__doc__) for name, command in COMMANDS.items()}
    for sub in subs.values():
        sub.add_argument("patterns", nargs="*", metavar="pattern", help="shell patterns of folder names; none: all runs")
        sub.add_argument("--profile", help="only runs of this profile; default: of all")
        sub.add_argument("-w", dest="where", action="append", default=[], metavar="field=value",
                         help="only runs with this setting: method=puma, seed=0, training.epochs=5, adapter_keep=0.5; "
                         "text may be a shell pattern; repeat to narrow")  # fmt: skip
    subs["list"].add_argument("--csv", metavar="FILE", help="write the table there too")
    subs["verify"].add_argument("--evaluate", action="store_true", help="embed and evaluate again, and compare the tables")
    remove = subs["remove"]
    remove.add_argument("--outdated", action="store_true", help="only runs that today's data, weights or code would not find")
    remove.add_argument("--unfinished", action="store_true", help="only runs that are not finished")
    remove.add_argument("--models", action="store_true", help=f"remove only {MODEL} of finished runs; their numbers stay")
    remove.add_argument("--all", action="store_true", help="every run")
    remove.add_argument("--yes", action="store_true", help="do it; without, only show what would go")
    named = argv[:1] and (argv[0] in COMMANDS or not argv[0].startswith("-") or argv[0] in ("-h", "--help"))
    chosen = parser.parse_args(argv if named else ["list", *argv])
    kept = find(chosen.profile)
    runs = select(kept, chosen.patterns, chosen.where)
    if not runs:
        filtered = f" with {' and '.join(chosen.where)} among {len(kept)}" if kept else ""
        print(f"no runs{filtered} in {paths.shown(paths.RESULTS / (chosen.profile or '*') / 'runs')}")
        return 0
    return COMMANDS[chosen.command](runs, chosen)
