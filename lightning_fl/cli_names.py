"""The classes that a key of the configuration may name, found by the last part of the key."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch import loggers as lightning_loggers

from lightning_fl import aggregators, algorithms, callbacks, codecs, data, exchanges, modules, rules, steps
from lightning_fl.slots import Aggregator, Codec, Exchange, Rule, Step

ROOMS: dict[str, tuple[list[Any], type]] = {
    "algorithm": ([algorithms], algorithms.Algorithm),
    "rule": ([rules], Rule),
    "uplink": ([codecs], Codec),
    "downlink": ([codecs], Codec),
    "codec": ([codecs], Codec),
    "exchange": ([exchanges], Exchange),
    "aggregator": ([aggregators], Aggregator),
    "inner": ([aggregators], Aggregator),
    "steps": ([steps], Step),
    "stages": ([steps], Step),
    "data": ([data], data.FederatedDataModule),
    "partition": ([data], data.Partition),
    "model": ([modules], modules.ImageClassifier),
    "callbacks": ([callbacks, lightning_callbacks], lightning_callbacks.Callback),
    "logger": ([lightning_loggers], lightning_loggers.Logger),
}


def classes_under(key: str) -> dict[str, type]:
    """By name the classes of ours and Lightning's that `key` may name; none for a key that names no class.

    >>> sorted(classes_under("data.partition"))
    ['Dirichlet', 'IID', 'Shards']
    """
    folders, base = ROOMS.get(key.rpartition(".")[2], ([], object))
    found = [getattr(folder, name) for folder in folders for name in getattr(folder, "__all__", [])]
    named = [c for c in found if isinstance(c, type) and issubclass(c, base) and not _is_base(c)]
    return {c.__name__: c for c in sorted(named, key=lambda c: c.__name__)}


def _is_base(found: type) -> bool:
    return bool(getattr(found, "__abstractmethods__", None)) or found is lightning_callbacks.Callback
