"""Sphinx's settings for the site: executed notebooks, docs pages and docstrings, all of it local.

`make site` gathers the pages (`gather.py`), builds them with this, and checks them (`check.py`).
"""

import functools
from pathlib import Path

import pypandoc
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

project = "PUMA, reproduced"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "_extra", ".read"]

# ---- pages

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["_static"]
# The report, which is whole in its file.
html_extra_path = ["_extra"]
html_css_files = ["site.css"]
html_copy_source = False
# Sphinx takes a relative path from where it is called.
html_search_scorer = str(Path(__file__).parent / "search.js")
# As the reader's system has it; without it every page logs an error.
html_context = {"default_mode": "auto"}
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "footer_content_items": [],
    # The sidebar has the search.
    "navbar_persistent": [],
    "show_toc_level": 2,
    "max_navbar_depth": 2,
}

myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 4

# ---- notebooks: as they were executed, their code behind a click

nb_execution_mode = "off"
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
# Widgets would come from a server of scripts; the executed notebooks have none.
nb_ipywidgets_js: dict[str, dict[str, str]] = {}

# ---- docstrings: prose with `code`, so that no markup of sections is needed

default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 70

# ---- formulas: MathML, which browsers draw themselves, as in the report

html_math_renderer = "mathml"


@functools.cache
def mathml(formula: str) -> str:
    """A formula of LaTeX, within its dollars, as MathML."""
    paragraph = pypandoc.convert_text(formula, "html", "markdown", extra_args=["--mathml"])
    return paragraph.strip().removeprefix("<p>").removesuffix("</p>")


def draw_inline(page: HTML5Translator, node: nodes.math) -> None:
    """Write a formula within a line."""
    page.body.append(mathml(f"${node.astext().strip()}$"))
    raise nodes.SkipNode


def draw_block(page: HTML5Translator, node: nodes.math_block) -> None:
    """Write a displayed formula, which a narrow screen can scroll."""
    page.body.append(f'<div class="formula">{mathml(f"$${node.astext().strip()}$$")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Register the formulas."""
    app.add_html_math_renderer("mathml", (draw_inline, None), (draw_block, None))
