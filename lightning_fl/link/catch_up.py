"""Bits that a client loads when it comes back (STC: Sattler et al., Robust and Communication-Efficient Federated Learning
From Non-i.i.d. Data, IEEE TNNLS 2020).

A client that was last there s broadcasts ago loads the sum of the s updates since then, or the whole model if that is less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_fl.slots import KINDS


@dataclass
class CatchUp:
    """Sizes of all updates of a run, and of those that each client has.

    Attributes:
        total: bits of all updates together, by kind.
        loaded: what `total` was when a client last loaded; clients that have loaded nothing are left out.
    """

    total: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    loaded: dict[int, dict[str, int]] = field(default_factory=dict)

    def bits(self, clients: Sequence[int], update: Mapping[str, int], whole: int) -> dict[str, int]:
        """Return the bits by kind of all updates that some clients lack, all clients together.

        Args:
            clients: clients that load them.
            update: bits of the present update, by kind.
            whole: bits of the whole model, the most that a client loads.

        >>> catch_up = CatchUp()
        >>> for update, clients in (({"model": 96}, [0, 1]), ({"model": 20, "mask": 4}, [0])):
        ...     catch_up.add(update, clients)
        >>> {kind: bits for kind, bits in catch_up.bits([0, 1], {"model": 20, "mask": 4}, whole=96).items() if bits}
        {'model': 60, 'mask': 12}
        """
        total, nothing, counts = self._with(update), dict.fromkeys(KINDS, 0), Counter[str]()
        for client in clients:
            loaded = self.loaded.get(client, nothing)
            missed = {kind: bits - loaded[kind] for kind, bits in total.items()}
            counts.update({"model": whole} if sum(missed.values()) > whole else missed)
        return dict(counts)

    def add(self, update: Mapping[str, int], clients: Sequence[int]) -> None:
        """Add an update, with which these clients have all."""
        self.total = self._with(update)
        self.loaded.update(dict.fromkeys(clients, self.total))

    def _with(self, update: Mapping[str, int]) -> dict[str, int]:
        return {kind: bits + update.get(kind, 0) for kind, bits in self.total.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy for a checkpoint."""
        return {"total": self.total, "loaded": dict(self.loaded)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what a checkpoint has; earlier versions saved the totals after each update, and the place of a client's."""
        self.loaded = dict(state["loaded"])
        if (totals := state.get("totals")) is None:
            self.total = state["total"]
        else:
            self.total = totals[-1]
            self.loaded = {client: totals[place] for client, place in self.loaded.items()}
