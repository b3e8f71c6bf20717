"""FedAP's adaptive pruning in any Lightning trainer: once, the curvature of the loss says how much to cut, and feature maps what.

Liu et al., Efficient Federated Learning Using Dynamic Update and Adaptive Pruning with Momentum on Shared Server Data, ACM TIST
2024:

    p*_k   from the Hessian of source k's loss on a random batch           lightning_fl.pruning.SourceRate
    p*     = Σ_k a_k p*_k / Σ_k a_k,   a_k = n_k / (D(P_k) + ε)            lightning_fl.pruning.rates
    𝒱      = the ⌊R p*⌋-th smallest magnitude of all R parameters
    layer l loses the ⌊p*_l c_l⌋ filters of the lowest ranks, p*_l the share of its weights below 𝒱

In a federation the sources are the server and all clients; elsewhere there is one, the training data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm

from lightning_fl.errors import UserError, nearest, require
from lightning_fl.pruning import (
    RATE_MODES,
    Network,
    Plan,
    SourceRate,
    TrainingLoss,
    check_curvature,
    feature_map_ranks,
    filters_to_keep,
    plans_of,
    prunable_layers,
    prune,
    rates,
    trainable,
)


class Source(Protocol):
    """Who holds training data.

    Attributes:
        client: index of the client in a federation; None is the server, or a training without clients.
        num_samples: n_k.
        degree: D(P_k), how far its labels are from everyone's, in [0, 1].
    """

    client: int | None
    degree: float

    @property
    def num_samples(self) -> int: ...

    def batch(self, size: int, rng: np.random.Generator) -> Any:
        """A random batch of at most `size` samples."""


class AdaptivePruning(Callback):
    """Cut filters out of the module once, as many as the curvature of its loss allows and those whose feature maps say least.

    Asks for the training loss of the module itself, in evaluation mode, on one batch of each source. In `FederatedTrainer` the
    sources are the server, if it holds samples, and all clients; they are shared out over the processes. In `L.Trainer` every
    process asks its training data once. All cut alike.

    Logs, at the end of the epoch, `prune/rate` (p*), `prune/threshold` (𝒱), `prune/rate/<layer>` (p*_l), `prune/sources` and
    `prune/nonfinite_sources`, those whose curvature was not finite and whose rate therefore counts as 0.

    Args:
        prune_epoch: the epoch (in a federation the round) before whose training the module is cut, from 0.
        rate_mode: how a source's rate is found: `slq_plateau`, the share of the spectrum clearly above 0 (the authors' code);
            `gap`, the share below the first gap that the way from the initial model cannot close (the paper); or `fixed`.
        rate: p* in [0, 1) for `fixed`.
        max_sources: ask only so many of a federation's sources, drawn at random; all if not given.
        curvature: `hessian`, or `ggn` for the generalised Gauss-Newton matrix of a classifier.
        epsilon: ε > 0 of the sources' weights.
        batch_size: samples of a source's batch, at least 1.
        lanczos_steps: products for each spectrum, at least 2; as many vectors of the model's size are kept meanwhile.
        probes: random vectors for each spectrum, at least 1.
        max_rate: no source's rate is larger, in [0, 1).
        rank_samples: images whose feature maps are ranked, at least 1: the server's, or those of a random client where the
            server has none.

    Raises:
        UserError: a value is not allowed; or, when training starts, the module cannot be pruned.
    """

    def __init__(
        self,
        prune_epoch: int = 30,
        rate_mode: Literal["slq_plateau", "gap", "fixed"] = "slq_plateau",
        rate: float | None = None,
        max_sources: int | None = None,
        curvature: Literal["hessian", "ggn"] = "hessian",
        epsilon: float = 1e-4,
        batch_size: int = 100,
        lanczos_steps: int = 50,
        probes: int = 1,
        max_rate: float = 0.95,
        rank_samples: int = 500,
    ) -> None:
        require(prune_epoch >= 0, f"prune_epoch counts from 0, got {prune_epoch}.")
        if rate_mode not in (*RATE_MODES, "fixed"):
            raise UserError(f"rate_mode {rate_mode!r} is unknown; {nearest(str(rate_mode), (*RATE_MODES, 'fixed'))}.")
        if rate_mode == "fixed":
            require(rate is not None and 0 <= rate < 1, f"rate_mode='fixed' needs a rate in [0, 1), got {rate}.")
        else:
            require(rate is None, f"rate={rate} is for rate_mode='fixed'; {rate_mode!r} finds the rate itself.")
        require(max_sources is None or max_sources >= 1, f"max_sources must be at least 1, got {max_sources}.")
        require(epsilon > 0, f"epsilon must be above 0, got {epsilon}.")
        require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}.")
        require(rank_samples >= 1, f"rank_samples must be at least 1, got {rank_samples}.")
        check_curvature(curvature)
        self.prune_epoch = prune_epoch
        self.rate_mode = rate_mode
        self.rate = rate
        self.max_sources = max_sources
        self.curvature: Literal["hessian", "ggn"] = curvature
        self.epsilon = epsilon
        self.batch_size = batch_size
        self.rank_samples = rank_samples
        self.source_rate = SourceRate(
            "slq_plateau" if rate_mode == "fixed" else rate_mode, lanczos_steps, probes, max_rate
        )
        self.asked: list[int] = []
        """Clients that were asked for their rate."""
        self.ranked_by: int | None = None
        """The client whose images were ranked; None if that was the server, or nobody."""
        self.has_pruned = False
        self._initial: dict[str, Tensor] = {}
        self._plans_before = 0
        self._metrics: dict[str, float] = {}

    # -- when -------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """A new training begins."""
        if stage != "fit":
            return
        self.asked, self.ranked_by, self.has_pruned, self._metrics = [], None, False, {}
        self._initial, self._plans_before = {}, len(plans_of(pl_module))
        if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= self.prune_epoch:
            rank_zero_warn(
                f"AdaptivePruning never prunes: prune_epoch={self.prune_epoch} comes after the last of "
                f"{trainer.max_epochs} epochs."
            )

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Find out before the training whether the module can be pruned."""
        name = type(pl_module).__name__
        require(bool(prunable_layers(pl_module)), f"AdaptivePruning: no layer of {name} can lose filters.")
        if self.rate_mode != "fixed":
            TrainingLoss(pl_module, self.curvature)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Keep the initial model, of which `gap` wants to know, unless the checkpoint brought it."""
        if self.rate_mode == "gap" and not self._initial and not self.has_pruned:
            self._initial = {name: tensor.clone().cpu() for name, tensor in trainable(pl_module).items()}

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Prune, if this is the epoch."""
        if self.has_pruned or trainer.current_epoch != self.prune_epoch:
            return
        with isolate_rng():
            plan = self._plan(trainer, pl_module)
        prune(pl_module, plan, trainer.optimizers)
        self.has_pruned, self._initial = True, {}

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log what was done."""
        for name, value in self._metrics.items():
            pl_module.log(name, value)
        self._metrics = {}

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "has_pruned": self.has_pruned,
            "initial": self._initial,
            "plans_before": self._plans_before,
            "metrics": self._metrics,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.has_pruned, self._initial = state_dict["has_pruned"], state_dict["initial"]
        self._plans_before, self._metrics = state_dict["plans_before"], state_dict["metrics"]

    # -- what -----------------------------------------------------------------------------------------------------------

    def _plan(self, trainer: Any, pl_module: LightningModule) -> Plan:
        """Which filters stay, the same on every process."""
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0")), trainer.current_epoch
        sources = _sources(trainer)
        rate = self._overall_rate(trainer, pl_module, sources, seed) if self.rate is None else self.rate
        threshold = rates.magnitude_threshold(trainable(pl_module).values(), rate)
        network = Network(pl_module)
        by_layer = {
            name: rates.layer_rate(pl_module.get_submodule(name).weight, threshold)  # type: ignore[arg-type]
            for name in network.layers
        }
        self._metrics |= {"prune/rate": rate, "prune/threshold": threshold}
        self._metrics |= {f"prune/rate/{name}": share for name, share in by_layer.items()}
        if not any(math.floor(share * network.widths[name]) for name, share in by_layer.items()):
            return network.plan({})
        ranks = feature_map_ranks(pl_module, self._images(trainer, sources, seed), network.layers)
        if trainer.world_size > 1:
            ranks = {name: trainer.strategy.reduce(x.to(pl_module.device)).cpu() for name, x in ranks.items()}
        return network.plan(filters_to_keep(ranks, by_layer))

    def _overall_rate(
        self, trainer: Any, pl_module: LightningModule, sources: Sequence[Source], seed: tuple[int, int]
    ) -> float:
        """p*."""
        if self.max_sources is not None and self.max_sources < len(sources):
            drawn = np.random.default_rng(seed).choice(len(sources), self.max_sources, replace=False)
            sources = [sources[place] for place in sorted(drawn)]
        self.asked = [source.client for source in sources if source.client is not None]
        found = self._rates(trainer, pl_module, sources, seed)
        finite = np.isfinite(found)
        self._metrics |= {"prune/sources": len(sources), "prune/nonfinite_sources": int((~finite).sum())}
        weights = rates.source_weights(
            [source.num_samples for source in sources], [source.degree for source in sources], self.epsilon
        )
        return rates.mean_rate(np.where(finite, found, 0.0), weights)

    def _rates(
        self, trainer: Any, pl_module: LightningModule, sources: Sequence[Source], seed: tuple[int, int]
    ) -> np.ndarray:
        """p*_k of each source, which the processes find in turns."""
        loss, initial = TrainingLoss(pl_module, self.curvature), self._initial_model(pl_module)
        found = torch.zeros(len(sources), dtype=torch.float64)
        mine = range(trainer.global_rank, len(sources), trainer.world_size)
        for place in tqdm(mine, desc="Pruning rates", unit="source", leave=False, disable=not _shows_progress(trainer)):
            source = sources[place]
            rng = np.random.default_rng([*seed, place if source.client is None else 1 + source.client])
            batch = _moved(trainer, source.batch(self.batch_size, rng))
            generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
            found[place] = self.source_rate(loss.curvature(batch), loss.point, initial, generator)
        if trainer.world_size > 1:
            found = trainer.strategy.reduce(found.to(pl_module.device), reduce_op="sum")
        return found.cpu().numpy()

    def _initial_model(self, pl_module: LightningModule) -> list[Tensor] | None:
        """w_0, cut as the module has been since."""
        if not self._initial:
            return None
        for plan in plans_of(pl_module)[self._plans_before :]:
            self._initial = {name: plan.cut(name, tensor) for name, tensor in self._initial.items()}
        return [self._initial[name].to(now) for name, now in trainable(pl_module).items()]

    def _images(self, trainer: Any, sources: Sequence[Source], seed: tuple[int, int]) -> Sequence[Any]:
        """Batches to rank feature maps on."""
        rng = np.random.default_rng([*seed, 0])
        source = sources[0] if sources[0].client is None else sources[rng.integers(len(sources))]
        self.ranked_by = source.client
        batch = _moved(trainer, source.batch(self.rank_samples, rng))
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        return images.split(self.batch_size) if isinstance(images, Tensor) else [images]


class _TrainingData:
    """The training data of a trainer without clients."""

    client = None
    degree = 0.0
    num_samples = 1

    def __init__(self, loaders: Any) -> None:
        self._loaders = loaders

    def batch(self, size: int, rng: np.random.Generator) -> Any:
        """Random samples of every loader, as the loaders collate them."""
        return tree_map(lambda loader: _draw(loader, size, rng), self._loaders)


def _sources(trainer: Any) -> Sequence[Source]:
    """Everyone who holds training data, the server first; without clients, the training data once for each process."""
    federation = getattr(trainer, "sources", None)
    return federation() if federation is not None else [_TrainingData(trainer.train_dataloader)] * trainer.world_size


def _draw(loader: Any, size: int, rng: np.random.Generator) -> Any:
    """Random samples of a map-style data set or of a loader that draws; else the beginning of the first batch."""
    if hasattr(loader, "draw"):
        return loader.draw(size, rng)
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if is_map and loader.batch_sampler is not None:
        rows = rng.choice(len(loader.dataset), min(size, len(loader.dataset)), replace=False)
        return loader.collate_fn([loader.dataset[int(row)] for row in rows])
    return tree_map(lambda x: x[:size] if isinstance(x, Tensor) and x.dim() else x, next(iter(loader)))


def _moved(trainer: Any, batch: Any) -> Any:
    """To the accelerator, through the batch hooks, in the precision of the training."""
    return trainer.precision_plugin.convert_input(trainer.strategy.batch_to_device(batch))


def _shows_progress(trainer: Any) -> bool:
    bar = trainer.progress_bar_callback
    return trainer.is_global_zero and bar is not None and getattr(bar, "is_enabled", True)
