"""Progress bar of a federation: rounds and the clients within them, with the run's metric, bytes and the time left."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm  # a notebook's bar where ipywidgets is installed

from lightning_fl.outputs.metric import TRAINING_LOSS
from lightning_fl.outputs.units import in_bytes

WIDE_BAR, SHORTEST_BAR = 16, 5
"""Columns that further facts leave to the bar, and columns below which no bar is drawn."""
LINE_SECONDS = 10
"""Seconds between two lines of the set-up where the bar cannot be drawn anew."""
LOGGERS = ("", "lightning.pytorch", "lightning.fabric", "pytorch_lightning")
"""Loggers whose messages on the console are printed above the bar."""


class _RoundBar(Tqdm):
    """tqdm's bar that leaves out the least important facts in a narrow terminal, and cuts none.

    Attributes:
        main: the most important facts, for which the bar shrinks; the first is the most important.
        more: facts that are shown where the bar stays wide.
    """

    main: Sequence[str] = ()
    more: Sequence[str] = ()

    def __reduce__(self) -> Any:
        """Copy the bar, with its callback, as a hidden one: a drawn one cannot be copied, and tqdm would give the copy a line."""
        return partial(_RoundBar, disable=True), ()

    @property
    def format_dict(self) -> Any:
        """Values for the line, and the line's format."""
        values = super().format_dict
        if "ncols" not in values:  # hidden from the beginning
            return values
        values["ncols"] = columns = values["ncols"] if isinstance(values["ncols"], int) else None  # None in a notebook

        def room(facts: Sequence[str], has_bar: bool = True) -> float:
            line = self.format_meter(**{**values, "bar_format": _line(facts, "" if has_bar else None), "ncols": None})
            return math.inf if columns is None else columns - len(line)

        counts = range(len(self.more), -1, -1)
        count = next((count for count in counts if room([*self.main, *self.more[:count]]) >= WIDE_BAR), 0)
        facts = [*self.main, *self.more[:count]]
        if room(facts) >= SHORTEST_BAR:
            return {**values, "bar_format": _line(facts, "{bar}")}
        while facts and room(facts, has_bar=False) < 0:
            facts.pop()
        return {**values, "bar_format": _line(facts, None)}


class _Lines:
    """Stream that writes each state of a bar on a line of its own, because outputs other than terminals show all."""

    def write(self, text: str) -> None:
        """Write a state of the bar; it is not empty, and begins by going back to the start of the line."""
        if line := text.strip():
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        """Flush the stream."""
        sys.stderr.flush()


def rewrites_lines() -> bool:
    """True if the bar can be drawn anew in its place: in a terminal, or as a notebook's widget."""
    return sys.stderr.isatty() or any(base.__name__ == "tqdm_notebook" for base in Tqdm.__mro__)


class _AboveBar:
    """Stream that writes to another one, above the bar."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write a text."""
        with Tqdm.external_write_mode(file=self._stream):
            self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def _line(facts: Sequence[str], bar: str | None) -> str:
    """Return tqdm's format of a line with these facts; without percentage and bar if `bar` is None."""
    begun = "" if bar is None else f"{{percentage:3.0f}}%|{bar}| "
    listed = "".join(f", {fact}" for fact in facts).replace("{", "{{").replace("}", "}}")
    return f"{{desc}}: {begun}[{{elapsed}}<{{remaining}}{listed}]"


class RoundProgressBar(ProgressBar):
    """Bar with the round, the time left, the run's metric, bytes up and down, clients done and their speed.

    In a file, a pipe or a log it is a line a round.

    Attributes:
        is_enabled: True if the bar is shown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True
        self._bar: Any = _RoundBar(disable=True)  # a hidden bar ignores every call
        self._redirected = ExitStack()
        self._chosen: list[str] = []
        self._down = self._speed = ""
        self._began = self._trained_s = 0.0
        self._training_share = 1.0
        self._is_redrawn = True

    def disable(self) -> None:
        """Hide the bar."""
        self.is_enabled = False

    def enable(self) -> None:
        """Show the bar."""
        self.is_enabled = True

    def print(self, *arguments: Any, **options: Any) -> None:
        """Print above the bar."""
        Tqdm.write(" ".join(map(str, arguments)), file=options.get("file", sys.stdout))

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
                kind=_RoundBar,
                smoothing=0,  # use the mean speed since the start, from which the time left follows at any moment of a round
                miniters=0,
                mininterval=0.1 if rewrites_lines() else math.inf,  # a round, at its end
            )
            self._redirect_messages()

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the clients' clock."""
        self._began, self._trained_s = time.perf_counter(), 0.0
        self._bar.set_description_str(f"Round {trainer.current_epoch + 1}/{trainer.max_rounds}", refresh=False)

    def on_client_upload(
        self, trainer: Any, pl_module: LightningModule, client: int, position: int, total: int
    ) -> None:
        """Show the progress of the round in this process's share of the clients; only federations call this."""
        self._trained_s = time.perf_counter() - self._began
        self._speed = (
            f"clients/s={position * trainer.world_size / trainer.devices_per_client / max(self._trained_s, 1e-9):.3g}"
        )
        self._show_more(f"clients={position}/{total}")
        self._bar.update(trainer.current_epoch + self._training_share * position / total - self._bar.n)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Advance the bar by one round."""
        metrics, ledger = trainer.callback_metrics, trainer.run.ledger
        result = trainer.metric if trainer.metric in metrics else TRAINING_LOSS
        names = [result, *(name for name in trainer.progress_bar_metrics if name != result)]
        facts = [f"{name.removeprefix('val/')}={float(metrics[name]):.4g}" for name in names if name in metrics]
        has_result = int(result in metrics)
        self._bar.main = [*facts[:has_result], f"up={in_bytes(ledger.total_bytes('up'))}"]
        self._chosen, self._down = facts[has_result:], f"down={in_bytes(ledger.total_bytes('down'))}"
        self._show_more()
        self._bar.update(trainer.current_epoch + 1 - self._bar.n)
        if not self._is_redrawn:
            self._bar.refresh()
        # Assume that clients take the same share of the next round's time; validation and the server take the rest.
        if self._trained_s:
            self._training_share = min(1.0, self._trained_s / (time.perf_counter() - self._began))

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the bar, so that the error message starts on a new line."""
        self._close()

    def _close(self) -> None:
        self._bar.close()
        self._redirected.close()

    def _redirect_messages(self) -> None:
        """Print messages of loggers on the console above the bar, because they would continue its line."""
        if not self.is_enabled or hasattr(self._bar, "container"):  # the bar of a notebook is no text
            return
        for handler in [handler for name in LOGGERS for handler in logging.getLogger(name).handlers]:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr):
                self._redirected.callback(handler.setStream, handler.setStream(_AboveBar(handler.stream)))

    def _show_more(self, *clients: str) -> None:
        """Set the facts that are shown only where there is room, the most important first."""
        self._bar.more = [fact for fact in (*self._chosen, *clients, self._down, self._speed) if fact]

    def _open(self, kind: type[Tqdm] = Tqdm, **options: Any) -> None:
        """Replace the bar by a new one."""
        self._bar.close()
        self._is_redrawn = rewrites_lines()
        if not self._is_redrawn:
            options = {
                "mininterval": LINE_SECONDS,
                "file": _Lines(),
                "delay": 1e-9,
                "leave": False,
                "ascii": True,
            } | options
        self._bar = kind(dynamic_ncols=True, disable=not self.is_enabled, **options)
