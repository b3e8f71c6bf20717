"""Names that papers and other frameworks use, the names here, and the ends of error sentences about unknown names."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_fl.errors import nearest

_ROUNDS = "trainer.max_rounds"
_EPOCHS = "trainer.local_epochs for the passes of a client in a round, and trainer.max_rounds for the rounds"
_CLIENTS = "trainer.clients_per_round, a count or a fraction"
FLAGS = {
    "seed": "seed_everything (data.seed only divides the samples)",
    **dict.fromkeys(("rounds", "num_rounds", "n_rounds", "comm_rounds"), _ROUNDS),
    **dict.fromkeys(("epochs", "num_epochs"), _EPOCHS),
    **dict.fromkeys(("fraction", "fraction_fit", "sample_clients", "sample_fraction", "participation"), _CLIENTS),
    **dict.fromkeys(("clients", "n_clients"), "data.num_clients"),
    **dict.fromkeys(("gpus", "num_gpus"), "trainer.devices, with trainer.accelerator gpu"),
}
"""Flags of the trainer, or without a section."""
CLASSES = {
    "FedAvgM": "ServerM with dampening false",
    "FedAdagrad": "ServerAdagrad",
    "FedYogi": "ServerYogi",
    "FedMedian": "FedAvg with aggregator CoordinateMedian",
    "FedTrimmedAvg": "FedAvg with aggregator TrimmedMean",
    "FedPer": "FedAvg with the head's layers in personal",
    "SignSGD": "FedAvg with uplink OneBit, of scale unit, and aggregator MajorityVote",
    **dict.fromkeys(("noniid", "LabelSkew"), "Dirichlet, Shards or Classes"),
    "PathologicalPartitioner": "Classes",
}
OF_OPTIMISERS = {"lr": "learning_rate", "learning_rate": "lr"}
"""Parameters that optimisers and modules name differently."""
_BY_LETTERS = {name.lower(): here for name, here in CLASSES.items()}


def name_here(name: str) -> str | None:
    """Return the end of the sentence about a class that has another name here; None for other names.

    >>> name_here("fed-yogi")
    'here it is ServerYogi'
    """
    here = _BY_LETTERS.get(name.lower().replace("-", "").replace("_", ""))
    return here and f"here it is {here}"


def unknown_class(name: str, allowed: Iterable[str]) -> str:
    """Return the end of an error sentence about the unknown name or path of a class.

    >>> unknown_class("FedAgv", ["FedAvg"]), unknown_class("FedMedian", ["FedDA"])
    ("did you mean 'FedAvg'? Allowed: FedAvg", 'here it is FedAvg with aggregator CoordinateMedian')
    >>> unknown_class("own.FedAgv", ["FedAvg"]), unknown_class("lightning_fl.FedAvg", ["FedAvg"])
    ('it cannot be imported, or is of another kind', 'its name alone is enough: FedAvg')
    """
    names, (module, _, last) = list(allowed), name.rpartition(".")
    if module and last in names:
        return f"its name alone is enough: {last}"
    if module and module.partition(".")[0] != "lightning_fl":
        return "it cannot be imported, or is of another kind"
    return name_here(last) or nearest(last, names, cutoff=0.75)  # FedSGD is near no other method
