"""Test that every number that a class takes is refused outside its range: infinite, not a number, or absurdly large."""

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from inspect import signature
from math import inf, nan
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from all_classes import GIVEN, classes

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.algorithms._adam import AdamOnClients
from lightning_fl.algorithms._feddumap import AdaptivelyPruned, DynamicallyUpdated
from lightning_fl.checks import parameters_of
from lightning_fl.slots import Part

ABSURD = (inf, -inf, nan, 1e300, -1e300, 10**39, -(10**39), 10**400)


def numbers() -> Iterator[tuple[type, str]]:
    """Yield each class and parameter that takes a number."""
    for found in classes():
        inherited = {name: parameter.annotation for name, parameter in parameters_of(found).items()}
        for name, hint in (get_type_hints(found) if is_dataclass(found) else inherited).items():
            if any(kind in (int, float) for kind in (hint, *get_args(hint))):
                yield found, name


def needed_by(found: type, folder: Path) -> dict[str, Any]:
    """Return arguments with which a class can be made."""
    quiet = {"default_root_dir": folder, "accelerator": "cpu"} if found is FederatedTrainer else {}
    return quiet | GIVEN.get(found.__name__, {})


@pytest.mark.long
def test_absurd_numbers_are_refused_in_a_sentence(tmp_path: Path) -> None:
    wrong = []
    for found, name in numbers():
        given = needed_by(found, tmp_path)
        if (said := answer(found, given)) != "taken":
            wrong.append(f"{found.__name__}: {said}")
        for value in ABSURD:
            said = answer(found, {**given, name: value})
            if not said.startswith("UserError: ") or "\n" in said or len(said) > 1000:
                wrong.append(f"{found.__name__}({name}={value!r:.40}): {said}")
    assert wrong == []


def inner_parts() -> Iterator[tuple[type, str, type[Part]]]:
    """Yield each part and parameter that takes another part, and the base class of that one."""
    for found in classes():
        if is_dataclass(found) and issubclass(found, Part):
            for name, hint in get_type_hints(found).items():
                for kind in (hint, *get_args(hint)):
                    if isinstance(kind, type) and issubclass(kind, Part) and get_origin(hint) is not tuple:
                        yield found, name, kind


def test_parts_inside_others_are_objects() -> None:
    wrong, found_any = [], set()
    for found, name, kind in inner_parts():
        found_any.add(found.__name__)
        given = GIVEN.get(found.__name__, {})
        for value in (kind, kind.__name__, object()):
            said = answer(found, {**given, name: value})
            if not said.startswith("UserError: ") or f"{value!r}" not in said or "\n" in said:
                wrong.append(f"{found.__name__}({name}={value!r:.40}): {said}")
    assert wrong == []
    assert found_any >= {"ErrorFeedback", "TopK", "Followed", "Compress", "Bucketing", "GradientTurn"}


def answer(found: type, given: dict[str, Any]) -> str:
    """Return the error of a constructor, or "taken"."""
    try:
        found(**given)
    except Exception as error:
        kind = UserError if isinstance(error, UserError) else type(error)
        return f"{kind.__name__}: {error}"
    return "taken"


def documented_range(found: type, name: str) -> str:
    """Return the text about a parameter, from its class or a base class."""
    for owner in found.__mro__:
        for text in (owner.__dict__.get("__doc__"), getattr(owner.__dict__.get("__init__"), "__doc__", None)):
            if said := re.search(
                rf"^ +{name}: (.*?)(?=^ +\w+: |^ *\n|\Z)", (text or "") + "\n", re.MULTILINE | re.DOTALL
            ):
                return " ".join(said[1].split())
    return ""


INTERVAL = re.compile(r"in ([\[(])(\d[\d.]*), (\d[\d.]*)([\])])|, from (?P<low>\d+) to (?P<high>\d+)")
LEAST = re.compile(r"(?:(?:at least|, from) (\d+)|[A-Za-zτημλ_']+ ≥ (\d+))(?!\.?\d)")
ABOVE = re.compile(r"(?:above|>) 0(?!\.?\d)")


def ends(text: str, is_whole: bool) -> tuple[list[float], list[float]]:
    """Return values that a text allows, and values that it does not."""
    step = 1 if is_whole else 0.25
    if interval := INTERVAL.search(text):
        low, high = float(interval[2] or interval["low"]), float(interval[3] or interval["high"])
        allowed, refused = [(low + high) / 2] * (not is_whole), [low - step, high + step]
        (refused if interval[1] == "(" else allowed).append(low)
        (refused if interval[4] == ")" else allowed).append(high)
        return allowed, refused
    if least := LEAST.search(text):
        lowest = float(least[1] or least[2])
        return [lowest, lowest + 1], [lowest - step]
    return ([step], [0.0, -step]) if ABOVE.search(text) else ([], [])


def ranges() -> Iterator[tuple[type, str, list[float], list[float], bool]]:
    """Yield each number whose text states a range, with values inside and outside, and whether it is whole."""
    for found, name in numbers():
        hint = {**{n: p.annotation for n, p in parameters_of(found).items()}, **get_type_hints(found)}.get(name)
        kinds = {hint, *get_args(hint)}
        if {int, float} <= kinds:  # a count or a fraction
            continue
        is_whole = float not in kinds
        allowed, refused = ends(documented_range(found, name), is_whole)
        if refused:
            yield found, name, allowed, refused, is_whole


@pytest.mark.long
def test_the_documented_range_is_the_allowed_one(tmp_path: Path) -> None:
    """Check the ends of the range that the documentation states, and values just outside."""
    wrong, count = [], 0
    for found, name, allowed, refused, is_whole in ranges():
        has_mode = name == "rate" and found.__name__ not in ("IMC", "HRank") and "rate_mode" in parameters_of(found)
        given = needed_by(found, tmp_path) | ({"rate_mode": "fixed"} if has_mode else {})
        number = int if is_whole else float
        for value in allowed:
            said = answer(found, {**given, name: number(value)})
            if said != "taken" and name in said:
                wrong.append(f"{found.__name__}({name}={value}) is refused: {said}")
        answers = {value: answer(found, {**given, name: number(value)}) for value in refused}
        wrong += [
            f"{found.__name__}({name}={value}): {said}"
            for value, said in answers.items()
            if not said.startswith("UserError: ")
        ]
        count += 1
    assert wrong == []
    assert count > 150, "the texts state ranges"


def test_methods_of_a_paper_have_what_they_share_alike() -> None:
    """Each repeats the hyper-parameters that their base class describes, so that its own can stand between them."""
    differing, count = [], 0
    for base in (AdamOnClients, AdaptivelyPruned, DynamicallyUpdated):
        methods = [found for found in classes() if issubclass(found, base)]
        assert len(methods) > 2
        for name in re.findall(r"^ +(\w+): ", (base.__doc__ or "").partition("Attributes:")[0], re.MULTILINE):
            given = [method for method in methods if name in signature(method.__init__).parameters]
            defaults = {signature(method.__init__).parameters[name].default for method in given}
            kinds = {get_type_hints(method.__init__)[name] for method in given}
            count += len(given)
            if len(defaults) != 1 or len(kinds) != 1:
                differing.append((base.__name__, name, defaults, kinds))
    assert differing == []
    assert count > 80
