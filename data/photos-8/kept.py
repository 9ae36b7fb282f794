"""Write `pumalib/kept/<name>`, the trained weights of a run of the trial, from its folder.

    python data/photos-8/kept.py results/photos-8/runs/puma-curricularface-<hash> photos-8-puma

The package has the first seed of the headline rows with a frozen backbone (PUMA, LoRA, linear).
The backbone's weights are not included; the card has the scores of the kept run.  A folder is
refused if it is no kept run of the profile, if its model scores differently, or if it is too large.
"""

import sys
from pathlib import Path

import numpy as np

import pumalib
from puma_study import store
from puma_study.record import FinishedRun
from pumalib import data, embedder, evaluation, paths
from tools import pages

PROFILE = "photos-8"
MOST_BYTES = 4 * 2**20
# R@1 may differ this much from the kept run's, which was embedded on another machine.
TOLERANCE = 0.003

ABOUT = """## Data

Eight datasets of photographs, 8,000 training images in the proportions of the paper's Table 1
(docs/protocol.md and data/photos-8/split.csv have all): Stanford Cars, groceries, CUB-200-2011
(50 classes), Oxford 17 Flowers, Caltech-101, animals of Tiny ImageNet, clothes, and the AT&T faces.

## Scores

R@1 in % on the test classes, which training did not see, with 95 % intervals over these; seed
{seed}, alone:

{scores}

{elsewhere}
## Licence

The weights: MIT, as the project. Cars, birds, flowers, animals and faces were given for research,
and so is what was trained on them; groceries MIT, Caltech-101 CC BY 4.0, clothes free for any
purpose. The backbone's own licence (timm's model card) holds for the backbone.

## Intended use

To look at what the trial found, and to begin from. It is a small network at {size} px, trained
for {epochs} epochs. For images of your own begin with the frozen backbone at its own size, then
`whitened`, and take this one only where it finds more (docs/own-images.md, docs/which-method.md).

## How it was made

The kept run `{run}` of the profile `{profile}`, then
`python data/photos-8/kept.py <its folder> {name}`.
"""

# For models in `WHERE` alone; others have no such section.
ELSEWHERE = """## On other images

It is a model of 128 px. R@1 in % on classes that it did not see, beside the frozen backbone that
it stands on, at 128 px and at its own 224:

{rows}

Signs, textures and things (16, 10 and 20 classes of 30 or 40 images) were measured by others;
emoji, characters, birds and clothes on samples of 600, 750, 400 and 400 images, whose 95 %
intervals reach 4 to 12 points to each side, so most of those of two rows overlap. Birds and clothes
are of datasets that it trained on, by other classes.
{where}
"""
WHERE = {
    "photos-8-lora": (
        "By these means it is above the backbone at 224 px on signs and emoji, and below it on\n"
        "textures, things, characters and birds."
    ),
    "photos-8-puma": (
        "By these means it is above the backbone at 224 px on emoji, and below it on characters\n"
        "and birds; signs, textures and things were not tried."
    ),
    "photos-8-linear": (
        "By these means it is nowhere above the backbone at 224 px by more than a tenth of a\n"
        "point, and below it on signs, textures, things, characters, birds and clothes."
    ),
}


def elsewhere(name: str) -> str:
    """The card's section on other kinds of images; "" for a model that was not measured."""
    if name not in WHERE:
        return ""
    return ELSEWHERE.format(rows=pages.rows_elsewhere(name), where=WHERE[name])


def keep(folder: Path, place: Path, profile: str = PROFILE) -> Path:
    """Write the trained weights of the run in `folder` into `place`, and return `place`.

    The folder has the name of a run that is kept in `profile`.  Raises ValueError if its model
    scores differently, or is too large.
    """
    record = store.record(folder.name, profile)
    model = pumalib.load(folder)
    _require_same_scores(model, record, folder)
    about = ABOUT.format(
        seed=model.run.seed,
        scores=scores(record),
        elsewhere=elsewhere(place.name),
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


def _require_same_scores(model: embedder.Embedder, record: FinishedRun, folder: Path) -> None:
    """Raise ValueError unless the model's R@1 of each dataset is that of the kept run."""
    benchmark = data.load(model.run.data)
    vectors = embedder.embed_rows(model.model, benchmark, benchmark.test, model.run.data)
    table = evaluation.scores(vectors, benchmark.test, (1,)).table(bootstrap=0)
    for dataset, kept in record.accuracies.items():
        found = table.at[dataset, "R@1"]
        if not np.isclose(found, kept, rtol=0, atol=TOLERANCE):
            what = f"{folder} finds {found:.3f} of {dataset}, its kept run {kept:.3f}"
            raise ValueError(f"{what}: it is another model")


def scores(record: FinishedRun) -> str:
    """R@1 of a kept run as a table in Markdown."""
    lines = ["| | R@1 |", "|---|---|"]
    for dataset, row in record.scores().iterrows():
        interval = f"[{100 * row['R@1_low']:.1f}, {100 * row['R@1_high']:.1f}]"
        lines.append(f"| {dataset} | {100 * row['R@1']:.1f} {interval} |")
    return "\n".join(lines)


def main(folder: str, name: str) -> None:
    """Keep one run's model under a name."""
    print(keep(paths.resolve(folder), embedder.KEPT_FOLDER / name))


if __name__ == "__main__":
    main(*sys.argv[1:])
