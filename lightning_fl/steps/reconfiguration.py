"""PruneFL's server (Jiang et al., Model Pruning Enables Efficient Federated Learning on Edge Devices, IEEE TNNLS 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Interval
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_fl.checks import Called, whole_share
from lightning_fl.data.split_checks import NO_CLASSES
from lightning_fl.errors import UserError, require
from lightning_fl.pruning.prunefl_mask import fastest, smallest_kept
from lightning_fl.slots import PROPOSAL, RoundContext, Rule, Server, ServerTurn, SetupTurn, State, Step, check_inner

IMPORTANCE = "scalars/importance"
PASSES_PER_LOOK = 10
ADJUSTMENTS_THAT_AGREE = 5


@dataclass(frozen=True)
class Reconfiguration(Step):
    """Update the mask when clients send Z_k:  Z = Σ_k Z_k;  μ ← the mask with the largest Γ = ΣZ / Σt;  w ← w ⊙ μ.

    Weights of convolutions and linear layers, all parameters with two axes or more, can be masked. In each layer the ⌊f · kept⌋
    smallest, f = shrink · ½^(round / half_life), may be removed, and all masked ones may return, with the value 0. A weight of
    layer l takes

        t_l = samples · seconds_per_mac · c_l / (weights of l) + 2q / bandwidth

    seconds of a round. c_l are the layer's multiply-accumulates per sample, and samples is the mean that a client reads in a
    round. Everything else takes `fixed_share` of the time of all weights.

    Before the first round the server trains on its own batches and adds Z ← Z + g² in every step. It measures the accuracy on
    them every tenth pass. Once this is start_accuracy / classes, it reconfigures after this pass and every `initial_interval`-th
    pass from there, with f = shrink, until the count of kept parameters changes by at most `tolerance` five times in a row.

    Reports `prune/rate`, the masked share of the weights that can be masked, and `prune/kept`, the count of kept parameters.

    Attributes:
        rule: rule of the training before the first round, which sends Σ g².
        shrink: share of a layer's kept weights that may be removed at first, in [0, 1).
        half_life: half-life of f in rounds, above 0.
        max_density: largest kept share of the weights that can be masked, in (0, 1]; None: no bound.
        seconds_per_mac: training time of a client per multiply-accumulate of the forward pass, in seconds, three times that of
            the forward pass alone; at least 0.
        bandwidth: bandwidth of a client in bits per second, above 0.
        fixed_share: time of everything else as a share of the time of all weights, at least 0.
        initial_passes: largest number of passes before the first round, at least 0; with 0 the network starts whole.
        initial_batches: batches of the server in each pass, at least 1.
        initial_interval: passes from one reconfiguration to the next, at least 1.
        start_accuracy: accuracy at which pruning starts, as a multiple of that of guessing, at least 0.
        tolerance: largest relative change of the count of kept parameters that counts as stable, at least 0.
    """

    sets_mask = size_depends_on_values = True
    reports = ("prune/rate", "prune/kept")  # which callbacks that prune log, too
    sums_suffice = True
    asks_clients = False
    needs = uses = frozenset({IMPORTANCE, PROPOSAL})
    needs_equal_weights = frozenset({IMPORTANCE})
    rule: Rule
    shrink: Annotated[float, Interval(ge=0, lt=1), Called("shrink, the share of a layer to remove,")] = 0.3
    half_life: Annotated[float, Gt(0)] = 10_000
    max_density: Annotated[float, Interval(gt=0, le=1)] | None = None
    seconds_per_mac: Annotated[float, Ge(0)] = 3e-11
    bandwidth: Annotated[float, Gt(0)] = 5e7
    fixed_share: Annotated[float, Ge(0)] = 0.1
    initial_passes: Annotated[int, Ge(0)] = 1000
    initial_batches: Annotated[int, Ge(1)] = 10
    initial_interval: Annotated[int, Ge(1)] = 50
    start_accuracy: Annotated[float, Ge(0)] = 1.5
    tolerance: Annotated[float, Ge(0)] = 0.1

    def __post_init__(self) -> None:
        check_inner(self, "rule", Rule, "SquaredGradients(interval=1, each_step=True)")
        require(
            not self.initial_passes or IMPORTANCE in self.rule.provides - self.rule.omits,
            f"Reconfiguration prunes before the first round by what its rule sends after every pass, but "
            f"{type(self.rule).__name__} does not always send {IMPORTANCE!r}: use SquaredGradients(interval=1, each_step=True), "
            "or initial_passes 0.",
        )

    def rules(self) -> tuple[Rule, ...]:
        """Return the rule of the server, if it trains before the first round."""
        return (self.rule,) if self.initial_passes else ()

    def check(self, server: Server) -> None:
        """Raise `UserError` if the training before the first round lacks samples, their classes or an accuracy."""
        if self.initial_passes:
            require(
                server.num_samples > 0,
                "PruneFL prunes on server data before the first round, and there are none: set --data.server_fraction, "
                "for example 0.05, or initial_passes 0.",
            )
            if not server.has_labels:
                raise UserError(
                    "PruneFL starts to prune when the server is better than guessing among the classes, but these data have "
                    f"none {NO_CLASSES}, or initial_passes 0."
                )
            server.try_accuracy()

    def prepare(self, turn: SetupTurn) -> None:
        """Train and prune on the server before the first round."""
        server, mask, seen = turn.server, torch.ones_like(turn.params, dtype=torch.bool), turn.mask
        rows = slice(self.initial_batches * server.batch_size)
        importance = torch.zeros_like(turn.params)
        start: int | None = None
        changes: list[float] = []
        for number in range(self.initial_passes):
            if start is None and number % PASSES_PER_LOOK == 0:
                num_classes = server.label_histograms().shape[1]
                accuracy = server.accuracy(turn.params, turn.buffers, rows)
                start = number if accuracy >= self.start_accuracy / num_classes else None
            received = {"model": turn.params, "buffers": turn.buffers}
            trained = server.train(received, self.rule, epochs=1, rows=rows, mask=mask).message
            turn.params = turn.params + trained["model"]
            turn.buffers = turn.buffers + trained.get("buffers", 0)
            importance += trained[IMPORTANCE]
            if start is not None and (number - start) % self.initial_interval == 0:
                before = int(mask.sum())
                mask = self._reconfigured(turn.context, server, turn.params, mask, importance, self.shrink)
                turn.params = turn.params * mask
                importance = torch.zeros_like(importance)
                if seen is not None:
                    changes.append(abs(int(mask.sum()) / before - 1))
                seen = mask
                last = changes[-ADJUSTMENTS_THAT_AGREE:]
                if len(last) == ADJUSTMENTS_THAT_AGREE and max(last) <= self.tolerance:
                    break
        if seen is not None:
            turn.mask = seen
            rank_zero_info(
                f"The server has pruned {len(mask):,} parameters to {int(mask.sum()):,} before the first round."
            )

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Replace the mask when clients have sent Z_k."""
        context, prunable = turn.context, _prunable(turn.context, turn.params)
        mask = torch.ones_like(prunable) if turn.mask is None else turn.mask
        if IMPORTANCE in turn.merged:
            share = self.shrink * 0.5 ** (turn.round / self.half_life)
            importance = turn.merged[IMPORTANCE]
            mask = turn.mask = self._reconfigured(context, turn.server, turn.proposal, mask, importance, share)
        turn.metrics |= {
            "prune/rate": int((~mask).sum()) / max(1, int(prunable.sum())),
            "prune/kept": int(mask.sum()),
        }
        return state

    def _reconfigured(
        self, context: RoundContext, server: Server, weights: Tensor, mask: Tensor, importance: Tensor, share: float
    ) -> Tensor:
        """Return the mask (d,) with the largest Γ."""
        prunable = _prunable(context, weights)
        seconds = self._seconds(context, server, weights)
        removable = smallest_kept(weights, mask, _layers(context).values(), share)
        fixed = mask & ~removable
        bound = None
        if self.max_density is not None:
            bound = whole_share(self.max_density, int(prunable.sum())) - int(fixed[prunable].sum())
        chosen = fastest(
            prunable & ~fixed,
            importance,
            seconds,
            float(importance[fixed].sum(dtype=torch.float64)),
            float(seconds[fixed].sum() + self.fixed_share * seconds.sum()),
            bound,
        )
        return fixed | chosen

    def _seconds(self, context: RoundContext, server: Server, like: Tensor) -> Tensor:
        """Return t (d,), float64; 0 for parameters that cannot be masked."""
        seconds = torch.zeros(len(like), dtype=torch.float64, device=like.device)
        macs, bits = server.layer_macs(), like.element_size() * 8
        per_mac = server.samples_per_client * self.seconds_per_mac
        for name, part in _layers(context).items():
            in_layer = macs.get(name.rpartition(".")[0], 0)
            seconds[part] = per_mac * in_layer / (part.stop - part.start) + 2 * bits / self.bandwidth
        return seconds


def _layers(context: RoundContext) -> dict[str, slice]:
    """Return the slices of the parameters that can be masked, by name."""
    layout = context.layout
    positions = zip(layout.names, layout.shapes, layout.offsets, layout.sizes, strict=True)
    return {name: slice(offset, offset + size) for name, shape, offset, size in positions if len(shape) > 1 and size}


def _prunable(context: RoundContext, like: Tensor) -> Tensor:
    """Return bools (d,), True for parameters that can be masked."""
    prunable = torch.zeros_like(like, dtype=torch.bool)
    for part in _layers(context).values():
        prunable[part] = True
    return prunable
