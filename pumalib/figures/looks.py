"""The table of looks: a colour and a marker for each name, the same in every figure.

A method, a loss, a dataset or a row is drawn as its line of `LOOKS` says.  A name without a line
gets a look that depends on the name alone, so that adding one never repaints another.
"""

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

# seaborn's palette "colorblind", of which vermilion is PUMA's alone.
BLUE = "#0173b2"
ORANGE = "#de8f05"
GREEN = "#029e73"
VERMILION = "#d55e00"
PURPLE = "#cc78bc"
BROWN = "#ca9161"
PINK = "#fbafe4"
SILVER = "#949494"
YELLOW = "#ece133"
SKY = "#56b4e9"
BLACK = "#222222"
DARK_GREY = "#555555"

# What names without a line take in turn.
COLOURS = [BLUE, ORANGE, GREEN, PURPLE, BROWN, PINK, SILVER, YELLOW, SKY]
MARKERS = ["X", "P", "d", "p", "h"]

# Right, wrong, and neither: a colour-blind reader tells them apart.
TRUE = "#009e73"
FALSE = "#d55e00"
GREY = "#888888"


class Look(NamedTuple):
    """How a name is drawn: a colour and a marker of matplotlib."""

    colour: str
    marker: str


OURS = Look(VERMILION, "*")

LOOKS: dict[str, Look] = {
    # What the others start from: a dash
    "frozen": Look(DARK_GREY, "_"),
    "pretrained": Look(DARK_GREY, "_"),
    # Full fine-tuning
    "full": Look(BLACK, "s"),
    "full fine-tuning": Look(BLACK, "s"),
    "full fine-tuning, 512": Look(BLUE, "X"),
    # PUMA
    "puma": OURS,
    "PUMA": OURS,
    "universal PUMA": OURS,
    "conditional + stochastic": OURS,
    "PUMA, 512": Look(ORANGE, "P"),
    "PUMA, first half": Look(GREEN, "d"),
    # Methods, as pumalib.config names them
    "linear": Look(GREEN, "v"),
    "mlp3": Look(PURPLE, "<"),
    "vpt": Look(BROWN, ">"),
    "vpt-deep": Look(PINK, "D"),
    "lora": Look(SILVER, "^"),
    "lora-stochastic": Look(YELLOW, "v"),
    "adaptformer": Look(SKY, "<"),
    "adapter": Look(BLUE, ">"),
    "adapter-stochastic": Look(ORANGE, "D"),
    "prompt-pool": Look(GREEN, "^"),
    "vpt+adapter": Look(PURPLE, "v"),
    "puma+lora": Look(PINK, ">"),
    "puma+lora-stochastic": Look(SILVER, "D"),
    # The same methods, as the paper names them (Tables 2, 3 and 7)
    "Linear Emb.": Look(GREEN, "v"),
    "MLP-3 Emb.": Look(PURPLE, "<"),
    "VPT": Look(BROWN, ">"),
    "LoRA": Look(SILVER, "^"),
    "Stochastic LoRA": Look(YELLOW, "v"),
    "AdaptFormer": Look(SKY, "<"),
    "PUMA + LoRA": Look(PINK, ">"),
    "PUMA + Stochastic LoRA": Look(SILVER, "D"),
    "single": Look(BROWN, ">"),
    "conditional": Look(GREEN, "^"),
    "static": Look(BLUE, ">"),
    "stochastic": Look(ORANGE, "D"),
    "single + static": Look(PURPLE, "v"),
    # Full fine-tuning, a model for each dataset (Table 2)
    "specific Triplet": Look(BLUE, "o"),
    "specific Margin": Look(ORANGE, "o"),
    "specific MS": Look(GREEN, "o"),
    "specific PA": Look(PURPLE, "o"),
    "specific Hyp": Look(BROWN, "o"),
    "specific SoftTriple": Look(PINK, "o"),
    "specific CosFace": Look(SILVER, "o"),
    "specific ArcFace": Look(YELLOW, "o"),
    "specific CurricularFace": Look(SKY, "o"),
    # Full fine-tuning, one model for all datasets (Table 2)
    "universal Triplet": Look(BLUE, "s"),
    "universal Margin": Look(ORANGE, "s"),
    "universal MS": Look(GREEN, "s"),
    "universal PA": Look(PURPLE, "s"),
    "universal Hyp": Look(BROWN, "s"),
    "universal SoftTriple": Look(PINK, "s"),
    "universal CosFace": Look(SILVER, "s"),
    "universal ArcFace": Look(YELLOW, "s"),
    "universal CurricularFace": Look(BLACK, "s"),
    # Kinds of models (Table 10)
    "specific models": Look(BLUE, "X"),
    "universal models": Look(ORANGE, "P"),
    "best CNN": Look(GREEN, "d"),
    # Any method with a loss of the paper (Tables 5 and 8)
    "Triplet": Look(BLUE, "8"),
    "Margin": Look(ORANGE, "8"),
    "MS": Look(GREEN, "8"),
    "PA": Look(PURPLE, "8"),
    "Hyp": Look(BROWN, "8"),
    "SoftTriple": Look(PINK, "8"),
    "CosFace": Look(SILVER, "8"),
    "ArcFace": Look(YELLOW, "8"),
    "CurricularFace": Look(SKY, "8"),
    "SupCon": Look(BLUE, "X"),
    "ProxyNCA++": Look(ORANGE, "P"),
    "Triplet + XBM": Look(BLUE, "X"),
    "MS + XBM": Look(ORANGE, "P"),
    # Losses, as pumalib.losses names them, and the triplet loss with its miners
    "plain triplets": Look(BLUE, "h"),
    "triplet random": Look(BLUE, "X"),
    "triplet all": Look(ORANGE, "P"),
    "triplet, all": Look(ORANGE, "P"),
    "triplet semihard": Look(GREEN, "d"),
    "triplet batchhard": Look(PURPLE, "p"),
    "triplet, batch-hard": Look(PURPLE, "p"),
    "contrastive": Look(BROWN, "h"),
    "ms": Look(PINK, "X"),
    "proxynca": Look(GREEN, "X"),
    "proxyanchor": Look(SILVER, "P"),
    "proxygml": Look(YELLOW, "d"),
    "softtriple": Look(SKY, "p"),
    "curricularface": Look(BLUE, "d"),
    # Datasets of mini
    "glyphs": Look(BLUE, "X"),
    "garments": Look(ORANGE, "P"),
    "birds": Look(GREEN, "d"),
    "digits": Look(PURPLE, "p"),
    "vehicles": Look(BROWN, "h"),
    "photos": Look(PINK, "X"),
    # Datasets of mini and of the paper
    "aircraft": Look(SILVER, "P"),
    "flowers": Look(YELLOW, "d"),
    # Datasets of the paper
    "cub": Look(BLUE, "X"),
    "cars": Look(ORANGE, "P"),
    "sop": Look(GREEN, "d"),
    "inshop": Look(PURPLE, "p"),
    "nabirds": Look(BROWN, "h"),
    "dogs": Look(PINK, "X"),
    # Datasets of the profile photos
    "animals_tinyimagenet": Look(BLUE, "X"),
    "birds_cub50": Look(ORANGE, "P"),
    "cars_196": Look(GREEN, "d"),
    "characters_omniglot": Look(PURPLE, "p"),
    "emoji_emojione": Look(BROWN, "h"),
    # Stages: the images and the pretraining of a profile (19_when_puma_wins)
    "8 drawn datasets (mini)": Look(BROWN, "o"),
    "5 datasets at 96 px, ImageNet-1k": Look(SKY, "v"),
    "5 datasets, ImageNet-1k": Look(BLUE, "s"),
    "5 datasets, ImageNet-21k": Look(PURPLE, "D"),
    "8 of photographs, ImageNet-21k": Look(GREEN, "^"),
    # Overall accuracies
    "unified": Look(BLUE, "X"),
    "harmonic": Look(ORANGE, "P"),
    # Lines of single figures
    "p = 0.1": Look(BLUE, "X"),
    "seed 0": Look(BLUE, "X"),
    "seed 1": Look(ORANGE, "P"),
    "seed 2": Look(GREEN, "d"),
    "seed 3": Look(PURPLE, "p"),
    "seed 4": Look(BROWN, "h"),
    "edges": Look(BLUE, "X"),
    "colours": Look(ORANGE, "P"),
    "family": Look(GREEN, "d"),
    "class": Look(PURPLE, "p"),
    "flat": Look(BLUE, "X"),
    "ivf": Look(ORANGE, "P"),
    "hnsw": Look(GREEN, "d"),
}


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """The look of each of the `names` of one figure, in their order.

    Names without a line in `LOOKS` are told apart within the figure: the later of two that would
    look alike takes the next colour that is free among them.
    """
    chosen: dict[str, Look] = {}
    unknown: list[Look] = []
    for name in dict.fromkeys(names):
        if name in LOOKS:
            chosen[name] = LOOKS[name]
        else:
            chosen[name] = _own_look(name, unknown)
            unknown.append(chosen[name])
    return chosen


def _own_look(name: str, taken: Collection[Look]) -> Look:
    """The look that a hash of `name` points at, or the next that is not among `taken`."""
    # Python's own hash of a string differs from process to process.
    number = zlib.crc32(str(name).encode())
    colours = _starting_at(number, COLOURS)
    markers = _starting_at(number // len(COLOURS), MARKERS)

    # With more names than colours all colours are used once before one is used twice.
    uses = Counter(look.colour for look in taken)
    colour = min(colours, key=lambda one: uses[one])
    for marker in markers:
        if (colour, marker) not in taken:
            return Look(colour, marker)
    return Look(colour, markers[0])


def _starting_at(number: int, cycle: Sequence[str]) -> list[str]:
    """One turn of `cycle` from its place `number`."""
    start = number % len(cycle)
    return [*cycle[start:], *cycle[:start]]
