"""FedAvg with HRank: Lin et al., HRank: Filter Pruning using High-Rank Feature Map, CVPR 2020 (arXiv:2002.10179), as FedDUMAP
(Liu et al., ACM TIST 2024, doi:10.1145/3690648) compares with it.

before round T, on the server's samples:
           r_j = mean over images of rank(ReLU(map_j))             callback: FilterPruning
           every convolution loses its ⌊rate · c_l⌋ filters of the lowest r_j
           every client receives the list of kept filters, Σ_l c_l bits
the rest is FedAvg, after round T with the smaller network, d' numbers each way
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from annotated_types import Ge
from lightning.pytorch import Callback

from lightning_fl.algorithms.method import Method
from lightning_fl.callbacks import FilterPruning
from lightning_fl.checks import Called
from lightning_fl.errors import require
from lightning_fl.slots import RoundContext, Server


class HRank(Method):
    """FedAvg with one pruning of the filters with the lowest-rank feature maps, the same share in every layer."""

    def __init__(
        self,
        rate: float = 0.4,
        prune_round: Annotated[int, Ge(0), Called("prune_round, the round before which to prune,")] = 30,
        num_batches: int = 5,
        batch_size: int = 100,
        **slots: Any,
    ) -> None:
        """Keep FedAvg's parts, and check the pruning.

        Args:
            rate: Share of its filters that every layer loses, in [0, 1); 0 is FedAvg. The paper compares 0.2, 0.4, 0.6 and 0.8.
            prune_round: Round T, from 0; filters are pruned before its training.
            num_batches: Batches of the server's samples to rank filters on, at least 1; HRank's authors take 5 of 128.
            batch_size: Samples per batch, at least 1; FedDUMAP's authors take 5 of 100.
        """
        self.prune_round = prune_round
        self._pruning = partial(FilterPruning, rate, prune_round, None, "feature_rank", num_batches, batch_size)
        self._pruning()  # raises if a value is not allowed
        super().__init__(**slots)

    def configure_callbacks(self) -> list[Callback]:
        """Return a new pruning callback for every run, and the callbacks of personal parts."""
        return [self._pruning(), *super().configure_callbacks()]

    def check(self, context: RoundContext, server: Server, cohort_size: int) -> None:
        """Raise `UserError` if the run prunes without server data."""
        super().check(context, server, cohort_size)
        require(
            server.num_samples > 0 or self.prune_round >= context.num_rounds,
            "HRank ranks filters on the server's samples, and there are none: set --data.server_fraction, for example 0.05.",
        )
