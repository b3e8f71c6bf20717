"""FederatedTrainer: fit, validate, test and predict in a simulated federation, driven by Lightning Fabric.

`lightning_fl.engine.round.train_round` trains one round; a round is Lightning's epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fl.checks import checked, is_whole
from lightning_fl.clients.own_models import predicting_model
from lightning_fl.data import Source
from lightning_fl.engine import between_rounds
from lightning_fl.errors import require
from lightning_fl.evaluation.client_evaluation import ClientEvaluator, ClientResult
from lightning_fl.outputs import checkpoint_file
from lightning_fl.outputs.clients.rows import own_values
from lightning_fl.outputs.final_table import final_table, history, show
from lightning_fl.outputs.last_checkpoint import LastCheckpoint
from lightning_fl.outputs.plan import Plan
from lightning_fl.outputs.run_folder import LAST
from lightning_fl.trainer import checkpointing
from lightning_fl.trainer.evaluation_loop import run_evaluation, run_prediction
from lightning_fl.trainer.fit_loop import FitLoop
from lightning_fl.trainer.lightning_interface import TrainerInterface
from lightning_fl.trainer.lightning_parts import refuse_argument, refusing_others
from lightning_fl.trainer.outside_fit import client_evaluator
from lightning_fl.trainer.session import Given, session


class FederatedTrainer(TrainerInterface):
    """Train a LightningModule in a simulated federation; flags have the names and meaning of `lightning.Trainer`'s.

    Attributes:
        run: state of the run: the model, states, the ledger; set when `fit` begins.
        algorithm: the federated method.
        flat_module: the module on its flat storage; None outside a session.
        hooks: calls the hooks of callbacks and module.
    """

    def _loop_of_rounds(self) -> FitLoop:
        return FitLoop(self)

    # -- the four entry points -----------------------------------------------------------------------------------------

    @refusing_others(partial(refuse_argument, "fit"))
    def fit(  # type: ignore[override]  # Lightning's has loaders, and no algorithm; so have the others
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        algorithm: Given | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
        verbose: bool = True,
    ) -> None:
        """Train a model in a federation.

        Args:
            model: Module that every client trains.
            datamodule: A FederatedDataModule; lightning_fl.data.Federated converts any other.
            algorithm: The federated method: an object, a name such as "FedProx", or a mapping with class_path and init_args, as
                in a configuration file; FedAvg if not given.
            ckpt_path: Resume from a checkpoint: a path, `last` or `best`.
            weights_only: Give False to read a checkpoint with objects of any class, if you trust it.
            verbose: Print the results and the paths of the files at the end.

        Raises:
            UserError: an argument does not fit; raised before anything is trained or written.
            FileError: a file of the run cannot be written.
        """
        with session(self, TrainerFn.FITTING, model, datamodule, algorithm, ckpt_path, weights_only):
            self.fit_loop.start()
            num_rows = None
            if self.checkpoint is not None:
                num_rows = checkpointing.resume(self, self.fit_loop.engine, self.checkpoint)
                self.checkpoint = None
            else:
                self.fit_loop.prepare()
            self.fit_loop.run_rounds(num_rows)
        if verbose and self.is_global_zero:
            show(final_table(self, self.fit_loop.rows))

    @refusing_others(partial(refuse_argument, "plan"))
    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        algorithm: Given | None = None,
    ) -> Plan:
        """Return what a fit would cost: bytes, steps, time, memory and disk; train and write nothing.

        A rehearsal on a copy of the module measures the costs, and is then discarded. One client, or one stack of clients,
        trains in full and is timed; the others train only as far as the size of their messages needs. Module, random numbers
        and folder do not change; data are read, and downloaded if the configuration says so. Only callbacks of this package
        that change the costs take part, so errors in hooks of other callbacks show up only in the fit.

        Args:
            model: Module that every client would train.
            datamodule: The data, as for `fit`.
            algorithm: The federated method, as for `fit`.

        Raises:
            UserError: a fit would be refused, with the same sentence, or the module cannot be copied.
        """
        from lightning_fl.plan.rehearsal import rehearse  # here, as it imports the trainer

        return rehearse(self, model, datamodule, algorithm)

    @refusing_others(partial(refuse_argument, "validate"))
    def validate(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        algorithm: Given | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate a model on the validation data.

        Args:
            model: The module; the last one if not given.
            datamodule: The data; the last one if not given.
            algorithm: The federated method that the model was trained with.
            ckpt_path: Load the model from a checkpoint: a path, `last` or `best`.
            verbose: Print the results.
            weights_only: Give False to read a checkpoint with objects of any class, if you trust it.

        Returns:
            A dictionary of metrics for each loader.
        """
        return self._evaluate(TrainerFn.VALIDATING, model, datamodule, algorithm, ckpt_path, verbose, weights_only)

    @refusing_others(partial(refuse_argument, "test"))
    def test(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        algorithm: Given | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate a model on the test data.

        Args:
            model: The module; the last one if not given.
            datamodule: The data; the last one if not given.
            algorithm: The federated method that the model was trained with.
            ckpt_path: Load the model from a checkpoint: a path, `last` or `best`.
            verbose: Print the results.
            weights_only: Give False to read a checkpoint with objects of any class, if you trust it.

        Returns:
            A dictionary of metrics for each loader.
        """
        return self._evaluate(TrainerFn.TESTING, model, datamodule, algorithm, ckpt_path, verbose, weights_only)

    @refusing_others(partial(refuse_argument, "predict"))
    def predict(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        algorithm: Given | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        return_predictions: bool = True,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Run a model on the prediction data.

        Args:
            model: The module; the last one if not given.
            datamodule: The data; the last one if not given.
            algorithm: The federated method that the model was trained with.
            ckpt_path: Load the model from a checkpoint: a path, `last` or `best`.
            return_predictions: Return what `predict_step` returned, batch by batch.
            weights_only: Give False to read a checkpoint with objects of any class, if you trust it.

        Returns:
            A list of outputs; one list for each loader if there are several.
        """
        with session(self, TrainerFn.PREDICTING, model, datamodule, algorithm, ckpt_path, weights_only):
            self.predict_loop.return_predictions = return_predictions
            return run_prediction(self)

    def _evaluate(
        self,
        fn: TrainerFn,
        model: LightningModule | None,
        datamodule: LightningDataModule | None,
        algorithm: Given | None,
        ckpt_path: str | os.PathLike[str] | None,
        verbose: bool,
        weights_only: bool | None,
    ) -> list[dict[str, float]]:
        """Validate or test outside `fit`."""
        with session(self, fn, model, datamodule, algorithm, ckpt_path, weights_only):
            averages = run_evaluation(self, "test" if fn == TrainerFn.TESTING else "validation")
        if verbose and self.is_global_zero:
            values = {name: x for loader_averages in averages for name, x in loader_averages.items()}
            width = max([24, *map(len, values)])
            for name, value in values.items():
                print(f"{name:<{width}} {value:.6g}")
        return averages

    @property
    def history(self) -> Any:
        """Rows of the last fit as in metrics.csv: a pandas DataFrame if pandas is installed, else a list of dictionaries.

        Without metrics.csv (`logger=False`) the rows lack `step` and values that callbacks send to loggers.
        """
        return history(self.fit_loop.rows, self.metric)

    def __repr__(self) -> str:
        shown = ("max_rounds", "clients_per_round", "default_root_dir")
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    # -- for loops and callbacks ----------------------------------------------------------------------------------------

    def log_client(self, client: int, values: Mapping[str, Any]) -> None:
        """Log values of a client in this round, in its row of `clients.csv`; call it in a hook of a callback.

        Args:
            client: Index of the client, as `on_client_upload` and other hooks get it.
            values: Numbers by column.

        Raises:
            UserError: No fit is running, there is no such client, a name or value is not allowed, or side channels are dropped.
        """
        require(self.fitting, "log_client logs values of a round, but no fit is running: call it in a hook of a fit.")
        require(
            getattr(self.privacy, "side_channels", "keep") == "keep",
            "log_client writes values of single clients to clients.csv, which privacy.side_channels drop leaves out: leave the "
            "call out, or use side_channels keep.",
        )
        checked = own_values(client, values, self.data.num_clients)
        self.fit_loop.client_values.setdefault(client, {}).update(checked)

    @contextmanager
    def client_model(self, client: int) -> Iterator[LightningModule]:
        """Load a client's model into the module: the server's model with the client's own parts; call it in a hook of a fit.

        Args:
            client: Index of the client.

        Raises:
            UserError: No fit is running, or there is no such client.
        """
        require(
            self.fitting and self.flat_module is not None and "run" in vars(self),
            "client_model loads a client's model into the module, but no fit is running: call it in a hook of a fit, such as "
            "on_train_end.",
        )
        assert self.flat_module is not None
        most = self.data.num_clients - 1
        require(
            is_whole(client) and 0 <= client <= most,
            f"client_model needs the index of a client, 0 to {most}, got {client!r}.",
        )
        data, shared = self.fit_loop.engine.data, self.algorithm.share(self.run.server)
        with predicting_model(self.flat_module, self.algorithm.personal, self.run, data, client, shared):
            yield self.lightning_module

    def save_checkpoint(  # type: ignore[override]
        self, filepath: str | os.PathLike[str], weights_only: bool = False
    ) -> None:
        """Save the model and, unless `weights_only`, the run, so that `fit(ckpt_path=filepath)` resumes from here.

        Within a round, or after an error within a round, it saves the run as it was before the round.

        Args:
            filepath: Path of the file, which is written under another name and then renamed.
            weights_only: Leave the run out, except from the run's own `checkpoints/last.ckpt` during `fit`.

        Raises:
            UserError: there is no model yet, or the run is to be saved, but no fit has begun its rounds.
            FileError: the file cannot be written.
        """
        require(
            weights_only or self.fit_loop.has_whole_run,
            "save_checkpoint saves a run, but no fit has begun its rounds: use weights_only=True.",
        )
        require(
            self.lightning_module is not None,
            "save_checkpoint saves a model, but the trainer has none: call fit, validate, test or predict first.",
        )
        is_running = self.fitting and self.fit_loop.has_whole_run
        before = self.fit_loop.before_round if self.fit_loop.has_whole_run else None
        if is_running and self.fit_loop.prunes_by_torch and (before is None or before.is_trained):
            self.fit_loop.adopt_module_changes()  # those of `on_validation_epoch_end`
        if self.is_global_zero:
            if is_running:
                self.fit_loop.renew_folder()
                self.fit_loop.folder.claim()
            is_last = Path(filepath) == Path(self.default_root_dir) / LAST
            # A ModelCheckpoint may save there, too; a killed run is resumed from it.
            to_files = is_last and is_running
            engine = None if weights_only and not to_files else self.fit_loop.engine
            files = (self.fit_loop.saved_states, self.fit_loop.saved_frozen) if to_files else (None, None)
            num_rows = self.fit_loop.folder.num_rows if is_running else 0
            checkpoint = checkpointing.build_checkpoint(self, engine, before, files[0], num_rows, files[1])
            checkpoint_file.save_atomically(checkpoint, filepath, keep_previous=is_last)
            for written in files:
                if written is not None:
                    written.release()
            for callback in self.checkpoint_callbacks if is_last else ():
                if isinstance(callback, LastCheckpoint):
                    callback.saved(os.fspath(filepath))

    @checked
    def evaluate_clients(
        self,
        part: Literal["validation", "test"] = "validation",
        clients: Annotated[int, Ge(0)] | None = None,
        fixed: bool = True,
        finetune_epochs: Annotated[int, Ge(0)] = 0,
        finetune_lr: Annotated[float, Gt(0)] | None = None,
    ) -> list[ClientResult]:
        """Evaluate clients on their own held-out samples, without side effects; call it in a callback.

        In a fit it evaluates the server's model between rounds, in `validate` and `test` the model that was loaded.

        Args:
            part: Held-out samples of each client, and the step that measures them.
            clients: Number of clients, drawn by the seed; all if not given.
            fixed: Draw the same clients in every round.
            finetune_epochs: Passes of each client over its training samples before a second measurement; 0 for none.
            finetune_lr: Learning rate of these passes; the next round's if not given.

        Raises:
            UserError: no session is in progress, an argument is out of range, or no client has samples of this part.
        """
        require(
            self.flat_module is not None, "evaluate_clients works inside fit, validate and test: call it in a callback."
        )
        if part == "test":
            self.data.require_own_test_samples("evaluate_clients")
        why = "test divides none of a single client" if self.data.val_fraction else "set data.val_fraction, such as 0.2"
        require(
            part == "test" or len(self.data.client_val_indices.joined) > 0,
            f"evaluate_clients finds no samples that clients hold out: {why}.",
        )
        if self.fitting:
            run = self.fit_loop.engine
            evaluator = ClientEvaluator(
                run.flat_module,
                run.data,
                run.run,
                run.context,
                run.schedule,
                self.algorithm.personal,
                self.algorithm.share(run.run.server),
            )
        else:
            evaluator = client_evaluator(self, trains=finetune_epochs > 0)
        limit = self.limits["limit_val_batches" if part == "validation" else "limit_test_batches"]
        panel = evaluator.panel(clients, fixed)
        return evaluator.evaluate(part, panel, limit, finetune_epochs, finetune_lr)

    def sources(self) -> list[Source]:
        """Return all sources of training samples, for callbacks that query each of them; only a federation has this method."""
        return between_rounds.sources(self.fit_loop.engine)
