"""Test that float comparisons do not depend on the last bit."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fl.checks import reaches, whole_share


@given(st.integers(0, 10_000), st.integers(0, 1_000_000))
def test_a_share_is_that_of_the_decimal_that_was_written(digits: int, count: int) -> None:
    assert whole_share(digits / 10_000, count) == Fraction(digits, 10_000) * count // 1


@given(st.floats(1e-6, 1e6), st.booleans())
def test_a_value_has_reached_the_target_that_it_is(target: float, falls: bool) -> None:
    near = np.array([np.float32(target), np.nextafter(target, 0), np.nextafter(target, np.inf)])
    assert reaches(near, target, falls).all()
    beyond = target * (1 - 1e-5 if falls else 1 + 1e-5)
    assert reaches(beyond, target, falls)
    assert not reaches(target, beyond, falls)


@pytest.mark.parametrize("falls", [False, True])
def test_nan_reaches_nothing(falls: bool) -> None:
    assert not reaches(float("nan"), 0.5, falls)
