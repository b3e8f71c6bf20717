"""Test that annotations say what parameters may be."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, fields, is_dataclass, replace
from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np
import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt

import lightning_fl
from lightning_fl.algorithms import Method
from lightning_fl.checks import (
    MOST,
    Called,
    Checked,
    Rounds,
    check_above,
    check_at_least,
    check_between,
    check_choice,
    check_positive,
    check_rounds,
    check_whole,
    checked,
)
from lightning_fl.data import Digits, FederatedDataModule
from lightning_fl.errors import UserError
from lightning_fl.slots import Rule

if TYPE_CHECKING:
    from fractions import Fraction


class Shown(Protocol):
    """Whatever can be shown."""

    def show(self) -> None:
        """Show it."""


NUMBERS = [0, 1, -1, 3, 5, 0.0, 0.5, 1.0, 1.5, 1e-300, 1e300, 10**10, float("nan"), float("inf")]
VALUES: list[Any] = [*NUMBERS, np.int64(3), np.float32(0.5), True, None, "1", "b", []]
CHECKS: list[tuple[Any, Callable[[Any], None]]] = [
    (Annotated[int, Ge(1)], lambda x: check_whole("x", x, 1)),
    (Annotated[int, Gt(0)], lambda x: check_whole("x", x, 1)),
    (Annotated[int, Interval(ge=1, le=4)], lambda x: check_whole("x", x, 1, 4)),
    (Annotated[int, Ge(1), Lt(5)], lambda x: check_whole("x", x, 1, 4)),
    (Annotated[int, Le(4)], lambda x: check_whole("x", x, -MOST, 4)),
    (Annotated[float, Ge(1)], lambda x: check_at_least("x", x, 1)),
    (Annotated[float, Gt(0)], lambda x: check_positive("x", x)),
    (Annotated[float, Gt(1)], lambda x: check_above("x", x, 1)),
    (Annotated[float, Interval(ge=0, lt=1)], lambda x: check_between("x", x, 0, 1, "[)")),
    (Annotated[float, Interval(gt=0, le=1)], lambda x: check_between("x", x, 0, 1, "(]")),
    (Annotated[float, Ge(0), Le(1)], lambda x: check_between("x", x, 0, 1)),
    (Annotated[float, Called("{} of {kind}"), Interval(gt=0, lt=1)], lambda x: check_between("x of P", x, 0, 1, "()")),
    (Annotated[int | float, Rounds()], lambda x: check_rounds("x", x)),
    (Literal["a", "b"], lambda x: check_choice("x", x, ("a", "b"))),
    (Literal["a", 1], lambda x: check_choice("x", x, ("a", 1))),
    (Literal["a"] | None, lambda x: check_choice("x", x, ("a", None))),
    (bool, lambda x: check_choice("x", x, (False, True))),
    (bool | Literal["b"], lambda x: check_choice("x", x, (False, True, "b"))),
    (Annotated[float, Ge(0)] | None, lambda x: None if x is None else check_at_least("x", x, 0)),
    (Annotated[float | None, Ge(0)], lambda x: None if x is None else check_at_least("x", x, 0)),
    (Annotated[float, Ge(0)] | Literal["a"], lambda x: check_at_least("x", x, 0)),
    (
        Annotated[float, Ge(0)] | Literal["a", "c"],
        lambda x: check_choice("x", x, ("a", "c")) if isinstance(x, str) else check_at_least("x", x, 0),
    ),
    (
        Annotated[int, Ge(1), Called("count x")] | Annotated[float, Interval(gt=0, le=1)],
        lambda x: check_whole("count x", x, 1) if _is_whole(x) else check_between("x", x, 0, 1, "(]"),
    ),
    (Annotated[float, Gt(0)] | list, lambda x: None if isinstance(x, list) else check_positive("x", x)),
    (Literal["a"] | str, lambda x: None if isinstance(x, str) else check_choice("x", x, ("a",))),
    (bool | Shown, lambda x: None),
    (float | None, lambda x: None),
    (Any, lambda x: None),
]
"""Annotations, and the checks by hand that say the same."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def sentence(check: Callable[[], Any]) -> str:
    """Return what refuses, or "" if nothing does."""
    try:
        check()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("annotation", "by_hand"), CHECKS)
def test_an_annotation_refuses_as_a_check_by_hand_does(annotation: Any, by_hand: Callable[[Any], None]) -> None:
    P = dataclass(frozen=True)(type("P", (Checked,), {"__annotations__": {"x": annotation}, "__module__": __name__}))  # noqa: N806

    @checked
    def take(x: Any) -> None: ...

    take.__wrapped__.__annotations__["x"] = annotation  # type: ignore[attr-defined]
    take.__wrapped__.__qualname__ = "P"  # type: ignore[attr-defined]
    for value in VALUES:
        expected = sentence(lambda value=value: by_hand(value))
        assert sentence(lambda value=value: P(value)) == expected
        assert sentence(lambda value=value: P(x=value)) == expected
        assert sentence(lambda value=value: take(value)) == expected
        assert sentence(lambda value=value: take(x=value)) == expected


@dataclass(frozen=True)
class Halved(Rule):
    """A user's part with a `__post_init__` that calls no other."""

    share: Annotated[float, Interval(gt=0, le=1)] = 0.5
    scale: InitVar[float] = 1.0
    of: Fraction | None = None
    marked: bool = None  # type: ignore[assignment]
    print_it: bool = False

    def __post_init__(self, scale: float) -> None:
        object.__setattr__(self, "share", self.share * scale)


@dataclass(frozen=True)
class Thirds(Halved):
    """A part with another default."""

    share: float = 0.3
    of: Any = None


def test_ranges_hold_before_and_without_the_post_init_of_a_users_part() -> None:
    assert Halved(0.5, 3.0).share == 1.5
    for kind in (Halved, Thirds):
        with pytest.raises(UserError, match=r"^share must lie in \(0, 1\], got 2\.0\.$"):
            kind(2.0)
    assert Thirds().share == 0.3


def test_copies_are_checked_and_pickles_are_not() -> None:
    part = Halved(0.5, 3.0)
    assert pickle.loads(pickle.dumps(part)) == part
    assert replace(Thirds(), share=1, scale=1.0).share == 1
    with pytest.raises(UserError, match="share must lie"):
        replace(part, scale=1.0)


def test_a_default_is_allowed_also_if_given() -> None:
    assert Halved(marked=None).marked is None  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^print_it None is unknown; allowed: False, True\.$"):
        Halved(print_it=None)  # type: ignore[arg-type]


def test_a_range_that_cannot_be_read_is_named() -> None:
    local = Ge

    @dataclass(frozen=True)
    class Local(Checked):
        count: Annotated[int, local(1)] = 1
        other: Annotated[int, Ge(1)] = 1
        kind: Literal["a"] | Fraction = "a"

    with pytest.warns(UserWarning, match="may have any value, because its annotation cannot be read") as caught:
        assert Local(0).count == 0
    assert [str(one.message).partition(" may ")[0] for one in caught] == ["count of Local", "kind of Local"]
    with pytest.raises(UserError, match="other must be a whole number of at least 1, got 0"):
        Local(other=0)


def test_arguments_of_a_users_method_are_checked() -> None:
    class Own(Method):
        def __init__(self, *, mu: Annotated[float, Ge(0)] = 0.1, **slots: Any) -> None:
            super().__init__(**slots)

    assert Own(mu=1).given_arguments["mu"] == 1
    with pytest.raises(UserError, match="mu must be at least 0, got -1"):
        Own(mu=-1)


def test_arguments_of_functions_are_checked_in_their_order() -> None:
    @checked
    def take(*, first: Annotated[int, Ge(1)], second: Annotated[int, Ge(1)] = 1) -> None: ...

    with pytest.raises(UserError, match="first must"):
        take(second=0, first=0)
    with pytest.raises(TypeError, match="first"):
        take()


def ranged() -> Iterator[Any]:
    """Yield what a parameter with a range belongs to, a function or a class that can be made, and the parameter's name."""
    for module in walk_packages(lightning_fl.__path__, "lightning_fl."):
        for name, found in vars(import_module(module.name)).items():
            if getattr(found, "__module__", None) != module.name:
                continue
            if is_dataclass(found):
                annotations = {field.name: field.type for field in fields(found)}
            else:
                function = vars(found).get("__init__") if isinstance(found, type) else found
                annotations = getattr(function, "__annotations__", {})
            for parameter, annotation in annotations.items():
                if "Annotated[" in str(annotation) and (not inspect.isabstract(found) or found is FederatedDataModule):
                    yield pytest.param(
                        Digits if inspect.isabstract(found) else found, parameter, id=f"{name}.{parameter}"
                    )


@pytest.mark.parametrize(("found", "parameter"), list(ranged()))
def test_every_range_of_the_package_is_checked(found: Any, parameter: str) -> None:
    needed = [one.name for one in fields(found) if one.default is one.default_factory] if is_dataclass(found) else []
    with pytest.raises(UserError, match=r" must | is unknown; "):
        found(**dict.fromkeys([*needed, parameter], object()))
