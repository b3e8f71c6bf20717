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
    """Sizes of all updates of a run, and how many of them each client has.

    Attributes:
        totals: bits of the first t updates together by kind, for each t from 0.
        loaded: number of the updates, from the first, that a client has; clients that have none are left out.
    """

    totals: list[dict[str, int]] = field(default_factory=lambda: [dict.fromkeys(KINDS, 0)])
    loaded: dict[int, int] = field(default_factory=dict)

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
        total, counts = self._total(update), Counter[str]()
        for num_loaded, num_clients in Counter(self.loaded.get(client, 0) for client in clients).items():
            missed = {kind: bits - self.totals[num_loaded][kind] for kind, bits in total.items()}
            if sum(missed.values()) > whole:
                missed = {"model": whole}
            counts.update({kind: bits * num_clients for kind, bits in missed.items()})
        return dict(counts)

    def add(self, update: Mapping[str, int], clients: Sequence[int]) -> None:
        """Add an update, with which these clients have all."""
        self.totals.append(self._total(update))
        self.loaded.update(dict.fromkeys(clients, len(self.totals) - 1))

    def _total(self, update: Mapping[str, int]) -> dict[str, int]:
        return {kind: bits + update.get(kind, 0) for kind, bits in self.totals[-1].items()}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy for a checkpoint."""
        return {"totals": list(self.totals), "loaded": dict(self.loaded)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what a checkpoint has."""
        self.totals, self.loaded = list(state["totals"]), dict(state["loaded"])
