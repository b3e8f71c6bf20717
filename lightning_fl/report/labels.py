"""Settings that distinguish runs, and short labels made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_fl.outputs.run_folder import UNKNOWN
from lightning_fl.report.catalogue import incidental_flags
from lightning_fl.report.records import Record, file_name

SEEDS = ("seed_everything", "data.seed")
INCIDENTAL = (*SEEDS, "ckpt_path", "data.download")
# Data sets that are the same wherever their files lie.
WELL_KNOWN = ("CIFAR10", "CIFAR100", "Digits", "FashionMNIST", "SVHN")
# Slots of a method whose parts are shown as a whole, and their default parts.
SLOTS = ("rule", "uplink", "downlink", "exchange", "aggregator")
USUAL = ("LocalOptimizer", "Dense", "OneShot", "WeightedMean")
SECURE_AGGREGATION = "trainer.secure_aggregation"
OF_PARTS = (*(f"algorithm.{slot}" for slot in SLOTS), SECURE_AGGREGATION)
LONGEST_LABEL, LONGEST_VALUE, LONGEST_FOLDER = 48, 24, 28
LONGEST_NUMBER = 8  # characters of a number that is shown with all its digits
# Order in which distinguishing settings are preferred.
PARTS = ("algorithm", "model", "data", "trainer")


def experiment_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without seeds, incidental flags and nulls: a missing setting and null are the same.

    Args:
        settings: values by dotted keys, as `flatten` returns them.
    """
    left_out = INCIDENTAL + incidental_flags() + (("data.root",) if settings.get("data") in WELL_KNOWN else ())

    def counts(key: str, value: Any) -> bool:
        is_left_out = any(key == name or key.startswith(f"{name}.") for name in left_out)
        return value is not None and not key.endswith(".dirpath") and not is_left_out

    return {key: value for key, value in settings.items() if counts(key, value)}


def identity(record: Record) -> tuple[tuple[str, str], ...]:
    """Return a key that is equal for runs that differ only in their seeds."""
    return tuple(sorted((key, str(value)) for key, value in experiment_settings(record.settings).items()))


def unknown_settings(record: Record) -> list[str]:
    """Return the settings of a run from Python whose values are unknown, because its objects do not store them."""
    return [key for key, value in record.settings.items() if value == UNKNOWN]


def differing(records: Sequence[Record]) -> list[str]:
    """Return the settings that differ between the records that have any, without seeds and incidental flags."""
    settings_of_runs = [experiment_settings(record.settings) for record in records if record.settings]
    keys = dict.fromkeys(key for settings in settings_of_runs for key in settings)
    return [key for key in keys if len({str(settings.get(key)) for settings in settings_of_runs}) > 1]


def labels(firsts: Sequence[Record]) -> list[str]:
    """Return a short, unique label for each run: its method and the settings that distinguish the method's runs.

    A part other than the default one is always shown, unless all runs of the report have it. If a label is too long or no
    settings distinguish a method's runs, their folders replace the settings.
    """
    chosen = {name: distinguishing_settings(name, firsts) for name in {record.algorithm for record in firsts}}
    varied = dict.fromkeys(".".join(key.split(".")[:2]) for key in differing(firsts))
    texts = []
    for record in firsts:
        own = [key for key in varied if _has_unusual_part(record, key)]
        keys = list(dict.fromkeys([*chosen[record.algorithm], *own]))
        settings = [text for key in keys if (text := _part_label(record, key, keys) or setting(record, key))]
        texts.append(", ".join([_short(_method(record), LONGEST_FOLDER), *dict.fromkeys(settings)]))
    is_allowed = [texts.count(label) == 1 and len(label) <= LONGEST_LABEL for label in texts]
    by_folder = {record.algorithm for record, allowed in zip(firsts, is_allowed, strict=True) if not allowed}
    return [
        f"{_short(_method(record), LONGEST_FOLDER)} ({folder})" if record.algorithm in by_folder else label
        for label, record, folder in zip(texts, firsts, _folders(firsts), strict=True)
    ]


def _method(record: Record) -> str:
    """Return the name of a run's method: FedAvg for an `Algorithm` with FedAvg's parts in all slots except the codecs."""
    if record.algorithm != "Algorithm":
        return record.algorithm
    slots = {
        slot: record.settings.get(f"algorithm.{slot}")
        for slot in (*SLOTS, "steps", "personal", "steps.1", "personal.0")
    }
    own = {slot for slot, part in slots.items() if part not in (None, [], *USUAL)} - {"uplink", "downlink"}
    is_first_usual = record.settings.get("algorithm.steps.0") in (None, "Apply")
    return record.algorithm if own or not is_first_usual else "FedAvg"


def distinguishing_settings(algorithm: str, records: Sequence[Record]) -> list[str]:
    """Return the settings that distinguish a method's runs, without redundant ones, the method's own first; [] if none do."""
    peers = [record for record in records if record.algorithm == algorithm]

    def distinguish(keys: Sequence[str]) -> bool:
        return _all_differ(tuple(setting(peer, key) for key in keys) for peer in peers)

    chosen = sorted(differing(peers), key=_weight)
    for key in reversed(chosen):
        others = [other for other in chosen if other != key]
        if distinguish(others):
            chosen = others
    return chosen if distinguish(chosen) else []


def _weight(key: str) -> tuple[int, int]:
    part = key.split(".")[0]
    return PARTS.index(part) if part in PARTS else len(PARTS), key.count(".")


def _has_unusual_part(record: Record, key: str) -> bool:
    """True if a setting is a slot, or secure aggregation, and the run has a part there that is not a default."""
    part = record.settings.get(key)
    return key in OF_PARTS and isinstance(part, str) and part not in (*USUAL, UNKNOWN)


def _part_label(record: Record, key: str, keys: Sequence[str]) -> str:
    """Return the part of the method to which a setting belongs, such as `TopK(0.1)`; empty if it belongs to none.

    Args:
        record: a run.
        key: the setting.
        keys: settings to show.
    """
    if key == SECURE_AGGREGATION:
        return "secure aggregation" if record.settings.get(key) else ""
    section, slot, *_ = [*key.split("."), ""]
    part = record.settings.get(f"{section}.{slot}")
    if section != "algorithm" or slot not in SLOTS or not isinstance(part, str):
        return ""
    text = _part(record, f"{section}.{slot}", keys)
    return text if slot == "uplink" else f"{slot}={text}"


def _part(record: Record, key: str, keys: Sequence[str]) -> str:
    """Return a part with its first argument, if this is a number or a part, and with the arguments to show."""
    inner = [name for name in record.settings if name.startswith(f"{key}.") and "." not in name.removeprefix(f"{key}.")]
    first = inner[0] if inner else None
    arguments = []
    for name in inner:
        value = record.settings[name]
        is_part = any(other.startswith(f"{name}.") for other in record.settings)
        if is_part and (name == first or any(other.startswith(name) for other in keys)):
            arguments.append(_part(record, name, keys))
        elif name == first and isinstance(value, int | float) and not isinstance(value, bool):
            arguments.append(shown(value))
        elif name in keys:
            arguments.append(setting(record, name))
    return shown(record.settings[key]) + (f"({', '.join(arguments)})" if arguments else "")


def is_of_method(key: str) -> bool:
    """True if a setting belongs to the method."""
    return key.split(".")[0] == "algorithm"


def setting(record: Record, key: str) -> str:
    """Return a setting in a few characters, such as `mu=0.1`; empty if the run does not have it, or leaves the slot empty."""
    if key not in record.settings or (key in OF_PARTS and record.settings[key] is None):
        return ""
    name, value = key.rpartition(".")[2], shown(record.settings[key])
    return value if name.isdigit() else f"{name}={value}"


def shown(value: Any) -> str:
    """Return a value in a few characters: four figures of a long number, the last part of a path, the ends of a long text.

    >>> [shown(value) for value in (None, True, 0.1, 3 * 0.1, "data/cifar10.npz", ["fc1", "fc2"])]
    ['null', 'true', '0.1', '0.3', 'cifar10.npz', 'fc1+fc2']
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return _short("+".join(map(shown, value)) or "[]", LONGEST_VALUE)
    if isinstance(value, float) and len(str(value)) > LONGEST_NUMBER:
        return f"{value:.4g}"
    return _short(file_name(value), LONGEST_VALUE)


def _short(text: str, longest: int) -> str:
    """Shorten a text that is too long to its beginning and end.

    >>> _short("abcdefghij", 7)
    'abc…hij'
    """
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}…{text[len(text) - (longest - 1) // 2 :]}"


def _folders(records: Sequence[Record]) -> list[str]:
    """Return short, unique names of the records' folders: the fewest last parts of the paths that distinguish them."""
    parts = [record.folder.absolute().parts for record in records]
    depth = next(d for d in range(1, 1 + max(map(len, parts))) if _all_differ(path[-d:] for path in parts))
    names = [_short("/".join(path[-depth:]), LONGEST_FOLDER) for path in parts]
    return names if _all_differ(names) else [f"{number}: {name}" for number, name in enumerate(names, 1)]


def _all_differ(items: Iterable[Any]) -> bool:
    all_items = list(items)
    return len(set(all_items)) == len(all_items)
