"""Build the algorithm that `fit` is given in Python: an object, a name, or a mapping as in a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from pydoc import locate
from typing import Any

from lightning_fl import algorithms
from lightning_fl.algorithms import Algorithm, FedAvg
from lightning_fl.errors import nearest, require

Given = Algorithm | str | Mapping[str, Any]
"""An algorithm, the name of one, or a mapping with `class_path` and, for its parameters, `init_args`."""


def algorithm_of(given: Given | None) -> Algorithm:
    """Return the algorithm that a user means; FedAvg for None.

    >>> algorithm_of({"class_path": "FedProx", "init_args": {"mu": 0.1}}).rule
    Proximal(mu=0.1)

    Raises:
        UserError: there is no such algorithm, or it does not have a parameter.
    """
    if given is None:
        return FedAvg()
    if isinstance(given, Algorithm):
        return given
    own_name = getattr(given, "__name__", "")
    require(
        not isinstance(given, type),
        f"algorithm is the class {own_name}: give an object, {own_name}(…), or its name.",
    )
    given = {"class_path": given} if isinstance(given, str) else given
    require(
        isinstance(given, Mapping),
        f"algorithm must be an Algorithm, its name, or a mapping with class_path and init_args, got {given!r}.",
    )
    require(
        "class_path" in given and given.keys() <= {"class_path", "init_args"},
        f"algorithm as a mapping has the keys class_path and init_args, got {', '.join(map(str, given))}.",
    )
    name, arguments = str(given["class_path"]), given.get("init_args", {})
    known = {known: getattr(algorithms, known) for known in algorithms.__all__}
    found: Any = known.get(name) or (locate(name) if "." in name else None)
    require(
        isinstance(found, type) and issubclass(found, Algorithm),
        f"algorithm {name!r} is unknown; {nearest(name.rpartition('.')[2], known)}.",
    )
    require(
        isinstance(arguments, Mapping),
        f"init_args of {found.__name__} must be a mapping with its parameters, got {arguments!r}.",
    )
    parameters = signature(found).parameters
    takes_any = any(parameter.kind == Parameter.VAR_KEYWORD for parameter in parameters.values())
    for argument in arguments:
        require(
            takes_any or argument in parameters,
            f"{found.__name__} has no parameter {argument!r}; {nearest(str(argument), parameters)}.",
        )
    return found(**arguments)
