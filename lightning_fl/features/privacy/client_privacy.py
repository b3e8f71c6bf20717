"""Differential privacy of clients at a trusted server: DP-FedAvg (McMahan et al., ICLR 2018), and later refinements.

    c_k = min(1, C/‖v_k‖)     v_k: all vectors of the upload, one after the other
    A   = (Σ_k u_k c_k x_k + ξ) / W̄,     ξ ~ N(0, (z C u_max)² I)

One clip for the whole upload has sensitivity C u_max; n separate clips would have √n times as much. W̄ = q Σ_j u_j sums over
all clients that can be drawn, not over the clients that came, because their weights would reveal who came. A round without
clients releases noise, too. The guarantee assumes that the seed is secret, and ignores the finite precision of the noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

from lightning_fl.checks import check_positive
from lightning_fl.errors import require
from lightning_fl.features.privacy.accountant import EVERY, PASSES, POISSON, Accountant
from lightning_fl.features.privacy.adaptive_clip import AdaptiveClip
from lightning_fl.features.privacy.buffers import Buffers
from lightning_fl.features.privacy.mechanism import Privacy, check_scales, check_weights


@dataclass(frozen=True)
class ClientPrivacy(Privacy):
    """Clip each client's upload and add noise to the sum, so that the models of all rounds reveal little about any client.

    Give `noise_multiplier`, or the `epsilon` of the whole run. The clip bounds all vectors of an upload together.

    Attributes:
        clip: C > 0, largest length of an upload, or `AdaptiveClip`; inf, only without noise, clips nothing.
        noise_multiplier: z ≥ 0: the standard deviation of the sum's noise is z times its sensitivity to one client; 0 is no
            privacy.
        epsilon: ε > 0 of `max_rounds` rounds; the noise multiplier follows from it.
        delta: δ in (0, 1/N), N the clients that can be drawn; N^−1.1 if not given.
        max_epsilon: the run ends before the round that would exceed this ε.
        sampling: `poisson`: each client independently, clients_per_round on average; `every` client; `fixed`: exactly
            clients_per_round, with a much weaker guarantee; or `passes` over all clients, for the mechanism tree.
        mechanism: `gaussian`: fresh noise in each round; or `tree`, for `passes`: noise whose sum over rounds grows slowly
            (DP-FTRL).
        weights: equal (`uniform`), or the clients' numbers of `samples`, at most `cap`, which are assumed to be public.
        cap: largest weight of a client in samples, at least 1; only with `samples`.
        denominator: `fixed` is W̄; `received` divides by the received weights, only without noise.
        scales: factor of a vector in the length of an upload by its name, such as model or moments/first; 1 if not given.
        buffers: treatment of clients' running statistics: `refuse` them, add them to the upload (`clip`), or `keep` the
            server's.
        side_channels: `keep` columns that the guarantee does not cover, such as train/loss and clients/selected, or `drop`
            them and report expected values in comm/… and time/….
        accountant: `rdp` (Rényi), or `pld`, which is tighter and slower, for `poisson` and `every`.
    """

    changeable = frozenset({"epsilon", "delta", "max_epsilon", "accountant"})
    clip: float | AdaptiveClip = 1.0
    noise_multiplier: Annotated[float, Ge(0)] | None = None
    epsilon: Annotated[float, Gt(0)] | None = None
    delta: Annotated[float, Interval(gt=0, lt=1)] | None = None
    max_epsilon: Annotated[float, Gt(0)] | None = None
    sampling: Literal["poisson", "every", "fixed", "passes"] = "poisson"
    mechanism: Literal["gaussian", "tree"] = "gaussian"
    weights: Literal["uniform", "samples"] = "uniform"
    cap: Annotated[float, Ge(1)] | None = None
    denominator: Literal["fixed", "received"] = "fixed"
    scales: Mapping[str, float] | None = None
    buffers: Buffers = "refuse"
    side_channels: Literal["keep", "drop"] = "keep"
    accountant: Accountant = "rdp"

    def __post_init__(self) -> None:
        if not isinstance(self.clip, AdaptiveClip) and self.clip != inf:
            check_positive("privacy.clip", self.clip)
        require(
            (self.noise_multiplier is None) != (self.epsilon is None),
            f"privacy takes one of noise_multiplier and epsilon, got {self.noise_multiplier} and {self.epsilon}.",
        )
        check_weights(self.weights, self.cap)
        check_scales(self.scales)
        self._check_noise()

    def _check_noise(self) -> None:
        """Raise `UserError` for settings that noise excludes."""
        is_noisy = self.noise_multiplier != 0
        require(
            not is_noisy or self.clip != inf, "noise needs a clip: privacy.clip is inf, so give a number, such as 1."
        )
        require(
            not is_noisy or self.denominator == "fixed",
            "privacy.denominator received divides by the clients that came, who are to stay hidden: use fixed, or "
            "noise_multiplier 0 for a study of clipping.",
        )
        require(
            is_noisy or self.max_epsilon is None,
            "privacy.max_epsilon needs noise: with noise_multiplier 0 epsilon is infinite.",
        )
        require(
            (self.sampling == PASSES) == (self.mechanism == "tree"),
            "privacy.mechanism tree is for sampling passes, in which a client takes part once, and this sampling is for it "
            f"alone; got mechanism {self.mechanism} and sampling {self.sampling}.",
        )
        require(
            self.mechanism != "tree" or not isinstance(self.clip, AdaptiveClip),
            "privacy.mechanism tree takes noise back that it has added, so the clip must stay: give a number.",
        )
        require(
            self.accountant == "rdp" or self.sampling in (POISSON, EVERY),
            f"privacy.accountant pld knows the samplings poisson and every, got {self.sampling}: use rdp.",
        )
