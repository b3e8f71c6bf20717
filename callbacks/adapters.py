"""Adapters of `peft`: export after training, and the error of averaging LoRA's factors over clients.

LoRA (Hu et al., ICLR 2022) adds B A to a frozen weight, A (r, in) and B (out, r). The mean of the products is not the product of
the means: Σ p B_k A_k − B̄ Ā = Σ p (B_k − B̄)(A_k − Ā). This is 0 if all clients have the same A, as in FFA-LoRA (Sun et al.,
    ICLR
2024), which freezes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lightning_fl.errors import require
from lightning_fl.vectors.layer_groups import factor_pairs


class AdapterExport(Callback):
    """Save the trained adapters as `peft` does, in a folder that `PeftModel.from_pretrained` loads. Works in any trainer.

    If a module has several models of `peft`, each gets a subfolder with the name of its attribute.

    Args:
        folder: folder to write, relative to `default_root_dir`, or an absolute path.

    Raises:
        UserError: before training, if the module holds no model of `peft`.
    """

    def __init__(self, folder: str = "adapter") -> None:
        self.folder = folder

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Refuse a module without adapters.

        Raises:
            UserError: the module has no adapters.
        """
        require(
            stage != "fit" or bool(_adapted(pl_module)),
            f"AdapterExport saves adapters, and {type(pl_module).__name__} holds no model from peft.get_peft_model.",
        )

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Save the adapters of the trained model; in a federation, of the server's model."""
        if not trainer.is_global_zero:
            return
        adapted = _adapted(pl_module)
        for name, model in adapted.items():
            folder = Path(trainer.default_root_dir, self.folder)
            model.save_pretrained(str(folder if len(adapted) == 1 else folder / name))


class AdapterError(Callback):
    """Log `lora/product_error`, the relative error of averaging LoRA's factors instead of their products in a federation.

    ‖Σ p B_k A_k − B̄ Ā‖ / ‖Σ p B_k A_k − B A‖ over all adapted layers, where B A is the product at the start of the round, B_k
    and A_k are what arrives from client k, and B̄ and Ā their means with the weights p of the clients' samples. Changes
    nothing.

    Raises:
        UserError: before training, if the trainer has no clients, or the module no LoRA adapter that it trains.
    """

    columns_of_clients = ("lora/",)

    def __init__(self) -> None:
        self._pairs: list[tuple[str, str]] = []
        self._start = self._sums = torch.zeros(0)

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Find the factors.

        Raises:
            UserError: the trainer has no clients, or the module no trained LoRA factors.
        """
        if stage != "fit":
            return
        require(
            hasattr(trainer, "evaluate_clients"),
            "AdapterError compares the adapters of clients, and lightning.Trainer has no clients: use FederatedTrainer.",
        )
        self._pairs = _pairs(pl_module)
        require(
            bool(self._pairs),
            f"AdapterError compares pairs of LoRA's factors, and {type(pl_module).__name__} trains none: with one factor frozen, "
            "as in FFA-LoRA, there is no such error.",
        )

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin the sums of the round."""
        self._start = trainer.run.params.cpu().double()
        numbers = len(self._products(trainer.run, self._start))
        # Σ n_k B_k A_k of all pairs, Σ n_k Δ_k, Σ n_k
        self._sums = torch.zeros(numbers + len(self._start) + 1, dtype=torch.float64)

    def on_client_message(self, trainer: Any, pl_module: LightningModule, message: Any) -> None:
        """Add a client's factors."""
        if "model" not in message.decoded or not message.decoded["model"].isfinite().all():
            return
        delta = message.decoded["model"].detach().cpu().double()
        products = self._products(trainer.run, self._start + delta)
        samples = float(trainer.datamodule.client_sizes[message.client])
        self._sums += samples * torch.cat([products, delta, torch.ones(1, dtype=torch.float64)])

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the error of the round over the clients of all processes."""
        sums = trainer.strategy.reduce(self._sums, reduce_op="sum").cpu()
        if not sums[-1]:
            return
        num_parameters = len(self._start)
        products, delta = (sums[:-1] / sums[-1]).tensor_split([-num_parameters])
        moved = (products - self._products(trainer.run, self._start)).norm()
        missed = (products - self._products(trainer.run, self._start + delta)).norm()
        if moved:
            pl_module.log("lora/product_error", missed / moved)

    def _products(self, run: Any, params: Tensor) -> Tensor:
        """Return B A of all pairs one after the other, of parameters (d,)."""
        views = run.layout.views(params)
        return torch.cat([(views[b].flatten(1) @ views[a].flatten(1)).flatten() for a, b in self._pairs])


def _adapted(module: nn.Module) -> dict[str, Any]:
    """Return the models of `peft` in a module, by the names of their attributes, without those inside others."""
    adapters = {
        name: child
        for name, child in module.named_modules()
        if hasattr(child, "peft_config") and hasattr(child, "save_pretrained") and hasattr(child, "base_model")
    }
    return {
        name: child for name, child in adapters.items() if not any(name.startswith(f"{other}.") for other in adapters)
    }


def _pairs(module: nn.Module) -> list[tuple[str, str]]:
    """Return the names of A and B of every adapted layer of which B is trained, and A too."""
    return factor_pairs(name for name, parameter in module.named_parameters() if parameter.requires_grad)
