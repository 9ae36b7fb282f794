"""The tables of names and looks: what a row is called, its colour and its marker, in every figure.

A method, a loss, a dataset or a row is shown under the name that `NAMES` gives it, and drawn as the
line of `LOOKS` for that name says: `full` and `universal CurricularFace` are one.  A name without a
line is shown as it is, and gets a look that depends on the name alone, so that adding one never
repaints another.

Three hues have one meaning each, wherever they are drawn: PUMA's is its own, green is true, and
vermilion is false.
"""

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

# Apart for a colour-blind reader, and none of them green, vermilion or PUMA's.
BLUE = "#0173b2"
AMBER = "#de8f05"
INDIGO = "#5e4fa2"
LILAC = "#9c8ad2"
BROWN = "#8c510a"
TAN = "#ca9161"
SLATE = "#708090"
YELLOW = "#c9b400"
SKY = "#56b4e9"
BLACK = "#222222"
DARK_GREY = "#555555"

# What names without a line take in turn.
COLOURS = [BLUE, AMBER, INDIGO, BROWN, LILAC, TAN, SLATE, YELLOW, SKY]
MARKERS = ["X", "P", "d", "p", "h"]

# True, false, and neither.
TRUE = "#009e73"
FALSE = "#d55e00"
GREY = "#888888"

# A difference whose interval lies above zero, and one below: neither is right or wrong.
ABOVE = BLUE
BELOW = AMBER


class Look(NamedTuple):
    """How a name is drawn: a colour and a marker of matplotlib."""

    colour: str
    marker: str


OURS = Look("#c8106e", "*")


# ---- names

# Of the paper's losses inside a name; alone they begin with a capital.
LOSSES = {
    "Triplet": "triplet",
    "Margin": "Margin",
    "MS": "multi-similarity",
    "PA": "Proxy-Anchor",
    "Hyp": "Hyp",
    "SoftTriple": "SoftTriple",
    "CosFace": "CosFace",
    "ArcFace": "ArcFace",
    "CurricularFace": "CurricularFace",
}


def capital(name: str) -> str:
    """`name` with a capital at its beginning, and otherwise as it is."""
    return name[:1].upper() + name[1:]


# What is shown for a name of a run, of a row of the paper or of a dataset.
NAMES: dict[str, str] = {
    "frozen": "Frozen backbone",
    "pretrained": "Frozen backbone",
    "full": "Full fine-tuning",
    "full fine-tuning": "Full fine-tuning",
    # Full fine-tuning, one model for all datasets, or a model for each (Table 2)
    **{f"universal {key}": f"Full, {name}" for key, name in LOSSES.items()},
    **{f"specific {key}": f"{capital(name)}, a model per dataset" for key, name in LOSSES.items()},
    "universal CurricularFace": "Full fine-tuning",
    "specific CurricularFace": "Full, a model per dataset",
    # Methods, as pumalib.config and the paper name them (Tables 2, 3 and 7)
    "linear": "Linear embedding",
    "linear, untrained": "Linear embedding, untrained",
    "Linear Emb.": "Linear embedding",
    "mlp3": "MLP-3",
    "MLP-3 Emb.": "MLP-3",
    "vpt": "Visual prompt (VPT)",
    "VPT": "Visual prompt (VPT)",
    "single": "Visual prompt (VPT)",
    "vpt-deep": "Visual prompts, deep",
    "prompt-pool": "Prompt pool",
    "conditional": "Prompt pool",
    "lora": "LoRA",
    "lora-stochastic": "Stochastic LoRA",
    "adaptformer": "AdaptFormer",
    "adapter": "Adapter, static",
    "static": "Adapter, static",
    "adapter-stochastic": "Adapter, stochastic",
    "stochastic": "Adapter, stochastic",
    "vpt+adapter": "VPT + static adapter",
    "single + static": "VPT + static adapter",
    "puma": "PUMA",
    "universal PUMA": "PUMA",
    "conditional + stochastic": "PUMA",
    "specific PUMA": "PUMA, a model per dataset",
    "puma+lora": "PUMA + LoRA",
    "puma+lora-stochastic": "PUMA + stochastic LoRA",
    "PUMA + Stochastic LoRA": "PUMA + stochastic LoRA",
    # Backbones and dimensions (Tables 4 and 6)
    "frozen ViT-S": "Frozen ViT-S",
    "frozen ViT-B": "Frozen ViT-B",
    "frozen ViT-L": "Frozen ViT-L",
    "CurricularFace ViT-S/16 128": "Full, ViT-S, 128",
    "CurricularFace ViT-S/16 512": "Full, ViT-S, 512",
    "CurricularFace ViT-B/16 128": "Full, ViT-B, 128",
    "PUMA ViT-S/16 128": "PUMA, ViT-S, 128",
    "PUMA ViT-S/16 512": "PUMA, ViT-S, 512",
    "PUMA ViT-B/16 128": "PUMA, ViT-B, 128",
    # Losses, as the paper and as pumalib.losses name them, and the triplet loss with its miners
    **{key: capital(name) for key, name in LOSSES.items()},
    "MS + XBM": "Multi-similarity + XBM",
    "plain triplets": "Triplets, plain",
    "triplet": "Triplet",
    "triplet random": "Triplet, random",
    "triplet all": "Triplet, all",
    "triplet, all": "Triplet, all",
    "triplet, random": "Triplet, random",
    "triplet, semi-hard": "Triplet, semi-hard",
    "triplet semihard": "Triplet, semi-hard",
    "triplet batchhard": "Triplet, batch-hard",
    "triplet, batch-hard": "Triplet, batch-hard",
    "contrastive": "Contrastive",
    "npair": "N-pair",
    "margin": "Margin",
    "ms": "Multi-similarity",
    "multi-similarity": "Multi-similarity",
    "supcon": "SupCon",
    "proxynca": "ProxyNCA",
    "proxynca++": "ProxyNCA++",
    "proxyanchor": "Proxy-Anchor",
    "proxygml": "ProxyGML",
    "crossentropy": "Cross-entropy",
    "normsoftmax": "NormSoftmax",
    "softtriple": "SoftTriple",
    "cosface": "CosFace",
    "arcface": "ArcFace",
    "curricularface": "CurricularFace",
    "hyp": "Hyp",
    "direction": "Direction",
    # Datasets of photographs
    "animals_tinyimagenet": "animals",
    "birds_cub50": "birds",
    "cars_196": "cars",
    "characters_omniglot": "characters",
    "emoji_emojione": "emoji",
    "faces_orl": "faces",
    "flowers_17": "flowers",
    "objects_caltech": "objects",
}


# A space without a width.
UNSEEN = "\u200b"


def shown(name: object) -> str:
    """What a name is called where it is shown.

    Matplotlib leaves what begins with an underscore out of legends: `UNSEEN` stands before it.
    """
    text = NAMES.get(str(name), str(name))
    if text.startswith("_"):
        return UNSEEN + text
    return text


# ---- looks

# By the names that are shown.
LOOKS: dict[str, Look] = {
    # What the others start from: a dash
    "Frozen backbone": Look(DARK_GREY, "_"),
    # What they are to reach
    "target": Look(DARK_GREY, "_"),
    "Full fine-tuning": Look(BLACK, "s"),
    "Full fine-tuning, 512": Look(BLUE, "X"),
    "PUMA": OURS,
    "PUMA, 512": Look(AMBER, "P"),
    "PUMA, first half": Look(INDIGO, "d"),
    # Methods
    "Linear embedding": Look(INDIGO, "v"),
    "MLP-3": Look(LILAC, "<"),
    "Visual prompt (VPT)": Look(BROWN, ">"),
    "Visual prompts, deep": Look(TAN, "D"),
    "Prompt pool": Look(TAN, "^"),
    "LoRA": Look(SLATE, "^"),
    "Stochastic LoRA": Look(YELLOW, "v"),
    "AdaptFormer": Look(SKY, "<"),
    "Adapter, static": Look(BLUE, ">"),
    "Adapter, stochastic": Look(AMBER, "D"),
    "VPT + static adapter": Look(LILAC, "v"),
    "PUMA + LoRA": Look(TAN, ">"),
    "PUMA + stochastic LoRA": Look(SLATE, "D"),
    # Full fine-tuning, a model for each dataset (Table 2)
    "Triplet, a model per dataset": Look(BLUE, "o"),
    "Margin, a model per dataset": Look(AMBER, "o"),
    "Multi-similarity, a model per dataset": Look(INDIGO, "o"),
    "Proxy-Anchor, a model per dataset": Look(LILAC, "o"),
    "Hyp, a model per dataset": Look(BROWN, "o"),
    "SoftTriple, a model per dataset": Look(TAN, "o"),
    "CosFace, a model per dataset": Look(SLATE, "o"),
    "ArcFace, a model per dataset": Look(YELLOW, "o"),
    "Full, a model per dataset": Look(SKY, "o"),
    # Full fine-tuning, one model for all datasets (Table 2)
    "Full, triplet": Look(BLUE, "s"),
    "Full, Margin": Look(AMBER, "s"),
    "Full, multi-similarity": Look(INDIGO, "s"),
    "Full, Proxy-Anchor": Look(LILAC, "s"),
    "Full, Hyp": Look(BROWN, "s"),
    "Full, SoftTriple": Look(TAN, "s"),
    "Full, CosFace": Look(SLATE, "s"),
    "Full, ArcFace": Look(YELLOW, "s"),
    # Kinds of models (Table 10)
    "A model per dataset": Look(BLUE, "X"),
    "One model for all": Look(AMBER, "P"),
    "Best CNN": Look(INDIGO, "d"),
    # Losses: any method with one of the paper (Tables 5 and 8), and the others of pumalib.losses
    "Triplet": Look(BLUE, "8"),
    "Margin": Look(AMBER, "8"),
    "Multi-similarity": Look(INDIGO, "8"),
    "Proxy-Anchor": Look(LILAC, "8"),
    "Hyp": Look(BROWN, "8"),
    "SoftTriple": Look(TAN, "8"),
    "CosFace": Look(SLATE, "8"),
    "ArcFace": Look(YELLOW, "8"),
    "CurricularFace": Look(SKY, "8"),
    "SupCon": Look(BLUE, "X"),
    "ProxyNCA++": Look(AMBER, "P"),
    "Triplet + XBM": Look(BLUE, "X"),
    "Multi-similarity + XBM": Look(INDIGO, "P"),
    "Triplets, plain": Look(SKY, "h"),
    "Triplet, random": Look(BLUE, "X"),
    "Triplet, all": Look(AMBER, "P"),
    "Triplet, semi-hard": Look(BLACK, "d"),
    "Triplet, batch-hard": Look(SLATE, "p"),
    "Contrastive": Look(BROWN, "h"),
    "N-pair": Look(TAN, "p"),
    "ProxyNCA": Look(BLUE, "h"),
    "ProxyGML": Look(YELLOW, "d"),
    # Datasets of mini
    "glyphs": Look(BLUE, "X"),
    "garments": Look(AMBER, "P"),
    "digits": Look(LILAC, "p"),
    "vehicles": Look(BROWN, "h"),
    "photos": Look(TAN, "X"),
    # Datasets of mini, of photographs and of the paper
    "birds": Look(INDIGO, "d"),
    "aircraft": Look(SLATE, "P"),
    "flowers": Look(YELLOW, "d"),
    "cub": Look(BLUE, "X"),
    "cars": Look(AMBER, "P"),
    "sop": Look(INDIGO, "d"),
    "inshop": Look(LILAC, "p"),
    "nabirds": Look(BROWN, "h"),
    "dogs": Look(TAN, "X"),
    "animals": Look(BLUE, "X"),
    "characters": Look(LILAC, "p"),
    "emoji": Look(BROWN, "h"),
    # Stages: the images and the pretraining of a profile (19_when_puma_wins)
    "8 drawn datasets (mini)": Look(BROWN, "o"),
    "5 datasets at 96 px, ImageNet-1k": Look(SKY, "v"),
    "5 datasets, ImageNet-1k": Look(BLUE, "s"),
    "5 datasets, ImageNet-21k": Look(LILAC, "D"),
    "8 of photographs, ImageNet-21k": Look(INDIGO, "^"),
    # Overall accuracies
    "unified": Look(BLUE, "X"),
    "harmonic": Look(AMBER, "P"),
    # Lines of single figures
    "here": Look(BLUE, "o"),
    "printed": Look(BLACK, "D"),
    "p = 0.1": Look(BLUE, "X"),
    "seed 0": Look(BLUE, "X"),
    "seed 1": Look(AMBER, "P"),
    "seed 2": Look(INDIGO, "d"),
    "seed 3": Look(LILAC, "p"),
    "seed 4": Look(BROWN, "h"),
    "edges": Look(BLUE, "X"),
    "colours": Look(AMBER, "P"),
    "family": Look(INDIGO, "d"),
    "class": Look(LILAC, "p"),
    "flat": Look(BLUE, "X"),
    "ivf": Look(AMBER, "P"),
    "hnsw": Look(INDIGO, "d"),
}


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """The look of each of the `names` of one figure, in their order.

    Names without a line in `LOOKS` are told apart within the figure: the later of two that would
    look alike takes the next colour that is free among them.
    """
    chosen: dict[str, Look] = {}
    unknown: list[Look] = []
    for name in dict.fromkeys(names):
        if shown(name) in LOOKS:
            chosen[name] = LOOKS[shown(name)]
        else:
            chosen[name] = _own_look(name, unknown)
            unknown.append(chosen[name])
    return chosen


def _own_look(name: str, taken: Collection[Look]) -> Look:
    """The look that a hash of `name` points at, or the next that is not among `taken`."""
    # Python's own hash of a string differs from process to process.
    number = zlib.crc32(str(name).removeprefix(UNSEEN).encode())
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
