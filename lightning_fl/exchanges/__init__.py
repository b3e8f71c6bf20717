"""Exchanges: which clients upload which entries, and in how many turns."""

from lightning_fl.exchanges.drawn_clients import DrawnClients
from lightning_fl.exchanges.drawn_layers import DrawnLayers
from lightning_fl.exchanges.drawn_units import DrawnUnits
from lightning_fl.exchanges.first_units import FirstUnits
from lightning_fl.exchanges.gradient_turn import GradientTurn
from lightning_fl.exchanges.layer_divergence import LayerDivergence
from lightning_fl.exchanges.one_shot import OneShot
from lightning_fl.exchanges.power_sgd import TwoTurns
from lightning_fl.exchanges.pruned_units import PrunedUnits
from lightning_fl.exchanges.with_sample_count import WithSampleCount
from lightning_fl.exchanges.without_link import InPlace, NoUploads

__all__ = [
    "DrawnClients",
    "DrawnLayers",
    "DrawnUnits",
    "FirstUnits",
    "GradientTurn",
    "InPlace",
    "LayerDivergence",
    "NoUploads",
    "OneShot",
    "PrunedUnits",
    "TwoTurns",
    "WithSampleCount",
]
