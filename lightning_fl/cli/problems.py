"""Methods by the problem that they are for: the groups of `lightning-fl list`, and a page of the site."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Problem, and methods for it.

    Attributes:
        title: a few words.
        methods: methods that the terminal lists here; each method is in one group.
        others: methods of other groups that help as well.
        besides: further remedies or remarks, in Markdown.
    """

    title: str
    methods: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    besides: str = ""


PROBLEMS = (
    Problem("to start with", ("FedAvg", "Algorithm"), besides="`Algorithm` takes any combination of parts."),
    Problem(
        "few uplink bytes, FedAvg's downlink",
        ("FedLDF", "RandomLayers", "HDFL", "FedADP", "FedPAQ", "DASHA"),
        besides="[Codecs](/how-to/codecs.md) compress the messages of most methods, in either direction.",
    ),
    Problem(
        "few uplink bytes, three times FedAvg's downlink",
        ("FedAdamSSM", "FedAdamTop", "FairnessTop"),
        besides="They broadcast the model and two moments.",
    ),
    Problem(
        "few bytes in both directions",
        ("OneBitAdam", "EfficientAdam"),
        ("FedAP", "FedDUMAP", "HRank", "IMC", "PruneFL", "FedRep"),
        "OneBitAdam and EfficientAdam broadcast to all clients, so they save downlink bytes only if most take part.",
    ),
    Problem(
        "clients with different data (non-IID)",
        ("FedProx", "SCAFFOLD", "Scaffnew", "FedNova", "FedDyn", "FedExP", "FedSAM", "MOON"),
        ("FedDU", "FedDUM", "DataSharing", "FedDP", "FedBN", "FedRep", "Ditto", "APFL", "PFedMe", "PerFedAvg", "IFCA"),
        "`--data.partition Dirichlet` and [others](/reference/names.md) draw such clients.",
    ),
    Problem(
        "momentum and adaptive optimisers",
        ("DeviceM", "ServerM", "FedDA", "FedAdam", "FedOpt", "ServerAdagrad", "ServerAdam", "ServerYogi"),
        ("FedDUM", "FedDUDA", "OneBitAdam", "EfficientAdam"),
    ),
    Problem(
        "samples on the server",
        (
            *("FedDU", "FedDUS", "FedDUM", "FedDUSM", "FedDUDM", "FedDUDA"),
            *("DataSharing", "HybridFL", "FedDF", "FedKT"),
        ),
        ("FedAP", "FedDUAP", "FedDUMAP", "HRank", "PruneFL"),
        "[Server data](/how-to/server-data.md) says where the samples come from.",
    ),
    Problem(
        "smaller networks (pruning)",
        ("FedAP", "FedDUAP", "FedDUMAP", "HRank", "IMC", "PruneFL"),
        ("FedDP",),
        "Any method with a [pruning callback](/explanation/pruning.md).",
    ),
    Problem(
        "weak devices (smaller models)",
        ("HeteroFL", "FjORD", "FederatedDropout"),
        besides="[Weak devices](/how-to/smaller-clients.md) train, send and receive a part of every layer.",
    ),
    Problem(
        "slow clients",
        ("FedBuff", "FedAsync"),
        others=("FedNova", "FedProx", "FedAP", "FedDUAP", "FedDUMAP", "HRank"),
        besides="`--trainer.straggler_rate` lets clients stop early, and `--trainer.clock` "
        "[simulates their time](/how-to/devices.md), with deadlines and over-selection.",
    ),
    Problem(
        "choosing clients (selection)",
        besides="[`--trainer.selection Fastest`](/how-to/selection.md) and others decide which clients take part, with most "
        "methods.",
    ),
    Problem(
        "a model for each client",
        ("FedBN", "FedRep", "Ditto", "APFL", "PFedMe", "PerFedAvg", "IFCA", "FedDP"),
        besides="[`personal`](/how-to/personalise.md) lets any method keep layers with the clients.",
    ),
    Problem(
        "faulty or hostile clients (robust)",
        besides="`--algorithm.aggregator Krum` and [other robust aggregators](/how-to/robust.md) take the place of the mean in "
        "most methods.",
    ),
    Problem(
        "clients that must stay private",
        besides="[`--trainer.privacy ClientPrivacy`](/how-to/privacy.md) clips uploads, adds noise and counts the "
        "privacy loss, with most methods.",
    ),
    Problem(
        "bounds of a comparison",
        ("Centralised", "LocalOnly"),
        besides="[Reports](/how-to/report.md) draw them as horizontal lines over bytes.",
    ),
)
