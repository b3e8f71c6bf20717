"""Neuron-level pruning of the upload: FedADP as FedLDF uses it (Wang et al., IEEE Communications Letters 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_fl.checks import Called
from lightning_fl.exchanges.layer_choice import upload_of
from lightning_fl.slots import SENT, Channel, Exchange, Result, RoundContext, Upload, is_finite
from lightning_fl.vectors.layer_groups import Group, Groups, as_yaml, check_groups, resolve


@dataclass(frozen=True)
class PrunedUnits(Exchange):
    """Send the units of each client's model with the highest scores, and one bit for every unit.

    A unit is an output channel or neuron of a layer: its row of weights, its bias and its part of the BatchNorm. Its score is
    ‖Δ_unit‖₂ / √(numbers in it). Units are kept in descending order over the whole model until the next would exceed keep · d
    numbers; the best unit of each layer is always kept and counts. Results are sent as they arrive. A client whose delta is not
    finite sends nothing and is rejected.

    Attributes:
        keep: share of the parameters that is sent, in (0, 1]; 1 is FedAvg.
        score: score units by their change (`delta`) or by their trained weights (`magnitude`).
        per_layer: keep the same share of each layer instead.
        groups: definition of a layer: `layer`, `tensor`, or a map from layers to names of parameters (`lightning_fl.groups`).
        print_groups: print the layers before the first round, as a map that `groups` takes.
    """

    changeable = frozenset({"keep", "print_groups"})
    needs = frozenset({"model"})
    provides = frozenset({SENT})
    size_depends_on_values = True
    keep: Annotated[float, Interval(gt=0, le=1), Called("keep, the share of the parameters that is sent,")] = 0.2
    score: Literal["delta", "magnitude"] = "delta"
    per_layer: bool = False
    groups: Groups = "layer"
    print_groups: bool = False

    def __post_init__(self) -> None:
        check_groups(self.groups)

    def check(self, context: RoundContext, cohort_size: int) -> None:
        """Raise `UserError` if the groups do not contain every parameter once; print the layers if asked."""
        layers = self._layers(context)
        if self.print_groups:
            rank_zero_only(print)(as_yaml(layers), flush=True)

    def collect(self, results: Iterable[Result], channel: Channel) -> Iterator[Upload]:
        """Stream the uploads: only one result is in memory at a time."""
        layers = self._layers(channel.context)
        sizes = [group.num_units(channel.context.layout) for group in layers]

        def upload(result: Result) -> Upload:
            if not is_finite(result.message):
                return Upload(result, result.message)
            kept_units = torch.cat(self._keep(result, layers, channel))
            kept_units = channel.send_up(result.client, {"mask/units": kept_units})["mask/units"]
            return upload_of(result, layers, kept_units.split(sizes), channel)

        return map(upload, results)

    def _layers(self, context: RoundContext) -> tuple[Group, ...]:
        return resolve(self.groups, context.groups, context.layout, context.buffer_layout)

    def _keep(self, result: Result, layers: tuple[Group, ...], channel: Channel) -> list[Tensor]:
        """Return bools (c_l,) for each layer, True for the units that the client sends."""
        layout = channel.context.layout
        scored = result.message["model"]
        if self.score == "magnitude":
            scored = channel.received["model"] + scored
        views = layout.views(scored)
        scores, numbers = [], []
        for group in layers:
            num_units = group.num_units(layout)
            rows = [group.by_unit(views[name], num_units).reshape(num_units, -1) for name in group.parameters]
            numbers.append(sum(row.shape[1] for row in rows))
            squares = torch.stack([row.double().square().sum(1) for row in rows]).sum(0)
            scores.append((squares / numbers[-1]).sqrt())
        if self.per_layer:
            return [
                fill([unit_scores], [size], self.keep * size * len(unit_scores))[0]
                for unit_scores, size in zip(scores, numbers, strict=True)
            ]
        return fill(scores, numbers, self.keep * layout.numel)


def fill(scores: list[Tensor], sizes: list[int], budget: float) -> list[Tensor]:
    """Mark the units to keep: the best of each layer, then in descending order until the next would exceed the budget.

    In the example, 5.0 and 4.0 are the best of their layers; 3.0 comes next, exceeds the budget and ends the selection.

    Args:
        scores: scores (c_l,) of each layer's units; of equal ones the earlier unit comes first.
        sizes: count of numbers in a unit of each layer.
        budget: count of numbers that may be kept.

    >>> fill([torch.tensor([3.0, 5.0]), torch.tensor([1.0, 2.0, 4.0])], sizes=[10, 1], budget=12)
    [tensor([False,  True]), tensor([False, False,  True])]
    """
    joined = torch.cat(scores)
    size = torch.cat(
        [torch.full_like(unit_scores, numbers) for unit_scores, numbers in zip(scores, sizes, strict=True)]
    )
    first = torch.cat(
        [torch.arange(len(unit_scores), device=unit_scores.device) == unit_scores.argmax() for unit_scores in scores]
    )
    order = joined.masked_fill(first, torch.inf).argsort(descending=True, stable=True)
    within = size[order].cumsum(0) <= budget + 1e-6  # tolerance, as budget is a product of floats
    is_kept = first.clone()
    is_kept[order] |= within
    return list(is_kept.split([len(unit_scores) for unit_scores in scores]))
