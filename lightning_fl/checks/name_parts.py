"""Parts of the names of layers, such as `layer1`, `0` and `conv2` of `layer1.0.conv2`, by which a user chooses layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_fl.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import nn  # not imported by commands that need no torch


def name_parts(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return given parts of names; text is one part, not a sequence of letters.

    >>> name_parts("fc1"), name_parts(["fc1", "shortcut"])
    (('fc1',), ('fc1', 'shortcut'))
    """
    return (given,) if isinstance(given, str) else tuple(given)


def check_name_parts(argument: str, given: Sequence[str], network: nn.Module, defaults: Sequence[str]) -> None:
    """Raise `UserError` if a given part is in no layer's name, unless it is a default, which fits only some networks."""
    parts = {part for path, _ in network.named_modules() for part in path.split(".") if part}
    for part in given:
        if part not in parts and part not in defaults:
            raise UserError(
                f"{argument}={part!r} is a whole part of no layer's name in {type(network).__name__}; {nearest(part, parts)}."
            )
