"""Measure the compression error of the uplink's codec in each round."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Ge
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_fl.checks import checked
from lightning_fl.errors import require
from lightning_fl.vectors.layer_groups import layer_groups

RESIDUAL = "residual/model"
SUMS = ("weight", "error", "cosine", "scale", "residual")
"""Sums over clients for the whole model and each layer."""
COUNTS = ("samples", "clients", "numbers", "bits", "residuals", "age", "limited", "saturated")
"""Sums over clients for all layers together."""


class CodecError(Callback):
    """Log the compression error of uploads: how far decoded deltas are from the clients' deltas.

    x is a client's delta, x̂ the delta that the server decodes, and p the client's share of the samples of the round's
    uploads. Numbers that a method does not send, such as layers left out, are in neither. Works only in a `FederatedTrainer`,
    and changes nothing.

    - `codec/error`: Σ p ‖x̂ − x‖² / ‖x‖², and likewise `codec/cosine` of the angle between them, and `codec/scale`,
      ⟨x̂, x⟩ / ‖x‖², which is 1 in the mean for an unbiased codec. Clients with x = 0 are left out.
    - `codec/mean_error`: ‖Σ p (x̂ − x)‖² / ‖Σ p x‖², the error of the mean over clients; about `codec/error` / K for
      independent unbiased codecs.
    - `codec/drift`: ‖Σ (x̂ − x)‖ / Σ ‖x‖ of these means, summed over the measured rounds. It falls to 0 for an unbiased codec,
      and with error feedback, which sends the error later.
    - `codec/residual`: Σ p ‖e‖ / ‖x‖, where e is the residual of error feedback, and `codec/residual_age`, the rounds since
      these clients' last upload; only with error feedback.
    - `codec/saturated`: count of numbers that the codec clipped to its largest value, if it has one, as `Cast` has.
    - `comm/uplink_ratio`: compression ratio, 32 bits × the count of numbers in the clients' deltas / the bits sent.

    Args:
        every_n_rounds: rounds between two measurements, at least 1.
        per_layer: also log each of the first six for every layer, as `codec/error/LAYER`.

    Raises:
        UserError: an argument is out of range; or, before training, the trainer has no clients.
    """

    columns_of_clients = ("codec/", "comm/uplink_ratio")

    @checked
    def __init__(self, every_n_rounds: Annotated[int, Ge(1)] = 1, per_layer: bool = False) -> None:
        self.every_n_rounds = every_n_rounds
        self.per_layer = per_layer
        self._measures = self._has_begun = False
        self._parts: dict[str, Tensor | slice] = {}  # end of a column's name: its positions in a vector (d,)
        self._sums = self._counts = self._error = self._delta = torch.zeros(0)
        self._drift = self._moved = torch.zeros(0, dtype=torch.float64)
        self._last_round: dict[int, int] = {}
        self._clients: list[int] = []  # clients of this process in the round

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Refuse a trainer without clients, and reset for a new run.

        Raises:
            UserError: the trainer has no clients.
        """
        require(
            hasattr(trainer, "evaluate_clients"),
            "CodecError needs the uploads of clients, and lightning.Trainer has no clients: use FederatedTrainer.",
        )
        if stage == "fit":
            self._drift = self._moved = torch.zeros(0, dtype=torch.float64)
            self._last_round = {}

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Decide whether to measure the round."""
        self._measures = (trainer.current_epoch + 1) % self.every_n_rounds == 0
        self._has_begun, self._clients = False, []

    def _begin(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin the sums of a round at its first message: when the round starts, a callback may still prune the model."""
        if self._has_begun:
            return
        self._has_begun, layout = True, trainer.run.layout
        self._parts = {"": slice(None)}
        if self.per_layer:
            positions = layout.views(torch.arange(layout.numel))
            for group in layer_groups(pl_module):
                group_positions = [positions[name].flatten() for name in group.parameters if name in positions]
                if group_positions:
                    self._parts[f"/{group.name}"] = torch.cat(group_positions)
        self._sums = torch.zeros(len(self._parts), len(SUMS), dtype=torch.float64)
        self._counts = torch.zeros(len(COUNTS), dtype=torch.float64)
        self._error = torch.zeros(layout.numel, dtype=torch.float64)
        self._delta = torch.zeros(layout.numel, dtype=torch.float64)

    def on_client_message(self, trainer: Any, pl_module: LightningModule, message: Any) -> None:
        """Add a client's upload to the sums."""
        if self._measures:
            self._begin(trainer, pl_module)
        if "model" not in message.sent:
            is_earlier_turn = any(name.startswith("model/") for name in message.sent)  # of the upload, as in TwoTurns
            if self._measures and is_earlier_turn:
                self._counts[COUNTS.index("bits")] += message.bits
            return
        if not all(bool(entry["model"].isfinite().all()) for entry in (message.sent, message.decoded)):
            return
        self._clients.append(message.client)
        if not self._measures:
            return
        sent, decoded = (entry["model"].detach().cpu().double() for entry in (message.sent, message.decoded))
        samples, residual = float(trainer.datamodule.client_sizes[message.client]), message.memory.get(RESIDUAL)
        old_residual = None if residual is None else residual.detach().cpu().double()
        for sums, part in zip(self._sums, self._parts.values(), strict=True):
            sums += samples * _compared(sent[part], decoded[part], None if old_residual is None else old_residual[part])
        age = trainer.current_epoch - self._last_round.get(message.client, trainer.current_epoch)
        numbers = float(sum(len(x) for x in message.sent.values()))
        has_residual = float(old_residual is not None)
        cut_off = message.num_saturated
        limited = [float(cut_off is not None), float(cut_off or 0)]
        self._counts += torch.tensor(
            [samples, 1, numbers, message.bits, has_residual, age, *limited], dtype=torch.float64
        )
        self._error += samples * (decoded - sent)
        self._delta += samples * sent

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the round's values over the clients of all processes."""
        self._last_round |= dict.fromkeys(_all_clients(self._clients, trainer.world_size), trainer.current_epoch)
        if not self._measures:
            return
        self._begin(trainer, pl_module)  # in a process without clients
        sizes = [self._sums.numel(), len(COUNTS), len(self._error), len(self._delta)]
        mine = torch.cat([self._sums.flatten(), self._counts, self._error, self._delta])
        sums, counts, error, delta = trainer.strategy.reduce(mine, reduce_op="sum").cpu().split(sizes)
        count = dict(zip(COUNTS, counts.tolist(), strict=True))
        if not count["samples"]:
            return
        error, delta = error / count["samples"], delta / count["samples"]
        # The first round, the first after a pruning, or the first of a resumed run that also asks for the layers.
        if len(self._drift) != len(error) or len(self._moved) < len(self._sums):
            self._drift, self._moved = torch.zeros_like(error), torch.zeros(len(self._sums), dtype=torch.float64)
        self._moved = self._moved[: len(self._sums)]
        self._drift = self._drift + error
        columns = {"comm/uplink_ratio": 32 * count["numbers"] / count["bits"]} if count["bits"] else {}
        for place, (end, part) in enumerate(self._parts.items()):
            sums_by_name = dict(zip(SUMS, sums.view(-1, len(SUMS))[place].tolist(), strict=True))
            if sums_by_name["weight"]:
                columns |= {
                    f"codec/{name}{end}": sums_by_name[name] / sums_by_name["weight"]
                    for name in ("error", "cosine", "scale")
                }
                if count["residuals"]:
                    columns[f"codec/residual{end}"] = sums_by_name["residual"] / sums_by_name["weight"]
            size, self._moved[place] = float(delta[part].norm()), self._moved[place] + delta[part].norm()
            if size:
                columns[f"codec/mean_error{end}"] = float(error[part].norm() / size) ** 2
            if self._moved[place]:
                columns[f"codec/drift{end}"] = float(self._drift[part].norm() / self._moved[place])
        if count["residuals"]:
            columns["codec/residual_age"] = count["age"] / count["clients"]
        if count["limited"]:
            columns["codec/saturated"] = count["saturated"]
        for name, value in columns.items():
            pl_module.log(name, torch.tensor(value, dtype=torch.float64))  # a Python float would become float32
        trainer.publish(columns)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"drift": self._drift, "moved": self._moved, "last_round": dict(self._last_round)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self._drift, self._moved = state_dict["drift"], state_dict["moved"]
        self._last_round = dict(state_dict["last_round"])


def _all_clients(mine: list[int], world_size: int) -> list[int]:
    """Return the clients of all processes, as any of them may train a client next."""
    if world_size == 1:
        return mine
    parts: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(parts, mine)
    return [client for part in parts for client in part]


def _compared(sent: Tensor, decoded: Tensor, memory: Tensor | None) -> Tensor:
    """Return a client's addend to each of `SUMS`; all are 0 if its delta is 0."""
    square = float(sent.square().sum())
    if not square:
        return torch.zeros(len(SUMS), dtype=torch.float64)
    product, length = float(sent @ decoded), float(decoded.norm())
    error, residual = float((decoded - sent).square().sum()), 0.0 if memory is None else float(memory.norm())
    cosine = product / (square**0.5 * length) if length else 0.0
    return torch.tensor([1.0, error / square, cosine, product / square, residual / square**0.5], dtype=torch.float64)
