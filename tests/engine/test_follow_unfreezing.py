"""Test a federation whose module trains more of its parameters from the middle of the run on."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer, equal_states, resumed_like_whole
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback, LearningRateMonitor
from roster import ROSTER, WHOLE
from test_follow_pruning import with_client_states
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import Perceptron, Pruning, federation, samples

from lightning_fl import UserError
from lightning_fl.algorithms import SCAFFOLD, Algorithm, FedAvg, FedBuff, FedProx
from lightning_fl.callbacks import MagnitudePruning
from lightning_fl.clients.choose_runner import describe_runner
from lightning_fl.codecs import ErrorFeedback, TopK
from lightning_fl.steps import FurtherModels

SHAPES = {"hidden.weight": (4, 3), "hidden.bias": (4,), "output.weight": (2, 4), "output.bias": (2,)}


class Unfreezing(Perceptron):
    """Perceptron whose first layer, 16 of 26 parameters, trains from a round on."""

    def __init__(self, when: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.when = when
        self.hidden.requires_grad_(when == 0)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.when:
            self.hidden.requires_grad_(True)


def extended(node: Any, variance: float, layer: Tensor, name: str = "") -> Any:
    """Give every vector (…, 10) in nested dictionaries 16 entries before its own, as they are before a first round.

    A model of an earlier round gets those of the layer (16,), and further models of the server get them with turned signs.
    """
    if isinstance(node, dict):
        return {key: extended(value, variance, layer, key) for key, value in node.items()}
    if not isinstance(node, Tensor) or node.shape[-1:] != (10,):
        return node
    if name in ("sent", "last", "previous"):
        return torch.cat([layer.to(node), node])
    if name.startswith("model/"):
        return torch.cat([FurtherModels(3).init(torch.cat([layer, layer.new_zeros(10)]))[name][:16].to(node), node])
    first = 1.0 if node.dtype == torch.bool else variance if name == "second" else 0.0
    return torch.cat([torch.full((*node.shape[:-1], 16), first, dtype=node.dtype), node], -1)


def extend_by_hand(checkpoint: dict[str, Any], algorithm: Algorithm) -> dict[str, Any]:
    """Return a checkpoint of a run that has trained the second layer, for a run that trains both."""
    variances = [step.epsilon**2 for step in algorithm.steps if hasattr(step, "epsilon")]
    params = torch.cat([checkpoint["state_dict"][name].flatten() for name in SHAPES])
    run = extended(checkpoint["federation"]["run"], *variances or [0.0], params[:16])
    run["names"], run["shapes"] = list(SHAPES), [list(shape) for shape in SHAPES.values()]
    run["dim_orders"] = [list(range(len(shape))) for shape in SHAPES.values()]
    run["params"] = params
    return checkpoint | {"federation": checkpoint["federation"] | {"run": run}}


REFUSED = {
    "LocalOnly": "each client of LocalOnly keeps 'own/model'",
    "Ditto": "each client of Ditto keeps 'own/model'",
    "APFL": "each client of APFL keeps 'own/model'",
    "PFedMe": "each client of PFedMe keeps 'own/model'",
    "FedOpt": "FedOpt's step ServerOptimizer keeps 'momentum_buffer'",
    "FedAdamSSM-second": "the codec of FedAdamSSM's downlink keeps 'model'",
    "DASHA": "the codec of DASHA's uplink keeps 'last/model'",
    "OneBitAdam": "OneBitAdam's step WarmedUpMoments keeps 'error'",
    "EfficientAdam": "EfficientAdam's step Compress keeps 'change'",
}


# IMC's callback prunes by magnitude before the module's hook unfreezes, and so without the first layer.
@pytest.mark.parametrize("name", [name for name in WHOLE if name not in REFUSED and name != "IMC"])
def test_goes_on_as_a_run_whose_states_were_extended_by_hand(
    name: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    entry, module = ROSTER[name], Unfreezing()
    first, whole = copy.deepcopy(module), Unfreezing(when=0)
    trainer = make_trainer(max_rounds=4)
    trainer.fit(module, entry.federation(), entry.algorithm())
    make_trainer(max_rounds=2, **keeps_files).fit(first, entry.federation(), entry.algorithm())
    last = tmp_path / "checkpoints" / "last.ckpt"
    torch.save(extend_by_hand(with_client_states(last), entry.algorithm()), last)
    resumed = make_trainer(max_rounds=4)
    resumed.fit(whole, entry.federation(), entry.algorithm(), ckpt_path=last)
    assert equal_states(module.state_dict(), whole.state_dict())
    assert equal_states(trainer.run.state_dict(), resumed.run.state_dict())


@pytest.mark.parametrize("name", REFUSED)
def test_methods_whose_states_cannot_follow_refuse_by_name(name: str, make_trainer: MakeTrainer) -> None:
    entry = ROSTER[name]
    with pytest.raises(UserError, match=f"lets more layers train, but {REFUSED[name]}, which has no value for them"):
        make_trainer(max_rounds=3).fit(Unfreezing(), entry.federation(), entry.algorithm())


def plain_head(module: Any) -> Any:
    """Return plain SGD for the second layer."""
    return torch.optim.SGD(module.output.parameters(), lr=0.1)


def falling_head(module: Any) -> Any:
    """Return Adam for the second layer, with a rate that falls from round to round."""
    optimizer = torch.optim.Adam(module.output.parameters(), lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Thawing(BaseFinetuning):
    """Callback that trains the first layer from round 1 on, as a group of its own, and the second one not in rounds 1 and 2."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.hidden)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.hidden, optimizer, lr=0.02)
            pl_module.output.requires_grad_(False)
        if epoch == 3:
            pl_module.output.requires_grad_(True)


class Thawed(Perceptron):
    """Perceptron that brings the callback along."""

    def configure_callbacks(self) -> Any:
        return [Thawing(), LearningRateMonitor("epoch")]


# FedProx makes all gradients views of one vector, in whose stretches its optimiser steps.
@pytest.mark.parametrize("algorithm", [FedAvg, partial(FedProx, 0.1), SCAFFOLD])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resumed_runs_go_on_with_the_layers_and_groups_of_callbacks(
    algorithm: Any, stop: int, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    configure = plain_head if algorithm is SCAFFOLD else falling_head
    resumed_like_whole(make_trainer, tmp_path, partial(Thawed, configure=configure), algorithm=algorithm, stop=stop)


class Changing(Perceptron):
    """Perceptron that lets one layer train, and freezes the other, in round 1, and is pruned in round 2."""

    def __init__(self, freezes: str) -> None:
        super().__init__()
        self.freezes = getattr(self, freezes)
        self.unfreezes = self.output if self.freezes is self.hidden else self.hidden
        self.unfreezes.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.freezes.requires_grad_(False)
            self.unfreezes.requires_grad_(True)


@pytest.mark.parametrize("pruning", [Pruning(when=2), MagnitudePruning(0.5, prune_epoch=2)], ids=["units", "mask"])
@pytest.mark.parametrize("freezes", ["hidden", "output"])
def test_layers_that_change_follow_a_pruning(
    freezes: str, pruning: Callback, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    module, trainer = resumed_like_whole(
        make_trainer, tmp_path, partial(Changing, freezes), algorithm=SCAFFOLD, stop=3, callbacks=pruning
    )
    assert trainer.run.layout.names == tuple(SHAPES)
    assert module.freezes.weight.requires_grad is False


class Backbone(Perceptron):
    """Perceptron whose first layer is its backbone."""

    def __init__(self) -> None:
        super().__init__(configure=plain_head)
        self.backbone = self.hidden


@pytest.mark.parametrize("flags", [{"runner": "serial"}, {"runner": "stacked"}, {"runner": "lightning"}])
def test_one_client_with_all_samples_trains_as_with_lightning(
    flags: dict[str, Any], make_trainer: MakeTrainer, make_stock_trainer: Any
) -> None:
    """Let Lightning's own callback unfreeze a layer, whose learning rate it doubles in each round, up to that of the head."""
    module = Backbone()
    stock, data = copy.deepcopy(module), federation(sizes=(12,), batch_size=12)
    callback = partial(BackboneFinetuning, 2, lambda epoch: 2.0, 0.01)
    loader = DataLoader(TensorDataset(*samples(12)), 12)
    make_stock_trainer(max_epochs=6, callbacks=callback(), limit_val_batches=0).fit(stock, loader)
    trainer = make_trainer(max_rounds=6, clients_per_round=1, callbacks=callback(), **flags)
    trainer.fit(module, data)
    torch.testing.assert_close(module.state_dict(), stock.state_dict())
    assert trainer.run.ledger.total_bits["up"]["model"] == 32 * (2 * 10 + 4 * 26)


class Padded(Perceptron):
    """Perceptron with an embedding that trains from round 1 on, except for the row of the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, padding_idx=0).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((x + self.words((x[:, 0] > 0).long()), y))

    def on_train_epoch_start(self) -> None:
        self.words.requires_grad_(self.current_epoch > 0)


def test_clients_leave_a_stack_that_cannot_train_an_unfrozen_layer(make_trainer: MakeTrainer) -> None:
    data, runners, modules = federation(sizes=(4,) * 12), [], [Padded()]
    modules.append(copy.deepcopy(modules[0]))

    class Watches(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            runners.append(describe_runner(trainer.fit_loop.engine.runner)["wanted"])

    for runner, module in zip(("serial", "auto"), modules, strict=True):
        make_trainer(runner=runner, clients_per_round=12, max_rounds=3, callbacks=Watches()).fit(module, data)
        assert not module.words.weight[0].any()
        assert module.words.weight[1].abs().sum() > 0
    assert runners == ["serial"] * 3 + ["stacked", "serial", "serial"]
    torch.testing.assert_close(modules[0].state_dict(), modules[1].state_dict())
    with pytest.raises(UserError, match="row of an embedding's padding_idx"):
        make_trainer(runner="stacked").fit(Padded(), data)


def test_what_no_state_of_the_run_could_follow_is_refused(make_trainer: MakeTrainer) -> None:
    class Partly(Unfreezing):
        def __init__(self) -> None:
            super().__init__()
            self.hidden.bias.requires_grad_(True)

    with pytest.raises(UserError, match=r"lets hidden.weight train .* clients of FedBuff train on earlier models"):
        make_trainer(max_rounds=3, runner="serial").fit(Unfreezing(), federation(), FedBuff(buffer_size=2))
    with pytest.raises(UserError, match=r"lets hidden.weight train .* personal to each client"):
        make_trainer(max_rounds=3).fit(Partly(), federation(), Algorithm(personal=["hidden"]))
    with pytest.raises(UserError, match="has no trainable parameter"):
        make_trainer(callbacks=BackboneFinetuning()).fit(Backbone().requires_grad_(False), federation())


class KeepsMemory(Callback):
    """Callback that keeps the codec memory of all clients after each round."""

    def __init__(self) -> None:
        self.residuals: list[dict[int, Tensor]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        memory = trainer.run.client_memory
        self.residuals.append({client: memory[client]["residual/model"].clone() for client in list(memory)})


def test_memory_of_clients_grows_by_zeros(make_trainer: MakeTrainer) -> None:
    """The residual of a client that is not in the round of the unfreezing keeps its 10 numbers, after 16 zeros."""
    kept, algorithm = KeepsMemory(), FedAvg(uplink=ErrorFeedback(TopK(0.3)))
    trainer = make_trainer(max_rounds=3, clients_per_round=2, callbacks=kept)
    trainer.fit(Unfreezing(), federation(sizes=(4,) * 6), algorithm)
    _, before, after = kept.residuals
    trained = {client for client in after if client not in before or after[client][:16].any()}
    assert len(trained) == 2
    assert before.keys() - trained
    for client in before.keys() - trained:
        assert before[client].any()
        torch.testing.assert_close(after[client], torch.cat([torch.zeros(16), before[client]]), rtol=0, atol=0)


class Measured(Callback):
    """Callback that measures each client before and after a training of its own."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.results = trainer.evaluate_clients(finetune_epochs=1)

    on_model_loaded = on_train_epoch_end


def test_clients_are_measured_with_the_layers_and_groups_of_callbacks(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    """Test it in the fit, after it, and with a module that knows of the layers from the checkpoint alone."""
    module, data, measured = Thawed(configure=falling_head), federation(), Measured()
    data.val_fraction = 0.3
    trainer, results = make_trainer(max_rounds=3, callbacks=measured, **keeps_files), []
    trainer.fit(module, data)
    results.append(measured.results)
    trainer.validate(module, data, verbose=False)
    results.append(measured.results)
    last = tmp_path / "checkpoints" / "last.ckpt"
    make_trainer(callbacks=measured).validate(Thawed(configure=falling_head), data, ckpt_path=last, verbose=False)
    assert results == [measured.results] * 2
