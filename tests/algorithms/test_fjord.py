"""Test FjORD: every step of a client trains the network of a width that it draws."""

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import RUNNERS, MakeTrainer, ends_as_fedavg, resumed_like_whole
from oracle import levels_of
from roster import problem
from test_heterofl import Images, X, Y, images, numbers_at, split
from torch import nn
from toys import SIZES, Perceptron, federation, vector

from lightning_fl import UserError
from lightning_fl.algorithms import FjORD
from lightning_fl.clients.choose_runner import describe_runner
from lightning_fl.slots import Gradients, Rule, Width

WIDTHS = [0.25, 0.5, 1.0]


@RUNNERS
def test_width_1_alone_is_fedavg_bit_for_bit(runner: str, make_trainer: MakeTrainer) -> None:
    assert ends_as_fedavg(FjORD([1.0]), runner, make_trainer)


def test_a_step_is_that_of_the_masked_whole_network(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one step on all samples for several seeds: its width is the draw of the client's generator."""
    drawn = set()
    for seed in range(6):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        module = Images(optimizer=partial(torch.optim.SGD, lr=0.1)).double()
        whole, start = copy.deepcopy(module), vector(module)
        data = images(num_clients=1, batch_size=sum(SIZES))
        trainer = make_trainer(max_rounds=1, clients_per_round=1, precision="64-true")
        trainer.fit(module, data, FjORD([0.5, 1.0]))
        words = np.random.SeedSequence([seed, 0, 2, 0]).generate_state(2, np.uint64) >> np.uint64(1)
        width = (0.5, 1.0)[int(torch.randint(2, (), generator=torch.Generator().manual_seed(int(words[1]))))]
        drawn.add(width)
        mask = numbers_at(width)
        for parameter, part in zip(whole.parameters(), split(mask, whole), strict=True):
            parameter.data *= part
        nn.functional.cross_entropy(whole(X), Y).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in whole.parameters()])
        expected = np.where(mask, start - 0.1 * gradient.numpy(), start)
        np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-12)
        assert trainer.run.ledger.bits("up") == 64 * len(mask), "the client sends the network of its largest width"
    assert drawn == {0.5, 1.0}


def test_costs_are_those_of_the_largest_width_and_of_the_mean_step(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1, clients_per_round=6, runner="auto")
    trainer.fit(Perceptron(), federation(), FjORD(WIDTHS))
    levels = levels_of(problem(rounds=1), 0, dict.fromkeys(WIDTHS, 1 / 3), fixed=True)
    units = {0.25: 1, 0.5: 2, 1.0: 4}
    row = trainer.fit_loop.rows[0]
    assert row["comm/uplink_bits"] == row["comm/downlink_bits"] == sum(32 * (6 * units[p] + 2) for p in levels.values())
    steps = {p: [5 * units[q] for q in WIDTHS if q <= p] for p in WIDTHS}
    macs = sum(SIZES[k] * round(sum(steps[p]) / len(steps[p])) for k, p in levels.items())
    assert row["clients/macs"] == macs
    assert {"val/loss_width_0.25", "val/loss_width_0.5"} <= row.keys()
    assert describe_runner(trainer.fit_loop.engine.runner)["wanted"] == "serial"


def test_a_stack_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        UserError, match="clients of FjORD draw another width in every step, which a stack of clients cannot"
    ):
        make_trainer(max_rounds=1, runner="stacked").fit(Perceptron(), federation(), FjORD(WIDTHS))


def test_distillation_is_that_of_the_paper(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check several steps of one client on all samples against a plain loop over the masked whole network."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    widths, steps, rate = [0.5, 0.75, 1.0], 6, 0.3
    module = Counted(optimizer=partial(torch.optim.SGD, lr=rate)).double()
    whole, start = copy.deepcopy(module), torch.from_numpy(vector(module))
    data = images(num_clients=1, batch_size=sum(SIZES))
    trainer = make_trainer(max_rounds=1, clients_per_round=1, precision="64-true", local_epochs=steps)
    trainer.fit(module, data, FjORD(widths, fixed=False, distilled=True))

    levels = levels_of(problem(rounds=1, seed=2), 0, dict.fromkeys(widths, 1 / 3), fixed=False)
    up_to = [width for width in widths if width <= levels[0]]
    assert len(up_to) > 1, "choose another seed: this client has the narrowest network"
    words = np.random.SeedSequence([2, 0, 2, 0]).generate_state(2, np.uint64) >> np.uint64(1)
    generator, now, drawn = torch.Generator().manual_seed(int(words[1])), start.clone(), []
    for _ in range(steps):
        drawn.append(up_to[int(torch.randint(len(up_to), (), generator=generator))])
        step = torch.zeros_like(now)
        teacher = logits(whole, now, numbers_at(up_to[-1]))
        nn.functional.cross_entropy(teacher, Y).backward()
        step += gradient_of(whole, numbers_at(up_to[-1]))
        if drawn[-1] < up_to[-1]:
            student = logits(whole, now, numbers_at(drawn[-1]))
            q, p = teacher.detach().softmax(1), student.softmax(1)
            (q * (q.log() - p.log())).sum(1).mean().backward()
            step += gradient_of(whole, numbers_at(drawn[-1]))
        now -= rate * step
    assert len(set(drawn)) > 1
    np.testing.assert_allclose(vector(module), now, rtol=0, atol=1e-12)
    assert module.num_batches == steps, "the second forward pass of a step leaves no trace in the module"
    assert not module.output._forward_hooks


def logits(module: Images, params: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the outputs of the network that has the numbers of a mask, for all samples."""
    module.zero_grad()
    for parameter, part in zip(module.parameters(), split(torch.where(mask, params, 0), module), strict=True):
        parameter.data.copy_(part)
    return module(X)


def gradient_of(module: Images, mask: torch.Tensor) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()]) * mask


class Counted(Images):
    """Counts its batches."""

    num_batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_batches += 1
        return super().training_step(batch, batch_idx)


class Noisy(Images):
    """Adds noise to its inputs in training, and keeps what the network then sees."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__()
        self.see = seen.append

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        noisy = x + torch.randn_like(x)
        self.see(noisy)
        return super().training_step((noisy, y), batch_idx)


def test_teacher_and_taught_see_the_same_samples(make_trainer: MakeTrainer) -> None:
    seen: list[torch.Tensor] = []
    trainer = make_trainer(max_rounds=1, clients_per_round=6, local_epochs=4)
    trainer.fit(Noisy(seen), images(dtype=torch.float32), FjORD(WIDTHS, distilled=True))
    passes = [x.flatten().tolist() for x in seen]
    taught = sum(first == second for first, second in itertools.pairwise(passes))
    assert taught > 0
    assert len(passes) - taught == trainer.run.num_steps


def test_distillation_goes_on_as_if_it_had_not_stopped(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    method = partial(FjORD, WIDTHS, distilled=True)
    resumed_like_whole(make_trainer, tmp_path, partial(Noisy, []), partial(images, dtype=torch.float32), method)


def test_a_rule_that_compares_models_is_refused() -> None:
    with pytest.raises(
        UserError, match="each step of FirstUnits trains another network, and Comparing compares models in"
    ):
        FjORD(rule=Comparing())


class Comparing(Rule):
    """Reads the received model's representations."""

    reads = Gradients.REPRESENTATIONS


def test_distillation_costs_the_widest_network_and_the_mean_narrower_one(make_trainer: MakeTrainer) -> None:
    macs = {}
    for distilled in (None, True):
        trainer = make_trainer(max_rounds=1, clients_per_round=6)
        trainer.fit(Images().float(), images(dtype=torch.float32), FjORD([0.5, 1.0], distilled=distilled))
        macs[distilled] = trainer.fit_loop.rows[0]["clients/macs"]
        networks = trainer.fit_loop.engine.networks
        wide, narrow = (networks.macs(Width(width)) for width in (1.0, 0.5))
    levels = levels_of(problem(rounds=1), 0, dict.fromkeys([0.5, 1.0], 1 / 2), fixed=True)
    samples = {width: sum(SIZES[k] for k, level in levels.items() if level == width) for width in (0.5, 1.0)}
    assert macs[None] == pytest.approx(samples[0.5] * narrow + samples[1.0] * (narrow + wide) / 2, rel=1e-3)
    assert macs[True] == pytest.approx(samples[0.5] * narrow + samples[1.0] * (wide + narrow / 2), rel=1e-3)


def test_distillation_without_classes_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        UserError,
        match="FjORD compares a client's outputs for the classes, and the samples have no classes: leave out d",
    ):
        make_trainer(max_rounds=1).fit(Perceptron(), federation(), FjORD(WIDTHS, distilled=True))


@pytest.mark.parametrize("widths", [[], [0.5, 0.5], [1.5], "0.5", [0.0, 1.0]])
def test_widths_are_checked(widths: Any) -> None:
    with pytest.raises(UserError, match="widths must be a list of different numbers in"):
        FjORD(widths)
