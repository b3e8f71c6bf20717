"""Rules of methods in the steps of Lightning's own loop, where they act between the gradient and the step.

A step of the module's optimiser calls Lightning's closure first: forward and backward passes, the hooks before a step, gradient
clipping. Then the rule corrects the gradient that these have left, and makes the step, in the order of the other runners. So it
acts whenever the module steps its optimiser, at the learning rate of that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule

from lightning_fl.algorithms import Algorithm
from lightning_fl.checks import needs_closure
from lightning_fl.clients.client_job import ClientJob
from lightning_fl.clients.gradients import gradient_treatment
from lightning_fl.clients.local_training import rule_step
from lightning_fl.errors import require
from lightning_fl.flat_module.flat_module import FlatModule
from lightning_fl.slots import Gradients, LocalTraining, Personal, RoundContext, Rule


def check_rules_in_steps(
    method: Algorithm, module: LightningModule, context: RoundContext, reads_own_loaders: bool, why: str
) -> None:
    """Check that Lightning's own loop can train the clients of a method.

    Args:
        method: the federated method.
        module: the module.
        context: facts about the run, in its first round.
        reads_own_loaders: True if clients read loaders of their own.
        why: reason for this runner if the user did not choose it; else empty.

    Raises:
        UserError: a part of the method needs more than one gradient a step, or trains beside the module's steps, or reads the
            samples of loaders.
    """
    rule, name = method.rule, method.name
    limit = why or f"runner 'lightning' leaves the steps of {type(module).__name__} to Lightning's own loop"
    instead = "use a method without this, such as FedProx or SCAFFOLD"
    instead += "" if why else ", or another runner"
    parts: list[Rule | Personal] = [rule, *method.personal]
    for part in parts:
        require(
            part.reads in (Gradients.NONE, Gradients.MINIBATCH),
            f"{limit}, and that computes one gradient a step, but {name} ({type(part).__name__}) needs others, at further models "
            f"or on all samples: {instead}.",
        )
    for part in method.personal:
        kind = type(part).__name__
        require(
            not part.has_phases,
            f"{limit}, and that steps all parameters, but {name} ({kind}) steps clients' own ones by turns: {instead}.",
        )
        require(
            not part.steps_beside and not part.rules(),
            f"{limit}, and that trains one model of a client, but {name} ({kind}) trains a second one: {instead}.",
        )
    if not reads_own_loaders:
        return
    fulls = (rule.takes_full_batches(replace(context, round=number)) for number in range(context.num_rounds))
    needs_samples = rule.reads_length or rule.repeats > 1 or rule.num_losses or any(fulls)
    for part in parts:
        require(
            not (part.adapts if isinstance(part, Personal) else needs_samples),
            f"clients read loaders of their own, whose batches only their training reads, but {name} ({type(part).__name__}) "
            "counts, repeats or reads samples besides: use another method, such as FedProx or SCAFFOLD, or a map-style Dataset, "
            "which Federated divides.",
        )


def check_closure(method: Algorithm, flat_module: FlatModule) -> None:
    """Refuse an optimiser that computes several gradients in a step, if the method acts on each step's.

    Raises:
        UserError: the optimiser needs a closure, as LBFGS does, and the method acts on the gradient of a step.
    """
    optimizer: Any = flat_module.optimizer.optimizer
    require(
        flat_module.is_manual
        or not (flat_module.reads_gradient or _makes_steps(method.rule) or flat_module.personal.leaves)
        or not needs_closure(optimizer),
        f"{type(optimizer).__name__} needs the loss several times in a step (a closure), but {method.name} acts on the one "
        "gradient of a step: use a method that reads only the trained weights, as FedAvg does, or let configure_optimizers "
        "return SGD, Adam or another that needs none.",
    )


def acts_in_steps(flat_module: FlatModule, job: ClientJob) -> bool:
    """True if the rule, personal parameters or a pruning mask change the steps of a client's training."""
    if flat_module.is_manual or needs_closure(flat_module.optimizer.optimizer):
        return False
    acts = flat_module.reads_gradient or _makes_steps(job.rule) or job.context.unpruned is not None
    return acts or bool(flat_module.personal.leaves)


@contextmanager
def rule_in_steps(flat_module: FlatModule, job: ClientJob, local: LocalTraining) -> Iterator[None]:
    """Let a client's rule act in each step of the module's optimiser within the context.

    Hooks find the module's own parameters in the optimiser, the personal ones, too, and no gradient before the first.

    Args:
        flat_module: holds the module, in whose training Lightning's loop calls the optimiser's `step`.
        job: job of the client.
        local: its local training, whose steps are counted as the optimiser makes them.
    """
    driver: Any = flat_module.optimizer
    optimizer, precision, make_step = (
        driver.optimizer,
        flat_module.module.trainer.precision_plugin,
        local.optimizer_step,
    )
    mask = gradient_treatment(flat_module, replace(job, schedule=replace(job.schedule, clip_value=None)))
    clip: Callable[[], Any] = _nothing
    missing: list[str] = []

    def hold(*arguments: Any, **options: Any) -> None:
        """Put off the clipping, before which the rule observes the gradient and the mask acts."""
        nonlocal clip
        clip = partial(type(precision)._clip_gradients, precision, *arguments, **options)

    def treat() -> None:
        mask()
        clip()
        flat_module.gradient.adopt()
        missing[:] = flat_module.gradient.missing  # which the clipping may have changed

    def step(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        nonlocal clip
        clip = _nothing
        result = None if closure is None else closure()
        if all(parameter.grad is None for parameter in flat_module.trainable):
            return result  # training_step has skipped the batch
        flat_module.bind_replaced()  # what `forward` may have moved
        missing[:] = flat_module.gradient.gather()
        local.learning_rate = driver.learning_rate
        local.optimizer_step = partial(_stepping_bound, driver, partial(make_step, **options))
        rule_step(local, job, flat_module, treat, None, None, missing)
        return result

    steps, clips = vars(optimizer), vars(precision)
    earlier = steps.get("step")  # torch's schedulers put one there, which they look for
    vars(step).update(getattr(earlier, "__dict__", {}))
    steps["step"], clips["_clip_gradients"] = step, hold
    flat_module.gradient.detach()
    try:
        with driver.showing_parameters():
            yield
    finally:
        del clips["_clip_gradients"]
        if earlier is None:
            del steps["step"]
        else:
            steps["step"] = earlier


def _stepping_bound(driver: Any, make_step: Callable[[], Any]) -> Any:
    with driver.as_bound():
        return make_step()


def _makes_steps(rule: Rule) -> bool:
    return type(rule).step is not Rule.step


def _nothing() -> None:
    """Clip nothing."""
