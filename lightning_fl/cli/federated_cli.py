"""LightningCLI with a FederatedTrainer and an algorithm."""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from enum import Enum
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from pydoc import locate
from typing import Any, ClassVar, NoReturn

import torch
import yaml
from jsonargparse.typing import register_type
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl import __version__, data, modules
from lightning_fl.algorithms import Algorithm
from lightning_fl.checks import parameters_of
from lightning_fl.cli.config_checks import (
    check_class,
    check_file,
    check_free_parameters,
    check_group,
    check_inner_files,
    check_numbers,
    check_optimizer,
    free_parameters,
    replaced_work,
)
from lightning_fl.cli.default_parts import named_parts, with_default_init_args, with_default_parts
from lightning_fl.cli.error_messages import explain, unknown_variable
from lightning_fl.cli.failures import fail
from lightning_fl.cli.help_formatter import PlainHelpFormatter, arrange, inner_usage
from lightning_fl.cli.shipped_configs import with_paths
from lightning_fl.cli.type_descriptions import shown
from lightning_fl.data import FederatedDataModule
from lightning_fl.data.federated_data_module import OFFERED
from lightning_fl.errors import require
from lightning_fl.outputs import checkpoint_file, wandb_run
from lightning_fl.outputs.files import replacing, writing
from lightning_fl.outputs.json_text import json_text
from lightning_fl.outputs.run_folder import config_name, remove_empty, require_writable
from lightning_fl.settings.settings import Change
from lightning_fl.trainer import FederatedTrainer
from lightning_fl.trainer.run_metric import fit_content

DESCRIPTION = "Federated-learning experiments for PyTorch Lightning."
SEED_TRUE = (
    "seed_everything true would mean seed 0, because Lightning draws no seed: give a whole number, such as $RANDOM in a shell, "
    "or false for an initial model without a seed."
)
DRY_RUN = "Print the expected costs of the run: bytes, steps, time, memory and disk. Train and write nothing."
JSON = "Print the final table, or the costs with --dry_run, as one JSON document on standard output; the rest on standard error."
LINKED = OFFERED
"""Parameters of the model that are taken from the data, if the data define them."""


class FederatedArgumentParser(LightningArgumentParser):
    """Parser that accepts a FederatedTrainer and reports an error in one sentence."""

    _named: frozenset[str] = frozenset()
    """Parameters whose value is a class that the user names, so that nothing of the default part is left."""
    words: Sequence[str] = ()
    """Words of the command line, for errors: for a flag of a class, argparse names only the key of the class."""
    all_words: ClassVar[Sequence[str]] = ()
    """Words of the last whole command line, for errors of a parser that reads the parameters of one class."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"description": DESCRIPTION, "formatter_class": PlainHelpFormatter, **options})
        register_type(os.PathLike, str, _path)
        # Without this, a misspelt flag could count as an abbreviation of another.
        self.allow_abbrev = False

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, *arguments: Any, **options: Any
    ) -> list[str]:
        """Add the arguments of a class; LightningCLI itself refuses any trainer but Lightning's here."""
        if isinstance(lightning_class, type) and issubclass(lightning_class, FederatedTrainer):
            return self.add_class_arguments(
                lightning_class, nested_key, fail_untyped=False, instantiate=False, sub_configs=True
            )
        return super().add_lightning_class_args(lightning_class, nested_key, *arguments, **options)

    def format_help(self, *arguments: Any, **options: Any) -> str:
        """Return the help with the method, the model and the data first."""
        if hasattr(self, "_inner_parser"):
            self.usage, self.description = inner_usage(self.description or "", bool(self._actions))
        elif self._subcommands_action is None:
            arrange(self)
        return super().format_help(*arguments, **options)

    def parse_args(self, args: Any = None, *arguments: Any, **options: Any) -> Any:
        """Parse a command line, in which `--config` may name a configuration of the package."""
        words = with_paths(sys.argv[1:] if args is None else args)
        if dropped := replaced_work(words, os.environ):
            words.append(dropped[0])
            rank_zero_info(dropped[1])
        self.words = words
        if hasattr(self, "_inner_parser"):  # of a class, whose parameters come one by one
            options["namespace"] = with_default_parts(self, words, options.get("namespace"))
        else:
            FederatedArgumentParser.all_words = words
        return super().parse_args(words, *arguments, **options)

    def parse_object(self, obj: Any, *arguments: Any, **options: Any) -> Any:
        """Parse the parameters of a class; a part whose class is named starts from the defaults of that class."""
        if not hasattr(self, "_inner_parser"):
            FederatedArgumentParser.all_words = ()
        parameters = with_default_init_args(self, obj, options.get("namespace"))
        before, self._named = self._named, named_parts(parameters)
        try:
            return super().parse_object(parameters, *arguments, **options)
        finally:
            self._named = before

    def parse_path(self, path: Any, *arguments: Any, **options: Any) -> Any:
        """Parse a file after `check_file`, because jsonargparse ignores much of a file that is not a configuration."""
        if os.path.isfile(path):
            check_file(path)
        return super().parse_path(path, *arguments, **options)

    def get_defaults(self, *arguments: Any, **options: Any) -> Any:
        """Return the defaults with members of string enumerations as strings, because jsonargparse cannot save the members."""
        defaults = super().get_defaults(*arguments, **options)
        for key in self._named:
            defaults.pop(key, None)
        for key, value in defaults.items():
            if isinstance(value, str) and isinstance(value, Enum):
                defaults[key] = str(value.value)
        return defaults

    def dump(self, namespace: Any, *arguments: Any, **options: Any) -> str:
        """Return a configuration as text, without the checks of the parser that has made it: they take as long as parsing."""
        return super().dump(namespace, *arguments, **{"skip_validation": True, **options})

    def save(self, namespace: Any, *arguments: Any, **options: Any) -> None:
        """Write a configuration to files, as `dump` does."""
        super().save(namespace, *arguments, **{"skip_validation": True, **options})

    def get_completion_script(self, completion_type: str, **options: Any) -> str:
        """Return the script with the names that a configuration may use and the commands that need no parser."""
        from lightning_fl.cli import first_config
        from lightning_fl.cli.completion import flags_of, offer_names
        from lightning_fl.report.flags import build_parser
        from lightning_fl.study.command import build_parser as study_parser

        require(
            completion_type.startswith("shtab-"),
            f"--print_completion {completion_type} would describe flags, not configuration files; allowed: shtab-bash, "
            "shtab-zsh, shtab-tcsh, shtab-fish, shtab-powershell.",
        )
        commands = self._subcommands_action
        assert commands is not None
        for command in commands.choices.values():
            offer_names(command)
        commands.add_subcommand("init", flags_of(first_config.build_parser()))
        commands.add_subcommand("list", LightningArgumentParser())
        commands.add_subcommand("report", flags_of(build_parser()))
        commands.add_subcommand("study", flags_of(study_parser()))
        return super().get_completion_script(completion_type, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one sentence and exit with code 2."""
        fail(explain(message, self))


def _path(value: Any) -> str:
    """Return the text of a path; jsonargparse's own function turns a flag's null into the path `None`."""
    if value is None:
        raise TypeError("null is not a path")
    return str(value)


class SaveFitConfig(SaveConfigCallback):
    """Callback that saves the configuration of a `fit` as config.yaml, and of each resumed one beside it as config-2.yaml, …"""

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Save nothing yet, because the folder may hold an earlier run until this one has done a round."""

    def on_folder_claimed(self, trainer: Any, pl_module: LightningModule) -> None:
        """Save the configuration, as Lightning does in `setup`."""
        self.config_filename = config_name(trainer.default_root_dir, trainer.ckpt_path is not None)
        with writing(Path(trainer.default_root_dir) / self.config_filename):
            super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Send the configuration to Weights & Biases."""
        if wandb_run.is_used(trainer):
            config = yaml.safe_load(self.parser.dump(self.config, skip_none=True))
            wandb_run.send_config(trainer, config, Path(trainer.log_dir) / self.config_filename)


class FederatedCLI(LightningCLI):
    """LightningCLI with a FederatedTrainer and the key `algorithm` in addition to `trainer`, `model` and `data`."""

    def __init__(
        self,
        model_class: type[LightningModule] = LightningModule,
        datamodule_class: type[FederatedDataModule] = FederatedDataModule,
        args: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        """Parse, build and run.

        Args:
            model_class: Base class of the models that `--model` may name.
            datamodule_class: Base class of the data that `--data` may name.
            args: Command line; the process's own if not given.
            **options: Further arguments of LightningCLI.
        """
        defaults: dict[str, Any] = {
            "trainer_class": FederatedTrainer,
            "parser_class": FederatedArgumentParser,
            "subclass_mode_model": True,
            "subclass_mode_data": True,
            "save_config_callback": SaveFitConfig,
            "save_config_kwargs": {"overwrite": True},
            "seed_everything_default": 0,
            "parser_kwargs": {"prog": "lightning-fl", "default_env": True},
        }
        words = sys.argv[1:] if args is None else args
        self._named = words[0] if isinstance(words, list | tuple) and words else None
        self._output, self._is_json = sys.stdout, "--json" in words
        with redirect_stdout(sys.stderr) if self._is_json else nullcontext():
            super().__init__(model_class, datamodule_class, args=args, **{**defaults, **options})  # type: ignore[arg-type]

    def init_parser(self, **options: Any) -> LightningArgumentParser:
        """Return a parser that heads configurations with the version of this package instead of Lightning's."""
        return super().init_parser(**{"dump_header": [f"lightning-fl=={__version__}"], **options})

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **options: Any) -> LightningArgumentParser:
        """Return the parser of a command, without its flags if the command line begins with another: they take long to add."""
        if self._named in self.subcommands() and self._named != subcommand:
            return self.init_parser(**options)
        parser = super()._prepare_subcommand_parser(klass, subcommand, **options)
        if subcommand == "fit":
            # No value in configurations, which are compared and kept, unless the flag is given.
            parser.add_argument("--dry_run", action="store_true", default=SUPPRESS, help=DRY_RUN)
            parser.add_argument("--json", action="store_true", default=SUPPRESS, help=JSON)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, and refuse invalid values that the parser accepts."""
        words = sys.argv[1:] if args is None else args if isinstance(args, list) else []
        if any(word.startswith("--print_config") for word in words):  # after which the parser ends
            self._check_variables(parser, words[0])
        super().parse_arguments(parser, args)
        self._check_variables(parser, self.config.subcommand)
        is_json = self.config[self.config.subcommand].pop("json", None)  # it is no setting of the run
        require(
            not is_json or self._is_json,
            "json is only a flag of the command line: take it out of files and environment variables, and give --json.",
        )
        config = self.config[self.config.subcommand].as_dict()
        check_inner_files(config)
        check_numbers(words, config)
        seed, most = config["seed_everything"], 2**32 - 1
        require(seed is not True, SEED_TRUE)
        is_allowed = isinstance(seed, int) and 0 <= seed <= most
        require(is_allowed, f"seed_everything must be false or a whole number in [0, {most}], got {shown(seed)}.")
        check_group(config["trainer"], self.trainer_class, "trainer")
        for key in ("model", "data", "algorithm", "optimizer", "lr_scheduler"):
            check_class(config.get(key), key)
        check_optimizer(config)
        self._given_model = config["model"]
        self._free_parameters = free_parameters(config)

    def _check_variables(self, parser: LightningArgumentParser, name: str) -> None:
        """Raise `UserError` if an environment variable seems to set a flag of a command, but does not."""
        command = parser._subcommands_action.choices.get(name)  # type: ignore[union-attr]
        if command is None:
            return
        of_all_commands = {f"PL_{action.dest.upper()}" for action in parser._actions}
        misspelt = unknown_variable(f"PL_{name.upper()}__", os.environ.keys() - of_all_commands, command)
        require(misspelt is None, misspelt or "")

    def instantiate_classes(self) -> None:
        """Instantiate all classes, and refuse parameters of the model that contradict the data."""
        trainer = self.config[self.config.subcommand].trainer
        callbacks = trainer.callbacks
        if callbacks is not None and not isinstance(callbacks, list):
            trainer.callbacks = [callbacks]  # else the parser hides why a callback cannot be made
        try:
            super().instantiate_classes()
        except Exception as error:
            check_free_parameters(error, self._free_parameters)
            raise
        finally:
            trainer.callbacks = callbacks  # as given, for config.yaml and the digests of studies
        model, data_class = self._given_model, type(self.datamodule).__name__
        parameters = parameters_of(locate(model["class_path"]))
        for name in LINKED:
            value, data_value = self._given(name), getattr(self.datamodule, name)
            require(
                value == data_value
                or data_value is None
                or name not in parameters
                or value == parameters[name].default,
                f"model.{name} is {value}, but {data_class} has {data_value}: leave it out, so that it is taken from the data.",
            )
        is_square = getattr(self.datamodule, "image_size", None) or self._given("image_size")
        by_name = isinstance(self.model, modules.ImageClassifier) and isinstance(self._given("network"), str)
        require(
            bool(is_square) or not (by_name and isinstance(self.datamodule, data.Arrays | data.ImageFolder)),
            f"the images of {data_class} are not square, but ImageClassifier's networks need square ones: resize them, as with "
            "--data ImageFolder --data.image_size, or use a network of your own.",
        )

    def _given(self, name: str) -> Any:
        """Return the configuration's value of a parameter of the model."""
        return self._given_model.get("init_args", {}).get(name)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the trainer's methods and, for each, the arguments that are not flags."""
        arguments = {"model", "datamodule", "algorithm", "verbose", "return_predictions", "weights_only"}
        return dict.fromkeys(("fit", "validate", "test", "predict"), arguments)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `algorithm`, and link parameters of the model to the data."""
        parser.add_subclass_arguments(Algorithm, "algorithm", required=False, default={"class_path": "FedAvg"})
        for name in LINKED:
            known_or_given = partial(self._known_or_given, name)
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", known_or_given, apply_on="instantiate")

    def _known_or_given(self, name: str, data_value: int | None) -> int | None:
        """Return the value from the data, or else the configuration's value for the model.

        None if neither the data nor the user give it; then ImageClassifier asks for it.
        """
        given, model = self._given(name), self._given_model["class_path"]
        asks = name == "num_classes" and locate(model) is modules.ImageClassifier
        if data_value is None and not (asks and given == parameters_of(modules.ImageClassifier)[name].default):
            return given
        return data_value

    def _run_subcommand(self, subcommand: str) -> None:
        """Run a method of the trainer; with --dry_run print the expected costs of the fit."""
        trainer: Any = self.trainer
        if not self.config[subcommand].get("dry_run"):
            super()._run_subcommand(subcommand)
            if self._is_json and trainer.is_global_zero:
                print(json_text("fit", fit_content(trainer)), file=self._output)
            return
        arguments = self._prepare_subcommand_kwargs(subcommand)
        require(
            arguments.get("ckpt_path") is None,
            f"--dry_run plans a run from its first round, but ckpt_path is {arguments.get('ckpt_path')}: leave it out.",
        )
        plan = trainer.plan(arguments["model"], arguments.get("datamodule"), arguments["algorithm"])
        if trainer.is_global_zero:
            print(json_text("plan", asdict(plan)) if self._is_json else plan, file=self._output)

    def _parse_ckpt_path(self) -> None:
        """Take over a checkpoint's hyper-parameters for an evaluation; a resumed run keeps its configuration's."""
        config = self.config[self.config.subcommand]
        path, before = config.get("ckpt_path"), config.model.as_dict().get("init_args", {})
        if path and path not in ("last", "best"):
            checkpoint_file.load(path)  # raises a UserError if it cannot be read
        if self.config.subcommand == "fit":
            return
        free = set(config.model.as_dict().get("dict_kwargs") or {})
        with checkpoint_file.mapped(path or ""):
            super()._parse_ckpt_path()
        self._leave_out_foreign(free)
        after = self.config[self.config.subcommand].model.as_dict().get("init_args", {})
        differing = [name for name in before if name not in LINKED and before[name] != after.get(name, before[name])]
        if differing:
            listed = ", ".join(str(Change(f"model.{name}", before[name], after[name])) for name in differing)
            rank_zero_info(f"The model has the hyper-parameters of the checkpoint, not the configuration's: {listed}.")

    def _leave_out_foreign(self, free: set[str]) -> None:
        """Leave out the hyper-parameters of a checkpoint that are not parameters of the model's class.

        Such are the arguments that the command line offers to every class, and hyper-parameters that a module has added.

        Args:
            free: names that the configuration has under `dict_kwargs`.
        """
        model = self.config[self.config.subcommand].model
        found = dict(model.get("dict_kwargs") or {})
        parameters = signature(locate(model.class_path)).parameters.values()  # type: ignore[arg-type]
        takes_any = any(parameter.kind == Parameter.VAR_KEYWORD for parameter in parameters)
        left = {name: x for name, x in found.items() if name in free or (takes_any and name not in LINKED)}
        if left != found:
            model.dict_kwargs = left

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        return {
            **super()._prepare_subcommand_kwargs(subcommand),
            "algorithm": self._get(self.config_init, "algorithm"),
        }

    def predict(self, **arguments: Any) -> None:
        """Predict, and save the predictions: a list with the result of `predict_step` for each batch."""
        path = Path(self.trainer.default_root_dir) / "predictions.pt"
        made = require_writable(str(path.parent))
        require(
            not path.is_dir(), f"{path} is a folder, but predictions are written to a file of this name: move it away."
        )
        try:
            predictions = self.trainer.predict(**arguments)
            if self.trainer.is_global_zero:
                with replacing(path) as file:
                    torch.save(predictions, file)
                print(f"predictions  {path}")
        finally:
            remove_empty(made)  # in case of an error
