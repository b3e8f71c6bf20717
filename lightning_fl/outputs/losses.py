"""Messages about lost results of a run: they go to the logger, because filters of Python's warnings must not silence them."""

from __future__ import annotations

import logging

TOO_STALE = "too stale"
"""Why the server rejects an upload that comes too many updates late."""


def say_lost(sentence: str) -> None:
    """Log in the first process that rows, files, uploads or other results of a run are lost."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only  # here, because reports do without Lightning

    rank_zero_only(logging.getLogger("lightning.pytorch.utilities.rank_zero").warning)(sentence)


def rejection_reasons(may_explode: bool, may_be_stale: bool) -> str:
    """Return why uploads may have been rejected.

    Args:
        may_explode: True if a loss guard rejects uploads.
        may_be_stale: True if the server rejects uploads that come too many updates late.

    >>> rejection_reasons(False, False), rejection_reasons(True, False), rejection_reasons(True, True)
    ('not finite', 'not finite or loss exploded', 'not finite, loss exploded or too stale')
    """
    *others, last = ["not finite", *["loss exploded"] * may_explode, *[TOO_STALE] * may_be_stale]
    return f"{', '.join(others)} or {last}" if others else last
