"""Files of LEAF (arXiv:1812.01097): JSON with `users`, `num_samples` and `user_data`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fl.errors import UserError, require


@dataclass(frozen=True)
class User:
    """Samples of a user in a file; `place` names the file and the user in error messages."""

    name: str
    x: list
    y: list
    place: str


def read_json(file: Path) -> Any:
    """Return the content of a JSON file."""
    require(file.is_file(), f"{file} is no file.")  # a pipe would never end
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}, line {error.lineno}, is not JSON ({error.msg}).") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not readable ({error}).") from error
    except (RecursionError, ValueError) as error:  # brackets nested too deeply, or a number too long
        raise UserError(f"{file} is not JSON that can be read ({error}).") from error


def read_users(file: Path, counted: bool = True) -> Iterator[User]:
    """Yield the users of a file, with lengths checked. Unless `counted`, num_samples may differ or be missing."""
    content = read_json(file)
    needed = {"users": list, "user_data": dict} | ({"num_samples": list} if counted else {})
    for key, kind in needed.items():
        require(
            isinstance(content, dict) and isinstance(content.get(key), kind),
            f"{file} is no file of LEAF: it lacks a {'mapping' if kind is dict else 'list'} {key!r} beside users, num_samples "
            "and user_data.",
        )
    users, data = content["users"], content["user_data"]
    sizes = content["num_samples"] if counted else [None] * len(users)
    require(len(users) == len(sizes), f"{file} has {len(users):,} users but {len(sizes):,} num_samples.")
    unnamed = next((user for user in users if type(user) not in (str, int)), "")
    require(unnamed == "", f"{file} has the user {unnamed!r} in users: name every user by text or a whole number.")
    require("" not in users, f"{file} has a user whose name is empty in users: name every user.")
    require(len({str(user) for user in users}) == len(users), f"{file} names a user twice in users.")
    extra = sorted(data.keys() - {str(user) for user in users})
    require(not extra, f"{file} has user_data of {', '.join(map(repr, extra[:3]))}, which users does not name.")
    for user, size in zip(map(str, users), sizes, strict=True):
        place = f"{file}, user {user!r}"
        samples = data.pop(user, None)
        require(
            isinstance(samples, dict) and all(isinstance(samples.get(key), list) for key in "xy"),
            f"{place}: user_data lacks the lists x and y.",
        )
        lengths = len(samples["x"]), len(samples["y"])
        said = f"num_samples is {size!r}, but " if counted else ""
        require(
            lengths == ((size, size) if counted else lengths[:1] * 2),
            f"{place}: {said}x has {lengths[0]:,} samples and y {lengths[1]:,}.",
        )
        yield User(user, samples["x"], samples["y"], place)
