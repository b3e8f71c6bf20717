"""Attacks and faults of clients, to measure the robustness of a method: poisoned samples and forged uploads."""

from lightning_fl.features.attacks.adversary import Adversary
from lightning_fl.features.attacks.alie import ALIE
from lightning_fl.features.attacks.attack import Attack, AttackContext, Honest
from lightning_fl.features.attacks.backdoor import Backdoor
from lightning_fl.features.attacks.fang import FangKrum, FangTrim
from lightning_fl.features.attacks.faults import FreeRider, GaussianUpload, NotFinite, SignFlip
from lightning_fl.features.attacks.ipm import IPM
from lightning_fl.features.attacks.label_flip import LabelFlip
from lightning_fl.features.attacks.min_max import MinMax

__all__ = [
    "ALIE",
    "IPM",
    "Adversary",
    "Attack",
    "AttackContext",
    "Backdoor",
    "FangKrum",
    "FangTrim",
    "FreeRider",
    "GaussianUpload",
    "Honest",
    "LabelFlip",
    "MinMax",
    "NotFinite",
    "SignFlip",
]
