"""Fixture of the command line in an empty folder."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_fl.cli import main


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """Return a function that runs a command line in an empty folder and returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["lightning-fl", *words])
        code: Any = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        return (code, *capsys.readouterr())

    return command
