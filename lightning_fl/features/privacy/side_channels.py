"""Side channels of a run: values about clients besides the models, left out or replaced by expected values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.callbacks import Callback, LambdaCallback

OF_CLIENTS = ("train/", "clients/")
"""Prefixes of the round's own columns about single clients, or about who took part."""
COSTS_OF_ROUNDS = ("time/round_seconds",)
"""Measured columns that reveal how many clients a computer has trained."""


HOOKS_OF_CLIENTS = (
    "on_client_download",
    "on_client_upload",
    "on_client_prepared",
    "on_client_message",
    "on_server_message",
)
"""Hooks of a federation in which callbacks and modules see single clients."""
KNOWN = ("lightning.", "pytorch_lightning.", "lightning_fl.")
"""Packages whose callbacks are known: what they log of clients is in their `columns_of_clients`, or is refused."""


def may_tell_of_clients(owner: Any) -> bool:
    """True if a callback or a module with a hook of clients may log, write or send something of single clients.

    A callback without a declaration may, unless it is a callback of this package or of Lightning with unchanged hooks. A
    callback with `columns_of_clients`, prefixes of names, reports on clients only in these columns, which are left out.

    >>> class Quiet(Callback):
    ...     tells_of_clients = False
    >>> class Careful(Callback):
    ...     columns_of_clients = ("mine/",)
    >>> may_tell_of_clients(Quiet()), may_tell_of_clients(Careful()), may_tell_of_clients(LambdaCallback())
    (False, False, True)
    """
    declared = getattr(owner, "tells_of_clients", None)
    if declared is not None:
        return bool(declared)
    gets_hooks = type(owner).__name__ in (Callback.__name__, LambdaCallback.__name__)
    is_known = type(owner).__module__.startswith(KNOWN) or hasattr(owner, "columns_of_clients")
    return gets_hooks or not is_known


def told_by(callbacks: Iterable[Callback]) -> tuple[str, ...]:
    """Return the prefixes of columns in which callbacks report on clients, as they declare them."""
    return tuple(name for callback in callbacks for name in getattr(callback, "columns_of_clients", ()))


def is_of_clients(name: str, told: tuple[str, ...] = ()) -> bool:
    """True if a column is about a round's clients; `told` are the prefixes of callbacks' columns about clients.

    >>> [is_of_clients(name, ("mine/",)) for name in ("val/accuracy", "val/loss_local", "train/loss", "mine/loss")]
    [False, True, True, True]
    """
    begins = name.startswith((*OF_CLIENTS, *told))
    return begins or name in COSTS_OF_ROUNDS or "_local" in name or "_clients_" in name


def is_of_server(name: str) -> bool:
    """True if a validation value uses no client's own parts or models, though clients own some.

    >>> [is_of_server(name) for name in ("val/loss", "val/loss_server", "val/loss_dense")]
    [False, True, True]
    """
    return name.endswith(("_server", "_dense"))
