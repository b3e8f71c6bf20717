"""Configurations of planned fits, which are checked like the command line's but not run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn

import yaml

from lightning_fl.cli.error_messages import explain
from lightning_fl.cli.failures import sentence_of
from lightning_fl.cli.federated_cli import FederatedArgumentParser, FederatedCLI
from lightning_fl.errors import UserError, require
from lightning_fl.outputs.plan import Plan
from lightning_fl.outputs.quiet import NOTES, quiet


class _Refused(BaseException):
    """Error of a parser. It is not an `Exception`, because an outer parser would catch and reword that."""


class _PlannedParser(FederatedArgumentParser):
    """Parser that raises its error instead of ending the program."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the sentence that the command line would print."""
        raise _Refused(explain(message, self)) from ex


class _PlannedFit(FederatedCLI):
    """Command that ends after it has made its classes."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


class _ReadFit(_PlannedFit):
    """Command that ends after it has read its arguments."""

    def instantiate_classes(self) -> None:
        """Make nothing."""


def read(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return the whole configuration of a fit without making its classes, because its files may be on another machine.

    Args:
        arguments: command line after `fit`.

    Raises:
        UserError: an argument, or a value in a file, is not allowed.
    """
    with _sentences(), quiet(*NOTES):
        return _configuration(_made(arguments, _ReadFit))


def resolve(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return the whole configuration of a fit, after its classes were made from it.

    Args:
        arguments: command line after `fit`.

    Raises:
        UserError: an argument, or a value in a file, is not allowed.
    """
    require(
        "--json" not in arguments, "the arguments contain --json, which only a command of its own takes: leave it out."
    )
    with _sentences(), quiet(*NOTES):
        cli = _made(arguments)
        require(not cli.config.fit.get("dry_run"), "the arguments contain dry_run, which trains nothing: leave it out.")
        return _configuration(cli)


def plan(arguments: Sequence[str]) -> Plan:
    """Return the expected costs of a fit.

    Args:
        arguments: command line after `fit`.

    Raises:
        UserError: an argument, or a value in a file, is not allowed, or the data are missing.
    """
    with _sentences(), quiet(*NOTES):
        cli = _made(arguments)
        inputs = cli._prepare_subcommand_kwargs("fit")
        trainer: Any = cli.trainer
        planned: Plan = trainer.plan(inputs["model"], inputs.get("datamodule"), inputs["algorithm"])
        return planned


def _made(arguments: Sequence[str], kind: type[_PlannedFit] = _PlannedFit) -> _PlannedFit:
    """Return the command, up to where its kind ends."""
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")
        return kind(args=["fit", *arguments], parser_class=_PlannedParser)


def _configuration(cli: _PlannedFit) -> Mapping[str, Any]:
    configuration: Mapping[str, Any] = yaml.safe_load(cli._parser("fit").dump(cli.config.fit, skip_link_targets=False))
    return configuration


@contextmanager
def _sentences() -> Iterator[None]:
    """Raise the sentence that the command line would print for an error."""
    try:
        yield
    except _Refused as refused:
        raise UserError(str(refused)) from refused
    except SystemExit as ended:
        raise UserError(
            "the arguments contain a flag that prints and trains nothing, such as --help or --print_config: leave it out."
        ) from ended
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        raise UserError(sentence) from error
