"""Random configurations of tiny runs, from the classes that a configuration may name."""

from __future__ import annotations

import json
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np

from lightning_fl.algorithms import Algorithm
from lightning_fl.checks import parameters_of
from lightning_fl.cli.class_names import classes_under
from lightning_fl.slots import Aggregator, Codec, Exchange, Rule, Step

ODD_NUMBERS = (0, -1, 1, 0.5, 1e-9, 1e9, 1e30, float("inf"), float("nan"))
ODD_TEXTS = ("", "nonsense", "null", "[]", "{}", "010", "1:30", "ä" * 300)
SIZE = 60
KINDS = {Algorithm: "algorithm", Rule: "rule", Codec: "codec", Exchange: "exchange", Aggregator: "aggregator"}
"""Keys of the classes that a parameter of this type takes."""
SENSIBLE: dict[str, tuple[Any, ...]] = {
    "prune_round": (1, 2),
    "prune_epoch": (1, 2),
    "every_n_epochs": (1, 2),
    "every_n_rounds": (1, 2),
    "n": (1,),
    "min_samples": (1, 2),
    "initial_passes": (10,),
    "profile": ("wifi", "lte"),
    "monitor": ("val/loss", "val/accuracy", "train/loss"),
    "duration": ("00:01:00:00",),
    "scheduling": ({"1": 2},),
    "pruning_fn": ("l1_unstructured",),
    "dirpath": (None,),
    "swa_lrs": (0.05,),
    "device": ("cpu",),
    "candidates": (3, 4, 4),
}
"""Values of parameters whose default does nothing in three rounds, or that have none."""
USUAL: tuple[dict[str, tuple[Any, ...]], ...] = (
    {"class_path": ("EarlyStopping",), "monitor": ("val/loss", "train/loss"), "patience": (1, 2)},
    {"class_path": ("EarlyStopping",), "monitor": ("val/accuracy",), "mode": ("max",), "patience": (1, 2)},
    {
        "class_path": ("EarlyStopping",),
        "monitor": ("val/accuracy",),
        "stopping_threshold": (0.1, 0.3),
        "mode": ("max",),
    },
    {"class_path": ("TargetReached",), "target": (0.1, 0.3, 0.5)},
    {"class_path": ("TargetReached",), "target": (1.4, 1.3), "monitor": ("val/loss", "train/loss")},
    {"class_path": ("CommunicationMeter",), "max_uplink_bytes": (1.0, 1e4, 5e4)},
    {"class_path": ("Timer",), "duration": ("00:01:00:00",)},
    {"class_path": ("RichProgressBar", "TQDMProgressBar", "RichModelSummary")},
)
"""Callbacks that users often give. The timer ends no run, because no two runs would then end after the same round."""
CONTRACTING = ("TopK", "STC", "LowRank", "OneBit", "Quantiser", "Blockwise", "Cast")
"""Codecs that fit error feedback."""
UNBIASED = ("QSGD", "TernGrad", "DRIVE", "EDEN", "RandomK", "Dense", "TopK", "Cast", "Blockwise", "OneBit")
"""Codecs that fit the uplink alone."""
SENDING = (
    ("OneShot", "WeightedMean"),
    ("OneShot", "WeightedMean"),
    ("TwoTurns", "WeightedMean"),
    ("DrawnClients", "MaskedMean"),
    ("DrawnLayers", "MaskedMean"),
    ("LayerDivergence", "MaskedMean"),
    ("PrunedUnits", "MaskedMean"),
)
"""Exchanges and aggregators that fit."""
SUM_ONLY = (
    "APFL",
    "Ditto",
    "FedAvg",
    "FedBN",
    "FedDyn",
    "FedNova",
    "FedProx",
    "RandomLayers",
    "SCAFFOLD",
    "ServerAdam",
)
"""Methods that fit secure aggregation, which most others do not."""
RARE = (
    (SUM_ONLY, {"--trainer.secure_aggregation": "SecureAggregation"}, ("loss_guard.clients", "over_selection")),
    (("FedAsync", "FedBuff"), {}, ("runner", "over_selection", "deadline", "selection")),
)
"""Methods of rounds that a draw from all methods seldom finds, with flags that they need and flags that they refuse."""
FEATURES = (
    {
        "--trainer.adversary.attack": ("SignFlip", "ALIE", "IPM", "NotFinite", "MinMax", "LabelFlip"),
        "--trainer.adversary.attackers": ("0.5",),
    },
    {
        "--trainer.privacy": ("LocalPrivacy",),
        "--trainer.privacy.noise_multiplier": ("0", "0.1"),
        "--trainer.privacy.buffers": ("clip", "keep"),
    },
    {
        "--trainer.privacy": ("ClientPrivacy",),
        "--trainer.privacy.noise_multiplier": ("0", "0.5"),
        "--trainer.privacy.sampling": ("poisson", "fixed"),
        "--trainer.privacy.side_channels": ("keep", "keep", "drop"),
        "--trainer.privacy.delta": ("0.01",),
    },
    {"--trainer.secure_aggregation": ("SecureAggregation",)},
    {
        "--trainer.clock.devices": ("phones",),
        "--trainer.deadline": ("0.02", "0.1", "1"),
        "--trainer.over_selection": ("1.0", "1.5"),
    },
    {"--trainer.clock.devices": ("phones",), "--trainer.clock.jitter_sigma": ("0.5",)},
    {"--trainer.loss_guard.clients": ("1.2",), "--trainer.loss_guard.rounds": ("1.2",)},
)
"""Features around the rounds, each by some of its flags."""


def write_images(path: Path) -> None:
    """Write the samples of all runs: 60 training and 20 test images (16, 16) of 4 classes."""
    random = np.random.default_rng(0)
    labels = np.arange(SIZE + 20) % 4
    images = (random.integers(120, size=(SIZE + 20, 16, 16)) + 40 * labels[:, None, None]).astype(np.uint8)
    train = {"train_images": images[:SIZE], "train_labels": labels[:SIZE]}
    np.savez(path, **train, test_images=images[SIZE:], test_labels=labels[SIZE:])


def draw(random: np.random.Generator, images: Path) -> list[str]:
    """Return the flags of a `fit`; most are sensible, some are not."""
    draws = Draws(random)
    maybe, one_of = draws.maybe, draws.one_of
    flags = {
        "--data": "Arrays",
        "--data.path": str(images),
        "--model": "ImageClassifier",
        "--model.network": one_of("linear", "lenet5"),
        "--trainer.max_rounds": "3",
        "--trainer.accelerator": "cpu",
        "--trainer.enable_progress_bar": one_of("true", "false"),
        "--trainer.enable_model_summary": one_of("true", "false"),
        "--trainer.clients_per_round": one_of("1", "2", "2", "3", "3", "0.01", "0.5", "1.0"),
        "--seed_everything": str(random.integers(1000)),
    }
    optional = {
        "--data.batch_size": ("1", "4", "100"),
        "--data.val_fraction": ("0.2",),
        "--data.seed": ("7",),
        "--trainer.local_epochs": ("2",),
        "--trainer.local_steps": ("1", "3"),
        "--trainer.runner": ("serial", "stacked"),
        "--trainer.dropout_rate": ("0.3", "0.7"),
        "--trainer.straggler_rate": ("0.5",),
        "--trainer.client_states": ("disk",),
        "--trainer.val_every_n_rounds": ("2", "5"),
        "--trainer.log_every_n_rounds": ("2",),
        "--trainer.checkpoint_every_n_rounds": ("2",),
        "--trainer.precision": ("32-true", "64-true", "bf16-true", "bf16-mixed"),
        "--trainer.gradient_clip_val": ("0.5",),
        "--trainer.accumulate_grad_batches": ("2",),
        "--trainer.client_optimizer": ("sgd",),
        "--trainer.max_time": ("00:01:00:00",),
        "--trainer.metric": ("val/loss", "train/loss"),
        "--trainer.loss_guard.clients": ("1.2", "3"),
        "--trainer.clock.computation_seconds": ("2.5",),
        "--trainer.clock.uplink_mebibytes_per_second": ("0.5",),
        "--model.learning_rate": ("0.1", "0.5"),
        "--model.lr_decay": ("0.9",),
    }
    flags |= {name: one_of(*values) for name, values in optional.items() if maybe(0.15)}
    if "--trainer.local_epochs" in flags:
        flags.pop("--trainer.local_steps", None)
    methods, needed, refused = one_of(*RARE) if maybe(0.4) else (None, {}, ())
    if methods is not None:
        chosen = draws.flags("--algorithm", classes_under("algorithm")[one_of(*methods)])
        flags |= {name: value for name, value in chosen.items() if "class_path" not in value}
        if methods is not SUM_ONLY and maybe(0.5):
            flags["--algorithm.uplink"] = json.dumps(draws.codec())
    elif maybe(0.35):
        flags["--algorithm"] = json.dumps(draws.composed())
    else:
        flags |= draws.flags("--algorithm", one_of(*classes_under("algorithm").values()))
    # These data have no groups, and no published split.
    partitions = [
        c for name, c in classes_under("partition").items() if name not in ("ByGroup", "GivenIndices")
    ]  # need more
    flags |= draws.flags("--data.partition", one_of(*partitions))
    if maybe(0.15):
        flags |= {"--trainer.test_every_n_rounds": one_of("1", "2"), "--data.val_fraction": "0.2"}
    if maybe(0.7):
        flags |= {"--data.server_fraction": one_of("0.1", "0.15"), "--data.client_fraction": "0.85"}
        if maybe(0.2):
            flags["--trainer.loss_guard.rounds"] = one_of("1.2", "3")
    flags["--data.num_clients"] = one_of("4", "5")
    if maybe(0.5):
        selection = one_of(*classes_under("selection"))
        flags["--trainer.selection"] = json.dumps(draws.part(selection, "selection"))
        if selection == "Fastest":
            flags["--trainer.clock.devices"] = "phones"
    if maybe(0.05):
        flags["--trainer.compile"] = "true"
    if maybe(0.5):
        flags["--trainer.callbacks"] = json.dumps([draws.callback() for _ in range(one_of(1, 1, 2, 3))])
    for _ in range(one_of(0, 0, 1, 2)):
        flags |= {name: one_of(*values) for name, values in one_of(*FEATURES).items()}
    flags = {name: value for name, value in flags.items() if name.removeprefix("--trainer.") not in refused} | needed
    if maybe(0.08):
        flags[one_of(*list(flags)[2:])] = one_of(*map(str, ODD_NUMBERS), *ODD_TEXTS)
    return [f"{name}={value}" for name, value in flags.items()]


class Draws:
    """Draws of classes with some of their parameters, as flags or as mappings with `class_path` and `init_args`."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random

    def maybe(self, share: float) -> bool:
        """Return True with this probability."""
        return bool(self.random.random() < share)

    def one_of(self, *values: Any) -> Any:
        """Draw one of the values."""
        return values[int(self.random.integers(len(values)))]

    def flags(self, flag: str, found: type) -> dict[str, str]:
        """Return the flags of a class, with some of its parameters."""
        arguments = self._arguments(found)
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
        return {flag: found.__name__} | {f"{flag}.{name}": text for name, text in texts.items()}

    def part(self, name: str, key: str, **arguments: Any) -> dict[str, Any]:
        """Return a mapping for a class that `key` may name, with some of its parameters."""
        return {"class_path": name, "init_args": self._arguments(classes_under(key)[name]) | arguments}

    def any_part(self, key: str) -> dict[str, Any]:
        """Return a mapping for any class that `key` may name."""
        return self.part(self.one_of(*classes_under(key)), key)

    def callback(self) -> dict[str, Any]:
        """Return a callback: a usual one, one of the package, or any."""
        if self.maybe(0.65):
            chosen = {name: self.one_of(*values) for name, values in self.one_of(*USUAL).items()}
            return {"class_path": chosen.pop("class_path"), "init_args": chosen}
        found = classes_under("callbacks")
        own = [name for name, c in found.items() if c.__module__.startswith("lightning_fl")]
        return self.part(self.one_of(*(own if self.maybe(0.5) else found)), "callbacks")

    def composed(self) -> dict[str, Any]:
        """Return an `Algorithm` whose slots are filled one by one; most fit each other."""
        exchange, aggregator = self.one_of(*SENDING)
        slots = {"exchange": self.part(exchange, "exchange"), "aggregator": self.part(aggregator, "aggregator")}
        if exchange != "TwoTurns":
            slots["uplink"] = self.codec()
        slots["steps"] = [self.part("Apply", "steps")]
        if self.maybe(0.5):
            slots["steps"].append(self.part(self.one_of("Momentum", "Adam", "Yogi", "Adagrad"), "steps"))
        if self.maybe(0.5):
            codec = self.part(self.one_of(*CONTRACTING, "QSGD"), "codec")
            slots["steps"].append(self.part("Compress", "steps", codec=codec))
            slots["downlink"] = self.part("Followed", "codec", codec=codec, carrier="model/change")
        elif self.maybe(0.5):
            slots["downlink"] = self.part(self.one_of("Changes", "Cast", "Blockwise", "Quantiser"), "codec")
        if self.maybe(0.5):
            slots["rule"] = self.part(self.one_of("Proximal", "RestartedMomentum", "Pulled"), "rule")
        if self.maybe(0.15):
            slot = self.one_of("rule", "uplink", "downlink", "exchange", "aggregator")
            slots[slot] = self.any_part("codec" if slot.endswith("link") else slot)
        if self.maybe(0.2):
            slots.pop(self.one_of(*slots))
        return {"class_path": "Algorithm", "init_args": slots}

    def codec(self) -> dict[str, Any]:
        """Return an uplink: a codec with error feedback if it needs that, or any; at times what remains is coded again."""
        if self.maybe(0.5):
            return self.part("ErrorFeedback", "codec", codec=self.part(self.one_of(*CONTRACTING), "codec"))
        codec = self.any_part("codec") if self.maybe(0.2) else self.part(self.one_of(*UNBIASED), "codec")
        return self.part("EntropyCoded", "codec", codec=codec) if self.maybe(0.15) else codec

    def _arguments(self, found: type) -> dict[str, Any]:
        """Return some of a class's parameters, and all that have no default."""
        arguments = {}
        for name, parameter in parameters_of(found).items():
            if name in SENSIBLE or parameter.default is Parameter.empty or self.maybe(0.25):
                value = self._value(name, parameter)
                if value is not None:
                    arguments[name] = value
        return arguments

    def _value(self, name: str, parameter: Parameter) -> Any:
        """Return a value near the default, or sometimes an odd one; None if the type is not a plain one or a part."""
        hints = [hint for hint in (get_args(parameter.annotation) or (parameter.annotation,)) if hint is not type(None)]
        literal = parameter.annotation if get_origin(parameter.annotation) is Literal else None
        for hint in hints:
            literal = hint if get_origin(hint) is Literal else literal
        odd = self.maybe(0.05)
        if name in SENSIBLE:
            return self.one_of(*SENSIBLE[name])
        if literal is not None:
            return self.one_of(*get_args(literal))
        if bool in hints:
            return self.one_of(True, False)
        if float in hints or int in hints:
            default = parameter.default if isinstance(parameter.default, (int, float)) else 2
            more = default * 2 if default >= 1 else (default + min(1, 2 * default)) / 2  # below 1 it is often a share
            near = (default, default / 2, more) if float in hints else (default, default * 2, max(1, default // 2))
            return self.one_of(*(ODD_NUMBERS if odd else near))
        if Step in hints:
            inner = self.any_part("steps")
            return [inner] if get_origin(parameter.annotation) is tuple else inner
        kind = next((key for base, key in KINDS.items() if base in hints), None)
        return None if kind is None else self.any_part(kind)
