"""The library's command line: `python -m pumalib train|embed|index|search|evaluate|data`.

Each command imports what it needs when it runs: torch alone takes seconds, and `--help` works
without it.
The notebooks and their runs have a command line of their own, `python -m puma_study`.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import options, paths, terminal
from .options import absolute, here, known_path
from .paths import printable

if TYPE_CHECKING:
    import pandas as pd

    from .embedder import Embedder
    from .index import FolderIndex


@click.group()
def cli() -> None:
    """One embedding model for many kinds of images: train it, embed, index, search, evaluate."""


@cli.command()
@options.of_one_run
def train(asked: options.AskedRun) -> None:
    """Train a model by METHOD with a profile's settings, and print its folder and R@1.

    A finished run is only read.  Under torchrun each process uses one GPU and an equal part of
    every batch.
    """
    run, home = asked.run()

    from . import training
    from .training import run_folder

    folder = home / "runs" / training.run_name(run)
    record = training.train_together(run, folder, run_folder.held(folder))
    if record is None:  # of another process
        return
    training.warn_if_below(run, folder)
    click.echo(f"{paths.shown(folder)}\nR@1: {run_folder.accuracies(record)}")


# ---- a folder of images and a model


folder_argument = click.argument("folder", callback=here)
model_option = click.option(
    "--model",
    required=True,
    help="a trained model's folder; mini, which comes with the package; a backbone of timm's",
)
weights_option = click.option(
    "--pretrained", help="a file with the weights of its backbone; without: timm's hub"
)
store_option = click.option(
    "--store", callback=here, help="folder for the index; without: in the cache"
)
kind_option = click.option(
    "--kind",
    type=click.Choice(["flat", "ivf", "hnsw"]),
    default="flat",
    show_default=True,
    help="flat is exact, the others are faster beyond some 100,000 images",
)
workers_option = click.option(
    "--workers",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="threads that decode images",
)


def _folder_index(  # noqa: PLR0917 - as the commands have them
    folder: Path,
    model: str,
    pretrained: str | None,
    store: Path | None,
    kind: str = "flat",
    workers: int = 0,
) -> "FolderIndex":
    """The index of a folder's images by a model, read from disk if it exists."""
    from . import index

    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    embedder = _embedder(model, pretrained)
    place = store or index.default_store(folder)
    return index.FolderIndex(embedder, folder, place, kind=kind, workers=workers)


def _embedder(model: str, pretrained: str | None) -> "Embedder":
    """The trained model of this name or folder, else timm's backbone of this name."""
    from . import embedder, training

    device = training.choose_device("auto")
    return embedder.named(_known_model(model), _known_weights(pretrained), device)


def _known_model(model: str) -> str:
    """A model's name, or its full path, relative to the current folder or to the project."""
    from . import embedder

    folder = known_path(model)
    if model in embedder.list_kept():
        return model
    if folder.is_dir():
        return str(folder)
    if folder.name != model:
        raise FileNotFoundError(f"no folder {model}, here or in the project")
    return model


def _known_weights(pretrained: str | None) -> str | None:
    return str(known_path(pretrained)) if pretrained else None


def _embed_parts() -> Any:
    """The module `embed_parts`, which needs Dask; ClickException where Dask is missing."""
    try:
        from . import embed_parts
    except ImportError as error:
        remedy = "pip install 'pumalib[cluster]'"
        raise click.ClickException(
            f"--scheduler needs the package {error.name!r}: {remedy}"
        ) from None
    return embed_parts


csv_option = click.option("--csv", "csv_file", callback=here, help="write what is found as CSV")
json_option = click.option(
    "--json", "json_file", callback=here, help="write what is found as JSON: a list of rows"
)


def _echo_written(*files: Path | None) -> None:
    for file in files:
        if file is not None:
            click.echo(f"written: {printable(file)}")


@contextmanager
def _keeping(index: "FolderIndex") -> Iterator[None]:
    """If an update is interrupted, say how many images are already in the index."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{len(index.table):,} images are embedded and kept"
        raise terminal.Interrupted(f"{kept}: the same command goes on from there") from None


def _count_line(index: "FolderIndex", counts: Any) -> str:
    numbers = ", ".join(f"{number:,} {name}" for name, number in vars(counts).items())
    return f"{len(index.table):,} images in the index ({numbers})"


@cli.command()
@folder_argument
@click.option("-o", "output", required=True, callback=here, help="the .npz file that is written")
@model_option
@weights_option
@store_option
@workers_option
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="of a Dask scheduler whose workers embed: folder, model and --store must be seen by all",
)
def embed(  # noqa: PLR0917 - click gives them by name
    folder: Path,
    output: Path,
    model: str,
    pretrained: str | None,
    store: Path | None,
    workers: int,
    scheduler: str | None,
) -> None:
    """Write the embeddings of all images in a folder and its subfolders to a NumPy file.

    The file holds `vectors` and `paths`.  The command can be stopped at any time: run again, it
    embeds only new and changed images.  Unreadable images are listed and left out.
    """
    if output.suffix != ".npz":
        raise click.BadParameter(f"-o {output.name}: a file of numpy is written, name it *.npz")
    index = _folder_index(folder, model, pretrained, store, workers=workers)
    with _keeping(index):
        if scheduler is None:
            counts = index.update()
        else:
            embed_parts = _embed_parts()
            source = embed_parts.Source(_known_model(model), _known_weights(pretrained))
            counts = embed_parts.update(index, source, scheduler)
        index.write_vectors(output)
    click.echo(_count_line(index, counts))
    click.echo(f"{printable(output)}: {len(index.table):,} x {index.embedder.model.dim}")


@cli.command()
@folder_argument
@model_option
@weights_option
@store_option
@kind_option
@workers_option
@click.option(
    "--near-duplicates",
    "threshold",
    type=click.FloatRange(-1, 1),
    help="list groups of images that pairs with a cosine above this join",
)
@click.option(
    "--wrong-labels",
    is_flag=True,
    help="list images whose nearest ones lie in another folder, by vote: labels are folders",
)
@click.option(
    "-k", type=click.IntRange(1), default=5, show_default=True, help="neighbours that vote"
)
@csv_option
@json_option
@click.option("--html", "page", callback=here, help="write a page that shows what is listed")
def index(  # noqa: PLR0917 - click gives them by name
    folder: Path,
    model: str,
    pretrained: str | None,
    store: Path | None,
    kind: str,
    workers: int,
    threshold: float | None,
    wrong_labels: bool,
    k: int,
    csv_file: Path | None,
    json_file: Path | None,
    page: Path | None,
) -> None:
    """Build the index of a folder's images, or update it.

    New and changed images are embedded, deleted ones are removed.
    """
    from . import search_page

    lists = (threshold is not None) + wrong_labels
    if any((csv_file, json_file, page)) and lists != 1:
        raise click.UsageError(
            "--csv, --json and --html write one list: give one of --near-duplicates, --wrong-labels"
        )
    found = _folder_index(folder, model, pretrained, store, kind, workers)
    with _keeping(found):
        counts = found.update()
    lines = [_count_line(found, counts)]
    if threshold is not None:
        groups = found.duplicate_groups(threshold)
        lines += _group_lines(groups, threshold)
        search_page.write_table(groups, csv_file, json_file)
        if page is not None:
            search_page.write_groups(groups, folder, page, _title(found))
    if wrong_labels:
        suspects = found.likely_wrong_labels(k)
        lines += _label_lines(suspects)
        search_page.write_table(suspects, csv_file, json_file)
        if page is not None:
            search_page.write_suspects(suspects, folder, page, _title(found))
    click.echo("\n".join(lines))
    _echo_written(csv_file, json_file, page)


def _group_lines(table: "pd.DataFrame", threshold: float) -> list[str]:
    lines = [f"{table['group'].nunique():,} groups of images joined by a cosine above {threshold}"]
    for image in table.itertuples():
        lines.append(f"{image.group}  {image.cosine:.6f}  {printable(image.path)}")
    return lines


def _label_lines(table: "pd.DataFrame") -> list[str]:
    lines = [f"{len(table):,} images whose nearest ones lie in another folder"]
    for image in table.itertuples():
        path = printable(image.path)
        suggested = printable(image.suggested)
        lines.append(f"{path}  {image.votes} of {image.of} in {suggested}")
    return lines


def _title(found: "FolderIndex") -> str:
    return f"{found.folder.name}: {len(found.table):,} images"


@cli.command()
@folder_argument
@click.argument("queries", nargs=-1, required=True, metavar="IMAGE...")
@model_option
@weights_option
@store_option
@kind_option
@click.option("-k", type=click.IntRange(1), default=7, show_default=True, help="images to find")
@csv_option
@json_option
@click.option("--html", "page", callback=here, help="write a page that shows them all")
def search(  # noqa: PLR0917 - click gives them by name
    folder: Path,
    queries: tuple[str, ...],
    model: str,
    pretrained: str | None,
    store: Path | None,
    kind: str,
    k: int,
    csv_file: Path | None,
    json_file: Path | None,
    page: Path | None,
) -> None:
    """Find the images of an indexed folder that are most similar to each IMAGE, by cosine."""
    import pandas as pd

    from . import search_page

    found = _folder_index(folder, model, pretrained, store, kind)
    if found.table.empty:
        asked = f"python -m pumalib index {shlex.quote(str(folder))} --model {shlex.quote(model)}"
        raise click.ClickException(
            f"{printable(found.store)} holds no image yet: run `{printable(asked)}` first, with "
            "the same --store and --pretrained"
        )
    answers = []
    tables = []
    for query in queries:
        file = absolute(query)
        places = found.search(file, k)
        answers.append(search_page.Answer(file, places))
        ranks = range(1, len(places) + 1)
        tables.append(places.assign(query=query, rank=ranks)[["query", "rank", "path", "cosine"]])
    search_page.write_table(pd.concat(tables), csv_file, json_file)
    if page is not None:
        search_page.write(answers, folder, page, _title(found))

    for query, answer in zip(queries, answers, strict=True):
        click.echo(printable(query))
        for place in answer.found.itertuples():
            click.echo(f"  {place.cosine:.3f}  {printable(place.path)}")
    _echo_written(csv_file, json_file, page)


@cli.command()
@click.argument("vectors", callback=here)
@click.argument("labels", callback=here, required=False)
def evaluate(vectors: Path, labels: Path | None) -> None:
    """Retrieval accuracies of VECTORS (.npz or .npy, from any model), in %, with 95 % intervals.

    LABELS is a CSV with the columns label and path, or label alone in the order of the vectors; it
    may also have dataset, and split (query, gallery or test).  Without LABELS the class of an image
    is the folder it is in.
    """
    from . import evaluation

    table = evaluation.evaluate_files(vectors, labels)
    for name, row in table.iterrows():
        click.echo(f"{name}: {int(row['queries']):,} queries")
        for metric in ("R@1", "R@10", "RP", "MAP@R"):
            interval = f"[{100 * row[f'{metric}_low']:.1f}, {100 * row[f'{metric}_high']:.1f}]"
            click.echo(f"  {metric:6}{100 * row[metric]:5.1f} {interval}")


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
    """List the paper's datasets, download the free ones, make smaller copies, check every image.

    Without DATASETS, all of them.
    """
    from .data import download, images, prepared, read

    folder = known_path(root)
    names = list(datasets) if datasets else None
    if action == "status":
        return _data_status(folder)
    if action == "download":
        left = download.download(names, folder, mirror)
        return int(bool(left))
    found = read(benchmark, folder, names, strict=False)
    if action == "prepare":
        click.echo(prepared.prepare(found))
        click.echo(f"These copies are read only when asked for: {HOW_PREPARED}")
        return 0
    bad = images.unreadable(found).values()
    for error in bad:
        click.echo(printable(error))
    if not bad:
        click.echo("every image can be decoded")
    return int(bool(bad))


# How to use the prepared copies of images.
HOW_PREPARED = "`run` and `train` with -p prepared=true, or a profile with data: {prepared: true}"


def _data_status(folder: Path) -> int:
    """Print where each dataset is and how to get the missing ones; return 1 if any is missing."""
    from .data import download, paper
    from .models import backbones

    table = download.status(folder)
    click.echo(table.to_string())
    weights = backbones.missing_weights(backbones.PAPER_BACKBONE, "hub")
    is_complete = bool((table["state"] == "complete").all())
    if not is_complete:
        command = paper.download_command(folder)
        click.echo(f"`{command}` fetches what is free, or says how to get it")
    click.echo(f"weights: {weights or f'{backbones.PAPER_BACKBONE} is there'}")
    if table["prepared"].any():
        click.echo(f"prepared copies are read only when asked for: {HOW_PREPARED}")
    return int(not is_complete or bool(weights))


# The message after an interrupt, for commands that print none of their own.
GOES_ON = {
    "train": "finished epochs and checkpoints are kept: the same command goes on",
    "embed": "what was embedded before is kept: the same command goes on",
    "index": "what was embedded before is kept: the same command goes on",
    "search": "nothing was written: the same command asks again",
    "evaluate": "nothing was written: the same command begins anew",
    "data": "files that are whole are kept: the same command goes on",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status (see `terminal.run`)."""
    return terminal.run(cli, argv, "python -m pumalib", GOES_ON)


if __name__ == "__main__":
    sys.exit(main())
