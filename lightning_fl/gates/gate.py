"""One gate: Gao et al., Dynamic Channel Pruning: Feature Boosting and Suppression, ICLR 2019, in FedDP's version.

s = mean of the layer's input over its pixels                     (B, C_in)
z = A s + a;  π = sigmoid(z)                                      (B, C_out)
M = 1 for the K largest π of each sample (ties: the first channel), K = max(1, round(keep · C_out)), else 0
output ← output ⊙ m

m = M + (π − stopgrad π), the straight-through estimator: exactly 0 or 1, with the gradient of π for every channel. With
`mode="multiply"`, m = M ⊙ π, which also scales the kept channels. With `mode="index"`, m = M, FedDP's equation read literally:
no gradient of the task reaches the gate, so that only the lasso trains it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from annotated_types import Interval
from torch import Tensor, nn

from lightning_fl.checks import Called
from lightning_fl.errors import UserError

Keep = Annotated[float, Interval(gt=0, le=1), Called("keep, the share of channels that a gate keeps,")]
Mode = Annotated[Literal["ste", "multiply", "index"], Called("gate mode")]


def num_kept(keep: float, channels: int) -> int:
    """Return K = max(1, round(keep · C)).

    >>> [num_kept(0.7071, 64), num_kept(0.01, 16), num_kept(1.0, 16)]
    [45, 1, 16]
    """
    return max(1, round(keep * channels))


class Gate(nn.Module):
    """Choose K of a layer's output channels from the layer's input.

    Hooks on the convolution, and on the norm that follows it, call the gate: see `lightning_fl.gates.add_gates`.

    Attributes:
        weight: A (C_out, C_in), initially Kaiming-uniform.
        bias: a (C_out,), initially 1.
        kept: number of channels that stay, K.
        active: True if the gate masks; otherwise the layer computes all channels.
        shared: True if the whole batch has one mask, chosen by the batch's mean of π.
        outputs: list that collects z inside `lightning_fl.gates.observed`, else None.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kept: int,
        pixel_axes: int = 2,
        mode: Mode = "ste",
        detach_input: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        """Initialise the gate.

        Args:
            in_channels: C_in of the layer.
            out_channels: C_out of the layer.
            kept: number of channels that stay, K.
            pixel_axes: number of spatial axes of the layer: 2 for images.
            mode: `ste`, `multiply` or `index`.
            detach_input: True if the gate's gradient stops at its input, so that the rest of the network has exactly
                the gradient of the masked network.
            generator: generator of the initial weights.
        """
        super().__init__()
        self.kept = kept
        self.mode = mode
        self.detach_input = detach_input
        self.active = True
        self.shared = False
        self.outputs: list[Tensor] | None = None
        self._pixels = tuple(range(-pixel_axes, 0))
        self._mask: Tensor | None = None
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels))
        self.bias = nn.Parameter(torch.ones(out_channels))
        nn.init.kaiming_uniform_(self.weight, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return m (B, C_out) for the layer's input (B, C_in, …)."""
        summary = (x.detach() if self.detach_input else x).mean(self._pixels)
        z = F.linear(summary, self.weight, self.bias)
        if self.outputs is not None:
            self.outputs.append(z)
        pi = z.sigmoid()
        scores = pi.mean(0, keepdim=True).expand_as(pi) if self.shared and pi.dim() > 1 else pi
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., : self.kept]
        chosen = torch.zeros_like(pi).scatter(-1, best, 1.0)
        if self.mode == "index":
            return chosen
        return chosen * pi if self.mode == "multiply" else chosen + (pi - pi.detach())

    def look(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Choose the channels; a hook before the convolution."""
        self._mask = self(inputs[0]) if self.active else None

    def close(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Zero the channels that were not chosen; a hook after the norm, or after a convolution without one.

        Raises:
            UserError: the norm has been computed without the convolution.
        """
        if not self.active:
            return None
        mask, self._mask = self._mask, None
        if mask is None:
            raise UserError(
                f"dynamic pruning cannot gate a convolution whose {type(layer).__name__} of {self.weight.shape[0]} channels, the "
                "next one in its module, is computed before it: define each normalisation right behind its own convolution, "
                "or skip the convolution."
            )
        return output * self.spread(mask).to(output.dtype)

    def forget(self, parent: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forget channels chosen in a pass that was broken off; a hook before the module of convolution and norm."""
        self._mask = None

    def check_closed(self, parent: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Check that channels were zeroed; a hook after the module of convolution and norm.

        Raises:
            UserError: the convolution has been computed without the norm.
        """
        mask, self._mask = self._mask, None
        if mask is not None:
            raise UserError(
                f"dynamic pruning cannot gate a convolution whose normalisation of {self.weight.shape[0]} channels, the next one "
                f"in its {type(parent).__name__}, is not computed: do not define it, or skip the convolution."
            )

    def spread(self, mask: Tensor) -> Tensor:
        """Reshape m (B, C_out) to (B, C_out, 1, …), for multiplication with an output."""
        return mask.reshape(*mask.shape, *[1 for _ in self._pixels])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Load the weights; the gate keeps its own if the state has none (a network without gates)."""
        for name, parameter in self.named_parameters(recurse=False):
            state_dict.setdefault(prefix + name, parameter.detach())
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """Return the options that `print(network)` shows."""
        channels, inputs = self.weight.shape
        return f"{inputs}, {channels}, kept={self.kept}, mode={self.mode!r}"
