"""Count the vectors as long as the model that are alive in a federated round, by method and moment.

    python benchmarks/live_vectors.py                              # see docs/explanation/speed.md
    python benchmarks/live_vectors.py --algorithm FedProx --clients 10
    python benchmarks/live_vectors.py --states disk

Memory is counted in storages of tensors, not in resident bytes, so that no allocator, library or other program decides: every
operation of torch is watched, and a storage counts from the first operation that sees it until the last reference to it is gone.
Memory that is kept to be used again (`lightning_fl.vectors.pieces.BLOCKS`) counts although no tensor refers to it. The model is
one small linear layer, and vectors of a thousand numbers already count as long, so that a run takes a second. All clients take
part in every round, by plain SGD.

A cell has the number of storages of at least half a model, and in brackets the bytes of all large storages ÷ those of the model,
so that a sum in float64 is one storage and two models. Clients' states are counted apart.

- rest: between two rounds.
- step: in the last client's step, when its gradient has been computed.
- Apply: when the server's steps have proposed the next model.
- peak: the most models at any moment of the last round, beyond the one that is trained.
- states: the most models that clients' states and codec memories take, old and new ones together.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning
import torch
from round_time import QUIET
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import Algorithm
from lightning_fl.data import Arrays
from lightning_fl.engine import round as federation_round
from lightning_fl.modules import ImageClassifier
from lightning_fl.state.outcome import Outcome
from lightning_fl.vectors import pieces

METHODS = ("FedAvg", "FedProx", "FedNova", "ServerM", "SCAFFOLD", "FedAdam", "FedAdamSSM", "FedLDF")
SIZE, CHANNELS, CLASSES = 8, 3, 400


class Live(NamedTuple):
    """Large storages alive at a moment, without those of clients' states.

    Attributes:
        storages: number of storages of at least half a model.
        models: bytes of all large storages ÷ bytes of the model.
    """

    storages: int
    models: float

    def __str__(self) -> str:
        return f"{self.storages} ({self.models:.1f})"


class LiveStorages(TorchDispatchMode):
    """Watches all operations of torch, and knows which large storages are alive.

    Attributes:
        peak: the most models alive at once since it was last set to 0.
        states: the most models of clients' states alive at once since then.
    """

    def __init__(self, model_bytes: int, least_bytes: int | None = None) -> None:
        """Watch nothing yet.

        Args:
            model_bytes: bytes of a model.
            least_bytes: bytes of the smallest storage that counts; None for an eighth of a model.
        """
        super().__init__()
        self._least_bytes = model_bytes // 8 if least_bytes is None else least_bytes
        self.peak = self.states = 0.0
        self._model_bytes = model_bytes
        self._live: dict[int, tuple[int, int]] = {}  # address and bytes of each storage
        self._states: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note the storages that it reads and makes."""
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if sum(self._note(tensor) for tensor in tensors):
            self.peak = max(self.peak, self.now.models)
        return result

    def mark(self, states: Mapping[Any, Mapping[str, Tensor]]) -> None:
        """Count these states of clients apart until they are gone; those in files take no memory."""
        in_memory = [state for state in states.values() if isinstance(state, dict)] if isinstance(states, dict) else []
        for tensor in tree_leaves(in_memory):
            self._note(tensor)
            self._states.add(tensor.untyped_storage()._cdata)
        self._states &= self._live.keys()
        self.states = max(self.states, sum(self._live[key][1] for key in self._states) / self._model_bytes)

    @property
    def now(self) -> Live:
        """What is alive now."""
        self._states &= self._live.keys()
        sizes = pieces.BLOCKS.free_bytes + [size for key, (_, size) in self._live.items() if key not in self._states]
        sizes = [size for size in sizes if size >= self._least_bytes]
        return Live(sum(2 * size >= self._model_bytes for size in sizes), sum(sizes) / self._model_bytes)

    def _note(self, tensor: Tensor) -> bool:
        """Note the storage of a tensor until it is gone; returns True for a new one, or one that has grown."""
        storage = tensor.untyped_storage()
        key, known = storage._cdata, (storage.data_ptr(), storage.nbytes())
        if self._live.get(key) == known or (known[1] < self._least_bytes and key not in self._live):
            return False
        if key not in self._live:
            weakref.finalize(storage, self._live.pop, key, None).atexit = False
        self._live[key] = known
        return True


class Moments(lightning.Callback):
    """Notes what is alive in the rounds of a fit.

    Attributes:
        rest: between the last two rounds.
        step: in the last client's last step.
        apply: after the server's steps of the last round.
    """

    rest: Live
    step: Live
    apply: Live

    def __init__(self, storages: LiveStorages) -> None:
        self._storages = storages

    def on_train_epoch_start(self, trainer: FederatedTrainer, pl_module: lightning.LightningModule) -> None:
        """Note what is alive between two rounds, and watch the peak of the coming round."""
        for states in (trainer.run.clients, trainer.run.client_memory):
            self._storages.mark(states)
        self.rest = self._storages.now
        self._storages.peak = self._storages.states = 0.0

    def on_before_optimizer_step(self, trainer: FederatedTrainer, pl_module: Any, optimizer: Any) -> None:
        """Note what is alive in a step."""
        self.step = self._storages.now

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the states of clients whose uploads are accepted, and what is alive after the server's steps."""
        accept, take_steps = Outcome.accept, federation_round.take_steps

        def accepting(outcome: Outcome, *arguments: Any) -> None:
            accept(outcome, *arguments)
            for states in (outcome.states, outcome.memory):
                self._storages.mark(states)

        def taking(*arguments: Any) -> Any:
            proposal = take_steps(*arguments)
            self.apply = self._storages.now
            return proposal

        with patch.object(Outcome, "accept", accepting), patch.object(federation_round, "take_steps", taking):
            yield


class Row(NamedTuple):
    """What is alive with one method."""

    method: str
    rest: Live
    step: Live
    apply: Live
    peak: float
    states: float


def measure(
    method: str | Algorithm,
    num_clients: int = 4,
    states: str = "memory",
    server_fraction: float = 0.0,
) -> Row:
    """Return what is alive in the last of three rounds."""
    torch.manual_seed(0)
    images, labels = torch.rand(8 * num_clients, CHANNELS, SIZE, SIZE), torch.arange(8 * num_clients) % CLASSES
    data = Arrays(
        train=(images, labels),
        test=(images, labels),
        num_classes=CLASSES,
        num_clients=num_clients,
        batch_size=4,
        server_fraction=server_fraction,
    )
    net = nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * SIZE**2, CLASSES))
    size = sum(p.nbytes for p in net.parameters())
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(pieces, "LONG", 1_000),
        patch.object(pieces, "PIECE", 512),
    ):
        storages = LiveStorages(size)
        moments = Moments(storages)
        trainer = FederatedTrainer(
            accelerator="cpu",
            max_rounds=3,
            clients_per_round=num_clients,
            client_states=states,
            default_root_dir=folder,
            runner="serial",
            callbacks=[moments],
            **QUIET,
        )
        with moments.watching(), storages:
            trainer.fit(ImageClassifier(net, CLASSES, learning_rate=0.01, momentum=0.0), data, method, verbose=False)
    name = method if isinstance(method, str) else type(method).__name__
    return Row(name, moments.rest, moments.step, moments.apply, storages.peak - 1, storages.states)


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--algorithm", action="append", help=f"default: {', '.join(METHODS)}")
    parser.add_argument("--clients", type=int, default=4, help="clients, all of which train in every round")
    parser.add_argument("--states", choices=("memory", "disk"), default="memory", help="trainer.client_states")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"{'method':<12}{'rest':>10}{'step':>10}{'Apply':>10}{'peak':>7}{'states':>8}")
    for method in options.algorithm or METHODS:
        row = measure(method, options.clients, options.states)
        cells = "".join(f"{cell!s:>10}" for cell in (row.rest, row.step, row.apply))
        print(f"{method:<12}{cells}{row.peak:>7.1f}{row.states:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
