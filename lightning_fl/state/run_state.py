"""All that changes in a federation: the model, the server's and the clients' states, codec memory, the ledger, the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_fl.communication.ledger import Bits, Ledger
from lightning_fl.communication.link import Link
from lightning_fl.errors import UserError
from lightning_fl.pruning import Plan
from lightning_fl.slots import Rule, State
from lightning_fl.state.client_states import ClientStates, ClientStatesOnDisk
from lightning_fl.vectors.layout import Layout
from lightning_fl.vectors.personal import PERSONAL
from lightning_fl.vectors.pruning_map import PruningMap, layout_of
from lightning_fl.vectors.submodel import Submodel

# What a stream of random numbers is for: part of its seed, so that no two streams coincide.
COHORT, DROPOUT, CLIENT, SERVER, EXCHANGE, SETUP, VALIDATION, STRAGGLER = range(8)


class Booked(Protocol):
    """What a round's clients did, as far as it is counted whatever the server makes of it.

    Attributes:
        bits: that crossed for single clients, by direction and kind.
        num_steps: optimiser steps that they made.
        num_uploads: uploads that arrived.
        num_accepted: uploads that the server accepted.
    """

    bits: Bits
    num_steps: int
    num_uploads: int

    @property
    def num_accepted(self) -> int: ...


class Proposed(Protocol):
    """What the server's steps propose: model (d,), float buffers (d_b,), counters, states of the steps, and steps made."""

    @property
    def params(self) -> Tensor: ...

    @property
    def buffers(self) -> Tensor: ...

    @property
    def counters(self) -> dict[str, Tensor]: ...

    @property
    def server(self) -> dict[str, State]: ...

    @property
    def num_steps(self) -> int: ...


@dataclass
class Run:
    """The state of a run between two rounds; all tensors are flat, on the device of `params`, client states on the host.

    Attributes:
        seed: every random draw is a function of it, the round and the client.
        layout: where each parameter lies in `params`.
        buffer_layout: where each float buffer lies in `buffers`.
        params: trainable parameters (d,).
        buffers: float buffers (d_b,), averaged like parameters.
        counters: integer buffers by name, never sent: the server takes the maximum over clients.
        personal_layout: where each parameter that clients own lies in their vectors.
        personal: what clients that have not yet taken part own (g,).
        round: rounds completed, hence the index of the next one.
        num_steps: optimiser steps of all clients, and of the server on samples of its own, so far.
        server: state of each server step, by its place and name in the chain.
        clients: state of each client that has taken part and keeps one, in memory or on disk.
        client_memory: codec memory of each client's uplink, kept likewise.
        server_memory: codec memory of the downlink.
        ledger: bits that crossed.
        simulated_seconds: what the run would have taken on the simulated network.
        num_uploads: uploads that have arrived at the server, in all rounds.
        num_rejected: those of them that it rejected.
        num_rounds_rejecting: rounds in which it rejected any.
        mask: the parameters that pruning keeps (d,), bools; all others are 0, and so is what belongs to them in every state
            and memory. None: all are kept.
        unpruned: the submodel of what the mask keeps, made with it.
        clients_with_mask: clients that have been sent the mask.
        macs_at_start: multiply-accumulates of one sample's forward pass before anything was pruned, if they can be counted.
        initial_loss: what a `LossGuard` compares with, once it is known.
    """

    seed: int
    layout: Layout
    buffer_layout: Layout
    params: Tensor
    buffers: Tensor
    counters: dict[str, Tensor]
    personal_layout: Layout = field(default_factory=lambda: Layout((), (), ()))
    personal: Tensor = field(default_factory=lambda: torch.zeros(0))
    round: int = 0
    num_steps: int = 0
    server: dict[str, State] = field(default_factory=dict)
    clients: ClientStates | ClientStatesOnDisk = field(default_factory=ClientStates)
    client_memory: ClientStates | ClientStatesOnDisk = field(default_factory=ClientStates)
    server_memory: State = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    simulated_seconds: float = 0.0
    num_uploads: int = 0
    num_rejected: int = 0
    num_rounds_rejecting: int = 0
    mask: Tensor | None = None
    unpruned: Submodel | None = field(default=None, init=False)
    clients_with_mask: set[int] = field(default_factory=set)
    macs_at_start: int | None = None
    initial_loss: float | None = None

    def random(self, purpose: int, client: int = 0) -> np.random.Generator:
        """The random stream of this round for `purpose` (and client)."""
        return np.random.default_rng([self.seed, self.round, purpose, client])

    def torch_seeds(self, purpose: int, client: int = 0, count: int = 2) -> list[int]:
        """Seeds for torch generators, from the same stream as `random` would use."""
        sequence = np.random.SeedSequence([self.seed, self.round, purpose, client])
        return [int(word) for word in sequence.generate_state(count, np.uint64) >> np.uint64(1)]

    def finish_setup(
        self, params: Tensor, buffers: Tensor, counters: dict[str, Tensor], num_steps: int, bits: Bits
    ) -> None:
        """Take the model that the turn before the first round leads to, and book its steps and bits as set-up."""
        self.replace_model(params, buffers)
        self.counters = counters
        self.num_steps += num_steps
        self.ledger.add(bits)
        self.ledger.close_setup()

    def replace_model(self, params: Tensor, buffers: Tensor) -> None:
        """Take another model (d,), (d_b,) for the server's, between two rounds."""
        self.params, self.buffers = params, buffers

    def book(
        self, outcome: Booked, link: Link, seconds: Callable[[int, int], float], initial_loss: float | None
    ) -> None:
        """Count what a round has cost, whatever becomes of its uploads: bits, time, the clients' optimiser steps.

        Args:
            outcome: of the clients of all processes.
            link: of the round, whose broadcast the clients have received.
            seconds: simulated seconds of the round, from its bits up and down.
            initial_loss: what a loss guard compares with from now on.
        """
        self.clients.release_replaced()  # rows of client states that the round before replaced
        self.client_memory.release_replaced()
        ledger = self.ledger
        ledger.open_round()
        ledger.add(link.broadcast_bits)
        ledger.add(outcome.bits)
        self.simulated_seconds += seconds(ledger.bits("up"), ledger.bits("down"))
        self.num_steps += outcome.num_steps
        num_rejected = outcome.num_uploads - outcome.num_accepted
        self.num_uploads += outcome.num_uploads
        self.num_rejected += num_rejected
        self.num_rounds_rejecting += num_rejected > 0
        self.server_memory = link.server_memory
        self.clients_with_mask.update(link.clients_with_mask)
        self.initial_loss = initial_loss

    def commit(
        self, proposal: Proposed, states: Iterable[tuple[int, State]], memory: Iterable[tuple[int, State]]
    ) -> None:
        """End the round with what the server's steps propose and what the accepted clients keep.

        Args:
            proposal: next state of the server.
            states: by client, what the rule keeps.
            memory: by client, what the codec of its uplink keeps.
        """
        self.params, self.buffers, self.counters = proposal.params, proposal.buffers, proposal.counters
        self.server = proposal.server
        self.num_steps += proposal.num_steps
        for kept, new in ((self.clients, states), (self.client_memory, memory)):
            for client, state in new:
                kept[client] = state
        self.end_round()

    def end_round(self) -> None:
        """Go on to the next round."""
        self.round += 1

    def set_mask(self, mask: Tensor, unmasked: Iterable[str] = ()) -> None:
        """Keep these parameters (d,) and no others.

        Args:
            mask: bools. One that keeps all parameters is none, unless there was another.
            unmasked: names of entries of clients' states that the mask does not apply to.
        """
        if bool(mask.all()) if self.mask is None else torch.equal(mask, self.mask):
            return
        self._prune_to(mask)
        self.clients_with_mask = set()
        factors = mask.to(self.params.dtype)
        unmasked, on_host = frozenset(unmasked), factors.cpu()

        def masked(state: State, factors: Tensor, unmasked: frozenset[str] = frozenset()) -> State:
            laid_out = {name: layout_of(name, x, self.layout, self.buffer_layout) for name, x in state.items()}
            of_model = {name for name, layout in laid_out.items() if layout is self.layout and name not in unmasked}
            return {name: x * factors.to(x.dtype) if name in of_model else x for name, x in state.items()}

        self.params = self.params * factors
        self.server = {name: masked(state, factors) for name, state in self.server.items()}
        self.server_memory = masked(self.server_memory, factors)
        for client in list(self.clients):
            self.clients[client] = masked(self.clients[client], on_host, unmasked)
        for client in list(self.client_memory):
            self.client_memory[client] = masked(self.client_memory[client], on_host)

    def _prune_to(self, mask: Tensor | None) -> None:
        """Set the mask (d,) and the submodel that it keeps."""
        self.mask = mask
        self.unpruned = None if mask is None else Submodel.from_masks(self.layout, self.buffer_layout, mask)

    def client_state(self, client: int, rule: Rule, received: Tensor) -> State:
        """A copy of what a client keeps, on the device of `params`; at its first time what it begins with."""
        state = self.clients.get(client)
        if state is None:
            return self.first_state(rule, received)
        return {name: x.to(self.params.device, copy=True) for name, x in state.items()}

    def prune(self, plan: Plan) -> None:
        """Cut everything that has a parameter's shape, the server's and all clients', down to what a pruning keeps."""
        pruning_map = PruningMap.from_plan(self.layout, self.buffer_layout, plan)
        self.layout, self.buffer_layout = pruning_map.layout, pruning_map.buffer_layout
        self.params, self.buffers = pruning_map.params(self.params), pruning_map.buffers(self.buffers)
        self.counters = {name: plan.cut(name, x) for name, x in self.counters.items()}
        self.server = {name: pruning_map.state(state) for name, state in self.server.items()}
        self.server_memory = pruning_map.state(self.server_memory)
        self._prune_to(None if self.mask is None else pruning_map.params(self.mask))
        for kept in (self.clients, self.client_memory):
            for client in list(kept):
                kept[client] = pruning_map.state(kept[client])

    def first_state(self, rule: Rule, received: Tensor) -> State:
        """What a client begins with: `rule`'s state, and parameters of its own if clients have any."""
        return rule.init(received) | ({PERSONAL: self.personal.clone()} if self.personal_layout.names else {})

    def state_dict(self) -> dict[str, Any]:
        """All of it; whatever the round under way changes, this stays as it is now. `as_saved` makes it plain."""
        return {
            "seed": self.seed,
            "names": list(self.layout.names),
            "shapes": [list(shape) for shape in self.layout.shapes],
            "channels_last": list(self.layout.channels_last),
            "buffer_names": list(self.buffer_layout.names),
            "buffer_shapes": [list(shape) for shape in self.buffer_layout.shapes],
            "personal_names": list(self.personal_layout.names),
            "personal_shapes": [list(shape) for shape in self.personal_layout.shapes],
            "personal": self.personal,
            "params": self.params,
            "buffers": self.buffers,
            "counters": dict(self.counters),
            "round": self.round,
            "num_steps": self.num_steps,
            "server": dict(self.server),
            "clients": self.clients.snapshot(),
            "client_memory": self.client_memory.snapshot(),
            "server_memory": dict(self.server_memory),
            "ledger": self.ledger.state_dict(),
            "simulated_seconds": self.simulated_seconds,
            "num_uploads": self.num_uploads,
            "num_rejected": self.num_rejected,
            "num_rounds_rejecting": self.num_rounds_rejecting,
            "mask": self.mask,
            "told": sorted(self.clients_with_mask),
            "macs_at_start": self.macs_at_start,
            "initial_loss": self.initial_loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, whose tensors may be a mapped file's: all are copied, those of clients one by one.

        Raises:
            UserError: it belongs to another model; the first parameter that differs is named.
        """
        self._check_fits(state)
        source = Layout(self.layout.names, self.layout.shapes, tuple(state["channels_last"]))
        device = self.params.device

        def relaid(tensors: State, to: torch.device) -> State:
            of_model = {name for name, x in tensors.items() if layout_of(name, x, source, self.buffer_layout) is source}
            return {
                name: (self.layout.relay(x, source) if name in of_model else x).to(to, copy=True)
                for name, x in tensors.items()
            }

        self.seed = state["seed"]
        self.params = self.layout.relay(state["params"], source).to(device, copy=True)
        self.buffers = state["buffers"].to(device, copy=True)
        self.counters = {name: x.to(device, copy=True) for name, x in state["counters"].items()}
        if self.personal_layout.names:
            self.personal = state["personal"].to(device, copy=True)
        self.round = state["round"]
        self.num_steps = state["num_steps"]
        self.server = {name: relaid(x, device) for name, x in state["server"].items()}
        for kept, saved in ((self.clients, state["clients"]), (self.client_memory, state["client_memory"])):
            kept.clear()
            for client, x in saved.items():
                kept[client] = relaid(x, torch.device("cpu"))
        self.server_memory = relaid(state["server_memory"], device)
        self.ledger.load_state_dict(state["ledger"])
        self.simulated_seconds = state["simulated_seconds"]
        self.num_uploads = state.get("num_uploads", 0)  # checkpoints of 0.1 have not counted them
        self.num_rejected = state.get("num_rejected", 0)
        self.num_rounds_rejecting = state.get("num_rounds_rejecting", 0)
        mask = state.get("mask")  # checkpoints of 0.1 have none
        self._prune_to(None if mask is None else self.layout.relay(mask, source).to(device, copy=True))
        self.clients_with_mask = set(state.get("told", ()))
        self.macs_at_start = state.get("macs_at_start", self.macs_at_start)  # checkpoints of 0.1 have none
        self.initial_loss = state.get("initial_loss")

    def _check_fits(self, state: dict[str, Any]) -> None:
        for kind, layout, prefix in (
            ("parameter", self.layout, ""),
            ("buffer", self.buffer_layout, "buffer_"),
            ("personal parameter", self.personal_layout, "personal_"),
        ):
            # Checkpoints of 0.1 say nothing of personal parameters, for there were none.
            names, shapes = state.get(f"{prefix}names", []), state.get(f"{prefix}shapes", [])
            saved = dict(zip(names, map(tuple, shapes), strict=True))
            here = dict(zip(layout.names, layout.shapes, strict=True))
            if saved != here:
                name = next(name for name in {**here, **saved} if saved.get(name) != here.get(name))
                raise UserError(
                    f"the checkpoint belongs to another model: its {kind} {name!r} has shape {saved.get(name, 'none')}, "
                    f"this model's has {here.get(name, 'none')}; give the model that the checkpoint was written with."
                )


def as_saved(state: dict[str, Any]) -> dict[str, Any]:
    """What `Run.state_dict` gave in plain containers and tensors, so that `torch.load(weights_only=True)` reads it."""
    return {**state, "clients": state["clients"].as_saved(), "client_memory": state["client_memory"].as_saved()}
