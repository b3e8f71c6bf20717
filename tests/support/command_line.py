"""Run `lightning-fl` in the process of the tests."""

import sys
import typing
from collections.abc import Callable
from typing import NamedTuple

import pytest

from lightning_fl.checks.parameters import _parameters_of
from lightning_fl.cli import main


class Outcome(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """Return the one line of the error message; check that the run ended with it."""
        mistakes = [line for line in self.err.splitlines() if "error:" in line]
        assert self.code == 2, f"exit code {self.code}: {self.err}"
        assert len(mistakes) == 1, self.err
        assert mistakes[0].startswith("lightning-fl: error: "), mistakes[0]
        assert self.err.splitlines()[-1] == mistakes[0], "the error message is not the last line"
        assert "Traceback" not in self.err
        return mistakes[0].removeprefix("lightning-fl: error: ")


Command = Callable[..., Outcome]


def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object, name: str = "lightning-fl"
) -> Outcome:
    """Run a command line in the current folder."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    code: int | str | None = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    return Outcome(int(code or 0), printed.out, printed.err)


def forget_types() -> None:
    """Empty typing's caches, in which types that differ only in their order are the same.

    The parser makes `Optional[int | float | None]` of a type, and would get the `Optional[float | int | None]` of a test before.
    """
    for clear in typing._cleanups:  # type: ignore[attr-defined]
        clear()
    _parameters_of.cache_clear()
