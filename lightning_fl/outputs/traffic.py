"""Directions whose bytes are compared: those of clients to the server, those of the server to clients, or both together."""

from __future__ import annotations

from typing import Any

COSTS: dict[str, str] = {"up": "uplink", "down": "downlink", "total": "total_traffic"}
"""Name of each direction's bytes in tables, claims and `runs.csv`."""
COLUMNS: dict[str, str] = {
    "up": "comm/total_uplink_bytes",
    "down": "comm/total_downlink_bytes",
    "total": "comm/total_bytes",
}
"""Column with the bytes of all clients so far."""


def in_directions(uplink: Any, downlink: Any) -> dict[str, Any]:
    """Return bytes by direction, of numbers or of arrays.

    >>> in_directions(1.0, 3.0)
    {'up': 1.0, 'down': 3.0, 'total': 4.0}
    """
    return {"up": uplink, "down": downlink, "total": uplink + downlink}


def in_words(traffic: str) -> str:
    """Return the name of a direction's bytes.

    >>> [in_words(traffic) for traffic in COSTS]
    ['uplink', 'downlink', 'total traffic']
    """
    return COSTS[traffic].replace("_", " ")
