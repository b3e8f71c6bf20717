"""Count and limit communication in any Lightning trainer.

In a federation the trainer's ledger counts every message; the meter adds the split by kind to the logged rows. Otherwise it
counts the exchange of data-parallel training: in every optimiser step each worker sends its gradients, Σ numel · bits per number,
and receives as much.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import torch
from annotated_types import Gt
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.checks import checked
from lightning_fl.errors import require
from lightning_fl.outputs.traffic import in_directions, in_words
from lightning_fl.outputs.units import in_bytes


class CommunicationMeter(Callback):
    """Log the communication, and stop when a budget is spent.

    In a federation: `comm/uplink_bits/KIND` and `comm/downlink_bits/KIND` of the round for every kind (model, moments, mask,
    scalars, buffers, data, keys) that has crossed so far. In an ordinary `L.Trainer`, once an epoch: `comm/uplink_bits` and
    `comm/downlink_bits` of the epoch, and `comm/total_uplink_bytes` and `comm/total_downlink_bytes` so far, of all workers
    together. They count an exchange of whole gradients, whatever the strategy; with one worker, the gradients that it would
    send.

    In a federation, `per_layer` adds `comm/uplink_bits/layer/LAYER` of the uploads. `comm/uplink_bits/layer/shared` counts
    bits that belong to no single layer, such as positions, scales of blocks, and buffers. Together they are `comm/uplink_bits`
    of the uploads.

    `entropy` adds `comm/uplink_entropy_bits` of the uploads and `comm/downlink_entropy_bits`: the bits of an ideal code for
    the same content, including the code's model, for each client that is charged. These bits are an estimate that nobody
    sends, so no total and no target includes them. Masks, parts of a method that no codec encodes, and broadcasts of
    `Followed` count as sent.

    Args:
        max_uplink_bytes: stop after the epoch (round) in which the bytes sent by all workers (clients) reach this limit, above
            0; None for no limit.
        max_downlink_bytes: the same limit for received bytes.
        max_total_bytes: the same limit for the sum of both.
        per_layer: split the bits of the uploads by layers.
        entropy: also log the ideal size of the messages.

    Raises:
        UserError: a limit is not positive; or, before training, `per_layer` or `entropy` is set and the trainer has no
            clients.
    """

    columns_of_clients = ("comm/uplink_bits/", "comm/uplink_entropy_bits", "comm/downlink_entropy_bits")

    @checked
    def __init__(
        self,
        max_uplink_bytes: Annotated[float, Gt(0)] | None = None,
        per_layer: bool = False,
        entropy: bool = False,
        max_downlink_bytes: Annotated[float, Gt(0)] | None = None,
        max_total_bytes: Annotated[float, Gt(0)] | None = None,
    ) -> None:
        self.max_uplink_bytes = max_uplink_bytes
        self.max_downlink_bytes = max_downlink_bytes
        self.max_total_bytes = max_total_bytes
        self.sent_bits = 0
        """Bits sent by all workers of an ordinary trainer so far."""
        self.per_layer = per_layer
        self.entropy = entropy
        self._epoch_bits = self._epoch = 0
        self._sizes: Counter[str] = Counter()

    @property
    def max_bytes(self) -> dict[str, float]:
        """Limits by direction: up, down, and total for both together."""
        limits = {"up": self.max_uplink_bytes, "down": self.max_downlink_bytes, "total": self.max_total_bytes}
        return {traffic: limit for traffic, limit in limits.items() if limit is not None}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Refuse `per_layer` and `entropy` in a trainer without clients, and reset for a new training.

        Raises:
            UserError: one of them is set, and the trainer has no clients.
        """
        asked = [name for name in ("per_layer", "entropy") if getattr(self, name)]
        require(
            not asked or hasattr(trainer, "evaluate_clients"),
            f"CommunicationMeter measures uploads of clients with {' and '.join(asked)}, but lightning.Trainer has no clients: "
            "use FederatedTrainer.",
        )
        if stage == "fit" and trainer.current_epoch == 0:
            self.sent_bits = self._epoch_bits = self._epoch = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin the sums of a round."""
        self._sizes = Counter()

    def on_client_message(self, trainer: Any, pl_module: LightningModule, message: Any) -> None:
        """Add the sizes of a client's upload."""
        if self.per_layer:
            for name, bits in message.bits_by_layer().items():
                self._sizes[f"comm/uplink_bits/layer/{name}"] += bits
        if self.entropy:
            self._sizes["comm/uplink_entropy_bits"] += message.entropy_bits

    def on_server_message(self, trainer: Any, pl_module: LightningModule, message: Any) -> None:
        """Add the bits that an ideal code of a server's message would save; a broadcast is the same in all processes."""
        if self.entropy and (message.client is not None or trainer.is_global_zero):
            spared = message.num_charged * (message.bits - message.entropy_bits)
            self._sizes["comm/downlink_entropy_bits"] -= spared

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Stop a resumed run whose budget is spent already."""
        self._stop_if_spent(trainer)

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Count the gradients that workers exchange in a step; in a federation, local steps exchange nothing."""
        if _ledger(trainer) is None:
            # A run that is resumed from an epoch's last step does not end that epoch.
            if self._epoch != trainer.current_epoch:
                self.sent_bits += self._epoch_bits
                self._epoch, self._epoch_bits = trainer.current_epoch, 0
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._epoch_bits += sum(8 * x.numel() * x.element_size() for x in gradients) * trainer.world_size

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the communication, and stop if the budget is spent."""
        ledger = _ledger(trainer)
        if ledger is not None:
            for direction in ("up", "down"):
                for kind, total in ledger.total_bits[direction].items():
                    if total:
                        _log_exactly(pl_module, f"comm/{direction}link_bits/{kind}", ledger.round_bits[direction][kind])
            self._log_sizes(trainer, pl_module)
        else:
            self.sent_bits += self._epoch_bits
            for direction in ("up", "down"):
                _log_exactly(pl_module, f"comm/{direction}link_bits", self._epoch_bits)
                _log_exactly(pl_module, f"comm/total_{direction}link_bytes", self.sent_bits / 8)
            self._epoch_bits = 0
        self._stop_if_spent(trainer)

    def _log_sizes(self, trainer: Any, module: LightningModule) -> None:
        """Log the sizes of the messages, of all processes."""
        if not (self.per_layer or self.entropy):
            return
        parts: list[Any] = [self._sizes]
        if trainer.world_size > 1:
            parts = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, self._sizes)
        total = Counter[str]()
        for part in parts:
            total.update(part)  # their sum would leave out zeros
        if self.entropy:
            total["comm/downlink_entropy_bits"] += _ledger(trainer).bits("down")
        for name, bits in total.items():
            _log_exactly(module, name, bits)

    def _stop_if_spent(self, trainer: Any) -> None:
        ledger = _ledger(trainer)
        ways = [self.sent_bits / 8] * 2 if ledger is None else [ledger.total_bytes("up"), ledger.total_bytes("down")]
        spent = in_directions(*ways)
        for traffic, limit in self.max_bytes.items():
            if spent[traffic] >= limit:
                trainer.should_stop = True
                rank_zero_info(
                    f"CommunicationMeter stops the run: {in_bytes(spent[traffic])} of {in_bytes(limit)} of "
                    f"{in_words(traffic)} are spent."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"sent_bits": self.sent_bits, "epoch_bits": self._epoch_bits, "epoch": self._epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self.sent_bits = state_dict["sent_bits"]
        self._epoch_bits = state_dict["epoch_bits"]
        self._epoch = state_dict.get("epoch", -1)


def _log_exactly(module: LightningModule, name: str, number: float) -> None:
    """Log a number of bits or bytes in float64; a Python float would become float32."""
    module.log(name, torch.tensor(number, dtype=torch.float64))


def _ledger(trainer: Any) -> Any:
    """Return a federation's ledger of bits; None in an ordinary trainer."""
    return getattr(getattr(trainer, "run", None), "ledger", None)
