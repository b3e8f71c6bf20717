"""Cells of CSV files that people open in spreadsheets."""

from __future__ import annotations

from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of a text that a spreadsheet computes as a formula, which may open files and addresses (OWASP, CSV Injection)."""


def as_cell(value: Any) -> Any:
    """Return a value with an apostrophe before a text that a spreadsheet would take for a formula; numbers stay.

    >>> as_cell("=1+1"), as_cell("FedAvg"), as_cell(-1.5)
    ("'=1+1", 'FedAvg', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
