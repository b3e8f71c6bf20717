"""Test `lightning-fl init`, `list NAME`, and the configurations that come with the package."""

import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from command_line import Command

from lightning_fl import __version__, algorithms
from lightning_fl.cli import catalogue, shipped_configs
from lightning_fl.cli.first_config import DATA_KEYS, MODEL_KEYS, TO_FILL_IN, TRAINER_KEYS
from lightning_fl.cli.planned_fit import plan
from lightning_fl.cli.problems import PROBLEMS
from lightning_fl.outputs import terminal

METHODS = [entry.name for entry in catalogue.entries() if entry.section == "algorithms"]
USING_SERVER = [entry.name for entry in catalogue.entries() if entry.uses_server]
BRIEF = {
    "FedDUS": ["--algorithm.tau_eff", "5"],
    "FedKT": ["--algorithm.epochs", "1"],
    "FedRep": ["--model.network", "lenet5"],  # the one layer of `linear` would stay on the clients
    "PruneFL": ["--algorithm.initial_passes", "2"],
}
"""Flags that suit a very short run of a method."""
NETWORKS = {entry.name: entry for entry in catalogue.entries() if entry.section == "networks"}
LATE = ("FedAP", "HRank", "IMC")
"""Methods that use the server's samples only when they prune, many rounds later."""


# ------------------------------------------------------------------------------------------------------------- init


SMALL = [
    *("--trainer.max_rounds", "1", "--trainer.limit_train_batches", "1", "--trainer.enable_model_summary", "false"),
    *("--trainer.enable_checkpointing", "false", "--data.image_size", "16", "--model.network"),
]


@pytest.mark.process
@pytest.mark.parametrize("method", METHODS)
def test_the_first_configuration_of_every_method_runs_as_it_is(method: str, lightning_fl: Command) -> None:
    written = lightning_fl("init", "mine", "--algorithm", method)
    assert written.code == 0
    command = written.out.splitlines()[-1].split()
    assert command == ["lightning-fl", "fit", "--config", "mine/experiment.yaml"]
    is_incompatible = method in NETWORKS["linear"].incompatible
    network = "lenet5" if is_incompatible else "linear"
    done = lightning_fl(*command[1:], *SMALL, network, *BRIEF.get(method, []))
    assert done.code == 0, done.err
    assert re.search(r"^rounds +1$", done.out, re.MULTILINE)
    if method in USING_SERVER and method not in LATE:
        refused = lightning_fl(*command[1:], *SMALL, network, "--data.server_fraction", "0")
        assert refused.code == 2
        assert "--data.server_fraction" in refused.err
    if is_incompatible:
        cuts = getattr(algorithms, method)().exchange.cuts
        early = ["--algorithm.prune_round", "0"] if method != "FedDP" and not cuts else []
        refused = lightning_fl(*command[1:], *SMALL, "linear", *early)
        assert refused.code == 2
        assert any(word in refused.err for word in ("filters", "convolution", "hidden layer"))


@pytest.mark.process
@pytest.mark.parametrize("network", NETWORKS)
def test_the_first_configuration_of_every_network_begins(network: str, lightning_fl: Command) -> None:
    assert lightning_fl("init", "--model", network).code == 0
    brief = ["--trainer.max_rounds", "0", "--data.eval_batch_size", "2"]  # two batches before the first round
    begun = lightning_fl("fit", "--config", "experiment.yaml", *brief)
    assert begun.code == 0, begun.err


REFUSED = {
    "ByGroup": "needs the group of each sample, but the data have none",
    "GivenIndices": "GivenIndices needs lists",
}
"""Sentences of partitions that need more than the data."""


@pytest.mark.process
@pytest.mark.parametrize("partition", [entry.name for entry in catalogue.entries() if entry.section == "partitions"])
def test_the_first_configuration_fits_every_partition(partition: str, lightning_fl: Command) -> None:
    lightning_fl("init")
    for seed in ("0", "1"):
        words = [
            "--data.partition",
            partition,
            "--data.seed",
            seed,
            "--trainer.max_rounds",
            "0",
            "--data.image_size",
            "16",
        ]
        words += ["--data.partition.min_samples", "1"] if partition == "QuantitySkew" else []  # of 72 on average
        begun = lightning_fl("fit", "--config", "experiment.yaml", *words, "--model.network", "linear")
        if partition in REFUSED:
            assert REFUSED[partition] in begun.err
            continue
        assert begun.code == 0, begun.err


def test_init_refuses_what_does_not_fit_together(lightning_fl: Command, tmp_path: Path) -> None:
    for words, said in {
        ("--algorithm", "FedAP", "--model", "linear"): "FedAP prunes filters of convolutions, and linear has none",
        ("--data", "FashionMNIST", "--model", "vgg11"): "needs images of at least 32×32, got 28×28",
    }.items():
        refused = lightning_fl("init", *words)
        assert refused.code == 2
        assert f"--model {words[-1]} does not fit: " in refused.err
        assert said in refused.err
        allowed = refused.err.partition("; allowed with ")[2].partition(": ")[2].rstrip(".\n").split(", ")
        assert "lenet5" in allowed
        assert words[-1] not in allowed
    assert list(tmp_path.iterdir()) == []


def test_the_first_configuration_has_defaults_and_explains_each_value(lightning_fl: Command, tmp_path: Path) -> None:
    assert lightning_fl("init", "--algorithm", "FedDUM", "--data", "CIFAR10", "--model", "vgg11").code == 0
    text = (tmp_path / "experiment.yaml").read_text()
    lines = text.splitlines()
    for above, line in pairwise(lines):
        assert not re.match(r" +(?!class_path|init_args)\w+:", line) or re.match(r" +# ", above), line
    written = yaml.safe_load(text)
    by_name = {entry.name: entry for entry in catalogue.entries()}
    assert written["algorithm"]["class_path"] == "FedDUM"
    defaults = {name: parameter["default"] for name, parameter in by_name["FedDUM"].parameters.items()}
    assert written["algorithm"]["init_args"] == defaults
    own = {"local_epochs": 5, "default_root_dir": "runs/feddum_vgg11_cifar10", "network": "vgg11", "download": True}
    own["server_fraction"] = 0.05
    for given, name in ((written["trainer"], "FederatedTrainer"), (written["data"]["init_args"], "CIFAR10")):
        known = {key: parameter["default"] for key, parameter in by_name[name].parameters.items()}
        assert given == {key: own.get(key, known[key]) for key in given}
        assert len(given) > 3
    assert "vgg11" not in known
    assert "# VGG-11 with linear layers" in text


def test_init_names_what_is_to_be_filled_in(lightning_fl: Command, tmp_path: Path) -> None:
    for name, values in TO_FILL_IN.items():
        written = lightning_fl("init", name, "--data", name)
        begun = yaml.safe_load((tmp_path / name / "experiment.yaml").read_text())["data"]["init_args"]
        for key, value in values.items():
            assert f"Set data.{key} in it to your own." in written.out
            assert begun[key] == value


def test_a_first_configuration_gives_the_server_whole_users(lightning_fl: Command, tmp_path: Path) -> None:
    for method, share in (("FedAvg", 0.0), ("FedDU", 0.05), ("FedKT", 0.2)):
        lightning_fl("init", method, "--data", "Leaf", "--algorithm", method)
        begun = yaml.safe_load((tmp_path / method / "experiment.yaml").read_text())["data"]["init_args"]
        assert begun["server_groups"] == share
        assert "server_fraction" not in begun


def test_every_key_of_a_first_configuration_exists() -> None:
    of = {
        section: {key for e in catalogue.entries() if e.section == section for key in e.parameters}
        for section in catalogue.FLAGS
    }
    assert set(TRAINER_KEYS) <= of["trainer"]
    assert set(MODEL_KEYS) <= of["models"]
    assert set(DATA_KEYS) <= of["data"]


def test_the_methods_that_use_the_server_are_known() -> None:
    assert {"FedDU", "FedKT", "DataSharing", "FedAP", "IMC"} <= {*USING_SERVER}
    assert {*USING_SERVER}.isdisjoint({"FedAvg", "FedProx", "FedDP", "ServerM", "SCAFFOLD"})


MISTAKES = {
    "an unknown method": (["--algorithm", "fedagv"], ["--algorithm 'fedagv' is unknown", "did you mean 'FedAvg'?"]),
    "unknown data": (["--data", "cifar"], ["--data 'cifar' is unknown", "CIFAR10"]),
    "an unknown network": (["--model", "lenet"], ["--model.network 'lenet' is unknown", "lenet5"]),
    "an unknown flag": (["--algoritm", "FedDU"], ["no flag --algoritm", "'--algorithm'"]),
    "an empty folder": (["a", ""], ["lightning-fl init"]),
    "two folders": (["a", "b"], ["lightning-fl init", "b"]),
    "an existing file": (["there"], ["there/experiment.yaml exists", "--overwrite"]),
    "a folder in a file": (["there/experiment.yaml/x"], ["there/experiment.yaml/x", "cannot be written"]),
}


@pytest.mark.parametrize(("words", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_init_explains_a_mistake(words: list[str], said: list[str], lightning_fl: Command, tmp_path: Path) -> None:
    assert lightning_fl("init", "there").code == 0
    (tmp_path / "there" / "experiment.yaml").write_text("mine")
    failed = lightning_fl("init", *words)
    assert failed.code == 2
    assert failed.err.startswith("lightning-fl: error: ")
    assert len(failed.err.splitlines()) == 1
    assert [text for text in said if text not in failed.err] == []
    assert (tmp_path / "there" / "experiment.yaml").read_text() == "mine"
    assert lightning_fl("init", "there", "--overwrite").code == 0
    assert (tmp_path / "there" / "experiment.yaml").read_text() != "mine"


# ------------------------------------------------------------------------------------------------------------- list


def test_list_explains_one_name(lightning_fl: Command) -> None:
    explained = lightning_fl("list", "FedDU").out
    assert "FedAvg with a dynamic update" in explained
    assert re.search(r"--algorithm\.decay +Factor .*\(float, default: 0.99\)", explained)
    assert "--model.network lenet5" in lightning_fl("list", "lenet5").out
    assert "--trainer.callbacks.target" in lightning_fl("list", "TargetReached").out
    assert "--trainer.clock.macs_per_second" in lightning_fl("list", "trainer").out
    assert "--algorithm.uplink.alpha" in lightning_fl("list", "TopK").out
    assert [line.split()[0] for line in lightning_fl("list", "partitions").out.splitlines()] == [
        "partitions",
        "ByGroup",
        "ClassPriors",
        "Classes",
        "Dirichlet",
        "GivenIndices",
        "IID",
        "LogNormalSizes",
        "QuantitySkew",
        "Shards",
    ]
    unknown = lightning_fl("list", "FedDUU")
    assert unknown.code == 2
    assert "did you mean 'FedDU" in unknown.err


@pytest.mark.matrix
def test_list_is_wrapped_for_a_terminal_or_a_given_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(terminal, "is_terminal", lambda: False)
    monkeypatch.setattr(shipped_configs, "method_of", cache(shipped_configs.method_of))  # reads a file
    methods = [[one.name] for one in catalogue.entries() if one.section == "algorithms"]
    asked: list[list[str]] = [[], ["configs"], *methods]
    plain = {tuple(words): catalogue.listing(words) for words in asked}
    assert max(map(len, plain[()].splitlines())) > 120
    for columns, is_terminal, lists in [(60, True, asked), (80, False, asked[:6]), (120, True, asked[:6])]:
        monkeypatch.setattr(terminal, "is_terminal", lambda shown=is_terminal: shown)
        monkeypatch.setenv("COLUMNS", str(columns))
        for words in lists:
            wrapped = catalogue.listing(words)
            assert [line for line in wrapped.splitlines() if len(line) > columns] == []
            assert wrapped.split() == plain[tuple(words)].split()


def test_list_has_every_method_in_one_group() -> None:
    methods = [one.name for one in catalogue.entries() if one.section == "algorithms"]
    assert sorted(name for problem in PROBLEMS for name in problem.methods) == methods
    assert {name for problem in PROBLEMS for name in problem.others} <= {*methods}
    assert not any({*problem.methods} & {*problem.others} for problem in PROBLEMS)
    shown = re.findall(r"^algorithms: (.+)$", catalogue.listing(["algorithms"]), re.MULTILINE)
    assert shown == [problem.title for problem in PROBLEMS if problem.methods]


@pytest.mark.process
def test_the_groups_of_few_bytes_say_the_directions() -> None:
    """Compare the bytes of whole runs in which all clients take part with FedAvg's, by a plan of each."""
    base = ["--config=quickstart", "--model.network=linear", "--data.num_clients=5"]
    base += ["--trainer.local_steps=1", "--trainer.clients_per_round=5", "--trainer.max_rounds=10"]
    groups = {problem.title: problem.methods for problem in PROBLEMS if "few" in problem.title}
    names = ["FedAvg", *(name for methods in groups.values() for name in methods)]
    plans = {name: plan([*base, f"--algorithm={name}"]) for name in names}
    ratios = {name: of.downlink_bytes / plans["FedAvg"].downlink_bytes for name, of in plans.items()}
    assert all(of.uplink_bytes < 0.9 * plans["FedAvg"].uplink_bytes for name, of in plans.items() if name != "FedAvg")
    same, three_times, fewer = ([ratios[name] for name in methods] for methods in groups.values())
    assert same == pytest.approx([1.0] * len(same), rel=1e-3)
    assert three_times == pytest.approx([3.0] * len(three_times), rel=1e-3)
    assert max(fewer) < 1


# ------------------------------------------------------------------------------------------- shipped configurations


@pytest.mark.matrix
def test_a_configuration_of_the_package_is_found_by_name_from_any_folder(lightning_fl: Command, tmp_path: Path) -> None:
    names = lightning_fl("list", "configs").out.splitlines()[1:]
    assert [line.split()[0] for line in names] == shipped_configs.names()
    about = dict(line.split(None, 1) for line in names)
    assert about["feddp/methods/scaffold"] == "SCAFFOLD: Without gates"
    assert "50 clients with 1,000 images each" in about["fedldf/iid"]
    assert not [name for name in names if "sweeps" in name]
    for form in ("feddumap/cnn_cifar10", "feddumap/cnn_cifar10.yaml", "configs/feddumap/cnn_cifar10.yaml"):
        laid = lightning_fl("fit", "-c", form, "--config=feddumap/methods/feddu", "--print_config")
        assert laid.code == 0, laid.err
        printed = yaml.safe_load(laid.out)
        assert printed["seed_everything"] == 777
        assert printed["algorithm"]["class_path"].endswith(".FedDU")
    # A file of the user's own comes first, a folder does not.
    (tmp_path / "feddumap").mkdir()
    assert lightning_fl("fit", "--config", "feddumap/cnn_cifar10", "--print_config").code == 0
    (tmp_path / "feddumap" / "cnn_cifar10").mkdir()
    assert lightning_fl("fit", "--config", "feddumap/cnn_cifar10", "--print_config").code == 0
    (tmp_path / "quickstart").write_text("trainer: {max_rounds: 7}\nmodel: ImageClassifier\ndata: Digits")
    assert "max_rounds: 7" in lightning_fl("fit", "--config", "quickstart", "--print_config").out


def test_a_mistyped_configuration_has_a_nearest_name(lightning_fl: Command, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("trainer: {max_rounds: 7}")
    for given, nearest in {
        "feddumap/cn_cifar10": "'feddumap/cnn_cifar10'",
        "configs/quikstart.yaml": "'quickstart'",
        "smal.yaml": "'small.yaml'",
    }.items():
        failed = lightning_fl("fit", "--config", given)
        assert failed.code == 2
        assert failed.err.count("\n") == 1
        assert f"did you mean {nearest}?" in failed.err
    assert "lightning-fl list configs" in lightning_fl("fit", "--config", "zzz").err


def test_a_printed_configuration_names_this_package(lightning_fl: Command) -> None:
    assert lightning_fl("fit", "--config", "quickstart", "--print_config").out.startswith(
        f"# lightning-fl=={__version__}\n"
    )
