"""`lightning-fl`: the commands and their errors.

`fit`, `validate`, `test` and `predict` take configurations as every LightningCLI does; `init` writes a first configuration,
`list` prints the available names, `study` trains many runs, and `report` compares them. A user's mistake ends with one
sentence on standard error and exit code 2. Commands that need no run are answered here, before torch and Lightning are imported,
because this import takes seconds.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from lightning_fl import __version__
from lightning_fl.cli import catalogue, kept_help, method_source, shipped_configs
from lightning_fl.cli.config_checks import check_depth, check_given
from lightning_fl.cli.failures import fail, file_error_of, sentence_of
from lightning_fl.cli.first_config import init
from lightning_fl.errors import nearest, require
from lightning_fl.outputs.json_text import json_text
from lightning_fl.outputs.plan import Plan

COMMANDS = ("init", "fit", "validate", "test", "predict", "study", "report", "list")
FLAGS = ("--help", "--version", "--config", "--print_config", "--print_completion")
"""Flags that may stand before the command."""
CONFIG_VARIABLE = re.compile("PL_[A-Z]+__CONFIG")
"""Environment variables in place of --config."""
SPINS = "10000"
"""Spins of a thread of GNU OpenMP, which torch uses on Linux, while it waits for other threads, before it releases its core. With
OpenMP's own default a round takes many times longer on a busy machine (docs/explanation/speed.md)."""
REMEDIES = {
    "fit": "; --ckpt_path last resumes after the last complete round",
    "study": "; the same command resumes its runs",
}
"""Remedy after a run was stopped, by command."""
ANSWERS = re.compile(r"-h|--help|--[\w.]+\.help(=.*)?|--print_\w+(=.*)?|--dry_run")
"""Flags with which a command prints something and trains nothing."""
BROKEN_PIPE = 141
"""Exit code of a program that is ended by SIGPIPE."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    try:
        answer = _answer_at_once(words)
        if answer is not None:
            print(answer)
        else:
            _check_configurations(words)
            _prepare()
            if words[:1] == ["study"]:
                _study(words[1:])
            elif words[:1] == ["report"]:
                _report_on_study(words[1:])
            else:
                _run(arguments)
        _flush()
    except SystemExit:
        _flush()
        raise
    except KeyboardInterrupt:
        _stop("\nlightning-fl: interrupted", words, code=130)
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        if remedy := _remedy(words):
            print(f"lightning-fl: nobody reads the output any more{remedy}.", file=sys.stderr)
        _flush()
        sys.exit(BROKEN_PIPE)
    except Exception as error:
        if file_error := file_error_of(error):
            _stop(f"lightning-fl: error: {file_error}", words, code=1)
        if "by peer" in str(error):  # from gloo and NCCL about a broken connection
            _stop("lightning-fl: another process of this run died, see its own messages", words, code=1)
        sentence = sentence_of(error)
        if sentence is None:
            raise
        fail(sentence)


def _answer_at_once(words: list[str]) -> str | None:
    """Return the text of a command that needs no run; None for any other."""
    first = words[0] if words else ""
    if not words:
        require("PL_SUBCOMMAND" in os.environ, f"no command is given; allowed: {', '.join(COMMANDS)}.")
    elif not first.startswith("-"):
        require(first in COMMANDS, f"there is no command {first!r}; {nearest(first, COMMANDS)}.")
    elif first.startswith("--"):
        flag = first.partition("=")[0]
        require(flag in FLAGS, f"there is no flag {flag} before the command; {nearest(flag, FLAGS)}.")
    if first in ("-h", "--help"):
        return Path(__file__).with_name("help.txt").read_text(encoding="utf-8").rstrip()
    if first == "--version":
        return f"lightning-fl {__version__}"
    if words[1:] in (["-h"], ["--help"]) and (help_text := kept_help.help_of(first)):
        return help_text.rstrip("\n")
    if first == "list":
        if {"-h", "--help"} & {*words[1:]}:
            return catalogue.help_text()
        flags = {word for word in words[1:] if word in ("--source", "--json")}
        names = [word for word in words[1:] if word not in flags]
        require(
            len(flags) < 2,
            "lightning-fl list prints the code of a method with --source, or JSON with --json, not both.",
        )
        if flags == {"--source"}:
            return method_source.listing(names)
        return json_text("list", catalogue.content(names)) if flags else catalogue.listing(names)
    if first == "init":
        return init(words[1:])
    if first == "report":
        from lightning_fl.report import report
        from lightning_fl.report.flags import build_parser as report_parser

        runs = report_parser().parse_args(words[1:]).runs
        studies = [run for run in runs if shipped_configs.is_study(run)]
        require(
            studies in ([], runs[:1]),
            f"a report takes runs, or one study file and the folder of its runs after it, got {' '.join(runs)}.",
        )
        return None if studies else report(words[1:])
    if first == "study" and {"-h", "--help"} & set(words[1:]):
        from lightning_fl.study.command import build_parser

        return build_parser().format_help().rstrip()
    return None


def _check_configurations(words: list[str]) -> None:
    """Check that the values of --config can be configurations, and that no flag is nested too deeply."""
    check_depth(words)
    for value in shipped_configs.given_paths(words):
        check_given(value)


def _prepare() -> None:
    """Set up the process, before torch and Lightning are imported."""
    # Find the user's own classes; an absolute path, because the parser changes to the folder of the file that it reads. It comes
    # last, because a file such as lightning.py in the current folder must not replace an installed package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in filter(CONFIG_VARIABLE.fullmatch, list(os.environ)):
        os.environ[name] = shipped_configs.find(os.environ[name])
    if find_spec("shtab"):
        os.environ.setdefault("JSONARGPARSE_ADD_PRINT_COMPLETION_ARGUMENT", "true")
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS  # read when torch is imported


def _run(arguments: Sequence[str] | None) -> None:
    from lightning_fl.cli.federated_cli import FederatedCLI
    from lightning_fl.cli.plain_warnings import plain_warnings

    with plain_warnings():
        FederatedCLI(args=arguments)


def _resolve(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the whole configuration of a fit; import the modules for it only now, after the study file was read."""
    from lightning_fl.cli.planned_fit import resolve

    return resolve(words)


def _plan(words: Sequence[str]) -> Plan:
    """Return the expected costs of a fit."""
    from lightning_fl.cli.planned_fit import plan

    return plan(words)


def _read(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the whole configuration of a fit, which may name files that are missing on this machine."""
    from lightning_fl.cli.planned_fit import read

    return read(words)


def _report_on_study(arguments: list[str]) -> None:
    from lightning_fl.study import report_on_study

    print(report_on_study(arguments, _read, shipped_configs.find_study))


def _study(arguments: list[str]) -> None:
    from lightning_fl.study import study

    text, is_complete = study(arguments, _resolve, shipped_configs.find_study, _plan)
    print(text)
    if not is_complete:
        sys.exit(1)


def _open_streams() -> None:
    """Open closed standard streams, so that no file of the run gets their numbers; print unsupported characters as `?`."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _flush() -> None:
    """Write the rest of the output; exit if nobody reads it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest again when it exits
        sys.exit(BROKEN_PIPE)


def _remedy(words: Sequence[str]) -> str:
    """Return the advice that resumes a command's training; empty if it trains nothing."""
    return "" if any(map(ANSWERS.fullmatch, words)) else REMEDIES.get(words[0] if words else "", "")


def _stop(reason: str, words: Sequence[str], code: int) -> NoReturn:
    """Print why a command has stopped and how to resume it, and exit."""
    print(f"{reason}{_remedy(words)}.", file=sys.stderr)
    sys.exit(code)
