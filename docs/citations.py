"""Links on the identifiers of papers in docstrings."""

from __future__ import annotations

import re

CITATIONS = {
    r"arXiv:(\d{4}\.\d{5})": "https://arxiv.org/abs/",
    r"doi:(10\.\d{4}/[\d.]+\d)": "https://doi.org/",
    r"openreview:(\w+)": "https://openreview.net/forum?id=",
}
"""Identifiers of papers, and what stands before them in an address."""
MARKDOWN, HTML = r"[\g<0>]({address}\1)", r'<a href="{address}\1">\g<0></a>'


def cited(text: str, link: str = MARKDOWN) -> str:
    """Return a text with links on the identifiers of papers."""
    for pattern, address in CITATIONS.items():
        text = re.sub(pattern, link.replace("{address}", address), text)
    return text
