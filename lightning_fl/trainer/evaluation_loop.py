"""Validation, test and prediction, between rounds of a `fit` or outside it, with the model of a checkpoint or the current one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fl.checks import is_a, overrides
from lightning_fl.clients.own_models import personal_values_of_clients
from lightning_fl.data import FederatedDataModule
from lightning_fl.data.descriptions import describe_loader, have_same_samples
from lightning_fl.engine.data_for_module import check_loaders
from lightning_fl.engine.engine import Engine
from lightning_fl.errors import require
from lightning_fl.evaluation.evaluation import as_loaders, is_sequential, num_batches
from lightning_fl.evaluation.loops import STAGES, without_callbacks
from lightning_fl.evaluation.validation import ModelValidation
from lightning_fl.features.privacy.side_channels import is_of_server
from lightning_fl.processes import gather_logs
from lightning_fl.slots import Message, State
from lightning_fl.state.run_state import VALIDATION
from lightning_fl.state.saved_states import LoadedRun, read_states
from lightning_fl.trainer import checkpointing
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.lightning_parts import check_monitors
from lightning_fl.trainer.loaders import owner_of_loaders, request_loaders, require_loader
from lightning_fl.trainer.outside_fit import shared_outside
from lightning_fl.trainer.run_metric import choose_metric


def run_evaluation(trainer: TrainerInterface, stage: str) -> list[dict[str, float]]:
    """Evaluate the trainer's model once.

    Args:
        trainer: trainer in a session; loads the model from its `ckpt_path`, if there is one.
        stage: `validation` or `test`.

    Returns:
        For each loader the averages of the values that module and method logged; empty without batches, as in Lightning.

    Raises:
        UserError: the module has no step or the data no loader for the stage, or the checkpoint belongs to another model.
    """
    module, flat_module = trainer.lightning_module, trainer.active_module
    require(overrides(f"{stage}_step", module), f"{type(module).__name__} has no {stage}_step.")
    loop = trainer.test_loop if stage == "test" else trainer.validate_loop
    require_loader(loop._data_source)
    client_states, saved = _load_checkpoint(trainer)
    module.zero_grad()
    limit = trainer.limits["limit_test_batches" if stage == "test" else "limit_val_batches"]
    loaders = request_loaders(trainer, loop._data_source, STAGES[stage], limit)
    check_loaders(module, loaders.flattened, stage)
    counts = num_batches(loaders, limit)
    loop._combined_loader, loop._max_batches = loaders, counts
    if not sum(counts):
        return []
    states = personal_values_of_clients(flat_module, trainer.algorithm.personal, client_states)
    trainer.evaluated = LoadedRun(states, saved.get("run"), saved.get("learning_rates"))
    validation = _validation(trainer, stage, loaders, states, shared_outside(trainer))
    callback_values = _logged_by_callbacks(trainer)
    with _evaluated_model(trainer, _server_states(trainer, saved)):
        averages = evaluate_with_method(trainer, validation) | callback_values
    num_results = len(counts) if is_sequential(loaders) else 1
    return [_of_loader(index, averages, loop.loaders) for index in range(num_results)]


def run_prediction(trainer: TrainerInterface) -> Any:
    """Return the predictions of the trainer's model, batch by batch; None if the loop is not to return them.

    Raises:
        UserError: the data have no loader for it, or the checkpoint belongs to another model.
    """
    require_loader(trainer.predict_loop._data_source)
    _load_checkpoint(trainer)
    trainer.lightning_module.zero_grad()
    return trainer.predict_loop.run()


def _load_checkpoint(trainer: TrainerInterface) -> tuple[Mapping[int, Any], dict[str, Any]]:
    """Load the model from the trainer's `ckpt_path`, if there is one; return the clients' states and the saved federation."""
    checkpoint, trainer.checkpoint = trainer.checkpoint, None
    if checkpoint is None:
        return trainer.run.clients if "run" in vars(trainer) else {}, {}
    saved = checkpoint.get("federation", {})
    states = read_states(saved.get("run", {}), Path(str(trainer.ckpt_path))).get("clients", {})
    checkpointing.evaluate_checkpoint(trainer.active_module, checkpoint, str(trainer.ckpt_path))
    return states, saved


def most_clients(trainer: TrainerInterface) -> int | None:
    """Return the number of clients to validate and test; None for all.

    Raises:
        UserError: `validation_clients` exceeds the number of clients with samples.
    """
    limit, everyone = trainer.algorithm.validation_clients, int((trainer.data.client_sizes > 0).sum())
    most = trainer.validation_clients if limit is None else limit
    require(
        most is None or most <= everyone,
        f"validation_clients is {most}, but the federation has {everyone} clients with samples: give at most {everyone}, or "
        "leave it out to validate with all.",
    )
    return most


def _logged_by_callbacks(trainer: TrainerInterface) -> dict[str, float]:
    """Call the hook `on_model_loaded`, and return, publish and send to loggers what callbacks log in it."""
    logs = trainer.active_module.logs
    trainer.hooks.call("on_model_loaded")
    sums, knowledge, _ = gather_logs(trainer.fabric, logs)
    logged = logs.averages(sums[:1], knowledge)
    trainer.publish(logged)
    shown: dict[str, Any] = {name: x for name, x in logged.items() if name not in logs.unlogged_names}
    trainer._logger_connector.log_metrics(shown)
    return logged


def _of_loader(index: int, averages: Mapping[str, float], loaders: Mapping[str, int]) -> dict[str, float]:
    """Return the values of a loader, and those of no particular loader.

    Args:
        index: index of the loader.
        averages: values by name, to which Lightning has added the index unless told not to.
        loaders: indices of the loaders whose steps logged names.
    """
    suffix = f"/dataloader_idx_{index}"
    named = {name: x for name, x in averages.items() if name.endswith(suffix) or "/dataloader_idx_" not in name}
    return {name: x for name, x in named.items() if loaders.get(name, index) == index}


def evaluate_with_method(
    trainer: TrainerInterface,
    validation: ModelValidation,
    logged: Collection[str] = (),
    hides_clients: bool = False,
) -> dict[str, float]:
    """Evaluate the model that the flat module holds, and publish and return the averages.

    In validation and test the method adds values of its own to the averages.

    Args:
        trainer: trainer in a session.
        validation: model and data.
        logged: names that the round has logged already, which a method's values do not replace.
        hides_clients: leave out values that clients measure with their own parameters.

    Raises:
        UserError: in a fit, the test logs a name that the round has logged already.
    """
    method_values = trainer.algorithm.validate(validation)
    method_values = {name: value for name, value in method_values.items() if name not in logged}
    hides_clients &= validation.owns
    hidden = {name for name in method_values if hides_clients and not is_of_server(name)}

    def complete(averages: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in (averages | method_values).items() if name not in hidden}

    def check(averages: dict[str, float]) -> None:
        if trainer.fitting and validation.stage == "validation":
            choose_metric(trainer, complete(averages) if hides_clients else averages, is_all=False)
        _refuse_same_names(validation.module, averages, logged)

    loop = trainer.test_loop
    if validation.stage == "validation":
        loop = trainer.fit_loop.val_loop if trainer.fitting else trainer.validate_loop
    averages = loop.evaluate(validation.loaders, validation.limits, method_values, hidden, check)
    trainer.active_module.logs.unlogged_names |= loop.unlogged_names - method_values.keys()
    return complete(averages)


def _refuse_same_names(module: LightningModule, tested: Iterable[str], logged: Collection[str]) -> None:
    same = [name for name in tested if name in logged]
    require(
        not same,
        f"{type(module).__name__}.test_step logs {', '.join(map(repr, same))}, which a round logs already, so that one column "
        "would contain two values: log another name in test_step, such as test/accuracy.",
    )


class RoundEvaluation:
    """Validation, and test if `test_every_n_rounds` is given, of the server's model after the rounds of a fit.

    Attributes:
        tested: names that the module has logged in a test; None before the first.
    """

    def __init__(self, trainer: TrainerInterface, data: FederatedDataModule) -> None:
        """Find the loaders of both stages, and say on what they measure.

        Args:
            trainer: trainer in a fit.
            data: data as the clients hold them.

        Raises:
            UserError: `test_every_n_rounds` is given, but there is nothing to test, or it would measure the validation again.
        """
        self.trainer = trainer
        self.tested: set[str] | None = None
        self._validated: set[str] = set()
        self._expects_values = True
        if most_clients(trainer) is not None and not trainer.algorithm.personal:
            rank_zero_warn(
                f"validation_clients has no effect, because clients of {trainer.algorithm.name} keep nothing."
            )
        self.loaders = {"validation": as_loaders(None), "test": as_loaders(None)}
        self._requested_in: float = -inf
        if overrides("validation_step", trainer.lightning_module):
            stage = trainer.state.stage
            if trainer.num_sanity_val_steps:  # as Lightning, which requests the loaders in the sanity check
                trainer.state.stage = RunningStage.SANITY_CHECKING
            self._request_validation_loaders()
            trainer.state.stage = stage
            check_loaders(trainer.lightning_module, self.loaders["validation"].flattened, "validation")
        if trainer.test_every_n_rounds is not None:
            self._load_test_data(data)
        rank_zero_info(self._description(data))

    def _request_validation_loaders(self) -> None:
        """Request the validation loaders, which the validations of the coming rounds read."""
        trainer, loop = self.trainer, self.trainer.fit_loop.epoch_loop.val_loop
        limit = trainer.limits["limit_val_batches"]
        loaders = request_loaders(trainer, loop._data_source, RunningStage.VALIDATING, limit)
        self.loaders["validation"], loop._combined_loader, loop._max_batches = loaders, None, []
        if trainer.enable_validation:
            loop._combined_loader, loop._max_batches = loaders, num_batches(loaders, limit)
        if trainer.state.stage != RunningStage.SANITY_CHECKING or trainer.validates_this_round:
            self._requested_in = trainer.current_epoch

    def _load_test_data(self, data: FederatedDataModule) -> None:
        trainer, module = self.trainer, self.trainer.lightning_module
        flag, limit = f"test_every_n_rounds is {trainer.test_every_n_rounds}", trainer.limits["limit_test_batches"]
        require(
            overrides("test_step", module),
            f"{flag}, but {type(module).__name__} has no test_step: write one, or leave test_every_n_rounds out.",
        )
        self.loaders["test"] = request_loaders(trainer, trainer.test_loop._data_source, STAGES["test"], limit)
        check_loaders(module, self.loaders["test"].flattened, "test")
        trainer.test_loop._max_batches = num_batches(self.loaders["test"], limit)
        trainer.test_loop._combined_loader = self.loaders["test"]
        require(
            sum(trainer.num_test_batches) > 0,
            f"{flag}, but there is no batch to test on: "
            + ("limit_test_batches is 0." if limit == 0 else f"{type(data).__name__} has no test data."),
        )
        require(
            not trainer.has_validation_batches or not have_same_samples(*self.loaders.values()),
            f"{flag}, but val/… is measured on the test data, too: hold out training samples for it, as with "
            "data.val_fraction 0.1, or leave test_every_n_rounds out.",
        )

    def _description(self, data: FederatedDataModule) -> str:
        """Say in one line what validation and test are measured on."""
        trainer, module = self.trainer, type(self.trainer.lightning_module).__name__
        every = trainer.test_every_n_rounds
        tested = ""
        if every is not None:
            on = describe_loader(data, self.loaders["test"], trainer.num_test_batches)
            rounds = "round" if every == 1 else f"{every} rounds"
            tested = f"test/… on {on}, every {rounds}{' and after the last' if every > 1 else ''}"
        if not trainer.has_validation_batches:
            why = "there is no batch to validate on"
            if not overrides("validation_step", trainer.lightning_module):
                why = f"{module} has no validation_step"
            elif not (source := trainer.fit_loop.epoch_loop.val_loop._data_source).is_defined():
                why = f"{owner_of_loaders(source)} has no {source.name}"
            return f"Nothing is measured as val/…, because {why}{f'; {tested}' if tested else ''}."
        on = describe_loader(data, self.loaders["validation"], trainer.num_val_batches)
        is_test = on.endswith((" test images", " test samples"))
        hint = "; set data.val_fraction to use held-out training samples instead" if is_test else ""
        return f"val/… is measured on {on}{f', {tested}' if tested else hint}."

    def sanity_check(self) -> None:
        """Run a few batches of both stages before training, so that an error in them does not cost a round."""
        trainer = self.trainer
        all_to_test = trainer.num_test_batches if trainer.test_every_n_rounds is not None else []
        to_test = [min(trainer.num_sanity_val_steps, count) for count in all_to_test]
        if not sum(trainer.num_sanity_val_batches) + sum(to_test):
            return
        trainer.state.stage = RunningStage.SANITY_CHECKING
        trainer.hooks.call("on_sanity_check_start")

        def check_validated(averages: dict[str, float]) -> None:
            self._validated |= averages.keys()
            check_monitors(trainer.callbacks, averages)
            choose_metric(trainer, averages, is_all=False)

        def check_tested(averages: dict[str, float]) -> None:
            self.tested = set(averages)
            _refuse_same_names(trainer.lightning_module, averages, self._validated)

        if sum(trainer.num_sanity_val_batches):
            trainer.fit_loop.val_loop.evaluate(
                self.loaders["validation"], trainer.num_val_batches, when_averaged=check_validated
            )
        if sum(to_test):
            with _as_between_rounds(trainer), without_callbacks(trainer, trainer.callbacks):
                trainer.test_loop.evaluate(self.loaders["test"], to_test, when_averaged=check_tested)
            trainer.test_loop._max_batches = all_to_test
        trainer.hooks.call("on_sanity_check_end")
        trainer._logger_connector.reset_metrics()
        trainer.state.stage = RunningStage.TRAINING

    def validate(self, engine: Engine) -> dict[str, float]:
        """Validate at the end of a round."""
        trainer = self.trainer
        trainer.state.stage = RunningStage.VALIDATING
        every = trainer.reload_dataloaders_every_n_epochs
        if every and trainer.current_epoch - self._requested_in >= every:
            self._request_validation_loaders()
        trainer.hooks.call("on_validation_model_zero_grad")
        validation = _validation(
            trainer,
            "validation",
            self.loaders["validation"],
            trainer.run.clients,
            trainer.algorithm.share(trainer.run.server),
            context=engine.context,
            cohort_size=engine.population.cohort_size,
            random=trainer.run.random(VALIDATION),
        )
        hides_clients = trainer.fit_loop.privacy.hides_costs
        with _evaluated_model(trainer, trainer.run.server):
            averages = evaluate_with_method(trainer, validation, hides_clients=hides_clients)
        if not averages and self._expects_values and not (hides_clients and validation.owns):
            rank_zero_warn(
                f"validation_step of {type(trainer.lightning_module).__name__} logs nothing, so there is no val/…: call self.log "
                "in it."
            )
        self._expects_values = False
        self._validated |= averages.keys()
        trainer.state.stage = RunningStage.TRAINING
        return averages

    def test(self, record: Mapping[str, float]) -> dict[str, float]:
        """Test at the end of a round, as `FederatedTrainer.test` would test a checkpoint of it; return new values.

        Args:
            record: values of the round so far.
        """
        trainer = self.trainer
        trainer.state.stage = RunningStage.TESTING
        states = personal_values_of_clients(trainer.active_module, trainer.algorithm.personal, trainer.run.clients)
        shared = trainer.algorithm.share(trainer.run.server)
        validation = _validation(trainer, "test", self.loaders["test"], states, shared)
        with _as_between_rounds(trainer), _evaluated_model(trainer, trainer.run.server):
            logged, hides_clients = self._validated | record.keys(), trainer.fit_loop.privacy.hides_costs
            averages = evaluate_with_method(trainer, validation, logged, hides_clients)
        self.tested = set(averages)
        trainer.state.stage = RunningStage.TRAINING
        return averages


def _validation(
    trainer: TrainerInterface,
    stage: str,
    loaders: CombinedLoader,
    states: Mapping[int, State],
    shared: Message,
    **of_round: Any,
) -> ModelValidation:
    """Return what the method measures of the model that the flat module holds; `of_round` are facts about a round of a fit."""
    limit = trainer.limits["limit_test_batches" if stage == "test" else "limit_val_batches"]
    personal, most = trainer.algorithm.personal, most_clients(trainer)
    return ModelValidation(
        trainer.active_module, trainer.data, stage, loaders, limit, states, personal, most, shared=shared, **of_round
    )


def _server_states(trainer: TrainerInterface, saved: Mapping[str, Any]) -> Mapping[str, State]:
    """Return the states of the server's steps that belong to the loaded model; {} if the model is not that of a run."""
    if saved:
        return saved.get("run", {}).get("server", {})
    known = "run" in vars(trainer) and torch.equal(trainer.run.params, trainer.active_module.params)
    return trainer.run.server if known else {}


@contextmanager
def _evaluated_model(trainer: TrainerInterface, states: Mapping[str, State]) -> Iterator[None]:
    """Let the module, which holds the server's model, hold the one that the method evaluates.

    Args:
        trainer: trainer in a session.
        states: states of the method's steps by their keys, as far as they are known.
    """
    flat_module = trainer.active_module
    server = flat_module.params
    here = {key: {name: entry.to(server.device) for name, entry in state.items()} for key, state in states.items()}
    params = trainer.algorithm.evaluated(server, here)
    if params is server:
        yield
        return
    with flat_module.other_model(params, flat_module.read_buffers(), flat_module.read_counters()):
        yield


@contextmanager
def _as_between_rounds(trainer: TrainerInterface) -> Iterator[None]:
    """Let a test draw no random number of the training, and measure averaged weights if a callback averages them."""
    # Lightning swaps averaged weights in for validation only, because it tests a checkpoint, which contains them.
    averaging = [callback for callback in trainer.callbacks if is_a(callback, WeightAveraging)]
    with isolate_rng():
        for callback in averaging:
            callback.on_validation_epoch_start(trainer, trainer.lightning_module)
        yield
        for callback in averaging:
            callback.on_validation_epoch_end(trainer, trainer.lightning_module)
