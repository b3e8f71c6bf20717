"""Program of `test_checkpointing`: run fits that kill their own process at the n-th event of a kind.

python killed_run.py FOLDER EVENT=N …, where EVENT is batch, upload, round or write (halfway through a checkpoint). Each fit
has its own process and the folder FOLDER/EVENT.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from toys import Perceptron, Pruning, federation

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import FedOpt

ROUNDS = 6


def initial_module() -> Perceptron:
    torch.manual_seed(5)
    return Perceptron()


def trainer_in(folder: Any, *callbacks: Callback, **flags: Any) -> FederatedTrainer:
    """Return a quiet trainer that writes its files to `folder`; halfway through the network is pruned."""
    return FederatedTrainer(
        max_rounds=ROUNDS,
        clients_per_round=3,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[Pruning(when=ROUNDS // 2), *callbacks],
        **flags,
    )


def algorithm() -> FedOpt:
    """Return a method whose server keeps vectors and numbers of steps."""
    return FedOpt(partial(torch.optim.Adam, lr=0.1))


class Killer(Callback):
    """Callback that kills the process with SIGKILL."""

    def __init__(self, event: str, count: int) -> None:
        self.event, self.left = event, count

    def happened(self, event: str) -> None:
        self.left -= event == self.event
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.happened("batch")

    def on_client_upload(self, *arguments: Any) -> None:
        self.happened("upload")

    def on_train_epoch_end(self, *arguments: Any) -> None:
        self.happened("round")


def half_written(save: Callable[..., None], killer: Killer) -> Callable[..., None]:
    def write(checkpoint: Any, file: Any) -> None:
        save(checkpoint, file)
        if killer.left == 1:
            file.flush()
            file.truncate(file.tell() // 2)
        killer.happened("write")

    return write


def run_and_die(folder: Path, event: str, count: int) -> None:
    killer = Killer(event, count)
    if event == "write":
        torch.save = half_written(torch.save, killer)  # type: ignore[assignment]
    trainer_in(folder, killer).fit(initial_module(), federation(), algorithm())


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        event, count = argument.split("=")
        child = os.fork()  # the imports are done; they take longer than the fits
        if child == 0:
            run_and_die(Path(sys.argv[1]) / event, event, int(count))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"{argument} did not kill its process")
