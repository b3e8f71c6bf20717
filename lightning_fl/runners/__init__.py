"""Who loops over the clients: all runners have one signature and give one answer."""

from lightning_fl.runners.local import LocalPlan, train_locally
from lightning_fl.runners.ranks import Outcome, gather, merge, share_of
from lightning_fl.runners.serial import serial

__all__ = ["LocalPlan", "Outcome", "gather", "merge", "serial", "share_of", "train_locally"]
