"""Who loops over the clients: all runners have one signature and give one answer."""

from lightning_fl.runners.local import LocalPlan, train_locally
from lightning_fl.runners.ranks import Outcome, gather, gather_by_client, merge, share_of
from lightning_fl.runners.serial import serial

__all__ = ["LocalPlan", "Outcome", "gather", "gather_by_client", "merge", "serial", "share_of", "train_locally"]
