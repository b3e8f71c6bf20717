"""Test that stacks have the same clients whatever memory is free, and what happens where memory does not suffice."""

import copy
import importlib
import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer
from roster import ROSTER
from toys import Perceptron, federation, samples

from lightning_fl import UserError
from lightning_fl.outputs import checkpoint_file
from lightning_fl.rules import LocalOptimizer

stacked_module = importlib.import_module("lightning_fl.clients.stacked")
local_training = importlib.import_module("lightning_fl.clients.local_training")
runners = importlib.import_module("lightning_fl.clients.choose_runner")
MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 3 MiB is free. More."


def chosen(device: str, monkeypatch: pytest.MonkeyPatch, wanted: Any = "auto", **given: Any) -> dict[str, Any]:
    """Return the description of the runner that is chosen on a device for a module that can be stacked."""
    found = ([], given.pop("client_bytes", 2**20), given.pop("draws", False))
    monkeypatch.setattr(runners, "_try", lambda *_: found)
    flat_module: Any = SimpleNamespace(
        fabric=SimpleNamespace(device=torch.device(device)), module=Perceptron(), is_manual=False, compiled=None
    )
    job: Any = SimpleNamespace(personal=(), rule=LocalOptimizer())
    options: Any = {"work": 100_000, "num_clients": 100, **given}
    return runners.describe_runner(runners.choose_runner(wanted, None, flat_module, job, None, **options))


@pytest.mark.parametrize("wanted", ["auto", "stacked"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_free_memory_changes_neither_runner_nor_stack(
    device: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for free in (10**9, 10**11):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, free=free: (free, 2 * free))
        monkeypatch.setattr(os, "sysconf", lambda name, free=free: 4096 if name == "SC_PAGE_SIZE" else free // 4096)
        found.append(chosen(device, monkeypatch, wanted, client_bytes=10**8))
    assert found[0] == found[1]
    assert found[0]["wanted"] == "stacked"
    assert 10 < found[0]["clients_at_once"] < 100


def test_a_stack_has_a_limit_for_small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("cpu", monkeypatch)["clients_at_once"] == runners.MOST_AT_ONCE_ON_CPU
    assert chosen("cuda", monkeypatch)["clients_at_once"] == runners.MOST_AT_ONCE_ON_GPU
    assert chosen("cuda", monkeypatch, client_bytes=2**40)["clients_at_once"] == 1


def test_processes_agree_on_the_runner() -> None:
    two, three = (runners.describe_runner(stacked_module.Stacked(count)) for count in (2, 3))
    serial = runners.describe_runner(runners.serial)
    assert runners.describe_runner(runners.agreed_runner([three, two])) == two
    assert runners.describe_runner(runners.agreed_runner([three, serial])) == serial


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"draws": True}, "draws random numbers"),
        ({"work": runners.MOST_WORK_ON_CPU * 10_000}, "of 15,000 million multiply-accumulates"),
        ({"work": None}, "of unknown size"),
        ({"num_clients": 1}, ""),
    ],
)
def test_auto_is_serial_on_a_gpu_where_stacks_pay_little_or_differ(
    given: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen("cuda", monkeypatch, **given)["wanted"] == "serial"
    assert re.search(reason, caplog.text)
    assert chosen("cuda", monkeypatch, "stacked", **given)["wanted"] == "stacked"


def test_the_estimate_counts_the_samples(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    estimates = []

    def watched(*arguments: Any, _try: Any = runners._try) -> Any:
        estimates.append(_try(*arguments))
        return estimates[-1]

    monkeypatch.setattr(runners, "_try", watched)
    for size in (4, 400):
        data = federation(sizes=(size,) * 3, train=samples(3 * size))
        make_trainer(max_rounds=1, local_steps=1, runner="stacked").fit(Perceptron(), data)
    bytes_of_a_sample = 4 * (3 + 2)
    assert estimates[1][1] - estimates[0][1] >= 396 * 2 * bytes_of_a_sample


def limit_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let the second step of a stack of more clients need more memory than there is."""

    def step(local: Any, *rest: Any) -> None:
        if local.num_steps and (local.params.dim() == 1 or len(local.params) > most):
            raise torch.OutOfMemoryError(MEMORY)
        local_training.rule_step(local, *rest)

    monkeypatch.setattr(stacked_module, "rule_step", step)


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "FedNova", "EfficientAdam"])
def test_a_stack_that_does_not_fit_is_halved(
    name: str,
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    keeps_files: dict[str, Any],
) -> None:
    """Check that the run ends as one with the smaller stack, which later rounds and resumed runs keep."""
    entry, ends, start = ROSTER[name], [], Perceptron()
    flags = {"clients_per_round": 6, "local_epochs": 2, "runner": "stacked", "max_rounds": 3, **keeps_files}
    for clients_at_once in (3, 6):
        module = copy.deepcopy(start)
        if clients_at_once == 6:
            limit_memory(monkeypatch, most=3)
            caplog.clear()
        trainer = make_trainer(**flags, clients_at_once=clients_at_once)
        trainer.default_root_dir += f"/{clients_at_once}"
        trainer.fit(module, entry.federation(), entry.algorithm())
        ends.append(module.state_dict())
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())
    assert caplog.text.count("At most 3 clients train at once from now on") == 1
    saved = checkpoint_file.load(f"{trainer.default_root_dir}/checkpoints/last.ckpt")["federation"]["execution"]
    assert saved["runner"] == {"wanted": "stacked", "clients_at_once": 3}


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_one_client_that_does_not_fit_ends_in_a_sentence(
    runner: str, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise torch.OutOfMemoryError(MEMORY)

    monkeypatch.setattr(local_training if runner == "serial" else stacked_module, "rule_step", fails)
    monkeypatch.setattr(runners, "_try", lambda *_: ([], 1, False))
    said = r"memory does not suffice \(.*training.*round 0\): .*Tried to allocate 20\.00 MiB.*of which 3 MiB is free\."
    with pytest.raises(UserError, match=said):
        make_trainer(runner=runner).fit(Perceptron(), federation())


def test_a_trial_of_two_that_does_not_fit_is_an_obstacle(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise torch.OutOfMemoryError(MEMORY)

    monkeypatch.setattr(stacked_module, "rule_step", fails)
    with pytest.raises(UserError, match="two clients at once need more memory than the accelerator has"):
        make_trainer(runner="stacked").fit(Perceptron(), federation())


def test_draws_of_every_generator_are_seen(make_trainer: MakeTrainer) -> None:
    """Check with a second generator in place of that of a GPU."""
    trainer, found = make_trainer(max_rounds=1), []
    other = torch.Generator()

    class Drawing(Perceptron):
        def on_fit_start(self) -> None:
            flat_module = trainer.flat_module
            assert flat_module is not None
            flat_module.generators.of_torch.append(other)
            flat_module.generators.seed(7)
            found.append(flat_module.generators.have_drawn(7))
            torch.rand(1, generator=other)
            found.append(flat_module.generators.have_drawn(7))

    trainer.fit(Drawing(), federation())
    assert found == [False, True]
