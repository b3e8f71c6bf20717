"""The optimiser of the clients, set up for the method of a run."""

from __future__ import annotations

from lightning.pytorch.callbacks import BaseFinetuning

from lightning_fl.checks import is_a
from lightning_fl.clients.representations import representation_layer
from lightning_fl.errors import UserError
from lightning_fl.slots import Gradients, Personal, Rule
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.rules_in_steps import check_closure


def configure_optimizer(trainer: TrainerInterface, adds_up: bool = False) -> None:
    """Set up the optimiser for the method; with `adds_up` for gradients that several processes add up."""
    flat_module, algorithm = trainer.active_module, trainer.algorithm
    steppers: list[Rule | Personal] = [*algorithm.rules(), *algorithm.personal]
    flat_gradient = any(Gradients.MINIBATCH in part.reads for part in steppers)
    by_sgd = trainer.client_optimizer == "sgd"
    begins_frozen = any(is_a(callback, BaseFinetuning) for callback in trainer.callbacks)
    flat_module.configure_optimizer(flat_gradient or adds_up, by_sgd, trainer.by_lightning, begins_frozen)
    if trainer.by_lightning:
        check_closure(algorithm, flat_module)
    trainer.strategy.adopt(flat_module.optimizer)
    for rule in algorithm.rules():
        if Gradients.REPRESENTATIONS in rule.reads:
            representation_layer(flat_module.module, rule)
    stepper = next((part for part in steppers if part.own_step), None)
    if stepper is not None and not flat_module.optimizer.is_plain_sgd:
        flag = "set --model.momentum 0, or " if flat_module.module.hparams.get("momentum") else ""
        raise UserError(
            f"{algorithm.name} makes the clients' steps itself, in place of plain SGD, {stepper.plain_sgd_reason}; "
            f"{type(flat_module.module).__name__} has {flat_module.optimizer.description}: "
            f"{flag}let configure_optimizers return torch.optim.SGD with momentum 0, or set --trainer.client_optimizer sgd "
            "to have that at the module's learning rate."
        )
