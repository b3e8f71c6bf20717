"""Three turns in which only n clients of a round send each layer: common to FedLDF and its baselines.

turn 1    every client k trains and gets a score for each layer l              up: the input of the score
turn 2    for each layer the n clients with the highest scores are chosen      down: L bits for each client
turn 3    each client sends the layers that it was chosen for                  up: Σ_l s_kl d_l numbers
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Ge
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.errors import require
from lightning_fl.slots import SENT, Channel, Exchange, Message, Result, RoundContext, Upload, is_finite
from lightning_fl.vectors.layer_groups import Group, Groups, as_yaml, check_groups, resolve
from lightning_fl.vectors.submodel import Submodel


@dataclass(frozen=True)
class LayerChoice(Exchange):
    """Choose n clients for each layer by their scores; a subclass defines layers and scores.

    No layer is sent before all scores are known. So the deltas of the round's clients are kept until then, K·d numbers,
    without clients that n others outscore in every layer. A client whose score or delta is not finite is rejected; if fewer
    than n clients are left, all of them send.

    Attributes:
        n: number of clients that send each layer, 1 ≤ n ≤ K.
        print_groups: print the layers before the first round, as a map that `groups` takes.
    """

    changeable = frozenset({"n", "print_groups"})
    needs = frozenset({"model"})
    provides = frozenset({SENT})
    announces = True
    """True if turn 2 costs bits; a choice between everything and nothing is a header of the protocol and costs none."""

    n: Annotated[int, Ge(1), Called("n, the number of clients that send each layer,")] = 4
    print_groups: bool = False

    def check(self, context: RoundContext, cohort_size: int) -> None:
        """Raise `UserError` if n > K or the groups do not contain every parameter once; print the layers if asked."""
        require(
            self.n <= cohort_size,
            f"n={self.n} clients cannot send each layer if a round has {cohort_size}: give n in [1, {cohort_size}] or more "
            "clients_per_round.",
        )
        layers = self.layers(context)
        if self.print_groups:
            rank_zero_only(print)(as_yaml(layers), flush=True)

    def num_senders(self, cohort_size: int) -> int:
        """Return n."""
        return self.n

    @abstractmethod
    def layers(self, context: RoundContext) -> tuple[Group, ...]:
        """Return the L layers, a partition of the parameters."""

    @abstractmethod
    def score(self, result: Result, layers: tuple[Group, ...], channel: Channel) -> Tensor:
        """Return the scores (L,) of a client whose delta is finite; data that the server needs crosses the channel."""

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Run the three turns; a client chosen for no layer counts as accepted, but its state does not change."""
        layers = self.layers(channel.context)
        waiting: dict[int, Result] = {}
        scores: dict[int, list[float]] = {}
        contending: dict[int, list[float]] = {}
        for result in results:
            score = self.score(result, layers, channel)
            if not (score.isfinite().all() and is_finite(result.message)):
                yield Upload(result, {"scalars/score": torch.full_like(score, torch.nan)})
                continue
            waiting[result.client] = result
            scores[result.client] = contending[result.client] = score.tolist()
            for client in outscored(contending, self.n):
                del contending[client]  # its scores are below the n highest, which decide about further clients
                waiting[client] = replace(waiting[client], message=_without_delta(waiting[client].message))
        everyone = best(channel.gather(scores), self.n)
        for client in list(waiting):
            result, chosen = waiting.pop(client), everyone[client]
            if self.announces:
                chosen = channel.send_down(client, {"mask/layers": chosen})["mask/layers"]
            if not chosen.any():
                result = replace(result, state={})  # the server has accepted nothing from it
            yield upload_of(result, layers, chosen.to(result.message["model"].device).split(1), channel)


@dataclass(frozen=True)
class GroupChoice(LayerChoice):
    """Choose among layers that the user may define.

    Attributes:
        groups: definition of a layer: `layer`, `tensor`, or a map from layers to names of parameters (`lightning_fl.groups`).
    """

    groups: Groups = "layer"

    def __post_init__(self) -> None:
        check_groups(self.groups)

    def layers(self, context: RoundContext) -> tuple[Group, ...]:
        """Return the layers that `groups` defines."""
        return resolve(self.groups, context.groups, context.layout, context.buffer_layout)


def upload_of(result: Result, layers: Sequence[Group], chosen: Sequence[Tensor], channel: Channel) -> Upload:
    """Send some layers of a client's message to the server, or some of their units; see `Submodel.from_groups`."""
    context, device = channel.context, result.message["model"].device
    submodel = Submodel.from_groups(context.layout, context.buffer_layout, layers, chosen, device)
    return Upload(result, channel.send_up(result.client, result.message, submodel), submodel.masks(result.message))


def outscored(scores: Mapping[int, list[float]], n: int) -> list[int]:
    """Return the clients that n others outscore in every layer, whoever wins ties.

    >>> outscored({7: [0.5, 1.0], 2: [0.5, 3.0], 4: [0.1, 2.0]}, n=1)
    [4]
    """
    table = torch.tensor(list(scores.values()), dtype=torch.float64)
    if len(table) <= n:
        return []
    are_lower = (table < table.topk(n, dim=0).values[-1]).all(1).tolist()
    return [client for client, is_lower in zip(scores, are_lower, strict=True) if is_lower]


def best(scores: Mapping[int, list[float]], n: int) -> dict[int, Tensor]:
    """Return for each client bools (L,), True for layers with one of the n highest scores; of a tie the earlier client wins.

    >>> {client: chosen.tolist() for client, chosen in best({7: [0.5, 1.0], 2: [0.5, 3.0], 4: [0.1, 2.0]}, n=1).items()}
    {7: [True, False], 2: [False, True], 4: [False, False]}
    """
    if not scores:
        return {}
    table = torch.tensor(list(scores.values()), dtype=torch.float64)
    positions = table.argsort(dim=0, descending=True, stable=True)[:n]
    chosen = torch.zeros_like(table, dtype=torch.bool).scatter_(0, positions, True)
    return dict(zip(scores, chosen, strict=True))


def _without_delta(message: Message) -> Message:
    """Replace a delta that will not be sent by zeros without storage; buffers stay, as those of no layer are still sent."""
    return {name: x if name == "buffers" else x.new_zeros(1).expand_as(x) for name, x in message.items()}
