"""Test that a YAML file is read as it is now, however often it was read before."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_fl.errors import UserError
from lightning_fl.outputs.yaml_files import read_strictly, read_written


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
