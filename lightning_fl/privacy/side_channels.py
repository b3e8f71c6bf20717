"""What a run tells of its clients beside the models: left out, or replaced by its expected value."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_fl.communication.ledger import Bits

OF_CLIENTS = (
    "train/",
    "clients/",
    "attack/attackers",
    "codec/",
    "energy/",
    "sparse/",
    "lora/",
    "comm/uplink_bits/",
    "comm/uplink_",
    "comm/downlink_entropy",
)
"""Beginnings of columns about single clients, or about who came."""
KEPT = ("comm/uplink_bits",)
COSTS_OF_ROUNDS = ("time/round_seconds",)
"""Columns that a computer measures, and that tell how many clients it has trained."""


def is_of_clients(name: str) -> bool:
    """True if a column tells of a round's clients.

    >>> [is_of_clients(name) for name in ("val/accuracy", "val/loss_local", "train/loss", "comm/uplink_bits")]
    [False, True, True, False]
    """
    begins = name.startswith(OF_CLIENTS) and name not in KEPT
    return begins or name in COSTS_OF_ROUNDS or "_local" in name or "_clients_" in name


def is_of_server(name: str) -> bool:
    """True if a value of a validation is measured with nothing that clients own, though they own parts or models.

    >>> [is_of_server(name) for name in ("val/loss", "val/loss_server", "val/loss_dense")]
    [False, True, True]
    """
    return name.endswith(("_server", "_dense"))


def without_clients(record: Mapping[str, float]) -> dict[str, float]:
    """Return a row without what tells of a round's clients."""
    return {name: value for name, value in record.items() if not is_of_clients(name)}


def times(bits: Bits, number: float) -> Bits:
    """Return the bits of so many clients, rounded, given those of one."""
    return {way: {kind: round(count * number) for kind, count in kinds.items()} for way, kinds in bits.items()}
