"""Test the command line with the user's own classes: their optimisers, their data, parameters that they do not have."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import yaml
from command_line import Command, Outcome
from test_cli import metrics

from lightning_fl.cli import commands

ADAM = ["--optimizer", "Adam", "--optimizer.lr", "0.02"]
HALVING = ["--lr_scheduler", "ExponentialLR", "--lr_scheduler.gamma", "0.5"]


@pytest.fixture
def fit(lightning_fl: Command) -> Command:
    """Return a function that fits three rounds of a module on divided points in the folder `run`."""
    trainer = {"max_rounds": 3, "clients_per_round": 3, "accelerator": "cpu", "default_root_dir": "run"}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    points = {"datamodule": {"class_path": "bare.Points"}, "num_clients": 6}
    config = {"trainer": trainer | quiet, "data": {"class_path": "Federated", "init_args": points}}
    Path("base.yaml").write_text(yaml.safe_dump(config))

    def run(model: str, *words: str, base: bool = True) -> Outcome:
        given = ["--config", "base.yaml"] if base else [f"--trainer.{k}={v}" for k, v in (trainer | quiet).items()]
        return lightning_fl("fit", *given, "--model", f"bare.{model}", *words)

    return run


def curve(outcome: Outcome) -> list[dict[str, str]]:
    assert outcome.code == 0, outcome.err
    return metrics("run")


# ------------------------------------------------------------------------------------------- --optimizer, --lr_scheduler


@pytest.mark.matrix
def test_a_module_without_an_optimizer_takes_that_of_the_command_line(fit: Command) -> None:
    expected = curve(fit("WithAdam"))
    assert curve(fit("Bare", *ADAM, *HALVING)) == expected
    assert curve(fit("Bare", *ADAM)) != expected
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["optimizer"]["class_path"] == "torch.optim.Adam"
    assert config["optimizer"]["init_args"]["lr"] == 0.02
    assert config["lr_scheduler"] is None
    given = curve(fit("Bare", "--config", "run/config.yaml"))
    assert given != expected


@pytest.mark.matrix
def test_a_module_s_own_optimizer_is_overridden_with_a_warning_as_in_any_lightning_cli(fit: Command) -> None:
    expected = curve(fit("WithAdam"))
    with pytest.warns(UserWarning, match="`WithSGD.configure_optimizers` will be overridden"):
        assert curve(fit("WithSGD", *ADAM, *HALVING)) == expected


@pytest.mark.matrix
def test_a_plateau_watches_its_metric(fit: Command) -> None:
    plateau = ["--lr_scheduler", "lightning.pytorch.cli.ReduceLROnPlateau", "--lr_scheduler.monitor", "val_loss"]
    plateau += [
        "--lr_scheduler.threshold",
        "100",
        "--lr_scheduler.threshold_mode",
        "abs",
        "--lr_scheduler.patience",
        "0",
        "--lr_scheduler.factor",
        "0.001",
    ]
    still = curve(fit("Bare", *ADAM, *plateau))
    moving = curve(fit("Bare", *ADAM))
    # The first value is the best so far, and the second not better by so much.
    assert still[:2] == moving[:2]
    assert still[2] != moving[2]


@pytest.mark.matrix
def test_methods_that_make_their_own_steps_take_sgd_of_the_command_line(fit: Command) -> None:
    sgd = ["--optimizer", "SGD", "--optimizer.lr", "0.5", "--algorithm", "SCAFFOLD"]
    assert curve(fit("Bare", *sgd)) == curve(fit("WithSGD", "--algorithm", "SCAFFOLD"))
    assert "has Adam" in fit("Bare", *ADAM, "--algorithm", "SCAFFOLD").sentence


MISTAKES = {
    "no optimizer at all": ("Bare", [], ["has no configure_optimizers", "--optimizer SGD --optimizer.lr 0.1"]),
    "name": ("Bare", ["--optimizer", "Adamm"], ["optimizer 'Adamm'", "did you mean 'Adam'", "SGD"]),
    "parameter": ("Bare", [*ADAM, "--optimizer.lrr", "1"], ["Adam", "'lrr'", "did you mean 'lr'"]),
    "null": ("Bare", ["--optimizer", "Adam", "--optimizer.eps", "null"], ["optimizer.eps", "float", "null"]),
    "class of another kind": ("Bare", ["--optimizer", "torch.nn.Linear"], ["torch.nn.Linear", "Optimizer"]),
    "scheduler": ("Bare", [*ADAM, "--lr_scheduler", "ExponentalLR"], ["did you mean 'ExponentialLR'"]),
    "scheduler alone": ("WithSGD", HALVING, ["lr_scheduler", "ExponentialLR", "--optimizer"]),
    "closure": ("Bare", ["--optimizer", "LBFGS"], ["LBFGS needs the loss several times"]),
    "two choices": (
        "WithSGD",
        [*ADAM, "--trainer.client_optimizer", "sgd"],
        ["optimizer Adam", "trainer.client_optimizer sgd", "exclude each other"],
    ),
}


@pytest.mark.filterwarnings("ignore:.*will be overridden by:UserWarning")
@pytest.mark.parametrize(("model", "words", "named"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_about_optimizers_end_with_one_sentence(
    fit: Command, model: str, words: list[str], named: list[str]
) -> None:
    sentence = fit(model, *words).sentence
    assert [name for name in named if name not in sentence] == [], sentence
    assert not Path("run").exists()


def test_the_help_shows_no_repr(fit: Command) -> None:
    shown = fit("Bare", "--help").out
    assert "--optimizer" in shown
    assert "--lr_scheduler" in shown
    assert "(<class" not in shown


# --------------------------------------------------------------------------------- data that are not divided over clients


def test_data_that_are_not_divided_are_refused_with_the_flags_that_divide_them(fit: Command) -> None:
    plain = ["--data", "bare.Points", "--data.size", "40"]
    sentence = fit("WithSGD", *plain, base=False).sentence
    flags = sentence.removesuffix(".").partition(": use ")[2].split()
    assert flags == ["--data", "Federated", "--data.datamodule", "bare.Points", "--data.num_clients", "100"]
    assert "--data.datamodule.NAME" in sentence
    assert fit("WithSGD", *flags[:-1], "4", "--data.datamodule.size", "40", base=False).code == 0
    data = yaml.safe_load(Path("run/config.yaml").read_text())["data"]["init_args"]
    assert (data["num_clients"], data["datamodule"]["init_args"]["size"]) == (4, 40)


# ------------------------------------------------------------------------------------------------------- dict_kwargs

FREE = {
    "algorithm": (
        "WithSGD",
        ["--algorithm.dict_kwargs.x", "3"],
        ["FedAvg has no parameter 'x'", "allowed: aggregator"],
    ),
    "with parameters": (
        "WithSGD",
        ["--algorithm", "FedProx", "--algorithm.dict_kwargs.mi", "3"],
        ["FedProx has no parameter 'mi'", "allowed: aggregator, downlink, exchange, mu"],
    ),
    "data": ("WithSGD", ["--data.dict_kwargs.num_client", "3"], ["Federated has no", "did you mean 'num_clients'"]),
    "data within": ("WithSGD", ["--data.datamodule.dict_kwargs.sizes", "3"], ["Points has no", "did you mean 'size'"]),
    "model": ("WithSGD", ["--model.dict_kwargs.x", "3"], ["WithSGD has no parameter 'x'"]),
    "callback": (
        "WithSGD",
        ["--trainer.callbacks+=Timer", "--trainer.callbacks.dict_kwargs.intervall", "epoch"],
        ["Timer has no", "did you mean 'interval'"],
    ),
    "optimizer": ("Bare", ["--optimizer", "SGD", "--optimizer.dict_kwargs.x", "3"], ["SGD has no parameter 'x'"]),
}


@pytest.mark.parametrize(("model", "words", "named"), FREE.values(), ids=FREE.keys())
def test_a_parameter_that_a_class_does_not_have_is_refused_under_dict_kwargs_too(
    fit: Command, model: str, words: list[str], named: list[str]
) -> None:
    sentence = fit(model, *words).sentence
    assert [name for name in named if name not in sentence] == [], sentence
    assert "dict_kwargs" in sentence
    assert not Path("run").exists()


def test_a_class_that_takes_any_parameter_gets_them(fit: Command) -> None:
    assert fit("Takes", "--model.dict_kwargs.x", "3", "--optimizer", "SGD").code == 0
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["model"]["dict_kwargs"] == {"x": 3}


@pytest.mark.parametrize(("model", "free"), [("Saves", []), ("SavesAny", ["--model.dict_kwargs.x", "3"])])
@pytest.mark.matrix
def test_a_checkpoint_s_hyper_parameters_are_those_of_the_class(
    model: str, free: list[str], fit: Command, lightning_fl: Command
) -> None:
    values = curve(fit(model, "--model.bias", "false", *free))
    for words in ("--config run/config.yaml", f"--config base.yaml --model bare.{model}"):
        for checkpoint in ("model.ckpt", "checkpoints/last.ckpt"):
            outcome = lightning_fl("validate", *words.split(), "--ckpt_path", f"run/{checkpoint}")
            assert outcome.code == 0, outcome.err
            assert f"{float(values[-1]['val_acc']):g}" in outcome.out


# ------------------------------------------------------------------------------------------------------- the current folder


def test_a_file_in_the_current_folder_does_not_replace_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("lightning", "only_here"):
        Path(f"{name}.py").write_text("raise SystemExit('the current folder was read first')")
    commands._prepare()
    found = {name: PathFinder.find_spec(name) for name in ("lightning", "only_here")}
    origins = {name: Path(spec.origin).parent for name, spec in found.items() if spec and spec.origin}
    assert origins["lightning"] != tmp_path
    assert origins["only_here"] == tmp_path


@pytest.mark.parametrize("name", ["yaml.Own", "yaml.inner.Own"])
def test_an_own_module_with_the_name_of_an_installed_package_is_named(name: str, fit: Command) -> None:
    Path("yaml.py").write_text("class Own: pass")
    outcome = fit("Bare", *ADAM, "--algorithm", name)
    assert outcome.code == 2
    assert "yaml.py in the current folder has the name of the installed package" in outcome.err
    assert outcome.err.rstrip().endswith("which Python finds first: rename it.")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--algorithm.mu=-1"], "mu of Ranged must be at least 0, got -1."),
        (["--algorithm.mu=much"], "mu of Ranged must be at least 0, got 'much'."),
        (["--algorithm.k=0"], "k of Ranged must be a whole number of at least 1, got 0."),
        (["--algorithm.way=c"], "way of Ranged 'c' is unknown; allowed: a, b."),
    ],
)
def test_ranges_of_a_users_method_are_named(
    words: list[str], sentence: str, lightning_fl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a module without `from __future__ import annotations`, whose ranges the parser itself reads."""
    Path("ranged.py").write_text(
        "from typing import Annotated, Literal\n"
        "from annotated_types import Ge\n"
        "from lightning_fl.algorithms import Method\n"
        "class Ranged(Method):\n"
        "    def __init__(self, mu: Annotated[float, Ge(0)] = 0.1, k: Annotated[int, Ge(1)] | None = None,\n"
        "                 way: Annotated[Literal['a', 'b'], 'some way'] = 'a', **slots):\n"
        "        super().__init__(**slots)\n"
    )
    monkeypatch.delitem(sys.modules, "ranged", raising=False)
    assert lightning_fl("fit", "--config", "quickstart", "--algorithm", "ranged.Ranged", *words).sentence == sentence
    assert "--algorithm.mu FLOAT" in lightning_fl("fit", "--algorithm.help", "ranged.Ranged").out
