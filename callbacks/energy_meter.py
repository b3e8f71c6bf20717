"""Estimate the energy of a federation's messages and local training, from coefficients with ranges of uncertainty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_fl.checks import check_at_least
from lightning_fl.errors import nearest, require
from lightning_fl.outputs.loggers import tell

MEBIBYTE_BITS = 8 * 2**20


class Coefficient(NamedTuple):
    """Joules per unit, or watts, with their range."""

    low: float
    value: float
    high: float
    source: str


Profile = dict[str, Coefficient]
"""Coefficients by name."""
HUANG = "Huang et al., MobiSys 2012, phones of 2011: taken from the text, to be verified; the range is a judgement"
SHARED = {
    "network_joules_per_bit": Coefficient(
        27e-6 / 32,
        27e-6,
        27e-6,
        "Aslan et al., J. Ind. Ecol. 2018: 0.06 kWh/GB in 2015, halves in two years; an average",
    ),
    "joules_per_mac": Coefficient(
        10e-12,
        100e-12,
        1000e-12,
        "judgement, for a whole phone; arithmetic alone takes 4.6 pJ (Horowitz, ISSCC 2014)",
    ),
}


def _radio_profile(uplink: float, downlink: float, watts: float) -> Profile:
    values = {"uplink_joules_per_bit": uplink, "downlink_joules_per_bit": downlink, "radio_watts": watts}
    return {name: Coefficient(value / 10, value, 3 * value, HUANG) for name, value in values.items()} | SHARED


PROFILES = {"lte": _radio_profile(438.39e-9, 52.0e-9, 1.29), "wifi": _radio_profile(283.2e-9, 137.0e-9, 0.13)}


def joules(amounts: Mapping[str, float], profile: Profile) -> float:
    """Return the energy of amounts (bits, seconds, multiply-accumulates), given by the names of their coefficients."""
    return sum(profile[name].value * amount for name, amount in amounts.items())


def takes_less(
    first: Mapping[str, float], second: Mapping[str, float], profile: Profile
) -> Literal["first", "second", "depends"]:
    """Return which amounts take less energy for all coefficients within their ranges; "depends" if neither does.

    The difference is linear in each coefficient, so it is largest at an end of each range.

    >>> takes_less({"joules_per_mac": 1.0}, {"joules_per_mac": 2.0}, PROFILES["lte"])
    'first'
    >>> takes_less({"joules_per_mac": 1e9}, {"uplink_joules_per_bit": 1e6}, PROFILES["lte"])
    'depends'
    """
    for name, a, b in (("first", first, second), ("second", second, first)):
        more = {key: a.get(key, 0.0) - b.get(key, 0.0) for key in profile}
        if sum(x * (profile[key].high if x > 0 else profile[key].low) for key, x in more.items()) < 0:
            return name  # type: ignore[return-value]
    return "depends"


class EnergyMeter(Callback):
    """Log an estimate of the energy of messages and local training, in joules.

    `energy/uplink_joules`, `energy/downlink_joules`, `energy/network_joules` and `energy/compute_joules` of the round, all
    clients together; `energy/total_joules` is the sum of all four in the run so far. The first round includes the set-up's
    messages.

        uplink  = bits · uplink_joules_per_bit + radio_watts · bits / rate of the client by the trainer's clock; downlink alike
        network = bits both ways · network_joules_per_bit
        compute = model/macs · (3 · clients/samples + clients/asked_samples + clients/loss_samples) · joules_per_mac, or with
                  smaller networks 3 · clients/macs · joules_per_mac

        coefficient              lte        wifi      range         source
        uplink_joules_per_bit    438.39 nJ  283.2 nJ  1/10 to 3 ×   Huang, MobiSys 2012: phones of 2011
        downlink_joules_per_bit  52.0 nJ    137.0 nJ  1/10 to 3 ×   the same
        radio_watts              1.29 W     0.13 W    1/10 to 3 ×   the same
        network_joules_per_bit   27 µJ      27 µJ     1/32 to 1 ×   Aslan, J. Ind. Ecol. 2018: of 2015, halves in two years
        joules_per_mac           100 pJ     100 pJ    1/10 to 10 ×  judgement; arithmetic alone 4.6 pJ: Horowitz, ISSCC 2014

    Huang's values were read from the paper's text, and are not verified. Loggers get all five coefficients as
    hyper-parameters. The ranges are wide: `compare` ranks two runs only if the order is the same for all values within the
    ranges. The estimate leaves out the radio's tail and idle times, screens, the server, the manufacturing of devices, and
    training before the first round. Works only in a `FederatedTrainer`, and changes nothing.

    Args:
        profile: `lte`, `wifi`, or a mapping from each of the five coefficients to (low, value, high, source). 5G has no profile.

    Raises:
        UserError: the profile is unknown or incomplete; or, before training, the trainer has no clients, or the module's
            multiply-accumulates cannot be counted.
    """

    columns_of_clients = ("energy/",)

    tells_of_clients = True
    """True: a private run that drops side channels has no number of a round's samples."""

    def __init__(self, profile: str | dict[str, tuple[float, float, float, str]]) -> None:
        self.profile = _checked(profile)
        self.amounts: Counter[str] = Counter()
        """Bits, seconds and multiply-accumulates of the run so far, by the names of their coefficients."""

    def compare(self, other: EnergyMeter) -> Literal["less", "more", "depends"]:
        """Compare this run's energy with another's, for all coefficients within the profile's ranges.

        Raises:
            UserError: the other run has another profile.
        """
        require(self.profile == other.profile, "EnergyMeter compares runs with the same profile, but these two differ.")
        is_cheaper = takes_less(self.amounts, other.amounts, self.profile)
        return {"first": "less", "second": "more", "depends": "depends"}[is_cheaper]  # type: ignore[return-value]

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Refuse a trainer without clients, and reset for a new run.

        Raises:
            UserError: the trainer has no clients.
        """
        require(
            hasattr(trainer, "evaluate_clients"),
            "EnergyMeter estimates the energy of clients, and lightning.Trainer has no clients: use FederatedTrainer.",
        )
        if stage == "fit":
            self.amounts = Counter()

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Add the coefficients to the hyper-parameters of the run's loggers; refuse a module whose computation is unknown.

        Raises:
            UserError: the module's multiply-accumulates cannot be counted.
        """
        require(
            trainer.run.macs_at_start is not None,
            "EnergyMeter needs the multiply-accumulates of the module, but its forward accepts neither a batch nor the batch's "
            "first tensor alone: give it such a forward, or leave EnergyMeter out.",
        )
        coefficients = {f"energy/{name}": list(coefficient) for name, coefficient in self.profile.items()}
        tell(trainer, lambda logger: logger.log_hyperparams(coefficients))

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the energy of the round, and of the run so far."""
        ledger, clock, metrics = trainer.run.ledger, trainer.clock, trainer.callback_metrics
        before = ledger.setup() if trainer.current_epoch == 0 else {}
        up, down = (ledger.bits(direction) + before.get(direction, 0) for direction in ("up", "down"))
        # With a clock of clients each of them has a rate of its own, and its own bits.
        counted = trainer.run.features.get("clock", {}).get("radio_seconds", {})
        rest_up, rest_down = (before.get("up", 0), before.get("down", 0)) if counted else (up, down)
        # Where clients train smaller networks, a column has what they have computed.
        whole = float(metrics["model/macs"]) * float(metrics["clients/samples"])
        passed = sum(float(metrics.get(f"clients/{name}_samples", 0)) for name in ("asked", "loss"))
        macs = 3 * float(metrics.get("clients/macs", whole)) + float(metrics["model/macs"]) * passed
        parts = {
            "uplink": {
                "uplink_joules_per_bit": up,
                "radio_watts": counted.get("up", 0.0) + rest_up / MEBIBYTE_BITS / clock.uplink_mebibytes_per_second,
            },
            "downlink": {
                "downlink_joules_per_bit": down,
                "radio_watts": counted.get("down", 0.0)
                + rest_down / MEBIBYTE_BITS / clock.downlink_mebibytes_per_second,
            },
            "network": {"network_joules_per_bit": up + down},
            "compute": {"joules_per_mac": macs},
        }
        energies = {name: joules(amounts, self.profile) for name, amounts in parts.items()}
        for amounts in parts.values():
            self.amounts.update(amounts)
        for name, energy in (energies | {"total": joules(self.amounts, self.profile)}).items():
            # a Python float would become float32
            pl_module.log(f"energy/{name}_joules", torch.tensor(energy, dtype=torch.float64))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"amounts": dict(self.amounts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self.amounts = Counter(state_dict["amounts"])


def _checked(profile: str | Mapping[str, Any]) -> Profile:
    """Return the coefficients of a profile.

    Raises:
        UserError: a name is unknown, or a coefficient is missing or out of order.
    """
    if isinstance(profile, str):
        require(
            profile in PROFILES,
            f"EnergyMeter's profile {profile!r} is unknown; {nearest(profile, PROFILES)}; or give a mapping of coefficients, "
            "which 5G needs.",
        )
        return dict(PROFILES[profile])
    names = PROFILES["lte"]
    require(isinstance(profile, Mapping), f"EnergyMeter's profile must be lte, wifi or a mapping, got {profile!r}.")
    for name in profile:
        require(name in names, f"EnergyMeter has no coefficient {name!r}; {nearest(str(name), names)}.")
    missing = [name for name in names if name not in profile]
    require(not missing, f"EnergyMeter's profile lacks {', '.join(missing)}: give all of {', '.join(names)}.")
    return {name: _coefficient(name, profile[name]) for name in names}


def _coefficient(name: str, value: Any) -> Coefficient:
    """Return a coefficient of a profile, once it has been checked."""
    sentence = f"EnergyMeter's {name} must be (low, value, high, source) with low ≤ value ≤ high, got {value!r}."
    require(isinstance(value, (tuple, list)) and len(value) == 4 and isinstance(value[3], str), sentence)
    for number in value[:3]:
        check_at_least(f"EnergyMeter's {name}", number, 0)
    require(value[0] <= value[1] <= value[2], sentence)
    return Coefficient(*value)
