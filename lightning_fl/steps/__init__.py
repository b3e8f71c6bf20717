"""What the server does with the merged uploads."""

from lightning_fl.steps.apply import Apply
from lightning_fl.steps.momentum import Momentum

__all__ = ["Apply", "Momentum"]
