"""What the server does with the merged uploads."""

from lightning_fl.steps.apply import Apply
from lightning_fl.steps.compress import Compress
from lightning_fl.steps.moments import Moments
from lightning_fl.steps.momentum import Momentum
from lightning_fl.steps.warmed_up_moments import WarmedUpMoments

__all__ = ["Apply", "Compress", "Moments", "Momentum", "WarmedUpMoments"]
