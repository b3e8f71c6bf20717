"""Templates of the files of a report, which Jinja fills in."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

TEX: dict[str, Any] = {
    "block_start_string": "<%",
    "block_end_string": "%>",
    "variable_start_string": "<<",
    "variable_end_string": ">>",
    "comment_start_string": "<#",
    "comment_end_string": "#>",
}
"""Delimiters of a template for LaTeX, where braces and per cent signs already have a meaning."""


def rendered(template: str, **values: Any) -> str:
    """Fill in a template of this folder.

    Args:
        template: name of the file; in one for HTML, values are escaped.
        values: values by name; `code` is a function that marks the parts of a text between backticks as code.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup, escape

    is_html = template.endswith(".html")
    environment = Environment(
        autoescape=is_html,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
        **({} if is_html else TEX),
    )
    text = files("lightning_fl.report").joinpath(template).read_text(encoding="utf-8")
    code = lambda words: Markup(re.sub("`(.*?)`", r"<code>\1</code>", str(escape(words))))  # noqa: E731
    return environment.from_string(text).render(code=code, **values)
