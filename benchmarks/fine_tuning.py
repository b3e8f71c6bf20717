"""Measure what fine-tuning a model of GPT-2's size in a federation takes: memory, bytes, files, time.

    python benchmarks/fine_tuning.py                   # see docs/how-to/large-models.md; takes minutes and 6 GB
    python benchmarks/fine_tuning.py --tune lora-adamw --clients 10

Needs `pip install 'lightning-fl[peft]' transformers`. The weights are random and the text is noise, which changes none of the
figures. Each row has a process of its own, which trains two rounds of clients that make one step on two texts of 32 tokens:

- trained: millions of numbers that clients train and send, of 124 million.
- up: MB that a client sends in a round, uncompressed.
- alive: the most memory of tensors of at least 1 MiB ÷ the model's 498 MB, activations and checkpoints included.
- peak: the most resident memory beyond that before the fit, which has the model already, in the same unit.
- last, frozen, model: MB of `last.ckpt`, of the frozen weights beside it, of `model.ckpt`.
- round: seconds of processor time of a round of one client, its checkpoint included, with one thread.
"""

from __future__ import annotations

import argparse
import logging
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from live_vectors import LiveStorages
from torch import Tensor

from lightning_fl import FederatedTrainer
from lightning_fl.data import IID, Arrays

TUNES = ("full-sgd", "full-adamw", "lora-sgd", "lora-adamw")
TOKENS, TEXTS, VOCABULARY = 32, 2, 50257
MB = 1e6


class Writer(lightning.LightningModule):
    """GPT-2 with random weights, to be trained whole or by adapters."""

    def __init__(self, tune: str) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        what, self.optimizer_name = tune.split("-")
        self.network: Any = GPT2LMHeadModel(GPT2Config())
        if what == "lora":
            self.network = get_peft_model(self.network, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of predicting each token from those before it."""
        loss: Tensor = self.network(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD or AdamW."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        kind = torch.optim.SGD if self.optimizer_name == "sgd" else torch.optim.AdamW
        return kind(trained, lr=1e-4)


class Rounds(lightning.Callback):
    """Notes the processor time at which each round begins."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the time."""
        self.began.append(time.process_time())


def measure(tune: str, num_clients: int) -> None:
    """Print one row."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = Writer(tune)
    size = sum(p.nbytes for name, p in module.named_parameters() if "lora_" not in name)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    texts = torch.randint(VOCABULARY, (TEXTS * num_clients, TOKENS))
    data = Arrays(
        train=(texts, torch.zeros(len(texts))),
        test=(texts[:1], torch.zeros(1)),
        num_clients=num_clients,
        partition=IID(),
        batch_size=TEXTS,
    )
    rounds, storages = Rounds(), LiveStorages(size, least_bytes=2**20)
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            accelerator="cpu",
            max_rounds=3,
            clients_per_round=num_clients,
            default_root_dir=folder,
            runner="serial",
            threads=1,
            callbacks=[rounds],
            logger=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        before = _peak_bytes()
        with storages:
            trainer.fit(module, data, verbose=False)
        files = [_mb(Path(folder), f"checkpoints/{name}") for name in ("last.ckpt", "frozen/*")]
        files.append(_mb(Path(folder), "model.ckpt"))
    seconds = (rounds.began[-1] - rounds.began[-2]) / num_clients
    sent = trainer.run.ledger.total_bytes("up") / (3 * num_clients) / MB
    print(
        f"{tune:<12}{trained / 1e6:>8.1f}{sent:>8.1f}{storages.peak:>7.1f}{(_peak_bytes() - before) / size:>7.1f}"
        f"{files[0]:>8.1f}{files[1]:>8.1f}{files[2]:>8.1f}{seconds:>8.1f}",
        flush=True,
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _mb(folder: Path, pattern: str) -> float:
    return sum(path.stat().st_size for path in folder.glob(pattern)) / MB


def main() -> None:
    """Parse the command line, and measure each row in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tune", action="append", choices=TUNES, help="default: all")
    parser.add_argument("--clients", type=int, default=2, help="clients, all of which train in every round")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        measure(options.tune[0], options.clients)
        return
    print(f"{'tune':<12}{'trained':>8}{'up':>8}{'alive':>7}{'peak':>7}{'last':>8}{'frozen':>8}{'model':>8}{'round':>8}")
    for tune in options.tune or TUNES:
        row = ["--row", "--tune", tune, "--clients", str(options.clients)]
        subprocess.run([sys.executable, __file__, *row], check=True)


if __name__ == "__main__":
    main()
