"""Base class of algorithms with its six slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms.compatibility import (
    Slots,
    asks_clients,
    incompatibilities,
    mask_incompatibilities,
    name_of,
    pace_incompatibilities,
    readers_of_single_clients,
    sums_to_declare,
)
from lightning_fl.algorithms.given_parts import made, made_personal, made_steps
from lightning_fl.checks import Remembering, parameters_of
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
    Gradients,
    Message,
    Owned,
    Pace,
    Personal,
    PruningTurn,
    RoundContext,
    Rule,
    Server,
    SetupTurn,
    State,
    Step,
    Traits,
    Validation,
    has_client_models,
    model_keeper,
    owned_by,
)
from lightning_fl.steps import Apply


class Algorithm(Remembering):
    """Method with six slots: rule, codecs, exchange, aggregator, steps and personal. The defaults are FedAvg.

    The constructor checks that the parts fit. A paper's method is a final subclass, whose `__init__` takes the paper's
    hyper-parameters and fills the slots. Use this class for other combinations, in Python or YAML.
    """

    trains_in_rounds = True
    """True if clients take part in the rounds; False if one round without clients follows the work before the first round."""
    pools_clients = False
    """True if `arrange_data` gives all samples to one client, which makes as many steps as a round's clients together."""
    pace: Pace | None = None
    """When the server makes its next model; None: every round waits for its clients."""
    validation_clients: int | None = None
    """Number of clients to validate; None: the trainer's flag decides."""
    setup_reads_clients = False
    """True if clients send something before the first round, other than the steps' requests."""
    changeable = frozenset[str]()
    """Names of the method's own hyper-parameters, besides those of its parts, that a resumed run may change."""

    def __init__(
        self,
        rule: Rule = LocalOptimizer(),  # noqa: B008 -- parts are frozen
        uplink: Codec = Dense(),  # noqa: B008
        downlink: Codec = Dense(),  # noqa: B008
        exchange: Exchange = OneShot(),  # noqa: B008
        aggregator: Aggregator = WeightedMean(),  # noqa: B008
        steps: Sequence[Step] | None = None,
        personal: Sequence[Personal | str] = (),
    ) -> None:
        """Fill the slots with parts: objects, or classes without arguments and their names.

        Args:
            rule: Optimiser steps of a client, and its upload.
            uplink: Codec of the clients' uploads.
            downlink: Codec of the server's broadcast.
            exchange: Turns of a round, and the parts that clients upload.
            aggregator: Merges the uploads.
            steps: The server's steps after aggregation, in this order; Apply() alone if not given.
            personal: Values that every client keeps for itself: parts, or, in place of PersonalLayers(names), the names of
                parameters, buffers or submodules.

        Raises:
            UserError: a part is of another slot, or some slots do not fit each other; the message names all problems.
        """
        self.rule: Rule = made("rule", rule)
        self.personal = made_personal(personal)
        self.uplink: Codec = made("uplink", uplink)
        self.downlink: Codec = made("downlink", downlink)
        turns: Exchange = made("exchange", exchange)
        needs_turn = MEAN_GRADIENT in self.rule.needs and MEAN_GRADIENT not in turns.provides
        self.exchange = GradientTurn(turns) if needs_turn else turns
        self.aggregator: Aggregator = made("aggregator", aggregator)
        self.steps = (Apply(),) if steps is None else made_steps(steps)
        problems = incompatibilities(self._slots)
        require(not problems, f"the slots of {self.name} do not fit: {'; '.join(problems)}.")

    @property
    def _slots(self) -> Slots:
        return Slots(self.rule, self.uplink, self.downlink, self.exchange, self.aggregator, self.steps, self.personal)

    @property
    def name(self) -> str:
        """Name of the class."""
        return type(self).__name__

    def __repr__(self) -> str:
        defaults = {name: parameter.default for name, parameter in parameters_of(type(self)).items()}
        chosen = [f"{name}={value!r}" for name, value in self.given_arguments.items() if value != defaults.get(name)]
        return f"{self.name}({', '.join(chosen)})"

    def rules(self) -> list[Rule]:
        """Return the clients' rules, and the rules of the steps' trainings on the server."""
        client_rules = [self.rule, *(rule for part in self.personal for rule in part.rules())]
        return [*client_rules, *(rule for step in self.steps for rule in step.rules())]

    @property
    def model_keeper(self) -> Personal | None:
        """Part by which each client keeps a whole model of its own and predicts with it; None if there is none."""
        return model_keeper(self.personal)

    @property
    def num_models(self) -> int:
        """Number of models that a client trains in a round: one, or two with a model of its own."""
        return max((part.num_models for part in self.personal), default=1)

    @property
    def gradients_per_step(self) -> int:
        """Number of gradients per step, over all models at which the client or its rule computes one."""
        others = (Gradients.MINIBATCH_AT_RECEIVED, Gradients.MINIBATCH_AT_POINT, Gradients.REPRESENTATIONS)
        return self.num_models + sum(one in self.rule.reads for one in others)

    @property
    def passes_at_received(self) -> int:
        """Extra passes over a client's samples for gradients at the received model."""
        return (Gradients.FULL_AT_RECEIVED in self.rule.reads) + (MEAN_GRADIENT in self.exchange.provides)

    def owned(self, module: nn.Module) -> Owned:
        """Return the names of the module's parameters and buffers that each client owns: trains, keeps and never sends."""
        return owned_by(self.personal, module)

    @property
    def chain(self) -> list[Step]:
        """Return the server's steps in the order in which it takes them, those inside others too."""
        return self._slots.chain

    def step_names(self) -> list[str]:
        """Return the key of each step's state in the run: its position in the chain and its class."""
        return [f"{position}:{type(step).__name__}" for position, step in enumerate(self.steps)]

    def share(self, states: dict[str, State]) -> Message:
        """Return the entries that the steps send down with the model, given the state of each step by its key."""
        message: Message = {}
        for key, step in zip(self.step_names(), self.steps, strict=True):
            message.update(step.share(states[key]))
        return message

    def encoded(self, states: dict[str, State]) -> dict[str, Tensor]:
        """Return the bits of shared entries that steps have encoded, by name; see `Step.encoded`."""
        keyed = zip(self.step_names(), self.steps, strict=True)
        return {name: bits for key, step in keyed for name, bits in step.encoded(states[key]).items()}

    def evaluated(self, params: Tensor, states: Mapping[str, State]) -> Tensor:
        """Return the model (d,) to validate and test, given the server's (d,) and the states of steps by their keys."""
        for key, step in zip(self.step_names(), self.steps, strict=True):
            if key in states:
                params = step.evaluated(params, states[key])
        return params

    def arrange_data(self, data: FederatedDataModule) -> FederatedDataModule:
        """Return the data as the clients hold them: the user's data, or a changed copy. A resumed run calls it again."""
        return data

    def check(self, context: RoundContext, server: Server, cohort_size: int) -> None:
        """Raise `UserError` if a slot does not fit the run; called before any training.

        Args:
            context: facts about the run.
            server: the server's own samples, and training on them.
            cohort_size: clients of a round, K.
        """
        self._check_pace()
        self.rule.check(context)
        for part in self.personal:
            part.check(context)
        for rule in (rule for step in self.steps for rule in step.rules()):
            rule.check(context)
        self.exchange.check(context, cohort_size)
        self.aggregator.check(cohort_size)
        self._check_senders(cohort_size)
        if Traits.SENDS_FEW in self.uplink.traits and self.aggregator.is_median:
            rank_zero_warn(
                f"{self.uplink} sends less than half of the numbers, and others count as 0, so the median of a number stays 0, "
                "and the parameter as it is, unless most clients send it: use another aggregator, or a larger alpha."
            )
        for codec in (self.uplink, self.downlink):  # that of a step is inside the downlink
            codec.check(context)
        for step in self.steps:
            step.check(server)

    def _check_senders(self, cohort_size: int) -> None:
        """Raise `UserError` if fewer clients send a number than the aggregator needs of it."""
        num_senders = self.exchange.num_senders(cohort_size)
        try:
            self.aggregator.check(num_senders)
        except UserError as error:
            raise UserError(
                f"{name_of(self.exchange)} lets {num_senders} of {cohort_size} clients send a number, too few for "
                f"{self.aggregator}: let more clients send it, or use MaskedMean."
            ) from error

    def _check_pace(self) -> None:
        """Raise `UserError` if a part needs rounds that wait for their clients, and the method has none."""
        problems = [] if self.pace is None else pace_incompatibilities(self._slots)
        require(not problems, f"{self.name} does not wait for the clients of a round, and {'; '.join(problems)}.")

    def readers_of_single_clients(self, has_server_samples: bool = True) -> list[tuple[str, str]]:
        """Return the slots and names of parts that need more than sums over a round's clients; [] if none does.

        Args:
            has_server_samples: true if the server has samples, so that no callback uses a client's samples instead.
        """
        readers = [(slot, name_of(part)) for slot, part in readers_of_single_clients(self._slots)]
        if self.pace is not None:
            readers.append(("pace", type(self.pace).__name__))
        asking = [
            type(callback).__name__
            for callback in self.configure_callbacks()
            if asks_clients(callback, has_server_samples)
        ]
        return [*readers, *(("callbacks", name) for name in asking)]

    def sums_to_declare(self) -> str:
        """Return the declarations that parts of users may lack for a server that sees only sums; empty without such parts."""
        return sums_to_declare(self._slots)

    def check_pruning(self, source: str) -> None:
        """Raise `UserError` if clients may be training models of other sizes when `source` prunes the server's model."""
        require(
            self.pace is None,
            f"{source} would prune the server's model, and clients of {self.name} train on earlier ones: use a method whose "
            "rounds wait for their clients, such as FedAvg.",
        )
        require(
            not self.exchange.cuts,
            f"{source} would prune the model, which {self.name} cuts for each client itself: use a method whose clients train "
            "the whole model, such as FedAvg.",
        )

    def check_mask(self, source: str) -> None:
        """Raise `UserError` if the method cannot follow the pruning mask of `source`, or a codec cannot encode what is left."""
        self.check_pruning(source)
        problems = mask_incompatibilities(self._slots)
        require(not problems, f"{source} sets a pruning mask, and {'; '.join(problems)}.")

    def prepare(self, turn: SetupTurn) -> None:
        """Take the turn before the first round; its transfers count as set-up. A resumed run does not repeat it."""
        for step in self.steps:
            step.prepare(turn)

    def broadcast_pruning(self, turn: PruningTurn) -> None:
        """Send the mask of the remaining filters to all clients, as each may take part later.

        Called after every structured pruning by callbacks, even if it removed no filter, because the messages that led to this
        decision may have to be counted.
        """
        if turn.plan.filters:
            turn.channel.send_to_all(turn.context.everyone, {"mask/units": turn.units})

    def validate(self, validation: Validation) -> dict[str, float]:
        """Return values to log with a validation, by name; they replace those of the server's model with the same names.

        If clients own parts of the model, only a client has a complete model. The values are then means over the clients'
        models, and `…_local` are the means on the clients' own validation samples. If clients predict with models of their
        own, `…_server` are the values of the server's model. If clients train smaller networks, `…_width_` and the share of
        units are the values of these networks.
        """
        means = validation.client_means() if validation.owns else {}
        values = dict(means)
        if has_client_models(self.personal):
            values |= {f"{name}_server": value for name, value in validation.averages().items()}
        for part in self.personal:
            values |= part.validate(validation, means)
        for width in self.exchange.validated_widths:
            values |= {f"{name}_width_{width.share:g}": value for name, value in validation.averages_at(width).items()}
        return values

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that are part of the algorithm, such as its pruning."""
        return [callback for part in self.personal for callback in part.configure_callbacks()]
