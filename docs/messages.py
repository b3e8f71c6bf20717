"""Picture of a round with its messages and their bytes, for the home page.

The bytes are those that `lightning-fl fit --dry_run` counts for the first round of configs/quickstart.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import yaml

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import Algorithm, FedAvg
from lightning_fl.codecs import QSGD, Cast, TopK
from lightning_fl.outputs.units import in_bytes
from lightning_fl.slots import Codec

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
CODECS = (Cast(), TopK(alpha=0.1), QSGD(levels=1))
"""Codecs of the uploads whose bytes the picture shows, besides none; they take the same in every run."""
PAGES = {
    "uplink": "codecs",
    "downlink": "codecs",
    "rule": "rules",
    "exchange": "exchanges",
    "aggregator": "aggregators",
}
"""Headings of the page of parts, for slots that are called otherwise."""


@cache
def quickstart() -> dict[str, Any]:
    """Return the configuration of the quickstart."""
    config: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    return config


def planned(method: Algorithm) -> tuple[int, float, float]:
    """Return the numbers of the quickstart's model, and the bytes of its first round up and down, under a method."""
    config = quickstart()
    model, data = (made(config[key]) for key in ("model", "data"))
    flags = {name: config["trainer"][name] for name in ("clients_per_round", "local_epochs")}
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    plan = FederatedTrainer(max_rounds=1, accelerator="cpu", **flags, **quiet).plan(model, data, algorithm=method)
    return sum(each.numel() for each in model.parameters()), plan.round_uplink_bytes, plan.round_downlink_bytes


def made(entry: dict[str, Any]) -> Any:
    """Return the object of a class_path with its init_args; the network gets what the command line takes from the data."""
    package, _, name = entry["class_path"].rpartition(".")
    cls = getattr(import_module(package), name)
    from_data = {"num_classes": 10, "in_channels": 1} if "network" in entry["init_args"] else {}
    return cls(**entry["init_args"], **from_data)


def messages_diagram(figure: Any) -> str:
    """Return the picture as a block of HTML, which `figure` makes of its parts."""
    config = quickstart()
    cohort, num_clients = config["trainer"]["clients_per_round"], config["data"]["init_args"]["num_clients"]
    size, up, down = planned(FedAvg())
    uploads = {"uncompressed": up, **{said(codec): planned(FedAvg(uplink=codec))[1] for codec in CODECS}}
    rows = "".join(f"<dt>{name}</dt><dd>{in_bytes(count)}</dd>" for name, count in uploads.items())
    parts = [
        place("draw", "Server", f"draws {cohort} of {num_clients} clients and broadcasts its model.", ("downlink",)),
        wire("down", f"<b>{cohort} × the model</b><dl><dt>{size:,} numbers each</dt><dd>{in_bytes(down)}</dd></dl>"),
        place("train", "Client", "trains your <code>LightningModule</code> on its own samples.", ("rule", "personal")),
        place("send", "Client", "sends its delta: the change that its training made.", ("exchange", "uplink")),
        wire("up", f"<b>{cohort} deltas</b><dl>{rows}</dl>"),
        place("merge", "Server", "merges the deltas and updates its model.", ("aggregator", "steps")),
    ]
    caption = (
        "A round of the quickstart, and the bytes of its messages as <code>lightning-fl fit --dry_run</code> counts them. "
        "Blue labels are the six slots of a method. Uplink and downlink share one slot: the codec, which compresses messages."
    )
    return figure("messages", parts, caption)


def said(codec: Codec) -> str:
    """Return a codec with the parameters that differ from their defaults.

    >>> said(TopK(alpha=0.1))
    'TopK(alpha=0.1)'
    """
    defaults = {name: one.default for name, one in signature(type(codec)).parameters.items()}
    given = ", ".join(f"{name}={getattr(codec, name)}" for name in defaults if getattr(codec, name) != defaults[name])
    return f"{type(codec).__name__}({given})" if given else type(codec).__name__


def place(kind: str, who: str, text: str, slots: Sequence[str]) -> str:
    """Return the box of what the server or a client does, with links to the parts of its slots."""
    links = " ".join(f'<a href="reference/parts.html#{PAGES.get(slot, slot)}">{slot}</a>' for slot in slots)
    return f'<div class="place {kind}"><p><b>{who}</b> {text}</p><p class="slots">{links}</p></div>'


def wire(kind: str, content: str) -> str:
    """Return what crosses between server and clients, with an arrow."""
    return f'<div class="crossing {kind}">{content}</div>'
