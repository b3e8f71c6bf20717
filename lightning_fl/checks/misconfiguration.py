"""Errors about flags that `lightning.Trainer` also refuses: code that catches Lightning's exception also catches these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fl.errors import UserError


class MisconfigurationError(UserError, MisconfigurationException):
    """Error in a user's flag: a `UserError`, and also the exception that `lightning.Trainer` raises."""


@contextmanager
def misconfiguration() -> Iterator[None]:
    """Raise a `UserError` of the block as a `MisconfigurationError`."""
    try:
        yield
    except UserError as error:
        raise MisconfigurationError(str(error)) from None
