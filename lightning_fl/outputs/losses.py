"""Sentences about what a run has lost: they come from the logger, as no filter of Python's warnings may silence them."""

from __future__ import annotations

import logging


def say_lost(sentence: str) -> None:
    """Log in the first process that rows, files, uploads or other results of a run are lost."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only  # here, because reports do without Lightning

    rank_zero_only(logging.getLogger("lightning.pytorch.utilities.rank_zero").warning)(sentence)
