"""Test that a method can be read from top to bottom."""

import ast

import pytest

from lightning_fl.cli import catalogue, method_source
from lightning_fl.errors import UserError

METHODS = [entry for entry in catalogue.entries() if entry.section == "algorithms"]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_source_has_the_method_and_all_its_parts_in_the_order_of_a_round(method: catalogue.Entry) -> None:
    shown = [
        node.name for node in ast.parse(method_source.listing([method.name])).body if isinstance(node, ast.ClassDef)
    ]
    parts = [path.rpartition(".")[2] for slot in method_source.ROUND for path in method.slots.get(slot, ())]
    assert [name for name in shown if name in {method.name, *parts}] == [method.name, *parts]


def test_source_has_the_bases_of_the_same_file_and_decorators() -> None:
    shown = method_source.listing(["ServerYogi"])
    assert shown.index("class AdaptiveServer(") < shown.index("class ServerYogi(AdaptiveServer)")
    assert "@dataclass(frozen=True)\nclass Yogi(" in shown


@pytest.mark.parametrize(
    ("names", "said"),
    [([], "got none"), (["FedAvg", "FedProx"], "got FedAvg FedProx"), (["FedPro"], "did you mean 'FedProx'")],
)
def test_source_is_of_one_method(names: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        method_source.listing(names)
