"""The study's command line: `python -m puma_study run|runs`, from the checkout.

A command imports its modules when it runs: torch alone takes seconds, and `--help` needs none.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from pumalib import options, terminal
from pumalib.options import profile_option, values_option
from pumalib.paths import printable

if TYPE_CHECKING:
    import pandas as pd


@click.group()
def cli() -> None:
    """The reproducibility study of PUMA: execute its notebooks, look after its kept runs."""


@cli.command()
@click.argument("names", nargs=-1, metavar="[NOTEBOOK]...")
@profile_option
@values_option
@click.option("--seeds", type=click.IntRange(1, 10_000), help="seeds 0 to N - 1")
@click.option("--jobs", type=click.IntRange(1), help="runs at once: workers of a local cluster")
@click.option("--dask", metavar="ADDRESS", help="of a Dask scheduler whose workers train")
@click.option(
    "--plan",
    is_flag=True,
    help="say what would be trained, what is missing, memory and hours; train nothing",
)
@click.option(
    "--images-per-second",
    "speed",
    type=click.FloatRange(0, min_open=True),
    help="with --plan: of a ViT-S at 224 px, where no run was measured; without: 1,500",
)
@click.option(
    "--kept",
    "only_kept",
    is_flag=True,
    help="train nothing: leave out notebooks with runs not yet kept",
)
def run(
    *,
    names: tuple[str, ...],
    profile: str,
    values: dict[str, Any],
    seeds: int | None,
    jobs: int | None,
    dask: str | None,
    plan: bool,
    speed: float | None,
    only_kept: bool,
) -> int:
    """Execute notebooks (03 or 03_components; none: all but 9x).

    -p changes their parameters and the profile's fields.
    """
    if seeds and "seeds" in values:
        raise click.UsageError("give one of --seeds and -p seeds")
    if jobs and dask:
        raise click.UsageError("give one of --jobs and --dask")
    if speed is not None and not plan:
        raise click.UsageError("--images-per-second is for --plan")
    if seeds:
        values["seeds"] = list(range(seeds))
    if jobs:
        values["jobs"] = jobs
    if dask:
        values["dask"] = dask
    if only_kept:
        values["train"] = False

    from pumalib import config

    from . import needs, notebooks

    profile = options.profile_name(profile)
    chosen = notebooks.parameters(notebooks.find(list(names)), profile, options.from_shell(values))
    if plan:
        text, complete = notebooks.plan(chosen, speed or needs.STATED_SPEED)
        click.echo(text)
        return int(not complete)
    if not sys.stderr.isatty():
        # Kernels write their progress bars here too, and inherit this interval.
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    return notebooks.run(chosen, config.profile(profile).name)


only_option = click.option("--profile", help="only runs of this profile")


@cli.group()
def runs() -> None:
    """List, compare, remove, verify and train again the runs of results/*/kept-*.jsonl.

    RUN is a name, or profile/name.
    """


@runs.command("list")
@only_option
@click.option(
    "--query",
    help="of pandas, over all settings: \"method == 'puma' and `training.lr` < 1e-3\"",
)
def list_runs(profile: str | None, query: str | None) -> None:
    """List runs (all, or matching --query); below them failed runs, which have no numbers."""
    from . import runs as kept_runs

    finished = _those_of(kept_runs.list_runs(profile), query)
    failed = kept_runs.list_failures(profile)
    if len(failed):
        failed = _those_of(failed, query)
    if len(finished):
        columns = kept_runs.shown_columns(finished)
        click.echo(_listed(finished[columns]))
    if len(failed):
        click.echo(f"\nfailed:\n{failed[kept_runs.FAILED_COLUMNS].to_string()}")
    if not len(finished) and not len(failed):
        click.echo("no runs")


def _listed(table: "pd.DataFrame") -> str:
    """A table of runs as text: measured numbers with one digit, settings in full."""
    rounded = dict.fromkeys(("unified", "harmonic", "seconds"), "{:.1f}".format)
    return table.to_string(formatters=rounded, na_rep="-", float_format="{:g}".format)


def _those_of(table: "pd.DataFrame", query: str | None) -> "pd.DataFrame":
    """The rows of a table that match a query, or all; UsageError: the query is wrong."""
    from . import runs as kept_runs

    if not query:
        return table
    try:
        return kept_runs.select(table, query)
    except ValueError as error:
        raise click.UsageError(f"--query: {error}") from error


@runs.command()
@click.argument("first", metavar="RUN")
@click.argument("second", metavar="RUN")
def compare(first: str, second: str) -> None:
    """Compare two runs: settings that differ, R@1 in percent, and its paired difference.

    The difference is the second minus the first, query by query.
    """
    from . import runs as kept_runs

    settings, numbers = kept_runs.compare(first, second)
    if len(settings):
        click.echo(settings.to_string(float_format="{:.1f}".format))
    else:
        click.echo("the settings are equal")
    click.echo(f"\n{numbers.to_string(float_format='{:.1f}'.format)}")


@runs.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@click.option("--yes", is_flag=True, help="do it; without, only say what would go")
def remove(names: tuple[str, ...], yes: bool) -> None:
    """Remove runs, their lines and folders; a run that a running process holds stays."""
    from filelock import Timeout

    from . import runs as kept_runs

    for name, profile in [kept_runs.find(label) for label in names]:
        outcome = "would remove (add --yes)"
        if yes:
            try:
                kept_runs.remove(name, profile)
                outcome = "removed"
            except Timeout:
                outcome = "a running process holds it, kept:"
        click.echo(f"{outcome} {profile}/{name}")


@runs.command()
@only_option
def verify(profile: str | None) -> int:
    """Check numbers, names and models of kept runs; 1 if something is wrong."""
    from pumalib import data

    from . import runs as kept_runs

    with data.unchanged():
        problems = list(kept_runs.problems(profile))
    for problem in problems:
        click.echo(printable(problem))
    if not problems:
        click.echo("no problem")
    return int(bool(problems))


@runs.command()
@options.of_one_run
def train(asked: options.AskedRun) -> int:
    """Train one run and keep its numbers, or a kept run again; print its folder and R@1.

    METHOD may be the name of a kept run, to train its model again.  The command says whether the
    numbers agree (status 1 if one query differs), and keeps other numbers in addition.  Under
    torchrun each process has a GPU, and takes an equal part of every batch.
    """
    from pumalib import config

    from . import one_run

    name = asked.method
    profile = config.profile(options.profile_name(asked.profile)).name
    if one_run.is_kept(name, profile):
        if asked.has_changes:
            raise click.UsageError(
                f"{name} is a kept run, trained again as it is: leave out -p, -s, --loss, --seed"
            )
        report = one_run.train_again(name, profile)
    else:
        one_run.require_kept_nowhere_else(name, profile)
        run, _ = asked.run()
        report = one_run.train_new(run, profile)
    if report is None:  # another process of torchrun reports
        return 0
    click.echo(report.text)
    return int(not report.agrees)


# What to do after an interrupt, by command.
GOES_ON = {
    "run": "finished runs and checkpoints are kept: the same command goes on",
    "runs": "each line of a kept run is whole: the same command goes on",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command, and return its status, as `terminal.run` has it."""
    return terminal.run(cli, argv, "python -m puma_study", GOES_ON)


if __name__ == "__main__":
    sys.exit(main())
