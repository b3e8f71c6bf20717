"""Set small weights of convolutions to 0 after every pass, as in FedDP's released code (Yu et al., CCGrid 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge

from lightning_fl.checks import Called
from lightning_fl.errors import require
from lightning_fl.slots import LocalTraining, RoundContext, Rule, check_inner, forwards


@forwards(
    "inner",
    "arrived compared correct finish in_common init needs needs_whole_upload note_on_resume observe omits own_step penalty "
    "plain_sgd_reason point provides reads num_losses repeats representation steps_in_round takes_full_batches "
    "unmasked_state uses",
)
@dataclass(frozen=True)
class Thresholded(Rule):
    """Apply another rule; after every pass over the client's samples, w ← w ⊙ (|w| > threshold) for convolutions' weights.

    No mask is kept, so weights may grow again.

    Attributes:
        inner: the other rule.
        threshold: largest magnitude that is set to 0, at least 0.
    """

    changeable = frozenset({"threshold"})
    reads_length = True
    inner: Rule
    threshold: Annotated[float, Ge(0), Called("threshold, a magnitude,")] = 1e-3

    def __post_init__(self) -> None:
        check_inner(self, "inner", Rule, "LocalOptimizer()")

    def check(self, context: RoundContext) -> None:
        """Check the inner rule, and raise `UserError` if the network has no convolution."""
        self.inner.check(context)
        require(
            any(group.kernels for group in context.groups),
            "the network has no convolution whose weights could be set to 0: dynamic pruning is for convolutions.",
        )

    def start(self, local: LocalTraining) -> None:
        """Start the inner rule, and find the convolutions."""
        self.inner.start(local)
        layout, kernels = local.context.layout, {name for group in local.context.groups for name in group.kernels}
        chosen = [torch.full((size,), name in kernels) for size, name in zip(layout.sizes, layout.names, strict=True)]
        local.memory["convolutions"] = torch.cat(chosen).to(local.params.device)

    def step(self, local: LocalTraining) -> None:
        """Take the inner rule's step; at the end of a pass, set small weights to 0."""
        self.inner.step(local)
        at_end = (local.num_steps + 1) % local.steps_in_pass == 0
        if at_end is not False:
            small = local.params.abs() <= self.threshold
            local.params.masked_fill_(small & local.memory["convolutions"] & at_end, 0.0)
