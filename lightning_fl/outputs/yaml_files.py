"""YAML files, read within limits, and users' files also strictly, because YAML silently drops and misreads values."""

from __future__ import annotations

import os
import re
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from lightning_fl.errors import UserError, require

MAX_VALUES = 100_000
MAX_DEPTH = 100


def read_strictly(path: str | os.PathLike[str], allowed: str) -> Any:
    """Return the content of a file that a user has written.

    Args:
        path: path of the file.
        allowed: end of the sentence about a file that is not text, such as "a study is YAML with the keys base, seeds".

    Raises:
        UserError: the file cannot be read, is not text or not YAML, grows without bound, or has a key twice, a class_path without
            a name, or a number such as 010, which YAML reads as 8.
    """
    return _read(path, True, MAX_VALUES, allowed)


def parse_strictly(text: str, name: str) -> Any:
    """Return the content of YAML that a user has written on a command line, where `name` says.

    Raises:
        UserError: as `read_strictly`.
    """
    return deepcopy(_content(text, name, True, MAX_VALUES))


def read_written(path: str | os.PathLike[str]) -> Any:
    """Return the content of a file that a program has written, however long; only aliases must not make it longer.

    Raises:
        UserError: the file cannot be read, is not text or not YAML, or grows without bound.
    """
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    return _read(path, False, max(MAX_VALUES, size), "it must be YAML")


def _read(path: str | os.PathLike[str], strictly: bool, most: int, allowed: str) -> Any:
    try:
        require(os.path.isfile(path), f"{path} is not a file.")
        return deepcopy(_content(Path(path).read_text(encoding="utf-8"), str(path), strictly, most))
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file: {allowed}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error


@lru_cache(maxsize=1000)  # a command reads the configurations of its runs several times
def _content(text: str, name: str, strictly: bool, most: int) -> Any:
    """Return the content of a YAML text whose size with all aliases written out is within bounds."""
    try:
        loader = _StrictLoader(text) if strictly else _BoundedLoader(text)
        loader.name = name
        node = loader.get_single_node()
        if node is None:
            return None
        _check_extent(node, name, most)
        return loader.construct_document(node)
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{name} is nested more than {MAX_DEPTH} levels deep.") from None
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{name} is not valid YAML: {_reason(error)}.") from error
    except Exception as error:  # a date or a number that does not exist raises any type of error
        raise UserError(f"{name} is not valid YAML: {' '.join(str(error).split())}.") from error


def _reason(error: yaml.MarkedYAMLError) -> str:
    """Return the parser's reason with its line, and the line in which the part that it was reading begins."""
    mark, begin = error.problem_mark, error.context_mark
    where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
    context = "" if begin is None or error.context is None else f", {error.context} from line {begin.line + 1}"
    return f"{error.problem}{where}{context}"


def _check_extent(root: yaml.Node, name: str, most: int) -> None:
    """Refuse a document that contains itself, or that is huge with its aliases written out: the parser walks each of them."""
    extents: dict[yaml.Node, tuple[int, int]] = {}
    inside: set[yaml.Node] = set()

    def extent(node: yaml.Node) -> tuple[int, int]:
        """Return the number of values and of levels of a node."""
        where = f"the value in line {node.start_mark.line + 1} of {name}"
        require(node not in inside, f"{where} contains itself, by an alias (*) of its own anchor (&).")
        if node not in extents:
            inside.add(node)
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            sizes = [extent(part) for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
            inside.remove(node)
            extents[node] = 1 + sum(count for count, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)
            count, levels = extents[node]
            require(count <= most, f"{where} has more than {most:,} values with its aliases (*) written out.")
            require(levels <= MAX_DEPTH, f"{where} is nested more than {MAX_DEPTH} levels deep.")
        return extents[node]

    extent(root)


class _BoundedLoader(yaml.SafeLoader):
    """Loader that refuses characters that no file or command can hold, and too deep nesting, at once."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node: to find the end of thousands of open brackets would take seconds."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            line = self.peek_event().start_mark.line + 1
            raise UserError(f"the value in line {line} of {self.name} is nested more than {MAX_DEPTH} levels deep.")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_scalar(self, node: Any) -> Any:
        """Return the text of a node."""
        text = super().construct_scalar(node)
        is_text = "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)
        require(is_text, f"{self.name} has a character in line {node.start_mark.line + 1} that is no text: {text!a}.")
        return text


class _StrictLoader(_BoundedLoader):
    """Loader that refuses a mapping with a key twice, of which YAML would keep only the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                twice = f"{self.name} has the key {key.value} twice in one mapping, the second in line {line}."
                require(key.value not in seen, twice)
                seen.add(key.value)
            require(
                getattr(key, "value", None) != "class_path" or value.tag != "tag:yaml.org,2002:null",
                f"{self.name} has a class_path without the name of a class in line {key.start_mark.line + 1}.",
            )
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Return a number as YAML 1.1 reads it; refuse one that most readers read otherwise, such as 010 or 1:30."""
        construct = self.construct_yaml_int if node.tag.endswith(":int") else self.construct_yaml_float
        number = construct(node)
        require(
            not is_misread(node),
            f"{self.name} has {node.value} in line {node.start_mark.line + 1}, which YAML reads as {number}: write {number}, or "
            f"'{node.value}' in quotes for the text.",
        )
        return number


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_number)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _StrictLoader.construct_number)


def is_too_deep(text: str) -> bool:
    """True if a text is YAML that is nested more than `MAX_DEPTH` levels deep."""
    try:
        _BoundedLoader(text).get_single_node()
    except UserError:
        return True
    except yaml.YAMLError:
        pass
    return False


def is_misread(node: yaml.Node) -> bool:
    """True for a number in base 8 or 60, which most readers take for another."""
    is_whole = isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int")
    is_number = is_whole or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":float"))
    return is_number and (":" in node.value or (is_whole and bool(re.match(r"[-+]?0[\d_]", node.value))))
