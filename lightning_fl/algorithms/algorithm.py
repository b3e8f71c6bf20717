"""An algorithm is five filled slots."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback
from torch import nn

from lightning_fl.aggregators import WeightedMean
from lightning_fl.codecs import Dense
from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import UserError, require
from lightning_fl.exchanges import GradientTurn, OneShot
from lightning_fl.rules import LocalOptimizer
from lightning_fl.slots import (
    MEAN_GRADIENT,
    Aggregator,
    Codec,
    Exchange,
    Message,
    PruningTurn,
    Rule,
    Server,
    Setting,
    SetupTurn,
    State,
    Step,
    Validation,
)
from lightning_fl.steps import Apply
from lightning_fl.vectors.personal import personal_names


class Algorithm:
    """Rule × codecs × exchange × aggregator × steps, checked to fit; the defaults are FedAvg.

    A paper's method is a final subclass whose `__init__` names the paper's hyper-parameters and fills the slots. Anything
    that fits can also be put together here, from Python or YAML.
    """

    trains_in_rounds = True
    """Whether clients take part in the rounds; a method that does all its work before the first selects none."""

    def __init__(
        self,
        rule: Rule = LocalOptimizer(),  # noqa: B008 -- parts are frozen
        uplink: Codec = Dense(),  # noqa: B008
        downlink: Codec = Dense(),  # noqa: B008
        exchange: Exchange = OneShot(),  # noqa: B008
        aggregator: Aggregator = WeightedMean(),  # noqa: B008
        steps: Sequence[Step] | None = None,
        personal: Sequence[str] = (),
    ) -> None:
        """Fill the slots.

        Args:
            rule: What a client does with its gradients and what it reports.
            uplink: How a client's upload becomes bits.
            downlink: How the server's broadcast becomes bits.
            exchange: Who uploads what, in how many turns.
            aggregator: How uploads merge.
            steps: What the server does next, one step after the other; Apply() alone if not given.
            personal: Parameters of the module, or parts of it, that every client keeps for itself, by name.

        Raises:
            UserError: neighbouring slots do not fit; all misfits are named.
        """
        self.rule = rule
        self.uplink = uplink
        self.downlink = downlink
        needs_turn = MEAN_GRADIENT in rule.receives and MEAN_GRADIENT not in exchange.provides
        self.exchange = GradientTurn(exchange) if needs_turn else exchange
        self.aggregator = aggregator
        self.steps = (Apply(),) if steps is None else tuple(steps)
        self.personal = tuple(personal)
        self._check()

    def _check(self) -> None:
        shared = frozenset().union(*(step.shares for step in self.steps))
        consumed = frozenset().union(*(step.consumes for step in self.steps))
        before = self.exchange.provides
        problems = [
            f"{type(rule).__name__} needs {_listed(missing)}, which no step shares"
            for position, rule in enumerate(self.rules())
            if (missing := rule.receives - shared - (frozenset() if position else before))
        ]
        for part, needed in ((self.aggregator, self.aggregator.needs()), (self.uplink, self.uplink.needs())):
            if before and (missing := needed - before):
                problems.append(
                    f"{type(part).__name__} needs {_listed(missing)}, which is not among what {type(self.rule).__name__} lets "
                    "clients send before they train"
                )
        if not self.steps:
            problems.append("it has no server step, so the model would never change (Apply() is FedAvg's)")
        elif not any(step.changes_model() for step in self.steps):
            chain = ", ".join(type(step).__name__ for step in self.steps)
            problems.append(
                f"no step of {chain} proposes a change of the model, so it would never learn: begin with Apply()"
            )
        if missing := consumed - self.rule.sends - before:
            problems.append(f"the steps need {_listed(missing)}, which {type(self.rule).__name__} does not send")
        if missing := self.aggregator.needs() - self.rule.sends:
            problems.append(
                f"{type(self.aggregator).__name__} needs {_listed(missing)}, which {type(self.rule).__name__} does not send"
            )
        if missing := self.uplink.needs() - self.rule.sends - {"model"}:
            problems.append(
                f"{type(self.uplink).__name__} needs {_listed(missing)}, which {type(self.rule).__name__} does not send"
            )
        if self.uplink.needs_every_client():
            problems.append(f"{type(self.uplink).__name__} is for the downlink alone")
        if any(step.needs_uploads for step in self.steps) and not self.aggregator.keeps_uploads:
            problems.append(
                f"a step reads each client's model, which {type(self.aggregator).__name__} does not keep (Members does)"
            )
        if carried := self.downlink.change_entry():
            last = self.steps[-1] if self.steps else None
            if last is None or last.change_entry() != carried or shared - last.shares:
                problems.append(
                    f"{type(self.downlink).__name__} sends {carried[0]!r} as the last step's codec made it and nothing else, so "
                    "the last step must be Compress, or another that carries it, with the same codec, and no other may share "
                    "anything"
                )
        if self.downlink.deltas_only():
            codec = type(self.downlink).__name__
            problems.append(
                f"{codec} leaves out what is small, so it cannot send the whole model down (with the steps Apply(), "
                f"Compress({codec}(…)) and the downlink Followed({codec}(…)) the server's change goes through it)"
            )
        if problems:
            raise UserError(f"the slots of {self.name} do not fit: {'; '.join(dict.fromkeys(problems))}.")

    @property
    def name(self) -> str:
        """The class's name."""
        return type(self).__name__

    def rules(self) -> list[Rule]:
        """The clients' rule, and those by which steps train on the server."""
        return [self.rule, *(rule for step in self.steps for rule in step.rules())]

    def step_names(self) -> list[str]:
        """The key of each step's state in the run: its place in the chain and its class."""
        return [f"{position}:{type(step).__name__}" for position, step in enumerate(self.steps)]

    def share(self, states: dict[str, State]) -> Message:
        """What the steps send down with the model."""
        message: Message = {}
        for key, step in zip(self.step_names(), self.steps, strict=True):
            message.update(step.share(states[key]))
        return message

    def personal_parameters(self, module: nn.Module) -> list[str]:
        """Names of the parameters that clients own: trained, kept, never sent."""
        return personal_names(module, self.personal)

    def arrange_data(self, data: FederatedDataModule) -> FederatedDataModule:
        """The data as the clients hold them in this method: the user's, or a changed copy. A resumed run asks again."""
        return data

    def check(self, setting: Setting, server: Server, cohort_size: int) -> None:
        """Raise `UserError` where a slot does not fit the run; called before anything is trained.

        Args:
            setting: of the run.
            server: its server's side.
            cohort_size: clients of a round, K.
        """
        for rule in self.rules():
            rule.check(setting)
            require(
                self.exchange.sends_whole or not rule.needs_whole_upload,
                f"The clients of {type(rule).__name__} keep what they tell the server, which must receive all of it: "
                f"{type(self.exchange).__name__} sends parts, take OneShot.",
            )
        self.exchange.check(setting, cohort_size)
        for step in self.steps:
            step.check(server)

    def prepare(self, turn: SetupTurn) -> None:
        """The turn before the first round: what crosses in it is booked as set-up. A resumed run does not repeat it."""
        for step in self.steps:
            step.prepare(turn)

    def broadcast_pruning(self, surgery: PruningTurn) -> None:
        """What crosses because filters have been pruned: every client, who may take part later, is told which are left.

        A pruning that leaves everything is announced too: what led to it may have crossed.
        """
        if surgery.plan.filters:
            surgery.channel.send_to_all(range(surgery.setting.num_clients), {"mask/units": surgery.units})

    def validate(self, validation: Validation) -> dict[str, float]:
        """What is logged with a validation, in place of what the server's model alone would give where the names agree.

        Where clients own parts of the model, it is whole on a client only: the means over the clients then, each with what it
        owns, and under `…_local` those on the clients' own validation parts.
        """
        return mean_over_clients(validation, validation.clients()) if validation.owns else {}

    def configure_callbacks(self) -> list[Callback]:
        """Callbacks that are part of the method, for instance its pruning."""
        return []


def mean_over_clients(validation: Validation, clients: Sequence[int]) -> dict[str, float]:
    """The means over clients of what is measured with what each of them owns."""
    newcomers = [client for client in clients if not validation.has_taken_part(client)]
    begun = validation.averages() if newcomers else {}
    measured = [begun if client in newcomers else validation.averages(client) for client in clients]
    local = [found for client in clients if (found := validation.local_averages(client))]
    return _means(measured) | {f"{name}_local": value for name, value in _means(local).items()}


def _means(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each name the mean, every client counting alike."""
    return {name: sum(found[name] for found in measured) / len(measured) for name in (measured[0] if measured else ())}


def _listed(names: frozenset[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
