"""Test that hooks of modules and callbacks are called as often and in the same order as by Lightning's own trainer.

A round is an epoch. Lightning's classes name the hooks, so that a new one fails the first test.
"""

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from toys import Perceptron, federation

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms import DeviceM
from lightning_fl.data import Federated
from lightning_fl.flat_module.hooks import OF_STEPS

pytestmark = [
    pytest.mark.filterwarnings("ignore:You have overridden `:UserWarning"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning"),
]
MakeStock = Callable[..., L.Trainer]

LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
OLD_NAMES = ("configure_sharded_model",)
NOT_CALLED_BY_TRAINERS = {
    *("forward", "log", "log_dict", "print", "all_gather", "optimizers", "lr_schedulers", "freeze", "unfreeze"),
    *("manual_backward", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer", "clip_gradients"),
    *("load_from_checkpoint", "to_onnx", "to_torchscript", "to_tensorrt"),
}
WITHIN_A_ROUND = ("batch", "backward", "zero_grad", "optimizer_step", "checkpoint", "_step")
"""Parts of names of hooks inside an epoch, of which a federation of several clients has more."""


def public(*classes: type) -> list[str]:
    return [name for kind in classes for name, value in vars(kind).items() if name[0] != "_" and callable(value)]


HOOKS_OF_MODULES = [
    name
    for name in dict.fromkeys(public(ModelHooks, DataHooks, CheckpointHooks, L.LightningModule))
    if name not in {*OF_STEPS, *OLD_NAMES, *NOT_CALLED_BY_TRAINERS}
]
HOOKS_OF_CALLBACKS = public(Callback)


class Notes:
    """Record of calls: who was called, the hook, its arguments, and the trainer's state."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def add(self, who: str, name: str, trainer: Any, *details: Any) -> None:
        flags = (trainer.training, trainer.validating, trainer.sanity_checking, trainer.testing, trainer.predicting)
        self.calls.append((who, name, *details, trainer.current_epoch, str(trainer.state.stage), flags))


def described(value: Any) -> Any:
    """Return what of an argument must be the same in both trainers: shapes, not values, because batches come in another order."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return sorted(value) if "state_dict" not in value else "checkpoint"
    return getattr(value, "value", value) if isinstance(value, (int, str)) else type(value).__name__


def _of_module(name: str) -> Callable[..., Any]:
    def hook(self: Any, *arguments: Any, **options: Any) -> Any:
        mode = self.training if name not in ("configure_callbacks", "prepare_data", "setup", "teardown") else None
        trainer = self._trainer if self._trainer is not None else self.trainer
        self.notes.add("module", name, trainer, *map(described, (*arguments, *options.values())), mode)
        return getattr(super(Recorded, self), name)(*arguments, **options)

    return hook


def _of_callback(name: str) -> Callable[..., Any]:
    def hook(self: Any, trainer: Any, pl_module: Any, *arguments: Any, **options: Any) -> None:
        self.notes.add("callback", name, trainer, *map(described, (*arguments, *options.values())))

    return hook


class Loaders:
    """Loaders of a few batches each; two of the training batches make up a step, the third does not."""

    def loader(self, num_batches: int) -> Any:
        return torch.utils.data.DataLoader(RandomDataset(32, 2 * num_batches), batch_size=2)

    def train_dataloader(self) -> Any:
        return self.loader(3)

    def val_dataloader(self) -> Any:
        return [self.loader(2), self.loader(1)]

    def test_dataloader(self) -> Any:
        return self.loader(2)

    def predict_dataloader(self) -> Any:
        return self.loader(1)


class Data(Loaders, L.LightningDataModule):
    """Data module with these loaders."""


class Steps(BoringModel):
    """Module that skips the first batch, and returns more than the loss."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        return super().validation_step(batch, batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"extra": 1, **super().training_step(batch, batch_idx)} if batch_idx else None

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)


class Recorded(Loaders, Steps):
    """Module that records every hook, with loaders of its own."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes


class Recorder(Callback):
    """Callback that records every hook."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes


for _name in (*HOOKS_OF_MODULES, "zero_grad"):
    setattr(Recorded, _name, _of_module(_name))
for _name in HOOKS_OF_CALLBACKS:
    if _name not in ("state_dict", "load_state_dict"):
        setattr(Recorder, _name, _of_callback(_name))


def all_stages(trainer: Any, module: L.LightningModule, **data: Any) -> None:
    """Fit, validate, test and predict."""
    trainer.fit(module, **data)
    trainer.validate(module, **data, verbose=False)
    trainer.test(module, **data, verbose=False)
    trainer.predict(module, **data)


def both(
    make_trainer: MakeTrainer, make_stock_trainer: MakeStock, num_clients: int, brings_data: bool = False, **flags: Any
) -> tuple[list[Any], list[Any]]:
    """Return the calls of a federation and of a stock trainer in two epochs of `fit`, then validate, test and predict."""
    ours, stock = Notes(), Notes()
    flags["num_sanity_val_steps"] = 2
    trainer = make_stock_trainer(callbacks=Recorder(stock), **flags)
    all_stages(trainer, Recorded(stock), **{} if brings_data else {"datamodule": Data()})
    trainer = make_trainer(clients_per_round=num_clients, runner="serial", callbacks=Recorder(ours), **flags)
    module = Recorded(ours)
    all_stages(trainer, module, datamodule=Federated(module if brings_data else Data(), num_clients=num_clients))
    return ours.calls, stock.calls


def without(calls: list[tuple[Any, ...]], *names: str) -> list[tuple[Any, ...]]:
    return [call for call in calls if call[1] not in names]


def before_training(calls: list[tuple[Any, ...]]) -> int:
    return next(position for position, call in enumerate(calls) if call[1] == "on_fit_start")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_come_in_the_same_order(
    accumulate: int, make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    """Compare one client that has all samples, with arguments, the module's mode, and the trainer's state.

    A federation counts the module's operations on one batch before it trains.
    """
    ours, stock = both(make_trainer, make_stock_trainer, 1, accumulate_grad_batches=accumulate)
    start = before_training(ours)
    assert without(ours[:start], *BATCH_HOOKS) + ours[start:] == stock
    called = {who: {call[1] for call in stock if call[0] == who} for who in ("module", "callback")}
    assert called["module"] == {*HOOKS_OF_MODULES, "zero_grad"} - {*LOADERS, *public(CheckpointHooks)}
    of_others = {"state_dict", "load_state_dict", "on_exception", *public(CheckpointHooks)}
    assert called["callback"] == {*HOOKS_OF_CALLBACKS} - of_others


def test_hooks_of_a_module_with_its_own_loaders_do_too(
    make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    """Compare one client; a federation sets up and reads the loaders before callbacks are set up, to divide the samples."""
    ours, stock = both(make_trainer, make_stock_trainer, 1, brings_data=True)
    start = before_training(ours)
    ours = without(ours[:start], *BATCH_HOOKS) + ours[start:]
    early = {*LOADERS, "setup"}
    assert without(ours, *early) == without(stock, *early)
    assert Counter(call[:2] for call in ours) == Counter(call[:2] for call in stock)
    assert early <= {call[1] for call in stock if call[0] == "module"}


def test_hooks_between_the_trainings_of_several_clients_do_too(
    make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    ours, stock = (
        [call for call in calls if not any(part in call[1] for part in (*WITHIN_A_ROUND, "dataloader"))]
        for calls in both(make_trainer, make_stock_trainer, 3)
    )
    assert ours == stock


def test_hooks_of_an_object_are_called_as_those_of_its_class(
    make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    """Compare hooks that are put on the module itself, and how the data module's are called, where nothing is validated."""

    class Notes(Data):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def setup(self, *arguments: Any, **named: Any) -> None:
            self.calls.append(("setup", arguments, named))

        def teardown(self, *arguments: Any, **named: Any) -> None:
            self.calls.append(("teardown", arguments, named))

        def val_dataloader(self) -> Any:
            self.calls.append("val_dataloader")
            return super().val_dataloader()

    calls = []
    for make in (make_stock_trainer, make_trainer):
        notes, module = Notes(), Steps()
        for name in ("on_fit_start", "on_train_batch_start", "on_before_optimizer_step", "on_train_epoch_end"):
            setattr(module, name, lambda *given, name=name, notes=notes: notes.calls.append(name))
        module.on_train_end = None  # type: ignore[assignment]
        data, flags = notes, {"max_epochs": 2}
        if make is make_trainer:
            data, flags = Federated(notes, num_clients=1), {"max_rounds": 2, "clients_per_round": 1}
        trainer = make(limit_val_batches=0, **flags)
        trainer.fit(module, datamodule=data)
        trainer.validate(module, datamodule=data, verbose=False)
        calls.append(notes.calls)
    assert calls[0] == calls[1]


def test_checkpoint_hooks_come_in_the_same_order(
    make_trainer: MakeTrainer, make_stock_trainer: MakeStock, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.ckpt"
    orders, of_modules = [], []
    for is_ours in (True, False):
        notes = Notes()
        module, data = Recorded(notes), Federated(Data(), num_clients=1) if is_ours else Data()
        for rounds, path in ((1, None), (2, saved)):
            flags = {"max_rounds": rounds} if is_ours else {"max_epochs": rounds}
            make = make_trainer if is_ours else make_stock_trainer
            flags |= {"clients_per_round": 1} if is_ours else {}
            make(callbacks=[Recorder(notes), Saves(saved)], **flags).fit(module, datamodule=data, ckpt_path=path)
        names = (
            *public(CheckpointHooks),
            "setup",
            "configure_model",
            "on_fit_start",
            "on_train_epoch_end",
            "on_fit_end",
        )
        orders.append([call[:2] for call in notes.calls if call[1] in names])
        in_order = (*names, "configure_optimizers")
        of_modules.append([call[1] for call in notes.calls if call[0] == "module" and call[1] in in_order])
    assert orders[0] == orders[1]
    assert of_modules[0] == of_modules[1]


def test_states_are_restored_in_the_same_order(
    make_trainer: MakeTrainer, make_stock_trainer: MakeStock, tmp_path: Path
) -> None:
    saved, orders = tmp_path / "saved.ckpt", []

    class Remembers(Callback):
        def state_dict(self) -> dict[str, int]:
            return {"kept": 1}

        def on_load_checkpoint(self, *given: Any) -> None:
            orders[-1].append("on_load_checkpoint of a callback")

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            orders[-1].append("load_state_dict of a callback")

    class Kept(Data):
        def state_dict(self) -> dict[str, int]:
            return {"kept": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            orders[-1].append("load_state_dict of the data module")

    for is_ours in (True, False):
        orders.append([])
        data = Federated(Kept(), num_clients=1) if is_ours else Kept()
        for rounds, path in ((1, None), (2, saved)):
            flags = {"max_rounds": rounds, "clients_per_round": 1} if is_ours else {"max_epochs": rounds}
            make = make_trainer if is_ours else make_stock_trainer
            make(callbacks=[Remembers(), Saves(saved)], **flags).fit(Steps(), datamodule=data, ckpt_path=path)
    assert orders[0] == orders[1]
    assert len(orders[1]) == 3


class Saves(Callback):
    """Callback that saves a checkpoint at the end of a training of one epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.max_epochs == 1:
            trainer.save_checkpoint(self.path)


def test_what_the_last_hook_of_a_step_gets(make_trainer: MakeTrainer, make_stock_trainer: MakeStock) -> None:
    """Compare the output of a step, the gradient that is left of it, and the loss before its backward pass."""

    class Watch(Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
            self.seen.append(loss.item())

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            has_graph = any(isinstance(x, torch.Tensor) and x.requires_grad for x in outputs.values())
            gradient = pl_module.layer.bias.grad
            self.seen += [sorted(outputs), has_graph, float(outputs.get("loss", 0)), gradient.tolist()]

    class Same(Steps):
        """Module that gives the same loss whichever the batch is."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = (self.layer.weight.sum() - self.layer.bias.sum()) * (1 + batch_idx)
            return None if batch_idx == 1 else {"loss": loss, "extra": loss * 2} if batch_idx else loss

    ours, stock = Watch(), Watch()
    module = Same()
    make_trainer(max_rounds=1, clients_per_round=1, callbacks=ours, accumulate_grad_batches=2).fit(
        copy.deepcopy(module), Federated(Data(), num_clients=1)
    )
    make_stock_trainer(max_epochs=1, callbacks=stock, accumulate_grad_batches=2).fit(module, datamodule=Data())
    assert len(stock.seen) == 2 + 3 * 4
    assert ours.seen == stock.seen


@pytest.mark.parametrize("name", OF_STEPS)
def test_hooks_that_make_the_step_need_lightnings_loop(name: str, make_trainer: MakeTrainer) -> None:
    module = type("Own", (Perceptron,), {name: lambda self, *arguments: None})()
    with pytest.raises(UserError, match=f"Own cannot be .*: it overrides {name}, which only runner 'lightning' calls"):
        make_trainer(runner="serial").fit(module, federation())


def test_the_old_name_of_configure_model(make_trainer: MakeTrainer) -> None:
    class Late(Perceptron):
        def configure_sharded_model(self) -> None:
            self.output = torch.nn.Linear(4, 2, bias=False)

    module = Late()
    make_trainer(max_rounds=1).fit(module, federation())
    assert module.output.bias is None


def test_hooks_that_only_callbacks_have_are_not_called_on_modules(
    make_trainer: MakeTrainer, make_stock_trainer: MakeStock
) -> None:
    class Fails(Steps):
        called: list[str] = []  # noqa: RUF012

        def on_train_epoch_end(self) -> None:
            raise RuntimeError("simulated failure")

        def on_sanity_check_start(self) -> None:
            self.called.append("on_sanity_check_start")

        def on_exception(self, exception: BaseException) -> None:
            self.called.append("on_exception")

    for make, data in ((make_stock_trainer, Data()), (make_trainer, Federated(Data(), num_clients=3))):
        with pytest.raises(RuntimeError, match="simulated failure"):
            make(num_sanity_val_steps=1).fit(Fails(), datamodule=data)
        assert not Fails.called


def test_a_module_may_validate_in_training_mode(make_trainer: MakeTrainer, make_stock_trainer: MakeStock) -> None:
    class Drops(Steps):
        def on_validation_model_eval(self) -> None:
            self.layer.eval()

        def on_validation_start(self) -> None:
            self.modes = (self.training, self.layer.training)

    ours, stock = Drops(), Drops()
    make_stock_trainer(max_epochs=1).fit(stock, datamodule=Data())
    make_trainer(max_rounds=1).fit(ours, Federated(Data(), num_clients=3))
    assert ours.modes == stock.modes == (True, False)
    assert ours.layer.training


def test_clients_skip_no_rest_of_an_epoch(make_trainer: MakeTrainer) -> None:
    class Skips(Perceptron):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    with pytest.raises(UserError, match=r"on_train_batch_start of Skips returns -1 .* use trainer.limit_train_batches"):
        make_trainer(max_rounds=1).fit(Skips(), federation())


def test_clients_are_announced(make_trainer: MakeTrainer) -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.downloads: list[int] = []
            self.uploads: list[tuple[int, int, int]] = []

        def on_client_download(self, trainer: Any, pl_module: Any, client: int) -> None:
            self.downloads.append(client)

        def on_client_upload(self, trainer: Any, pl_module: Any, client: int, position: int, total: int) -> None:
            self.uploads.append((client, position, total))

    watch = Watch()
    make_trainer(max_rounds=1, callbacks=watch).fit(Perceptron(), federation())
    assert watch.uploads == [(client, place, 3) for place, client in enumerate(watch.downloads, start=1)]
    in_turns = Watch()
    make_trainer(max_rounds=1, callbacks=in_turns).fit(Perceptron(), federation(), DeviceM(variant="mime"))
    assert in_turns.downloads == watch.downloads * 2, (
        "each client is announced before its gradient and before its training"
    )
    assert in_turns.uploads == watch.uploads


def test_batch_hooks_change_training_and_validation_batches(make_trainer: MakeTrainer) -> None:
    class Shifted(Perceptron):
        seen: list[float] = []  # noqa: RUF012

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] + 100, batch[1]

        def loss(self, batch: Any) -> Any:
            self.seen.append(float(batch[0].min()))
            return super().loss(batch)

    make_trainer(max_rounds=1).fit(Shifted(), federation())
    assert min(Shifted.seen) > 90


@pytest.mark.parametrize("per_node", [True, False])
def test_a_second_machine_prepares_data_if_it_is_asked_to(
    per_node: bool, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    class Prepares(Data):
        def prepare_data(self) -> None:
            called.append("data module")

    class Module(Steps):
        def prepare_data(self) -> None:
            called.append("module")

    data, module = Prepares(), Module()
    data.prepare_data_per_node = module.prepare_data_per_node = per_node
    monkeypatch.setattr(FederatedTrainer, "node_rank", 1)
    make_trainer(max_rounds=1).fit(module, Federated(data, num_clients=3))
    assert called == (["data module", "module"] if per_node else [])


@pytest.mark.parametrize("name", ["on_train_end", "on_fit_end"])
def test_what_the_last_hooks_make_of_the_model_stays(
    name: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    class Rounding(Perceptron):
        pass

    def hook(self: Rounding) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.round_()

    setattr(Rounding, name, hook)
    module = Rounding()
    make_trainer(**keeps_files).fit(module, federation())
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    for key, value in module.state_dict().items():
        assert torch.equal(value, value.round()), key
        assert torch.equal(value, saved[key]), key
