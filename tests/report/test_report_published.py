"""Test published numbers next to your own runs: the right rows, and the differences of the runs."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from made_runs import rising, write_run

from lightning_fl import algorithms, data
from lightning_fl.cli.planned_fit import resolve
from lightning_fl.modules import NETWORKS
from lightning_fl.report import report
from lightning_fl.report.comparison import Curve, Group, Metric
from lightning_fl.report.published import measured, read_published
from lightning_fl.report.published_settings import published_settings
from lightning_fl.report.records import Record, flatten

pytestmark = pytest.mark.usefixtures("types_of_a_new_process")


def test_the_published_rows_are_those_of_the_paper() -> None:
    rows = {(row.network, row.method): row for row in read_published("feddumap:12").rows}
    assert rows["vgg11", "FedDUM"].numbers.items() >= {"simulated_seconds": 7490, "rounds": 77}.items()
    assert rows["cnn", "FedAvg"].target == 0.6
    assert rows["cnn", "FedAvg"].numbers["final_accuracy"] == 0.626
    ssm = {(row.dataset, row.setting, row.method): row for row in read_published("FedAdam-SSM:I").rows}
    assert ssm["Fashion-MNIST", "IID", "FedAdam"].numbers == {"uplink_mbit_per_client": 24.0}
    assert ssm["Fashion-MNIST", "IID", "1-bit Adam"].numbers == {"uplink_mbit_per_client": float("inf")}


def test_rows_of_momentum_are_those_of_methods_with_server_data() -> None:
    """Check the differences and ratios that section 4.2.2 prints, which names the rows' methods."""
    rows = {(row.network, row.method): row for row in read_published("feddumap:10").rows}
    for method in ("ServerM", "DeviceM", "FedDA"):
        assert not any(row.algorithm == method for row in rows.values()), "it uses no server data"
    assert all(published_settings("feddumap", "CIFAR-10", "cnn", f"FedDU{end}", "")["p"] == 0.1 for end in ENDS)
    ours = {row.network: row.numbers for row in read_published("feddumap:12").rows if row.method == "FedDUM"}
    (sm, dm, da) = (rows["vgg11", f"FedDU-{end}"].numbers for end in ENDS)
    assert [round(ours["vgg11"]["final_accuracy"] - of["final_accuracy"], 3) for of in (sm, dm)] == [0.044, 0.016]
    assert round(ours["lenet5"]["final_accuracy"] - rows["lenet5", "FedDU-DA"].numbers["final_accuracy"], 3) == 0.062
    seconds = ours["vgg11"]["simulated_seconds"]
    found = [round(of["simulated_seconds"] / seconds - 1, 3) for of in (sm, dm)]
    assert found == [0.442, 0.429]
    assert da["simulated_seconds"] > sm["simulated_seconds"]


ENDS = ("SM", "DM", "DA")


@pytest.mark.matrix
def test_own_runs_stand_under_the_rows_of_their_method_and_setting(tmp_path: Path) -> None:
    five = {"data": {"server_fraction": 0.05}}
    write_run(tmp_path / "du", rising(50, 0.0124), "FedDU", **five)
    write_run(tmp_path / "avg", rising(50, 0.0121))
    arguments = [str(tmp_path / "du"), str(tmp_path / "avg"), "--out", str(tmp_path / "out")]
    printed = report([*arguments, "--paper", "feddumap:2"])
    lines = [line.split("|")[1:-1] for line in printed.partition("## Published")[2].splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert all("vgg11" not in line[1] for line in cells), "the runs use the CNN"
    place = cells.index(["FedDU", "CIFAR-10, cnn, p=5%", "–", "0.663"])
    others = "unknown partition, server classes: all, 20 clients, 50 rounds, computation: estimated"
    assert cells[place + 1] == ["↳ here: FedDU", others, "–", "0.620"]
    assert sum(line[0] == "↳ here: FedDU" for line in cells) == 1
    printed = report([*arguments, "--paper", "feddumap:10"])
    assert re.search(
        r"here: FedAvg .* 50 rounds, computation: estimated .* 0\.6 .* 0\.605 .* 100 \| +50 \| +4\.50 ", printed
    )


@pytest.mark.parametrize(("selected", "megabits"), [([4.0, 4.0, 1.0], 0.16 / 3), (None, None)])
def test_the_uplink_of_a_client_is_that_of_a_mean_cohort(selected: list[float] | None, megabits: float | None) -> None:
    """Test a private run, whose cohorts are drawn by Poisson sampling, and one that leaves out their sizes."""
    columns = {"round": np.arange(3.0), "val/accuracy": np.array([0.1, 0.9, 0.9])}
    columns |= {"comm/total_uplink_bytes": np.array([1e4, 2e4, 3e4])}
    columns |= {} if selected is None else {"clients/selected": np.array(selected)}
    group = Group("run", (Curve(Record(Path("run"), columns, {}, "FedAdam", None, ()), Metric(window=1)),))
    row = next(row for row in read_published("fedadam-ssm:I").rows if row.method == "FedAdam")
    mean, _, count = measured(row, group)["uplink_mbit_per_client"]
    assert (mean, count) == (megabits and pytest.approx(megabits), 0 if selected is None else 1)


PUBLISHED = [read_published(f"feddumap:{number}") for number in range(2, 14)] + [read_published("fedadam-ssm:I")]
ROWS = [row for published in PUBLISHED for row in published.rows]
CONFIGS = Path(__file__).parents[2] / "configs"


def test_every_row_names_what_there_is() -> None:
    assert {row.network for row in ROWS} <= set(NETWORKS)
    assert {row.algorithm for row in ROWS} <= set(algorithms.__all__)
    for row in ROWS:
        assert hasattr(
            data, published_settings(row.paper, row.dataset, row.network, row.algorithm, row.setting)["data"]
        )


def shipped(task: Path, method: Path, **more: Any) -> Group:
    """Return the last round of a run of two files of `configs`, as a group."""
    given: dict[str, Any] = {}
    for path in (task, method):
        given |= flatten(yaml.safe_load(path.read_text()))
    given["trainer.local_steps"] = given.get("trainer.local_steps")
    given |= more
    columns = {"round": np.array([given["trainer.max_rounds"] - 1.0]), "val/accuracy": np.array([0.5])}
    record = Record(task, columns, given, given["algorithm"], None, ())
    return Group(given["algorithm"], (Curve(record, Metric()),))


TASKS = sorted([*CONFIGS.glob("feddumap/*.yaml"), *CONFIGS.glob("fedadam_ssm/*.yaml")])


@pytest.mark.process
@pytest.mark.parametrize("task", TASKS, ids=lambda path: path.stem)
def test_the_experiments_that_come_with_the_package_are_those_of_the_papers(task: Path) -> None:
    names = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashionmnist": "Fashion-MNIST", "svhn": "SVHN"}
    dataset = names[task.stem.split("_")[1]]
    setting = {"iid": "IID", "dirichlet": "Dirichlet(0.1)"}.get(task.stem.split("_")[-1])
    groups = {method: shipped(task, method) for method in (task.parent / "methods").glob("*.yaml")}
    num_rows = 0
    for published in PUBLISHED:
        for method, group in groups.items():
            for row in (row for row in published.rows if row.is_of(group) and row.dataset == dataset):
                if row.paper.replace("-", "_") != task.parent.name or setting not in (None, row.setting):
                    continue
                num_rows += 1
                assert row in published.nearest_rows(group) or row.setting, row
                if row.setting in ("", setting) or "misprinted" in row.setting:
                    assert row.differences(group) == (["preset=light"] if method.stem == "fedkt" else [])
    assert num_rows > 2 or task.stem == "resnet18_cifar100", "only ResNet-18 is missing in the paper's table"


TASK, METHODS = CONFIGS / "feddumap" / "cnn_cifar10.yaml", CONFIGS / "feddumap" / "methods"


SHIPPED = [
    (CONFIGS / folder / task, method)
    for folder, task in (("feddumap", "cnn_cifar10.yaml"), ("fedadam_ssm", "resnet18_svhn_iid.yaml"))
    for method in sorted((CONFIGS / folder / "methods").glob("*.yaml"))
]


@pytest.mark.process
@pytest.mark.parametrize(("task", "method"), SHIPPED, ids=lambda path: path.stem)
def test_the_defaults_that_a_whole_configuration_also_has_are_no_differences(task: Path, method: Path) -> None:
    whole = {"trainer.local_steps": None} | flatten(resolve([f"--config={task}", f"--config={method}"]))
    group = shipped(task, method, **whole)
    dataset = "CIFAR-10" if "cifar10" in task.stem else "SVHN"
    rows = [row for row in ROWS if row.is_of(group) and row.dataset == dataset and row.setting in ("", "IID")]
    found = {tuple(row.differences(group)) for row in rows}
    assert found <= {("preset=light",) if method.stem == "fedkt" else ()}


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("data", "Digits", "Digits"),
        ("data.partition", "IID", "IID"),
        ("data.partition.shards_per_client", 4, "Shards(4)"),
        ("trainer.clients_per_round", 0.2, "20 a round"),
        ("trainer.local_epochs", 1, "1 epoch"),
        ("trainer.local_steps", 7, "7 steps"),
        ("trainer.max_rounds", 60, "60 rounds"),
        ("data.batch_size", 64, "batch 64"),
        ("data.augment", False, "not augmented"),
        ("data.server_fraction", 0.02, "p=2%"),
        ("data.server_degree", 0.61, "server classes: 2"),
        ("algorithm.C", 1.5, "C=1.5"),
        ("model.lr_decay", 1.0, "lr_decay 1"),
        ("data.server_classes", None, "server classes: all"),
        ("data.normalize", True, "normalize=true"),
        ("data.val_fraction", 0.5, "val_fraction=0.5"),
        ("model.network_options.width", 0.125, "width=0.125"),
        ("model.momentum", 0.9, "momentum=0.9"),
        ("model.learning_rate", "unknown", "learning rate unknown"),
        ("trainer.clock.computation_seconds", 23.0, "computation: 23 s"),
        ("trainer.clock.uplink_mebibytes_per_second", 1.0, "uplink_mebibytes_per_second=1.0"),
        ("trainer.limit_train_batches", 1, "limit_train_batches=1"),
        ("trainer.callbacks.0", "FilterPruning", "FilterPruning"),
        ("optimizer", "Adam", "optimizer=Adam"),
    ],
)
def test_each_respect_in_which_a_run_differs_is_said(flag: str, value: Any, said: str) -> None:
    (row,) = (r for r in read_published("feddumap:12").rows if (r.network, r.method) == ("cnn", "FedDU"))
    group = shipped(TASK, METHODS / "feddu.yaml", **{flag: value})
    assert row.differences(group) == [said]


def test_a_file_of_images_is_said_once() -> None:
    (row,) = (r for r in read_published("feddumap:12").rows if (r.network, r.method) == ("cnn", "FedDU"))
    own = {"data": "Arrays", "data.path": "images/cifar10.npz", "data.num_classes": None}
    assert row.differences(shipped(TASK, METHODS / "feddu.yaml", **own)) == ["Arrays of cifar10.npz"]


@pytest.mark.parametrize(
    ("folder", "method", "flag", "value", "said"),
    [
        ("feddumap", "feddum", "algorithm.beta", 0.3, "beta=0.3"),
        ("feddumap", "feddum", "algorithm.local_beta", 0.5, "local_beta=0.5"),
        ("feddumap", "feddusm", "algorithm.beta", 0.3, "beta=0.3"),
        ("feddumap", "feddudm", "algorithm.local_beta", 0.3, "local_beta=0.3"),
        ("feddumap", "fedduda", "algorithm.beta", 0.3, "beta=0.3"),
        ("feddumap", "fedap", "algorithm.prune_round", 5, "prune_round=5"),
        ("feddumap", "feddumap", "algorithm.max_sources", 20, "20 sources"),
        ("feddumap", "fedap", "algorithm.rate_mode", "gap", "rate_mode=gap"),
        ("feddumap", "fedduda", "algorithm.variant", "frozen", "variant=frozen"),
        ("feddumap", "imc", "algorithm.prune_round", 50, "prune_round=50"),
        ("feddumap", "data_sharing", "algorithm.cap", 0.1, "cap=0.1"),
        ("feddumap", "prunefl", "algorithm.interval", 5, "interval=5"),
        ("fedadam_ssm", "one_bit_adam", "trainer.local_steps", 30, "30 steps"),
        ("fedadam_ssm", "efficient_adam", "trainer.local_steps", 30, "30 steps"),
        ("fedadam_ssm", "fedadam", "trainer.local_steps", 1, "1 step"),
        ("fedadam_ssm", "fedadam", "algorithm.weighting", "samples", "weighted by samples"),
        ("fedadam_ssm", "fedadam_ssm", "algorithm.epsilon", 1e-8, "epsilon=1e-08"),
    ],
)
def test_each_value_of_a_method_that_differs_is_said(
    folder: str, method: str, flag: str, value: Any, said: str
) -> None:
    task = TASK if folder == "feddumap" else CONFIGS / folder / "cnn_fashionmnist_iid.yaml"
    dataset, settings = ("CIFAR-10", {""}) if folder == "feddumap" else ("Fashion-MNIST", {"IID"})
    method_file = task.parent / "methods" / f"{method}.yaml"
    as_published, changed = shipped(task, method_file), shipped(task, method_file, **{flag: value})
    rows = [row for row in ROWS if row.is_of(changed) and row.dataset == dataset and row.setting in settings]
    assert rows, "a table has the method"
    for row in rows:
        assert (row.differences(as_published), row.differences(changed)) == ([], [said])


@pytest.mark.parametrize(
    ("number", "more", "setting"),
    [
        (2, {"data.server_fraction": 0.05}, "p=5%"),
        (2, {"data.server_fraction": 0.05, "data": "Digits"}, "p=5%"),
        (3, {"algorithm.f": "inverse"}, "p=10%; f'=1/(acc+eps)"),
        (4, {"algorithm.C": 0.5, "data.server_fraction": 0.01}, "p=1%; C=0.5"),
        (5, {"data.server_classes": 10}, "p=10%; server_noniid_degree=9.0e-6"),
    ],
)
def test_a_run_stands_under_the_row_of_its_setting(number: int, more: dict[str, Any], setting: str) -> None:
    published = read_published(f"feddumap:{number}")
    found = published.nearest_rows(shipped(TASK, METHODS / "feddu.yaml", **more))
    assert [row.setting for row in found] == [setting]


def test_runs_of_another_data_set_or_partition_are_said_to_be(tmp_path: Path) -> None:
    write_run(tmp_path / "iid", rising(9), "FedAdamSSM", data_class="Digits", model={"network": "cnn_mnist"},
              data={"partition": {"class_path": "lightning_fl.data.IID"}}, mask="parameters")  # fmt: skip
    write_run(tmp_path / "other", rising(9), "FedProx", data_class="Digits")
    write_run(tmp_path / "linear", rising(9), "FedAdam", data_class="Digits", model={"network": "linear"})
    folders = [str(tmp_path / name) for name in ("iid", "other", "linear")]
    printed = report([*folders, "--out", str(tmp_path / "out"), "--paper", "fedadam-ssm:I"]).splitlines()
    (place,) = (i for i, line in enumerate(printed) if "here: FedAdamSSM" in line)
    assert re.match(r"\| FedAdam-SSM +\| Fashion-MNIST, cnn_mnist, IID +\|", printed[place - 1])
    assert "| Digits" in printed[place]
    assert "- FedProx is not in this table: it has no row for FedProx." in printed
    assert "- FedAdam is not in this table: it has no row for FedAdam with the network linear." in printed
