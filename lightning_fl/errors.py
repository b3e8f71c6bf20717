"""Errors that the user can fix: one sentence with the given value, the allowed values and, for names, the nearest match."""

from __future__ import annotations

import textwrap
from argparse import ArgumentParser, HelpFormatter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn

MOST_CHARACTERS = 2000
"""Longest sentence."""


class UserError(ValueError):
    """Error in the user's input: the command line prints its sentence and exits with code 2; in Python it is a ValueError."""

    def __init__(self, sentence: str) -> None:
        super().__init__(shortened(sentence))


def shortened(sentence: str) -> str:
    """Return a sentence without the middle of very long words, and of the sentence if it is still very long.

    >>> shortened("network 'a" + 100_000 * "h" + "' is unknown")
    "network 'ahhhhhhhhhhhhhhhhhhhhhh…hhhhhhhhhhhhhhhhhhhhhhhh' is unknown"
    """
    words = [f"{word[:24]}…{word[-25:]}" if len(word) > MOST_CHARACTERS // 2 else word for word in sentence.split(" ")]
    text, half = " ".join(words), MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} … {text[-half:]}"


class FileError(OSError):
    """File of a run that cannot be written or read on; the command line prints its sentence and exits with code 1."""


class MissingFileError(UserError, FileNotFoundError):
    """File that the user names, but that does not exist: a `UserError`, and also Python's own exception."""


def nearest(word: str, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of an error sentence about an unknown name.

    >>> nearest("FedAgv", ["FedAvg", "FedProx"])
    "did you mean 'FedAvg'? Allowed: FedAvg, FedProx"
    >>> nearest("zzz", ["FedAvg", "FedProx"])
    'allowed: FedAvg, FedProx'
    >>> nearest("mu", [])
    'allowed: none'

    Args:
        word: the unknown name.
        allowed: all known names.
        cutoff: likeness, from 0 to 1, that the nearest name must have.
    """
    names = sorted(allowed)
    lower = {name.lower(): name for name in reversed(names)}
    match = get_close_matches(word.lower(), lower, n=1, cutoff=cutoff)
    listed = ", ".join(names) or "none"
    return f"did you mean '{lower[match[0]]}'? Allowed: {listed}" if match else f"allowed: {listed}"


@contextmanager
def noting(note: Callable[[], str]) -> Iterator[None]:
    """Add a sentence to every error that is raised inside, such as which client was training."""
    try:
        yield
    except Exception as error:
        add_note(error, note())
        raise


def add_note(error: Exception, note: str) -> None:
    """Add a sentence to an error, which its traceback shows below the message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
        return
    vars(error).setdefault("__notes__", []).append(note)  # before Python 3.11, whose tracebacks show the message alone
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def require(condition: bool, sentence: str) -> None:
    """Raise `UserError(sentence)` unless `condition` holds."""
    if not condition:
        raise UserError(sentence)


@contextmanager
def collecting(sentences: list[str]) -> Iterator[None]:
    """Add the sentence of a `UserError` in the block to a list, in place of raising it."""
    try:
        yield
    except UserError as error:
        sentences.append(str(error))


class WholeWords(HelpFormatter):
    """Formatter of a command's help that breaks no flag and no path at its hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))


class CommandParser(ArgumentParser):
    """Parser of a command's whole flags that raises a `UserError`, so that the command ends with one sentence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=WholeWords, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise the sentence about a mistake."""
        word = message.rpartition(": ")[2].partition(" ")[0].partition("=")[0]
        if "unrecognized arguments" in message and word.startswith("-"):
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            raise UserError(f"{self.prog} has no flag {word}; {nearest(word, flags)}.")
        raise UserError(f"{self.prog}: {message}.")
