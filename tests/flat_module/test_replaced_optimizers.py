"""Test hooks that put another optimiser in the place of the module's between rounds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from toys import Perceptron, federation, vector

from lightning_fl import UserError

RATE = 0.01
"""Learning rate from the second round on."""


class Changes(Perceptron):
    """Module whose first layer may be frozen, and which changes its optimiser before the second round."""

    def __init__(self, change: Callable[["Changes"], None], begins_frozen: bool = False) -> None:
        super().__init__(lr=0.1)
        self.change = change
        self.hidden.requires_grad_(not begins_frozen)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.hparams["lr"])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.change(self)

    def on_train_epoch_end(self) -> None:
        self.kind = type(self.trainer.optimizers[0])


def in_place(module: Changes) -> None:
    optimizer = module.trainer.optimizers[0]
    if not module.hidden.weight.requires_grad:
        module.hidden.requires_grad_(True)
        optimizer.add_param_group({"params": list(module.hidden.parameters())})
    for group in optimizer.param_groups:
        group["lr"] = RATE


def by_setup(module: Changes) -> None:
    module.hidden.requires_grad_(True)
    module.hparams["lr"] = RATE
    module.trainer.strategy.setup_optimizers(module.trainer)


def by_assignment(module: Changes) -> None:
    module.hidden.requires_grad_(True)
    module.hparams["lr"] = RATE
    module.trainer.optimizers = [module.configure_optimizers()]


def in_groups(module: Changes) -> None:
    module.hidden.requires_grad_(True)
    parts = [{"params": list(part.parameters())} for part in (module.output, module.hidden)]
    module.trainer.optimizers = [torch.optim.Adam(parts, lr=RATE)]


def trained(
    make_trainer: MakeTrainer, change: Callable[[Changes], None], begins_frozen: bool, runner: str, *rounds: int
) -> np.ndarray:
    """Return the weights of a run that is resumed after each number of rounds."""
    for number, max_rounds in enumerate(rounds):
        torch.manual_seed(0)
        module = Changes(change, begins_frozen)
        trainer = make_trainer(max_rounds=max_rounds, clients_per_round=3, runner=runner, enable_checkpointing=True)
        trainer.fit(module, federation((12, 12, 9)), ckpt_path="last" if number else None)
    return vector(module)


@pytest.mark.parametrize("runner", ["serial", "stacked", "lightning"])
@pytest.mark.parametrize("begins_frozen", [False, True])
@pytest.mark.parametrize("change", [by_setup, by_assignment, in_groups])
def test_clients_follow_an_optimiser_of_the_same_class(
    change: Callable[[Changes], None], begins_frozen: bool, runner: str, make_trainer: MakeTrainer
) -> None:
    """Check that all do what changing the groups in place does, in one run and in a resumed one."""
    expected = trained(make_trainer, in_place, begins_frozen, runner, 3)
    np.testing.assert_allclose(trained(make_trainer, change, begins_frozen, runner, 3), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(trained(make_trainer, change, begins_frozen, runner, 2, 3), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", [by_setup, by_assignment])
def test_clients_follow_with_the_flags_own_optimiser_and_with_personal_layers(
    change: Callable[[Changes], None], make_trainer: MakeTrainer
) -> None:
    """Check that plain SGD stays, whatever the module's optimiser is."""
    models = []
    for one in (in_place, change):
        torch.manual_seed(0)
        module = Changes(one)
        trainer = make_trainer(max_rounds=3, clients_per_round=3, client_optimizer="sgd")
        trainer.fit(module, federation((12, 12, 9)), {"class_path": "FedAvg", "init_args": {"personal": ["output"]}})
        models.append(vector(module))
        assert module.kind is torch.optim.SGD
    np.testing.assert_allclose(models[1], models[0], rtol=0, atol=1e-6)


def other_class(module: Changes) -> None:
    module.trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=RATE)]


def several(module: Changes) -> None:
    module.trainer.optimizers = [module.configure_optimizers() for _ in range(2)]


def scheduled(module: Changes) -> None:
    module.trainer.strategy.lr_scheduler_configs = [object()]  # type: ignore[list-item]


def foreign(module: Changes) -> None:
    module.trainer.optimizers = [torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))], lr=RATE)]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (other_class, r"^a hook has replaced optimisers or schedulers in the middle of the run"),
        (several, r"^a hook has replaced optimisers or schedulers in the middle of the run"),
        (scheduled, r"^a hook has replaced optimisers or schedulers in the middle of the run"),
        (foreign, r"gives the optimizer a parameter of shape \(3,\) that the module does not have"),
    ],
)
def test_others_are_refused(change: Callable[[Changes], None], sentence: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=sentence):
        make_trainer(max_rounds=2).fit(Changes(change), federation())


def test_manual_optimisation_keeps_its_optimisers(make_trainer: MakeTrainer) -> None:
    class Manual(Changes):
        def __init__(self) -> None:
            super().__init__(by_setup)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    with pytest.raises(UserError, match=r"^a hook has replaced optimisers or schedulers"):
        make_trainer(max_rounds=2).fit(Manual(), federation())
