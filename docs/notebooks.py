"""Notebooks among the pages: write each as an .ipynb file to docs/reference/notebooks/, and link it from its page."""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbformat

FOLDER = "reference/notebooks"
"""Folder of the files, in docs/; git ignores it."""
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:)[^)]*\)")
"""Links to pages of the site, where a downloaded notebook is not."""
NEEDED = "pip install -e '.[notebook]'"
"""What a notebook needs, from a clone of the repository; its file says so below the title if the page does not."""


def is_notebook(text: str) -> bool:
    """True if a page has cells that run."""
    return "\n```{code-cell}" in text


def write_notebooks(docs: Path) -> None:
    """Write the file of each page that is a notebook."""
    for page in sorted((docs / "tutorials").glob("*.md")):
        if is_notebook(page.read_text(encoding="utf-8")):
            path = docs / FOLDER / f"{page.stem}.ipynb"
            path.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook(page), path)


def notebook(page: Path) -> nbformat.NotebookNode:
    """Return a page as a notebook whose text has no links to other pages."""
    read = jupytext.read(page)
    for number, cell in enumerate(read.cells):
        cell.id = f"cell-{number}"  # else random, and the file another one at each build
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(r"\1", cell.source)
    title = read.cells[0]
    if NEEDED not in title.source:
        title.source = re.sub(
            r"^(# .+)$",
            rf"\1\n\nNeeds `{NEEDED}` from a clone of the repository.",
            title.source,
            count=1,
            flags=re.MULTILINE,
        )
    return read


def with_link(name: str, text: str) -> str:
    """Return a notebook's page with a link to its file below the title."""
    stem = name.rpartition("/")[2]
    link = f"{{download}}`Download this page as a notebook </{FOLDER}/{stem}.ipynb>`"
    return re.sub(r"^(# .+\n)", rf"\1\n{link}\n", text, count=1, flags=re.MULTILINE)
