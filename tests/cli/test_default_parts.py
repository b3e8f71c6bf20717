"""Test parts that are defaults: a class that the user names starts from its own defaults, on the command line and in files."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fl.cli.planned_fit import resolve
from lightning_fl.errors import UserError

FLAG = "--algorithm.server_optimizer"


def file(path: str, method: str = "FedOpt", **parameters: Any) -> str:
    """Write a configuration of a method with these parameters, and return the flag that reads it."""
    content = {"algorithm": {"class_path": method, "init_args": parameters}}
    Path(path).write_text(yaml.safe_dump(content))
    return f"--config={path}"


def sgd(**options: Any) -> dict[str, Any]:
    return {"class_path": "torch.optim.SGD", "init_args": options}


CASES: dict[str, tuple[list[str], tuple[str, float, float | None]]] = {
    "the default": (["--algorithm=FedOpt"], ("SGD", 1.0, 0.9)),
    "its class": (["--algorithm=FedOpt", f"{FLAG}=torch.optim.SGD", f"{FLAG}.lr=1.0"], ("SGD", 1.0, 0.0)),
    "its class by its name": (["--algorithm=FedOpt", f"{FLAG}=SGD", f"{FLAG}.lr=0.5"], ("SGD", 0.5, 0.0)),
    "another class": (["--algorithm=FedOpt", f"{FLAG}=Adam"], ("Adam", 0.001, None)),
    "another class with the same parameters": (["--algorithm=FedOpt", f"{FLAG}=RMSprop"], ("RMSprop", 0.01, 0.0)),
    "a parameter": (["--algorithm=FedOpt", f"{FLAG}.lr=0.5"], ("SGD", 0.5, 0.9)),
    "two parameters": (["--algorithm=FedOpt", f"{FLAG}.momentum=0.8", f"{FLAG}.lr=0.5"], ("SGD", 0.5, 0.8)),
    "a class in a file": (["--config=sgd.yaml"], ("SGD", 0.5, 0.0)),
    "a parameter in a file": (["--config=momentum.yaml"], ("SGD", 1.0, 0.5)),
    "a file and a flag": (["--config=sgd.yaml", f"{FLAG}.momentum=0.1"], ("SGD", 0.5, 0.1)),
    # As in any LightningCLI, a class keeps what earlier files gave it, if it has these parameters.
    "two files with one class": (["--config=sgd.yaml", "--config=named.yaml"], ("SGD", 0.5, 0.7)),
    "a file and another class": (["--config=sgd.yaml", f"{FLAG}=Adam"], ("Adam", 0.5, None)),
    "a base": (
        [
            "--algorithm=FedBN",
            "--algorithm.base=FedOpt",
            *(f"--algorithm.base.server_optimizer{x}" for x in ("=SGD", ".lr=0.2")),
        ],
        ("SGD", 0.2, 0.0),
    ),
}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file("sgd.yaml", server_optimizer=sgd(lr=0.5))
    file("named.yaml", server_optimizer=sgd(momentum=0.7))
    file("momentum.yaml", server_optimizer={"init_args": {"momentum": 0.5}})


def method_of(*words: str) -> dict[str, Any]:
    return dict(resolve(["--config=quickstart", *words])["algorithm"]["init_args"])


@pytest.mark.parametrize("case", CASES)
def test_a_named_class_takes_nothing_from_the_default(case: str) -> None:
    words, expected = CASES[case]
    method = method_of(*words)
    found = (method["base"]["init_args"] if "base" in method else method)["server_optimizer"]
    options = found["init_args"]
    assert (found["class_path"].rpartition(".")[2], options["lr"], options.get("momentum")) == expected


def test_a_saved_configuration_means_the_same_again() -> None:
    method = method_of("--algorithm=FedOpt", f"{FLAG}=SGD", f"{FLAG}.lr=0.5")
    assert method_of(file("saved.yaml", **method)) == method


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"beta": 0.5, "dampening": False}),
        (["--algorithm.step=Momentum"], {"beta": 0.9, "dampening": True}),
        (["--algorithm.step=Momentum", "--algorithm.step.beta=0.7"], {"beta": 0.7, "dampening": True}),
        (["--algorithm.step.beta=0.7"], {"beta": 0.7, "dampening": False}),
    ],
)
def test_the_same_holds_for_a_part_of_the_users_own_method(words: list[str], expected: dict[str, Any]) -> None:
    found = method_of("--algorithm=own_parts.WithStep", *words)["step"]["init_args"]
    assert {name: found[name] for name in expected} == expected


def test_an_unknown_parameter_of_a_default_part_is_named() -> None:
    with pytest.raises(UserError, match="momentumm"):
        method_of("--algorithm=FedOpt", f"{FLAG}.momentumm=0.5")
