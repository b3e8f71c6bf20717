"""Fixtures of the command line in an empty folder, and of the pictures' formats."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_fl.cli import main
from lightning_fl.outputs.figures import Look


@pytest.fixture
def all_formats() -> None:
    """Mark a test that reads pictures of every default format."""


@pytest.fixture(autouse=True)
def _one_format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw each picture once, where the test is not about pictures: drawing takes most of a report's time."""
    is_about_pictures = request.path.stem == "test_report_look" or "all_formats" in request.fixturenames
    if not is_about_pictures:
        monkeypatch.setattr(Look, "formats", ("svg",))


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
