"""Write `pumalib/kept/<name>`, a model shipped with the package, from its run.

python -m pumalib train full --profile mini --seed 0
python data/mini/make/kept.py mini results/mini/runs/full-curricularface-<hash>
python -m pumalib train puma --profile mini --seed 0
python data/mini/make/kept.py mini-puma results/mini/runs/puma-curricularface-<hash>

Weights are stored in two bytes each; the card has the scores of these stored weights.
"""

import sys
from pathlib import Path

import pumalib
from pumalib import data, embedder, evaluation
from tools import pages

ABOUT = """## Data

The training classes of `mini`, the eight datasets embedded in the project (data/mini/README.md
says what they are made of).

## Scores

R@1 in % on the test classes, which training did not see, with 95 % intervals over these; by the
two-byte weights of this folder:

{scores}

## Licence

MIT, as the project. Some of the pictures it was trained on are others' work: handwritten digits by
E. Alpaydin and C. Kaynak (UCI, CC BY 4.0), a photograph each by danielbuechele and vultilion
(CC BY 2.0), letters of the DejaVu fonts (Bitstream Vera and Arev licences).

## Intended use

To try the commands and the library in a minute, without a network: pictures of 48 px, drawings,
glyphs. It is no model for photographs of your own: of things `mini` finds a fifth where a frozen
backbone finds four fifths. Begin there with a backbone of timm's (`pumalib.frozen`).

R@1 in % on images of other kinds, beside a ViT-Tiny that was trained on ImageNet:

{elsewhere}

Signs, textures and things (16, 10 and 20 classes of 30 or 40 images) were measured by others;
emoji, characters, birds and clothes on samples of 600, 750, 400 and 400 images.

## How it was made

`python -m pumalib train {method} --profile mini --seed 0`, then `python data/mini/make/kept.py
{name} <its folder>`. {why}
"""

# Why these are kept.
WHY = {
    "mini": (
        "Of the methods in the study's table of this benchmark, full fine-tuning has the\n"
        "highest R@1."
    ),
    "mini-puma": "It is the model that the notebook 20_puma_from_scratch takes apart.",
}


def scores(folder: Path) -> str:
    """R@1 of the model in `folder` as a table in Markdown."""
    model = pumalib.load(folder)
    benchmark = data.load(model.run.data)
    vectors = embedder.embed_rows(model.model, benchmark, benchmark.test, model.run.data)
    table = evaluation.scores(vectors, benchmark.test, evaluation.KS).table()
    lines = ["| | R@1 |", "|---|---|"]
    for name, row in table.iterrows():
        interval = f"[{100 * row['R@1_low']:.1f}, {100 * row['R@1_high']:.1f}]"
        lines.append(f"| {name} | {100 * row['R@1']:.1f} {interval} |")
    return "\n".join(lines)


def main(name: str, folder: str) -> None:
    kept = Path(pumalib.__file__).parent / "kept" / name
    model = pumalib.load(folder)
    model.save(kept, half=True)
    about = ABOUT.format(
        scores=scores(kept),
        elsewhere=pages.rows_elsewhere(name),
        method=model.run.method.name,
        name=name,
        why=WHY[name],
    )
    model.save(kept, about=about, half=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
