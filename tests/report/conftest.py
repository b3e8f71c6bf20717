"""Fixtures of the command line in an empty folder, and of the pictures' formats."""

import pytest
from command_line import Command

from lightning_fl.outputs.figures import Look


@pytest.fixture
def all_formats() -> None:
    """Mark a test that reads pictures of every default format."""


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing, which takes most of a report's time, in a test of its text alone."""
    from lightning_fl.report import clients, plots

    for module, name in ((plots, "draw_curves"), (plots, "draw_bits"), (clients, "draw_clients")):
        monkeypatch.setattr(module, name, lambda *_: None)


@pytest.fixture(autouse=True)
def _one_format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw each picture once, where the test is not about pictures: drawing takes most of a report's time."""
    is_about_pictures = request.path.stem == "test_report_look" or "all_formats" in request.fixturenames
    if not is_about_pictures:
        monkeypatch.setattr(Look, "formats", ("svg",))


@pytest.fixture
def run(lightning_fl: Command) -> Command:
    """Return the function that runs a command line in an empty folder; `lightning_fl` is the package in these tests."""
    return lightning_fl
