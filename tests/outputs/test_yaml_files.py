"""Test that a YAML file is read as it is now, however often it was read before."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fl.errors import UserError
from lightning_fl.outputs.yaml_files import MAX_DEPTH, is_too_deep, parse_strictly, read_strictly, read_written


@pytest.mark.parametrize("read", [partial(read_strictly, allowed="a study is YAML"), read_written])
def test_what_was_read_before_changes_nothing(read: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("trainer: {max_rounds: 3}\n")
    read(path)["trainer"]["max_rounds"] = 4
    assert read(path) == {"trainer": {"max_rounds": 3}}
    path.write_text("trainer: {max_rounds: 5}\n")
    assert read(path) == {"trainer": {"max_rounds": 5}}


def test_a_text_that_is_read_first_as_written_is_still_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("rounds: 010\n")
    assert read_written(path) == {"rounds": 8}
    for _ in range(2):
        with pytest.raises(UserError, match="010 in line 1"):
            read_strictly(path, "a study is YAML")


@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ("{a: ", "}"), ("[1, ", "]")])
@pytest.mark.matrix
def test_what_is_nested_too_deeply_is_refused_without_reading_all_of_it(
    opened: str, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader composes no more levels than are allowed, however many follow."""
    levels = MAX_DEPTH - 1  # and a number in the innermost
    assert parse_strictly(opened * levels + "1" + closed * levels, "the text") is not None
    composed, compose = [], yaml.SafeLoader.compose_node
    monkeypatch.setattr(yaml.SafeLoader, "compose_node", lambda *a: composed.append(1) or compose(*a))
    text = opened * 5000 + closed * 5000
    with pytest.raises(UserError, match="the value in line 1 of the text is nested more than 100 levels deep"):
        parse_strictly(text, "the text")
    assert len(composed) < 6 * MAX_DEPTH
    assert is_too_deep(text)
    assert not is_too_deep("[" + "[1], " * 500 + "]"), "many brackets are not deep"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\n  b: 2", "mapping values are not allowed here in line 2, column 4."),
        (
            "a:\n- {b",
            "expected ',' or '}', but got '<stream end>' in line 2, column 5, while parsing a flow mapping from line 2.",
        ),
    ],
)
def test_what_is_no_yaml_is_refused_with_the_line(text: str, reason: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_strictly(text, "the text")
    assert str(refused.value) == f"the text is not valid YAML: {reason}"
