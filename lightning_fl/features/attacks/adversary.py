"""Adversary: the attack, its clients, and its first round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge

from lightning_fl.checks import check_between, check_fields, check_whole, whole_share
from lightning_fl.errors import require
from lightning_fl.features.attacks.attack import Attack


@dataclass(frozen=True)
class Adversary:
    """Let some clients attack. The draw depends only on the run's seed, so all methods have the same attackers.

    Attributes:
        attack: attack of these clients.
        attackers: share of the clients in [0, 1), rounded down to whole clients, or a list of their indices.
        start: first round in which they attack, from 0.
        per_round: draw the share anew from the clients of each round, instead of once from all.
    """

    attack: Attack
    attackers: float | list[int] = 0.2
    start: Annotated[int, Ge(0)] = 0
    per_round: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            isinstance(self.attack, Attack),
            f"attack must be an attack, such as SignFlip(), got {self.attack!r}.",
        )
        if isinstance(self.attackers, list | tuple):
            for client in self.attackers:
                check_whole("the index of an attacker", client, 0)
            require(
                len(set(self.attackers)) == len(self.attackers), f"attackers lists a client twice: {self.attackers}."
            )
            require(
                not self.per_round,
                "per_round draws a share of each round's clients, and attackers is a list: give a share.",
            )
        else:
            check_between("attackers, unless it is a list of clients,", self.attackers, 0, 1, "[)")

    def clients(self, num_clients: int, random: np.random.Generator) -> frozenset[int]:
        """Return the clients that attack; a larger share includes all clients of a smaller one.

        Args:
            num_clients: clients of the federation, N.
            random: random stream that depends on the seed alone.

        Raises:
            UserError: a listed client does not exist.
        """
        if isinstance(self.attackers, list | tuple):
            for client in self.attackers:
                require(
                    client < num_clients,
                    f"attackers lists client {client}, but the last of the {num_clients} clients is {num_clients - 1}.",
                )
            return frozenset(map(int, self.attackers))
        return frozenset(random.permutation(num_clients)[: self.count(num_clients)].tolist())

    def clients_of(self, cohort: Sequence[int], random: np.random.Generator) -> frozenset[int]:
        """Return the clients of a round that attack in it, if they are drawn anew; `random` depends on seed and round alone."""
        return frozenset(random.permutation(sorted(cohort))[: self.count(len(cohort))].tolist())

    def count(self, num_clients: int) -> int:
        """Return the number of attackers among so many clients.

        >>> from lightning_fl.features.attacks import NotFinite
        >>> Adversary(NotFinite(), 0.29).count(100), Adversary(NotFinite(), 0.2).count(4)
        (29, 0)
        """
        if isinstance(self.attackers, list | tuple):
            return len(self.attackers)
        return whole_share(self.attackers, num_clients)
