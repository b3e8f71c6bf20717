"""Hyper-parameters that methods of FedDUMAP's paper share."""

from __future__ import annotations

from lightning.pytorch import Callback

from lightning_fl.algorithms.method import Method
from lightning_fl.callbacks import AdaptivePruning


class DynamicallyUpdated(Method):
    """Base class of the methods with FedDU's server update. A method describes only its other hyper-parameters.

    Args:
        server_learning_rate: Learning rate η_g > 0 of the server.
        momentum_init: Start from m = 0 (`zero`) or from the first round's change (`first`).
        C: Scale C ≥ 0 of the server's update.
        decay: Factor of the update from round to round, in (0, 1].
        f: Factor f'(acc) of the update: one_minus for 1 − acc, inverse for 1 / (acc + 0.01).
        alpha_max: Upper bound of the update's share α; if not given, 1 for inverse, none for one_minus.
    """


class AdaptivelyPruned(Method):
    """Base class of the methods with FedAP's pruning. A method describes only its other hyper-parameters.

    Args:
        prune_round: Round T, from 0; the model is pruned before its training.
        rate_mode: Method of finding a source's rate: slq_plateau (the authors' code), gap (the paper's rule), gap_of_all (the
            same among all eigenvalues, those that are 0 too), or fixed.
        epsilon: ε > 0 in the weights of the sources.
        max_sources: Largest number of sources to ask, drawn at random; all if not given.
        curvature: Matrix of the loss's curvature: hessian, or ggn, the generalised Gauss-Newton matrix.

    Attributes:
        pruning: callback that prunes.
    """

    pruning: AdaptivePruning

    def configure_callbacks(self) -> list[Callback]:
        """Return the pruning callback, and the callbacks of personal parts."""
        return [self.pruning, *super().configure_callbacks()]
