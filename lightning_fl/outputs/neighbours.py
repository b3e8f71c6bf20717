"""Neighbouring federations, which the results of a private run hardly distinguish.

The ε of runs with different kinds of neighbours cannot be compared: replacing a client costs twice as much as leaving
it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EPSILON = "privacy/epsilon"
"""Column of metrics.csv with ε so far."""
MORE_OR_LESS, REPLACED, REMOVED = "one client more or less", "one client replaced", "one client replaced by nothing"
REPLACED_DATA = "all data of a client replaced"
NEIGHBOURS = {"poisson": MORE_OR_LESS, "every": MORE_OR_LESS, "fixed": REPLACED, "passes": REMOVED}
"""Neighbouring federations by the way in which a round's clients are drawn."""
KINDS_OF_EPSILON = {
    "epsilon_more_or_less": MORE_OR_LESS,
    "epsilon_replaced": REPLACED,
    "epsilon_removed": REMOVED,
    "epsilon_local": REPLACED_DATA,
}
"""Neighbours by the name of their ε in reports, each an axis and a column of its own."""


def kind_of_epsilon(settings: Mapping[str, Any]) -> str | None:
    """Return the name of a run's ε in reports by its settings; None if they name no neighbours.

    >>> kind_of_epsilon({"trainer.privacy": "ClientPrivacy", "trainer.privacy.sampling": "fixed"})
    'epsilon_replaced'
    """
    privacy, sampling = settings.get("trainer.privacy"), settings.get("trainer.privacy.sampling", "poisson")
    neighbours = REPLACED_DATA if privacy == "LocalPrivacy" else NEIGHBOURS.get(sampling)
    names = [name for name, described in KINDS_OF_EPSILON.items() if described == neighbours]
    return names[0] if names and privacy is not None else None
