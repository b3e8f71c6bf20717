"""Simulated time: clocks of clients, their availability, deadlines."""

from lightning_fl.features.clock.client_clock import ClientClock
from lightning_fl.features.clock.simulated_clock import SimulatedClock

__all__ = ["ClientClock", "SimulatedClock"]
