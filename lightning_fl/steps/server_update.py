"""Training on the server's samples after aggregation.

- `DynamicServerUpdate`: FedDU; Liu et al., FedDUMAP, ACM TIST 2024, eq. 4-7.
- `StaticServerUpdate`: a server update of constant size, FedDU-S of the same paper.
- `ServerAsClient`: the server's training enters the average; Hybrid-FL: Yoshida et al., ICC 2020, as in the same paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.checks import Called
from lightning_fl.data.split_checks import NO_CLASSES
from lightning_fl.errors import UserError
from lightning_fl.slots import PROPOSAL, Rule, Server, ServerTurn, SetupTurn, State, Step, check_inner

StepsOrFull = Annotated[float, Ge(0), Called("tau_eff, a number of steps or 'full',")] | Literal["full"]
LEAST_ALPHA = 1e-3
"""Share α up to which the server does not train (the paper's code)."""


@dataclass(frozen=True)
class DynamicServerUpdate(Step):
    """α = f'(acc) · r · C · decay^t;  w ← w_h + α (w_s − w_h).

    w_h is the proposal, acc its accuracy on the server's samples, and w_s the model after τ local steps on them from w_h. With
    τ_eff = ατ and the mean gradient ḡ = (w_h − w_s)/(ητ) of these steps this is the paper's w_h − τ_eff η ḡ. The weight of the
    server's samples is r = n_0 D_c / (n_0 D_c + n' D_0), where n' are the samples of the round's clients, and D_c and D_0 the
    non-IID degrees of their labels and of the server's. Float buffers move like the model. If α is at most 0.001, the
    server does not train.

    Reports `feddu/accuracy`, `feddu/alpha` and `feddu/tau_eff`, which is 0 if the training was not finite.

    Attributes:
        C: C ≥ 0, scales the server's share; 0 leaves the proposal as it is. The paper tries 0.5, 1 and 1.5.
        decay: factor of the share from round to round, in (0, 1]; 1 is no decay. The paper's code tries 0.9, 0.95, 0.99 and
            0.999.
        f: f'(acc), `one_minus` for 1 − acc or `inverse` for 1 / (acc + epsilon).
        epsilon: ε > 0 in `inverse`.
        alpha_max: bound of α, at least 0. None: 1 for `inverse`, whose f' can be large, and no bound for `one_minus`.
        rule: rule of the server's steps; None: the module's own optimiser. Its uploads besides the model also move by α.
    """

    changeable = frozenset({"C", "decay", "epsilon", "alpha_max"})
    C: Annotated[float, Ge(0), Called("C, the scale of the server's update,")] = 1.0
    decay: Annotated[float, Interval(gt=0, le=1), Called("the decay of the server's update")] = 0.99
    f: Literal["one_minus", "inverse"] = "one_minus"
    epsilon: Annotated[float, Gt(0)] = 0.01
    alpha_max: Annotated[float, Ge(0)] | None = None
    rule: Rule | None = None

    def __post_init__(self) -> None:
        if self.rule is not None:
            check_inner(self, "rule", Rule, "RestartedMomentum()")

    @property
    def needs(self) -> frozenset[str]:
        """The proposal, and the entries that the rule needs or sends."""
        return self.changes | {PROPOSAL} | (self.rule.needs if self.rule else frozenset())

    @property
    def uses(self) -> frozenset[str]:
        """The entries that it needs."""
        return self.needs

    @property
    def changes(self) -> frozenset[str]:
        """The entries that the rule sends, which move by α."""
        return self.rule.provides if self.rule else frozenset()

    def rules(self) -> tuple[Rule, ...]:
        """Return the rule of the server's steps, if given."""
        return () if self.rule is None else (self.rule,)

    def check(self, server: Server) -> None:
        """Raise `UserError` without server data, their labels, or an accuracy."""
        server.require_samples()
        if not server.has_labels:
            raise UserError(
                f"a FedDU method weighs the server's data by their labels, but these data have none {NO_CLASSES}, or use FedDUS, "
                "which needs no labels."
            )
        server.try_accuracy()

    def prepare(self, turn: SetupTurn) -> None:
        """Send the number of samples per class of each client that has some to the server: q·|Y| + 32 bits."""
        for client, histogram in enumerate(turn.server.label_histograms()):
            if not histogram.any():
                continue
            turn.channel.send_up(
                client, {"scalars/labels": histogram, "scalars/samples": histogram.sum(0, keepdim=True).int()}
            )

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Move the proposal towards the model after training on the server's samples."""
        accuracy = turn.server.accuracy(turn.proposal, turn.proposed_buffers)
        alpha = self.alpha(
            accuracy, *turn.server.degrees(turn.clients), turn.server.num_samples, turn.num_samples, turn.round
        )
        turn.metrics |= {"feddu/accuracy": accuracy, "feddu/alpha": alpha, "feddu/tau_eff": 0.0}
        if alpha > LEAST_ALPHA:
            received = {"model": turn.proposal, "buffers": turn.proposed_buffers}
            for name in self.rule.needs if self.rule else ():
                received[name] = turn.shared[name] + turn.merged[name]
            trained = turn.server.train(received, self.rule)
            turn.metrics["feddu/tau_eff"] = alpha * trained.num_steps if trained.weight else 0.0
            turn.move(trained.message, alpha)
        return state

    def alpha(
        self,
        accuracy: float,
        cohort_degree: float,
        server_degree: float,
        num_server: float,
        num_cohort: float,
        round: int,
    ) -> float:
        """Return α = f'(acc) · r · C · decay^t, at most `alpha_max`.

        >>> DynamicServerUpdate(decay=0.5).alpha(0.6, 0.3, 0.3, 1000, 3000, round=1)
        0.05
        """
        own_share, others = num_server * cohort_degree, num_cohort * server_degree
        if own_share + others == 0:  # both are IID: the limit in which the degrees cancel
            own_share, others = num_server, num_cohort
        inverse = 1 - accuracy if self.f == "one_minus" else 1 / (accuracy + self.epsilon)
        alpha = inverse * own_share / (own_share + others) * self.C * self.decay**round
        bound = 1.0 if self.alpha_max is None and self.f == "inverse" else self.alpha_max
        return alpha if bound is None else min(alpha, bound)


@dataclass(frozen=True)
class StaticServerUpdate(Step):
    """α = τ_eff/τ;  w ← w_h + α (w_s − w_h).

    w_h is the proposal and w_s the model after τ local steps on the server's samples from w_h. Unlike `DynamicServerUpdate`, it
    uses neither accuracy nor labels. Float buffers move like the model. Reports `feddu/alpha` and `feddu/tau_eff`, which is 0 if
    the training was not finite.

    Attributes:
        tau_eff: τ_eff ≥ 0, effective steps of the server, or `full` for all its steps (α = 1). The paper tries 5, 10, 20 and
            full. A value above τ goes beyond w_s, with a warning.
    """

    sums_suffice = True
    changeable = frozenset({"tau_eff"})
    needs = uses = frozenset({PROPOSAL})
    tau_eff: StepsOrFull = 10

    def check(self, server: Server) -> None:
        """Raise `UserError` without server data."""
        server.require_samples()

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Move the proposal towards the model after training on the server's samples."""
        turn.metrics |= {"feddu/alpha": 0.0, "feddu/tau_eff": 0.0}
        if self.tau_eff == 0:
            return state
        trained = turn.server.train({"model": turn.proposal, "buffers": turn.proposed_buffers})
        num_steps = trained.num_steps
        alpha = 1.0 if isinstance(self.tau_eff, str) else self.tau_eff / max(num_steps, 1)
        if alpha > 1:
            rank_zero_warn(
                f"tau_eff={self.tau_eff:g} is more than the {num_steps} steps that the server makes, so its update goes beyond "
                "the model that it trained."
            )
        turn.metrics |= {"feddu/alpha": alpha, "feddu/tau_eff": alpha * num_steps if trained.weight else 0.0}
        turn.move(trained.message, alpha)
        return state


@dataclass(frozen=True)
class ServerAsClient(Step):
    """w ← (n' w_h + n_0 w_s) / (n' + n_0).

    w_h is the proposal, from n' samples. w_s is the model before the round after local training on the server's n_0 samples;
    `DynamicServerUpdate` starts from w_h instead. Float buffers are averaged alike.
    """

    sums_suffice = weighs_samples = True
    needs = uses = frozenset({PROPOSAL})

    def check(self, server: Server) -> None:
        """Raise `UserError` without server data."""
        server.require_samples()

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Include the server's model in the average."""
        trained = turn.server.train({"model": turn.params, "buffers": turn.buffers})
        share = trained.weight / (turn.num_samples + trained.weight)
        turn.move({"model": turn.params - turn.proposal, "buffers": turn.buffers - turn.proposed_buffers}, share)
        turn.move(trained.message, share)
        return state
