"""Test that float comparisons do not depend on the last bit."""

import sys
from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_fl.checks import (
    check_at_least,
    check_between,
    check_choice,
    check_positive,
    check_whole,
    parameters_of,
    reaches,
    whole_share,
)
from lightning_fl.errors import UserError


@pytest.mark.long
@example(3102, 10**8)
@given(st.integers(0, 10_000), st.integers(0, 10**10))
def test_a_share_is_that_of_the_decimal_that_was_written(digits: int, count: int) -> None:
    assert whole_share(digits / 10_000, count) == Fraction(digits, 10_000) * count // 1


@pytest.mark.long
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


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_of_any_kind_pass(value: Any) -> None:
    check_whole("rounds", value, 0, 3)


@pytest.mark.parametrize("value", [True, 3.0, np.float64(3), "3", None, 4, -1])
def test_what_is_no_whole_number_in_the_range_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"rounds must be a whole number from 0 to 3, got "):
        check_whole("rounds", value, 0, 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "0.5", None, 1.0, -0.1])
def test_what_is_no_number_between_the_ends_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"share must lie in \[0, 1\), got "):
        check_between("share", value, 0, 1, "[)")
    check_between("share", np.float32(0.5), 0, 1, "()")


@pytest.mark.parametrize("check", [check_positive, lambda name, value: check_at_least(name, value, 0)])
def test_numbers_without_an_upper_bound_fit_float32(check: Callable[[str, Any], None]) -> None:
    check("size", 3e38)
    check("size", np.float32(1e-30))
    for value in (-1, float("nan"), True, "1"):
        with pytest.raises(UserError, match=r"size must be (positive|at least 0), got "):
            check("size", value)
    for value in (float("inf"), 1e300, 10**400):
        with pytest.raises(UserError, match=r"size must be (positive, from 1.2e-38|from 0) to 3.4e\+38, got "):
            check("size", value)


def test_a_positive_number_is_not_0_in_float32() -> None:
    for check in (check_positive, lambda name, value: check_between(name, value, 0, 1, "(]")):
        with pytest.raises(UserError, match=r"size .*, from 1\.2e-38.*, got 1e-300"):
            check("size", 1e-300)


def test_very_long_values_are_cut() -> None:
    with pytest.raises(UserError, match=r"^runner 'a{23}…a{24}' is unknown; allowed: auto\.$"):
        check_choice("runner", "a" * 100_000, ("auto",))
    with pytest.raises(UserError, match=r"^rates must lie in \[0, 1\], got \[1, 1, .* … .*1, 1\]\.$") as caught:
        check_between("rates", [1] * 100_000, 0, 1)
    assert len(str(caught.value)) < 2100


def test_a_field_has_the_type_that_the_module_of_its_base_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a dataclass in another module than its base, with annotations that are text."""
    bases, module = ModuleType("bases"), ModuleType("parts")
    for found, lines in (
        (bases, "from fractions import Fraction\n@dataclass\nclass Base:\n    share: Fraction | None = None"),
        (module, "from bases import Base\n@dataclass\nclass Part(Base):\n    depth: int = 1"),
    ):
        monkeypatch.setitem(sys.modules, found.__name__, found)
        exec(f"from __future__ import annotations\nfrom dataclasses import dataclass\n{lines}", vars(found))
    assert {name: p.annotation for name, p in parameters_of(module.Part).items()} == {
        "share": Fraction | None,
        "depth": int,
    }


def test_the_parameters_of_a_class_are_those_of_its_constructor_now() -> None:
    class Part:
        def __init__(self, rate: float, *, depth: int = 2) -> None: ...

    def replaced(self: Any, width: int) -> None: ...

    parameters_of(Part).clear()
    assert {name: p.annotation for name, p in parameters_of(Part).items()} == {"rate": float, "depth": int}
    Part.__init__ = replaced  # type: ignore[assignment,method-assign]
    assert list(parameters_of(Part)) == ["width"]
