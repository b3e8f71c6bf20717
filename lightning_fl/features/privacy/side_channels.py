"""What a run tells of its clients beside the models: left out, or replaced by its expected value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import Callback, LambdaCallback

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


HOOKS_OF_CLIENTS = (
    "on_client_download",
    "on_client_upload",
    "on_client_prepared",
    "on_client_message",
    "on_server_message",
)
"""Hooks of a federation in which callbacks and modules see single clients."""
KNOWN = ("lightning.", "pytorch_lightning.", "lightning_fl.")
"""Packages whose callbacks are known: what they log of clients has columns of `OF_CLIENTS`, or is refused."""


def may_tell_of_clients(owner: Any) -> bool:
    """True if a callback or a module with a hook of clients may log, write or send something of single clients.

    One that declares nothing may, unless it is a callback of this package or of Lightning whose hooks are its own.

    >>> class Quiet(Callback):
    ...     tells_of_clients = False
    >>> may_tell_of_clients(Quiet()), may_tell_of_clients(LambdaCallback())
    (False, True)
    """
    declared = getattr(owner, "tells_of_clients", None)
    if declared is not None:
        return bool(declared)
    gets_hooks = type(owner).__name__ in (Callback.__name__, LambdaCallback.__name__)
    return gets_hooks or not type(owner).__module__.startswith(KNOWN)


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
