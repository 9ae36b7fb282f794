"""Build the report, docs/report/report.md with its figures, as HTML and PDF.

pandoc reads the Markdown, with formulas, citations and captions, and writes HTML and Typst source,
which typst compiles to PDF.  Both are Python packages that contain the programs and need no
network.  `pages` writes the numbers; the figures are drawn here from the same kept runs.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from puma_study import figures, findings
from pumalib import evaluation, paths

from . import page_rows, pages

PAGE = "docs/report/report.md"
SOURCE = (paths.ROOT / PAGE).parent
# pandoc squeezes tables wider than this into equal columns.
COLUMNS = 1000

FACTORS = (0.25, 1, 4)
SHOTS = (1, 2, 4, 8, 16)
KEEP_PROBABILITIES = (0.1, 0.3, 0.5, 0.7, 1.0)


def build(folder: Path) -> list[Path]:
    """Write the report to a folder, and return report.html and report.pdf.

    Raises RuntimeError, with the remedy, where pandoc or typst is not installed.
    """
    pandoc, typst = _tools()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
    shutil.copy(SOURCE.parent / "schematic.svg", folder)
    draw(page_rows.Kept(pages.list_pages()[PAGE]), folder / "figures")

    # A comment between a table and its caption would separate them.
    text = (paths.ROOT / PAGE).read_text(encoding="utf-8")
    source = findings.without_markers(text)
    shared = ["--citeproc", "--number-sections", f"--columns={COLUMNS}", "--standalone"]
    shared += [f"--resource-path={folder}", f"--bibliography={folder / 'references.bib'}"]
    reader = "markdown-implicit_header_references"

    html = folder / "report.html"
    own = ["--mathml", "--embed-resources", "--toc", "--toc-depth=1"]
    own.append(f"--css={folder / 'report.css'}")
    pandoc.convert_text(source, "html", reader, outputfile=html, extra_args=shared + own)

    typeset = folder / "report.typ"
    own = [f"--include-in-header={folder / 'style.typ'}"]
    pandoc.convert_text(source, "typst", reader, outputfile=typeset, extra_args=shared + own)
    pdf = folder / "report.pdf"
    typst.compile(typeset, output=pdf, root=folder)
    return [html, pdf]


def _tools() -> tuple:
    try:
        import pypandoc
        import typst
    except ImportError as error:
        remedy = "python -m pip install -e '.[report]'"
        raise RuntimeError(f"the report needs pandoc and typst ({error}): {remedy}") from error
    return pypandoc, typst


# ---- the figures


def draw(kept: page_rows.Kept, folder: Path) -> list[Path]:
    """Draw every figure of the report as SVG, and return their files."""
    drawn = []
    for name, make in FIGURES.items():
        drawn.append(figures.save(make(kept), folder / f"{name}.svg"))
    return drawn


def draw_for_readme(kept: page_rows.Kept) -> list[Path]:
    """Draw README.md's figure in results/<stage>, with its numbers, and return its files."""
    file = paths.RESULTS / kept.stage / "claimed_and_measured.csv"
    with paths.written_whole(file) as temporary:
        page_rows.claimed(kept).to_csv(temporary, index=False)
    figure = claimed(kept)
    drawn = figures.save(figure, file.with_suffix(".png"))
    return [file, drawn.with_suffix(".svg"), drawn]


def claimed(kept: page_rows.Kept) -> Figure:
    """PUMA minus each rival, as printed and as measured."""
    unit = "PUMA minus the rival (points of Recall@1)"
    return figures.claimed_and_measured(page_rows.claimed(kept), "PUMA", unit)


def claimed_in_the_trial(_: page_rows.Kept) -> Figure:
    """The same with the trial's profile, for README.md."""
    return claimed(page_rows.Kept())


def by_dataset(kept: page_rows.Kept) -> Figure:
    """Three methods minus full fine-tuning by dataset, in order of the frozen backbone's R@1."""
    datasets = [name for name in kept.results("frozen", kept.stage).wide() if "_" in name]
    level = {name: kept.levels("frozen", kept.stage, name)["value"] for name in datasets}
    lines = []
    for name in sorted(datasets, key=lambda one: -level[one]):
        place = f"{figures.shown(name)}\n(frozen: {level[name]:.0f}%)"
        for key in ("puma", "static", "lora"):
            difference = kept.difference(key, "full", kept.stage, name)
            line = {"place": place, "row": kept.row(key).name, "value": difference.points}
            lines.append(line | {"low": difference.low, "high": difference.high})
    return figures.intervals(pd.DataFrame(lines), "minus full fine-tuning (points)", zero=True)


def keep_probability(kept: page_rows.Kept) -> Figure:
    """Unified R@1 over the keep probability of the adapters (Fig. 7), also on mini."""
    panels = {}
    for profile in (kept.stage, "mini"):
        lines = []
        for p in KEEP_PROBABILITIES:
            levels = kept.levels(f"ablations/p = {p}", profile, "unified")
            lines.append(_line(levels, kept.row("puma").name, p))
        full = kept.levels("full", profile, "unified")
        lines.append(_line(full, kept.row("full").name, float("nan")))
        panels[profile] = pd.DataFrame(lines)
    return figures.against(panels, "keep probability p", "unified R@1 (%)", joined=True)


def loss_and_accuracy(kept: page_rows.Kept) -> Figure:
    """R@1 over the last training loss, for the rows in `ALIKE`."""
    panels = {}
    for column in evaluation.OVERALL:
        lines = []
        for key in ALIKE:
            loss = kept.last_loss(key, kept.stage)
            levels = kept.levels(key, kept.stage, column)
            lines.append(_line(levels, kept.row(key).name, loss))
        panels[column] = pd.DataFrame(lines)
    return figures.against(panels, "training loss of the last epoch", "R@1 (%)")


def training_length(kept: page_rows.Kept) -> Figure:
    """R@1 on mini over the length of training."""
    rows = {
        "full x {}": "full",
        "puma x {}": "puma",
        "adaptformer x {}": "adaptformer",
        "linear x {}": "linear",
    }
    return _curves(kept, "training_length", rows, FACTORS, "length of training")


def few_shot(kept: page_rows.Kept) -> Figure:
    """R@1 on mini over the number of training images per class (Fig. 6)."""
    rows = {"full {}": "full", "PUMA {}": "puma", "linear {}": "linear"}
    return _curves(kept, "few_shot", rows, SHOTS, "training images a class")


def _curves(
    kept: page_rows.Kept, file: str, rows: Mapping[str, str], places: Sequence[float], xlabel: str
) -> Figure:
    """A panel for unified and one for harmonic R@1, with lines from a table of mini.

    `rows` maps a pattern of row names, such as "PUMA {}" to be filled with each place, to the key
    of its line in docs/pages.yaml.
    """
    lines = []
    for column in evaluation.OVERALL:
        for pattern, key in rows.items():
            for place in places:
                row = f"{file}/{pattern.format(place)}"
                line = _line(kept.levels(row, "mini", column), kept.row(key).name, place)
                lines.append({**line, "panel": column, "place": f"{place:g}"})
    return figures.intervals(pd.DataFrame(lines), "R@1 (%)", joined=True, xlabel=xlabel)


def _line(levels: pd.Series, label: str, x: float) -> dict:
    """A row for `figures.against`, made of `Kept.levels`."""
    return {"row": label, "x": x, **levels[["value", "low", "high"]]}


# Rows with one model for all datasets and CurricularFace, by their keys in docs/pages.yaml.
ALIKE = (
    "linear",
    "mlp3",
    "vpt",
    "pool",
    "lora",
    "stochastic-lora",
    "adaptformer",
    "static",
    "stochastic",
    "puma",
    "full",
)
FIGURES: dict[str, Callable[[page_rows.Kept], Figure]] = {
    "claimed_in_the_trial": claimed_in_the_trial,
    "claimed": claimed,
    "by_dataset": by_dataset,
    "keep_probability": keep_probability,
    "loss_and_accuracy": loss_and_accuracy,
    "training_length": training_length,
    "few_shot": few_shot,
}
