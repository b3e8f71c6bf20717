"""Progress bar of a federation: rounds and the clients within them, with accuracy and megabytes."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ProgressBar
from tqdm.auto import tqdm

from lightning_fl.outputs.metric import TRAINING_LOSS
from lightning_fl.outputs.units import in_bytes


class RoundProgressBar(ProgressBar):
    """Bar with the round, clients done and their speed, accuracy, megabytes up and down, and the time left.

    Attributes:
        is_enabled: True if the bar is shown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True
        self._bar: Any = tqdm(disable=True)  # a hidden bar ignores every call
        self._shown: dict[str, str] = {}
        self._began = self._trained_s = 0.0
        self._training_share = 1.0

    def disable(self) -> None:
        """Hide the bar."""
        self.is_enabled = False

    def enable(self) -> None:
        """Show the bar."""
        self.is_enabled = True

    def print(self, *arguments: Any, **options: Any) -> None:
        """Print above the bar."""
        tqdm.write(" ".join(map(str, arguments)), file=options.get("file", sys.stdout))

    def on_client_prepared(
        self, trainer: Any, pl_module: LightningModule, client: int, position: int, total: int
    ) -> None:
        """Show the progress of the set-up before the first round; called by methods whose clients have work there."""
        if position == 1:
            self._open(total=total, desc="Set-up", unit="client")
        self._bar.update()

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Open the bar if there is a round to do."""
        if trainer.current_epoch < trainer.max_rounds:
            self._open(
                total=trainer.max_rounds,
                initial=trainer.current_epoch,
                desc="Round",
                unit="round",
                bar_format="{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
                smoothing=0,  # use the mean speed since the start, from which the time left follows at any moment of a round
                miniters=0,
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the clients' clock."""
        self._began, self._trained_s = time.perf_counter(), 0.0
        self._bar.set_description_str(f"Round {trainer.current_epoch + 1}/{trainer.max_rounds}", refresh=False)

    def on_client_upload(
        self, trainer: Any, pl_module: LightningModule, client: int, position: int, total: int
    ) -> None:
        """Show the progress of the round in this process's share of the clients; only federations call this."""
        self._trained_s = time.perf_counter() - self._began
        self._shown["clients/s"] = f"{position * trainer.world_size / max(self._trained_s, 1e-9):.3g}"
        self._bar.set_postfix({"clients": f"{position}/{total}", **self._shown}, refresh=False)
        self._bar.update(trainer.current_epoch + self._training_share * position / total - self._bar.n)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Advance the bar by one round."""
        metrics, ledger = trainer.callback_metrics, trainer.run.ledger
        self._shown = {name: shown for name, shown in self._shown.items() if name == "clients/s"}
        result = trainer.metric if trainer.metric in metrics else TRAINING_LOSS
        for name in (result, *trainer.progress_bar_metrics):
            if name in metrics:
                self._shown[name.removeprefix("val/")] = f"{float(metrics[name]):.4g}"
        self._shown |= {"up": in_bytes(ledger.total_bytes("up")), "down": in_bytes(ledger.total_bytes("down"))}
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update(trainer.current_epoch + 1 - self._bar.n)
        # Assume that clients take the same share of the next round's time; validation and the server take the rest.
        if self._trained_s:
            self._training_share = min(1.0, self._trained_s / (time.perf_counter() - self._began))

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Close the bar."""
        self._bar.close()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the bar, so that the error message starts on a new line."""
        self._bar.close()

    def _open(self, **options: Any) -> None:
        """Replace the bar by a new one."""
        self._bar.close()
        self._bar = tqdm(dynamic_ncols=True, disable=not self.is_enabled, **options)
