"""The findings that a notebook shows at its top, from docs/findings/<profile>.md.

Each of these pages has a heading `## <notebook>` and a few sentences for every notebook that is
kept executed, and the picture that they speak of.  A notebook is kept on several profiles, each
with a finding of its own, so they do not stand in the notebook itself; in its executed copies they
do (`notebooks.open_with_finding`).
"""

import re
from typing import TYPE_CHECKING

from pumalib import config, paths

if TYPE_CHECKING:
    from IPython.display import Markdown

FOLDER = "docs/findings"
TITLE = "## What we found"
# The results as seen from a notebook that is opened in notebooks/, and from the pages.
RESULTS = "../results"
RESULTS_FROM_PAGES = "../../results"

# A heading such as "## 03_components", and the text below it.
SECTION = re.compile(
    r"^## \d+_(?P<notebook>\S+)\n(?P<text>.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE
)


def found(notebook: str, profile: str) -> "Markdown | None":
    """The findings of a notebook on a profile, to be displayed; None if there are none.

    `notebook` is its name without its number, `profile` as `config.profile` reads it.  A copy of a
    notebook, which has a name of its own, has none, nor has the profile `smoke`.
    """
    name = config.profile(profile).name
    text = read(name).get(notebook)
    if text is None:
        return None
    from IPython.display import Markdown  # the commands do without it

    text = text.replace(f"]({RESULTS_FROM_PAGES}/", f"]({RESULTS}/")
    source = f"*Of what is kept on `{name}`, from `{FOLDER}/{name}.md`.*"
    return Markdown(f"{TITLE}\n\n{text}\n\n{source}")


def read(profile: str) -> dict[str, str]:
    """The findings of a profile, by notebook name without its number."""
    page = paths.ROOT / FOLDER / f"{profile}.md"
    if not page.is_file():
        return {}
    sections = SECTION.finditer(page.read_text(encoding="utf-8"))
    return {section["notebook"]: section["text"].strip() for section in sections}
