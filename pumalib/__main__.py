"""The command line, a thin face over the rooms: `python -m pumalib run|train|runs|data ...`."""

import sys
from contextlib import nullcontext

import click
import yaml
from filelock import Timeout

from . import config, paths, training
from .data import download, images, prepared, read
from .study import notebooks, store
from .study import runs as kept_runs
from .training import parallel


def assigned(context: click.Context, option: click.Parameter, pairs: tuple[str, ...]) -> dict:
    """{"name": value} of "name=value", the values read as YAML."""
    values = {}
    for pair in pairs:
        try:
            name, text = pair.split("=", 1)
            values[name] = yaml.safe_load(text)
        except (ValueError, yaml.YAMLError):
            raise click.BadParameter(f"{pair!r}: write name=value, the value in YAML") from None
    return values


pairs = {"multiple": True, "metavar": "NAME=VALUE", "callback": assigned}
profile_option = click.option("--profile", default="smoke", show_default=True, help="its name, or a YAML file")
only_option = click.option("--profile", help="only runs of this profile")
values_option = click.option("-p", "values", **pairs, help="a change; the value in YAML")


@click.group()
def cli():
    """A reproducibility study of PUMA: execute its notebooks, train and inspect its runs, prepare its data."""


@cli.command()
@click.argument("names", nargs=-1, metavar="[NOTEBOOK]...")
@profile_option
@values_option
@click.option("--seeds", type=click.IntRange(1), help="seeds 0 to N - 1")
@click.option("--jobs", type=click.IntRange(1), help="runs at once: workers of a local cluster")
@click.option("--dask", metavar="ADDRESS", help="of a Dask scheduler whose workers train")
@click.option("--plan", is_flag=True, help="say what would be trained and how long; train nothing")
@click.option("--kept", "only_kept", is_flag=True, help="train nothing: leave out notebooks with runs not yet kept")
def run(names, profile, values, seeds, jobs, dask, plan, only_kept):
    """Execute notebooks (03 or 03_components; none: all but 9x); -p changes their parameters and the profile's fields."""
    if (seeds and "seeds" in values) or (jobs and dask):
        raise click.UsageError("give one of --seeds and -p seeds, one of --jobs and --dask")
    more = {"seeds": seeds and list(range(seeds)), "jobs": jobs, "dask": dask, "train": False if only_kept else None}
    values |= {name: value for name, value in more.items() if value is not None}
    wanted = notebooks.parameters(notebooks.find(names), profile, values)
    if not plan:
        return notebooks.run(wanted, config.profile(profile).name)
    text, complete = notebooks.plan(wanted)
    click.echo(text)
    return int(not complete)


@cli.command()
@click.argument("method")
@profile_option
@values_option
@click.option("--loss", default="curricularface", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("-s", "settings", **pairs, help="a setting of the method")
def train(method, profile, values, loss, seed, settings):
    """Train one run where notebooks look for it, on several GPUs under torchrun, and print its folder and R@1.
    METHOD may be the name of a kept run, to train its model again.  Each process takes an equal part of a batch."""
    profile = config.profile(profile, **values)
    if method in store.read(profile.name):
        chosen, name = kept_runs.run_of(method, profile.name), method
    else:
        config.method(method, **settings)  # refuses what is no setting of a method
        chosen = profile.run(method, loss=loss, seed=seed, **settings)
        name = training.run_name(chosen)
    folder = store.folder(name, profile.name)
    with store.held(folder) if parallel.first() else nullcontext():  # taken before the others are let in
        parallel.join(training.choose_device(chosen.training.device))
        training.train(chosen, folder)
        parallel.leave()  # if nothing was left to train
    if parallel.first():
        table = store.record(name, profile.name)["table"]
        click.echo(f"{paths.shown(folder)}\nR@1: " + ", ".join(f"{row['dataset']} {row['R@1']:.3f}" for row in table))


@cli.group()
def runs():
    """List, compare, remove and verify the runs of results/*/kept-*.jsonl; RUN is a name, or profile/name."""


@runs.command("list")
@only_option
@click.option("--query", help="of pandas, over all settings: \"method == 'puma' and `training.lr` < 1e-3\"")
def list_runs(profile, query):
    """A line per run, those of --query."""
    table = kept_runs.list_runs(profile)
    try:
        table = table.query(query) if query else table
    except Exception as error:  # pandas raises nearly anything
        raise click.UsageError(f"--query: {error}; columns: {', '.join(table)}") from error
    click.echo(table[kept_runs.COLUMNS].to_string(float_format="{:.1f}".format) if len(table) else "no runs")


@runs.command()
@click.argument("first", metavar="RUN")
@click.argument("second", metavar="RUN")
def compare(first, second):
    """Settings that differ, and R@1 in percent, of the second minus the first query by query."""
    for table in kept_runs.compare(first, second):
        click.echo(f"{table.to_string(float_format='{:.1f}'.format)}\n" if len(table) else "the settings are equal\n")


@runs.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@click.option("--yes", is_flag=True, help="do it; without, only say what would go")
def remove(names, yes):
    """Remove runs, their lines and folders; what a running process holds stays."""
    for name, profile in [kept_runs.find(label) for label in names]:
        said = "removed" if yes else "would remove (add --yes)"
        try:
            kept_runs.remove(name, profile) if yes else None
        except Timeout:
            said = "a running process holds it, kept:"
        click.echo(f"{said} {profile}/{name}")


@runs.command()
@only_option
def verify(profile):
    """Check numbers, names and models of kept runs; 1 if something is wrong."""
    problems = list(kept_runs.problems(profile))
    click.echo("\n".join(problems) or "no problem")
    return int(bool(problems))


@cli.command()
@click.argument("action", type=click.Choice(["status", "download", "prepare", "verify"]))
@click.argument("datasets", nargs=-1)
@click.option("--root", default="data/raw", show_default=True, help="folder of the datasets")
@click.option("--benchmark", type=click.Choice(["paper", "folders"]), default="paper", help="for prepare and verify")
@click.option("--mirror", help="download: address under which the archives lie by their own names")
def data(action, datasets, root, benchmark, mirror):
    """Say what is where, fetch what may be fetched freely, make resized copies, or decode every image."""
    root = paths.resolve(root)
    if action == "status":
        return click.echo(download.status(root).to_string())
    if action == "download":
        return int(bool(download.download(datasets, root, mirror)))
    found = read(benchmark, root, datasets or None, strict=False)
    if action == "prepare":
        return click.echo(prepared.prepare(found))
    bad = images.unreadable(found).values()
    click.echo("\n".join(map(str, bad)) or "every image can be decoded")
    return int(bool(bad))


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 if all went well, 1 if not, 2 if it was asked in a wrong way, 130 if interrupted."""
    try:
        return cli.main(argv, prog_name="python -m pumalib", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("\ninterrupted; finished runs and checkpoints are kept: the same command goes on", err=True)
        return 130
    except (ValueError, OSError, RuntimeError, training.NonFiniteLoss) as error:  # they name what, and the remedy
        click.echo(f"error: {error}", err=True)
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    sys.exit(main())
