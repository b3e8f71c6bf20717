"""Who loops over the clients: all runners have one signature and give one answer."""

from lightning_fl.runners.choice import Runner, choose_runner
from lightning_fl.runners.local import LocalPlan, train_locally
from lightning_fl.runners.ranks import (
    Outcome,
    gather_by_client,
    gather_objects,
    gather_others,
    merge,
    share_of,
    share_states,
    share_uploads,
)
from lightning_fl.runners.serial import serial
from lightning_fl.runners.stacked import stacked

__all__ = [
    "LocalPlan",
    "Outcome",
    "Runner",
    "choose_runner",
    "gather_by_client",
    "gather_objects",
    "gather_others",
    "merge",
    "serial",
    "share_of",
    "share_states",
    "share_uploads",
    "stacked",
    "train_locally",
]
