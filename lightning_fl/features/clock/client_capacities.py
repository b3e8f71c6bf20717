"""Capacities of clients by their clock: each trains the widest level whose round meets a deadline.

    r_k = max {r : D(r) / downlink_k + computation_k(r) + U(r) / uplink_k ≤ deadline}, or the smallest r if there is none

D(r) and U(r) are the bits of the network of level r. computation_k(r) is its whole training on client k's samples, at the usual
speed of k.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from lightning_fl.algorithms.compatibility import name_of
from lightning_fl.clients.local_schedule import LocalSchedule
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.network import Network
from lightning_fl.errors import UserError, require
from lightning_fl.features.clock.client_devices import Bits, ClientDevices, Computation
from lightning_fl.features.clock.simulated_time import SimulatedTime
from lightning_fl.slots import Capacities, parts_in


@dataclass(eq=False)
class ClientCapacities:
    """Finds the level of each client; it is the same in all rounds in which the clients' trainings are equally long.

    Attributes:
        capacities: levels and deadline.
        time: says what clients compute.
        devices: devices of the clients.
        engine: engine of the run; the sizes of its messages do not depend on values.
    """

    capacities: Capacities
    time: SimulatedTime
    devices: ClientDevices
    engine: Engine
    _round: tuple[int, LocalSchedule, Network] | None = field(default=None, init=False)
    _length: tuple[LocalSchedule, Network] | None = field(default=None, init=False)
    _costs: dict[float, tuple[Bits, Computation]] = field(default_factory=dict, init=False)
    _found: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)

    def level(self, client: int) -> float:
        """Return the level of a client in the present round."""
        return self.of(client)[0]

    def described(self) -> str:
        """Return how many clients have each level, in a sentence."""
        deadline = self.capacities.deadline
        found = [self.of(client) for client in self.engine.population.everyone]
        counts = Counter(level for level, _ in found)
        late = sum(seconds > deadline for _, seconds in found)
        parts = [f"{counts[level]} train level {level:g}" for level in self.capacities.levels]
        widest = f"the widest whose round takes at most {deadline:g} s of simulated time"
        longer = f"; {late} with level {self.capacities.levels[-1]:g} take longer" if late else ""
        return f"Of {len(found)} clients {', '.join(parts)}, {widest}{longer}."

    def of(self, client: int) -> tuple[float, float]:
        """Return the level of a client, and the seconds of its round."""
        self._see_round()
        if client not in self._found:
            for level, (bits, computation) in self._costs.items():
                seconds = self.devices.expected_seconds(client, computation, bits)
                self._found[client] = level, seconds
                if seconds <= self.capacities.deadline:
                    break
        return self._found[client]

    def _see_round(self) -> None:
        """Find the costs of each level anew if trainings are shorter or longer than in the last round."""
        engine = self.engine
        now = engine.run.round, engine.schedule, engine.network
        if now == self._round:
            return
        self._round, context = now, engine.context
        length = engine.work_of(engine.schedule, engine.run, context).schedule, engine.network
        if length == self._length:
            return
        self._length, self._found, first = length, {}, engine.population.everyone[0]
        for level in self.capacities.levels:
            of_level = replace(context, level=dict.fromkeys(engine.population.everyone, level).__getitem__)
            work = engine.work_of(engine.schedule, engine.run, of_level)
            bits = engine.bits_without_training([first], of_level)[first]
            self._costs[level] = bits, self.time.computation(work, engine.network)


def client_capacities(engine: Engine, time: SimulatedTime) -> ClientCapacities | None:
    """Return what finds the level of each client by its clock; None if levels do not follow from time.

    Raises:
        UserError: the clock knows no client's time, or the size of a message is not known before the training.
    """
    method = engine.algorithm
    capacities, devices = method.exchange.capacities, time.devices
    if capacities is None:
        return None
    if devices is None:
        raise UserError(
            f"algorithm.deadline of {method.name} needs a clock that knows each client's time: give devices, trace or a …_sigma "
            "of trainer.clock, such as --trainer.clock.devices phones, or in Python clock=ClientClock()."
        )
    for part in parts_in((method.uplink, method.downlink, *method.steps)):
        require(
            not part.size_depends_on_values,
            f"{method.name} lets clients train the widest network that meets the deadline, and how much {name_of(part)} sends is "
            "known only after the training: use another part.",
        )
    return ClientCapacities(capacities, time, devices, engine)
