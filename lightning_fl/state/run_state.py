"""State of a federation: the model, the server's and the clients' states, codec memory, the ledger, the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fl.codecs.error_feedback import RESIDUAL
from lightning_fl.errors import UserError
from lightning_fl.link.ledger import Bits, Ledger
from lightning_fl.link.link import Link
from lightning_fl.pruning import Plan
from lightning_fl.slots import Rule, State, Step
from lightning_fl.state.client_states import ClientStates, ClientStatesOnDisk
from lightning_fl.state.outcome import Costs, Proposal
from lightning_fl.state.staging import StagedStates, Staging
from lightning_fl.vectors.growth import Growth
from lightning_fl.vectors.layout import NO_LAYOUT, Layout
from lightning_fl.vectors.personal import PERSONAL, PERSONAL_BUFFERS, initially_owned
from lightning_fl.vectors.pruning_map import PruningMap, layout_of
from lightning_fl.vectors.submodel import Submodel

# Purposes of random streams. The purpose is part of the seed, so that no two streams coincide. `slots.width.WIDTHS` is another,
# and equals SELECTION: no run draws for both, because selections that draw for SELECTION are refused where clients train smaller
# networks (`features/selection/refusals.py`). Another number would change the draws of runs that can be repeated today.
COHORT, DROPOUT, CLIENT, SERVER, EXCHANGE, SETUP, VALIDATION, STRAGGLER, EVALUATION, CODEC = (*range(9), 11)
CLOCK, JITTER, AGAIN, NOISE, PRUNING = 12, 13, 14, 15, 16
ATTACK = 20
SELECTION = 30

# Fields of a Run that a checkpoint holds under their own names.
COUNTS = ("round", "num_steps", "num_successive_steps", "num_uploads", "num_rejected", "num_rounds_rejecting")
SCALARS = ("seed", "simulated_seconds", "macs_at_start", "is_unchanged", "is_replaced", *COUNTS)


@dataclass
class Run:
    """State of a run between two rounds. All tensors are flat and on the device of `params`; client states are on the host.

    Attributes:
        seed: seed of the run. Every random draw is a function of it, the round and the client.
        layout: position of each parameter in `params`.
        buffer_layout: position of each shared float buffer in `buffers`.
        params: trainable parameters (d,).
        buffers: float buffers (d_b,), averaged like parameters.
        counters: shared integer buffers by name. They are never sent; the server takes the maximum over clients.
        personal_layout, personal_buffer_layout: position of each parameter and float buffer that clients own.
        personal: a client's personal values before it takes part, as entries of its state.
        round: rounds completed, hence the index of the next one.
        num_steps: optimiser steps of all clients, and of the server on samples of its own, so far.
        num_successive_steps: optimiser steps one after the other: of each round those of the client that made the most.
        server: state of each server step, by its position and name in the chain.
        clients: state of each client that has taken part and has a state, in memory or on disk.
        client_memory: codec memory of each client's uplink, in memory or on disk.
        server_memory: codec memory of the downlink.
        is_unchanged: True if nothing has changed the model since the last broadcast, as after a round without an accepted upload.
        is_replaced: True if a callback has changed the parameters since the last round, other than by pruning, which clients
            cannot work out.
        ledger: bits sent, by direction and kind.
        simulated_seconds: time of the run on the simulated network.
        num_uploads: uploads that have arrived at the server, in all rounds.
        num_rejected: uploads that the server rejected, in all rounds.
        num_rounds_rejecting: rounds in which the server rejected an upload.
        mask: parameters that pruning keeps (d,), bools. All others are 0, and so are their entries in every state and memory.
            None: all parameters are kept.
        unpruned: submodel that the mask keeps, made with the mask; None if there is no mask.
        clients_with_mask: clients that have received the mask.
        macs_at_start: multiply-accumulates of one sample's forward pass before any pruning; None if they cannot be counted.
        features: state of each feature by its name: a dictionary of tensors, plain values and such dictionaries, whose vectors of
            the model follow masks and prunings, or an object whose `state_dict` returns plain values.
        again: number of a client's earlier trainings on the same version; its random draws depend on it, too.
        staging: memory through which client states travel to the device and back.
    """

    seed: int
    layout: Layout
    buffer_layout: Layout
    params: Tensor
    buffers: Tensor
    counters: dict[str, Tensor]
    personal_layout: Layout = NO_LAYOUT
    personal_buffer_layout: Layout = NO_LAYOUT
    personal: State = field(default_factory=dict)
    round: int = 0
    num_steps: int = 0
    num_successive_steps: int = 0
    server: dict[str, State] = field(default_factory=dict)
    clients: ClientStates | ClientStatesOnDisk = field(default_factory=ClientStates)
    client_memory: ClientStates | ClientStatesOnDisk = field(default_factory=ClientStates)
    server_memory: State = field(default_factory=dict)
    is_unchanged: bool = False
    is_replaced: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    simulated_seconds: float = 0.0
    num_uploads: int = 0
    num_rejected: int = 0
    num_rounds_rejecting: int = 0
    mask: Tensor | None = None
    unpruned: Submodel | None = field(default=None, init=False)
    clients_with_mask: set[int] = field(default_factory=set)
    macs_at_start: int | None = None
    features: dict[str, Any] = field(default_factory=dict, init=False)
    again: int = field(default=0, init=False)
    staging: Staging = field(default_factory=Staging, init=False)

    def random(self, purpose: int, client: int = 0, in_round: int | None = None) -> np.random.Generator:
        """Return the random stream of this round, or of another one, for a purpose (and a client)."""
        return np.random.default_rng(self._entropy(purpose, client, in_round))

    def torch_seeds(self, purpose: int, client: int = 0, in_round: int | None = None, key: int = 0) -> list[int]:
        """Return two seeds for torch generators, which depend on the same numbers as `random`, and on a key unless that is 0."""
        sequence = np.random.SeedSequence(self._entropy(purpose, client, in_round) + ([key] if key else []))
        return [int(word) for word in sequence.generate_state(2, np.uint64) >> np.uint64(1)]

    def _entropy(self, purpose: int, client: int, in_round: int | None) -> list[int]:
        again = (AGAIN, self.again) if self.again else ()
        return [self.seed, self.round if in_round is None else in_round, purpose, client, *again]

    def as_of(self, version: int, again: int = 0) -> Run:
        """Return the run as it draws numbers for a training on an earlier version of the model."""
        run = copy(self)
        run.round, run.again = version, again
        return run

    def finish_setup(
        self, params: Tensor, buffers: Tensor, counters: dict[str, Tensor], num_steps: int, bits: Bits
    ) -> None:
        """Store the model after the turn before the first round, and count the steps and bits of this turn as set-up."""
        self.replace_model(params, buffers)
        self.counters = counters
        self.num_steps += num_steps
        self.ledger.add(bits)
        self.ledger.close_setup()

    def keep_clients_on_disk(self, folder: Path, writes: bool) -> None:
        """Keep the states and codec memories of clients in files of a folder; called before the first round.

        Args:
            folder: folder of the files.
            writes: True if this process writes them, False if another process of this machine does.
        """
        self.clients = ClientStatesOnDisk(folder / "rule", writes)
        self.client_memory = ClientStatesOnDisk(folder / "codec", writes)

    @property
    def keeps_files(self) -> bool:
        """True if clients' states are in files, which one process of a machine writes."""
        return isinstance(self.clients, ClientStatesOnDisk)

    def replace_model(self, params: Tensor, buffers: Tensor) -> None:
        """Replace the server's model by another one (d,), (d_b,), between two rounds."""
        self.params, self.buffers, self.is_unchanged = params, buffers, False

    def adopt_model(
        self, params: Tensor, buffers: Tensor, counters: Mapping[str, Tensor], mask: Tensor | None = None
    ) -> None:
        """Copy the module's model between two rounds where it differs, as after a change by a callback.

        The copies are new tensors, because a step may have kept the old ones.

        Args:
            params: the module's parameters (d,).
            buffers: its float buffers (d_b,).
            counters: its integer buffers by name.
            mask: mask (d,) under which the module trains from now on; None for none.
        """
        if not torch.equal(params, self.params):
            is_pruned = mask is not None and torch.equal(params, self.params * mask)
            self.is_replaced |= not is_pruned
            self.params, self.is_unchanged = params.clone(), False
        if not torch.equal(buffers, self.buffers):
            self.buffers, self.is_unchanged = buffers.clone(), False
        if any(not torch.equal(counter, self.counters[name]) for name, counter in counters.items()):
            self.counters = dict(counters)

    def book(self, costs: Costs, link: Link) -> None:
        """Count what a round has cost, and keep what its link remembers, even if its uploads are rejected.

        Args:
            costs: bits, optimiser steps and time.
            link: link of the round, after the broadcast.
        """
        self.clients.release_replaced()  # rows of client states that the last round replaced
        self.client_memory.release_replaced()
        self.ledger.open_round(costs.broadcast_bits, costs.bits)
        if link.update is not None:
            self.ledger.catch_up.add(*link.update)
        self.simulated_seconds += costs.seconds
        self.num_steps += costs.num_steps
        self.num_successive_steps += costs.num_successive_steps
        self.num_uploads += costs.num_uploads
        self.num_rejected += costs.num_rejected
        self.num_rounds_rejecting += costs.num_rejected > 0
        self.server_memory = link.server_memory
        self.clients_with_mask.update(link.clients_with_mask)

    def commit(
        self, proposal: Proposal, states: Iterable[tuple[int, State]], memory: Iterable[tuple[int, State]]
    ) -> None:
        """End the round: store the server's proposal and the accepted clients' states.

        Args:
            proposal: next state of the server.
            states: clients and their new states of the rule.
            memory: clients and their new codec memories of the uplink.
        """
        self.params, self.buffers, self.counters = proposal.params, proposal.buffers, proposal.counters
        self.server = proposal.server
        self.num_steps += proposal.num_steps
        for states_by_client, new in ((self.clients, states), (self.client_memory, memory)):
            for client, state in new:
                states_by_client[client] = state
        self.end_round()
        self.is_unchanged = False

    def end_round(self) -> None:
        """Go on to the next round."""
        self.round += 1
        self.is_unchanged, self.is_replaced = True, False
        self.clients.drop_ahead()
        self.client_memory.drop_ahead()

    def set_mask(self, mask: Tensor, unmasked: Iterable[str] = ()) -> None:
        """Keep these parameters (d,) and no others.

        Args:
            mask: bools. A mask that keeps all parameters is ignored, unless it replaces another mask.
            unmasked: names of entries in client states to which the mask does not apply.
        """
        if bool(mask.all()) if self.mask is None else torch.equal(mask, self.mask):
            return
        self._prune_to(mask)
        self.clients_with_mask = set()
        factors = mask.to(self.params.dtype)
        on_host = factors.cpu()

        def masked(state: State, factors: Tensor, unmasked: frozenset[str] = frozenset()) -> State:
            layouts = {
                n: layout_of(n, x, self.layout, self.buffer_layout) for n, x in state.items() if n not in unmasked
            }
            return {n: x * factors.to(x.dtype) if layouts.get(n) is self.layout else x for n, x in state.items()}

        self.params = self.params * factors
        self.server = {name: masked(state, factors) for name, state in self.server.items()}
        self.features = _changed(self.features, lambda state: masked(state, factors))
        self.server_memory = masked(self.server_memory, factors)
        for states_by_client, names in ((self.clients, frozenset(unmasked)), (self.client_memory, frozenset[str]())):
            for client in list(states_by_client):
                states_by_client[client] = masked(states_by_client[client], on_host, names)

    def _layout_of(self, name: str, entry: Tensor) -> Layout | None:
        """Return the layout of an entry of a state; None if it is no vector of the network."""
        owned = {PERSONAL: self.personal_layout, PERSONAL_BUFFERS: self.personal_buffer_layout}
        return owned[name] if name in owned else layout_of(name, entry, self.layout, self.buffer_layout)

    def _prune_to(self, mask: Tensor | None) -> None:
        """Set the mask (d,), and make the submodel that it keeps."""
        self.mask = mask
        self.unpruned = None if mask is None else Submodel.from_masks(self.layout, self.buffer_layout, mask)

    def client_state(self, client: int, rule: Rule, received: Tensor) -> State:
        """Return a copy of a client's state on the device of `params`; its first state if it has not taken part yet."""
        state = self.clients.get(client)
        if state is None:
            return self.first_state(rule, received)
        return self.staging.to_device(state, self.params.device)

    @property
    def memory_on_device(self) -> StagedStates:
        """Codec memory of each client's uplink, which is copied to the device of `params` when it is asked for."""
        return StagedStates(self.client_memory, self.staging, self.params.device)

    def prune(self, plan: Plan) -> None:
        """Remove pruned filters from the model and from all states and memories of the server and the clients."""
        pruning_map = PruningMap.from_plan(self.layout, self.buffer_layout, plan)
        self.layout, self.buffer_layout = pruning_map.layout, pruning_map.buffer_layout
        self.params, self.buffers = pruning_map.params(self.params), pruning_map.buffers(self.buffers)
        self.counters = {name: plan.cut(name, entry) for name, entry in self.counters.items()}
        self.server = {name: pruning_map.state(state) for name, state in self.server.items()}
        self.features = _changed(self.features, pruning_map.state)
        self.server_memory = pruning_map.state(self.server_memory)
        self._prune_to(None if self.mask is None else pruning_map.params(self.mask))
        for states_by_client in (self.clients, self.client_memory):
            for client in list(states_by_client):
                states_by_client[client] = pruning_map.state(states_by_client[client])

    def grow(self, layout: Layout, params: Tensor, rule: Rule, steps: Mapping[str, Step], method: str) -> None:
        """Let more of the network's parameters train, with their present values; nothing changes if a state cannot follow.

        Args:
            layout: layout with the new parameters.
            params: module's present parameters (d',), of which the values of the new ones are read.
            rule: rule of the clients.
            steps: server steps by the keys of their states.
            method: name of the method, for the error.

        Raises:
            UserError: nothing says with which value a state begins for the new parameters.
        """
        growth = Growth.between(self.layout, layout, self.buffer_layout)
        params = growth.vector(self.params, params)

        def memory(state: State, where: str) -> State:
            first = {name: torch.zeros_like(params) for name in state if RESIDUAL in name}
            return growth.state(state, first, f"the codec of {method}'s {where}")

        server = {
            key: growth.state(state, steps[key].init(params), f"{method}'s step {type(steps[key]).__name__}")
            for key, state in self.server.items()
        }
        server_memory = memory(self.server_memory, "downlink")
        features = _changed(
            self.features, lambda state: growth.state(state, {"model": params}, f"a feature of {method}")
        )
        first, client_of = rule.init(params.cpu()), f"each client of {method}"
        states = [(client, growth.state(self.clients[client], first, client_of)) for client in list(self.clients)]
        memories = [(client, memory(self.client_memory[client], "uplink")) for client in list(self.client_memory)]
        for states_by_client, grown in ((self.clients, states), (self.client_memory, memories)):
            for client, state in grown:
                states_by_client[client] = state
        self.layout, self.params, self.server = layout, params, server
        self.server_memory, self.features = server_memory, features
        if self.mask is not None:
            self._prune_to(growth.vector(self.mask, torch.ones_like(params)))

    def first_state(self, rule: Rule, received: Tensor) -> State:
        """Return a client's first state: that of the rule, and the personal values."""
        return rule.init(received) | {name: entry.clone() for name, entry in self.personal.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot of the state, which later rounds do not change; `as_saved` turns it into plain containers."""
        layouts: dict[str, Any] = {}
        for _, layout, prefix in self._layouts():
            layouts[f"{prefix}names"] = list(layout.names)
            layouts[f"{prefix}shapes"] = [list(shape) for shape in layout.shapes]
            layouts[f"{prefix}dim_orders"] = [list(order) for order in layout.dim_orders]
        return {
            **layouts,
            **{name: getattr(self, name) for name in SCALARS},
            "personal": self.personal.get(PERSONAL, self.params.new_zeros(0)),
            "personal_buffers": {name: entry for name, entry in self.personal.items() if name != PERSONAL},
            "params": self.params,
            "buffers": self.buffers,
            "counters": dict(self.counters),
            "server": dict(self.server),
            "clients": self.clients.snapshot(),
            "client_memory": self.client_memory.snapshot(),
            "server_memory": dict(self.server_memory),
            "ledger": self.ledger.state_dict(),
            "mask": self.mask,
            "told": sorted(self.clients_with_mask),
            "features": {name: _kept(state) for name, state in self.features.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state. Its tensors may belong to a memory-mapped file, so all are copied, those of clients one by one.

        Raises:
            UserError: the state belongs to another model. The message names the first parameter that differs.
        """
        self._check_fits(state)
        saved_layouts = {
            layout: replace(layout, dim_orders=tuple(map(tuple, state[f"{prefix}dim_orders"])))
            for _, layout, prefix in self._layouts()
        }
        device = self.params.device
        earlier, present = state["params"].dtype, self.params.dtype  # a resumed run may have another precision

        def relay(vector: Tensor, layout: Layout) -> Tensor:
            return layout.relay(vector, saved_layouts[layout])

        def relaid(tensors: State, to: torch.device) -> State:
            copies = {}
            for name, entry in tensors.items():
                layout = self._layout_of(name, entry)
                relayed = entry if layout is None else relay(entry, layout)
                # A number, such as the count of an optimiser's steps, keeps its own dtype.
                dtype = present if entry.dtype == earlier and entry.dim() else entry.dtype
                copies[name] = relayed.to(to, dtype, copy=True)
            return copies

        # Clients' states come first: their files may be damaged, and the model must not change then.
        for states_by_client, saved in ((self.clients, state["clients"]), (self.client_memory, state["client_memory"])):
            states_by_client.clear()
            for client, entry in saved.items():
                states_by_client[client] = relaid(entry, torch.device("cpu"))
        for name in SCALARS:
            setattr(self, name, state[name])
        self.params = relay(state["params"], self.layout).to(device, present, copy=True)
        self.buffers = relay(state["buffers"], self.buffer_layout).to(device, self.buffers.dtype, copy=True)
        self.counters = {name: entry.to(device, copy=True) for name, entry in state["counters"].items()}
        self.personal = relaid({name: x for name, x in initially_owned(state).items() if name in self.personal}, device)
        self.server = {name: relaid(entry, device) for name, entry in state["server"].items()}
        self.server_memory = relaid(state["server_memory"], device)
        self.ledger.load_state_dict(state["ledger"])
        mask = state["mask"]
        self._prune_to(None if mask is None else relay(mask, self.layout).to(device, copy=True))
        self.clients_with_mask = set(state["told"])
        self.features = _changed(_kept(state["features"]), lambda entries: relaid(entries, device))

    def _layouts(self) -> tuple[tuple[str, Layout, str], ...]:
        """Return each kind of tensor with its layout and the prefix of its keys in a checkpoint."""
        return (
            ("parameter", self.layout, ""),
            ("buffer", self.buffer_layout, "buffer_"),
            ("personal parameter", self.personal_layout, "personal_"),
            ("personal buffer", self.personal_buffer_layout, "personal_buffer_"),
        )

    def _check_fits(self, state: dict[str, Any]) -> None:
        for kind, layout, prefix in self._layouts():
            saved = dict(zip(state[f"{prefix}names"], map(tuple, state[f"{prefix}shapes"]), strict=True))
            current = dict(zip(layout.names, layout.shapes, strict=True))
            if saved != current:
                name = next(name for name in {**current, **saved} if saved.get(name) != current.get(name))
                raise UserError(
                    f"the checkpoint belongs to another model: its {kind} {name!r} has shape {saved.get(name, 'none')}, "
                    f"this model's has {current.get(name, 'none')}; use the model that the checkpoint was written with."
                )


def as_saved(state: dict[str, Any]) -> dict[str, Any]:
    """Return a result of `Run.state_dict` in plain containers and tensors, with the states that `SavedStates` puts into files."""
    return {**state, "clients": state["clients"].as_saved(), "client_memory": state["client_memory"].as_saved()}


def _kept(value: Any) -> Any:
    """Return a copy of a feature's state that shares its tensors."""
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, dict):
        return {name: _kept(entry) for name, entry in value.items()}
    return [_kept(entry) for entry in value] if isinstance(value, list) else value


def _changed(value: Any, change: Callable[[State], State]) -> Any:
    """Return the state of features with the tensors of each dictionary changed together."""
    if not isinstance(value, dict):
        return value
    tensors = change({name: entry for name, entry in value.items() if isinstance(entry, Tensor)})
    return {name: tensors[name] if name in tensors else _changed(entry, change) for name, entry in value.items()}
