"""Communication between server and clients: the link, the ledger of its bits, secure sums, the simulated clocks."""

from lightning_fl.communication.client_clock import ClientClock
from lightning_fl.communication.secure_sums import SecureAggregation
from lightning_fl.communication.simulated_clock import SimulatedClock

__all__ = ["ClientClock", "SecureAggregation", "SimulatedClock"]
