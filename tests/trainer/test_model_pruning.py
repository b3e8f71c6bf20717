"""Test Lightning's ModelPruning in federations: compared with `L.Trainer`, resumed, with several clients, and refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer, bits_of, equal_states
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelCheckpoint, ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import SIZES, Perceptron, federation, samples

from lightning_fl import UserError
from lightning_fl.algorithms import SCAFFOLD, FedAvg, ServerM
from lightning_fl.callbacks import MagnitudePruning


class PrunedAsDocumented(ModelPruning):
    """Lightning's callback, which resets weights to copies of their first values: the trainer would train these themselves."""

    @staticmethod
    def _copy_param(new: nn.Module, old: nn.Module, name: str) -> None:
        ModelPruning._copy_param(new, copy.deepcopy(old), name)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights that a module computes with, by name."""
    state = module.state_dict()
    return {
        name.removesuffix("_orig"): value * state.get(name.replace("_orig", "_mask"), torch.ones(()))
        for name, value in state.items()
        if not name.endswith("_mask")
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "global": {"use_lottery_ticket_hypothesis": False},
    "layers": {
        "use_lottery_ticket_hypothesis": False,
        "use_global_unstructured": False,
        "parameter_names": ["weight"],
        "amount": 1,
    },
    "named": {
        "use_lottery_ticket_hypothesis": False,
        "parameters_to_prune": lambda module: [(module.hidden, "weight")],
    },
    "structured": {
        "pruning_fn": "ln_structured",
        "pruning_dim": 0,
        "pruning_norm": 2,
        "use_global_unstructured": False,
        "parameter_names": ["weight"],
        "use_lottery_ticket_hypothesis": False,
    },
    "lottery": {},
    "lottery once": {"use_lottery_ticket_hypothesis": lambda epoch: epoch == 1},
    "after validation": {"prune_on_train_epoch_end": False},
    "renamed": {"make_pruning_permanent": False},
    "amounts": {"amount": lambda epoch: 0.2 * epoch, "apply_pruning": lambda epoch: epoch != 2},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", [(12,), SIZES], ids=["one client", "clients"])
def test_the_model_is_pruned_as_by_lightnings_trainer(
    name: str,
    sizes: tuple[int, ...],
    make_trainer: MakeTrainer,
    make_stock_trainer: Callable[..., L.Trainer],
) -> None:
    """Clients that make one step on all their samples make together the step on all samples."""
    options = {"pruning_fn": "l1_unstructured", "amount": 0.3, **OPTIONS[name]}
    ours = Perceptron()
    stock = copy.deepcopy(ours)

    def pruning(kind: type[ModelPruning], module: nn.Module) -> ModelPruning:
        own = {key: x(module) if key == "parameters_to_prune" else x for key, x in options.items()}
        return kind(**own)

    num = sum(sizes)
    flags = {"max_rounds": 4, "clients_per_round": len(sizes), "runner": "auto"}
    if name == "layers":  # without a validation `weight` is that of the last client until its next forward
        flags["limit_val_batches"] = 0
    trainer = make_trainer(**flags, callbacks=pruning(ModelPruning, ours))
    trainer.fit(ours, federation(sizes, batch_size=num))
    reference = make_stock_trainer(max_epochs=4, callbacks=pruning(PrunedAsDocumented, stock), limit_val_batches=1.0)
    reference.fit(
        stock, DataLoader(TensorDataset(*samples(num)), num), DataLoader(TensorDataset(*samples(10, seed=1)), 4)
    )
    assert [*ours.state_dict()] == [*stock.state_dict()]
    expected = weights(stock)
    for key, value in weights(ours).items():
        assert torch.equal(value == 0, expected[key] == 0), key
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-6)
    assert any((value == 0).any() for value in expected.values())
    assert not trainer.run.params[~trainer.run.mask].any()


@pytest.mark.parametrize("resets", [True, False, lambda epoch: epoch == 0])
def test_it_is_said_that_every_round_begins_anew(
    resets: Any, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    pruning = ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=resets)
    make_trainer(max_rounds=1, callbacks=pruning).fit(Perceptron(), federation())
    said = [str(warning.message) for warning in recwarn] + caplog.messages
    sentence = "ModelPruning resets the weights that it keeps to their first values after each round"
    assert any(sentence in text for text in said) == (resets is True)


@pytest.mark.parametrize("permanent", [True, False])
@pytest.mark.parametrize("algorithm", [FedAvg, SCAFFOLD, ServerM])
@pytest.mark.parametrize("on_train_end", [True, False])
@pytest.mark.parametrize("pruning_fn", ["l1_unstructured", "random_unstructured"])
def test_a_resumed_run_is_pruned_in_the_same_way(
    permanent: bool,
    algorithm: Callable[[], Any],
    on_train_end: bool,
    pruning_fn: str,
    make_trainer: MakeTrainer,
    tmp_path: Path,
) -> None:
    """The module of the resumed run begins with other values, to which nothing is reset."""

    def fit(module: Perceptron, rounds: int, folder: str, **options: Any) -> Any:
        pruning = ModelPruning(
            pruning_fn,
            amount=0.2,
            make_pruning_permanent=permanent,
            prune_on_train_epoch_end=on_train_end,
            resample_parameters=pruning_fn.startswith("random"),
        )
        saving = ModelCheckpoint(
            tmp_path / folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=on_train_end
        )
        trainer = make_trainer(
            max_rounds=rounds,
            clients_per_round=3,
            runner="lightning",
            callbacks=[pruning, saving],
            default_root_dir=tmp_path / folder,
        )
        trainer.fit(module, federation(), algorithm=algorithm(), **options)
        return trainer

    torch.manual_seed(1)
    whole, begun, resumed, other = Perceptron(), Perceptron(), Perceptron(), Perceptron()
    begun.load_state_dict(whole.state_dict())
    uninterrupted = fit(whole, 4, "whole")
    fit(begun, 2, "begun")
    ends = [fit(resumed, 4, "begun", ckpt_path=tmp_path / "begun" / "epoch=1.ckpt")]
    ends += [fit(other, 4, "other", ckpt_path=tmp_path / "whole" / "epoch=1.ckpt")]
    for module, trainer in zip((resumed, other), ends, strict=True):
        assert equal_states(dict(module.state_dict()), dict(whole.state_dict()))
        assert equal_states(trainer.run.state_dict()["server"], uninterrupted.run.state_dict()["server"])
        assert bits_of(trainer, "up") == bits_of(uninterrupted, "up")


def test_messages_have_the_kept_parameters_and_each_client_gets_a_mask_once(make_trainer: MakeTrainer) -> None:
    pruning = ModelPruning("l1_unstructured", amount=0.5, apply_pruning=lambda epoch: epoch == 0)
    bits = []

    class Bits(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            bits.append((bits_of(trainer, "up"), bits_of(trainer, "down")))

    trainer = make_trainer(max_rounds=3, clients_per_round=6, runner="lightning", callbacks=[pruning, Bits()])
    trainer.fit(Perceptron(), federation())
    whole = 6 * 32 * 26
    assert bits[0] == ({"model": whole}, {"model": whole})
    assert bits[1] == ({"model": whole // 2}, {"model": whole // 2, "mask": 6 * 26})
    assert bits[2] == ({"model": whole // 2}, {"model": whole // 2})


class Unfreezing(BaseFinetuning):
    """Lets the hidden layer train from round 2 on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.hidden)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.hidden, optimizer)


class Tied(Perceptron):
    """Has another layer with the bias of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(3, 4)
        self.again.bias = self.hidden.bias


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"runner": "serial"}, "ModelPruning renames parameters, which only runner 'lightning' follows"),
        ({"runner": "stacked"}, "ModelPruning renames parameters, which only runner 'lightning' follows"),
        ({"callbacks": MagnitudePruning(0.5)}, "ModelPruning renames parameters that MagnitudePruning prunes, too"),
        ({"callbacks": EMAWeightAveraging()}, "and EMAWeightAveraging averages them by their order: leave one out"),
        ({"callbacks": Unfreezing()}, r"pruned 'output\.(weight|bias)' by torch.nn.utils.prune, .* leave one out"),
        ({"module": Tied}, "ModelPruning prunes 'hidden.bias', which several layers share"),
        ({"personal": ["output.bias"]}, "ModelPruning prunes 'output.bias', which is personal to each client"),
    ],
)
def test_what_cannot_be_pruned_with_renamed_parameters_is_refused(
    flags: dict[str, Any], words: str, make_trainer: MakeTrainer
) -> None:
    module, personal = flags.pop("module", Perceptron)(), flags.pop("personal", ())
    callbacks = [ModelPruning("l1_unstructured"), *([flags.pop("callbacks")] if "callbacks" in flags else [])]
    algorithm = FedAvg(personal=personal) if personal else FedAvg()
    with pytest.raises(UserError, match=words):
        make_trainer(**{"max_rounds": 3, "runner": "lightning", **flags}, callbacks=callbacks).fit(
            module, federation(), algorithm=algorithm
        )
