"""Tables as HTML that GitHub and JupyterLab show alike."""

import re
from itertools import product

import pandas as pd
from pandas.io.formats.style import Styler


def marked(table: pd.DataFrame, values: pd.DataFrame) -> Styler:
    """`table` to be shown: in each column of `values`, fractions, the best is bold and the second underlined, by tags:
    GitHub drops styles, as Lab does in notebooks that it does not trust.  What is in brackets stands below."""

    def text(cell):
        if isinstance(cell, str):
            return re.sub(r" ([\[(].*?[])])", lambda m: f"<br><small>{m[1].replace(' ', '&nbsp;')}</small>", cell)
        return "" if pd.isna(cell) else f"{cell:,.1f}" if isinstance(cell, float) else f"{cell:,}"

    texts = table.map(text).astype(str)
    places = (100 * values).round(1).rank(method="dense", ascending=False).reindex(table.index)
    for name, (place, tag) in product(texts.columns.intersection(values.columns), ((1, "b"), (2, "u"))):
        told = texts[name].str.replace("^([^<]+)", rf"<{tag}>\1</{tag}>", regex=True)  # of ours, not what is below
        texts[name] = texts[name].where(places[name] != place, told)
    return texts.style.set_table_styles([{"selector": "td, th", "props": "padding: 0.3em 0.2em"}])
