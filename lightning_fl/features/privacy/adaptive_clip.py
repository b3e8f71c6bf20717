"""Clip that follows a quantile of the uploads' lengths (Andrew et al., Differentially Private Learning with Adaptive Clipping,
NeurIPS 2021).

    b_k = 1 if ‖v_k‖ ≤ C_t, else 0                         one bit of each client
    b̃   = ½ + (Σ_k (b_k − ½) + N(0, σ_b²)) / (qN)
    C_{t+1} = C_t exp(−η (b̃ − γ))

Because of the ½, a client moves the sum of the bits by at most ½. So this sum costs one Gaussian mechanism at 2σ_b. Together
with the sum of the uploads at z_Δ = (z⁻² − (2σ_b)⁻²)^−½, it costs one Gaussian mechanism at z.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Annotated

from annotated_types import Ge, Gt, Interval

from lightning_fl.checks import check_fields
from lightning_fl.errors import require

WITHIN = "privacy/within"
"""Column with b̃, the noisy share of the uploads that are no longer than the clip."""


@dataclass(frozen=True)
class AdaptiveClip:
    """Adapt the clip to a quantile of the uploads' lengths.

    Attributes:
        initial: C_0 > 0, the clip of the first round.
        quantile: γ in [0, 1], target share of uploads within the clip.
        learning_rate: η > 0 of the logarithm of the clip.
        count_noise: σ_b ≥ 0, standard deviation of the noise in the number of uploads within the clip; if not given, a
            twentieth of clients_per_round, or 0 in a run without noise.
    """

    _called = "privacy.clip.{}"
    initial: Annotated[float, Gt(0)] = 0.1
    quantile: Annotated[float, Interval(ge=0, le=1)] = 0.5
    learning_rate: Annotated[float, Gt(0)] = 0.2
    count_noise: Annotated[float, Ge(0)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def next(self, clip: float, within: float) -> float:
        """Return C_{t+1}, given C_t and b̃.

        >>> AdaptiveClip(quantile=0.5).next(2.0, 0.5), AdaptiveClip().next(2.0, 1.0) < 2.0
        (2.0, True)
        """
        return clip * exp(-self.learning_rate * (within - self.quantile))

    def noise_of_bits(self, cohort_size: int, is_private: bool) -> float:
        """Return σ_b."""
        if self.count_noise is not None:
            return self.count_noise
        return cohort_size / 20 if is_private else 0.0


def rest_of_noise(noise_multiplier: float, noise_of_bits: float) -> float:
    """Return z_Δ, with which the uploads' sum and the bits' cost one Gaussian mechanism at z.

    >>> round(rest_of_noise(1.0, 5.0), 6)
    1.005038

    Raises:
        UserError: the bits alone cost more.
    """
    if not noise_multiplier:
        return 0.0
    require(
        noise_multiplier < 2 * noise_of_bits,
        f"an adaptive clip needs a noise multiplier below 2 · count_noise = {2 * noise_of_bits:g}, got {noise_multiplier:g}: "
        "give more clients_per_round or a larger privacy.clip.count_noise.",
    )
    return float((noise_multiplier**-2 - (2 * noise_of_bits) ** -2) ** -0.5)
