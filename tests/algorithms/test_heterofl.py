"""Test clients with smaller networks: their steps, messages and costs are those of the small network."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from compared_runs import RUNNERS, MakeTrainer, equal_states, resumed_like_whole
from lightning.pytorch import Callback
from oracle import levels_of
from roster import LEVELS, problem
from torch import Tensor, nn
from toys import SIZES, Perceptron, Recorded, Sizes, federation, samples, vector

from lightning_fl import UserError
from lightning_fl.algorithms import FedAvg, FjORD, HeteroFL
from lightning_fl.callbacks import EnergyMeter, FilterPruning
from lightning_fl.codecs import ErrorFeedback, Followed, TopK
from lightning_fl.data import IID, Arrays, GivenIndices
from lightning_fl.features.clock import ClientClock
from lightning_fl.rules import ControlVariates
from lightning_fl.steps import Momentum

groups_of_two = partial(nn.GroupNorm, 4)


class Images(L.LightningModule):
    """Classifier with a residual block, a GroupNorm and a flattened reader."""

    def __init__(self, norm: Callable[[int], nn.Module] = groups_of_two, optimizer: Any = None) -> None:
        super().__init__()
        self.optimizer = optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1), norm(8)
        self.block = nn.Sequential(nn.Conv2d(8, 6, 1), nn.Tanh(), nn.Conv2d(6, 8, 1))
        self.hidden, self.output = nn.Linear(32, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.stem(x)))
        x = torch.max_pool2d(x + self.block(x), 2)
        return self.output(torch.tanh(self.hidden(x.flatten(1))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def drawn(num: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (num,), generator=generator)


X, Y = drawn(sum(SIZES), seed=0)


def images(
    server_fraction: float = 0.0,
    num_clients: int = len(SIZES),
    batch_size: int = 4,
    dtype: torch.dtype = torch.float64,
) -> Arrays:
    plain = server_fraction or num_clients != len(SIZES)
    x, y = drawn(10, seed=1)
    return Arrays(
        train=(X.to(dtype), Y),
        test=(x.to(dtype), y),
        num_clients=num_clients,
        batch_size=batch_size,
        partition=IID() if plain else Sizes(sizes=SIZES),
        server_fraction=server_fraction,
        eval_batch_size=5,
    )


def numbers_at(level: float) -> Tensor:
    """Return bools of all parameters of `Images`, True for those of a level's network."""
    c, h, b = (int(np.ceil(level * width)) for width in (8, 6, 6))
    c = 2 * -(-c // 2)  # groups of two channels
    kept = {
        "stem.weight": (slice(c),),
        "stem.bias": (slice(c),),
        "norm.weight": (slice(c),),
        "norm.bias": (slice(c),),
        "block.0.weight": (slice(b), slice(c)),
        "block.0.bias": (slice(b),),
        "block.2.weight": (slice(c), slice(b)),
        "block.2.bias": (slice(c),),
        "hidden.weight": (slice(h), slice(4 * c)),
        "hidden.bias": (slice(h),),
        "output.weight": (slice(None), slice(h)),
        "output.bias": (slice(None),),
    }
    masks = []
    for name, parameter in Images().named_parameters():
        mask = torch.zeros(parameter.shape, dtype=torch.bool)
        mask[kept[name]] = True
        masks.append(mask.flatten())
    return torch.cat(masks)


def test_levels_may_be_texts_as_in_json() -> None:
    levels: Any = {"1.0": 0.5, "0.5": 0.5}
    assert HeteroFL(levels).exchange == HeteroFL({1.0: 0.5, 0.5: 0.5}).exchange
    with pytest.raises(UserError, match="levels must be a mapping from levels to shares of the clients"):
        HeteroFL({**levels, "half": 0.0})


@RUNNERS
@pytest.mark.parametrize("slots", [{}, {"uplink": TopK(0.3)}, {"steps": [Momentum(beta=0.5)]}], ids=str)
def test_level_1_alone_is_fedavg_bit_for_bit(runner: Any, slots: Any, make_trainer: MakeTrainer) -> None:
    ends = []
    for algorithm in (HeteroFL({1.0: 1.0}, **slots), FedAvg(**slots)):
        torch.manual_seed(0)
        module = Images()
        trainer = make_trainer(max_rounds=3, runner=runner, precision="64-true", dropout_rate=0.3)
        trainer.fit(module, images(), algorithm)
        rows = [{name: x for name, x in row.items() if "seconds" not in name} for row in trainer.fit_loop.rows]
        ends.append((module.state_dict(), rows))
    assert equal_states(ends[0][0], ends[1][0])
    columns = ends[0][1][0].keys() - ends[1][1][0].keys()
    assert columns == {"clients/macs"}
    assert [{name: row[name] for name in row.keys() - columns} for row in ends[0][1]] == ends[1][1]


HIDDEN = ("stem", "block.0", "block.2", "hidden")


@RUNNERS
@pytest.mark.parametrize("level", [0.5, 0.25])
def test_a_clients_step_is_that_of_the_masked_whole_network(
    level: float, runner: Any, make_trainer: MakeTrainer
) -> None:
    """Check one step of one client on all samples: the whole network with zeros outside the small one makes the same."""
    module = Images(optimizer=partial(torch.optim.SGD, lr=0.1)).double()
    whole, start, mask = copy.deepcopy(module), vector(module), numbers_at(level)
    data = images(num_clients=1, batch_size=sum(SIZES))
    trainer = make_trainer(max_rounds=1, clients_per_round=1, precision="64-true", runner=runner)
    trainer.fit(module, data, HeteroFL({level: 1.0}))
    assert trainer.run.ledger.bits("up") == trainer.run.ledger.bits("down") == 64 * int(mask.sum())
    for parameter, part in zip(whole.parameters(), split(mask, whole), strict=True):
        parameter.data *= part
    for name in HIDDEN:
        whole.get_submodule(name).register_forward_hook(lambda layer, inputs, output: output / level)
    nn.functional.cross_entropy(whole(X), Y).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in whole.parameters()])
    expected = np.where(mask, start - 0.1 * gradient.numpy(), start)
    assert np.abs(expected - start).max() > 0.01
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-12)


@RUNNERS
@pytest.mark.parametrize("level", [1.0, 0.5])
def test_a_masked_loss_sees_the_clients_classes_alone(level: float, runner: Any, make_trainer: MakeTrainer) -> None:
    """Check one step of each of two clients on all of its samples: of class 0 alone, and of the classes 1 and 2."""
    module = Images(optimizer=partial(torch.optim.SGD, lr=0.1)).double()
    start, mask, few = vector(module), numbers_at(level), Y == 0
    parts = [few.nonzero().flatten().tolist(), (~few).nonzero().flatten().tolist()]
    data = Arrays(train=(X, Y), test=drawn(10, seed=1), batch_size=len(Y), partition=GivenIndices(parts), num_clients=2)
    trained = []
    for rows, classes in zip(parts, ([0], [1, 2]), strict=True):
        whole = copy.deepcopy(module)
        for parameter, kept in zip(whole.parameters(), split(mask, whole), strict=True):
            parameter.data *= kept
        for name in HIDDEN:
            whole.get_submodule(name).register_forward_hook(lambda layer, inputs, output: output / level)
        logits = whole(X[rows])
        seen = torch.zeros_like(logits)
        seen[:, classes] = logits[:, classes]
        nn.functional.cross_entropy(seen, Y[rows]).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in whole.parameters()])
        trained.append(np.where(mask, start - 0.1 * gradient.numpy(), start))
    trainer = make_trainer(max_rounds=1, clients_per_round=2, precision="64-true", runner=runner)
    trainer.fit(module, data, HeteroFL({level: 1.0}, masked=True))
    expected = (len(parts[0]) * trained[0] + len(parts[1]) * trained[1]) / len(Y)
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-12)
    assert not module.output._forward_hooks


def test_a_mask_changes_nothing_where_clients_have_all_classes(make_trainer: MakeTrainer) -> None:
    parts = [list(range(k, len(Y), 3)) for k in range(3)]
    assert all(len(set(Y[part].tolist())) == 3 for part in parts)
    ends = []
    for masked in (True, None):
        torch.manual_seed(0)
        module = Images()
        data = Arrays(train=(X, Y), test=drawn(10, seed=1), partition=GivenIndices(parts), num_clients=3)
        make_trainer(precision="64-true").fit(module, data, HeteroFL(LEVELS, masked=masked))
        ends.append(vector(module))
    assert np.array_equal(*ends)


def test_a_mask_of_samples_without_classes_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        UserError, match="HeteroFL masks the classes that a client lacks, and the samples have no classes"
    ):
        make_trainer().fit(Perceptron(), federation(), HeteroFL(LEVELS, masked=True))


def split(mask: Tensor, module: nn.Module) -> list[Tensor]:
    sizes = [parameter.numel() for parameter in module.parameters()]
    return [part.view(p.shape) for part, p in zip(mask.split(sizes), module.parameters(), strict=True)]


def test_numbers_outside_every_network_stay(make_trainer: MakeTrainer) -> None:
    module, mask = Images(), numbers_at(0.5)
    start = vector(module)
    make_trainer(max_rounds=3, precision="64-true").fit(module, images(), HeteroFL({0.5: 0.5, 0.25: 0.5}))
    assert np.array_equal(vector(module)[~mask], start[~mask])
    assert (vector(module)[mask] != start[mask]).all()


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(("uplink", "bits"), [(None, lambda d: 64 * d), (TopK(0.3), None)])
def test_bits_are_those_of_the_clients_networks(fixed: bool, uplink: Any, bits: Any, make_trainer: MakeTrainer) -> None:
    """Check the bits of every client, also of those that drop out once they have received the model."""
    if bits is None:
        bits = lambda d: (k := int(0.3 * d)) * 64 + min(d, k * (d - 1).bit_length())  # noqa: E731
    slots = {} if uplink is None else {"uplink": uplink}
    seen = Recorded()
    trainer = make_trainer(max_rounds=4, precision="64-true", dropout_rate=0.3, callbacks=seen)
    trainer.fit(Images(), images(), HeteroFL(LEVELS, fixed=fixed, **slots))
    given = problem(rounds=4)
    up = down = 0
    for t in range(4):
        levels = levels_of(given, t, LEVELS, fixed)
        sizes = {k: int(numbers_at(levels[k]).sum()) for k in given.cohort(t)}
        down += sum(64 * d for d in sizes.values())
        up += sum(bits(sizes[message.client]) for message in seen.rounds[t])
    assert 8 * trainer.run.ledger.total_bytes("down") == down
    assert 8 * trainer.run.ledger.total_bytes("up") == up


def test_levels_have_exact_shares_of_the_clients() -> None:
    given = problem(rounds=1)
    counted = sorted(levels_of(given, 0, {1.0: 0.5, 0.5: 1 / 3, 0.25: 1 / 6}, fixed=True).values())
    assert counted == [0.25, 0.5, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("optimizer", [None, partial(torch.optim.Adam, lr=0.01), partial(torch.optim.Adagrad, lr=0.1)])
def test_runners_agree(optimizer: Any, make_trainer: MakeTrainer) -> None:
    ends = []
    for runner in ("serial", "stacked") if optimizer is None else ("serial", "auto"):
        torch.manual_seed(0)
        module = Images(optimizer=optimizer)
        make_trainer(max_rounds=3, clients_per_round=6, local_epochs=2, precision="64-true", runner=runner).fit(
            module, images(), HeteroFL(LEVELS)
        )
        ends.append(vector(module))
    np.testing.assert_allclose(ends[0], ends[1], rtol=0, atol=1e-12)


def test_resumed_equals_uninterrupted(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    norm = partial(Images, norm=nn.BatchNorm2d)
    algorithm = partial(HeteroFL, LEVELS, fixed=False, uplink=ErrorFeedback(TopK(0.2)))
    resumed_like_whole(make_trainer, tmp_path, norm, partial(images, dtype=torch.float32), algorithm)


class Mid(Callback):
    """Callback that saves the model while clients train."""

    def __init__(self) -> None:
        self.shapes: set[Any] = set()
        self.present: set[Any] = set()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        path = Path(trainer.default_root_dir) / "mid.ckpt"
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        self.shapes.add(tuple(saved["state_dict"]["hidden.weight"].shape))
        self.present.add(tuple(pl_module.hidden.weight.shape))


def test_a_checkpoint_in_a_clients_training_has_the_whole_model(make_trainer: MakeTrainer) -> None:
    mid = Mid()
    make_trainer(max_rounds=1, clients_per_round=6, callbacks=mid).fit(Perceptron(), federation(), HeteroFL(LEVELS))
    assert mid.shapes == {(4, 3)}
    assert mid.present == {(4, 3), (2, 3), (1, 3)}


class Failing(Callback):
    def on_client_upload(self, trainer: Any, pl_module: Any, *where: Any) -> None:
        raise RuntimeError(f"while the module has {pl_module.hidden.bias.numel()} hidden units")


def test_an_error_leaves_the_whole_module(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    with pytest.raises(RuntimeError, match="2 hidden units"):
        make_trainer(max_rounds=1, callbacks=Failing()).fit(module, federation(), HeteroFL({0.5: 1.0}))
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        name: tuple(p.shape) for name, p in Perceptron().named_parameters()
    }
    assert module.hidden.out_features == 4
    assert not module.hidden._forward_hooks


def test_the_memory_of_error_feedback_outside_a_network_stays(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=2, clients_per_round=6, precision="64-true")
    trainer.fit(Images(), images(), HeteroFL({0.5: 0.5, 0.25: 0.5}, uplink=ErrorFeedback(TopK(0.2))))
    residuals = [entry for memory in trainer.run.client_memory.values() for entry in memory.values()]
    assert len(residuals) == 6
    for residual in residuals:
        assert residual.any()
        assert not residual[~numbers_at(0.5)].any()


@pytest.mark.parametrize("server_fraction", [0.0, 0.2])
def test_statistics_of_batch_normalisation_are_static(server_fraction: float, make_trainer: MakeTrainer) -> None:
    """Check that no message has statistics, and that they are those of the server's samples, or of all clients'."""
    module = Images(norm=nn.BatchNorm2d).double()
    data = images(server_fraction)
    trainer = make_trainer(max_rounds=2, clients_per_round=6, precision="64-true")
    trainer.fit(module, data, HeteroFL(LEVELS))
    for way in ("up", "down"):
        assert trainer.run.ledger.round_bits[way].get("buffers", 0) == 0
    x = data.train.inputs
    rows = [data.server_indices] if server_fraction else list(data.client_indices)
    batches = [x[part[start : start + 5]] for part in rows for start in range(0, len(part), 5)]
    means = torch.stack([module.stem(batch).mean((0, 2, 3)) for batch in batches]).mean(0)
    torch.testing.assert_close(module.norm.running_mean, means)


def test_every_width_is_validated(make_trainer: MakeTrainer) -> None:
    """Check the loss of the smaller network against the numbers of its units in a network made small by hand."""
    module = Perceptron()
    trainer = make_trainer(max_rounds=1, precision="64-true")
    trainer.fit(module, federation(), HeteroFL(LEVELS))
    row = trainer.fit_loop.rows[0]
    x, y = samples(10, seed=1)
    for level, width in ((0.5, 2), (0.2, 1)):
        hidden = torch.tanh(x.double() @ module.hidden.weight[:width].T + module.hidden.bias[:width])
        output = hidden @ module.output.weight[:, :width].T + module.output.bias
        losses = 0.5 * (output - y).square().sum(1)
        assert row[f"val/loss_width_{level:g}"] == pytest.approx(losses.mean().item(), rel=1e-9)
    assert "val/loss_width_1" not in row
    validated = trainer.validate(module, federation(), verbose=False)[0]
    assert validated["val/loss_width_0.2"] == pytest.approx(row["val/loss_width_0.2"])


def test_costs_are_those_of_the_clients_networks(make_trainer: MakeTrainer) -> None:
    """Check multiply-accumulates, seconds and energy: a network with h of 4 hidden units needs 5h of 20."""
    clock = ClientClock(devices="phones")
    trainer = make_trainer(max_rounds=1, clients_per_round=6, clock=clock, callbacks=EnergyMeter("wifi"))
    trainer.fit(Perceptron(), federation(), HeteroFL(LEVELS))
    levels = levels_of(problem(rounds=1), 0, LEVELS, fixed=True)
    units = {k: int(np.ceil(4 * level)) for k, level in levels.items()}
    macs = sum(SIZES[k] * 5 * h for k, h in units.items())
    row = trainer.fit_loop.rows[0]
    assert row["clients/macs"] == macs
    assert row["energy/compute_joules"] == pytest.approx(3 * macs * 100e-12)
    devices = trainer.fit_loop.engine.features[0].devices
    times = trainer.fit_loop.engine.features[0].times.clients
    for k, h in units.items():
        bits = 32 * (6 * h + 2)
        seconds = sum(clock.transfer_seconds(devices.device(k), bits, bits))
        seconds += 3 * SIZES[k] * 5 * h / devices.device(k).macs_per_second
        assert times[k] == pytest.approx(seconds / devices.jitter(k, trainer.run.as_of(0)))


def test_a_deadline_knows_how_long_each_network_takes(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1, clients_per_round=6, clock=ClientClock(devices="phones"), deadline=10.0)
    trainer.fit(Perceptron(), federation(), HeteroFL(LEVELS))
    feature = trainer.fit_loop.engine.features[0]
    assert feature.planned == pytest.approx(feature.times.clients)


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ({}, "levels must be a mapping"),
        ([1.0], "levels must be a mapping"),
        ({1.5: 1.0}, r"a level, the share of every hidden layer's units, must lie in \(0, 1\], got 1.5"),
        ({1.0: 0.5}, "the shares of the clients by level must sum to 1, got 0.5"),
        ({1.0: -0.5, 0.5: 1.5}, r"level 1.0 must be that of a share of the clients in \[0, 1\], got -0.5"),
    ],
)
def test_levels_are_checked(levels: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        HeteroFL(levels)


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ({"rule": ControlVariates()}, "'moments/control'|keep numbers of the whole"),
        ({"personal": ["output"]}, "of which none keeps a part: leave PersonalLayers out"),
        ({"downlink": Followed(TopK(0.1))}, "the downlink Followed builds on what they have received before"),
    ],
)
def test_parts_of_the_whole_model_are_refused(slots: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        HeteroFL(**slots)


class Wide(Perceptron):
    """Module whose second layer reads four numbers, whatever the first returns."""

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(x)).view(-1, 4))


@pytest.mark.parametrize(
    ("module", "flags", "said"),
    [
        (Wide, {}, "the hidden layer 'hidden' of Wide cannot lose units"),
        (Perceptron, {"callbacks": FilterPruning(0.4, 1)}, "FilterPruning would prune the model, which HeteroFL cuts"),
        (Perceptron, {"runner": "lightning"}, "smaller networks, which runner 'lightning' cannot"),
    ],
)
def test_what_cannot_be_cut_is_refused(module: Any, flags: Any, said: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=said):
        make_trainer(max_rounds=3, **flags).fit(module(), federation(), HeteroFL(LEVELS))


@pytest.mark.parametrize("algorithm", [partial(HeteroFL, LEVELS), partial(FjORD, [0.25, 0.5, 1.0])])
@pytest.mark.matrix
def test_a_compiled_module_trains_as_any_other(algorithm: Any, make_trainer: MakeTrainer) -> None:
    """Check hooks that come and go, also where the compiler has seen the module without them."""
    ends = []
    for compiles in (False, True):
        torch.manual_seed(0)
        module = Perceptron()
        if compiles:
            torch._dynamo.reset()
            module.compile(backend="eager")
        make_trainer(max_rounds=3, clients_per_round=6, precision="64-true", runner="serial").fit(
            module, federation(), algorithm()
        )
        ends.append(vector(module))
    np.testing.assert_allclose(ends[1], ends[0], rtol=0, atol=1e-12)
