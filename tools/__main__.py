"""The workshop's command line: `python -m tools pages|bench`, from the checkout."""

import sys

import click

from pumalib import paths, terminal


@click.group()
def cli() -> None:
    """Write the numbers of the pages and the report; time losses, steps, reading and search."""


@cli.command()
@click.option("--build", type=click.Path(), help="the folder of the report, which is written too")
def pages(build: str | None) -> None:
    """Write the numbers of README.md, docs and the report anew, and draw README's figure."""
    from . import page_rows, report
    from . import pages as written

    for path in written.write():
        click.echo(f"written: {paths.shown(path)}")
    for path in report.draw_for_readme(page_rows.Kept()):
        click.echo(f"drawn: {paths.shown(path)}")
    if build:
        for path in report.build(paths.resolve(build)):
            click.echo(f"built: {paths.shown(path)}")


@cli.command()
@click.argument("parts", nargs=-1, metavar="[PART]...")
@click.option(
    "--size",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="quick shows that it runs, in seconds; full is what is reported, in 20 minutes",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda")
@click.option("--rounds", type=click.IntRange(1), help="turns of each; without: 1 or 7")
def bench(parts: tuple[str, ...], size: str, device: str, rounds: int | None) -> None:
    """Time PARTS (losses, training, data, decoders, small, search; none: all) beside references.

    Each is written to results/bench/<part>-<device>.csv; quick ones only below PUMALIB_RESULTS.
    """
    from .bench import tables

    for file in tables.write(parts, full=size == "full", device=device, rounds=rounds):
        click.echo(f"written: {paths.shown(file)}")


GOES_ON = {
    "pages": "pages that were written are whole: the same command writes the others",
    "bench": "tables that were written are whole",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command, and return its status, as `terminal.run` has it."""
    return terminal.run(cli, argv, "python -m tools", GOES_ON)


if __name__ == "__main__":
    sys.exit(main())
