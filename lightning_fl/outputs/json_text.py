"""JSON that commands print for programs: one document, whose kind comes first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any


def json_text(kind: str, content: Mapping[str, Any]) -> str:
    """Return a document as text; numbers that are not finite are null.

    Args:
        kind: kind of the document, of those in schema.json.
        content: its content.
    """
    return json.dumps(_plain({"kind": kind, **content}), indent=2, allow_nan=False, ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    """Return a value without numbers that JSON lacks."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value
