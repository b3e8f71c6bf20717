"""Test that what is not finite stays out of what clients and server keep, so that the next message is good again."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch import Callback
from toys import Perceptron, federation

from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import Changes, ErrorFeedback
from lightning_fl.link.link import Link
from lightning_fl.rules import LocalOptimizer
from lightning_fl.slots import (
    Codec,
    LocalTraining,
    Message,
    Packed,
    Payload,
    RoundContext,
    State,
    Traits,
    compressible,
    is_finite,
)
from lightning_fl.steps import Compress
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

CONTEXT = RoundContext(Layout(("a",), ((2,),)), NO_LAYOUT, num_clients=2)


@dataclass(frozen=True)
class Overflows(Codec):
    """Codec without loss that keeps something infinite of client 0's first message, or of any first one."""

    traits = Traits.CONTRACTS
    of_all: bool = False

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        offset = memory.get("data/offset", torch.zeros(1))
        sent = {name: Packed.whole(x + offset if compressible(name) else x) for name, x in message.items()}
        overflows = context.round == 0 and (self.of_all or context.draw.party == 0)
        return sent, {"data/offset": torch.tensor([torch.inf])} if overflows else dict(memory)

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        return {name: packed.content for name, packed in payload.items()}


@dataclass(frozen=True)
class Explodes(LocalOptimizer):
    """FedAvg's rule with a state that is infinite after the first round, and is added to later uploads."""

    def init(self, params: torch.Tensor) -> State:
        return {"offset": torch.zeros(1)}

    def finish(self, local: LocalTraining) -> Message:
        message, offset = super().finish(local), local.state["offset"]
        if local.context.round == 0:
            local.state = {"offset": torch.full_like(offset, torch.inf)}
        return message | {"model": message["model"] + offset}


class Watch(Callback):
    """Callback that notes the rejected uploads of each round."""

    def __init__(self) -> None:
        self.rejected: list[int] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.rejected.append(int(trainer.callback_metrics["clients/rejected"]))


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize(
    ("method", "rejected"),
    [
        (Algorithm(uplink=Overflows()), [1, 0, 0]),
        (Algorithm(uplink=ErrorFeedback(Overflows())), [1, 0, 0]),
        (Algorithm(rule=Explodes()), [6, 0, 0]),
        (Algorithm(downlink=Overflows(of_all=True)), [0, 0, 0]),
    ],
    ids=["codec", "inside error feedback", "rule", "downlink"],
)
def test_what_is_not_finite_is_not_kept(
    method: Algorithm, rejected: list[int], runner: str, make_trainer: MakeTrainer, recwarn: pytest.WarningsRecorder
) -> None:
    watch = Watch()
    trainer = make_trainer(max_rounds=3, clients_per_round=6, runner=runner, callbacks=[watch])
    trainer.fit(Perceptron(), federation(), method)
    assert watch.rejected == rejected
    assert is_finite(trainer.run.server_memory, *trainer.run.clients.values(), *trainer.run.client_memory.values())
    assert is_finite({"model": trainer.run.params})
    warned = any("is not finite, so the next broadcast is encoded like the first" in str(w.message) for w in recwarn)
    assert warned == isinstance(method.downlink, Overflows)


def test_changes_of_a_broadcast_that_is_not_finite_are_followed_by_a_whole_one() -> None:
    link = Link(CONTEXT, Changes(), Changes())
    with pytest.warns(UserWarning, match="The state of Changes after the broadcast of round 1 is not finite"):
        link.broadcast([0], {"model": torch.tensor([1.0, torch.nan])})
    link = Link(CONTEXT, Changes(), Changes(), server_memory=link.server_memory)
    assert torch.equal(link.broadcast([0], {"model": torch.ones(2)})["model"], torch.ones(2))


@dataclass(frozen=True)
class Turned(Codec):
    """Codec that turns the signs, so that what is lost is twice the message."""

    traits = Traits.NONE

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        return {name: Packed.whole(-x) for name, x in message.items()}, {}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        return {name: packed.content for name, packed in payload.items()}


def test_an_error_of_the_server_s_change_that_is_not_finite_is_not_kept() -> None:
    step, state = Compress(Turned(), feedback=True), State()
    for size, kept in ((1.0, 2.0), (3e38, 2.0)):
        turn: Any = SimpleNamespace(params=torch.zeros(2), proposal=torch.full((2,), size), context=CONTEXT)
        state = step(turn, state)
        assert state["error"].tolist() == [kept, kept]
