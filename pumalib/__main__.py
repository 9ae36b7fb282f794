"""The command line, a thin face over the rooms: `python -m pumalib run|train|runs|data ...`.

`embed`, `index`, `search` and `evaluate` are for a folder of images and a model.  What a
command needs is imported when it runs: torch alone takes seconds, and `--help` needs none.
"""

import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import paths, terminal
from .paths import printable

if TYPE_CHECKING:
    import pandas as pd

    from .embedder import Embedder
    from .index import FolderIndex


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
        if not _is_plain(values[name]):
            raise click.BadParameter(
                f"{pair!r}: write a finite number, a text, true or false, or a list or mapping of "
                f"these; a date is a text in quotes: {name}='\"2020-01-31\"'"
            )
    return values


def _is_plain(value: Any) -> bool:
    """Whether a value is written as a literal of Python: YAML has dates and infinity too."""
    if isinstance(value, dict):
        return all(_is_plain(part) for part in [*value, *value.values()])
    if isinstance(value, list):
        return all(_is_plain(part) for part in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


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
    """A reproducibility study of PUMA: execute its notebooks, train runs, prepare its data.

    And for images of your own: embed, index, search, evaluate.
    """


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

    from . import config
    from .study import needs, notebooks

    profile = _profile(profile)
    wanted = notebooks.parameters(notebooks.find(list(names)), profile, _from_shell(values))
    if plan:
        text, complete = notebooks.plan(wanted, speed or needs.STATED_SPEED)
        click.echo(text)
        return int(not complete)
    if not sys.stderr.isatty():
        # The bars of the kernels are written here too, and this is all that they are told.
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    return notebooks.run(wanted, config.profile(profile).name)


# Fields of a profile that one run has no use for.
OF_SEVERAL = ("seeds", "side_seeds", "further_seeds", "jobs", "dask", "train")


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
    agree (1 if the hit of a query does not), and keeps others beside.  Under torchrun each process
    has a GPU, and takes an equal part of every batch.
    """
    for name in OF_SEVERAL:
        if name in values:
            raise click.UsageError(f"-p {name} is for several runs; this is one, see --seed")

    from . import config, models, training
    from .study import one_run, store

    config.require_values(values)
    values = _from_shell(values)
    chosen = config.profile(_profile(profile), **values)
    if one_run.is_kept(method, chosen.name):
        if values or settings or loss is not None or seed is not None:
            raise click.UsageError(
                f"{method} is a kept run, trained again as it is: leave out -p, -s, --loss, --seed"
            )
        report = one_run.train_again(method, chosen.name)
    else:
        one_run.require_kept_nowhere_else(method, chosen.name)
        settings = models.with_own_settings(method, settings)
        config.method(method, **settings)  # refuses what is no setting of a method
        new = chosen.run(method, loss=loss, seed=seed, **settings)
        report = one_run.train_new(new, chosen.name)
        # The study's other profiles have the frozen backbone as a row.
        is_own = profile == "folders" or Path(profile).suffix != ""
        if report is not None and is_own:
            training.warn_if_below(new, store.folder(training.run_name(new), chosen.name))
    if report is None:  # of another process
        return 0
    click.echo(report.text)
    return int(not report.agrees)


def _profile(name: str) -> str:
    """A profile's name, or its file as the shell means it where it has such a file."""
    near = _absolute(name)
    if name.endswith((".yaml", ".yml")) and near.is_file() and near != paths.resolve(name):
        return str(near)
    return name


def _from_shell(values: dict[str, Any]) -> dict[str, Any]:
    """Changes of a profile, in which paths are as the shell means them where it has them.

    Else they are the project's, and stay as they were given.
    """
    changed = dict(values)
    for name in ("root", "split", "pretrained"):
        given = values.get(name)
        if not isinstance(given, str) or given in ("hub", "embedded", "random"):
            continue
        near = _absolute(given)
        if near.exists() and near != paths.resolve(given):
            changed[name] = str(near)
    return changed


# ---- a folder of images and a model


def here(context: click.Context, parameter: click.Parameter, path: str | None) -> Path | None:
    """A path as the shell means it: relative to the folder where it stands."""
    if path is None:
        return None
    return _absolute(path)


def _absolute(path: str) -> Path:
    """Without "..", but a link stays one: a folder is known by the name that it was given."""
    return Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100


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
    """The index of a folder by a model, as it was written before."""
    from . import index

    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    embedder = _embedder(model, pretrained)
    place = store or index.default_store(folder)
    return index.FolderIndex(embedder, folder, place, kind=kind, workers=workers)


def _embedder(model: str, pretrained: str | None) -> "Embedder":
    """The model of a name or a folder, else a backbone of timm's as it comes."""
    from . import embedder, training

    device = training.choose_device("auto")
    return embedder.named(_known_model(model), _known_weights(pretrained), device)


def _known_model(model: str) -> str:
    """A model's name, or its folder in full, as the shell means it or in the project."""
    from . import embedder

    folder = _known_path(model)
    if model in embedder.list_kept():
        return model
    if folder.is_dir():
        return str(folder)
    if folder.name != model:
        raise FileNotFoundError(f"no folder {model}, here or in the project")
    return model


def _known_weights(pretrained: str | None) -> str | None:
    return str(_known_path(pretrained)) if pretrained else None


def _known_path(path: str) -> Path:
    """A path as the shell means it where there is such a file or folder, else the project's."""
    near = _absolute(path)
    return near if near.exists() else paths.resolve(path)


def _embed_parts() -> Any:
    """What embeds on a cluster, which needs Dask."""
    try:
        from .study import embed_parts
    except ImportError as error:
        remedy = "pip install 'pumalib[study]'"
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


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what is kept."""


@contextmanager
def _keeping(index: "FolderIndex") -> Iterator[None]:
    """Say how many images are kept where an update is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{len(index.table):,} images are embedded and kept"
        raise _Interrupted(f"{kept}: the same command goes on from there") from None


def _said(index: "FolderIndex", counts: Any) -> str:
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
    """Write the embeddings of a folder's images, at any depth, to a file of numpy.

    It holds `vectors` and `paths`.  Can be stopped at any time: the same command goes on, and
    embeds only what is new or changed.  What cannot be read is listed and left out.
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
    click.echo(_said(index, counts))
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
    """Make the index of a folder's images, or bring it to the folder's present state.

    What is new or changed is embedded, what is gone is removed.
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
    lines = [_said(found, counts)]
    if threshold is not None:
        groups = found.duplicate_groups(threshold)
        lines += _said_groups(groups, threshold)
        search_page.write_table(groups, csv_file, json_file)
        if page is not None:
            search_page.write_groups(groups, folder, page, _title(found))
    if wrong_labels:
        suspects = found.likely_wrong_labels(k)
        lines += _said_labels(suspects)
        search_page.write_table(suspects, csv_file, json_file)
        if page is not None:
            search_page.write_suspects(suspects, folder, page, _title(found))
    click.echo("\n".join(lines))
    _echo_written(csv_file, json_file, page)


def _said_groups(table: "pd.DataFrame", threshold: float) -> list[str]:
    lines = [f"{table['group'].nunique():,} groups of images joined by a cosine above {threshold}"]
    for image in table.itertuples():
        lines.append(f"{image.group}  {image.cosine:.6f}  {printable(image.path)}")
    return lines


def _said_labels(table: "pd.DataFrame") -> list[str]:
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
    """Find the images of an indexed folder that are nearest to each IMAGE, by cosine."""
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
        file = _absolute(query)
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
    """Retrieval accuracies of VECTORS (.npz or .npy, whoever made them), in %, with intervals.

    LABELS is a CSV: label and path, or label alone in the order of the vectors; also dataset, and
    split (query, gallery or test).  Without it the folder of an image is its class.
    """
    from . import evaluation

    table = evaluation.evaluate_files(vectors, labels)
    for name, row in table.iterrows():
        click.echo(f"{name}: {int(row['queries']):,} queries")
        for metric in ("R@1", "R@10", "RP", "MAP@R"):
            interval = f"[{100 * row[f'{metric}_low']:.1f}, {100 * row[f'{metric}_high']:.1f}]"
            click.echo(f"  {metric:6}{100 * row[metric]:5.1f} {interval}")


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
    """A line per run, those of --query; below them those that failed, which have no numbers."""
    from .study import runs as kept_runs

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
    """Runs as text: what was measured with one digit, settings as they are."""
    rounded = dict.fromkeys(("unified", "harmonic", "seconds"), "{:.1f}".format)
    return table.to_string(formatters=rounded, na_rep="-", float_format="{:g}".format)


def _those_of(table: "pd.DataFrame", query: str | None) -> "pd.DataFrame":
    """The rows of a table that a query asks for."""
    from .study import runs as kept_runs

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
    from . import data
    from .study import runs as kept_runs

    with data.unchanged():
        problems = list(kept_runs.problems(profile))
    for problem in problems:
        click.echo(printable(problem))
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
    from .data import download, images, prepared, read

    folder = _known_path(root)
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


# How copies of images are read.
HOW_PREPARED = "`run` and `train` with -p prepared=true, or a profile with data: {prepared: true}"


def _data_status(folder: Path) -> int:
    """Print what is where, and what is missing with the command that gets it; 1 if anything is."""
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


@cli.command()
@click.option("--build", type=click.Path(), help="the folder of the report, which is written too")
def docs(build: str | None) -> None:
    """Write the numbers of README.md, docs and the report anew, and draw README's figure."""
    from . import report
    from .study import page_rows, pages

    for path in pages.write():
        click.echo(f"written: {paths.shown(path)}")
    for path in report.draw_for_readme(page_rows.Kept()):
        click.echo(f"drawn: {paths.shown(path)}")
    if build:
        for path in report.build(paths.resolve(build)):
            click.echo(f"built: {paths.shown(path)}")


def main(argv: list[str] | None = None) -> int:
    """Run one command, and return its status.

    0 if all went well, 1 if not, 2 if it was asked in a wrong way, 130 if interrupted.
    """
    try:
        with terminal.sigterm_interrupts(), terminal.without_reader(), terminal.plain_warnings():
            return cli.main(argv, prog_name="python -m pumalib", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        click.echo(f"\ninterrupted; {_what_is_kept(error, argv)}", err=True)
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


# What an interrupted command leaves, where it does not say so itself.
GOES_ON = {
    "run": "finished runs and checkpoints are kept: the same command goes on",
    "train": "finished epochs and checkpoints are kept: the same command goes on",
    "embed": "what was embedded before is kept: the same command goes on",
    "index": "what was embedded before is kept: the same command goes on",
    "search": "nothing was written: the same command asks again",
    "evaluate": "nothing was written: the same command begins anew",
    "data": "files that are whole are kept: the same command goes on",
    "docs": "pages that were written are whole: the same command writes the others",
    "runs": "each line of a kept run is whole: the same command goes on",
}


def _what_is_kept(error: BaseException, argv: list[str] | None) -> str:
    """What is said of an interrupted command."""
    for one in (error, error.__cause__):
        if isinstance(one, _Interrupted):
            return str(one)
    given = sys.argv[1:] if argv is None else argv
    command = given[0] if given else ""
    return GOES_ON.get(command, "the same command begins anew")


def _refused(error: Exception, status: int) -> int:
    """Say an error that names what is wrong and the remedy, without a traceback."""
    click.echo(f"error: {terminal.plain(error)}", err=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
