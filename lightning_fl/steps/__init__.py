"""What the server does with the merged uploads."""

from lightning_fl.steps.apply import Apply
from lightning_fl.steps.compress import Compress
from lightning_fl.steps.control_update import ControlUpdate
from lightning_fl.steps.distillation import Distillation
from lightning_fl.steps.dynamic_server_update import DynamicServerUpdate
from lightning_fl.steps.gradient_momentum import GradientMomentum
from lightning_fl.steps.moments import Moments
from lightning_fl.steps.momentum import Momentum
from lightning_fl.steps.momentum_in_stages import MomentumInStages
from lightning_fl.steps.reconfiguration import Reconfiguration
from lightning_fl.steps.server_as_client import ServerAsClient
from lightning_fl.steps.shared_momentum import SharedMomentum
from lightning_fl.steps.static_server_update import StaticServerUpdate
from lightning_fl.steps.warmed_up_moments import WarmedUpMoments
from lightning_fl.steps.yogi import Yogi

__all__ = [
    "Apply",
    "Compress",
    "ControlUpdate",
    "Distillation",
    "DynamicServerUpdate",
    "GradientMomentum",
    "Moments",
    "Momentum",
    "MomentumInStages",
    "Reconfiguration",
    "ServerAsClient",
    "SharedMomentum",
    "StaticServerUpdate",
    "WarmedUpMoments",
    "Yogi",
]
