"""The study's figures, each a function from tables to a matplotlib Figure.

Read `looks` first: a row is called and drawn the same in all figures, and PUMA is drawn on top.
Tables are such as `study.Results.tidy`.  Importing this changes no setting of matplotlib or pandas:
a notebook calls `use_style` first, so that it shows its figures in their style and its tables
whole.
"""

from .claimed import claimed_and_measured, verdicts
from .looks import COLOURS, FALSE, GREY, LOOKS, NAMES, OURS, TRUE, UNSEEN, Look, looks_of, shown
from .maps import embedding_map, field, heatmap, waffle
from .panels import (
    accuracy_against_parameters,
    against,
    curves,
    gains,
    intervals,
    over_settings,
)
from .pictures import Gap, Picture, Text, contact_sheet, picture_grid, retrieval_grid
from .style import STYLE, save, use_style
from .trial import tuning_curves, where_it_wins

__all__ = [
    "COLOURS",
    "FALSE",
    "GREY",
    "LOOKS",
    "NAMES",
    "OURS",
    "STYLE",
    "TRUE",
    "UNSEEN",
    "Gap",
    "Look",
    "Picture",
    "Text",
    "accuracy_against_parameters",
    "against",
    "claimed_and_measured",
    "contact_sheet",
    "curves",
    "embedding_map",
    "field",
    "gains",
    "heatmap",
    "intervals",
    "looks_of",
    "over_settings",
    "picture_grid",
    "retrieval_grid",
    "save",
    "shown",
    "tuning_curves",
    "use_style",
    "verdicts",
    "waffle",
    "where_it_wins",
]
