"""Hyper-parameters of module and datamodule that loggers receive."""

from __future__ import annotations

from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor

from lightning_fl.checks import is_a, parameters_of
from lightning_fl.data import FederatedDataModule
from lightning_fl.data.federated_data_module import OFFERED
from lightning_fl.errors import require


def hyperparameters_of(module: LightningModule, data: FederatedDataModule) -> dict[str, Any]:
    """Return the hyper-parameters of module and datamodule for loggers, without the command line's own.

    Either has none after `save_hyperparameters(logger=False)`.

    Raises:
        UserError: both save a hyper-parameter of the same name with different values, which Lightning refuses, too.
    """
    merged: dict[str, Any] = {}
    wrapped = getattr(data, "datamodule", None)
    for owner in (module, data, *([wrapped] if is_a(wrapped, LightningDataModule) else [])):
        if not owner._log_hyperparams:
            continue
        added = set(OFFERED) - set(parameters_of(type(owner))) if owner is module else set()
        for name, value in owner.hparams_initial.items():
            if name in added or str(name).startswith("_"):
                continue
            require(
                name not in merged or _are_same(value, merged[name]),
                f"module and datamodule both save a hyper-parameter {name!r} for loggers, and the values differ: rename one, or "
                "use save_hyperparameters(logger=False) in one of them.",
            )
            merged[name] = value
    return merged


def _are_same(one: Any, other: Any) -> bool:
    """True if two hyper-parameters are one object, or equal and of one type."""
    return one is other or (
        type(one) is type(other) and not isinstance(one, (Tensor, np.ndarray)) and bool(one == other)
    )
