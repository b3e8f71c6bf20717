"""Check that the parts of an algorithm fit, from their declarations: `needs`, `uses`, `provides`, losses and weights.

An entry that a part needs must be provided by another, and an entry that a part provides must be used by another. So nothing
is sent or computed in vain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelPruning

from lightning_fl import aggregators, rules, steps
from lightning_fl.checks import is_a
from lightning_fl.slots import (
    PROPOSAL,
    SENT,
    UPLOADS,
    Aggregator,
    Codec,
    Exchange,
    Gradients,
    Part,
    Personal,
    Rule,
    Step,
    Traits,
    parts_in,
    several_models,
)
from lightning_fl.slots.codec import undeclared
from lightning_fl.slots.part import to_declare


@dataclass(frozen=True)
class Slots:
    """Parts of an algorithm.

    Attributes:
        steps: the chain as given; `chain` has the steps inside them too.
    """

    rule: Rule
    uplink: Codec
    downlink: Codec
    exchange: Exchange
    aggregator: Aggregator
    steps: tuple[Step, ...]
    personal: tuple[Personal, ...]

    @property
    def chain(self) -> list[Step]:
        """Return the steps in the order in which the server takes them."""
        return [inner for step in self.steps for inner in step.steps()]

    @property
    def shared(self) -> frozenset[str]:
        """Return the entries that go down with the model."""
        return frozenset().union(*(step.provides for step in self.steps))

    @property
    def early(self) -> frozenset[str]:
        """Return the entries that clients exchange before the training."""
        return self.exchange.provides - {SENT}

    @property
    def step_rules(self) -> list[Rule]:
        """Return the rules of the trainings on the server."""
        return [rule for step in self.steps for rule in step.rules()]


def incompatibilities(slots: Slots) -> list[str]:
    """Return all reasons why the parts do not fit, as clauses that name the parts and the remedy."""
    problems = [
        *_personal(slots),
        *_partners(slots),
        *_unmet(slots),
        *_chain(slots),
        *_several_models(slots),
        *_unused(slots),
        *_uploads(slots),
        *_compressed(slots),
        *_in_common(slots),
        *_downlink(slots),
        *_masks(slots),
        *_moments(slots),
        *_smaller(slots),
    ]
    return list(dict.fromkeys(problems))


def _personal(slots: Slots) -> Iterator[str]:
    """Yield the parts of what clients keep that do not fit each other or the rule."""
    keepers = [name_of(part) for part in slots.personal if part.keeps_model or part.adapts]
    if len(keepers) > 1:
        yield f"{' and '.join(keepers)} each let a client predict with a model of its own: leave one out"
    if slots.exchange.keeps_changes and not any(part.continues for part in slots.personal):
        keeper = name_of(slots.exchange.sender)
        yield f"{keeper} leaves every change with its client, so no model would ever learn: add TrainedAlone() to personal"
    phased = [name_of(part) for part in slots.personal if part.has_phases]
    if len(phased) > 1:
        yield f"{' and '.join(phased)} each divide a client's training: leave one out"
    if phased and (slots.rule.reads or slots.rule.provides):
        yield f"{phased[0]} lets the rule wait in some steps, which {name_of(slots.rule)} would count: use LocalOptimizer"


def _partners(slots: Slots) -> Iterator[str]:
    """Yield the parts whose other half is missing."""
    parts = list(parts_in((slots.rule, slots.aggregator, *slots.steps, *slots.personal)))
    present = set(map(name_of, parts))
    for part in parts:
        if missing := sorted(part.partners - present):
            yield f"{name_of(part)} is half of a method, which needs {' and '.join(missing)} besides"


def _unmet(slots: Slots) -> Iterator[str]:
    """Yield the parts that need what no other provides."""
    sender, early, shared, sent = name_of(slots.rule), slots.early, slots.shared, slots.rule.provides | {"model"}
    readers: list[Part] = [slots.aggregator, slots.uplink, slots.exchange]
    requirements: list[tuple[Iterable[Part], frozenset[str], str]] = [
        ([slots.rule], shared | early, "no step shares"),
        (slots.step_rules, shared, "no step shares"),
        (slots.chain, sent | early | slots.aggregator.provides | {UPLOADS, PROPOSAL}, f"{sender} does not send"),
        (readers, sent, f"{sender} does not send"),
    ]
    if early:
        requirements.append((readers[:2], early, f"clients of {sender} do not send before the training"))
    for parts, available, otherwise in requirements:
        for part in parts:
            if missing := part.needs - available:
                yield f"{name_of(part)} needs {_listed(missing)}, which {otherwise}"
    for part in readers:
        if missing := part.needs & slots.rule.omits:
            yield f"{name_of(part)} needs {_listed(missing)}, which {sender} does not send in every round"
    if any(UPLOADS in step.needs - slots.aggregator.provides for step in slots.chain):
        yield f"a step reads each client's model, which {name_of(slots.aggregator)} does not keep (use KeepUploads)"


def _smaller(slots: Slots) -> Iterator[str]:
    """Yield the parts that clients cannot have which train smaller networks."""
    if not slots.exchange.sender.cuts:
        return
    cutter, needed = name_of(slots.exchange.sender), slots.rule.needs | slots.shared
    if needed:
        yield f"clients of {cutter} train smaller networks, for which {_listed(needed)} are not cut: use another rule"
    if slots.rule.init(torch.zeros(1)):
        yield (
            f"clients of {cutter} train smaller networks, and {name_of(slots.rule)} lets each keep numbers of the whole: use "
            "another rule, such as LocalOptimizer"
        )
    second = Gradients.MINIBATCH_AT_RECEIVED | Gradients.MINIBATCH_AT_POINT
    others = {second: "takes two gradients in a step", Gradients.REPRESENTATIONS: "compares models in a step"}
    for reads, what in others.items():
        if slots.exchange.differs_in_steps and slots.rule.reads & reads:
            yield (
                f"each step of {cutter} trains another network, and {name_of(slots.rule)} {what}: use another rule, such as "
                "LocalOptimizer"
            )
    if slots.personal:
        yield f"clients of {cutter} train smaller networks, of which none keeps a part: leave {name_of(slots.personal[0])} out"
    builds = Traits.NEEDS_EVERY_CLIENT | Traits.CATCHES_UP | Traits.ERROR_FEEDBACK
    if slots.downlink.traits & builds or slots.downlink.change_entry():
        yield (
            f"clients of {cutter} receive parts of the model, and the downlink {name_of(slots.downlink)} builds on what they "
            "have received before: use another codec"
        )


def _chain(slots: Slots) -> Iterator[str]:
    """Yield the steps that change no model, stand before the first proposal, or discard an earlier one."""
    named = ", ".join(map(name_of, slots.steps))
    if not slots.steps:
        yield "it has no server step, so the model would never change (Apply() is FedAvg's)"
    elif not any(step.changes_model for step in slots.steps):
        yield f"no step of {named} changes the model, so it would never learn: begin with Apply()"
    elif not any("model" in step.uses for step in slots.chain):
        yield f"no step of {named} uses the uploads of {name_of(slots.rule)}, which would be thrown away: begin with Apply()"
    else:
        proposing: Step | None = None
        for step in slots.chain:
            if PROPOSAL in step.needs and proposing is None:
                yield f"{name_of(step)} changes the model that an earlier step proposes, and there is none: begin with Apply()"
            if "model" in step.uses and PROPOSAL not in step.uses and proposing is not None:
                yield f"{name_of(step)} starts anew, so the work of {name_of(proposing)} is thrown away: put it first, and once"
            if {"model", PROPOSAL} & step.uses:
                proposing = step
    for name in sorted(slots.shared):
        givers = [name_of(step) for step in slots.steps if name in step.provides]
        if len(givers) > 1:
            yield f"{' and '.join(givers)} send down the same {name!r}, of which clients receive the last: leave one out"
    for position, step in enumerate(slots.chain):
        later = frozenset().union(*(other.uses for other in slots.chain[position + 1 :]))
        if lost := step.changes - later:
            yield f"{name_of(step)} changes {_listed(lost)}, which no later step uses: put the step that does after it"


def _several_models(slots: Slots) -> Iterator[str]:
    """Yield the steps that change the first of several models alone."""
    further = slots.shared.intersection(several_models(1 + len(slots.shared))[1:])
    keepers = [name_of(step) for step in slots.steps if further & step.provides]
    if not keepers:
        return
    for step in slots.chain:
        if {"model", PROPOSAL} & step.uses and not further & step.uses and step != steps.Apply():
            yield (
                f"{name_of(step)} would change the first model alone, and {keepers[0]} adds the clients' changes to the others "
                "as they are: use Apply() without a learning rate, and no other step that changes the model"
            )


def _unused(slots: Slots) -> Iterator[str]:
    """Yield the parts that provide what no other uses."""
    server = frozenset[str]().union(*(step.uses for step in slots.chain))
    clients = slots.rule.needs.union(*(rule.needs for rule in slots.step_rules))
    rule, aggregator, codec = name_of(slots.rule), name_of(slots.aggregator), name_of(slots.downlink)
    if vain := slots.rule.provides - {"model"} - server - slots.aggregator.uses:
        yield f"{rule} sends {_listed(vain)}, which neither {aggregator} nor a step uses{_known(vain, aggregators, steps)}"
    if SENT in slots.exchange.provides and SENT not in slots.aggregator.uses:
        yield (
            f"{name_of(slots.exchange.sender)} sends parts of the model, and {aggregator} would count what was not sent as zero"
            f": use {aggregators.MaskedMean.__name__}"
        )
    if vain := slots.early - server - slots.rule.needs:
        yield f"clients exchange {_listed(vain)} in {name_of(slots.exchange)}, which neither {rule} nor a step uses: leave it out"
    if vain := slots.aggregator.provides - server:
        yield f"{aggregator} keeps {_listed(vain)}, which no step uses{_known(vain, steps)}, or leave {aggregator} out"
    carried = slots.downlink.change_entry()
    for step in slots.steps:
        if vain := step.provides - clients - ({carried[0]} if carried else set()):
            change = step.change_entry()
            remedy = f" (Followed({name_of(change[1])}(…)) does)" if change else _known(vain, rules)
            yield f"{name_of(step)} sends {_listed(vain)} down, which neither {rule} nor the downlink {codec} uses{remedy}"


def _uploads(slots: Slots) -> Iterator[str]:
    """Yield the parts that lose or weigh an upload as another must not have it."""
    for rule in [slots.rule, *slots.step_rules]:
        if rule.needs_whole_upload and not slots.exchange.sends_whole:
            yield (
                f"clients of {name_of(rule)} keep a copy of their upload, so the server must receive all of it: "
                f"{name_of(slots.exchange.sender)} sends parts, use OneShot"
            )
    lossy = [name for name in sorted(slots.rule.provides) if slots.uplink.is_lossy_for(name)]
    if slots.rule.needs_whole_upload and lossy and Traits.ERROR_FEEDBACK not in slots.uplink.traits:
        codec = name_of(slots.uplink)
        fits = slots.uplink.traits.fit_error_feedback
        remedy = f"ErrorFeedback({codec}(…))" if fits else "one that contracts, with ErrorFeedback"
        yield (
            f"clients of {name_of(slots.rule)} keep a copy of {_listed(lossy)}, of which the uplink {codec} loses a part in "
            f"every round: use {remedy}{undeclared(slots.uplink)}"
        )
    if Traits.NEEDS_ERROR_FEEDBACK in slots.uplink.traits:  # no more in ErrorFeedback
        codec = name_of(slots.uplink)
        yield f"the uplink {codec} would lose most of every upload for good: use ErrorFeedback({codec}(…))"
    adders = [name_of(step) for step in slots.chain if step.adds_increments]
    codec, are_increments = name_of(slots.uplink), Traits.INCREMENTS in slots.uplink.traits
    if are_increments and not adders:
        yield f"the uplink {codec} sends differences from earlier messages, which no step adds up: begin with Accumulate()"
    if adders and not are_increments:
        yield f"{adders[0]} adds up differences, and the uplink {codec} sends none: use Differences({codec}(…))"
    for step in slots.chain:
        if skewed := [name for name in sorted(step.needs_equal_weights) if not slots.aggregator.weighs_equally(name)]:
            yield (
                f"{name_of(step)} needs the mean of {_listed(skewed)} with equal weights, but {name_of(slots.aggregator)} "
                f"weighs by samples: use WeightedMean(uniform=({', '.join(map(repr, skewed))},))"
            )
    if Traits.NEEDS_EVERY_CLIENT in slots.uplink.traits:
        yield f"{name_of(slots.uplink)} fits the downlink only"


def _compressed(slots: Slots) -> Iterator[str]:
    """Yield the parts that do not fit an exchange that compresses the uploads itself."""
    if not slots.exchange.compresses:
        return
    exchange, uplink, aggregator = map(name_of, (slots.exchange.sender, slots.uplink, slots.aggregator))
    if any(slots.uplink.is_lossy_for(name) for name in slots.rule.provides | {"model"}):
        yield f"{exchange} compresses the uploads, and the uplink {uplink} would compress them again: leave one of them out"
    if not slots.aggregator.is_mean:
        yield f"{exchange} compresses the mean of the uploads, which {aggregator} does not take: use WeightedMean"


def _in_common(slots: Slots) -> Iterator[str]:
    """Yield the hyper-parameters that differ although two parts must have them in common."""
    parts: list[Part] = [slots.rule, *slots.step_rules, *slots.chain]
    for one, other in combinations(parts, 2):
        for name in sorted(one.in_common.keys() & other.in_common.keys()):
            value, differs = one.in_common[name], other.in_common[name]
            if (type(value), value) != (type(differs), differs):
                yield f"{name_of(one)} has {name}={value!r}, but {name_of(other)} has {differs!r}: give both the same"


def _downlink(slots: Slots) -> Iterator[str]:
    """Yield what the downlink's codec cannot send."""
    codec = name_of(slots.downlink)
    if carried := slots.downlink.change_entry():
        last = slots.steps[-1] if slots.steps else None
        if last is None or last.change_entry() != carried or slots.shared - last.provides:
            yield (
                f"{codec} sends only {carried[0]!r}, as the last step encoded it, so the last step must be Compress, or another "
                "step that shares it, with the same codec, and no other step may share anything"
            )
    if Traits.DELTAS_ONLY in slots.downlink.traits:
        yield (
            f"{codec} is too coarse for a whole model, so it cannot send it down (use the steps Apply(), "
            f"Compress({codec}(…)) and the downlink Followed({codec}(…)) to send the server's change through it)"
            f"{undeclared(slots.downlink)}"
        )


def _masks(slots: Slots) -> Iterator[str]:
    """Yield the steps that set a pruning mask for a codec that cannot encode what it leaves."""
    for step in slots.chain:
        if step.sets_mask:
            yield from (
                f"{name_of(step)} sets a pruning mask, and {problem}" for problem in mask_incompatibilities(slots)
            )


def _moments(slots: Slots) -> Iterator[str]:
    """Yield the parts that do not fit a step which moves coordinates, and so needs each client's whole model."""
    for mover in (step for step in slots.chain if step.moves_coordinates):
        inner = getattr(slots.aggregator, "inner", slots.aggregator)
        if not inner.is_mean:
            yield f"{name_of(mover)} averages whole models, and {name_of(inner)} does not: use KeepUploads(WeightedMean())"
        keepers: list[Part] = [step for step in slots.chain if type(step).init is not Step.init]
        keeps = type(slots.rule).init is not Rule.init or any(
            name.startswith("moments/") for name in slots.rule.provides
        )
        keepers += [slots.rule] if keeps else []
        keepers += [slots.uplink] if Traits.ERROR_FEEDBACK in slots.uplink.traits else []
        for keeper in keepers:
            yield f"{name_of(mover)} moves the coordinates of the numbers that {name_of(keeper)} keeps: leave one out"


def mask_incompatibilities(slots: Slots) -> list[str]:
    """Return all reasons why the codecs and the exchange do not fit a pruning mask, as clauses."""
    codecs = [slots.uplink, *(change[1] for step in slots.chain if (change := step.change_entry()))]
    needing: list[tuple[str, Part, str]]
    needing = [("codec", codec, undeclared(codec)) for codec in codecs if Traits.NEEDS_SHAPES in codec.traits]
    needing += [("exchange", slots.exchange.sender, "")] if slots.exchange.sender.needs_shapes else []
    problems = [
        f"{part!r} needs matrices, of which a mask leaves rows of numbers: use another {kind}{hint}"
        for kind, part, hint in needing
    ]
    return list(dict.fromkeys(problems))


def readers_of_single_clients(slots: Slots) -> list[tuple[str, Part]]:
    """Return the parts that need more than sums over the clients of a round (`sums_suffice`), each with its slot."""
    parts: list[tuple[str, Part, bool]] = [
        ("exchange", slots.exchange.sender, slots.exchange.sender.sums_suffice),
        ("uplink", slots.uplink, Traits.SUMS_SUFFICE in slots.uplink.traits),
        ("aggregator", slots.aggregator, slots.aggregator.sums_suffice),
        *(("steps", step, step.sums_suffice) for step in slots.steps),
    ]
    return [(slot, part) for slot, part, sums_suffice in parts if not sums_suffice]


def sums_to_declare(slots: Slots) -> str:
    """Return the declarations that parts of users may lack, because of which they count as readers of single clients."""
    readers = [inner for _, part in readers_of_single_clients(slots) for inner in parts_in(part)]
    hints = [
        to_declare(part, "Traits.SUMS_SUFFICE" if isinstance(part, Codec) else "sums_suffice = True")
        for part in readers
        if not (Traits.SUMS_SUFFICE in part.traits if isinstance(part, Codec) else getattr(part, "sums_suffice", True))
    ]
    return "".join(dict.fromkeys(hints))


def asks_clients(callback: Callback, has_server_samples: bool) -> bool:
    """True if a callback declares that it asks clients, such as a pruning that asks them for its rate."""
    asks = getattr(callback, "asks_clients", None)
    return asks is not None and asks(has_server_samples)


def prunes(callback: Callback) -> bool:
    """True if a callback declares that it removes filters, or prunes by a mask."""
    return getattr(callback, "removes_filters", False) or sets_mask(callback)


def sets_mask(part: Any) -> bool:
    """True if a callback or server step prunes by a mask; Lightning's ModelPruning does."""
    return getattr(part, "sets_mask", False) or is_a(part, ModelPruning)


def pace_incompatibilities(slots: Slots) -> list[str]:
    """Return all reasons why the parts need rounds that wait for their clients, as clauses."""
    rule, exchange, downlink = map(name_of, (slots.rule, slots.exchange, slots.downlink))
    problems = []
    if vain := slots.rule.provides - {"model"}:
        problems.append(
            f"clients of {rule} send {_listed(vain)} besides the model, which the server merges with the round's others"
        )
    if needed := (slots.rule.needs | slots.shared) - {"model"}:
        problems.append(f"clients receive {_listed(needed)} besides the model, which would be that of another round")
    if slots.rule.needs_whole_upload:
        problems.append(
            f"clients of {rule} keep a copy of their upload, which the next model that they receive must contain"
        )
    if not (slots.exchange.one_message and slots.exchange.sends_whole):
        hint = to_declare(slots.exchange.sender, "one_message = sends_whole = True")
        problems.append(f"{exchange} takes turns with the clients of a round: use OneShot{hint}")
    if slots.downlink.traits & (Traits.NEEDS_EVERY_CLIENT | Traits.CATCHES_UP) or slots.downlink.change_entry():
        problems.append(
            f"the downlink {downlink} sends changes since the last broadcast, which few clients have: use another codec"
        )
    if setters := [name_of(step) for step in slots.chain if step.sets_mask]:
        problems.append(f"{setters[0]} prunes the model while clients train on earlier ones: leave it out")
    return problems


def name_of(part: Part) -> str:
    """Return the name of a part's class."""
    return type(part).__name__


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _known(names: Iterable[str], *packages: object) -> str:
    """Return the remedy: the parts of some packages that are declared to use these entries."""
    wanted, part_names = frozenset(names), []
    for package in packages:
        for name in getattr(package, "__all__", ()):
            uses = getattr(getattr(package, name), "uses", None)
            needs = getattr(getattr(package, name), "needs", None)
            if any(isinstance(entries, frozenset) and wanted <= entries for entries in (uses, needs)):
                part_names.append(name)
    return f": use {' or '.join(part_names)}" if part_names else ""
