"""Test the programs in benchmarks/: they compare the same work, and errors end with one sentence."""

import argparse
import copy
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fl import FederatedTrainer, codecs
from lightning_fl.data import Arrays
from lightning_fl.modules import ImageClassifier

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OPTIONS = argparse.Namespace(device="cpu", precision="32-true")


@pytest.fixture
def round_time(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import `benchmarks/round_time.py` with its folder on the path."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("round_time")


@pytest.fixture
def work(round_time: ModuleType) -> Any:
    """Work of clients of unequal sizes, one with a last batch of one sample."""
    torch.manual_seed(0)
    clients = [round_time.noise(samples) for samples in (9, 4, 5)]
    return round_time.Work(ImageClassifier("lenet5").network, clients, batch_size=4, epochs=2, learning_rate=0.1)


def test_every_peer_has_the_class_that_is_loaded(round_time: ModuleType) -> None:
    """Read, not imported: tests do without the other simulators."""
    for name in round_time.peers.PACKAGES:
        source = (BENCHMARKS / "peers" / f"{name}.py").read_text(encoding="utf-8")
        assert re.search(r"^class Federation:", source, re.MULTILINE), name


@pytest.mark.parametrize(("method", "loop_of"), [("FedAvg", "BareLoop"), ("SCAFFOLD", "BareScaffold")])
def test_our_rounds_give_the_model_of_the_bare_loops(
    method: str, loop_of: str, round_time: ModuleType, work: Any, make_trainer: Callable[..., FederatedTrainer]
) -> None:
    module = ImageClassifier(copy.deepcopy(work.net), learning_rate=work.learning_rate)
    images, labels = round_time.noise(17)
    batch_size = 6  # all samples of a client, so that the order does not matter
    data = Arrays(train=(images, labels), test=(images, labels), num_clients=3, batch_size=batch_size)
    make_trainer(max_rounds=3, local_epochs=work.epochs, limit_val_batches=0).fit(module, data, method)
    clients = [(images[indices], labels[indices]) for indices in data.client_indices]
    assert {len(y) for _, y in clients} == {5, 6}
    whole = replace(work, clients=clients, batch_size=batch_size)
    for nhwc in (False, True):
        loop = getattr(round_time, loop_of)(whole, OPTIONS, nhwc)
        for _ in range(3):
            loop.round()
        round_time.peers.require_same("this", Finished(module.parameters()), whole, loop.weights)


class Finished:
    """Peer whose round is over."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.weights = list(weights)

    def round(self) -> None:
        """Do nothing."""

    def global_weights(self) -> list[Tensor]:
        return self.weights


@pytest.mark.long
@pytest.mark.parametrize("change", [{}, {"epochs": 3}, {"batch_size": 3}, {"learning_rate": 0.11}])
def test_a_peer_that_does_other_work_is_found_out(change: dict[str, Any], round_time: ModuleType, work: Any) -> None:
    work = replace(work, shuffle=False)
    loop = round_time.BareLoop(work, OPTIONS)
    loop.round()
    other = round_time.BareLoop(replace(work, **change), OPTIONS)
    other.round()
    with pytest.raises(RuntimeError, match="other work") if change else nullcontext():
        round_time.peers.require_same("this", Finished(other.weights), work, loop.weights)


@pytest.mark.parametrize(
    ("peer", "sentence"),
    [
        ("fedlap", "--peer 'fedlap' is unknown; did you mean 'fedlab'[?] Allowed: fedlab, flower, fluke, pfl."),
        ("pfl", r"--peer pfl cannot be imported \(.*\); pip install 'pfl\[pytorch\]' first."),
        ("pfl --ranks 2", r"--peer compares .*; it does not work with --ranks 2."),
        ("flower --clock cpu", r"--clock cpu counts the computing time of one process; .*"),
    ],
)
def test_a_peer_that_cannot_be_had_is_one_sentence(
    peer: str,
    sentence: str,
    round_time: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "pfl", None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["round_time.py", "--peer", *peer.split()])
    with pytest.raises(SystemExit) as ended:
        round_time.main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert re.fullmatch(f"round_time.py: {sentence}\n", printed.err)
    assert not printed.out


@pytest.fixture
def codec_times(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import `benchmarks/codecs.py`."""
    spec = importlib.util.spec_from_file_location("codec_times", BENCHMARKS / "codecs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["codecs.py", "--size", "3000", "--turns", "1"])
    return module


@pytest.mark.long
def test_every_codec_is_timed_at_both_sizes(codec_times: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    codec_times.main()
    torch.set_num_threads(threads)
    header, *tables = capsys.readouterr().out.split("\n\n")
    assert "one thread" in header
    assert [table.partition("  ")[0] for table in tables] == ["d = 3,000", "LeNet-5, d = 62,006"]
    for table in tables:
        rows = [line for line in table.splitlines()[1:] if line]
        assert {re.split(r"[ (]", line)[0] for line in rows} == set(codecs.__all__)
        last = {line[:36].strip(): [float(word) for word in line.split()[-2:]] for line in rows}
        assert last["Dense"] == [32, 0]
        assert last["Changes"][0] < 5
        assert last["Changes"][1] == 0
        assert last["Followed(TopK)"] == last["TopK"] == last["ErrorFeedback(TopK)"]
        assert last["EntropyCoded(QSGD)"][0] < last["QSGD"][0]
        assert last["EntropyCoded(QSGD)"][1] == last["QSGD"][1]
        assert last["EDEN(bits=4)"][1] < last["EDEN"][1] < last["DRIVE"][1] < 0.7
        assert all(0 < bits <= 32 for bits, _ in last.values())
