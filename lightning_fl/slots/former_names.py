"""Names of version 0.2 that have changed, which work until version 0.4."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_deprecation

from lightning_fl.errors import require

UNTIL = "the former name works until version 0.4"
CALLER = 6
"""Level of the stack that a warning of a name shows: the line that has the name."""

REPLACED = {"companion": "PersonalModel", "in_phases": "HeadThenBody"}
"""Parts of the slot `personal` in place of what a method or a rule of version 0.2 declares, and nothing reads any more."""


def former_names(package: str, **present: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, which finds what it exports under its former names.

    Args:
        package: name of the package.
        **present: present names by former names.
    """

    def find(name: str) -> Any:
        if name not in present:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        rank_zero_deprecation(f"{package}.{name} is now {present[name]}; {UNTIL}.", CALLER)
        return getattr(sys.modules[package], present[name])

    return find


def require_present_names(part: Any) -> None:
    """Raise `UserError` if a method or a rule declares what has been replaced, and would train otherwise than it says."""
    for name, present in REPLACED.items():
        require(
            not getattr(part, name, None),
            f"{type(part).__name__}.{name} was of version 0.2: use lightning_fl.personal.{present}, or a part of your own, in "
            "the slot personal.",
        )


class FormerSetting:
    """What a part is given, whose `context` was `setting`."""

    context: Any

    @property
    def setting(self) -> Any:
        """Former name of `context`."""
        name = type(self).__name__
        rank_zero_deprecation(f"{name}.setting is now {name}.context; {UNTIL}.", CALLER)
        return self.context
