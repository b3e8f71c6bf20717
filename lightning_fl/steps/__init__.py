"""What the server does with the merged uploads."""

from lightning_fl.steps.apply import Apply
from lightning_fl.steps.dynamic_server_update import DynamicServerUpdate
from lightning_fl.steps.gradient_momentum import GradientMomentum
from lightning_fl.steps.momentum import Momentum
from lightning_fl.steps.momentum_in_stages import MomentumInStages
from lightning_fl.steps.shared_momentum import SharedMomentum
from lightning_fl.steps.static_server_update import StaticServerUpdate
from lightning_fl.steps.yogi import Yogi

__all__ = [
    "Apply",
    "DynamicServerUpdate",
    "GradientMomentum",
    "Momentum",
    "MomentumInStages",
    "SharedMomentum",
    "StaticServerUpdate",
    "Yogi",
]
