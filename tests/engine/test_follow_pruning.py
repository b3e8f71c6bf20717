"""Test a federation whose network is pruned in the middle of the run."""

import copy
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from lightning.pytorch import Callback
from roster import ROSTER, WHOLE
from torch import nn
from toys import Perceptron, Pruning, Remembering, federation, read_rows, vector, without_units

from lightning_fl import UserError
from lightning_fl.algorithms import FedAvg
from lightning_fl.codecs import Dense
from lightning_fl.features.clock.simulated_clock import SimulatedClock
from lightning_fl.link.link import Link
from lightning_fl.outputs import checkpoint_file
from lightning_fl.pruning import Plan, plans_of, prune
from lightning_fl.slots import PruningTurn, RoundContext
from lightning_fl.state.saved_states import KINDS, read_states
from lightning_fl.vectors.layout import NO_LAYOUT, Layout
from lightning_fl.vectors.pruning_map import PruningMap

# In the vector of W₁ (4, 3), b₁ (4,), W₂ (2, 4), b₂ (2,), hidden unit 1 has row 3-5, bias 13 and column 17, 21.
KEPT = [place for place in range(26) if place not in (3, 4, 5, 13, 17, 21)]


class Narrow(Perceptron):
    """Perceptron with three hidden units from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(3, 3), nn.Linear(3, 2)


def sliced(node: Any) -> Any:
    """Remove hidden unit 1 from every vector (…, 26) in nested dictionaries."""
    if isinstance(node, dict):
        return {key: sliced(value) for key, value in node.items()}
    return node[..., KEPT] if isinstance(node, torch.Tensor) and node.shape[-1:] == (26,) else node


def with_client_states(path: Path) -> dict[str, Any]:
    """Return a checkpoint with its clients' states in it, which `last.ckpt` has in files beside it."""
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    run = read_states(checkpoint["federation"]["run"], path)
    run.pop("client_files", None)
    checkpoint["federation"]["run"] = run | {kind: dict(run[kind]) for kind in KINDS}
    return checkpoint


def slice_by_hand(checkpoint: dict[str, Any], is_announced: bool) -> dict[str, Any]:
    """Return a perceptron's checkpoint without unit 1, and if announced, with the bits of four units to six clients."""
    run = sliced(checkpoint["federation"]["run"])
    shapes = {"hidden.weight": (3, 3), "hidden.bias": (3,), "output.weight": (2, 3), "output.bias": (2,)}

    def without_unit_1(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = torch.cat([tensors[name].flatten() for name in shapes])[KEPT].split([9, 3, 6, 2])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    run["shapes"] = [list(shape) for shape in shapes.values()]
    for bits in (run["ledger"]["coming_bits"], run["ledger"]["total_bits"]):
        bits["down"]["mask"] += 6 * 4 * is_announced
    callbacks = {
        key: state | {"masks": without_unit_1(state["masks"])} if state.get("masks") else state
        for key, state in checkpoint["callbacks"].items()
    }
    parts = {"state_dict": without_unit_1(checkpoint["state_dict"]), "callbacks": callbacks}
    return checkpoint | parts | {"federation": checkpoint["federation"] | {"run": run}}


# They have states of clients, of steps, of both codecs, layers and server data; for a stack the others add nothing new.
STACKED = ("SCAFFOLD", "FedDUM", "FedLDF-map", "FedADP", "FedAdamSSM-second", "OneBitAdam", "EfficientAdam")


@pytest.mark.parametrize(
    ("name", "runner"),
    [
        *((name, "serial") for name in STACKED),
        *(pytest.param(name, "serial", marks=pytest.mark.matrix) for name in WHOLE if name not in STACKED),
        *((name, "stacked") for name in STACKED),
    ],
)
def test_goes_on_as_a_network_born_small_whose_states_were_sliced_by_hand(
    name: str, runner: Any, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    entry, module = ROSTER[name], Perceptron()
    first = copy.deepcopy(module)
    trainer = make_trainer(max_rounds=4, runner=runner, callbacks=Pruning(when=2))
    trainer.fit(module, entry.federation(), entry.algorithm())

    make_trainer(max_rounds=2, runner=runner, **keeps_files).fit(first, entry.federation(), entry.algorithm())
    last = tmp_path / "checkpoints" / "last.ckpt"
    is_announced = entry.algorithm().exchange.uses_link
    torch.save(slice_by_hand(with_client_states(last), is_announced), last)
    narrow = Narrow()
    resumed = make_trainer(max_rounds=4, runner=runner)
    resumed.fit(narrow, entry.federation(), entry.algorithm(), ckpt_path=last)
    assert equal_states(module.state_dict(), narrow.state_dict())
    assert equal_states(trainer.run.state_dict(), resumed.run.state_dict())
    numbers, others = trainer.callback_metrics, resumed.callback_metrics
    assert numbers.keys() == others.keys()
    assert all(numbers[key] == others[key] for key in numbers if "time" not in key)


# Fewer numbers or neurons change their choice of coordinates to send or keep, or zero has a sign.
COUNT_NUMBERS = (
    *("FedADP", "FedAdamTop", "FedAdamSSM", "FairnessTop", "OneBitAdam", "EfficientAdam-sign"),
    *("IMC", "PruneFL", "DASHA"),
)


@pytest.mark.parametrize("name", [name for name in WHOLE if not name.startswith(COUNT_NUMBERS)])
def test_without_a_unit_of_zeros_nothing_changes(name: str, make_trainer: MakeTrainer) -> None:
    """Check that such a unit stays zero, since tanh 0 = 0 and both its sides have zero gradients."""
    entry, dense = ROSTER[name], Perceptron()
    with torch.no_grad():
        for part in (dense.hidden.weight[1], dense.hidden.bias[1], dense.output.weight[:, 1]):
            part.zero_()
    pruned = copy.deepcopy(dense)
    make_trainer(max_rounds=4, precision="64-true").fit(dense, entry.federation(), entry.algorithm())
    flags: dict[str, Any] = {"max_rounds": 4, "precision": "64-true", "callbacks": Pruning(when=2)}
    make_trainer(**flags).fit(pruned, entry.federation(), entry.algorithm())
    np.testing.assert_allclose(vector(pruned), vector(dense)[KEPT], rtol=0, atol=1e-12)


class Convolved(Perceptron):
    """Module x (B, 3) → frozen W x, images (B, 2, 4, 4) → convolution, normalised or not → convolution → mean → (B, 2)."""

    def __init__(self, normalised: bool, configure: Any = None) -> None:
        super().__init__(configure=configure)
        del self.hidden
        self.images = nn.Linear(3, 32).requires_grad_(False)
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3)
        self.norm = nn.BatchNorm2d(4) if normalised else nn.Identity()
        self.output = nn.Linear(3, 2)
        with torch.no_grad():  # the output of filter 1 is 0, and the filter is not trained
            for x in (self.norm.weight, self.norm.bias) if normalised else (self.first.weight, self.first.bias):
                x[1] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = self.images(x).view(-1, 2, 4, 4)
        return self.output(torch.relu(self.second(torch.relu(self.norm(self.first(images))))).mean((2, 3)))


class FilterLess(Pruning):
    """Callback that removes filter 1 from a `Convolved`."""

    def plan(self, module: nn.Module) -> Plan:
        kept = torch.tensor([0, 2, 3])
        of_norm = [name for name, x in module.norm.state_dict(prefix="norm.").items() if x.dim()]
        axes = {name: {0: kept} for name in ("first.weight", "first.bias", *of_norm)}
        return Plan(
            filters={"first": kept}, axes={**axes, "second.weight": {1: kept}}, widths={"first": 4, "second": 3}
        )


def in_groups(module: Any) -> torch.optim.Optimizer:
    """Return an optimiser with momentum, and weight decay of one layer only."""
    decayed, others = list(module.second.parameters()), [*module.first.parameters(), *module.output.parameters()]
    return torch.optim.SGD([{"params": others}, {"params": decayed, "weight_decay": 0.1}], lr=0.1, momentum=0.5)


def adagrad(module: Any) -> torch.optim.Optimizer:
    """Return an optimiser whose state exists from the start."""
    return torch.optim.Adagrad(module.parameters(), lr=0.05)


@pytest.mark.parametrize(
    ("configure", "normalised", "runner"),
    [
        *product((None, in_groups), (False, True), ("serial", "stacked")),
        # Adagrad is not stacked, and a bias before a normalisation has rounding errors as gradient, which it amplifies.
        (adagrad, False, "serial"),
    ],
)
def test_a_filter_that_nothing_passes_is_cut_out_of_every_vector(
    configure: Any, normalised: bool, runner: Any, make_trainer: MakeTrainer
) -> None:
    """Test running statistics, frozen parameters, states and codec memory."""
    runs = {}
    start = Convolved(normalised, configure)
    for kind, callbacks in {"dense": [], "pruned": [FilterLess(when=1)]}.items():
        module = copy.deepcopy(start)
        trainer = make_trainer(max_rounds=3, precision="64-true", runner=runner, callbacks=callbacks)
        trainer.fit(module, federation(sizes=(3, 6, 4, 8)), Remembering())
        runs[kind] = module, trainer.run
    (dense, whole), (pruned, less) = runs["dense"], runs["pruned"]
    plan = plans_of(pruned)[0]
    assert (pruned.first.out_channels, pruned.second.in_channels) == (3, 3)

    def check(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> None:
        assert here.keys() == there.keys()
        for name, x in there.items():
            torch.testing.assert_close(here[name], plan.cut(name, x), rtol=0, atol=1e-12, msg=name)

    check(pruned.state_dict(), dense.state_dict())
    assert whole.clients.keys() == less.clients.keys()
    for client in whole.clients:
        check(less.layout.views(less.clients[client]["sum"]), whole.layout.views(whole.clients[client]["sum"]))
        assert less.clients[client]["turns"] == whole.clients[client]["turns"]
        here, there = less.client_memory[client], whole.client_memory[client]
        check(less.layout.views(here["model"]), whole.layout.views(there["model"]))
        if normalised:
            check(less.buffer_layout.views(here["buffers"]), whole.buffer_layout.views(there["buffers"]))


def test_names_and_lengths_say_what_is_cut() -> None:
    layout = Layout.of({"a": torch.zeros(2, 2), "b": torch.zeros(2)})
    buffer_layout = Layout.of({"mean": torch.zeros(2), "var": torch.zeros(4)})
    plan = Plan(axes={"a": {1: torch.tensor([1])}, "var": {0: torch.tensor([0, 3])}})
    x = torch.arange(6.0)
    state = {
        "momentum": x,
        "residual/moments/first": x.expand(3, 6),
        "residual/buffers": x,
        "scalars/classes": x,
        "mean": torch.zeros(()),
        "scales": torch.zeros(2),
    }
    cut = PruningMap.from_plan(layout, buffer_layout, plan).state(state)
    assert cut["momentum"].tolist() == [1, 3, 4, 5]
    assert cut["residual/moments/first"].tolist() == [[1, 3, 4, 5]] * 3
    assert cut["residual/buffers"].tolist() == [0, 1, 2, 5], "it has as many numbers as there are parameters"
    assert all(cut[name] is state[name] for name in ("scalars/classes", "mean", "scales"))


@pytest.mark.parametrize("normalised", [False, True])
def test_bits_clock_and_size_change_in_that_round(normalised: bool, make_trainer: MakeTrainer) -> None:
    rows = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            row = copy.deepcopy(trainer.run.ledger.round_bits), trainer.run.simulated_seconds
            rows.append((*row, *(int(trainer.callback_metrics[f"model/{what}"]) for what in ("parameters", "macs"))))

    fast = {"uplink_mebibytes_per_second": 1e30, "downlink_mebibytes_per_second": 1e30}
    clock = SimulatedClock(computation_seconds=10.0, **fast)
    callbacks = [FilterLess(when=1), Watch()]
    trainer = make_trainer(max_rounds=3, clients_per_round=2, clock=clock, callbacks=callbacks)
    trainer.fit(Convolved(normalised), federation(sizes=(3, 6, 4, 8)))
    # 4 filters of 2·9 + 1 numbers, 3 of 4·9 + 1, 2 of 3 + 1; one filter less saves 19 and 3·9; batch normalisation has 4 of each.
    sizes, buffers, macs = (195, 149, 149), (0, 0, 0), (3 * 32 + 16 * 72 + 4 * 108 + 6, 3 * 32 + 16 * 54 + 4 * 81 + 6)
    if normalised:
        sizes, buffers = (203, 155, 155), (8, 6, 6)
    for round, (bits, seconds, parameters, counted) in enumerate(rows):
        for direction in ("up", "down"):
            mask = 4 * (4 + 3) if (direction, round) == ("down", 1) else 0
            expected = {"model": 2 * 32 * sizes[round], "buffers": 2 * 32 * buffers[round], "mask": mask}
            assert {kind: count for kind, count in bits[direction].items() if count} == {
                k: v for k, v in expected.items() if v
            }
        assert (parameters, counted) == (sizes[round] + 128, macs[min(round, 1)])
        assert seconds == pytest.approx(10 + 10 * round * macs[1] / macs[0])
    ledger = trainer.run.ledger
    assert ledger.total_bits["down"] == {
        k: sum(bits["down"][k] for bits, *_ in rows) for k in ledger.total_bits["down"]
    }


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("stop", [1, 2, 3, "in the round"])
def test_resumed_before_in_and_after_the_round_of_the_pruning(
    stop: int | str, place: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    start = Perceptron()
    whole, half, resumed = (copy.deepcopy(start) for _ in range(3))
    clock = SimulatedClock(computation_seconds=1.0)
    flags: dict[str, Any] = {"max_rounds": 5, "clock": clock, **keeps_files}
    trainer = make_trainer(callbacks=Pruning(when=2), default_root_dir=tmp_path / "whole", **flags)
    trainer.fit(whole, federation(), Remembering())
    rows = read_rows(tmp_path / "whole")
    assert [(row["model/parameters"], row["model/macs"]) for row in rows] == [("26", "20")] * 2 + [("20", "15")] * 3

    class Dies(Callback):
        def on_client_upload(self, trainer: Any, pl_module: Any, client: int, place: int, total: int) -> None:
            if trainer.current_epoch == 2 and stop == "in the round":
                trainer.save_checkpoint(tmp_path / "half" / "checkpoints" / "last.ckpt")
                raise RuntimeError("power failure")

    first = {**flags, "max_rounds": stop if isinstance(stop, int) else 5, "client_states": place}
    root = {"default_root_dir": tmp_path / "half"}
    with nullcontext() if isinstance(stop, int) else pytest.raises(RuntimeError, match="power failure"):
        make_trainer(callbacks=[Pruning(when=2), Dies()], **first, **root).fit(half, federation(), Remembering())
    again = make_trainer(callbacks=Pruning(when=2), client_states=place, **flags, **root)
    again.fit(resumed, federation(), Remembering(), ckpt_path="last")
    assert equal_states(whole.state_dict(), resumed.state_dict())
    states = [{**t.run.state_dict(), "clients": dict(t.run.clients)} for t in (trainer, again)]
    for state, t in zip(states, (trainer, again), strict=True):
        state["client_memory"] = dict(t.run.client_memory)
    assert equal_states(*states)
    assert read_rows(tmp_path / "half") == rows
    for folder in ("whole", "half"):
        saved = checkpoint_file.load(tmp_path / folder / "model.ckpt")
        assert sum(x.numel() for x in saved["state_dict"].values()) == 20


def test_files_of_states_that_were_cut_are_deleted(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    files = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            files.append({f"{path.parent.name} {path.stem}" for path in tmp_path.glob("client-states-*/*/*.rows")})

    callbacks = [Pruning(when=2), Watch()]
    trainer = make_trainer(max_rounds=4, clients_per_round=6, client_states="disk", callbacks=callbacks)
    trainer.fit(Perceptron(), federation(), Remembering())
    assert files == [{"rule 0", "rule 1", "codec 0"}] * 2 + [{"rule 1", "rule 2", "codec 1"}] * 2


@pytest.mark.parametrize("file", ["model.ckpt", "checkpoints/last.ckpt"])
def test_a_dense_module_is_pruned_before_it_is_evaluated(
    file: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    trained = Perceptron()
    make_trainer(max_rounds=3, callbacks=Pruning(when=1, drop=(0, 2)), **keeps_files).fit(trained, federation())
    expected = make_trainer().validate(trained, federation(), verbose=False)
    path = tmp_path / file
    for evaluate in ("validate", "test", "predict"):
        dense, trainer = Perceptron(), make_trainer()
        result = getattr(trainer, evaluate)(
            dense, federation(), ckpt_path=path, **{"verbose": False} if evaluate != "predict" else {}
        )
        assert equal_states(dense.state_dict(), trained.state_dict())
        assert dense.hidden.out_features == 2
        if evaluate == "validate":
            assert result == expected
    with pytest.raises(UserError, match=r"another model than Narrow.*hidden\.weight"):
        make_trainer().validate(Narrow(), federation(), ckpt_path=path)


def test_what_is_pruned_cannot_be_made_whole_again(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    module = Perceptron()
    make_trainer(max_rounds=1, **keeps_files).fit(module, federation())
    path = tmp_path / "checkpoints" / "last.ckpt"
    make_trainer(max_rounds=2, callbacks=Pruning(when=1)).fit(module, federation(), ckpt_path=path)
    before = copy.deepcopy(module.state_dict())
    for again in ("validate", "fit"):
        with pytest.raises(UserError, match=r"pruned further than .* the checkpoint.*: give a new Perceptron"):
            getattr(make_trainer(max_rounds=3), again)(module, federation(), ckpt_path=path)
        assert equal_states(module.state_dict(), before)


def test_a_module_made_small_at_once_keeps_the_history(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    """Check that it resumes a pruned run, and that a dense module resumes from its checkpoint."""
    whole, first, last = (Perceptron() for _ in range(3))
    first.load_state_dict(whole.state_dict())
    make_trainer(max_rounds=4, callbacks=Pruning(when=1)).fit(whole, federation(), Remembering())
    make_trainer(max_rounds=2, callbacks=Pruning(when=1), **keeps_files).fit(first, federation(), Remembering())
    for stop, module in {3: Narrow(), 4: last}.items():
        make_trainer(max_rounds=stop, **keeps_files).fit(module, federation(), Remembering(), ckpt_path="last")
    assert equal_states(whole.state_dict(), last.state_dict())


def test_pruned_twice_and_evaluated_in_between(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    class Twice(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch < 2 and len(plans_of(pl_module)) == trainer.current_epoch:
                prune(pl_module, without_units(pl_module, (1,)), trainer.optimizers)

    whole, half, resumed = Perceptron(), Perceptron(), Perceptron()
    half.load_state_dict(whole.state_dict())
    trainer = make_trainer(max_rounds=4, callbacks=Twice())
    trainer.fit(whole, federation(), Remembering())
    assert whole.hidden.out_features == 2
    make_trainer(max_rounds=2, callbacks=Twice(), **keeps_files).fit(half, federation(), Remembering())
    again = make_trainer(max_rounds=4, callbacks=Twice(), **keeps_files)
    again.fit(resumed, federation(), Remembering(), ckpt_path="last")
    assert equal_states(whole.state_dict(), resumed.state_dict())
    assert equal_states(trainer.run.state_dict(), again.run.state_dict())


def test_pruning_in_the_middle_of_a_round_is_refused(make_trainer: MakeTrainer) -> None:
    class Rash(Callback):
        def on_client_upload(self, trainer: Any, pl_module: Any, client: int, place: int, total: int) -> None:
            if place == total:
                prune(pl_module, without_units(pl_module, (1,)), trainer.optimizers)

    module = Perceptron()
    with pytest.raises(UserError, match=r"in the middle of a round.*on_train_epoch_start"):
        make_trainer(callbacks=Rash()).fit(module, federation())
    assert module(torch.zeros(1, 3)).shape == (1, 2)


def test_the_mask_of_filters_goes_to_the_clients_with_samples() -> None:
    context, empty = RoundContext(NO_LAYOUT, NO_LAYOUT, num_clients=2, clients=[1, 2]), torch.zeros(0)
    link = Link(context, Dense(), Dense(), timed=[1, 2])
    plan = Plan(filters={"hidden": torch.tensor([0, 2, 3])}, widths={"hidden": 4})
    FedAvg().broadcast_pruning(PruningTurn(plan, link, context, [1, 2], empty, empty))
    assert link.bits_by_client == {1: (0, 4), 2: (0, 4)}


def test_a_plan_that_keeps_everything_is_none(make_trainer: MakeTrainer) -> None:
    class Idle(Pruning):
        def plan(self, module: nn.Module) -> Plan:
            return Plan(widths={"hidden": 4})

    one = Perceptron()
    other = copy.deepcopy(one)
    plain = make_trainer(max_rounds=3)
    plain.fit(one, federation())
    idle = make_trainer(max_rounds=3, callbacks=Idle(when=1))
    idle.fit(other, federation())
    assert equal_states(plain.run.state_dict(), idle.run.state_dict())
