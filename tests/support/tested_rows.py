"""Tables of the documents whose rows name what holds, and the tests that stand behind each row."""

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
Rows = Mapping[str, Sequence[tuple[str, str]]]
"""Files and names of tests by the first words of a row."""


def first_cells(text: str) -> list[str]:
    """Return the first cell of each row of each table, without the heads."""
    lines = text.splitlines()
    heads = {number for number, line in enumerate(lines) if number + 1 < len(lines) and lines[number + 1][:4] == "|---"}
    rows = [line for number, line in enumerate(lines) if re.match(r"\| ", line) and number not in heads]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows]


def check_rows(cells: Iterable[str], rows: Rows) -> None:
    """Check that each row has its tests, and that these belong to one row each."""
    by_row = {cell: max((words for words in rows if cell.startswith(words)), key=len, default=None) for cell in cells}
    assert {cell: found for cell, found in by_row.items() if found is None} == {}, "rows without a test"
    assert sorted(map(str, by_row.values())) == sorted(rows), "a test for each row, and a row for each test"


def check_tests(rows: Rows) -> None:
    """Check that the tests exist, run in a plain `pytest`, and are not skipped."""
    for file, name in {test for tests in rows.values() for test in tests}:
        found = [function for function in functions_of(file) if function.name == name]
        assert len(found) == 1, f"{file} has no {name}"
        marks = " ".join(map(ast.unparse, found[0].decorator_list))
        assert "mark.skip" not in marks
        assert "mark.slow" not in marks


@cache
def functions_of(file: str) -> list[ast.FunctionDef]:
    """Return the functions of a file of tests."""
    body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
    return [node for node in body if isinstance(node, ast.FunctionDef)]
