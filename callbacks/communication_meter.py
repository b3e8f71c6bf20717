"""What a training exchanges, counted and limited, in any Lightning trainer.

In a federation the trainer's ledger has counted every message; the meter adds the split by kind to the rows. Elsewhere it counts
what data-parallel training exchanges: with every optimiser step each worker sends its gradients, Σ numel · bits of a number, and
receives as much.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.errors import require


class CommunicationMeter(Callback):
    """Log what is exchanged, and stop when there is no budget left.

    In a federation: `comm/uplink_bits/KIND` and `comm/downlink_bits/KIND` of the round for every kind (model, moments, mask,
    scalars, buffers, data) that has crossed so far. In an ordinary `L.Trainer`, once an epoch: `comm/uplink_bits` and
    `comm/downlink_bits` of the epoch, and `comm/total_uplink_bytes` and `comm/total_downlink_bytes` so far, of all workers
    together. They are what exchanging whole gradients takes, whatever the strategy makes of it; with one worker, what that one
    would send.

    Args:
        max_uplink_bytes: stop after the epoch (round) in which all workers (clients) together have sent this much, above 0; None
            for no limit.

    Raises:
        UserError: the limit is not positive.
    """

    def __init__(self, max_uplink_bytes: float | None = None) -> None:
        require(
            max_uplink_bytes is None or max_uplink_bytes > 0,
            f"max_uplink_bytes is a number of bytes above 0, got {max_uplink_bytes}.",
        )
        self.max_uplink_bytes = max_uplink_bytes
        self.sent_bits = 0
        """By all workers of an ordinary trainer so far."""
        self._epoch_bits = 0

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Count the gradients of a step that workers share; the local steps of a federation's clients share nothing."""
        if _ledger(trainer) is None:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._epoch_bits += sum(8 * x.numel() * x.element_size() for x in gradients) * trainer.world_size

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log, and stop if the budget is spent."""
        ledger = _ledger(trainer)
        if ledger is not None:
            for way in ("up", "down"):
                for kind, total in ledger.total_bits[way].items():
                    if total:
                        pl_module.log(f"comm/{way}link_bits/{kind}", float(ledger.round_bits[way][kind]))
            sent_bytes = ledger.total_bytes("up")
        else:
            self.sent_bits += self._epoch_bits
            sent_bytes = self.sent_bits / 8
            for way in ("up", "down"):
                pl_module.log(f"comm/{way}link_bits", float(self._epoch_bits))
                pl_module.log(f"comm/total_{way}link_bytes", sent_bytes)
            self._epoch_bits = 0
        if self.max_uplink_bytes is not None and sent_bytes >= self.max_uplink_bytes:
            trainer.should_stop = True
            rank_zero_info(
                f"CommunicationMeter: {sent_bytes / 1e6:,.1f} MB are sent, of {self.max_uplink_bytes / 1e6:,.1f} MB: the end."
            )

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"sent_bits": self.sent_bits}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.sent_bits = state_dict["sent_bits"]


def _ledger(trainer: Any) -> Any:
    """A federation's count of bits; None in an ordinary trainer."""
    return getattr(getattr(trainer, "run", None), "ledger", None)
