"""Test the command line: configurations, names, saved runs, checkpoints, and every possible user error."""

import inspect
import re
from dataclasses import fields
from importlib import import_module
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml
from command_line import Command, Outcome
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import Trainer

from lightning_fl import aggregators, algorithms, callbacks, codecs, exchanges, rules, steps
from lightning_fl.checks import parameters_of
from lightning_fl.cli.config_checks import check_file
from lightning_fl.cli.failures import sentence_of
from lightning_fl.cli.planned_fit import _PlannedFit, _PlannedParser, resolve
from lightning_fl.errors import UserError
from lightning_fl.trainer import FederatedTrainer
from lightning_fl.trainer.lightning_parts import STOCK_FLAGS

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


SMALL = {
    "seed_everything": 3,
    "trainer": {
        "max_rounds": 2,
        "clients_per_round": 3,
        "local_epochs": 1,
        "default_root_dir": "run",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
    "algorithm": "FedAvg",
    "model": {"class_path": "ImageClassifier", "init_args": {"network": "linear", "learning_rate": 0.1}},
    "data": {"class_path": "Digits", "init_args": {"num_clients": 20}},
}


@pytest.fixture
def small(tmp_path: Path) -> str:
    """Write a quick configuration of two rounds."""
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    return "small.yaml"


def metrics(folder: str) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without times."""
    header, *rows = Path(folder, "metrics.csv").read_text().splitlines()
    tables = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    return [{name: value for name, value in row.items() if name != "time/round_seconds"} for row in tables]


def printed(outcome: Outcome) -> dict:
    assert outcome.code == 0, outcome.err
    return yaml.safe_load(outcome.out)


# ------------------------------------------------------------------------------------------- configurations


def write_images(path: str, *shape: int) -> None:
    """Write ten classes of random images, for `Arrays`."""
    rng = np.random.default_rng(0)
    parts = {"train": 60, "test": 20}
    images = {f"{part}_images": rng.integers(0, 256, (count, *shape), dtype=np.uint8) for part, count in parts.items()}
    np.savez(path, **images, **{f"{part}_labels": np.arange(count) % 10 for part, count in parts.items()})


@pytest.mark.parametrize("shape", [(8, 8), (16, 16, 3)], ids=["grey", "colour"])
def test_the_network_has_the_size_of_the_images(lightning_fl: Command, small: str, shape: tuple[int, ...]) -> None:
    write_images("images.npz", *shape)
    arrays = ("--data", "Arrays", "--data.path", "images.npz", "--data.num_clients", "5")
    assert lightning_fl("fit", "--config", small, *arrays).code == 0
    assert metrics("run")[-1]["model/parameters"] == str(10 * (np.prod(shape) + 1))


def test_images_that_are_not_square_need_a_network_of_ones_own(lightning_fl: Command, small: str) -> None:
    write_images("images.npz", 8, 6, 3)
    arrays = ("--data", "Arrays", "--data.path", "images.npz", "--data.num_clients", "5")
    assert "the images of Arrays are not square" in lightning_fl("fit", "--config", small, *arrays).sentence
    Path("wide.py").write_text(
        "import torch\n\nclass Wide(torch.nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(144, 10))\n"
    )
    own = ("--model", "ImageClassifier", "--model.network", "{class_path: wide.Wide}")
    assert lightning_fl("fit", "--config", small, *arrays, *own).code == 0


def test_what_the_data_do_not_know_is_taken_from_the_model(lightning_fl: Command, small: str) -> None:
    Path("given.py").write_text(
        "import torch\nfrom lightning import LightningDataModule\nfrom torch.utils.data import DataLoader, TensorDataset\n\n"
        "class Given(LightningDataModule):\n    def train_dataloader(self):\n"
        "        return DataLoader(TensorDataset(torch.rand(40, 1, 9, 9), torch.arange(40) % 3), batch_size=4)\n"
    )
    words = "--data Federated --data.datamodule given.Given --data.num_classes 3 --data.num_clients 5"
    model = "--model ImageClassifier --model.network linear --model.in_channels 1 --model.image_size 9"
    assert lightning_fl("fit", "--config", small, *words.split(), *model.split()).code == 0
    assert metrics("run")[-1]["model/parameters"] == "246"  # 3 · (81 + 1)


@pytest.mark.parametrize(("flags", "number"), [([], 3), (["--model.num_classes", "4"], 4)])
def test_a_module_keeps_its_number_of_classes_if_the_data_have_none(
    flags: list[str], number: int, lightning_fl: Command, small: str
) -> None:
    Path("priced.py").write_text(
        "import torch\nimport lightning as L\nfrom torch.utils.data import DataLoader, TensorDataset\n\n"
        "class Prices(L.LightningDataModule):\n    def train_dataloader(self):\n"
        "        return DataLoader(TensorDataset(torch.rand(40, 16), torch.linspace(0, 1, 40)), batch_size=4)\n\n"
        "class Priced(L.LightningModule):\n    def __init__(self, num_classes: int = 3):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(16, num_classes)\n\n    def training_step(self, batch, batch_idx):\n"
        "        return (self.layer(batch[0]).mean(1) - batch[1]).square().mean()\n\n"
        "    def configure_optimizers(self):\n        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
    )
    words = [
        "--data",
        "Federated",
        "--data.datamodule",
        "priced.Prices",
        "--data.num_clients",
        "5",
        "--model",
        "priced.Priced",
    ]
    assert lightning_fl("fit", "--config", small, *words, *flags).code == 0
    assert metrics("run")[-1]["model/parameters"] == str(17 * number)


def test_the_sentence_about_a_data_module_without_clients_says_how_to_divide_it(
    lightning_fl: Command, small: str
) -> None:
    Path("plain.py").write_text(
        "import torch\nfrom lightning import LightningDataModule\nfrom torch.utils.data import DataLoader, TensorDataset\n\n"
        "class Plain(LightningDataModule):\n    def __init__(self, size: int = 200):\n        super().__init__()\n"
        "        self.size = size\n\n    def train_dataloader(self):\n"
        "        x = torch.rand(self.size, 1, 8, 8)\n"
        "        return DataLoader(TensorDataset(x, torch.arange(self.size) % 10), batch_size=4)\n"
    )
    Path("plain.yaml").write_text("data: {class_path: plain.Plain, init_args: {size: 100}}\n")
    sentence = lightning_fl("fit", "--config", small, "--data", "plain.Plain", "--data.num_clients", "5").sentence
    assert sentence == lightning_fl("fit", "--config", small, "--config", "plain.yaml").sentence
    begin, words = sentence.removesuffix(".").split(": use ")
    assert begin.startswith("data 'plain.Plain' does not divide its samples over clients, but Federated does it")
    more = "--data.datamodule.size 120 --data.num_classes 10 --model ImageClassifier --model.network linear"
    shape = "--model.in_channels 1 --model.image_size 8"
    assert lightning_fl("fit", "--config", small, *words.split(), *more.split(), *shape.split()).code == 0


def test_a_later_file_changes_what_it_names_and_the_command_line_has_the_last_word(
    lightning_fl: Command, small: str
) -> None:
    Path("other.yaml").write_text("trainer: {max_rounds: 7, local_epochs: 4}\n")
    config = printed(
        lightning_fl("fit", "--config", small, "--config", "other.yaml", "--trainer.max_rounds", "9", "--print_config")
    )
    trainer = config["trainer"]
    assert (trainer["max_rounds"], trainer["local_epochs"], trainer["clients_per_round"]) == (9, 4, 3)


def test_a_printed_configuration_prints_itself(lightning_fl: Command, small: str) -> None:
    words = ["--algorithm", "FedProx", "--algorithm.mu", "0.5", "--data.partition", "Shards"]
    first = lightning_fl("fit", "--config", small, *words, "--trainer.callbacks+=LearningRateMonitor", "--print_config")
    Path("printed.yaml").write_text(first.out)
    assert printed(lightning_fl("fit", "--config", "printed.yaml", "--print_config")) == printed(first)


def test_short_names_class_paths_and_parameters_say_the_same(lightning_fl: Command, small: str) -> None:
    short = ["--algorithm", "FedProx", "--algorithm.mu", "0.5"]
    long = ["--algorithm.class_path", "lightning_fl.algorithms.FedProx", "--algorithm.init_args.mu", "0.5"]
    expected = {"class_path": "lightning_fl.algorithms.FedProx", "init_args": {"mu": 0.5}}
    for words in (short, long):
        shown = printed(lightning_fl("fit", "--config", small, *words, "--print_config"))["algorithm"]
        given = {name: value for name, value in shown["init_args"].items() if value is not None}
        assert shown | {"init_args": given} == expected


@pytest.mark.matrix
def test_an_algorithm_put_together_at_the_command_line_is_saved_whole(lightning_fl: Command, small: str) -> None:
    words = ["--algorithm", "Algorithm", "--algorithm.rule", "Proximal", "--algorithm.rule.mu", "0.5"]
    assert lightning_fl("fit", "--config", small, *words).code == 0
    assert "Unable to serialize" not in Path("run/config.yaml").read_text()
    assert lightning_fl("fit", "--config", "run/config.yaml", "--trainer.default_root_dir", "again").code == 0
    assert metrics("again") == metrics("run")


@pytest.mark.matrix
def test_any_codec_serves_any_method(lightning_fl: Command, small: str) -> None:
    quantiser = {"class_path": "Quantiser", "init_args": {"levels": "uniform", "bits": 4, "groups": "global"}}
    slots = {
        "rule": {"class_path": "Proximal", "init_args": {"mu": 0.01}},
        "uplink": {
            "class_path": "ErrorFeedback",
            "init_args": {"codec": {"class_path": "TopK", "init_args": {"alpha": 0.1}}},
        },
        "downlink": {"class_path": "Followed", "init_args": {"codec": quantiser}},
        "steps": ["Apply", {"class_path": "Compress", "init_args": {"codec": quantiser}}],
    }
    Path("compressed.yaml").write_text(yaml.safe_dump({"algorithm": {"class_path": "Algorithm", "init_args": slots}}))
    assert lightning_fl("fit", "--config", small, "--config", "compressed.yaml").code == 0
    last = metrics("run")[-1]
    d, k = 650, 65  # 8 × 8 pixels, ten classes
    assert int(last["comm/uplink_bits"]) == 3 * (32 * k + min(d, k * 10))
    assert int(last["comm/downlink_bits"]) == 20 * (4 * d + 32)
    flags = ["--algorithm", "Algorithm", "--algorithm.uplink", "OneBit", "--algorithm.uplink.scale", "l1"]
    assert lightning_fl("fit", "--config", small, *flags).code == 0
    assert int(metrics("run")[-1]["comm/uplink_bits"]) == 3 * (d + 2 * 32)


@pytest.mark.parametrize(
    "words",
    [
        ["--algorithm.uplink=QSGD", "--algorithm.uplink.s=4"],
        ["--algorithm.uplink=ErrorFeedback", "--algorithm.uplink.codec=TopK", "--algorithm.uplink.codec.alpha=2"],
        ["--algorithm=FedProx", "--algorithm.my=0.1"],
        ["--trainer.clients_per_rounds=3"],
    ],
    ids=" ".join,
)
def test_a_study_says_what_a_fit_says(words: list[str], lightning_fl: Command, small: str) -> None:
    with pytest.raises(UserError) as refused:
        resolve(["--config", small, *words])
    assert lightning_fl("fit", "--config", small, *words).sentence == str(refused.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("FedAdamSSM --algorithm.mask paramters", "did you mean 'parameters'"),
        ("FedAdamSSM --algorithm.alpha 0", "alpha, the share of numbers that are sent,"),
        ("EfficientAdam --algorithm.quantiser unifrom", "did you mean 'uniform'"),
        ("Algorithm --algorithm.uplink TpK", "did you mean 'TopK'"),
        ("Algorithm --algorithm.uplink TopK --algorithm.uplink.alpha 2", "alpha, the share of numbers that are sent,"),
        ("Algorithm --algorithm.downlink TopK", "too coarse for a whole model"),
    ],
)
def test_mistakes_with_codecs_end_with_a_sentence(words: str, sentence: str, lightning_fl: Command, small: str) -> None:
    assert sentence in lightning_fl("fit", "--config", small, "--algorithm", *words.split()).sentence


def test_another_algorithm_forgets_the_parameters_of_the_first(lightning_fl: Command, small: str) -> None:
    words = ["--algorithm", "FedProx", "--algorithm.mu", "0.5", "--algorithm", "ServerM"]
    algorithm = printed(lightning_fl("fit", "--config", small, *words, "--print_config"))["algorithm"]
    assert algorithm["class_path"] == "lightning_fl.algorithms.ServerM"
    assert "mu" not in algorithm["init_args"]


def test_callbacks_are_added_one_by_one(lightning_fl: Command, small: str) -> None:
    first = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "val/accuracy"]
    second = ["--trainer.callbacks+=lightning.pytorch.callbacks.Timer", "--trainer.callbacks.interval", "epoch"]
    callbacks = printed(lightning_fl("fit", "--config", small, *first, *second, "--print_config"))["trainer"][
        "callbacks"
    ]
    names = [callback["class_path"] for callback in callbacks]
    assert names == ["lightning.pytorch.callbacks.EarlyStopping", "lightning.pytorch.callbacks.Timer"]
    assert callbacks[0]["init_args"]["monitor"] == "val/accuracy"


def test_a_callback_from_the_command_line_works(lightning_fl: Command, small: str) -> None:
    stopping = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "val/accuracy"]
    stopping += ["--trainer.callbacks.mode", "max", "--trainer.callbacks.patience", "1"]
    stopping += ["--trainer.callbacks.min_delta", "1.0"]  # no round can improve by this much
    assert lightning_fl("fit", "--config", small, *stopping, "--trainer.max_rounds", "9").code == 0
    assert len(metrics("run")) == 2


def test_the_environment_beats_its_own_file_and_the_command_line_beats_both(
    lightning_fl: Command, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_FIT__CONFIG", small)
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_ROUNDS", "5")
    monkeypatch.setenv("PL_FIT__TRAINER__LOCAL_EPOCHS", "6")
    trainer = printed(lightning_fl("fit", "--trainer.local_epochs", "7", "--print_config"))["trainer"]
    assert (trainer["max_rounds"], trainer["local_epochs"], trainer["clients_per_round"]) == (5, 7, 3)


def test_the_environment_names_the_command_too(
    lightning_fl: Command, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_SUBCOMMAND", "fit")
    monkeypatch.setenv("PL_FIT__CONFIG", small)
    outcome = lightning_fl()
    assert outcome.code == 0, outcome.err
    assert len(metrics("run")) == 2


def test_the_environment_names_a_configuration_of_the_package_as_the_command_line_does(
    lightning_fl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_FIT__CONFIG", "quickstart")
    assert printed(lightning_fl("fit", "--print_config"))["trainer"]["max_rounds"] == 60
    monkeypatch.setenv("PL_FIT__CONFIG", "quickstar")
    assert "did you mean 'quickstart'?" in lightning_fl("fit").sentence


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("PL_FIT__TRAINER__MAX_ROUNDZ", "did you mean 'trainer.max_rounds'"),
        ("PL_FIT__TRANER__MAX_ROUNDS", "did you mean .trainer.max_rounds."),
        ("PL_FIT_TRAINER__MAX_ROUNDS", "did you mean PL_FIT__TRAINER__MAX_ROUNDS"),
        ("PL_TRAINER__MAX_ROUNDS", "did you mean PL_FIT__TRAINER__MAX_ROUNDS"),
        ("PL_ALGORITHM", "did you mean PL_FIT__ALGORITHM"),
    ],
)
def test_a_misspelt_variable_of_the_environment_is_named(
    lightning_fl: Command, small: str, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv(name, "5")
    for more in ([], ["--print_config"]):
        sentence = lightning_fl("fit", "--config", small, *more).sentence
        assert re.search(rf"environment variable {name} sets no flag; {words}", sentence), sentence


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("PL_FIT__ALGORITHM__MU", "PL_FIT__ALGORITHM"),
        ("PL_FIT__DATA__INIT_ARGS__NUM_CLIENTS", "PL_FIT__DATA"),
        ("PL_FIT__TRAINER__ADVERSARY__ATTACK", "PL_FIT__TRAINER__ADVERSARY"),
    ],
)
def test_a_variable_for_one_parameter_of_a_class_names_that_of_the_class(
    lightning_fl: Command, small: str, monkeypatch: pytest.MonkeyPatch, name: str, whole: str
) -> None:
    monkeypatch.setenv(name, "5")
    assert (
        f"{name} sets no flag: {whole} has a class with all its parameters"
        in lightning_fl("fit", "--config", small).sentence
    )


def test_a_variable_sets_parameters_of_a_class(
    lightning_fl: Command, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_FIT__CONFIG", small)
    monkeypatch.setenv("PL_FIT__ALGORITHM", "{class_path: FedProx, init_args: {mu: 0.3}}")
    assert printed(lightning_fl("fit", "--print_config"))["algorithm"]["init_args"]["mu"] == 0.3


@pytest.mark.parametrize(
    "words", [["--model.network"], ["--trainer.runner"], ["--model.learning_rate"], ["--algorithm"]]
)
def test_a_very_long_value_is_cut(lightning_fl: Command, small: str, words: list[str]) -> None:
    assert len(lightning_fl("fit", "--config", small, *words, "a" * 100_000).sentence) < 2500


def test_numbers_that_all_readers_read_alike_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(
        "trainer: {max_rounds: 10, a: 0, b: -3, c: 0.5, d: 1e-3, e: '010', f: 00:02:30:00, g: 0x1F, h: .inf}\n"
    )
    check_file(path)


def test_the_model_is_told_what_the_data_know(lightning_fl: Command, small: str) -> None:
    outcome = lightning_fl("fit", "--config", small, "--data.image_size", "12", "--trainer.max_rounds", "1")
    assert outcome.code == 0, outcome.err
    assert metrics("run")[0]["model/parameters"] == str(12 * 12 * 10 + 10)


# ------------------------------------------------------------------------------------------------------ runs


def test_fit_ends_with_a_short_table(lightning_fl: Command, small: str) -> None:
    outcome = lightning_fl("fit", "--config", small)
    table = dict(line.split(maxsplit=1) for line in outcome.out.splitlines())
    assert list(table) == ["accuracy", "rounds", "uplink", "downlink", "curve", "model"]
    assert table["rounds"] == "2"
    bits = 2 * 3 * 32 * (64 * 10 + 10)  # rounds × clients × bits × parameters
    assert table["uplink"] == table["downlink"] == f"{bits / 8 / 1e3:.1f} kB"
    assert Path(table["curve"]).is_file()
    assert Path(table["model"]).is_file()
    assert float(table["accuracy"].split()[0]) == pytest.approx(float(metrics("run")[-1]["val/accuracy"]), abs=1e-4)


def test_the_progress_bar_says_how_far_and_how_fast(lightning_fl: Command, small: str) -> None:
    shown = lightning_fl("fit", "--config", small, "--trainer.enable_progress_bar", "true")
    last = re.split(r"[\r\n]+", shown.err.partition("Round")[2])
    last = [line for line in last if "2/2" in line][-1]
    speed = re.search(r"clients/s=([\d.e+]+)", last)
    assert speed is not None, last
    assert float(speed[1]) > 0
    assert f"accuracy={float(metrics('run')[-1]['val/accuracy']):.4g}" in last
    assert "up=15.6 kB, down=15.6 kB" in last  # two rounds of 7,800 bytes
    assert re.search(r"\[\d+:\d+<\d+:\d+", last), "the remaining time"
    assert "Round" not in lightning_fl("fit", "--config", small).err


def test_a_saved_configuration_runs_again_to_the_same_metrics(lightning_fl: Command, small: str) -> None:
    assert lightning_fl("fit", "--config", small, "--algorithm", "ServerM", "--algorithm.beta", "0.5").code == 0
    # Evaluating in the folder of the run must not change its files.
    assert lightning_fl("test", "--config", small, "--ckpt_path", "last", "--trainer.limit_test_batches", "1").code == 0
    assert lightning_fl("fit", "--config", "run/config.yaml", "--trainer.default_root_dir", "again").code == 0
    assert metrics("again") == metrics("run")
    assert yaml.safe_load(Path("again/config.yaml").read_text())["algorithm"]["init_args"]["beta"] == 0.5


@pytest.mark.usefixtures("types_of_a_new_process")
def test_a_configuration_is_written_as_with_the_checks_of_the_parser() -> None:
    words = ["--algorithm=FedDUM", "--algorithm.uplink=TopK", "--optimizer=Adam", "--trainer.clock=SimulatedClock"]
    words += ["--trainer.callbacks+=MagnitudePruning", "--trainer.callbacks.rate=0.3", "--data.server_fraction=0.1"]
    cli = _PlannedFit(args=["fit", "--config", "quickstart", *words], parser_class=_PlannedParser)
    for links in (True, False):
        flags = {"skip_link_targets": links}
        assert cli.parser.dump(cli.config, **flags) == cli.parser.dump(cli.config, **flags, skip_validation=False)


def test_a_second_run_in_a_folder_moves_the_first_aside(lightning_fl: Command, small: str) -> None:
    lightning_fl("fit", "--config", small, "--trainer.max_rounds", "1")
    first = metrics("run")
    lightning_fl("fit", "--config", small)
    assert metrics("run/earlier-1") == first
    assert len(metrics("run")) == 2


@pytest.mark.parametrize("checkpoint", ["last", "run/checkpoints/last.ckpt"])
def test_a_run_goes_on_to_where_it_would_have_come(lightning_fl: Command, small: str, checkpoint: str) -> None:
    assert lightning_fl("fit", "--config", small, "--trainer.max_rounds", "4").code == 0
    whole = metrics("run")
    assert lightning_fl("fit", "--config", small, "--trainer.max_rounds", "2").code == 0
    assert lightning_fl("fit", "--config", small, "--trainer.max_rounds", "4", "--ckpt_path", checkpoint).code == 0
    assert metrics("run") == whole


def test_going_on_with_last_starts_where_there_is_none(lightning_fl: Command, small: str) -> None:
    assert lightning_fl("fit", "--config", small, "--ckpt_path", "last").code == 0
    assert len(metrics("run")) == 2


@pytest.mark.matrix
def test_evaluation_of_checkpoints(lightning_fl: Command, small: str) -> None:
    keep_best = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor", "val/accuracy"]
    keep_best += ["--trainer.callbacks.mode", "max"]
    assert lightning_fl("fit", "--config", small, *keep_best).code == 0
    accuracies = [float(row["val/accuracy"]) for row in metrics("run")]
    expected = {"last": accuracies[-1], "run/model.ckpt": accuracies[-1], "best": max(accuracies)}
    for checkpoint, accuracy in expected.items():
        # Without val_fraction both use the test set.
        for command in ("validate", "test") if checkpoint == "last" else ("validate",):
            outcome = lightning_fl(command, "--config", small, "--ckpt_path", checkpoint)
            assert outcome.code == 0, outcome.err
            found = re.search(r"accuracy +([\d.]+)", outcome.out)
            assert found is not None
            assert float(found[1]) == pytest.approx(accuracy, abs=1e-5)
    assert lightning_fl("predict", "--config", small, "--ckpt_path", "best").code == 0


# ----------------------------------------------------------------------------------------------- information


def test_list_names_all_there_is(lightning_fl: Command) -> None:
    from lightning_fl import algorithms, modules  # `lightning_fl` is the command here

    outcome = lightning_fl("list")
    first_words = {line.split()[0] for line in outcome.out.splitlines() if line}
    assert first_words >= {*algorithms.__all__, *modules.NETWORKS, "Digits", "Federated", "Dirichlet"}
    assert all(len(line.split()) > 2 for line in outcome.out.splitlines() if line.startswith(" "))


@pytest.mark.parametrize("package", [aggregators, algorithms, callbacks, codecs, exchanges, rules, steps])
def test_every_argument_of_a_method_or_part_is_described(package: ModuleType) -> None:
    """Check the descriptions that `--algorithm.help NAME` prints, many of which are those of base classes."""
    for name in package.__all__:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(getattr(package, name))
        shown = {action.dest: action.help for action in parser._actions if action.dest != "help"}
        own = parameters_of(getattr(package, name))
        assert not [argument for argument in own if not (shown.get(argument) or "").strip()], name


def test_help_says_what_can_be_said(lightning_fl: Command) -> None:
    overview = lightning_fl("--help")
    assert overview.code == 0
    assert all(word in overview.out for word in ("fit", "validate", "test", "predict", "list"))
    whole = lightning_fl("fit", "--help")
    assert whole.code == 0
    assert "Rounds of communication" in whole.out
    assert "Weight μ" in lightning_fl("fit", "--algorithm.help", "FedProx").out


# -------------------------------------------------------------------------------------------------- mistakes

LENET5 = ["--model.network", "lenet5", "--data.image_size", "32"]
MISTAKES = {
    "no name of a file": (["--config", ""], ["--config needs the name of a file"]),
    "infinite": (["--model.learning_rate", "inf"], ["learning_rate of ImageClassifier", "finite number", "inf"]),
    "not a number": (["--trainer.dropout_rate", "nan"], ["trainer.dropout_rate", "finite number", "nan"]),
    "too many digits": (["--trainer.max_rounds", "1" * 5000], ["trainer.max_rounds", "digits"]),
    "no command": ([], ["fit", "validate", "test", "predict", "list", "report"]),
    "configuration before the command": (["--config", "small.yaml", "fit"], ["fit --config"]),
    "no flag": (["fit", "small.yaml"], ["'small.yaml'", "--config"]),
    "flag without a value": (["--trainer.max_rounds"], ["--trainer.max_rounds", "value"]),
    "no name for list": (["list", "callback"], ["'callback'", "did you mean 'callbacks'"]),
    "null for a number": (["--algorithm", "FedProx", "--algorithm.mu", "null"], ["algorithm.mu", "float", "null"]),
    "null for the clients": (["--data.num_clients", "null"], ["num_clients is null", "only ByGroup", "IID()"]),
    "a parameter without its class": (
        ["--trainer.privacy.clip", "1"],
        ["'clip' needs the class to which it belongs: name the class first", "allowed: ClientPrivacy, LocalPrivacy."],
    ),
    "a parameter without its class, further in": (
        ["--trainer.adversary.attack.scale", "2"],
        ["attack needs a class for its parameters: name the class first", "SignFlip"],
    ),
    "null for a group": (["--trainer.loss_guard", "null"], ["trainer.loss_guard", "mapping", "server_steps", "null"]),
    "null for a part of a part": (
        ["--algorithm", "Algorithm", "--algorithm.rule", "Proximal", "--algorithm.rule.mu", "null"],
        ["mu of Proximal", "float", "null"],
    ),
    "list of lists": (["--algorithm", "FedLDF", "--algorithm.groups", "[a, b]"], ["groups of FedLDF", "list of str"]),
    "algorithm of another kind": (
        ["--algorithm", "torch.nn.Linear"],
        ["'torch.nn.Linear'", "not a subclass of Algorithm", "FedAvg"],
    ),
    "one callback with a bad value": (
        ["--trainer.callbacks=CommunicationMeter", "--trainer.callbacks.max_uplink_bytes=-1"],
        ["max_uplink_bytes must be positive", "-1"],
    ),
    "class of another module": (
        ["--data.partition", "lightning_fl.data.partitions.Dirichlet"],
        ["'lightning_fl.data.partitions' has no 'Dirichlet'", "its name alone is enough: Dirichlet."],
    ),
    "missing module": (
        ["--algorithm", "oddd.Odd"],
        ["'oddd.Odd'", "no module 'oddd' in the current folder or installed."],
    ),
    "base that is the same again": (
        ["--algorithm", "FedDP", "--algorithm.base", "FedDP"],
        ["FedDP itself", "FedAvg", "SCAFFOLD"],
    ),
    "momentum under SCAFFOLD": (
        ["--algorithm", "SCAFFOLD", "--model.momentum", "0.9"],
        ["SCAFFOLD", "momentum 0.9", "1/(1 − ρ)", "--model.momentum 0"],
    ),
    "slot of a method": (
        ["--algorithm", "FedPAQ", "--algorithm.uplink", "TopK"],
        ["'uplink'", "FedPAQ", "fills this slot itself", "--algorithm Algorithm", "--algorithm.uplink"],
    ),
    "help of an algorithm": (["--algorithm.help", "FedProxx"], ["'FedProxx'", "did you mean 'FedProx'", "ServerM"]),
    "strategy by name": (["--trainer.strategy", "dpp"], ["'dpp'", "did you mean 'ddp'", "auto"]),
    "epochs": (["--trainer.max_epochs", "3"], ["trainer.max_epochs", "max_rounds", "local_epochs"]),
    "command": (["fitt"], ["'fitt'", "'fit'", "validate", "list"]),
    "part of a part": (
        [
            "--algorithm",
            "Algorithm",
            "--algorithm.aggregator",
            "KeepUploads",
            "--algorithm.aggregator.inner",
            "WeightedMea",
        ],
        ["'WeightedMea'", "did you mean 'WeightedMean'"],
    ),
    "number or word": (["--algorithm", "FedDUS", "--algorithm.tau_eff", "ful"], ["tau_eff", "float or full", "ful"]),
    "no model": (["fit", "--data", "Digits"], ["model"]),
    "no such file": (["fit", "--config", "nowhere.yaml"], ["nowhere.yaml"]),
    "no YAML": (["fit", "--config", "broken.yaml"], ["broken.yaml"]),
    "key in a file": (["fit", "--config", "misspelt.yaml"], ["max_roundz", "max_rounds"]),
    "flag": (["--trainer.max_round", "3"], ["--trainer.max_round", "trainer.max_rounds"]),
    "value of a union": (["--trainer.clients_per_round", "ten"], ["clients_per_round", "int", "float", "ten"]),
    "seed": (["--seed_everything", "lucky"], ["seed_everything", "lucky"]),
    "network": (["--model.network", "lenet6"], ["'lenet6'", "'lenet5'", "vgg11_bn"]),
    "flag that prints": (["--print_confg"], ["--print_confg", "did you mean 'print_config'"]),
    "arrays that are none": (
        ["--data", "Arrays", "--data.path", "small.yaml"],
        ["small.yaml is not a readable .npz file."],
    ),
    "network option": (["--model.network_options", "{dropuot: 0.1}"], ["'dropuot'"]),
    "data": (["--data", "Digit"], ["'Digit'", "'Digits'", "CIFAR10"]),
    "part of a class that is named later": (["fit", "--data.partition", "IID", "--data", "Digits"], ["--data first"]),
    "parameter of a method that is named later": (
        ["--algorithm.mu=1", "--algorithm=FedProx"],
        ["--algorithm.mu comes before the class of algorithm: give --algorithm first, or name its class in a file."],
    ),
    "name of the field": (["--algorithm", "FedYogi"], ["'FedYogi' is unknown; here it is ServerYogi."]),
    "part in place of a method": (["--algorithm", "Krum"], ["unknown; it belongs to --algorithm.aggregator: use"]),
    "word for a partition": (["--data.partition", "non-iid"], ["unknown; here it is Dirichlet, Shards or Classes."]),
    "flag of the field": (["--trainer.seed", "3"], ["no flag --trainer.seed; here it is seed_everything ("]),
    "flag like its section alone": (["--trainer.nothing", "3"], ["--trainer.nothing; lightning-fl fit --help"]),
    "rate of an optimiser": (
        ["--optimizer", "Adam", "--optimizer.learning_rate", "0.1"],
        ["Adam has no parameter 'learning_rate'; here it is lr."],
    ),
    "data module that its module lacks": (
        ["--data", "Federated", "--data.datamodule", "json.Pixels"],
        ["datamodule of Federated 'json.Pixels' is unknown: the module 'json' has no 'Pixels'"],
    ),
    "algorithm by path": (["--algorithm", "lightning_fl.algorithms.FedAgv"], ["FedAgv", "FedAvg"]),
    "parameter where there is none": (
        ["--algorithm", "FedAvg", "--algorithm.mu", "1"],
        ["'mu'", "FedAvg", "allowed: aggregator, downlink"],
    ),
    "callback without what it needs": (["--trainer.callbacks+=EarlyStopping"], ["EarlyStopping", "monitor"]),
    "metric to monitor": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "val/acuracy"],
        ["val/acuracy", "val/accuracy"],
    ),
    "missing data set": (
        ["--data", "CIFAR10", "--data.root", "nowhere"],
        ["CIFAR10", "nowhere", "--data.download true"],
    ),
    "more clients than samples": (["--data.num_clients", "5000"], ["5,000", "1,437"]),
    "a parameter of the data": (
        ["--trainer.num_clients", "5"],
        ["--trainer.num_clients", "did you mean 'data.num_clients'"],
    ),
    "a flag without its section": (["--max_rounds", "5"], ["--max_rounds", "did you mean 'trainer.max_rounds'"]),
    "an octal number": (["--trainer.max_rounds", "010"], ["--trainer.max_rounds has 010", "reads as 8"]),
    "minutes and seconds": (["--data.num_clients", "1:30"], ["--data.num_clients has 1:30", "reads as 90"]),
    "a seed that is true": (["--seed_everything", "true"], ["seed_everything true", "whole number", "false"]),
    "flag of Lightning's that a federation cannot honour": (
        ["--trainer.sync_batchnorm", "true"],
        ["trainer.sync_batchnorm", "clients are trained apart", "running statistics"],
    ),
    "folder that cannot be written": (["--trainer.default_root_dir", "/proc/nowhere"], ["/proc/nowhere"]),
    "missing checkpoint": (["--ckpt_path", "nowhere.ckpt"], ["Checkpoint file not found: nowhere.ckpt"]),
    "best of nothing": (["--ckpt_path", "best"], ["best", "ModelCheckpoint"]),
}
"""Mistakes that the default tests make."""

FURTHER_MISTAKES = {
    "absurd": (["--model.learning_rate", "1e300"], ["learning_rate", "3.4e+38", "got 1e+300"]),
    "an absurd count": (
        ["--algorithm", "HRank", "--algorithm.prune_round", str(10**30)],
        ["prune_round", "1000000000"],
    ),
    "no batches to train on": (
        ["--trainer.limit_train_batches", "0"],
        ["limit_train_batches is 0", "no client would train"],
    ),
    "two names for list": (["list", "data", "callbacks"], ["list takes one name at most", "data callbacks"]),
    "null for a count": (["--algorithm", "FedLDF", "--algorithm.n", "null"], ["algorithm.n", "int", "null"]),
    "null for a parameter of the model": (["--model.learning_rate", "null"], ["model.learning_rate", "float", "null"]),
    "null for a parameter of a base class": (["--data.batch_size", "null"], ["data.batch_size", "int", "null"]),
    "null for a flag": (["--trainer.max_rounds", "null"], ["trainer.max_rounds", "int", "null"]),
    "null for an algorithm": (["--algorithm", "null"], ["algorithm", "Algorithm", "class_path", "null"]),
    "callback of another module": (
        ["--trainer.callbacks", "lightning.pytorch.EarlyStopping"],
        ["'lightning.pytorch' has no 'EarlyStopping'", "its name alone is enough: EarlyStopping."],
    ),
    "method of a missing module": (
        ["--algorithm", "lightning_fl.methods.FedProx"],
        ["no module 'lightning_fl.methods'", "its name alone is enough: FedProx."],
    ),
    "base method": (["--algorithm", "FedDP", "--algorithm.base", "FedAvgg"], ["'FedAvgg'", "did you mean 'FedAvg'"]),
    "clients to validate with": (
        ["--algorithm", "FedDP", "--algorithm.validation_clients", "50", *LENET5],
        ["validation_clients", "50", "20"],
    ),
    "gates and filters": (
        [
            "--algorithm",
            "FedDP",
            "--trainer.callbacks",
            "FilterPruning",
            "--trainer.callbacks.prune_epoch",
            "1",
            *LENET5,
        ],
        ["FilterPruning", "gates", "FedDP"],
    ),
    "classes that the data do not have": (["--model.num_classes", "5"], ["num_classes", "5", "Digits", "10"]),
    "help of a model": (["--model.help", "Nope"], ["'Nope'", "ImageClassifier"]),
    "help of a callback": (["--trainer.callbacks.help", "Earlystoping"], ["did you mean 'EarlyStopping'"]),
    "help of what has no names": (["--trainer.profiler.help", "Nope"], ["--trainer.profiler.help", "'Nope'"]),
    "monitor of steps": (
        ["--trainer.callbacks", "DeviceStatsMonitor", "--trainer.runner", "serial"],
        ["DeviceStatsMonitor", "--trainer.profiler"],
    ),
    "batch size finder": (["--trainer.callbacks", "BatchSizeFinder"], ["BatchSizeFinder", "data.batch_size"]),
    "learning rate finder": (["--trainer.callbacks", "LearningRateFinder"], ["LearningRateFinder", "learning_rate"]),
    "duration": (["--trainer.callbacks", "Timer", "--trainer.callbacks.duration", "1h"], ["1h", "DD:HH:MM:SS"]),
    "another command": (["lst"], ["'lst'", "did you mean 'list'"]),
    "part": (["--algorithm", "Algorithm", "--algorithm.rule", "Proximl"], ["'Proximl'", "did you mean 'Proximal'"]),
    "folder for client states": (["--trainer.client_states", "dsik"], ["'dsik'", "did you mean 'disk'", "folder"]),
    "no data": (["fit", "--model", "ImageClassifier"], ["data"]),
    "group": (["--trianer.max_rounds", "3"], ["--trianer.max_rounds", "trainer"]),
    "value": (["--trainer.max_rounds", "many"], ["max_rounds", "int", "many"]),
    "checkpoint that is none": (["--ckpt_path", "small.yaml"], ["small.yaml cannot be read", "or not a checkpoint"]),
    "network by path": (["--model.network", "wide.Wide"], ["'wide.Wide'", "{class_path: wide.Wide}", "lenet5"]),
    "network parameter": (["--model.netwrk", "cnn"], ["'netwrk'", "'network'"]),
    "value of a network option": (
        ["--model.network", "vgg11", "--data.image_size", "32", "--model.network_options", "{dropout: x}"],
        ["vgg11", "dropout must lie in [0, 1)", "got 'x'"],
    ),
    "data that do not know their classes": (
        ["--data", "Federated", "--data.datamodule", "lightning.pytorch.demos.boring_classes.BoringDataModule"],
        ["num_classes", "--data.num_classes"],
    ),
    "images too small": (["--model.network", "lenet5", "--data.image_size", "8"], ["lenet5", "8×8"]),
    "model": (["--model", "ImageClasifier"], ["'ImageClasifier'", "'ImageClassifier'"]),
    "model by path": (
        ["--model", "lightning_fl.modules.ImageClasifier"],
        ["'lightning_fl.modules.ImageClasifier'", "ImageClassifier"],
    ),
    "class of another kind": (["--model", "torch.nn.Linear"], ["torch.nn.Linear", "LightningModule"]),
    "partition": (["--data.partition", "Dirichle"], ["'Dirichle'", "'Dirichlet'", "IID"]),
    "partition parameter": (["--data.partition", "Dirichlet", "--data.partition.alpha", "0"], ["alpha", "0"]),
    "algorithm": (["--algorithm", "FedAgv"], ["'FedAgv'", "'FedAvg'", "ServerM"]),
    "algorithm parameter": (["--algorithm", "FedProx", "--algorithm.mi", "1"], ["'mi'", "mu"]),
    "algorithm value": (["--algorithm", "FedProx", "--algorithm.mu", "-1"], ["mu", "-1", "at least 0"]),
    "more senders than clients": (["--algorithm", "HDFL", "--algorithm.n", "4"], ["n=4", "[1, 3]"]),
    "kind of groups": (["--algorithm", "FedLDF", "--algorithm.groups", "layr"], ["'layr'", "'layer'", "tensor"]),
    "groups that miss a parameter": (
        ["--algorithm", "FedLDF", "--algorithm.n", "1", "--algorithm.groups", "{a: [network.fc.weight]}"],
        ["'network.fc.bias'"],
    ),
    "broadcast": (["--algorithm", "FedLDF", "--algorithm.broadcast", "al"], ["broadcast", "'al'", "'all'"]),
    "score": (["--algorithm", "FedADP", "--algorithm.score", "magnitud"], ["'magnitud'", "'magnitude'"]),
    "share that is kept": (["--algorithm", "FedADP", "--algorithm.keep", "1.5"], ["keep", "(0, 1]", "1.5"]),
    "callback": (["--trainer.callbacks+=EarlyStoping"], ["'EarlyStoping'", "'EarlyStopping'"]),
    "callback parameter": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitr", "val/loss"],
        ["'monitr'", "'monitor'"],
    ),
    "logger": (["--trainer.logger", "WandLogger"], ["'WandLogger'", "'WandbLogger'"]),
    "missing arrays": (["--data", "Arrays", "--data.path", "nowhere.npz"], ["nowhere.npz"]),
    "missing images": (["--data", "ImageFolder", "--data.root", "nowhere"], ["nowhere", "ROOT/train/CLASS/"]),
    "more clients in a round than there are": (["--trainer.clients_per_round", "21"], ["21", "20"]),
    "fraction of clients": (["--trainer.clients_per_round", "1.5"], ["1.5", "(0, 1]"]),
    "no clients": (["--trainer.clients_per_round", "0"], ["clients_per_round", "0"]),
    "negative fraction of clients": (["--trainer.clients_per_round=-0.5"], ["-0.5", "(0, 1]"]),
    "fraction of samples": (["--data.client_fraction", "1.5"], ["client_fraction", "1.5", "(0, 1]"]),
    "no samples": (["--data.client_fraction", "0"], ["client_fraction", "0", "(0, 1]"]),
    "fraction for validation": (["--data.val_fraction", "1.0"], ["val_fraction", "1.0", "[0, 1)"]),
    "dropout rate": (["--trainer.dropout_rate", "1.0"], ["dropout_rate", "1.0", "[0, 1)"]),
    "fraction of batches": (
        ["--trainer.limit_val_batches", "1.5"],
        ["limit_val_batches", "1.5", "[0.0, 1.0] or an int"],
    ),
    "epochs and steps": (
        ["--trainer.local_steps", "3", "--trainer.local_epochs", "2"],
        ["local_epochs=2", "local_steps=3", "exclude each other"],
    ),
    "a parameter of a method": (["--trainer.mu", "0.1"], ["--trainer.mu", "did you mean 'algorithm.mu'"]),
    "a flag of the trainer": (
        ["--data.max_rounds", "5"],
        ["Digits", "'max_rounds'", "did you mean 'trainer.max_rounds'"],
    ),
    "a parameter of the clock": (
        ["--trainer.macs_per_second", "5"],
        ["did you mean 'trainer.clock.macs_per_second'"],
    ),
    "a parameter of the partition": (
        ["--data.alpha", "0.1"],
        ["Digits", "'alpha'", "did you mean 'data.partition.alpha'"],
    ),
    "a parameter of the data, for the model": (["--model.batch_size", "5"], ["did you mean 'data.batch_size'"]),
    "no YAML for steps": (["--trainer.local_steps", "["], ["trainer.local_steps must be int"]),
    "an octal seed": (["--seed_everything=010"], ["--seed_everything has 010", "reads as 8"]),
    "an octal number in a list": (["--trainer.devices", "[010]"], ["--trainer.devices has 010", "reads as 8"]),
    "strategy": (["--trainer.strategy", "fsdp"], ["fsdp", "auto"]),
    "precision": (["--trainer.precision", "16-mixed"], ["16-mixed", "bf16-mixed"]),
    "folder with a long name": (["--trainer.default_root_dir", "a" * 300], ["a" * 300, "File name too long"]),
    "file with a long name": (["--data", "Arrays", "--data.path", "a" * 300], ["a" * 300, "File name too long"]),
    "checkpoint with a long name": (["--ckpt_path", "a" * 300], ["a" * 300, "Checkpoint file not found"]),
    "learning rate beyond the parameters' type": (["--model.learning_rate", "1e300"], ["learning_rate", "1e+300"]),
    "weight decay beyond the parameters' type": (["--model.weight_decay", "1e39"], ["weight_decay", "1e+39"]),
}
"""Further mistakes, most of them of the same kinds about other parts."""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        *(pytest.param(*mistake, id=name) for name, mistake in MISTAKES.items()),
        *(pytest.param(*mistake, id=name, marks=pytest.mark.process) for name, mistake in FURTHER_MISTAKES.items()),
    ],
)
@pytest.mark.sampled(12)
def test_a_mistake_ends_with_one_sentence(
    lightning_fl: Command, small: str, words: list[str], named: list[str]
) -> None:
    Path("broken.yaml").write_text("trainer: [\n")
    Path("misspelt.yaml").write_text("trainer: {max_roundz: 3}\n")
    whole = (
        words
        if words and (words[-1] == "fit" or not words[0].startswith("-"))
        else ["fit", "--config", small, *words]
        if words
        else []
    )
    sentence = lightning_fl(*whole).sentence
    assert [name for name in named if name not in sentence] == [], sentence
    assert not re.search(
        r"Parser key|Subtypes|<class |allowed: \.|typing\.|collections\.|None|Unable to|Subclass types", sentence
    ), f"the parser's own wording: {sentence}"
    assert not Path("run").exists(), "nothing may be written before training"


FILES = {
    "a class without a name": ("algorithm: {class_path: null}\n", ["file.yaml", "class_path", "line 1"]),
    "an octal number": ("trainer:\n  max_rounds: 010\n", ["file.yaml", "010 in line 2", "write 8, or '010' in quotes"]),
    "minutes and seconds": ("trainer:\n  max_rounds: 1:30\n", ["file.yaml", "1:30 in line 2", "write 90, or '1:30'"]),
    "with a fraction": ("model: {learning_rate: 1:30.5}\n", ["file.yaml", "1:30.5 in line 1", "90.5"]),
    "nothing": ("", ["file.yaml", "empty", "trainer", "model"]),
    "comments": ("# trainer:\n", ["file.yaml", "empty"]),
    "a list": ("- trainer\n- model\n", ["file.yaml", "mapping", "trainer"]),
    "a word": ("hello\n", ["file.yaml", "mapping", "hello"]),
    "no YAML": ("trainer: {max_rounds: [\n", ["file.yaml", "YAML"]),
    "seed": ("seed_everything: -1\n", ["seed_everything", "-1", "4294967295"]),
    "null for a seed": ("trainer: {}\nseed_everything: \n", ["seed_everything", "null"]),
    "tabs": ("trainer:\n\tmax_rounds: 3\n", ["file.yaml", "YAML"]),
    "a key without anything": ("trainer:\n", ["file.yaml", "trainer"]),
    "number for the trainer": ("trainer: 3\n", ["trainer", "mapping", "3"]),
    "list for the trainer": ("trainer: [max_rounds]\n", ["trainer", "mapping", "max_rounds"]),
    "null for the trainer": ("trainer:\nseed_everything: 1\n", ["trainer", "mapping", "null"]),
    "number for the model": ("model: 3\n", ["model", "LightningModule", "class_path", "3"]),
    "number for the data": ("data: 3\n", ["data", "FederatedDataModule", "class_path", "3"]),
    "number for the algorithm": ("algorithm: 3\n", ["algorithm", "Algorithm", "class_path", "3"]),
    "list for the algorithm": ("algorithm: [FedAvg]\n", ["algorithm", "one class", "FedAvg"]),
    "number for parameters": ("model: {class_path: ImageClassifier, init_args: 3}\n", ["init_args", "mapping"]),
    "parameters beside the class": (
        "data: {init_args: {partition: {class_path: Dirichlet, alpha: 3}}}\n",
        ["belong under its key init_args, not beside class_path."],
    ),
    "parameters beside the class of a part in a list": (
        "algorithm: {class_path: Algorithm, init_args: {steps: [Apply, {class_path: Momentum, beta: 3}]}}\n",
        ["steps of Algorithm", "belong under its key init_args, not beside class_path, got beta."],
    ),
    "a part in place of a list": (
        "algorithm: {class_path: Algorithm, init_args: {steps: Apply}}\n",
        ["steps of Algorithm must be a list, got Apply: give [Apply]."],
    ),
    "class_path by another name": ("algorithm: {classpath: FedProx}\n", ["class_path", "classpath"]),
    "null for a group": ("trainer: {clock: }\n", ["trainer.clock", "macs_per_second", "null"]),
    "number for a group": ("trainer: {clock: 3}\n", ["trainer.clock", "macs_per_second", "3"]),
    "null in a group": ("trainer: {clock: {macs_per_second: }}\n", ["trainer.clock.macs_per_second", "float", "null"]),
    "null in a list of parts": (
        "algorithm: {class_path: Algorithm, init_args: {steps: [{class_path: Momentum, init_args: {beta: }}]}}\n",
        ["algorithm.steps.beta", "float", "null"],
    ),
    "flag of Lightning's": ("trainer: {max_epochs: 10}\n", ["trainer.max_epochs", "max_rounds"]),
    "a class as a key": ("algorithm: {FedProx: {mu: 1}}\n", ["class_path", "init_args", "FedProx.mu"]),
    "a call": ("algorithm: FedProx(mu=0.1)\n", ["'FedProx(mu=0.1)'", "did you mean 'FedProx'"]),
    "a network for the model": ("model: cnn\n", ["'cnn'", "use --model ImageClassifier --model.network cnn."]),
    "a key twice": ("trainer: {max_rounds: 1}\nmodel: {}\ntrainer: {}\n", ["file.yaml", "trainer twice", "line 3"]),
    "a key twice further in": ("trainer:\n  max_rounds: 1\n  max_rounds: 2\n", ["max_rounds twice", "line 3"]),
    "a key twice in a list": (
        "trainer: {callbacks: [{class_path: Timer, class_path: EarlyStopping}]}\n",
        ["class_path twice", "line 1"],
    ),
    "an empty mapping": ("{}\n", ["file.yaml", "empty"]),
    "another configuration": ("config: base.yaml\n", ["key config", "--config OTHER --config file.yaml"]),
    "a group that is misspelt": ("trianer: {max_rounds: 3}\n", ["'trianer.max_rounds'", "trainer"]),
    "a mapping in itself": ("trainer: &a\n  callbacks: *a\n", ["file.yaml", "line 1", "contains itself"]),
    "deeply nested": ("trainer: " + "[" * 150 + "]" * 150, ["file.yaml", "line 1", "more than 100 levels"]),
    "too deeply nested to be read": ("trainer: " + "[" * 9000 + "]" * 9000, ["file.yaml", "more than 100 levels"]),
    "aliases of aliases": (
        "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)),
        ["file.yaml", "line 6", "100,000 values"],
    ),
    "misspelt callback": (
        "trainer: {callbacks: [Timer, {class_path: EarlyStoping}]}\n",
        ["did you mean 'EarlyStopping'"],
    ),
}


@pytest.mark.parametrize(("text", "named"), FILES.values(), ids=FILES.keys())
@pytest.mark.sampled(12)
def test_a_mistake_in_a_file_ends_with_one_sentence(
    lightning_fl: Command, small: str, text: str, named: list[str]
) -> None:
    Path("file.yaml").write_text(text)
    test_a_mistake_ends_with_one_sentence(lightning_fl, small, ["--config", "file.yaml"], named)


@pytest.mark.parametrize("value", ["3", "false", "null"])
def test_a_trainer_that_is_no_mapping_is_refused_before_a_flag_replaces_it(value: str, tmp_path: Path) -> None:
    (path := tmp_path / "file.yaml").write_text(f"seed_everything: 1\ntrainer: {value}\n")
    with pytest.raises(UserError, match=rf"^trainer of .*file\.yaml must be a mapping with .*, got {value}\.$"):
        check_file(path)


@pytest.mark.parametrize(
    ("text", "words", "named"),
    [
        ("max_rounds: 010\n", ["--trainer", "inner.yaml"], ["010 in line 1", "write 8"]),
        ("devices: phones\ndevices: silos\n", ["--trainer.clock", "inner.yaml"], ["devices twice"]),
        ("{class_path: FedProx, init_args: {mu: 010}}\n", ["--algorithm", "inner.yaml"], ["010 in line 1"]),
        (
            "{class_path: Dirichlet, init_args: {alpha: 010}}\n",
            ["--config", "outer.yaml"],
            ["inner.yaml", "010 in line 1"],
        ),
    ],
)
def test_a_file_of_a_part_is_read_as_strictly(
    lightning_fl: Command, small: str, text: str, words: list[str], named: list[str]
) -> None:
    Path("inner.yaml").write_text(text)
    Path("outer.yaml").write_text("data: {init_args: {partition: inner.yaml}}\n")
    test_a_mistake_ends_with_one_sentence(lightning_fl, small, words, named)


@pytest.mark.parametrize(
    ("words", "kept", "dropped"),
    [
        (["--config", "epochs.yaml", "--trainer.local_steps", "3"], "local_steps: 3", "local_epochs: null"),
        (["--config", "steps.yaml", "--trainer.local_epochs=4"], "local_epochs: 4", "local_steps: null"),
        (["--trainer.local_steps", "3", "--config", "epochs.yaml"], "local_epochs: 5", "local_steps: null"),
        (["--config", "epochs.yaml", "--config=steps.yaml"], "local_steps: 2", "local_epochs: null"),
        (
            ["--config", "epochs.yaml", "--config=steps.yaml", "--config", "none.yaml"],
            "local_epochs: 5",
            "local_steps: null",
        ),
    ],
)
def test_the_later_of_epochs_and_steps_replaces_the_earlier(
    lightning_fl: Command, words: list[str], kept: str, dropped: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rest = "model: ImageClassifier\ndata: Digits\n"
    Path("epochs.yaml").write_text("trainer: {local_epochs: 5}\n" + rest)
    Path("steps.yaml").write_text("trainer: {local_steps: 2}\n" + rest)
    Path("none.yaml").write_text("trainer: {local_steps: null, max_rounds: 1}\n")
    printed = lightning_fl("fit", *words, "--print_config")
    assert printed.code == 0, printed.err
    assert f"\n  {kept}\n" in printed.out
    assert f"\n  {dropped}\n" in printed.out
    said = [line for line in caplog.messages if "replaces" in line]
    if "none.yaml" in words:  # which takes the steps back itself
        assert said == []
    else:
        (line,) = said
        source = words[1] if words[0] == "--config" else "the command line"
        assert line == f"trainer.{kept.replace(':', '')} replaces trainer.{dropped.partition(':')[0]} of {source}."


@pytest.mark.parametrize(
    ("variables", "words", "kept", "source"),
    [
        ({"CONFIG": "epochs.yaml"}, ["--trainer.local_steps", "3"], ("local_steps", 3), "epochs.yaml"),
        ({"CONFIG": "epochs.yaml", "TRAINER__LOCAL_STEPS": "4"}, [], ("local_steps", 4), "epochs.yaml"),
        ({"TRAINER__LOCAL_STEPS": "4"}, ["--config", "epochs.yaml"], ("local_epochs", 5), "the environment"),
        ({"CONFIG": "epochs.yaml"}, ["--config", "{trainer: {local_steps: 2}}"], ("local_steps", 2), "epochs.yaml"),
    ],
)
def test_the_environment_is_the_earliest_source_of_epochs_and_steps(
    lightning_fl: Command,
    variables: dict[str, str],
    words: list[str],
    kept: tuple[str, int],
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    Path("epochs.yaml").write_text("trainer: {local_epochs: 5}\nmodel: ImageClassifier\ndata: Digits\n")
    for name, value in variables.items():
        monkeypatch.setenv(f"PL_FIT__{name}", value)
    trainer = printed(lightning_fl("fit", *words, "--print_config"))["trainer"]
    name, value = kept
    (other,) = {"local_epochs", "local_steps"} - {name}
    assert (trainer[name], trainer[other]) == (value, None)
    assert [line for line in caplog.messages if "replaces" in line] == [
        f"trainer.{name} {value} replaces trainer.{other} of {source}."
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{trainer: {max_rounds: 010}}", "the YAML after --config has 010 in line 1, which YAML reads as 8"),
        ("{trainer: {max_rounds: 1, max_rounds: 2}}", "the YAML after --config has the key max_rounds twice"),
        ("seed_everything: 1\nconfig: a.yaml", "the YAML after --config has the key config"),
        ("{}", "the YAML after --config is empty"),
    ],
)
def test_a_configuration_on_the_command_line_is_read_as_strictly_as_a_file(
    lightning_fl: Command, small: str, text: str, sentence: str
) -> None:
    for words in (["--config", text], [f"--config={text}"]):
        outcome = lightning_fl("fit", "--config", small, *words, "--print_config")
        assert (outcome.code, sentence in outcome.sentence) == (2, True), outcome.err


def test_a_text_that_looks_like_an_octal_number_stays_a_text(lightning_fl: Command, small: str) -> None:
    words = ["--data", "CIFAR10", "--data.root", "010", "--trainer.max_time", "01:00:00:00"]
    printed = lightning_fl("fit", "--config", small, *words, "--print_config")
    assert printed.code == 0, printed.err
    assert yaml.safe_load(printed.out)["data"]["init_args"]["root"] == "010"


def test_a_key_of_a_merged_mapping_may_be_given_anew(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("trainer: {clock: &first {<<: {uplink: 1}, uplink: 2}}\nmodel: {<<: *first, uplink: 3}\n")
    check_file(path)


def test_a_configuration_of_no_text_is_refused(lightning_fl: Command) -> None:
    Path("model.ckpt").write_bytes(bytes(range(128, 256)))
    assert "model.ckpt is not a text" in lightning_fl("fit", "--config", "model.ckpt").sentence


@pytest.mark.parametrize(
    ("text", "meant"), [("trainer: {max_roundz: 1}", "'trainer.max_rounds'"), ("modell: cnn", "'model'")]
)
def test_what_is_to_be_printed_is_checked_too(lightning_fl: Command, small: str, text: str, meant: str) -> None:
    Path("file.yaml").write_text(text)
    outcome = lightning_fl("fit", "--config", small, "--config", "file.yaml", "--print_config")
    assert f"did you mean {meant}" in outcome.sentence


@pytest.mark.matrix
def test_a_flag_without_a_value_is_named_whole(lightning_fl: Command, small: str) -> None:
    for words, flag in (
        (["--data.augment"], "--data.augment"),
        (["--data", "Digits", "--data.augment"], "--data.augment"),
        (["--data.augment", "--data.seed", "3"], "--data.augment"),
        (["--data.seed=3", "--data.augment", "--trainer.max_rounds", "1"], "--data.augment"),
        (["--data"], "--data"),
        (["--trainer.max_rounds"], "--trainer.max_rounds"),
        (["--model.learning_rate"], "--model.learning_rate"),
    ):
        assert lightning_fl("fit", "--config", small, *words).sentence == f"{flag} needs a value after it."


def test_the_text_none_is_no_null(lightning_fl: Command, small: str) -> None:
    words = ["fit", "--config", small, "--data.server_groups"]
    wanted = "server_groups of Digits must be float or null, got the text None: write null."
    assert lightning_fl(*words, "None").sentence == wanted
    Path("none.yaml").write_text("trainer:\n  deadline: None\n")
    assert "got the text None: write null" in lightning_fl("fit", "--config", small, "--config", "none.yaml").sentence


@pytest.mark.matrix
def test_a_class_of_the_user_s_own_may_call_its_parameters_as_it_likes(
    lightning_fl: Command, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own_names.py").write_text(
        "from lightning_fl.algorithms import Algorithm\n\n\nclass Own(Algorithm):\n"
        "    def __init__(self, base: float = 2.0, model: str = 'x') -> None:\n        super().__init__()\n"
    )
    monkeypatch.syspath_prepend(".")
    words = ["fit", "--config", small, "--algorithm", "own_names.Own"]
    assert lightning_fl(*words, "--algorithm.base", "ten").sentence == "base of Own must be float, got ten."
    assert "Own has no parameter 'bas'" in lightning_fl(*words, "--algorithm.bas", "3").sentence
    assert lightning_fl(*words, "--algorithm.base", "3").code == 0
    assert "algorithm.base must be float, got null" in lightning_fl(*words, "--algorithm.base", "null").sentence


def test_a_subclass_of_the_classifier_without_a_network_parameter(
    lightning_fl: Command, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own_net.py").write_text(
        "from lightning_fl.modules import ImageClassifier\n\n\n"
        "class OwnNet(ImageClassifier):\n"
        "    def __init__(self, width: int = 8):\n"
        "        super().__init__('linear', num_classes=10, in_channels=1, image_size=width)\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    outcome = lightning_fl("fit", "--config", small, "--model", "own_net.OwnNet", "--model.width", "8")
    assert outcome.code == 0, outcome.err


def test_classes_of_the_working_directory_are_found_from_a_file_elsewhere(lightning_fl: Command, small: str) -> None:
    """Check with a file in another folder, in which the parser reads it."""
    Path("own_elsewhere.py").write_text(
        "from lightning_fl.algorithms import Algorithm\n\n\nclass Own(Algorithm):\n    pass\n"
    )
    Path("folder").mkdir()
    Path("folder", "own.yaml").write_text("algorithm: own_elsewhere.Own\n")
    outcome = lightning_fl("fit", "--config", small, "--config", "folder/own.yaml")
    assert outcome.code == 0, outcome.err


def test_null_is_a_value_where_the_type_has_it(lightning_fl: Command, small: str) -> None:
    Path("nulls.yaml").write_text("trainer: {loss_guard: {rounds: }, max_time: , callbacks: , logger: }\n")
    assert lightning_fl("fit", "--config", small, "--config", "nulls.yaml").code == 0


@pytest.mark.parametrize(
    "flag", ["ckpt_path", "trainer.default_root_dir", "trainer.availability", "trainer.clock.trace"]
)
def test_null_is_no_path(lightning_fl: Command, small: str, flag: str) -> None:
    group, _, name = flag.rpartition(".")
    Path("null.yaml").write_text("ckpt_path: last\ntrainer: {clock: {trace: devices.csv}}\n")
    config = printed(
        lightning_fl("fit", "--config", small, "--config", "null.yaml", f"--{flag}", "null", "--print_config")
    )
    for key in filter(None, group.split(".")):
        config = config[key]
    assert config[name] is None


def test_every_flag_of_lightning_s_trainer_is_there_or_explained() -> None:
    stock, ours = (set(inspect.signature(trainer).parameters) for trainer in (Trainer, FederatedTrainer))
    assert stock - ours == set(STOCK_FLAGS)


@pytest.mark.parametrize(
    ("flag", "modules", "package"),
    [
        ("--trainer.logger=MLFlowLogger", ["mlflow"], "mlflow"),
        ("--trainer.logger=CometLogger", ["comet_ml"], "comet-ml"),
        (
            "--trainer.logger={class_path: TensorBoardLogger, init_args: {save_dir: run}}",
            ["tensorboard", "tensorboardX"],  # either is enough
            "tensorboard",
        ),
    ],
)
def test_a_missing_package_ends_with_what_to_install(
    lightning_fl: Command, small: str, flag: str, modules: list[str], package: str
) -> None:
    if installed := [*filter(find_spec, modules)]:
        pytest.skip(f"{installed[0]} is installed")
    sentence = lightning_fl("fit", "--config", small, flag).sentence
    assert re.search(rf"\w+Logger needs a package that is not installed: pip install .*{package}", sentence), sentence
    assert not Path("run").exists()


@pytest.mark.parametrize("flag", ["--trainer.callbacks=", "--trainer.callbacks+="])
@pytest.mark.parametrize("name", ["RichProgressBar", "RichModelSummary"])
def test_a_callback_without_its_package_ends_with_what_to_install(
    flag: str, name: str, lightning_fl: Command, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning.pytorch.callbacks.progress.rich_progress._RICH_AVAILABLE", False)
    monkeypatch.setattr("lightning.pytorch.callbacks.rich_model_summary._RICH_AVAILABLE", False)
    sentence = lightning_fl("fit", "--config", small, f"{flag}{name}").sentence
    assert f"{name} needs a package that is not installed: pip install" in sentence
    assert "rich" in sentence.partition("pip install")[2]


def test_a_module_that_is_not_installed_is_named() -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        import_module("package_that_nobody_has.inner")
    sentence = sentence_of(raised.value) or ""
    assert sentence.endswith("needs the package package_that_nobody_has, which is not installed.")
    assert sentence_of(ModuleNotFoundError("No module named 'torch.nothing'", name="torch.nothing")) is None


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        ("optuna", "lightning-fl[search]"),
        ("wandb", "wandb!=0.24.0,>=0.19.6"),
        ("jinja2", "jinja2>=3.1"),
        ("matplotlib", "matplotlib>=3.8"),
    ],
)
@pytest.mark.parametrize("hint", ["pip install -U '{}>=0.12.10'", "pip install -U {}", "pip install {}"])
def test_a_missing_package_is_named_with_its_extra_or_the_version_that_is_needed(
    hint: str, needed: str, said: str
) -> None:
    (declared,) = [line for line in requires("lightning-fl") or [] if re.match(rf"{needed}(?![\w-])", line)]
    assert ("extra ==" in declared) == ("[" in said)
    error = ModuleNotFoundError(f"Requirement '{needed}' not met. HINT: Try running `{hint.format(needed)}`")
    assert (sentence_of(error) or "").endswith(f"not installed: pip install '{said}'.")
    other = ModuleNotFoundError(f"No package. HINT: Try running `pip install -U '{needed}-other>=1'`")
    assert (sentence_of(other) or "").endswith(f"not installed: pip install -U '{needed}-other>=1'.")


def test_without_its_package_a_logger_is_refused_before_training(
    lightning_fl: Command, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent:
        """Lightning's object for a missing package."""

        def __bool__(self) -> bool:
            return False

        def __str__(self) -> str:
            return "Requirement 'wandb>=0.12.10' not met. HINT: Try running `pip install -U 'wandb>=0.12.10'`"

    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", Absent())
    failed = lightning_fl("fit", "--config", small, "--trainer.logger=WandbLogger")
    said = "WandbLogger needs a package that is not installed: pip install 'wandb!=0.24.0,>=0.19.6'."
    assert failed.sentence == said
    assert not Path("run").exists()


@pytest.mark.matrix
def test_a_timer_ends_a_run(lightning_fl: Command, small: str) -> None:
    timer = ["--trainer.callbacks", "Timer", "--trainer.callbacks.duration", "00:00:00:01"]
    assert printed(lightning_fl("fit", "--config", small, *timer, "--print_config"))
    ended = lightning_fl("fit", "--config", small, *timer, "--trainer.max_rounds", "1000000")
    assert ended.code == 0, ended.err
    assert 0 < len(metrics("run")) < 1000000
    assert Path("run/model.ckpt").is_file()


def test_list_has_help(lightning_fl: Command) -> None:
    for words in (["--help"], ["FedAvg", "--help"]):
        assert "usage: lightning-fl list" in lightning_fl("list", *words).out


@pytest.mark.matrix
def test_a_truncated_checkpoint_is_refused(lightning_fl: Command, small: str) -> None:
    lightning_fl("fit", "--config", small)
    last = Path("run/checkpoints/last.ckpt")
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    before = metrics("run")
    path = str(last)
    for command, checkpoint in (
        ("fit", "last"),
        ("fit", path),
        ("validate", path),
        ("test", "last"),
        ("predict", path),
    ):
        sentence = lightning_fl(command, "--config", small, "--ckpt_path", checkpoint).sentence
        assert "truncated" in sentence
        assert "previous.ckpt" in sentence
    assert metrics("run") == before
    assert lightning_fl("test", "--config", small, "--ckpt_path", "run/checkpoints/previous.ckpt").code == 0


def test_a_file_that_is_no_checkpoint_is_refused(lightning_fl: Command, small: str) -> None:
    assert "small.yaml" in lightning_fl("fit", "--config", small, "--ckpt_path", small).sentence


@pytest.mark.parametrize("checkpoint", ["last", "run/checkpoints/last.ckpt"])
@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_checkpoint_of_another_model_is_refused(
    lightning_fl: Command, small: str, command: str, checkpoint: str
) -> None:
    large = ["--data.image_size", "32"]
    lightning_fl("fit", "--config", small, *(large if command == "fit" else []))
    words = ["--model.network", "lenet5", *large, "--ckpt_path", checkpoint]
    assert "another model" in lightning_fl(command, "--config", small, *words).sentence


@pytest.mark.matrix
def test_a_checkpoint_of_another_algorithm_or_federation_is_not_resumed(lightning_fl: Command, small: str) -> None:
    lightning_fl("fit", "--config", small)
    resume = ["fit", "--config", small, "--ckpt_path", "last", "--trainer.max_rounds", "3"]
    sentence = lightning_fl(*resume, "--algorithm", "ServerM").sentence
    assert "FedAvg" in sentence
    assert "ServerM" in sentence
    sentence = lightning_fl(*resume, "--data.num_clients", "10").sentence
    assert "data.num_clients 20 → 10" in sentence
    exported = lightning_fl("fit", "--config", small, "--ckpt_path", "run/model.ckpt").sentence
    assert "last.ckpt" in exported


def test_the_quickstart_s_first_round_costs_what_it_says(lightning_fl: Command) -> None:
    words = ["--trainer.max_rounds", "1", "--trainer.enable_progress_bar", "false"]
    assert lightning_fl("fit", "--config", QUICKSTART, *words).code == 0
    (row,) = metrics("runs/quickstart")
    parameters = 6 * 25 + 6 + 6 * 16 * 25 + 16 + 400 * 120 + 120 + 120 * 84 + 84 + 84 * 10 + 10  # LeNet-5, grey images
    assert row["model/parameters"] == str(parameters)
    assert row["comm/uplink_bits"] == row["comm/downlink_bits"] == str(10 * 32 * parameters)


# ------------------------------------------------------------------------------------------------------ parts


def numeric_fields() -> list[tuple[type, str]]:
    """Return the numeric hyper-parameters of all exported parts."""
    rooms = (rules, codecs, exchanges, aggregators, steps)
    parts = [getattr(room, name) for room in rooms for name in room.__all__]
    kinds = (int, float, float | None)
    return [(part, name) for part in parts for name, p in parameters_of(part).items() if p.annotation in kinds]


def test_a_number_of_a_part_must_be_a_number() -> None:
    """Check the typed parameters of a part composed in YAML; the parser reads them from the annotations of all its bases."""
    taken = []
    for part, name in numeric_fields():
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(part, "part", skip={f.name for f in fields(part) if f.name != name})
        try:
            parser.parse_args([f"--part.{name}", "abc"])
        except ArgumentError as refused:
            if name in str(refused):
                continue
        taken.append(f"{part.__name__}.{name}")
    assert taken == []
    assert len(numeric_fields()) > 50
