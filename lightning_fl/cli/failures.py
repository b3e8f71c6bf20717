"""Errors of a run that the user can fix, as sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from errno import ENAMETOOLONG
from importlib.metadata import PackageNotFoundError, requires

from lightning_fl.errors import FileError, UserError


def file_error_of(error: BaseException) -> FileError | None:
    """Return the error of a run's file among `error` and its causes; None without."""
    return next((cause for cause in causes_of(error) if isinstance(cause, FileError)), None)


def sentence_of(error: BaseException) -> str | None:
    """Return on one line the user's mistake, or the missing package, among `error` and its causes; None without."""
    causes = list(causes_of(error))
    mistakes = [cause for cause in causes if _is_users(cause)]
    if mistakes:
        return " ".join(_words(mistakes[0]).split())
    texts = [str(cause) for cause in causes if isinstance(cause, ImportError)]
    commands = [command for text in texts for command in re.findall(r"pip install (?:-U )?['\w][^`\s]*", text)]
    named = re.search(r"class_path '(?:\w+\.)*(\w+)'|`([A-Z]\w+)`", "\n".join(map(str, causes)))
    owner = (named[1] or named[2]) if named else "a class of the configuration"
    return f"{owner} needs a package that is not installed: {_declared(commands[-1])}." if commands else None


def _declared(command: str) -> str:
    """Return the command with the version that this package asks for, if it asks for that package."""
    wanted = re.sub(r"[\s\"'<>=!~].*", "", command.split("install ")[-1].removeprefix("-U ").lstrip("'\""))
    try:
        requirements = requires("lightning-fl") or []
    except PackageNotFoundError:  # it is not installed, but runs from its source
        return command
    for given in (requirement.partition(";")[0].strip() for requirement in requirements):
        if re.match(rf"{re.escape(wanted)}(?![\w.-])", given, re.IGNORECASE):
            return f"pip install '{given}'"
    return command


def _is_users(error: BaseException) -> bool:
    """True for a mistake of the user; Lightning's are recognised without importing Lightning."""
    is_lightnings = type(error).__name__ == "MisconfigurationException"
    is_name = isinstance(error, OSError) and error.errno == ENAMETOOLONG
    return (
        isinstance(error, UserError) or is_lightnings or is_name or "Early stopping conditioned on metric" in str(error)
    )


def _words(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"the path {error.filename} cannot be used: {error.strerror}."
    return str(error)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the error that caused it, and so on."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
