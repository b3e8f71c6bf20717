"""The schedule of a client's local training, from the flags of a trainer, and its length."""

from __future__ import annotations

from dataclasses import replace

from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.data import FederatedDataModule
from lightning_fl.errors import require
from lightning_fl.features.selection import Reads
from lightning_fl.flat_module.flat_module import has_batch_norm
from lightning_fl.slots import Draw, RoundContext
from lightning_fl.state.run_state import CODEC
from lightning_fl.trainer.features_of_run import cohort_sizes
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.new_run import seed_of_run
from lightning_fl.vectors.layout import Layout

MOST_ROUNDS_AHEAD = 10_000
"""Rounds whose numbers of local steps are drawn before the first round."""


def local_schedule(
    trainer: TrainerInterface, data: FederatedDataModule, cohort: tuple[int, int] | None = None
) -> LocalSchedule:
    """Return the schedule of the flags, and let the trainer know its length, which modules may read.

    Args:
        trainer: trainer with the flags.
        data: data as the clients hold them.
        cohort: clients of a round and clients with samples, for a method that pools them; None outside a fit.
    """
    limit = trainer.limits["limit_train_batches"]
    require(
        limit is None or limit > 0,
        f"limit_train_batches is {limit}, so no client would train: give at least 1 batch or a fraction above 0.",
    )
    known = trainer.flat_module
    schedule = LocalSchedule(
        batch_size=data.batch_size,
        epochs=trainer.local_epochs,
        steps=trainer.local_steps,
        limit_batches=1.0 if limit is None else limit,
        accumulate=trainer.accumulate_grad_batches,
        clip_value=trainer.gradient_clip_val,
        # Without a barrier a checkpoint keeps the schedule, and holds plain values only.
        clip_algorithm="value" if trainer.gradient_clip_algorithm == "value" else "norm",
        reports_last_loss=trainer.loss_guard.clients is not None or _reads_last_losses(trainer),
        straggler_rate=trainer.straggler_rate,
        drop_last=data.drop_last,
        in_order=trainer.overfit_batches > 0,
        skips_single_samples=has_batch_norm(trainer.lightning_module) if known is None else known.skips_single_samples,
    )
    pooled = cohort if trainer.algorithm.pools_clients else None
    if pooled is not None and isinstance(limit, int):  # a limit of each client's pass
        schedule = replace(schedule, limit_batches=limit * pooled[1])
    batches_per_epoch = schedule.pass_batches(int(data.client_sizes.max()))
    if pooled is not None:
        schedule = schedule.with_cohort(*pooled, batches_per_epoch)
    schedule = replace(schedule, most_steps=None if trainer.max_steps == -1 else trainer.max_steps)
    repeats, drawn = trainer.algorithm.rule.repeats, _most_steps_of_rule(trainer)
    longest = schedule if drawn is None else replace(schedule, epochs=None, steps=drawn)
    trainer.most_local_steps = replace(longest, repeat=repeats).num_steps(batches_per_epoch)
    trainer.round_batches = batches_per_epoch * repeats
    return schedule


def estimate_steps(trainer: TrainerInterface) -> None:
    """Let the trainer know the length of the coming fit's schedule, as far as the module tells before it is set up.

    Raises:
        UserError: the data are not divided yet, or a flag does not fit.
    """
    require(
        trainer.data.is_set_up,
        f"trainer.estimated_stepping_batches is not known before {type(trainer.data).__name__} is set up: read it in "
        "configure_optimizers.",
    )
    if trainer.data.reads_own_loaders:
        trainer.fit_loop.own_loaders(0)
        return
    data = trainer.algorithm.arrange_data(trainer.data)
    num_eligible, _, num_clients = cohort_sizes(trainer, data)
    local_schedule(trainer, data, (num_clients, num_eligible))
    trainer.estimated_steps = trainer.most_local_steps


def check_estimate(trainer: TrainerInterface) -> None:
    """Raise `UserError` if the steps that the module has read before it was set up are not those of the fit."""
    estimated, steps = trainer.estimated_steps, trainer.most_local_steps
    require(
        estimated in (None, steps),
        f"trainer.estimated_stepping_batches was {estimated} when {type(trainer.lightning_module).__name__} read it in setup or "
        f"configure_model, and is {steps} now: read it in configure_optimizers.",
    )


def _most_steps_of_rule(trainer: TrainerInterface) -> int | None:
    """Return the steps of a client in the longest round if the rule decides on them in each; None if the flags do."""
    rule, rounds, nothing = trainer.algorithm.rule, trainer.max_rounds, Layout.of({})
    context = RoundContext(nothing, nothing, 1, num_rounds=rounds)  # a number of steps depends on no parameter
    if rule.steps_in_round(context) is None:
        return None
    seed = seed_of_run()
    return max(
        rule.steps_in_round(replace(context, round=number, draw=Draw((seed, number, CODEC)))) or 0
        for number in range(min(max(1, rounds), MOST_ROUNDS_AHEAD))
    )


def _reads_last_losses(trainer: TrainerInterface) -> bool:
    """True if the selection of clients reads the losses of their last training."""
    return trainer.selection is not None and Reads.LAST_LOSSES in trainer.selection.reads


def check_schedules(trainer: TrainerInterface, data: FederatedDataModule) -> None:
    """Check the lengths of the module's schedules against the rounds of the run and the steps of a client in a round."""
    schedules, module = trainer.active_module.optimizer.schedules, type(trainer.lightning_module).__name__
    schedules.check_rounds(module, trainer.num_rounds)
    if trainer.algorithm.trains_in_rounds:
        largest = data.largest_client
        schedules.check_steps(module, largest, trainer.most_local_steps, trainer.accumulate_grad_batches)
