"""FedAP's pruning rate of a network, found from all sources of training data, in any trainer.

    p*_k   from the Hessian of source k's loss on a random batch           lightning_fl.pruning.SourceRate
    p*     = Σ_k a_k p*_k / Σ_k a_k,   a_k = n_k / (D(P_k) + ε)            lightning_fl.pruning.curvature.layer_rates

In a federation the sources are the server and all clients; otherwise the one source is the training data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fl.callbacks.pruning._training_samples import Source, moved, sources_of
from lightning_fl.checks import checked
from lightning_fl.errors import require
from lightning_fl.pruning import SourceRate, TrainingLoss, plans_of, trainable
from lightning_fl.pruning.curvature import layer_rates


class AdaptiveRate:
    """Find p* from the curvature of the module's own training loss, in evaluation mode, on one batch of each source.

    The sources are divided among the processes. The run's random state does not change.

    Args:
        mode: method of finding a source's rate: `slq_plateau`, the share of the spectrum clearly above 0 (FedAP's authors'
            code); `gap`, the share below the first gap that the displacement from the initial model cannot close (the paper);
            or `gap_of_all`, the same over all eigenvalues, including zeros.
        max_sources: largest number of a federation's sources to ask, drawn at random; all if not given.
        curvature: `hessian`, or `ggn` for the generalised Gauss-Newton matrix of a classifier.
        epsilon: ε > 0 in the sources' weights.
        batch_size: samples of a source's batch, at least 1.
        lanczos_steps: matrix-vector products per spectrum, at least 2; they need memory for as many vectors of the model's size.
        probes: random vectors per spectrum, at least 1.
        max_rate: upper bound of a source's rate, in [0, 1).
        server_only: in a federation, ask only the server.

    Raises:
        UserError: a value is not allowed.

    Attributes:
        asked: clients that were asked last.
        metrics: latest `prune/sources`, and `prune/nonfinite_sources`, the number of sources whose curvature was not finite
            and whose rate counts as 0.
    """

    @checked
    def __init__(
        self,
        mode: Literal["slq_plateau", "gap", "gap_of_all"] = "slq_plateau",
        max_sources: Annotated[int, Ge(1)] | None = None,
        curvature: Literal["hessian", "ggn"] = "hessian",
        epsilon: Annotated[float, Gt(0)] = 1e-4,
        batch_size: Annotated[int, Ge(1)] = 100,
        lanczos_steps: int = 50,
        probes: int = 1,
        max_rate: float = 0.95,
        server_only: bool = False,
    ) -> None:
        self.source_rate = SourceRate(mode, lanczos_steps, probes, max_rate)
        self.max_sources = max_sources
        self.curvature: Literal["hessian", "ggn"] = curvature
        self.epsilon = epsilon
        self.batch_size = batch_size
        self.server_only = server_only
        self.asked: list[int] = []
        self.metrics: dict[str, float] = {}
        self._initial: dict[str, Tensor] = {}
        self._num_plans = 0  # number of the module's prunings that were applied to the initial model

    def reset(self, module: LightningModule) -> None:
        """Reset for a new training."""
        self.asked, self.metrics = [], {}
        self._initial, self._num_plans = {}, len(plans_of(module))

    def remember(self, module: LightningModule) -> None:
        """Keep the initial model for `gap`, even if only a longer run would use it, unless a checkpoint contains it."""
        if self.source_rate.mode != "slq_plateau" and not self._initial:
            floats = [pair for pair in module.named_parameters() if pair[1].is_floating_point()]
            self._initial = {name: x.detach().clone().cpu() for name, x in floats}  # also of layers to be unfrozen
        # A module that has only the shapes of its checkpoint has no plans of its prunings.
        self._num_plans = min(self._num_plans, len(plans_of(module)))

    def start(self, trainer: Any, module: LightningModule) -> None:
        """Check before any training, on two samples, that a rate can be found.

        Raises:
            UserError: the curvature of the loss cannot be found, or `server_only` is given without server samples.
        """
        loss, source = TrainingLoss(module, self.curvature), self._sources(trainer)[0]
        with isolate_rng():
            batch = moved(trainer, source.batch(min(2, self.batch_size), np.random.default_rng(0)))
            product = loss.curvature(batch)(loss.point)
            product(torch.zeros(sum(tensor.numel() for tensor in loss.point), device=module.device))

    def follow(self, module: LightningModule) -> None:
        """Apply the module's later prunings to the initial model, also before a checkpoint is saved."""
        plans = plans_of(module)
        for plan in plans[self._num_plans :]:
            self._initial = {name: plan.cut(name, tensor) for name, tensor in self._initial.items()}
        self._num_plans = len(plans)

    def forget(self) -> None:
        """Drop the initial model, because no further pruning follows."""
        self._initial = {}

    def __call__(self, trainer: Any, module: LightningModule) -> float:
        """Return p*, the same on every process."""
        with isolate_rng():
            return self._overall_rate(trainer, module, self._sources(trainer), seed_of(trainer))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"initial": self._initial, "plans_before": self._num_plans}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self._initial, self._num_plans = state_dict["initial"], state_dict["plans_before"]

    def _sources(self, trainer: Any) -> Sequence[Source]:
        """Return the sources that may be asked."""
        sources = sources_of(trainer)
        if not self.server_only:
            return sources
        server = [source for source in sources if source.client is None]
        require(
            bool(server),
            "the pruning rate is found from the server's samples, but there are none: set --data.server_fraction, for example "
            "0.05, or give a rate.",
        )
        return server

    def _overall_rate(
        self, trainer: Any, module: LightningModule, sources: Sequence[Source], seed: tuple[int, int]
    ) -> float:
        """Return p* over the drawn sources, and book their reports."""
        if self.max_sources is not None and self.max_sources < len(sources):
            drawn = np.random.default_rng(seed).choice(len(sources), self.max_sources, replace=False)
            sources = [sources[position] for position in sorted(drawn)]
        self.asked = [source.client for source in sources if source.client is not None]
        rates = self._rates(trainer, module, sources, seed)
        for source in sources:
            source.answer(1)
        finite = np.isfinite(rates)
        self.metrics = {"prune/sources": len(sources), "prune/nonfinite_sources": int((~finite).sum())}
        weights = layer_rates.source_weights(
            [source.num_samples for source in sources], [source.degree for source in sources], self.epsilon
        )
        return layer_rates.mean_rate(np.where(finite, rates, 0.0), weights)

    def _rates(
        self, trainer: Any, module: LightningModule, sources: Sequence[Source], seed: tuple[int, int]
    ) -> np.ndarray:
        """Return p*_k of each source; each process finds its share."""
        loss, initial = TrainingLoss(module, self.curvature), self._initial_model(module)
        rates = torch.zeros(len(sources), dtype=torch.float64)
        mine = range(trainer.global_rank, len(sources), trainer.world_size)
        for position in Tqdm(
            mine, desc="Pruning rates", unit="source", leave=False, disable=not _shows_progress(trainer)
        ):
            source = sources[position]
            rng = np.random.default_rng([*seed, position if source.client is None else 1 + source.client])
            batch = moved(trainer, source.batch(self.batch_size, rng))
            generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
            rates[position] = self.source_rate(loss.curvature(batch), loss.point, initial, generator)
        if trainer.world_size > 1:
            rates = trainer.strategy.reduce(rates.to(module.device), reduce_op="sum")
        return rates.cpu().numpy()

    def _initial_model(self, module: LightningModule) -> list[Tensor] | None:
        """Return w_0 with the module's later prunings applied; None if it is not kept."""
        if not self._initial:
            return None
        self.follow(module)
        return [self._initial[name].to(now) for name, now in trainable(module).items()]


def seed_of(trainer: Any) -> tuple[int, int]:
    """Return the seed of a pruning's random draws: the run's seed and the epoch."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0")), trainer.current_epoch


def _shows_progress(trainer: Any) -> bool:
    bar = trainer.progress_bar_callback
    return trainer.is_global_zero and bar is not None and getattr(bar, "is_enabled", True)
