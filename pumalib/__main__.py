"""The command line, a thin face over the rooms: `python -m pumalib run|train|runs|data ...`.

What a command needs is imported when it runs: torch alone takes seconds, and `--help` needs none.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click


def assigned(context: click.Context, option: click.Parameter, pairs: tuple[str, ...]) -> dict:
    """{"name": value} of "name=value", the values read as YAML."""
    if not pairs:
        return {}
    from . import config

    values = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise click.BadParameter(f"{pair!r}: write name=value, the value in YAML")
        if name in values:
            raise click.BadParameter(f"{name} is given twice")
        if not _is_unicode(text):
            raise click.BadParameter(f"{pair!r} is not UTF-8: set PYTHONUTF8=1, or a UTF-8 locale")
        try:
            values[name] = config.read_yaml(text)
        except ValueError as error:
            said = f"{pair!r}: write name=value, the value in YAML ({error})"
            raise click.BadParameter(said) from None
    return values


def _is_unicode(text: str) -> bool:
    """Whether the bytes of an argument were text in the locale's encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


profile_option = click.option(
    "--profile", default="smoke", show_default=True, help="its name, or a YAML file"
)
only_option = click.option("--profile", help="only runs of this profile")
values_option = click.option(
    "-p",
    "values",
    multiple=True,
    metavar="NAME=VALUE",
    callback=assigned,
    help="a change; the value in YAML",
)


@click.group()
def cli() -> None:
    """A reproducibility study of PUMA: execute its notebooks, train runs, prepare its data."""


@cli.command()
@click.argument("names", nargs=-1, metavar="[NOTEBOOK]...")
@profile_option
@values_option
@click.option("--seeds", type=click.IntRange(1, 10_000), help="seeds 0 to N - 1")
@click.option("--jobs", type=click.IntRange(1), help="runs at once: workers of a local cluster")
@click.option("--dask", metavar="ADDRESS", help="of a Dask scheduler whose workers train")
@click.option("--plan", is_flag=True, help="say what would be trained and how long; train nothing")
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
    only_kept: bool,
) -> int:
    """Execute notebooks (03 or 03_components; none: all but 9x).

    -p changes their parameters and the profile's fields.
    """
    if seeds and "seeds" in values:
        raise click.UsageError("give one of --seeds and -p seeds")
    if jobs and dask:
        raise click.UsageError("give one of --jobs and --dask")
    if seeds:
        values["seeds"] = list(range(seeds))
    if jobs:
        values["jobs"] = jobs
    if dask:
        values["dask"] = dask
    if only_kept:
        values["train"] = False

    from . import config
    from .study import notebooks

    wanted = notebooks.parameters(notebooks.find(list(names)), profile, values)
    if plan:
        text, complete = notebooks.plan(wanted)
        click.echo(text)
        return int(not complete)
    if not sys.stderr.isatty():
        # The bars of the kernels are written here too, and this is all that they are told.
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    return notebooks.run(wanted, config.profile(profile).name)


# Fields of a profile that one run has no use for.
OF_SEVERAL = ("seeds", "side_seeds", "jobs", "dask", "train")


@cli.command()
@click.argument("method")
@profile_option
@values_option
@click.option("--loss", show_default="curricularface", help="a name of pumalib.losses")
@click.option("--seed", type=click.IntRange(0), show_default="0", help="of all that is random")
@click.option(
    "-s",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    callback=assigned,
    help="a setting of the method",
)
def train(
    *,
    method: str,
    profile: str,
    values: dict[str, Any],
    loss: str | None,
    seed: int | None,
    settings: dict[str, Any],
) -> int:
    """Train one run where notebooks look for it, and print its folder and R@1.

    METHOD may be the name of a kept run, to train its model again: it says whether the numbers
    agree (1 if not), and keeps others beside.  Under torchrun each process has a GPU, and takes an
    equal part of every batch.
    """
    for name in OF_SEVERAL:
        if name in values:
            raise click.UsageError(f"-p {name} is for several runs; this is one, see --seed")

    from . import config
    from .study import one_run

    config.require_values(values)
    chosen = config.profile(profile, **values)
    if one_run.is_kept(method, chosen.name):
        if values or settings or loss is not None or seed is not None:
            raise click.UsageError(
                f"{method} is a kept run, trained again as it is: leave out -p, -s, --loss, --seed"
            )
        report = one_run.train_again(method, chosen.name)
    else:
        config.method(method, **settings)  # refuses what is no setting of a method
        new = chosen.run(method, loss=loss, seed=seed, **settings)
        report = one_run.train_new(new, chosen.name)
    if report is None:  # of another process
        return 0
    click.echo(report.text)
    return int(not report.agrees)


@cli.group()
def runs() -> None:
    """List, compare, remove and verify the runs of results/*/kept-*.jsonl.

    RUN is a name, or profile/name.
    """


@runs.command("list")
@only_option
@click.option(
    "--query",
    help="of pandas, over all settings: \"method == 'puma' and `training.lr` < 1e-3\"",
)
def list_runs(profile: str | None, query: str | None) -> None:
    """A line per run, those of --query."""
    from .study import runs as kept_runs

    table = kept_runs.list_runs(profile)
    if query:
        try:
            table = table.query(query)
        except Exception as error:  # pandas raises nearly anything
            raise click.UsageError(f"--query: {error}; columns: {', '.join(table)}") from error
    if len(table):
        click.echo(table[kept_runs.COLUMNS].to_string(float_format="{:.1f}".format))
    else:
        click.echo("no runs")


@runs.command()
@click.argument("first", metavar="RUN")
@click.argument("second", metavar="RUN")
def compare(first: str, second: str) -> None:
    """Settings that differ, and R@1 in percent, of the second minus the first query by query."""
    from .study import runs as kept_runs

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
    """Remove runs, their lines and folders; what a running process holds stays."""
    from filelock import Timeout

    from .study import runs as kept_runs

    for name, profile in [kept_runs.find(label) for label in names]:
        said = "would remove (add --yes)"
        if yes:
            try:
                kept_runs.remove(name, profile)
                said = "removed"
            except Timeout:
                said = "a running process holds it, kept:"
        click.echo(f"{said} {profile}/{name}")


@runs.command()
@only_option
def verify(profile: str | None) -> int:
    """Check numbers, names and models of kept runs; 1 if something is wrong."""
    from .study import runs as kept_runs

    problems = list(kept_runs.problems(profile))
    for problem in problems:
        click.echo(problem)
    if not problems:
        click.echo("no problem")
    return int(bool(problems))


@cli.command()
@click.argument("action", type=click.Choice(["status", "download", "prepare", "verify"]))
@click.argument("datasets", nargs=-1)
@click.option("--root", default="data/raw", show_default=True, help="folder of the datasets")
@click.option(
    "--benchmark", default="paper", show_default=True, help="for prepare and verify, or folders"
)
@click.option("--mirror", help="download: address under which the archives lie by their own names")
def data(
    action: str, datasets: tuple[str, ...], root: str, benchmark: str, mirror: str | None
) -> int:
    """Say what is where, fetch what may be fetched freely, make resized copies, decode every image.

    Without the names of datasets: all.
    """
    from . import paths
    from .data import download, images, prepared, read

    folder = paths.resolve(root)
    names = list(datasets) if datasets else None
    if action == "status":
        click.echo(download.status(folder).to_string())
        return 0
    if action == "download":
        left = download.download(names, folder, mirror)
        return int(bool(left))
    found = read(benchmark, folder, names, strict=False)
    if action == "prepare":
        click.echo(prepared.prepare(found))
        return 0
    bad = images.unreadable(found).values()
    for error in bad:
        click.echo(str(error))
    if not bad:
        click.echo("every image can be decoded")
    return int(bool(bad))


def main(argv: list[str] | None = None) -> int:
    """Run one command, and return its status.

    0 if all went well, 1 if not, 2 if it was asked in a wrong way, 130 if interrupted.
    """
    try:
        with _sigterm_interrupts():
            return cli.main(argv, prog_name="python -m pumalib", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        said = "interrupted; finished runs and checkpoints are kept: the same command goes on"
        click.echo(f"\n{said}", err=True)
        return 130
    except ValueError as error:
        return _refused(error, 2)
    except (OSError, RuntimeError) as error:
        return _refused(error, 1)
    except ArithmeticError as error:
        from .training import NonFiniteLoss

        if not isinstance(error, NonFiniteLoss):
            raise
        return _refused(error, 1)


def _refused(error: Exception, status: int) -> int:
    """Say an error that names what is wrong and the remedy, without a traceback."""
    click.echo(f"error: {error}", err=True)
    return status


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM, by which schedulers and `kill` end a process, do what Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
