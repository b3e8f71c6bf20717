"""Configurations that come with the package: `--config feddumap/cnn_cifar10` names one from any folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

import yaml

from lightning_fl.errors import UserError, nearest, require

PACKAGE = Path(__file__).parents[1]
SUFFIX = ".yaml"
STUDIES = "studies"
NO_RUN = ("sweeps", STUDIES)
"""Folders of files that are not configurations of a run."""


def folder() -> Path:
    """Return the folder of the configurations: inside the installed package, or beside it in the repository."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def names() -> list[str]:
    """Return the names of the configurations, such as `feddumap/cnn_cifar10`."""
    paths = [path.relative_to(folder()) for path in folder().rglob(f"*{SUFFIX}")]
    return sorted(path.with_suffix("").as_posix() for path in paths if path.parts[0] not in NO_RUN)


def method_of(name: str) -> str:
    """Return the method of a configuration; empty if it names none."""
    method = yaml.safe_load((folder() / f"{name}{SUFFIX}").read_text(encoding="utf-8")).get("algorithm", "")
    return str(method if isinstance(method, str) else method["class_path"])


def find(value: str) -> str:
    """Return the path of a configuration: the file with this path, or else the shipped one with this name.

    Args:
        value: value of --config; YAML, a URL and standard input are returned as they are.

    Raises:
        UserError: there is no such file or name.
    """
    require(value.strip() != "", "--config needs the name of a file, got an empty one.")
    path = os.path.expanduser(value)
    if os.path.isfile(path) or path.startswith("-") or "://" in path or is_yaml(value):
        return value
    name = _name(Path(path).as_posix())
    if os.path.exists(path) and name not in names():  # a pipe, for instance; a folder is refused by the parser
        return value
    if name in names():
        return str(folder() / f"{name}{SUFFIX}")
    siblings = {_name(str(file)): str(file) for file in Path(path).parent.glob(f"*{SUFFIX}")}
    close = get_close_matches(name, [*names(), *siblings], n=1)
    hint = (
        f"did you mean {siblings.get(close[0], close[0])!r}?"
        if close
        else "lightning-fl list configs shows the package's configurations."
    )
    raise UserError(f"--config: File does not exist: {os.path.abspath(path)!r}; {hint}")


def is_yaml(value: str) -> bool:
    """True if a value of --config is a configuration itself, not the name or the address of one.

    >>> [is_yaml(value) for value in ("{seed_everything: 1}", "seed_everything: 1", "quickstart", "-", "s3://bucket/a.yaml")]
    [True, True, False, False, False]
    """
    return re.search(r"^\s*\{|:\s", value) is not None


def find_study(value: str) -> Path:
    """Return the path of a study file: the file with this path, or else the shipped one with this name.

    Raises:
        UserError: there is no such file or name.
    """
    path = Path(value).expanduser()
    if path.is_file():
        return path
    name, shipped = _study_name(path), _shipped_studies()
    require(
        name in shipped, f"there is no study file {value!r}; among the package's studies, {nearest(name, shipped)}."
    )
    return shipped[name]


def _shipped_studies() -> dict[str, Path]:
    """Return the package's studies by name."""
    return {path.stem: path for path in (folder() / STUDIES).glob(f"*{SUFFIX}")}


def _study_name(path: Path) -> str:
    """Return the name of a study that a path could mean."""
    return _name(path.as_posix()).removeprefix(f"{STUDIES}/")


def is_study(value: str) -> bool:
    """True if an argument of a report is a study file, or the name of one of the package's, and not a folder of runs."""
    path = Path(value).expanduser()
    return not path.is_dir() and (path.suffix in (SUFFIX, ".yml") or _study_name(path) in _shipped_studies())


def with_paths(words: Sequence[str]) -> list[str]:
    """Return a command line with the paths of the configurations that it names.

    >>> with_paths(["fit", "--config={trainer: {}}", "--trainer.max_rounds", "3"])
    ['fit', '--config={trainer: {}}', '--trainer.max_rounds', '3']
    """
    places = dict(_places(words))
    return [places.get(i, word) for i, word in enumerate(words)]


def given_paths(words: Sequence[str]) -> list[str]:
    """Return the paths of the configurations in a command line."""
    return [word.removeprefix("--config=") for _, word in _places(words)]


def _places(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the position and the new text of each word that names a configuration."""
    for i, word in enumerate(words):
        if word.startswith("--config="):
            yield i, f"--config={find(word.removeprefix('--config='))}"
        elif i and words[i - 1] in ("-c", "--config"):
            yield i, find(word)


def _name(path: str) -> str:
    """Return the name that a path could mean, without `configs/` and `.yaml`."""
    return path.removeprefix("./").removeprefix("configs/").removesuffix(SUFFIX)
