"""Federated-learning experiments for PyTorch Lightning.

Names are loaded on first use, so that `import lightning_fl` costs milliseconds while torch and lightning cost seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.4.0"

_HOMES = {
    "FederatedTrainer": "lightning_fl.trainer",
    "FederatedCLI": "lightning_fl.cli.federated_cli",
    "Algorithm": "lightning_fl.algorithms",
    "FederatedDataModule": "lightning_fl.data",
    "UserError": "lightning_fl.errors",
}
_PACKAGES = (
    "aggregators",
    "algorithms",
    "callbacks",
    "codecs",
    "data",
    "exchanges",
    "features",
    "gates",
    "groups",
    "modules",
    "personal",
    "pruning",
    "rules",
    "slots",
    "steps",
)
"""Packages that are loaded when they are read from `lightning_fl`."""
__all__ = ["Algorithm", "FederatedCLI", "FederatedDataModule", "FederatedTrainer", "UserError", "__version__"]

if TYPE_CHECKING:
    from lightning_fl.algorithms import Algorithm as Algorithm
    from lightning_fl.cli.federated_cli import FederatedCLI as FederatedCLI
    from lightning_fl.data import FederatedDataModule as FederatedDataModule
    from lightning_fl.errors import UserError as UserError
    from lightning_fl.trainer import FederatedTrainer as FederatedTrainer


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
