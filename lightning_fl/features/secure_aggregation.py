"""Secure aggregation around a round: which clients are in no sum, and sums that are lost."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_fl.engine.roles import Observer, Roles, Round
from lightning_fl.outputs.losses import say_lost
from lightning_fl.slots import Result, is_finite


class SumsOfClients(Observer):
    """Lets the server see only sums over a round's clients."""

    def __init__(self, adds_noise: bool) -> None:
        """Say nothing yet.

        Args:
            adds_noise: True if the server adds noise to the sum, also to a lost one.
        """
        self._says_lost, self._adds_noise = False, adds_noise

    def around(self, roles: Roles) -> Roles:
        """Return the roles of a round in which clients that will not keep their part of it are in no sum."""
        watched = roles.watched_by(self)
        return replace(watched, train=lambda job, clients: map(_out_of_the_sum_if_lost, roles.train(job, clients)))

    def end_round(self, finished: Round) -> dict[str, float]:
        """Return how many uploads are lost; say once that too few clients answered for a sum."""
        outcome, secure_sum = finished.outcome, finished.link.secure_sum
        if outcome.num_lost and secure_sum is not None and not self._says_lost:
            self._says_lost, n = True, secure_sum.num_clients
            change = "only noise changed the model" if self._adds_noise else "the model did not change"
            say_lost(
                f"Round {finished.number}: {outcome.num_lost} of {n} clients answered, and a secure sum over {n} needs "
                f"{secure_sum.protocol.threshold(n)}, so it is lost and {change}."
            )
        return {"clients/lost": outcome.num_lost}


def _out_of_the_sum_if_lost(result: Result) -> Result:
    """Return a result, with NaN as its message if its client will not keep its part of the round: it must not be in a sum."""
    if not is_finite(result.owned, result.state):
        result.message = {name: torch.full_like(entry, torch.nan) for name, entry in result.message.items()}
    return result
