"""Test clients distributed over processes: their shares, and the same result as in one process."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import processes
import pytest
import torch
from compared_runs import COMMAND, SCRIPT, agree, ran, result
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback
from toys import Perceptron, Pruning, Remembering, federation, without_units

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.cli import main
from lightning_fl.cli.failures import say_once
from lightning_fl.outputs import checkpoint_file
from lightning_fl.processes import launch, share_of
from lightning_fl.pruning import Plan
from lightning_fl.state.outcome import Outcome
from lightning_fl.state.saved_states import read_states


@pytest.mark.long
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 6))
def test_shares_are_a_partition_and_balanced(sizes: list[int], num_ranks: int) -> None:
    clients = list(range(len(sizes)))[::-1]
    shares = [share_of(clients, np.array(sizes), rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(client for share in shares for client in share) == sorted(clients)
    loads = [sum(sizes[client] for client in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes), "moving a client could balance the loads better"
    for share in shares:
        assert share == [client for client in clients if client in share], "a share must keep the order of the cohort"


def test_outcomes_add_up() -> None:
    one = Outcome(num_steps=3, logs={1: {}}, counters={"n": torch.tensor(4)}, bits={"up": {"model": 64, "mask": 1}})
    two = Outcome(
        num_steps=2, logs={7: {}}, counters={"n": torch.tensor(9)}, bits={"up": {"model": 32}, "down": {"mask": 2}}
    )
    one.add(two)
    assert (one.num_steps, list(one.logs), int(one.counters["n"])) == (5, [1, 7], 9)
    assert one.bits == {"up": {"model": 96, "mask": 1}, "down": {"mask": 2}}


@pytest.mark.process
def test_two_processes_give_the_answer_of_one(tmp_path: Path) -> None:
    """Test batch normalisation, unequal clients, drop-outs, momentum on the server and server data."""
    one = ran(tmp_path / "one")
    assert any(int(row["clients/dropped"]) for row in one[0])
    assert all(float(row["feddu/tau_eff"]) for row in one[0])
    agree(one, ran(tmp_path / "two", num_processes=2))


@pytest.mark.process
@pytest.mark.parametrize("algorithm", ["Scaffnew --algorithm.p 0.4", "DASHA --algorithm.codec QSGD", "IFCA"])
def test_two_processes_know_what_clients_have_sent(algorithm: str, tmp_path: Path) -> None:
    """Test control variates, codec memories, a number of local steps that is drawn, and several models of the server."""
    words = ("--model.network", "linear", "--trainer.max_rounds", "3", "--trainer.clients_per_round", "12")
    one = ran(tmp_path / "one", *words, algorithm=algorithm)
    agree(one, ran(tmp_path / "two", *words, num_processes=2, algorithm=algorithm))


@pytest.mark.process
def test_two_processes_step_the_server_alike(tmp_path: Path) -> None:
    """Test an optimiser that keeps vectors and numbers of steps; a larger ε does not magnify rounding."""
    words = ("--model.network", "linear", "--trainer.max_rounds", "3")
    algorithm = "FedOpt --algorithm.server_optimizer Adam --algorithm.server_optimizer.eps 0.01"
    one = ran(tmp_path / "one", *words, algorithm=algorithm)
    agree(one, ran(tmp_path / "two", *words, num_processes=2, algorithm=algorithm))
    paths = [tmp_path / run / "checkpoints" / "last.ckpt" for run in ("one", "two")]
    states = [checkpoint_file.load(path)["federation"]["run"]["server"]["1:ServerOptimizer"] for path in paths]
    assert states[0].keys() == states[1].keys()
    for name, entry in states[0].items():
        torch.testing.assert_close(entry, states[1][name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.process
def test_two_processes_train_smaller_networks(tmp_path: Path) -> None:
    words = ("--model.network", "lenet5")
    one = ran(tmp_path / "one", *words, algorithm="HeteroFL")
    assert all(float(row["val/loss_width_0.25"]) > 0 for row in one[0])
    agree(one, ran(tmp_path / "two", *words, num_processes=2, algorithm="HeteroFL"))


@pytest.mark.process
def test_two_processes_agree_on_levels_that_meet_a_deadline(tmp_path: Path) -> None:
    words = ["--model.network", "lenet5", "--trainer.clock.devices", "phones", "--trainer.clock.macs_per_second", "1e8"]
    algorithm = "FederatedDropout --algorithm.deadline 0.01 --algorithm.rates [0.0,0.5,0.75]"
    one = ran(tmp_path / "one", *words, algorithm=algorithm)
    assert len({float(row["comm/downlink_bits"]) for row in one[0]}) > 1
    agree(one, ran(tmp_path / "two", *words, num_processes=2, algorithm=algorithm))


@pytest.mark.process
def test_two_processes_agree_on_who_is_late(tmp_path: Path) -> None:
    """Test two turns, whose bits are counted in the process that trains the client, drop-outs and unequal clients."""
    there = tmp_path / "there.csv"
    there.write_text("client,start_seconds,end_seconds\n" + "".join(f"{k},0,{10 + k}\n" for k in range(12)))
    words = "--trainer.clock.devices phones --trainer.over_selection 1.6 --trainer.deadline 100 --trainer.max_rounds 3"
    flags = (*words.split(), "--model.network", "linear", "--trainer.availability", str(there))
    one = ran(tmp_path / "one", *flags, algorithm="FedLDF --algorithm.n 2")
    assert all(int(row["clients/late"]) + int(row["clients/dropped"]) == 3 for row in one[0])
    assert any(int(row["clients/late"]) for row in one[0])
    agree(one, ran(tmp_path / "two", *flags, num_processes=2, algorithm="FedLDF --algorithm.n 2"))


@pytest.mark.process
def test_the_flag_devices_starts_the_other_processes(tmp_path: Path) -> None:
    """Start the run like a user's script, which is started once."""
    words = ("--model.network", "linear")
    one = ran(tmp_path / "one", *words)
    agree(one, ran(tmp_path / "two", *words, num_processes=2, launcher=(sys.executable,)))


@pytest.mark.process
def test_processes_share_the_tests_of_rounds(tmp_path: Path) -> None:
    words = ("--model.network", "linear", "--data.val_fraction", "0.2", "--trainer.test_every_n_rounds", "1")
    words += ("--data.eval_batch_size", "50")
    one = ran(tmp_path / "one", *words)
    assert all(row["test/accuracy"] for row in one[0])
    agree(one, ran(tmp_path / "two", *words, num_processes=2))


@pytest.mark.slow
def test_uploads_that_are_kept_reach_every_process(tmp_path: Path) -> None:
    words = ("--model.network", "lenet5", "--trainer.clients_per_round", "8", "--trainer.max_rounds", "3")
    one = ran(tmp_path / "one", *words, algorithm="FedDF --algorithm.max_steps 20")
    assert all(float(row["feddf/steps"]) for row in one[0])
    agree(one, ran(tmp_path / "two", *words, num_processes=2, algorithm="FedDF --algorithm.max_steps 20"))


@pytest.mark.parametrize(
    ("algorithm", "network", "place", "runner"),
    [
        pytest.param("toys.Remembering", "linear", "memory", "stacked", marks=pytest.mark.process),
        pytest.param("toys.Remembering", "linear", "disk", "serial", marks=pytest.mark.slow),
        # control variates and gates, which clients own
        pytest.param("FedDP", "lenet5", "memory", "serial", marks=pytest.mark.process),
        pytest.param("FedBN", "resnet32", "disk", "serial", marks=pytest.mark.slow),  # norms with their statistics
        pytest.param("Ditto", "lenet5", "disk", "serial", marks=pytest.mark.slow),  # second models
        # second models, and a share of each
        pytest.param("APFL", "lenet5", "disk", "serial", marks=pytest.mark.process),
        pytest.param("PFedMe --algorithm.strength 5", "lenet5", "memory", "serial", marks=pytest.mark.slow),
    ],
)
def test_what_clients_keep_is_there_for_every_process(
    algorithm: str, network: str, place: str, runner: str, tmp_path: Path
) -> None:
    """Test clients that return in another process than before; on disk both processes use the same files."""
    words = ("--model.network", network, "--trainer.clients_per_round", "8", "--trainer.max_rounds", "4")
    one = ran(tmp_path / "one", *words, algorithm=algorithm)
    several = ("--trainer.client_states", place, "--trainer.runner", runner)
    agree(one, ran(tmp_path / "two", *words, *several, num_processes=2, algorithm=algorithm))
    paths = [tmp_path / run / "checkpoints" / "last.ckpt" for run in ("one", "two")]
    kept = [read_states(checkpoint_file.load(path)["federation"]["run"], path) for path in paths]
    for of in ("clients", "client_memory"):
        here, there = kept[0][of], kept[1][of]
        assert here.keys() == there.keys()
        for client, state in here.items():
            for name, x in state.items():
                torch.testing.assert_close(x, there[client][name], rtol=1e-4, atol=1e-6, msg=f"{of} {client} {name}")
    assert list((tmp_path / "two").glob("client-states-*")) == [], "the files are deleted when the run ends"


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param((), id="forked", marks=pytest.mark.process),
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_with_another_number_of_processes(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """Test forked processes in torchrun's environment."""
    whole = ran(tmp_path / "one", "--trainer.max_rounds", "3")
    ran(tmp_path / "two")
    resumed = ran(
        tmp_path / "two",
        *("--trainer.max_rounds", "3", "--ckpt_path", "last"),
        num_processes=2,
        launcher=launcher,
    )
    agree(whole, resumed)


class Uneven(Pruning):
    """Callback that prunes another unit in each process."""

    def plan(self, module: Any) -> Plan:
        return without_units(module, (module.trainer.global_rank,))


def prune_in_the_middle(folder: str, pruning: type[Pruning], place: str, num_processes: int) -> None:
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=4,
        clients_per_round=5,
        accelerator="cpu",
        devices=num_processes,
        default_root_dir=folder,
        client_states=place,
        callbacks=[pruning(when=2)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Perceptron(), federation(), Remembering())


@pytest.mark.process
def test_all_processes_follow_a_pruning(tmp_path: Path) -> None:
    """Test states in memory and in files that one process writes; different prunings are refused."""
    processes.run(prune_in_the_middle, str(tmp_path / "one"), Pruning, "memory", 1)
    processes.run(prune_in_the_middle, str(tmp_path / "two"), Pruning, "disk", 2, num_processes=2)
    rows, weights = result(tmp_path / "two")
    assert [row["model/parameters"] for row in rows] == ["26", "26", "20", "20"]
    agree(result(tmp_path / "one"), (rows, weights))
    with pytest.raises(AssertionError, match="have pruned or unfrozen their models differently"):
        processes.run(prune_in_the_middle, str(tmp_path / "uneven"), Uneven, "memory", 2, num_processes=2)


@pytest.mark.process
def test_students_of_all_processes_vote_before_the_first_round(tmp_path: Path) -> None:
    """Check that bits and votes of the other process's clients count once."""
    words = ("--model.network", "linear", "--trainer.max_rounds", "1")
    algorithm = "FedKT --algorithm.preset light --algorithm.epochs 1"
    one = ran(tmp_path / "one", *words, algorithm=algorithm)
    assert int(one[0][0]["comm/setup_uplink_bits"]) > 0
    agree(one, ran(tmp_path / "two", *words, num_processes=2, algorithm=algorithm))


SAID = [
    (["wrong"] * 3, ["error: wrong\n", "", ""]),
    (["", "late", ""], ["", "error: on rank 1: late\n", ""]),
    (["false", "amiss", "false"], ["error: false\n", "error: on rank 1: amiss\n", ""]),
]
"""Sentences of three processes, and what each of them prints; no two cases share a sentence, because they share a run."""


def speak(folder: str) -> None:
    """Report each process's sentence of each case, if it has one, to a file of its own."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for case, (sentences, _) in enumerate(SAID):
        with Path(folder, f"{case}-{rank}").open("w") as file, contextlib.redirect_stderr(file):
            if sentences[rank]:
                say_once("error: ", sentences[rank])
        torch.distributed.barrier()


@pytest.mark.process
def test_what_all_processes_say_is_said_once(tmp_path: Path) -> None:
    processes.run(speak, str(tmp_path), num_processes=3)
    heard = [[(tmp_path / f"{case}-{rank}").read_text() for rank in range(3)] for case in range(len(SAID))]
    assert heard == [printed for _, printed in SAID]


def command_heard(folder: str, words: list[str]) -> None:
    """Run a command and write its output and exit code to files."""
    path = Path(folder, os.environ["RANK"])
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    code: Any = 0
    try:
        main(words)
    except SystemExit as ended:
        code = ended.code
    path.with_suffix(".code").write_text(str(code))


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (
            "--algorithm SCAFFOLD --model.momentum 0.9",
            "lightning-fl: error: SCAFFOLD makes the clients' steps itself",
            "2",
        ),
        (
            "--trainer.clients_per_round 1",
            "A round has 1 client for 2 processes: 1 of them trains no client; trainer.devices_per_client 2 lets 2 of them",
            "0",
        ),
    ],
)
def test_a_command_in_two_processes_says_a_thing_once(words: str, said: str, code: str, tmp_path: Path) -> None:
    folder = ["--trainer.default_root_dir", str(tmp_path / "run")]
    command = [*COMMAND.split(), "--model.network", "linear", "--trainer.devices", "2", *folder, *words.split()]
    processes.run(command_heard, str(tmp_path), command, num_processes=2)
    printed = [(tmp_path / str(rank)).read_text() for rank in (0, 1)]
    assert [text.count(said) for text in printed] == [1, 0]
    assert [(tmp_path / f"{rank}.code").read_text() for rank in (0, 1)] == [code] * 2


class Refusing:
    """Fabric whose first process finds the port in use after it has started a second one."""

    def __init__(self, message: str, child: subprocess.Popen[bytes]) -> None:
        self.message = message
        self.strategy = SimpleNamespace(launcher=SimpleNamespace(procs=[child]))

    def launch(self) -> None:
        raise torch.distributed.DistNetworkError(self.message)


@pytest.mark.process
def test_a_port_in_use_ends_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "12345")
    for message, error in (("code: -98, name: EADDRINUSE", UserError), ("timed out", RuntimeError)):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with pytest.raises(error, match="port 12345.*in use" if error is UserError else "timed out"):
            launch(Refusing(message, child))  # type: ignore[arg-type]
        assert child.wait(60) == -signal.SIGKILL


@pytest.mark.slow
def test_a_port_in_use_ends_the_command_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(SCRIPT)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = [*COMMAND.split(), "--trainer.devices", "2", "--trainer.default_root_dir", str(tmp_path / "run")]
        ended = subprocess.run(
            [sys.executable, str(tmp_path / "command.py"), *words],
            env={**alone(), "MASTER_PORT": port},
            capture_output=True,
            text=True,
            check=False,
        )  # returns when no process has its output open any more
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(f"lightning-fl: error: port {port}, ")
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


def alone() -> dict[str, str]:
    """Return the environment without the variables of other runs."""
    prefixes = ("PL_", "LOCAL_", "MASTER_", "WORLD_", "TORCHELASTIC_", "RANK")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def test_another_number_of_processes_than_the_flags_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"WORLD_SIZE is 2\), but trainer.devices × trainer.num_nodes is 1 × 1 = 1"):
        FederatedTrainer(accelerator="cpu", logger=False)
    with pytest.raises(UserError, match=r"WORLD_SIZE is 2\), but trainer.devices × trainer.num_nodes is 3 × 2 = 6"):
        FederatedTrainer(accelerator="cpu", logger=False, devices=3, num_nodes=2)


def test_another_number_of_tasks_of_slurm_than_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"JOB_ID": "1", "JOB_NAME": "train", "NODELIST": "n1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in {**given, "NTASKS": "4", "NTASKS_PER_NODE": "4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(
        UserError, match=r"You set `devices=2` in Lightning, but .* `--ntasks-per-node=4` does not match"
    ):
        FederatedTrainer(accelerator="cpu", logger=False, devices=2).fit(Perceptron(), federation())


@pytest.mark.slow
def test_torchrun_with_too_many_processes_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(SCRIPT)
    command = [str(tmp_path / "command.py"), *COMMAND.split()]
    run = ["--trainer.default_root_dir", str(tmp_path / "run")]
    ended = subprocess.run([*TORCHRUN, *command, *run], env=alone(), capture_output=True, text=True, check=False)
    assert ended.stderr.count("lightning-fl: error: torchrun has started 2 processes") == 1
    assert ended.stderr.count("lightning-fl: error:") == 1
    assert not (tmp_path / "run").exists()


class Dying(Callback):
    """Callback that kills the second process in the middle of the third round."""

    def on_client_upload(self, trainer: Any, *arguments: Any) -> None:
        if trainer.global_rank == 1 and trainer.current_epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
def test_a_process_that_dies_ends_the_others_and_the_run_goes_on(tmp_path: Path) -> None:
    words = ("--model.network", "linear", "--trainer.max_rounds", "4")
    whole = ran(tmp_path / "whole", *words, num_processes=2)
    run = ["--trainer.default_root_dir", str(tmp_path / "run"), "--trainer.devices", "2"]
    command = [*COMMAND.split(), *words, *run, "--algorithm", "FedDUSM", "--trainer.callbacks+=test_processes.Dying"]
    processes.run(command_heard, str(tmp_path), command, num_processes=2, exit_codes=[0, -signal.SIGKILL])
    last_line = (tmp_path / "0").read_text().splitlines()[-1]
    assert last_line.startswith("lightning-fl: another process of this run died")
    assert "--ckpt_path last" in last_line
    assert (tmp_path / "0.code").read_text() == "1"
    assert checkpoint_file.load(tmp_path / "run" / "checkpoints" / "last.ckpt")["epoch"] == 2
    agree(whole, ran(tmp_path / "run", *words, "--ckpt_path", "last", num_processes=2))
