"""Test that methods take the slots that they do not fill themselves, from Python, in files and on the command line."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from toys import Normalised, federation, vector

from lightning_fl import FederatedTrainer, UserError, algorithms
from lightning_fl.aggregators import WeightedMean
from lightning_fl.algorithms import SCAFFOLD, Algorithm, Ditto, FedAvg, FedBN, FedKT, FedOpt, FedPAQ, FedProx, FedRep
from lightning_fl.algorithms.method import SLOTS, Method
from lightning_fl.checks import parameters_of
from lightning_fl.cli import main
from lightning_fl.codecs import Cast, Dense, TopK
from lightning_fl.exchanges import OneShot
from lightning_fl.personal import PersonalLayers
from lightning_fl.rules import LocalOptimizer, Proximal
from lightning_fl.steps import Apply, Momentum

METHODS: dict[str, Any] = {name: getattr(algorithms, name) for name in algorithms.__all__ if name != "Algorithm"}
EACH = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
GIVEN: dict[str, Any] = {
    "rule": Proximal(0.3),
    "uplink": TopK(0.3),
    "downlink": Cast("float16"),
    "exchange": OneShot(),
    "aggregator": WeightedMean("uniform"),
    "steps": [Momentum(0.3)],
    "personal": ("layers.1",),
}


@EACH
def test_python_the_parser_and_the_constructor_know_the_same_open_slots(method: type[Method]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    offered = {name.removeprefix("it.").partition(".")[0] for name in parser.add_class_arguments(method, "it")}
    assert offered == set(parameters_of(method))
    assert offered & set(SLOTS)


@EACH
def test_a_slot_is_filled_by_the_method_or_by_its_user(method: type[Method]) -> None:
    """Check for each slot: what is given is in it and all others are as without; or one sentence says why not."""
    plain = method()
    for slot, part in GIVEN.items():
        if slot in parameters_of(method) and parameters_of(method)[slot].default is not None:
            continue  # a hyper-parameter of this name
        if slot not in parameters_of(method):
            with pytest.raises(UserError, match=f"fills the slot {slot} itself"):
                method(**{slot: part})
            continue
        try:
            filled = method(**{slot: part})
        except UserError as error:
            refusal = str(error)
            assert "do not fit" in refusal or "the base method" in refusal
            continue
        for name in SLOTS:
            now, before = getattr(filled, name), getattr(plain, name)
            expected = before if name != slot else (*before, *part) if slot == "steps" else part
            if name == slot == "personal":
                own = before[1:] if method is FedRep else ()  # whose head the names choose
                expected = (PersonalLayers(part), *own) if own else (*before, PersonalLayers(part))
            assert repr(now) == repr(expected), name


def test_a_filled_slot_is_refused_with_those_that_are_open() -> None:
    with pytest.raises(
        UserError, match=r"SCAFFOLD fills the slot rule itself, and takes uplink, downlink, exchange, steps"
    ):
        SCAFFOLD(rule=Proximal(0.1))
    with pytest.raises(UserError, match=r"the base method FedPAQ\(.*\) fills the slot uplink itself, got uplink=TopK"):
        FedBN(base=FedPAQ(), uplink=TopK(0.1))
    with pytest.raises(UserError, match=r"mode='one_shot' has no round in which the slot uplink would be used"):
        FedKT(mode="one_shot", uplink=TopK(0.1))
    with pytest.raises(UserError, match="the slots of FedProx do not fit"):
        FedProx(steps=[Apply()])


def test_classes_and_their_names_are_parts() -> None:
    assert FedProx(uplink="TopK").uplink == FedProx(uplink=TopK).uplink == TopK()
    assert FedAvg(steps="Momentum").steps == FedAvg(steps=Momentum).steps == FedAvg(steps=[Momentum()]).steps
    assert Algorithm(rule="Proximal", steps=["Apply", Momentum(0.5)]).steps == (Apply(), Momentum(0.5))
    with pytest.raises(UserError, match="uplink 'topk' is unknown; did you mean 'TopK'"):
        Algorithm(uplink="topk")
    with pytest.raises(
        UserError, match=r"needs an object of ErrorFeedback, which has to know codec: give ErrorFeedback"
    ):
        FedAvg(uplink="ErrorFeedback")
    with pytest.raises(UserError, match="uplink must be of kind Codec, an object, a class or its name, got Proximal"):
        FedAvg(uplink=Proximal)
    with pytest.raises(UserError, match=r"steps must be of kind Step, .* got 3"):
        FedAvg(steps=[3])


PAIRS: dict[str, tuple[Callable[[], Algorithm], Callable[[], Algorithm]]] = {
    "FedProx": (
        lambda: FedProx(0.3, uplink=TopK(0.3), steps=[Momentum(0.5)]),
        lambda: Algorithm(rule=Proximal(0.3), uplink=TopK(0.3), steps=(Apply(), Momentum(0.5))),
    ),
    "Ditto": (
        lambda: Ditto(uplink=TopK(0.3), downlink=Cast("float16")),
        lambda: Ditto(base=Algorithm(uplink=TopK(0.3), downlink=Cast("float16"))),
    ),
    "FedBN over FedOpt": (
        lambda: FedBN(base=FedOpt(), uplink=TopK(0.3)),
        lambda: FedBN(base=FedOpt(uplink=TopK(0.3))),
    ),
}


@pytest.mark.parametrize(("one", "other"), PAIRS.values(), ids=PAIRS)
@pytest.mark.filterwarnings("ignore:.*batch norm:UserWarning", "ignore:.*gate:UserWarning")
def test_a_run_is_that_of_the_parts(
    one: Callable[[], Algorithm], other: Callable[[], Algorithm], make_trainer: Callable[..., FederatedTrainer]
) -> None:
    found = []
    for method in (one(), other()):
        torch.manual_seed(0)
        model = Normalised()
        trainer = make_trainer(max_rounds=3)
        trainer.fit(model, federation(), algorithm=method)
        found.append((vector(model), trainer.run.ledger.total_bytes("up"), trainer.run.ledger.total_bytes("down")))
    (weights, *bytes_sent), (other_weights, *other_bytes_sent) = found
    assert torch.equal(torch.as_tensor(weights), torch.as_tensor(other_weights))
    assert bytes_sent == other_bytes_sent


@pytest.mark.long
def test_the_command_line_takes_them_and_prints_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--algorithm=FedProx --algorithm.mu=0.1 --algorithm.uplink=TopK --algorithm.uplink.alpha=0.3"

    def printed(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["lightning-fl", "fit", "--config", "quickstart", *words, "--print_config"])
        with pytest.raises(SystemExit, match="0"):
            main()
        return dict(yaml.safe_load(capsys.readouterr().out)["algorithm"])

    first = printed(*words.split(), "--algorithm.steps+=Momentum")
    given = first["init_args"]
    assert (given["mu"], given["uplink"]["init_args"]["alpha"], given["downlink"]) == (0.1, 0.3, None)
    assert given["steps"][0]["class_path"].endswith("Momentum")
    Path("again.yaml").write_text(yaml.safe_dump({"algorithm": first}))
    assert printed("--config", "again.yaml") == first
    monkeypatch.setattr(
        sys,
        "argv",
        ["lightning-fl", "fit", "--config", "quickstart", "--algorithm=FedProx", "--algorithm.rule=Proximal"],
    )
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "FedProx has no parameter 'rule', because it fills this slot itself" in capsys.readouterr().err


def test_a_method_shows_what_it_was_given() -> None:
    assert repr(Ditto(FedProx(mu=0.1), strength=2.0)) == "Ditto(base=FedProx(mu=0.1), strength=2.0)"
    assert repr(FedProx(uplink="TopK")) == "FedProx(uplink='TopK')"
    assert repr(Algorithm(rule=Proximal(0.1))) == "Algorithm(rule=Proximal(mu=0.1))"
    assert [repr(method()) for method in (FedAvg, SCAFFOLD, FedBN)] == ["FedAvg()", "SCAFFOLD()", "FedBN()"]


@EACH
def test_an_empty_slot_is_one_that_is_not_given(method: type[Method]) -> None:
    """Check what the parser does, which gives every parameter."""
    parameters = parameters_of(method).items()
    empty = {name: None for name, parameter in parameters if name in SLOTS and parameter.default is None}
    assert [repr(getattr(method(**empty), slot)) for slot in SLOTS] == [repr(getattr(method(), slot)) for slot in SLOTS]


def test_what_nobody_fills_is_fedavgs() -> None:
    plain = FedAvg()
    assert (plain.rule, plain.uplink, plain.downlink) == (LocalOptimizer(), Dense(), Dense())
    assert (plain.exchange, plain.aggregator, plain.steps) == (OneShot(), WeightedMean(), (Apply(),))
