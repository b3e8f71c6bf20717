"""Test that every method names its paper in its module, which `lightning-fl list` and the site show."""

import inspect
import re

import pytest

from lightning_fl import algorithms

METHODS = [name for name in algorithms.__all__ if name != "Algorithm"]


@pytest.mark.parametrize("name", METHODS)
def test_every_methods_module_has_a_reference_that_can_be_looked_up(name: str) -> None:
    reference = (inspect.getmodule(getattr(algorithms, name)).__doc__ or "").partition("\n\n")[0]
    assert re.search(r"\((arXiv:\d{4}\.\d{5}|openreview:\w+)\)|doi:10\.\d{4}/\d+", reference), reference
    assert re.search(r"et al\., .*20\d\d", reference, re.DOTALL), "authors, title, venue, year"
