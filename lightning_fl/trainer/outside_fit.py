"""Evaluation of clients outside `fit`, with a loaded model and the states of its run."""

from __future__ import annotations

from typing import Any

from lightning_fl.engine import follow_unfreezing
from lightning_fl.evaluation.client_evaluation import ClientEvaluator
from lightning_fl.slots import Message, RoundContext, adapter
from lightning_fl.trainer.client_optimizer import configure_optimizer
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.local_schedules import local_schedule
from lightning_fl.trainer.new_run import new_run


def client_evaluator(trainer: TrainerInterface, trains: bool) -> ClientEvaluator:
    """Return the evaluation of clients outside `fit`, with the session's loaded model and the states of its run.

    Args:
        trainer: trainer in a validation or test.
        trains: True if clients will be fine-tuned.

    Raises:
        UserError: clients are to be fine-tuned, but the module has not exactly one optimiser.
    """
    flat_module, saved, data = trainer.active_module, trainer.evaluated, trainer.algorithm.arrange_data(trainer.data)
    rates = trainer.learning_rates if saved.run is None and "run" in vars(trainer) else saved.learning_rates
    follow_unfreezing.rebuild(flat_module, rates or {})
    schedule, run = local_schedule(trainer, data), new_run(flat_module)
    if saved.run is not None:
        empty: dict[str, Any] = {"clients": {}, "client_memory": {}, "server": {}, "server_memory": {}}
        run.load_state_dict({**saved.run, **empty})
    elif "run" in vars(trainer):
        run.seed, run.round, run.mask, run.unpruned = (
            getattr(trainer.run, name) for name in ("seed", "round", "mask", "unpruned")
        )
    for client, state in saved.states.items():
        run.clients[client] = state
    if trains and not flat_module.has_optimizer:
        configure_optimizer(trainer)
        follow_unfreezing.rebuild(flat_module, rates or {})  # the groups of its optimiser
        if rates is not None:
            flat_module.optimizer.schedules.load_state_dict(rates, run.round)
    num_clients = int((data.client_sizes > 0).sum())
    context = RoundContext(run.layout, run.buffer_layout, num_clients, round=run.round, unpruned=run.unpruned)
    shared = shared_outside(trainer)
    return ClientEvaluator(flat_module, data, run, context, schedule, trainer.algorithm.personal, shared)


def shared_outside(trainer: TrainerInterface) -> Message:
    """Return what the server's steps would send down with the model that a validation or test measures.

    Empty if no client adapts the model by it, or if no run has made it.
    """
    algorithm, saved = trainer.algorithm, trainer.evaluated.run
    if adapter(algorithm.personal) is None:
        return {}
    fits = "run" in vars(trainer) and trainer.run.layout == trainer.active_module.layout
    server = trainer.run.server if fits else {}
    if saved is not None:
        run = new_run(trainer.active_module)
        run.load_state_dict({**saved, "clients": {}, "client_memory": {}, "server_memory": {}})
        server = run.server
    return algorithm.share(server) if server.keys() == {*algorithm.step_names()} else {}
