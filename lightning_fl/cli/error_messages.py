"""Rewrite the parser's messages, which span many lines, as one sentence with the nearest match.

Only the key and the value are read from a message about a value; the key's type determines what is allowed.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from lightning_fl.checks import check_value, other_names, parameters_of
from lightning_fl.cli.class_names import BESIDE, CLASS_PACKAGES, class_misfit, classes_under, path_misfit
from lightning_fl.cli.type_descriptions import choices_of, in_words, members_of, shown
from lightning_fl.errors import collecting, nearest
from lightning_fl.trainer import FederatedTrainer
from lightning_fl.trainer.lightning_parts import STOCK_FLAGS

SECTIONS = ("data", "model", "algorithm", "optimizer", "lr_scheduler")
"""Keys of classes whose parameters a user may look for elsewhere."""

ABSTRACT = {base.__name__: key for key, (_, base) in CLASS_PACKAGES.items() if base.__name__ not in classes_under(key)}
"""Key of the configuration by the base class of the classes that it may name, which is not allowed itself."""

VALUES = (
    r"class_path '([^']*)'",
    r"[Ii]mport path (?:string: )?(\S+)",
    r"Expected a path but (.*) either not accessible",
    r"(?:Got|Given) value: (.*)",
)
"""Patterns of the value in a message, the most reliable last."""


def explain(message: str, parser: ArgumentParser) -> str:
    """Return one sentence for a message of jsonargparse that `parser` was about to print."""
    for pattern, explained in SENTENCES.items():
        if match := re.search(pattern, message):
            words = match.groups()
            return explained.format(*words) if isinstance(explained, str) else explained(parser, *words)
    key = re.search(r'[Kk]ey "([^"]+)"', message)
    values = [_named(value) for pattern in VALUES for value in re.findall(pattern, message)]
    values = [value for value in values if "Namespace(" not in value]
    misfit = _value_misfit(parser, key[1], _read(values[-1])) if key and values else None
    lines = re.sub(r'Parser key "([^"]+)"', r"\1", message).splitlines()
    return misfit or " ".join(line.strip(" -") for line in lines if line.strip())


# -------------------------------------------------------------------------------------------- names that do not exist


def unknown_variable(prefix: str, names: Iterable[str], parser: ArgumentParser) -> str | None:
    """Return the sentence for the first environment variable that seems to set a flag of `parser`, but does not.

    Args:
        prefix: start of the variables that set flags of the command, such as `PL_FIT__`.
        names: the variables.
        parser: parser of the command.
    """
    variables = {action.dest: prefix + action.dest.replace(".", "__").upper() for action in parser._actions}
    # Each flag that takes a class has another one, for the help of the class.
    of_classes = [variable.removesuffix("__HELP") for flag, variable in variables.items() if flag.endswith(".help")]
    for name in sorted(names):
        meant = prefix + name.removeprefix(prefix[:-1]).removeprefix("PL_")
        if name.startswith("PL_") and not name.startswith(prefix) and meant in variables.values():
            return f"the environment variable {name} sets no flag; did you mean {meant}?"
        if name.startswith(prefix) and name not in variables.values():
            key = name.removeprefix(prefix).replace("__", ".").lower()
            whole = next((variable for variable in of_classes if name.startswith(f"{variable}__")), None)
            remedy = (
                f"; {_nearest_key(key, parser)}."
                if whole is None
                else f": {whole} has a class with all its parameters, as in '{{class_path: NAME, init_args: {{KEY: VALUE}}}}'."
            )
            return f"the environment variable {name} sets no flag{remedy}"
    return None


def _unknown_name(parser: ArgumentParser, word: str) -> str:
    """Return the sentence for a flag with its dashes, or for a key of a mapping, that no parameter has."""
    name = word.lstrip("-")
    if hasattr(parser, "_inner_parser"):
        return _no_parameter(parser, name)
    group, _, flag = name.rpartition(".")
    if group == "trainer" and flag in STOCK_FLAGS:
        return f"{name} is a flag of lightning.Trainer that FederatedTrainer does not have: {STOCK_FLAGS[flag]}."
    commands: list[Any] = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    # All commands share the keys of `fit`.
    command = next((choices["fit"] for choices in commands if "fit" in choices), parser)
    shown_name = f"flag {word}" if word != name else f"parameter {name!r}"
    return f"there is no {shown_name}; {_nearest_key(name, command)}."


def _no_parameter(parser: ArgumentParser, name: str) -> str:
    """Return the sentence for a parameter that a class does not have."""
    owner, first = _class_of(parser), name.partition(".")[0]
    if name == "class_path":  # which the parser takes for a parameter if there are other keys
        return f"{BESIDE}."
    if owner in ABSTRACT:
        return f"{name!r} needs the class to which it belongs: {_naming(ABSTRACT[owner])}."
    classes = {class_name for key in CLASS_PACKAGES for class_name in classes_under(key)}
    if first in {"name", "type", "class", *classes} or get_close_matches(
        first, ("class_path", "init_args"), cutoff=0.8
    ):
        return f"a class takes only the keys class_path and, for its parameters, init_args; got {name!r}."
    flags = [word.partition("=")[0] for word in getattr(parser, "all_words", ())]
    for place, flag in enumerate(flags):
        section = flag.removesuffix(f".{name}")
        if section != flag and section in flags[place:] and section not in flags[:place]:
            return f"{flag} comes before the class of {section[2:]}: give {section} first, or name its class in a file."
    methods = classes_under("algorithm")
    if owner in methods and first in parameters_of(methods["Algorithm"]):
        return (
            f"{owner} has no parameter {name!r}, because it fills this slot itself: use --algorithm Algorithm, which takes "
            f"--algorithm.{first} and every other slot; a slot that you do not give has FedAvg's part."
        )
    return f"{owner} has no parameter {name!r}; {_nearest_key(name, parser)}."


def _no_class(_: ArgumentParser, key: str) -> str:
    """Return the sentence for parameters without the class that has them."""
    return f"{key} needs a class for its parameters: {_naming(key)}."


def _naming(key: str) -> str:
    """Return the end of the sentence: the place for the name of a class, and the allowed names."""
    return (
        f"name the class first, or in a file by class_path beside init_args; allowed: {', '.join(classes_under(key))}"
    )


def _missing(parser: ArgumentParser, keys: str) -> str:
    if hasattr(parser, "_inner_parser"):
        return f"{_class_of(parser)} needs {keys}."
    command = keys.partition(".")[0]
    flags = keys.replace(f"{command}.", "--").replace(", ", " and ")
    return f"{command} needs {flags}: name a class, or use a file that names one, such as --config FILE."


def _class_of(parser: ArgumentParser) -> str:
    """Return the name of the class whose parameters an inner parser reads."""
    return next(iter(getattr(parser, "groups", None) or {}), "the class")


def _nearest_key(word: str, parser: ArgumentParser) -> str:
    """Return the key with this name in another section, or the nearest of a parser's keys, with all of them if they are few."""
    keys = sorted({action.dest for action in parser._actions} - {"help", "print_completion", "subcommand"})
    group, _, name = word.rpartition(".")
    owner = _class_of(parser) if hasattr(parser, "_inner_parser") else None
    if owner is None and group in ("", "trainer") and name in other_names.FLAGS:
        return f"here it is {other_names.FLAGS[name]}"
    if owner is not None and (here := other_names.OF_OPTIMISERS.get(word)) in keys:
        return f"here it is {here}"
    if elsewhere := _key_elsewhere(name, group, owner, keys):
        return f"did you mean {elsewhere!r}? lightning-fl fit --help lists all"
    siblings = [key for key in keys if group and key.rpartition(".")[0] == group]
    few = siblings or [key for key in keys if "." not in key]
    if len(few) <= 15:
        return nearest(word, few)
    last_parts = {key.rpartition(".")[2]: key for key in few}  # the section alone is no likeness
    match = get_close_matches(name, last_parts, n=1)
    return (f"did you mean {last_parts[match[0]]!r}? " if match else "") + "lightning-fl fit --help lists all"


def _key_elsewhere(name: str, group: str, owner: str | None, keys: list[str]) -> str | None:
    """Return a key of this name of the data's partition or shift, or in another section than `group` or that of `owner`.

    None without such a key.
    """
    sections = {key: classes_under(key) for key in SECTIONS}
    home = group if owner is None else next((key for key, classes in sections.items() if owner in classes), None)
    if home is None:
        return None
    parts = [key for key in keys if key in CLASS_PACKAGES] if home == "data" else []
    if part := next((key for key in parts if any(name in parameters_of(c) for c in classes_under(key).values())), None):
        return f"{home}.{part}.{name}"
    flags = keys if owner is None else [f"trainer.{flag}" for flag in parameters_of(FederatedTrainer)]
    class_keys = [
        f"{key}.{name}" for key, section in sections.items() if any(name in parameters_of(c) for c in section.values())
    ]
    named = [key for key in flags if key.rpartition(".")[2] == name] + class_keys
    return next((key for key in named if key.rpartition(".")[0] not in (home, "")), None)


# ------------------------------------------------------------------------------------------------ values that do not fit


def _read(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return None if text == "null" else text


def _named(text: str) -> str:
    """Return the text of a list with the names of the classes that the parser has read already.

    >>> _named("[Namespace(class_path='a.B', init_args=Namespace(c=1)), {'class_path': 'D', 'e': 2}]")
    "['a.B', {'class_path': 'D', 'e': 2}]"
    """
    innermost, before = re.compile(r"Namespace\((?:class_path=('[^']*'))?[^()]*\)"), ""
    while text.startswith("[") and text != before:
        before, text = text, innermost.sub(lambda match: match[1] or "0", text)
    return text


def _value_misfit(parser: ArgumentParser, key: str, value: Any) -> str | None:
    """Return the error of a value, by the type of its key; None if the type is unknown."""
    shown_key = f"{key} of {_class_of(parser)}" if hasattr(parser, "_inner_parser") else key
    hint = next((getattr(a, "_typehint", None) or a.type for a in parser._actions if a.dest == key), None)
    if hint is None:
        return None
    if "Annotated[" in str(hint):  # the parser reads the range of a class without `from __future__ import annotations`
        sentences: list[str] = []
        with collecting(sentences):
            check_value(shown_key, value, hint)
        if sentences:
            return sentences[0]
    _, base = CLASS_PACKAGES.get(key.rpartition(".")[2], ([], None))
    if base is not None and base.__name__ in in_words(hint):
        misfit = class_misfit(value, key, shown_key)
        is_one_of_a_list = isinstance(value, str | dict) and in_words(hint).startswith("a list")
        return (
            f"{shown_key} must be a list, got {value}: give [{value}]." if is_one_of_a_list and not misfit else misfit
        )
    path = value.get("class_path") if isinstance(value, Mapping) else value
    takes_class = any(isinstance(one, type) and one.__module__ != "builtins" for one in members_of(hint))
    if (
        takes_class
        and isinstance(path, str)
        and re.fullmatch(r"(\w+\.)+\w+", path)
        and (misfit := path_misfit(path, shown_key))
    ):
        return misfit
    if isinstance(value, str) and (choices := choices_of(hint)):
        return f"{shown_key} {value!r} is unknown; {nearest(value, choices)}."
    if value is None and "null" in in_words(hint).split():  # then it is the text None that does not fit
        return f"{shown_key} must be {in_words(hint)}, got the text None: write null."
    number = {"float", "int"} & set(in_words(hint).split())
    if number and re.fullmatch(r"[-+]?\.?(inf|infinity|nan)", str(value).lower()):
        return f"{shown_key} must be a finite number, got {value}."
    return f"{shown_key} must be {in_words(hint)}, got {shown(value)}."


def _no_group(parser: ArgumentParser, key: str, value: str) -> str:
    names = [action.dest.removeprefix(f"{key}.") for action in parser._actions if action.dest.startswith(f"{key}.")]
    inner = [name for name in names if "." not in name and name != "help"]
    parameters = ", ".join(inner) if len(inner) <= 15 else f"the parameters of the {key}"
    return f"{key} must be a mapping with {parameters}, or a file with one, got {value}."


def _no_value(parser: ArgumentParser, flag: str) -> str:
    """Return the sentence for a flag without a value; the flag may be a parameter of the class that `flag` takes."""
    words = list(getattr(parser, "words", ()))
    of_flag = [
        (word, after)
        for word, after in zip(words, [*words, "--"][1:], strict=True)
        if f"{word}.".startswith(f"{flag}.")
    ]
    bare = (word for word, after in of_flag if "=" not in word and after.startswith("--"))
    return f"{next(bare, flag)} needs a value after it."


def _no_class_to_explain(_: ArgumentParser, key: str, name: str) -> str:
    misfit = class_misfit(name, key, f"--{key}.help") if key.rpartition(".")[2] in CLASS_PACKAGES else None
    return misfit or f"--{key}.help needs the name of a class for {key}, got {name!r}."


SENTENCES: dict[str, str | Callable[..., str]] = {
    r"unrecognized arguments: ([^\s-]\S*)": "{0!r} is not a flag: commands take only flags, such as --config FILE.",
    r"unrecognized arguments: ([^\s=]+)": _unknown_name,
    r"before subcommand|expected \"subcommand\"": "the command comes first, as in lightning-fl fit --config FILE.",
    r"Group '([\w.]+)' does not accept option '([^']+)'": lambda parser, *keys: _unknown_name(parser, ".".join(keys)),
    r"[Oo]ption '([^']+)'": _unknown_name,
    r"arguments are required: (.*)": _missing,
    r"argument (?:-\w/)?(--[\w.]+)\S*: expected one argument": _no_value,
    r"key \"([\w.]+)\":\s+Expected an instantiatable class": _no_class,
    r"--([\w.]+)\.help: .*?([\w.]*)\W?$": _no_class_to_explain,
    r"(?s)key \"([\w.]+)\".*NestedArg\(key='([\w.]+)'": (
        "--{0}.{1} comes before the class of {0}: give --{0} first, or name its class in a file."
    ),
    r"class_path '([^']*)':\s+'\w+' object has no attribute 'keys'": "init_args of {0} must be a mapping with its parameters.",
    r"key \"([\w.]+)\":\s+Unable to load config '(.*)'\n": _no_group,
    r"key \"config\":\s+(.*)": "--config: {0}.",
    r"Subclasses are disabled for (\w+), thus '([^']*)'": (
        "the settings of a {0} are given without the name of a class, got {1!r}: give only the settings, such as "
        "trainer.clock.devices phones for a ClientClock."
    ),
    r"(?s)key \"([\w.]+)\".*Exceeds the limit \(\d+ digits\)": "{0} has too many digits.",
}
"""Sentence, or the function that builds it, for each pattern of a message."""
