"""Test FedAvg with HRank against plain loops on a network of two convolutions."""

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from lightning.pytorch import Callback
from oracle import Problem
from roster import problem
from torch import Tensor, nn
from toys import Perceptron, Served, federation, read_rows

from lightning_fl import UserError
from lightning_fl.algorithms import FedAvg, HRank

SERVER = 9


class Imaged(Perceptron):
    """Network x (B, 3) → images (B, 1, 6, 6), frozen → 4 filters 3×3 → 3 filters 3×3 → their maps of 2×2 → (B, 2)."""

    def __init__(self, first: int = 4, second: int = 3) -> None:
        super().__init__()
        del self.hidden
        self.images = nn.Linear(3, 36).requires_grad_(False)
        self.first, self.second = nn.Conv2d(1, first, 3), nn.Conv2d(first, second, 3)
        self.output = nn.Linear(4 * second, 2)
        self.example_input_array = torch.zeros(2, 3)

    def maps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.relu(self.first(self.images(x).view(-1, 1, 6, 6)))
        return first, torch.relu(self.second(first))

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.maps(x)[1].flatten(1))


def lowest_ranks(maps: np.ndarray, count: int) -> list[int]:
    """Return the filters with the lowest mean rank of their feature maps (n, c, H, W); the first among equal ones."""
    ranks = [np.mean([np.linalg.matrix_rank(image[j]) for image in maps]) for j in range(maps.shape[1])]
    return sorted(range(len(ranks)), key=lambda j: (ranks[j], j))[:count]


def pruned(whole: Imaged, given: Problem, rate: float) -> Imaged:
    """Build a small network with the weights of the filters that stay."""
    first, second = (x.detach().numpy() for x in whole.maps(torch.tensor(given.server_x)))
    lost = [lowest_ranks(maps, int(rate * maps.shape[1])) for maps in (first, second)]
    keep, then = ([j for j in range(c) if j not in gone] for c, gone in zip((4, 3), lost, strict=True))
    small = Imaged(len(keep), len(then)).double()
    with torch.no_grad():
        small.images.load_state_dict(whole.images.state_dict())
        small.first.weight.copy_(whole.first.weight[keep])
        small.first.bias.copy_(whole.first.bias[keep])
        small.second.weight.copy_(whole.second.weight[then][:, keep])
        small.second.bias.copy_(whole.second.bias[then])
        # Each map of the second convolution has four columns in the linear layer.
        small.output.weight.copy_(whole.output.weight[:, [4 * j + i for j in then for i in range(4)]])
        small.output.bias.copy_(whole.output.bias)
    return small


def fedavg_with_hrank(module: Imaged, given: Problem, rate: float, prune_round: int) -> Imaged:
    server = copy.deepcopy(module).double()
    for t in range(given.rounds):
        if t == prune_round:
            server = pruned(server, given, rate)
        total, mean = sum(len(given.x[k]) for k in given.cohort(t)), copy.deepcopy(server)
        for parameter in mean.parameters():
            parameter.data.zero_()
        for k in given.cohort(t):
            client = copy.deepcopy(server)
            for x, y in given.batches(t, k):
                client.zero_grad()
                (0.5 * (client(torch.tensor(x)) - torch.tensor(y)).square().sum(1).mean()).backward()
                for parameter in client.parameters():
                    if parameter.requires_grad:
                        parameter.data -= given.learning_rate * parameter.grad
            for averaged, parameter in zip(mean.parameters(), client.parameters(), strict=True):
                averaged.data += len(given.x[k]) / total * parameter.data
        server = mean
    return server


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize(("rate", "prune_round"), [(0.4, 2), (0.7, 0)])
def test_matches_plain_loops(rate: float, prune_round: int, runner: Any, make_trainer: MakeTrainer) -> None:
    bits = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            bits.append({way: dict(kinds) for way, kinds in trainer.run.ledger.round_bits.items()})

    module = Imaged()
    expected = fedavg_with_hrank(module, problem(rounds=4, epochs=2, num_server=SERVER), rate, prune_round)
    flags: dict[str, Any] = {"max_rounds": 4, "local_epochs": 2, "precision": "64-true", "runner": runner}
    algorithm = HRank(rate, prune_round, num_batches=2, batch_size=5)
    make_trainer(**flags, callbacks=Watch()).fit(module, Served(SERVER), algorithm)
    assert module.state_dict().keys() == expected.state_dict().keys()
    for name, x in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], x, rtol=0, atol=1e-10, msg=name)

    def size(first: int, second: int) -> int:
        return first * 10 + second * (9 * first + 1) + 2 * (4 * second + 1)

    small = size(4 - int(4 * rate), 3 - int(3 * rate))
    for t, of_round in enumerate(bits):
        model = 64 * 3 * (size(4, 3) if t < prune_round else small)
        mask = 6 * (4 + 3) if t == prune_round else 0
        assert {kind: count for kind, count in of_round["up"].items() if count} == {"model": model}
        assert (of_round["down"]["model"], of_round["down"]["mask"]) == (model, mask), t


def test_pruning_nothing_is_fedavg(make_trainer: MakeTrainer) -> None:
    one = Imaged()
    other = copy.deepcopy(one)
    average, none = make_trainer(max_rounds=3), make_trainer(max_rounds=3)
    average.fit(one, Served(SERVER), FedAvg())
    none.fit(other, Served(SERVER), HRank(rate=0.0, prune_round=1))
    assert equal_states(average.run.state_dict(), none.run.state_dict())


def test_every_run_is_pruned_anew(make_trainer: MakeTrainer) -> None:
    algorithm = HRank(rate=0.5, prune_round=0)
    for _ in range(2):
        module = Imaged()
        make_trainer(max_rounds=1).fit(module, Served(SERVER), algorithm)
        assert (module.first.out_channels, module.second.out_channels) == (2, 2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rate": 1.0}, r"rate, .*\[0, 1\), got 1\.0"),
        ({"rate": -0.1}, r"rate, .*got -0\.1"),
        ({"prune_round": -1}, "prune_round, .*at least 0, got -1"),
        ({"prune_round": 0.5}, r"prune_round, .*got 0\.5"),
        ({"num_batches": 0}, "num_batches .*got 0"),
        ({"batch_size": 0}, "batch_size .*got 0"),
    ],
)
def test_numbers_outside_their_range_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        HRank(**given)


def test_without_server_data_it_is_refused_and_a_late_pruning_warned_of(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"HRank ranks filters on the server's samples.*--data\.server_fraction"):
        make_trainer().fit(Imaged(), federation(), HRank(prune_round=1))
    with pytest.warns(UserWarning, match="after 30 epochs, but the run ends after 2"):
        make_trainer().fit(Imaged(), federation(), HRank())
    with pytest.raises(UserError, match="no layer of Perceptron can lose filters"):
        make_trainer().fit(Perceptron(), Served(SERVER), HRank(prune_round=1))


@pytest.mark.parametrize("stop", [1, 3, "in the round"])
def test_resumed_around_the_pruning(
    stop: int | str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    class Dies(Callback):
        def on_client_upload(self, trainer: Any, pl_module: Any, client: int, place: int, total: int) -> None:
            if trainer.current_epoch == 2 and stop == "in the round":
                trainer.save_checkpoint(tmp_path / "half" / "checkpoints" / "last.ckpt")
                raise RuntimeError("power failure")

    whole, resumed = Imaged(), Imaged()
    half, algorithm = copy.deepcopy(whole), partial(HRank, rate=0.5, prune_round=2)
    flags: dict[str, Any] = {**keeps_files, "default_root_dir": tmp_path / "half"}
    trainer = make_trainer(max_rounds=4, **{**flags, "default_root_dir": tmp_path / "whole"})
    trainer.fit(whole, Served(SERVER), algorithm())
    with nullcontext() if isinstance(stop, int) else pytest.raises(RuntimeError, match="power failure"):
        first = make_trainer(max_rounds=stop if isinstance(stop, int) else 4, callbacks=Dies(), **flags)
        first.fit(half, Served(SERVER), algorithm())
    again = make_trainer(max_rounds=4, **flags)
    again.fit(resumed, Served(SERVER), algorithm(), ckpt_path="last")
    assert resumed.first.out_channels == 2
    assert equal_states(whole.state_dict(), resumed.state_dict())
    assert equal_states(trainer.run.state_dict(), again.run.state_dict())
    assert read_rows(tmp_path / "whole") == read_rows(tmp_path / "half")
    dense = Imaged()
    for module in (dense, dense):  # the second time it is already pruned
        make_trainer().test(
            module, Served(SERVER), algorithm(), ckpt_path=tmp_path / "half" / "model.ckpt", verbose=False
        )
        assert equal_states(dense.state_dict(), whole.state_dict())
