"""Test the slot personal: short forms, parts that do not fit each other, and parts against the methods that have them."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from torch import nn
from toys import Normalised, federation

from lightning_fl import UserError, rules
from lightning_fl.algorithms import APFL, SCAFFOLD, Algorithm, Ditto, FedBN, FedDP, FedProx, FedRep, PFedMe
from lightning_fl.personal import HeadThenBody, KeptModel, MixedModel, PersonalLayers, PersonalModel, PersonalNorms
from lightning_fl.rules import MoreauEnvelope, Proximal, Pulled
from lightning_fl.slots import Owned, OwnTraining, Personal, Phase

SAME: dict[str, tuple[Callable[[], Algorithm], Callable[[], Algorithm]]] = {
    "FedPer": (
        lambda: FedProx(mu=0.1, personal=["output"]),
        lambda: FedProx(mu=0.1, personal=[PersonalLayers(["output"])]),
    ),
    "FedBN": (lambda: FedBN(FedProx(mu=0.1)), lambda: FedProx(mu=0.1, personal=["PersonalNorms"])),
    "FedRep": (lambda: FedRep(["output"]), lambda: Algorithm(personal=["output", HeadThenBody])),
    "Ditto": (lambda: Ditto(SCAFFOLD(), strength=0.5), lambda: SCAFFOLD(personal=[PersonalModel(Pulled(0.5))])),
    "APFL": (lambda: APFL(alpha=0.3), lambda: Algorithm(personal=[MixedModel(0.3)])),
    "PFedMe": (
        lambda: PFedMe(5.0),
        lambda: Algorithm(rule=MoreauEnvelope(5.0), aggregator=PFedMe().aggregator, personal=[KeptModel]),
    ),
    "FedBN over FedRep": (
        lambda: FedBN(FedRep()),
        lambda: Algorithm(personal=[PersonalLayers(), HeadThenBody(), PersonalNorms()]),
    ),
}


def trained(make_trainer: MakeTrainer, algorithm: Algorithm) -> Any:
    torch.manual_seed(0)
    module = Normalised()
    trainer = make_trainer(max_rounds=3, local_epochs=2)
    trainer.fit(module, federation(), algorithm)
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith("time/")}
    return dict(module.state_dict()), dict(trainer.run.clients), values


@pytest.mark.parametrize("name", SAME)
def test_a_method_is_its_slots(name: str, make_trainer: MakeTrainer) -> None:
    method, slots = (trained(make_trainer, make()) for make in SAME[name])
    assert all(equal_states(one, other) for one, other in zip(method, slots, strict=True))


def test_names_of_layers_are_one_part() -> None:
    assert Algorithm(personal=["a", KeptModel(), "b.weight"]).personal == (
        PersonalLayers(("a", "b.weight")),
        KeptModel(),
    )
    assert Algorithm(personal=["PersonalNorms"]).personal == Algorithm(personal=[PersonalNorms]).personal
    assert Algorithm().personal == ()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Algorithm(personal=[KeptModel(), MixedModel()]), ["KeptModel and MixedModel", "leave one out"]),
        (
            lambda: Algorithm(personal=[HeadThenBody(), HeadThenBody(2)]),
            ["divide a client's training", "leave one out"],
        ),
        (
            lambda: Algorithm(rule=Proximal(), personal=[HeadThenBody()]),
            ["HeadThenBody", "Proximal", "use LocalOptimizer"],
        ),
        (lambda: Algorithm(personal=["PersonalNorm"]), ["'PersonalNorm' is unknown", "'PersonalNorms'"]),
        (lambda: Algorithm(personal="output"), ["a list of parts", "['output']"]),  # type: ignore[arg-type]
        (lambda: Algorithm(personal=[PersonalModel]), ["PersonalModel(rule=…)"]),  # type: ignore[list-item]
        (lambda: Algorithm(personal=[Proximal()]), ["kind Personal", "Proximal"]),  # type: ignore[list-item]
        (lambda: PersonalModel(rule="Pulled"), ["by a rule", "'Pulled'"]),  # type: ignore[arg-type]
        (
            lambda: PersonalModel(rules.MoreauEnvelope()),
            ["once on each minibatch", "MoreauEnvelope takes 5", "KeptModel"],
        ),
        (lambda: PersonalNorms("al"), ["'al'", "did you mean 'all'"]),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_refused_in_a_sentence(make: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert [word for word in words if word not in str(error.value)] == []


def test_clients_that_own_the_whole_model_are_refused(make_trainer: MakeTrainer) -> None:
    names = [name for name, _ in Normalised().named_parameters()]
    with pytest.raises(UserError, match="clients own all trainable parameters of Normalised"):
        make_trainer().fit(Normalised(), federation(), Algorithm(personal=names))


class Averaged(Personal):
    """Keep the mean of the trained models of all rounds, as an own method might."""

    keeps_model = True

    def init(self, received: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"count/scalars": received.new_zeros(1)}

    def finish(self, training: OwnTraining) -> None:
        trained, count = training.trained(), training.own.state["count/scalars"] + 1
        trained.params = training.own.params.lerp(trained.params, 1 / count)
        trained.state = {"count/scalars": count}
        training.own = trained


class Zeroing(Personal):
    """Set its own model to a number in place, which may be no number."""

    keeps_model = True
    changeable = frozenset({"value"})

    def __init__(self, value: float) -> None:
        self.value = value

    def init(self, received: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"count/scalars": received.new_zeros(1)}

    def finish(self, training: OwnTraining) -> None:
        for tensor in (training.own.params, training.own.buffers, *training.own.state.values()):
            tensor.fill_(self.value)


class Alternating(Personal):
    """Own the norms, and train them and the rest in turns."""

    has_phases = True

    def owned(self, module: torch.nn.Module) -> Owned:
        return Owned(frozenset({"norm.weight", "norm.bias"}))

    def phase(self, local: Any) -> Phase:
        return Phase.PERSONAL if local.num_steps % 2 else Phase.SHARED


def test_a_part_of_one_s_own_keeps_a_model_and_its_state(make_trainer: MakeTrainer) -> None:
    _, clients, values = trained(make_trainer, Algorithm(personal=[Averaged()]))
    assert {"val/loss", "val/loss_server"} <= values.keys()
    assert all(1 <= state["own/count/scalars"].item() <= 3 for state in clients.values())


def test_a_part_may_change_its_own_model_in_place(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Check that neither the server's model nor, after a failure, the client's earlier one changes."""
    plain, _, _ = trained(make_trainer, Algorithm())
    server, clients, _ = trained(make_trainer, Algorithm(personal=[Zeroing(0.0)]))
    assert equal_states(plain, server)
    assert all(not state["own/model"].any() for state in clients.values())
    part, kept = Zeroing(1.0), []
    for rounds, value in ((1, 1.0), (2, torch.nan)):
        part.value = value
        trainer = make_trainer(
            max_rounds=rounds, clients_per_round=6, default_root_dir=tmp_path, enable_checkpointing=True
        )
        with nullcontext() if rounds == 1 else pytest.warns(UserWarning, match="own model is not finite"):
            trainer.fit(Normalised(), federation(), Algorithm(personal=[part]), ckpt_path="last" if kept else None)
        kept.append(dict(trainer.run.clients))
    assert equal_states(*kept)


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_a_part_of_one_s_own_has_phases(runner: str, make_trainer: MakeTrainer) -> None:
    """Check that steps alternate: with one step a round only the first group trains."""
    module = Normalised()
    start = copy.deepcopy(module.state_dict())
    trainer = make_trainer(max_rounds=1, local_epochs=None, local_steps=1, runner=runner)
    trainer.fit(module, federation(), Algorithm(personal=[Alternating()]))
    for state in trainer.run.clients.values():
        assert torch.equal(state["personal"], torch.cat([start["norm.weight"], start["norm.bias"]]))
    assert not torch.equal(module.output.weight, start["output.weight"])


class WithConvolution(Normalised):
    """Module with batch normalisation whose hidden neurons are filters of one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Conv2d(3, 4, 1)  # type: ignore[assignment]
        self.example_input_array = torch.zeros(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.hidden(self.norm(x)[..., None, None])).flatten(1))


def test_as_many_clients_are_validated_as_asked_for(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_fl.evaluation import validation

    measured: list[int] = []
    plain = validation.ModelValidation._measure

    def counted(self: Any, client: int, *rest: Any) -> dict[str, float]:
        measured.append(client)
        return plain(self, client, *rest)

    monkeypatch.setattr(validation.ModelValidation, "_measure", counted)
    for flags, method, most in (
        ({}, FedBN(), 6),
        ({"validation_clients": 2}, FedBN(), 2),
        ({}, FedBN(FedDP(keep=1, validation_clients=3)), 3),
        ({"validation_clients": 2}, FedBN(FedDP(keep=1, validation_clients=3)), 3),
        ({"validation_clients": 2}, FedDP(FedBN(), keep=1), 2),
    ):
        measured.clear()
        trainer = make_trainer(max_rounds=1, clients_per_round=6, **flags)
        trainer.fit(WithConvolution(), federation(), method)
        assert len(measured) == most
    with pytest.raises(UserError, match="validation_clients is 50, but the federation has 6 clients"):
        make_trainer(validation_clients=50).fit(Normalised(), federation(), FedBN())
    with pytest.warns(UserWarning, match="validation_clients has no effect, because clients of FedProx keep nothing"):
        make_trainer(validation_clients=2).fit(Normalised(), federation(), FedProx())
