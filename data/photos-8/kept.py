"""Write `pumalib/kept/<name>`, what a run of the trial trained, from the run's folder.

    python data/photos-8/kept.py results/photos-8/runs/puma-curricularface-<hash> photos-8-puma

Of the headline rows with a frozen backbone (PUMA, LoRA, linear) the first seed is kept so.  The
backbone is not inside; the card has the scores of the kept run.  Refused is what is no kept run of
the profile, has another model than the kept run, or is too large.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

import pumalib
from pumalib import data, embedder, evaluation, paths
from pumalib.study import store

PROFILE = "photos-8"
MOST_BYTES = 4 * 2**20
# By which R@1 may differ from the kept run's: it was embedded on another machine.
TOLERANCE = 0.003

ABOUT = """## Data

Eight datasets of photographs, 8,000 training images in the proportions of the paper's Table 1
(docs/protocol.md and data/photos-8/split.csv have all): Stanford Cars, groceries, CUB-200-2011
(50 classes), Oxford 17 Flowers, Caltech-101, animals of Tiny ImageNet, clothes, and the AT&T faces.

## Scores

R@1 in % on the test classes, which training did not see, with 95 % intervals over these; seed
{seed}, alone:

{scores}

## Licence

The weights: MIT, as the project. Cars, birds, flowers, animals and faces were given for research,
and so is what was trained on them; groceries MIT, Caltech-101 CC BY 4.0, clothes free for any
purpose. The backbone's own licence (timm's model card) holds for the backbone.

## Intended use

To look at what the trial found, and to begin from. It is a small network at {size} px, trained
for {epochs} epochs: for images of your own compare it with the frozen backbone
(docs/own-images.md, docs/which-method.md).

## How it was made

The kept run `{run}` of the profile `{profile}`, then
`python data/photos-8/kept.py <its folder> {name}`.
"""


def keep(folder: Path, place: Path, profile: str = PROFILE) -> Path:
    """Write what the run in `folder` trained into `place`; ValueError for what is not to be kept.

    The folder's name is that of a run that is kept in `profile`.
    """
    record = store.record(folder.name, profile)
    model = pumalib.load(folder)
    _require_same_scores(model, record, folder)
    about = ABOUT.format(
        seed=model.run.seed,
        scores=scores(record),
        size=model.run.data.image_size,
        epochs=model.run.training.epochs,
        run=folder.name,
        profile=profile,
        name=place.name,
    )
    model.save_trained(place, about)
    size = (place / "model.safetensors").stat().st_size
    if size > MOST_BYTES:
        for file in place.iterdir():
            file.unlink()
        place.rmdir()
        raise ValueError(f"{folder} would be {size:,} bytes, more than {MOST_BYTES:,}: not kept")
    return place


def _require_same_scores(model: embedder.Embedder, record: dict[str, Any], folder: Path) -> None:
    """Raise ValueError unless the model finds what the kept run found."""
    benchmark = data.load(model.run.data)
    vectors = embedder.embed_rows(model.model, benchmark, benchmark.test, model.run.data)
    table = evaluation.scores(vectors, benchmark.test, (1,)).table(bootstrap=0)
    for row in record["table"]:
        found = table.at[row["dataset"], "R@1"]
        if not np.isclose(found, row["R@1"], rtol=0, atol=TOLERANCE):
            what = f"{folder} finds {found:.3f} of {row['dataset']}, its kept run {row['R@1']:.3f}"
            raise ValueError(f"{what}: it is another model")


def scores(record: dict[str, Any]) -> str:
    """R@1 of a kept run as a table in Markdown."""
    lines = ["| | R@1 |", "|---|---|"]
    for row in record["table"]:
        interval = f"[{100 * row['R@1_low']:.1f}, {100 * row['R@1_high']:.1f}]"
        lines.append(f"| {row['dataset']} | {100 * row['R@1']:.1f} {interval} |")
    return "\n".join(lines)


def main(folder: str, name: str) -> None:
    """Keep one run's model under a name."""
    print(keep(paths.resolve(folder), embedder.KEPT_FOLDER / name))


if __name__ == "__main__":
    main(*sys.argv[1:])
