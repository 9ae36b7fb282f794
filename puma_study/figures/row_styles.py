"""The name, the colour and the marker of a row in every figure: two tables.

`NAMES` has the names under which methods, losses, datasets and rows are shown, and `ROW_STYLES`
colour and marker by shown name: `full` and `universal CurricularFace` share both.  A name in
neither table is shown unchanged, in a style that depends on the name alone, so that adding one
never repaints another.

Three hues have one meaning each, wherever they are drawn: PUMA's is its own, green is true, and
vermilion is false.
"""

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pumalib.config import METHODS

# Apart for a colour-blind reader (tests/test_colours.py), and none green, vermilion or PUMA's.
BLUE = "#0e6bae"
AMBER = "#ff9619"
INDIGO = "#2919bb"
LILAC = "#b167ff"
BROWN = "#9f5717"
TAN = "#d4a777"
SLATE = "#898ead"
SKY = "#4ec1ff"
BLACK = "#222222"
DARK_GREY = "#555555"

# For names that have no line in `ROW_STYLES`.
COLOURS = [BLUE, AMBER, INDIGO, BROWN, LILAC, TAN, SLATE, SKY]
MARKERS = ["X", "P", "d", "p", "h"]

# True, false, and neither.
TRUE = "#009e73"
FALSE = "#d55e00"
GREY = "#888888"

# A difference whose interval lies above zero, and one below: neither is right or wrong.
ABOVE = BLUE
BELOW = AMBER


# The lines that rows of one colour have beside a solid one; those of frozen rows are dashed.
DASHED: Any = (0, (4, 2))
DASH_DOTTED: Any = (0, (6, 1.5, 1, 1.5))
DOTTED: Any = (0, (1, 1.2))
DASH_DOTS: Any = (0, (3, 1, 1, 1, 1, 1))
LINES: list[Any] = ["-", DASH_DOTTED, DOTTED, DASH_DOTS]


class RowStyle(NamedTuple):
    """The colour, the marker and the line that matplotlib draws a name with."""

    colour: str
    marker: str
    line: Any = "-"


OURS = RowStyle("#c8106e", "*")
# The marker of a level that the others start from or should reach.
LEVEL = "_"
# The marker of a mean of other rows, a wide line below theirs.
MEAN = "."


# ---- names

# The paper's losses.
LOSSES = {
    "Triplet": "Triplet",
    "Margin": "Margin",
    "MS": "Multi-similarity",
    "PA": "Proxy-Anchor",
    "Hyp": "Hyp",
    "SoftTriple": "SoftTriple",
    "CosFace": "CosFace",
    "ArcFace": "ArcFace",
    "CurricularFace": "CurricularFace",
}


def capital(name: str) -> str:
    """`name` with its first letter as a capital, and otherwise unchanged."""
    return name[:1].upper() + name[1:]


# The name to show, by the name of a run's row, of a row of the paper, or of a dataset.
NAMES: dict[str, str] = {
    "frozen": "Frozen backbone",
    "pretrained": "Frozen backbone",
    "full": "Full fine-tuning",
    "full fine-tuning": "Full fine-tuning",
    # Full fine-tuning, one model for all datasets, or a model for each (Table 2)
    **{f"universal {key}": f"Full fine-tuning, {name}" for key, name in LOSSES.items()},
    **{
        f"specific {key}": f"Full fine-tuning, {name}, a model per dataset"
        for key, name in LOSSES.items()
    },
    # CurricularFace is the study's own loss: that of every method whose loss is not named.
    "universal CurricularFace": "Full fine-tuning",
    "specific CurricularFace": "Full fine-tuning, a model per dataset",
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
    "CurricularFace ViT-S/16 128": "Full fine-tuning, ViT-S, 128",
    "CurricularFace ViT-S/16 512": "Full fine-tuning, ViT-S, 512",
    "CurricularFace ViT-B/16 128": "Full fine-tuning, ViT-B, 128",
    "PUMA ViT-S/16 128": "PUMA, ViT-S, 128",
    "PUMA ViT-S/16 512": "PUMA, ViT-S, 512",
    "PUMA ViT-B/16 128": "PUMA, ViT-B, 128",
    # Losses, as the paper and as pumalib.losses name them, and the triplet loss with its miners
    **LOSSES,
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
    # Datasets of the paper
    "cub": "CUB",
    "inshop": "In-Shop",
    "nabirds": "NABirds",
    "sop": "SOP",
}


# A space of no width.
UNSEEN = "\u200b"


def shown(name: object) -> str:
    """The name to show for `name`; for a method and a loss as "full, ms" the names of both.

    Of a method at a length, as "puma x 4", the length follows the name.

    Matplotlib leaves names with a leading underscore out of legends: `UNSEEN` is put before it.
    """
    text = str(name)
    method, _, loss = text.partition(", ")
    trained, _, times = text.partition(" x ")
    if text in NAMES:
        text = NAMES[text]
    elif method in METHODS and loss in NAMES:
        text = f"{shown(method)}, {NAMES[loss]}"
    elif trained in METHODS and times:
        length = "usual epochs" if times == "1" else f"{times} times the epochs"
        text = f"{shown(trained)}, {length}"
    if text.startswith("_"):
        return UNSEEN + text
    return text


# ---- styles

# By shown name.
ROW_STYLES: dict[str, RowStyle] = {
    # The level that the others start from: a dash
    "Frozen backbone": RowStyle(DARK_GREY, LEVEL, DASHED),
    "Full fine-tuning": RowStyle(BLACK, "s"),
    "Full fine-tuning, 512": RowStyle(BLACK, "D", DASH_DOTTED),
    "PUMA": OURS,
    "PUMA, 512": RowStyle(OURS.colour, "P", DASH_DOTTED),
    "PUMA, first half": RowStyle(OURS.colour, "d", DOTTED),
    # Methods
    "Linear embedding": RowStyle(INDIGO, "v"),
    "MLP-3": RowStyle(LILAC, "8"),
    "Visual prompt (VPT)": RowStyle(BROWN, ">"),
    "Visual prompts, deep": RowStyle(TAN, "D"),
    "Prompt pool": RowStyle(TAN, "^", DASH_DOTTED),
    "LoRA": RowStyle(SLATE, "D"),
    "Stochastic LoRA": RowStyle(SLATE, "v", DASH_DOTTED),
    "AdaptFormer": RowStyle(SKY, "<"),
    "Adapter, static": RowStyle(BLUE, ">"),
    "Adapter, stochastic": RowStyle(AMBER, "D"),
    "VPT + static adapter": RowStyle(LILAC, "v", DASH_DOTTED),
    "PUMA + LoRA": RowStyle(TAN, ">", DOTTED),
    "PUMA + stochastic LoRA": RowStyle(SLATE, "^", DOTTED),
    # Full fine-tuning, a model for each dataset (Table 2)
    "Full fine-tuning, Triplet, a model per dataset": RowStyle(BLUE, "o", DOTTED),
    "Full fine-tuning, Margin, a model per dataset": RowStyle(AMBER, "o", DOTTED),
    "Full fine-tuning, Multi-similarity, a model per dataset": RowStyle(INDIGO, "o", DOTTED),
    "Full fine-tuning, Proxy-Anchor, a model per dataset": RowStyle(LILAC, "o", DOTTED),
    "Full fine-tuning, Hyp, a model per dataset": RowStyle(BROWN, "o", DOTTED),
    "Full fine-tuning, SoftTriple, a model per dataset": RowStyle(TAN, "o", DOTTED),
    "Full fine-tuning, CosFace, a model per dataset": RowStyle(SLATE, "o", DOTTED),
    "Full fine-tuning, ArcFace, a model per dataset": RowStyle(BLUE, "D", DASH_DOTS),
    "Full fine-tuning, a model per dataset": RowStyle(BLACK, "o", DOTTED),
    # Full fine-tuning, one model for all datasets (Table 2)
    "Full fine-tuning, Triplet": RowStyle(BLUE, "s"),
    "Full fine-tuning, Margin": RowStyle(AMBER, "s"),
    "Full fine-tuning, Multi-similarity": RowStyle(INDIGO, "s"),
    "Full fine-tuning, Proxy-Anchor": RowStyle(LILAC, "s"),
    "Full fine-tuning, Hyp": RowStyle(BROWN, "s"),
    "Full fine-tuning, SoftTriple": RowStyle(TAN, "s"),
    "Full fine-tuning, CosFace": RowStyle(SLATE, "s"),
    "Full fine-tuning, ArcFace": RowStyle(BLUE, "^", DASH_DOTTED),
    # Kinds of models (Table 10)
    "A model per dataset": RowStyle(BLUE, "X"),
    "One model for all": RowStyle(AMBER, "P"),
    "Best CNN": RowStyle(INDIGO, "d"),
    # Losses: any method with one of the paper (Tables 5 and 8), and the others of pumalib.losses
    "Triplet": RowStyle(BLUE, "o"),
    "Margin": RowStyle(AMBER, "^"),
    "Multi-similarity": RowStyle(INDIGO, "s"),
    "Proxy-Anchor": RowStyle(LILAC, "D", DASH_DOTTED),
    "Hyp": RowStyle(BROWN, "v"),
    "SoftTriple": RowStyle(TAN, "v", DASH_DOTTED),
    "CosFace": RowStyle(SLATE, "<", DOTTED),
    "ArcFace": RowStyle(BLUE, ">", DOTTED),
    "CurricularFace": RowStyle(SKY, "o", DOTTED),
    "SupCon": RowStyle(BLUE, "X", DASH_DOTS),
    "ProxyNCA++": RowStyle(AMBER, "P", DASH_DOTTED),
    "Triplet + XBM": RowStyle(BLUE, "X", DASH_DOTS),
    "Multi-similarity + XBM": RowStyle(INDIGO, "P", DASH_DOTS),
    "Triplets, plain": RowStyle(SKY, "h"),
    "Triplet, random": RowStyle(BLUE, "p"),
    "Triplet, all": RowStyle(AMBER, "D"),
    "Triplet, semi-hard": RowStyle(BLACK, "d"),
    "Triplet, batch-hard": RowStyle(SLATE, "p"),
    "Contrastive": RowStyle(BROWN, "h"),
    "N-pair": RowStyle(TAN, "p"),
    "ProxyNCA": RowStyle(BLUE, "h", DASH_DOTTED),
    "ProxyGML": RowStyle(SLATE, "d", DASH_DOTTED),
    "Cross-entropy": RowStyle(LILAC, "X", DOTTED),
    "NormSoftmax": RowStyle(INDIGO, "h", DOTTED),
    "Direction": RowStyle(TAN, "P"),
    # Datasets of mini
    "glyphs": RowStyle(BLUE, "X"),
    "garments": RowStyle(AMBER, "P"),
    "digits": RowStyle(LILAC, "p"),
    "vehicles": RowStyle(BROWN, "h"),
    "photos": RowStyle(TAN, "X"),
    # Datasets of mini, of photographs and of the paper
    "birds": RowStyle(INDIGO, "d"),
    "aircraft": RowStyle(SLATE, "P"),
    "flowers": RowStyle(SKY, "d"),
    "CUB": RowStyle(BLUE, "X"),
    "cars": RowStyle(AMBER, "P"),
    "SOP": RowStyle(INDIGO, "d"),
    "In-Shop": RowStyle(LILAC, "p"),
    "NABirds": RowStyle(BROWN, "h"),
    "dogs": RowStyle(TAN, "X"),
    "animals": RowStyle(BLUE, "X"),
    "faces": RowStyle(TAN, "X"),
    "objects": RowStyle(SLATE, "P"),
    "characters": RowStyle(LILAC, "p"),
    "emoji": RowStyle(BROWN, "h"),
    # Stages: the images and the pretraining of a profile (19_when_puma_wins)
    "8 drawn datasets (mini)": RowStyle(BROWN, "o"),
    "5 datasets at 96 px, ImageNet-1k": RowStyle(SKY, "v"),
    "5 datasets, ImageNet-1k": RowStyle(BLUE, "s"),
    "5 datasets, ImageNet-21k": RowStyle(LILAC, "D"),
    "8 of photographs, ImageNet-21k": RowStyle(INDIGO, "^"),
    # Overall accuracies
    "unified": RowStyle(BLUE, "X"),
    "harmonic": RowStyle(AMBER, "P"),
    # Lines of single figures
    "mean of these losses": RowStyle(GREY, MEAN),
    "here": RowStyle(BLUE, "o"),
    "printed": RowStyle(BLACK, "D"),
    "p = 0.1": RowStyle(BLUE, "X"),
    "seed 0": RowStyle(BLUE, "X"),
    "seed 1": RowStyle(AMBER, "P"),
    "seed 2": RowStyle(INDIGO, "d"),
    "seed 3": RowStyle(LILAC, "p"),
    "seed 4": RowStyle(BROWN, "h"),
    "edges": RowStyle(BLUE, "X"),
    "colours": RowStyle(AMBER, "P"),
    "family": RowStyle(INDIGO, "d"),
    "class": RowStyle(LILAC, "p"),
    "Flat (exact)": RowStyle(BLUE, "X"),
    "IVF": RowStyle(AMBER, "P"),
    "HNSW": RowStyle(INDIGO, "d"),
}


def styles_of(names: Iterable[str]) -> dict[str, RowStyle]:
    """The style of each of the `names` of one figure, in their order.

    Names without a line in `ROW_STYLES` get distinct styles within the figure: if two would have
    the same, the later one takes the next colour that is free among them.
    """
    chosen: dict[str, RowStyle] = {}
    unknown: list[RowStyle] = []
    for name in dict.fromkeys(names):
        if shown(name) in ROW_STYLES:
            chosen[name] = ROW_STYLES[shown(name)]
        else:
            chosen[name] = _own_style(name, unknown)
            unknown.append(chosen[name])
    return chosen


def dashes_of(styles: Mapping[str, RowStyle]) -> dict[str, Any]:
    """The line of each name of a figure: its own, the same in every figure.

    A name without a line in `ROW_STYLES` gets one that no name of its colour before it has.
    """
    found: dict[str, Any] = {}
    for name, style in styles.items():
        taken = [line for one, line in found.items() if styles[one].colour == style.colour]
        found[name] = style.line
        if shown(name) not in ROW_STYLES:
            found[name] = next((line for line in LINES if line not in taken), "-")
    return found


def _own_style(name: str, taken: Collection[RowStyle]) -> RowStyle:
    """The style that a hash of `name` points to, or the next that is not among `taken`."""
    # Python's own hash of a string differs from process to process.
    number = zlib.crc32(str(name).removeprefix(UNSEEN).encode())
    colours = _starting_at(number, COLOURS)
    markers = _starting_at(number // len(COLOURS), MARKERS)

    # With more names than colours all colours are used once before one is used twice.
    uses = Counter(style.colour for style in taken)
    colour = min(colours, key=lambda one: uses[one])
    for marker in markers:
        if RowStyle(colour, marker) not in taken:
            return RowStyle(colour, marker)
    return RowStyle(colour, markers[0])


def _starting_at(number: int, cycle: Sequence[str]) -> list[str]:
    """`cycle` rotated to begin at position `number`, counted round."""
    start = number % len(cycle)
    return [*cycle[start:], *cycle[:start]]
