"""Random configurations of tiny runs, from the classes that a configuration may name."""

from __future__ import annotations

from inspect import Parameter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np

from lightning_fl.checks import parameters_of
from lightning_fl.cli.class_names import classes_under

ODD_NUMBERS = (0, -1, 1, 0.5, 1e-9, 1e9, 1e30, float("inf"), float("nan"))
ODD_TEXTS = ("", "nonsense", "null", "[]", "{}", "010", "1:30", "ä" * 300)
SIZE = 60


def write_images(path: Path) -> None:
    """Write the samples of all runs: 60 training and 20 test images (8, 8) of 4 classes."""
    random = np.random.default_rng(0)
    labels = np.arange(SIZE + 20) % 4
    images = (random.integers(120, size=(SIZE + 20, 8, 8)) + 40 * labels[:, None, None]).astype(np.uint8)
    train = {"train_images": images[:SIZE], "train_labels": labels[:SIZE]}
    np.savez(path, **train, test_images=images[SIZE:], test_labels=labels[SIZE:])


def draw(random: np.random.Generator, images: Path) -> list[str]:
    """Return the flags of a `fit`; most are sensible, some are not."""

    def maybe(share: float) -> bool:
        return bool(random.random() < share)

    def one_of(*values: Any) -> Any:
        return values[int(random.integers(len(values)))]

    flags = {
        "--data": "Arrays",
        "--data.path": str(images),
        "--model": "ImageClassifier",
        "--model.network": "linear",
        "--trainer.max_rounds": "3",
        "--trainer.accelerator": "cpu",
        "--trainer.enable_progress_bar": "false",
        "--trainer.enable_model_summary": "false",
        "--trainer.clients_per_round": one_of("2", "3", "0.5", "1.0"),
        "--seed_everything": str(random.integers(1000)),
    }
    optional = {
        "--data.batch_size": ("1", "4", "100"),
        "--data.val_fraction": ("0.2",),
        "--data.seed": ("7",),
        "--trainer.local_epochs": ("2",),
        "--trainer.runner": ("serial", "stacked"),
        "--trainer.dropout_rate": ("0.3",),
        "--trainer.straggler_rate": ("0.5",),
        "--trainer.client_states": ("disk",),
        "--trainer.checkpoint_every_n_rounds": ("2",),
        "--trainer.precision": ("64-true", "bf16-true"),
        "--trainer.gradient_clip_val": ("0.5",),
        "--trainer.accumulate_grad_batches": ("2",),
        "--trainer.client_optimizer": ("sgd",),
        "--model.learning_rate": ("0.1", "0.5"),
        "--model.momentum": ("0.9",),
    }
    flags |= {name: one_of(*values) for name, values in optional.items() if maybe(0.2)}
    flags |= _part("--algorithm", one_of(*classes_under("algorithm").values()), random)
    partition = one_of(*classes_under("partition").values())
    flags |= _part("--data.partition", partition, random)
    if maybe(0.5):
        flags |= {"--data.server_fraction": one_of("0.1", "0.2"), "--data.client_fraction": "0.8"}
    flags["--data.num_clients"] = one_of("4", "5")
    if maybe(0.25):
        pruning = {name: c for name, c in classes_under("callbacks").items() if c.__module__.startswith("lightning_fl")}
        flags |= _part("--trainer.callbacks", one_of(*pruning.values()), random)
    if maybe(0.1):
        flags[one_of(*list(flags)[2:])] = one_of(*map(str, ODD_NUMBERS), *ODD_TEXTS)
    return [f"{name}={value}" for name, value in flags.items()]


def _part(flag: str, found: type, random: np.random.Generator) -> dict[str, str]:
    """Return the flags of a class, with some of its hyper-parameters."""
    flags = {flag: found.__name__}
    for name, parameter in parameters_of(found).items():
        if random.random() < (0.25 if parameter.default is not Parameter.empty else 1.0):
            value = _value(parameter, random)
            if value is not None:
                flags[f"{flag}.{name}"] = value
    return flags


def _value(parameter: Parameter, random: np.random.Generator) -> str | None:
    """Return a value near the default, or sometimes an odd one; None if the type is not a plain one."""
    hints = [hint for hint in (get_args(parameter.annotation) or (parameter.annotation,)) if hint is not type(None)]
    literal = parameter.annotation if get_origin(parameter.annotation) is Literal else None
    for hint in hints:
        literal = hint if get_origin(hint) is Literal else literal
    values: tuple[Any, ...]
    if literal is not None:
        values = get_args(literal)
    elif bool in hints:
        values = ("true", "false")
    elif float in hints or int in hints:
        default = parameter.default if isinstance(parameter.default, (int, float)) else 2
        near = (
            (default, default * 2, max(1, default // 2)) if float not in hints else (default, default / 2, default * 2)
        )
        values = ODD_NUMBERS if random.random() < 0.1 else near
    else:
        return None
    return str(values[int(random.integers(len(values)))])
