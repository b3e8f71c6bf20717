"""Who loops over the clients: all runners have one signature and give one answer."""

from lightning_fl.runners.local import LocalPlan, train_locally
from lightning_fl.runners.ranks import Outcome, gather_others, merge, share_of, share_states
from lightning_fl.runners.serial import serial

__all__ = ["LocalPlan", "Outcome", "gather_others", "merge", "serial", "share_of", "share_states", "train_locally"]
