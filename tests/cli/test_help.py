"""Test that the help of a command fits a person: what can be given, in few words, under headings."""

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import Any

import pytest

from lightning_fl import algorithms
from lightning_fl.checks import parameters_of
from lightning_fl.cli import kept_help, main
from lightning_fl.cli.class_names import HIDDEN, classes_under
from lightning_fl.cli.federated_cli import FederatedCLI
from lightning_fl.trainer import FederatedTrainer
from lightning_fl.trainer.flag_facts import flags_of

Help = Callable[..., str]


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Help:
    """Return a function that prints a help in a terminal of some columns."""

    def shown(*words: str, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["lightning-fl", *words])
        with suppress(SystemExit):  # what is kept is printed without one
            main()
        return capsys.readouterr().out

    return shown


@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_of_a_command_has_flags_and_no_internals(help_of: Help, columns: int) -> None:
    printed = help_of("fit", "--help", columns=columns)
    lines = printed.splitlines()
    assert printed.startswith("usage: lightning-fl fit [--config FILE] [--FLAG VALUE] ...\n")
    assert [line for line in lines if len(line) > columns] == []
    # No environment variable for each flag, no representation of an object, no type as Python writes it.
    assert not re.findall(
        r"ENV:|ARG:|<class|functools|0x[0-9a-f]+|Optional\[|Union\[|CLASS_PATH|known subclasses", printed
    )
    assert printed.count("PL_") == 1
    words = set(re.findall(r"[\w.]+", printed))
    assert words.isdisjoint(HIDDEN - {"Callback", "Optimizer", "Checkpoint"})
    assert words.isdisjoint({"SaveFitConfig", "RoundCSVLogger", "ClientGates", "WandbRun", "MPSAccelerator"})
    assert words >= {
        *classes_under("algorithm"),
        *classes_under("trainer.callbacks"),
        "Digits",
        "ImageClassifier",
        "SGD",
    }
    flags = re.findall(r"^  (--trainer\.\w+)", printed, re.MULTILINE)
    single = set(parameters_of(FederatedTrainer)) - {"clock", "loss_guard"}
    assert single <= {flag.removeprefix("--trainer.") for flag in flags}
    assert "--trainer.clock.macs_per_second" in printed


def test_headings_stand_in_the_order_of_the_flags(help_of: Help) -> None:
    flags = flags_of(FederatedTrainer)
    assert [*flags] == [*parameters_of(FederatedTrainer)], "each flag has its facts in its annotation"
    own = [flag.group for name, flag in flags.items() if name not in ("clock", "loss_guard")]  # groups of the parser
    headings = [*dict.fromkeys(own)]
    assert [heading for heading, _ in groupby(own)] == headings, "flags of a group stand together"
    titles = [line for line in help_of("fit", "--help").splitlines() if re.match(r"\S.*:$", line)]
    assert titles[:4] == ["Options:", "Method:", titles[2], "Data, divided over clients and a server:"]
    assert [title[:-1] for title in titles if title[:-1] in headings] == headings


def test_a_command_is_given_its_own_flags_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check what is built, because each command's flags take longer than a command line is read."""
    parsers: dict[str, Any] = {}
    prepare = FederatedCLI._prepare_subcommand_parser

    def noted(cli: FederatedCLI, trainer: type, command: str, **options: Any) -> Any:
        parsers[command] = prepare(cli, trainer, command, **options)
        return parsers[command]

    monkeypatch.setattr(FederatedCLI, "_prepare_subcommand_parser", noted)
    monkeypatch.setattr(sys, "argv", ["lightning-fl", "validate", "--help"])
    monkeypatch.setattr(kept_help, "help_of", lambda _: None)  # which would be printed without a parser
    with pytest.raises(SystemExit):
        main()
    assert [name for name, parser in parsers.items() if "--trainer.max_rounds" in parser._option_string_actions] == [
        "validate"
    ]
    assert list(parsers) == ["fit", "validate", "test", "predict"]


@pytest.mark.process
@pytest.mark.parametrize("name", algorithms.__all__)
def test_the_help_of_a_method_has_plain_types(name: str, help_of: Help) -> None:
    assert not re.findall(r"<class|Optional\[|Union\[|known subclasses", help_of("fit", "--algorithm.help", name))


def test_the_help_of_a_class_is_as_short(help_of: Help) -> None:
    printed = help_of("fit", "--algorithm.help", "FedDU")
    assert printed.startswith("usage: lightning-fl fit --algorithm FedDU [--algorithm.NAME VALUE] ...\n")
    assert "--algorithm.f {one_minus,inverse}" in printed
    assert "(default: 0.99)" in printed
    assert "Literal" not in printed
    assert "lightning_fl.data.IID has no parameters." in help_of(
        "fit", "--data", "Digits", "--data.partition.help", "IID"
    )
    stock = help_of("fit", "--optimizer.help", "SGD")
    assert "usage: lightning-fl fit --optimizer SGD" in stock
    assert "(default: 1e-3) (default" not in stock
