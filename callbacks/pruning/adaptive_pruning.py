"""FedAP's adaptive pruning in any Lightning trainer: the loss's curvature gives the rate, and feature maps the filters.

Liu et al., Efficient Federated Learning Using Dynamic Update and Adaptive Pruning with Momentum on Shared Server Data, ACM TIST
2024:

    p*     from all sources of training data                               callbacks.pruning.adaptive_rate
    𝒱      = the ⌊R p*⌋-th smallest magnitude of all R parameters
    layer l loses the ⌊p*_l c_l⌋ filters of the lowest ranks, p*_l the share of its weights below 𝒱
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fl.callbacks.pruning._pruning_callback import StructuredPruning
from lightning_fl.callbacks.pruning._training_samples import Source, calibration_images, example_input, sources_of
from lightning_fl.callbacks.pruning.adaptive_rate import AdaptiveRate, seed_of
from lightning_fl.checks import check_between, checked, whole_share
from lightning_fl.errors import require
from lightning_fl.pruning import (
    Plan,
    feature_map_ranks,
    filters_to_keep,
    prune,
    trainable,
)
from lightning_fl.pruning.curvature import layer_rates
from lightning_fl.pruning.graph import Network


class AdaptivePruning(StructuredPruning):
    """Remove filters with low-rank feature maps from the module, as many as the curvature of its loss allows.

    Uses the module's own training loss, in evaluation mode, on one batch of each source. In `FederatedTrainer` the sources are
    the server, if it has samples, and all clients, divided among the processes. In `L.Trainer` the one source is the training
    data, and a strategy that wraps the module, such as DDP, is refused.

    The rate p* of the whole model gives a threshold 𝒱 for the magnitudes of all parameters. p*_l is the share of layer l's
    weights below 𝒱, and the layer loses this share of its filters. So a layer with large weights loses few filters. In front
    of a GroupNorm, whole groups are removed, at most this share.

    `gap` and `gap_of_all` take more than twice as long as `slq_plateau`; far from the initial model `gap` often gives a rate of
    0. Up to 2,000 parameters they use all eigenvalues, else those of stochastic Lanczos quadrature.

    Logs, at the end of the epoch, `prune/rate` (p*), `prune/threshold` (𝒱), `prune/rate/<layer>` (p*_l), `prune/sources` and
    `prune/nonfinite_sources`, the number of sources whose curvature was not finite and whose rate counts as 0.

    Args:
        prune_epoch: epoch (in a federation the round), from 0; the module is pruned before its training.
        every_n_epochs: epochs from one pruning to the next, at least 1; None: prune once, as in FedAP.
        rate_mode: method of finding a source's rate: `slq_plateau`, the share of the spectrum clearly above 0 (the authors'
            code); `gap`, the share below the first gap that the displacement from the initial model cannot close (the paper);
            `gap_of_all`, the same over all eigenvalues, including zeros; or `fixed`.
        rate: p* in [0, 1) for `fixed`.
        max_sources: largest number of a federation's sources to ask, drawn at random; all if not given.
        curvature: `hessian`, or `ggn` for the generalised Gauss-Newton matrix of a classifier.
        epsilon: ε > 0 in the sources' weights.
        batch_size: samples of a source's batch, at least 1.
        lanczos_steps: matrix-vector products per spectrum, at least 2; they need memory for as many vectors of the model's size.
        probes: random vectors per spectrum, at least 1.
        max_rate: upper bound of a source's rate, in [0, 1).
        rank_samples: images whose feature maps are ranked, at least 1: the server's, or a random client's if the server has
            none.

    Raises:
        UserError: a value is not allowed; or, when training starts, the module cannot be pruned.
    """

    @checked
    def __init__(
        self,
        prune_epoch: int = 30,
        every_n_epochs: int | None = None,
        rate_mode: Literal["slq_plateau", "gap", "gap_of_all", "fixed"] = "slq_plateau",
        rate: float | None = None,
        max_sources: int | None = None,
        curvature: Literal["hessian", "ggn"] = "hessian",
        epsilon: float = 1e-4,
        batch_size: int = 100,
        lanczos_steps: int = 50,
        probes: int = 1,
        max_rate: float = 0.95,
        rank_samples: Annotated[int, Ge(1)] = 500,
    ) -> None:
        super().__init__(prune_epoch, every_n_epochs)
        if rate_mode == "fixed":
            check_between("the rate that rate_mode='fixed' needs", rate, 0, 1, "[)")
        else:
            require(rate is None, f"rate={rate} is for rate_mode='fixed'; {rate_mode!r} finds the rate itself.")
        mode = "slq_plateau" if rate_mode == "fixed" else rate_mode
        self.adaptive_rate = AdaptiveRate(
            mode, max_sources, curvature, epsilon, batch_size, lanczos_steps, probes, max_rate
        )
        self.rate_mode, self.rate, self.epsilon = rate_mode, rate, epsilon
        self.max_sources, self.curvature = max_sources, curvature
        self.batch_size, self.lanczos_steps = batch_size, lanczos_steps
        self.probes, self.max_rate = probes, max_rate
        self.rank_samples = rank_samples
        self.ranked_by: int | None = None
        """Client whose images were ranked; None if the server's were, or none."""
        self._metrics: dict[str, float] = {}

    @property
    def asked(self) -> list[int]:
        """Clients that were asked for their rate."""
        return self.adaptive_rate.asked

    def asks_clients(self, has_server_samples: bool) -> bool:
        """True if clients find the rate, or rank feature maps in place of a server without samples."""
        return self.rate is None or not has_server_samples

    def size_follows_training(self, num_epochs: int) -> bool:
        """True if, within this number of epochs, it gives the model a size that depends on the training."""
        return self.rate is None and self.prune_epoch < num_epochs

    # -- schedule ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Reset for a new training."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.ranked_by, self._metrics = None, {}
            self.adaptive_rate.reset(pl_module)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Check that the module can be pruned, and keep the initial model if the rate depends on it."""
        super().on_train_start(trainer, pl_module)
        if self.rate is None and self.schedule.next_after(trainer.current_epoch) is not None:
            self.adaptive_rate.remember(pl_module)
        if self.will_prune(trainer):
            self.require_prunable(trainer, pl_module)
            self.require_rankable(trainer, pl_module, self._stand_in(trainer))
            if self.rate is None:
                self.adaptive_rate.start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Prune if it is due."""
        if self.is_due(trainer):
            with isolate_rng():
                plan = self._choose(trainer, pl_module)
            prune(pl_module, plan, trainer.optimizers)
            if self.schedule.next_after(trainer.current_epoch + 1) is None:
                self.adaptive_rate.forget()
        self.adaptive_rate.follow(pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the pruning."""
        for name, value in self._metrics.items():
            self.report(trainer, pl_module, name, float(value))
        self._metrics = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return super().state_dict() | {"metrics": self._metrics, "adaptive_rate": self.adaptive_rate.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        super().load_state_dict(state_dict)
        self._metrics = state_dict["metrics"]
        self.adaptive_rate.load_state_dict(state_dict["adaptive_rate"])

    # -- choice of filters ----------------------------------------------------------------------------------------------

    def _choose(self, trainer: Any, pl_module: LightningModule) -> Plan:
        """Choose the filters to keep, the same on every process."""
        rate = self.adaptive_rate(trainer, pl_module) if self.rate is None else self.rate
        threshold = layer_rates.magnitude_threshold(trainable(pl_module).values(), rate)
        network = Network(pl_module, example_input(trainer))
        layers = network.layers
        weights: dict[str, Any] = {name: pl_module.get_submodule(name).weight for name in layers}
        by_layer = {name: layer_rates.layer_rate(weight, threshold) for name, weight in weights.items()}
        self._metrics = {"prune/rate": rate, "prune/threshold": threshold, **self.adaptive_rate.metrics}
        self._metrics |= {f"prune/rate/{name}": share for name, share in by_layer.items()}
        if not any(whole_share(share, len(weights[name])) for name, share in by_layer.items()):
            return self.plan(trainer, network, {})
        stand_in = self._stand_in(trainer)
        self.ranked_by = None
        if stand_in is not None:
            self.ranked_by = stand_in.client
            stand_in.answer(sum(len(weight) for weight in weights.values()))
        images = calibration_images(trainer, self.rank_samples, self.batch_size, stand_in, [*seed_of(trainer), 0, 1])
        ranks = feature_map_ranks(pl_module, images, layers)
        return self.plan(trainer, network, filters_to_keep(ranks, by_layer, network.blocks))

    def _stand_in(self, trainer: Any) -> Source | None:
        """Draw the client whose images are ranked in a federation without server data; None otherwise."""
        sources = sources_of(trainer)
        if sources[0].client is None:
            return None
        return sources[int(np.random.default_rng([*seed_of(trainer), 0]).integers(len(sources)))]
