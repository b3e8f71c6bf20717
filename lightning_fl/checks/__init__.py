"""Checks of values, parameters of classes, and Lightning's classes under both of their names."""

from lightning_fl.checks.lightning_classes import hook_owner, is_a, is_lightnings, listed, overrides
from lightning_fl.checks.parameters import Remembering, needs_closure, parameters_of
from lightning_fl.checks.values import (
    LARGEST,
    LARGEST_SEED,
    MOST,
    SMALLEST,
    as_number,
    check_at_least,
    check_between,
    check_choice,
    check_positive,
    check_rounds,
    check_whole,
    is_real,
    is_whole,
    reaches,
    whole_share,
)

__all__ = [
    "LARGEST",
    "LARGEST_SEED",
    "MOST",
    "SMALLEST",
    "Remembering",
    "as_number",
    "check_at_least",
    "check_between",
    "check_choice",
    "check_positive",
    "check_rounds",
    "check_whole",
    "hook_owner",
    "is_a",
    "is_lightnings",
    "is_real",
    "is_whole",
    "listed",
    "needs_closure",
    "overrides",
    "parameters_of",
    "reaches",
    "whole_share",
]
