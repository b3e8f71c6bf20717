"""Fixture of the command line's tests."""

import pytest


@pytest.fixture(autouse=True)
def _types_of_a_new_process(types_of_a_new_process: None) -> None:
    """Begin every test with the types of a new process: it makes the parser, or reads its annotations."""
