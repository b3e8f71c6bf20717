"""Settings of the documentation site; CONTRIBUTING.md says how to build it."""

import os
import re
import sys
from pathlib import Path
from typing import Any, get_type_hints

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from generate import generate  # noqa: E402
from markup import plain  # noqa: E402
from narrow import whole_words, with_cards, with_hanging_indents  # noqa: E402
from notebooks import FOLDER, is_notebook, with_link, write_notebooks  # noqa: E402

from lightning_fl import __version__  # noqa: E402

project = "lightning_fl"
author = "The lightning-fl developers"
version = release = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "diagrams",
    "inside",
    "sentences",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", f"{FOLDER}/*"]
nitpicky = True
# Names of other packages, whose sites the build does not read, and inner types of signatures, which have no page.
nitpick_ignore_regex = [("py:.*", r"(?!lightning_fl\.\w+\.\w+$).*|lightning_fl\.checks\..*")]

myst_heading_anchors = 4  # the anchors of repository hosts
copybutton_exclude = ".linenos, .gp, .go"

nb_execution_mode = "force"  # a cache would keep what an older version of the package printed
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_render_image_options = {"alt": "Figure that the cell above draws"}
nb_ipywidgets_js = {}  # scripts from elsewhere, which would show the progress bars
os.environ["PYTHONWARNINGS"] = "ignore:`isinstance(treespec"  # Lightning's, about torch

default_role = "code"  # docstrings write `names` as Markdown does
autosummary_generate = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autoclass_content = "both"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

smartquotes = False  # it makes a dash of the two hyphens of a flag

html_theme = "furo"
pygments_dark_style = "github-dark"  # the default underlines names of packages, as if they were links
html_static_path = ["_static"]
html_css_files = ["site.css", "notebook.css"]
html_title = f"{project} {version}"
html_copy_source = False  # and so no links to the sources of generated pages
html_show_copyright = False
html_show_sphinx = False
html_show_search_summary = False  # a page that is opened as a file cannot fetch others


def setup(app: Sphinx) -> None:
    """Make pages before each build, and read docstrings as `markup.plain` gives them."""
    app.connect("builder-inited", make_pages)
    app.connect("source-read", link_notebook)
    app.connect("source-read", index_words)
    app.connect("autodoc-before-process-signature", leave_out_ranges)
    app.connect("autodoc-process-docstring", read_plainly, priority=400)  # before napoleon
    app.connect("html-page-context", fit_narrow_screens)


def make_pages(app: Sphinx) -> None:
    """Write the pages and notebooks that are made from others and from the code."""
    generate(Path(app.srcdir))
    write_notebooks(Path(app.srcdir))


def link_notebook(app: Sphinx, name: str, source: list[str]) -> None:
    """Link a notebook's file from its page."""
    if is_notebook(source[0]):
        source[0] = with_link(name, source[0])


def index_words(app: Sphinx, name: str, source: list[str]) -> None:
    """Let the search lead from words to the place of their comment `<!-- index: word, another -->`, which hosts do not show."""

    def entries(found: re.Match[str]) -> str:
        words = (f"! {word.strip()}" for word in found[1].split(","))  # main entries, which come first
        return f"```{{index}} {', '.join(words)}\n```"

    source[0] = re.sub(r"^<!-- index: (.+) -->$", entries, source[0], flags=re.MULTILINE)


def leave_out_ranges(app: Sphinx, found: Any, bound: bool) -> None:
    """Show a parameter's type without the marks of its range, which the docstring gives in words."""
    try:
        ranged, plain_types = get_type_hints(found, include_extras=True), get_type_hints(found)
    except (NameError, TypeError):  # with names for type checkers alone, or built in
        return
    changed = {name: kind for name, kind in plain_types.items() if kind != ranged[name]}
    if changed:
        found.__annotations__.update(changed)


def read_plainly(app: Sphinx, kind: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Replace the lines of a docstring."""
    lines[:] = plain("\n".join(lines)).split("\n")
    if kind in ("attribute", "property") and ":" in lines[0]:
        lines[0] = f": {lines[0]}"  # or napoleon takes what is before the colon for the type


def fit_narrow_screens(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Prepare the HTML of a page for narrow screens."""
    context["toc"] = whole_words(context.get("toc", ""))
    context["body"] = with_cards(with_hanging_indents(whole_words(context.get("body", ""))))
