"""The study's figures, each a function from tables to a matplotlib Figure.

Read `row_styles` first: a row has one name, colour and marker in all figures, and PUMA is drawn on
top.  Most tables are such as `study.Results.tidy`.  Importing this changes no setting of matplotlib
or pandas: a notebook calls `use_style` first, to show figures in this style and tables whole.
"""

from .claimed import claimed_and_measured, readings
from .labels import moved_apart
from .maps import embedding_map, field, heatmap, waffle
from .panels import (
    accuracy_against_parameters,
    against,
    curves,
    gains,
    gains_over_length,
    intervals,
    over_settings,
)
from .pictures import Gap, Picture, Text, contact_sheet, picture_grid, retrieval_grid
from .row_styles import (
    COLOURS,
    FALSE,
    GREY,
    NAMES,
    OURS,
    ROW_STYLES,
    TRUE,
    UNSEEN,
    RowStyle,
    shown,
    styles_of,
)
from .style import STYLE, one_scale, save, use_style
from .trial import tuning_curves, where_it_wins

__all__ = [
    "COLOURS",
    "FALSE",
    "GREY",
    "NAMES",
    "OURS",
    "ROW_STYLES",
    "STYLE",
    "TRUE",
    "UNSEEN",
    "Gap",
    "Picture",
    "RowStyle",
    "Text",
    "accuracy_against_parameters",
    "against",
    "claimed_and_measured",
    "contact_sheet",
    "curves",
    "embedding_map",
    "field",
    "gains",
    "gains_over_length",
    "heatmap",
    "intervals",
    "moved_apart",
    "one_scale",
    "over_settings",
    "picture_grid",
    "readings",
    "retrieval_grid",
    "save",
    "shown",
    "styles_of",
    "tuning_curves",
    "use_style",
    "waffle",
    "where_it_wins",
]
