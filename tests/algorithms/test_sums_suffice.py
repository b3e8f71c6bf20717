"""Which methods need no more of a round than sums over its clients, as their parts declare."""

from dataclasses import dataclass

import pytest
import roster

from lightning_fl import aggregators, algorithms, codecs, exchanges, steps
from lightning_fl.aggregators import KeepUploads, MaskedMean, NormBound, WeightedMean
from lightning_fl.algorithms import IMC, Algorithm, FedAP, FedAvg, FedDP, FedKT, FedProx
from lightning_fl.codecs import Dense, EntropyCoded, ErrorFeedback, TopK
from lightning_fl.exchanges import GradientTurn, LayerDivergence, OneShot
from lightning_fl.slots import Aggregator, Exchange, Step, Traits
from lightning_fl.steps import Apply, Distillation, DynamicServerUpdate, Momentum, MomentumInStages

NO = {
    "Centralised": [("exchange", "InPlace")],
    "LocalOnly": [("exchange", "NoUploads")],
    "FedLDF": [("exchange", "LayerDivergence")],
    "FedADP": [("exchange", "PrunedUnits")],
    "FedDF": [("aggregator", "KeepUploads"), ("steps", "Distillation")],
    "FedDU": [("steps", "DynamicServerUpdate")],
    "FedDUM": [("steps", "DynamicServerUpdate")],
    "FedDUSM": [("steps", "DynamicServerUpdate")],
    "FedDUDM": [("steps", "DynamicServerUpdate")],
    "FedDUDA": [("steps", "DynamicServerUpdate")],
    "FedAP": [("callbacks", "AdaptivePruning")],
    "FedDUAP": [("steps", "DynamicServerUpdate"), ("callbacks", "AdaptivePruning")],
    "FedDUMAP": [("steps", "DynamicServerUpdate"), ("callbacks", "AdaptivePruning")],
    "FedAdamTop": [("uplink", "TopK")],
    "FedAdamSSM": [("uplink", "SharedTopK")],
    "FairnessTop": [("uplink", "FairTopK")],
    "OneBitAdam": [("uplink", "ErrorFeedback")],
    "EfficientAdam": [("uplink", "ErrorFeedback")],
    "FedExP": [("aggregator", "ExtrapolatedMean")],
    "FedPAQ": [("uplink", "QSGD")],
    "HeteroFL": [("exchange", "FirstUnits")],
    "FjORD": [("exchange", "FirstUnits")],
    "FederatedDropout": [("exchange", "DrawnUnits")],
    "DASHA": [("uplink", "Differences")],
    "IFCA": [("aggregator", "MeanOfEach")],
    "FedBuff": [("pace", "Pace")],
    "FedAsync": [("pace", "Pace")],
}
"""Methods that need single clients, and by which parts; all others do not."""


def test_of_every_method_it_is_known_which_slot_reads_single_clients():
    found = {
        name: readers
        for name in algorithms.__all__
        if (readers := getattr(algorithms, name)().readers_of_single_clients())
    }
    assert found == NO


def test_the_parameters_of_a_method_seldom_matter():
    base = {entry: entry.partition("-")[0] for entry in roster.ROSTER}
    exceptions = {
        "FedDF-validated": NO["FedDF"],
        "FedDUM-two-stage": [("steps", "MomentumInStages")],
        "FedLDF-least": NO["FedLDF"],
    }
    for entry, name in base.items():
        expected = exceptions.get(entry, NO.get(name, []))
        assert roster.ROSTER[entry].algorithm().readers_of_single_clients() == expected, entry
    assert IMC(rate_source="all").readers_of_single_clients() == [("callbacks", "MagnitudePruning")]
    fixed = FedAP(rate_mode="fixed", rate=0.3)
    assert fixed.readers_of_single_clients() == []
    assert fixed.readers_of_single_clients(has_server_samples=False) == NO["FedAP"]  # a client ranks the feature maps


def test_only_listed_parts_say_yes():
    """A part that says nothing, as a user's, counts as one that reads single clients."""
    listed = {
        exchanges: (Exchange, {"OneShot", "WithSampleCount", "DrawnClients", "DrawnLayers"}),
        aggregators: (Aggregator, {"WeightedMean", "MaskedMean", "NormalisedMean", "StaleMean"}),
    }
    for package, (kind, names) in listed.items():
        assert kind.sums_suffice is False
        yes = {name for name in package.__all__ if getattr(getattr(package, name), "sums_suffice", None) is True}
        assert yes == names, package
    declared = {name: getattr(codecs, name).traits for name in codecs.__all__}
    stated = {name: traits for name, traits in declared.items() if isinstance(traits, Traits)}
    assert {name for name, traits in stated.items() if Traits.SUMS_SUFFICE in traits} == {"Dense"}
    assert Step.sums_suffice is False
    no = {name for name in steps.__all__ if getattr(getattr(steps, name), "sums_suffice", None) is False}
    assert no == {"CentredClipping", "Distillation", "DynamicServerUpdate", "ProductMean", "TrustScores"}


def test_wrappers_answer_for_what_is_inside():
    assert Traits.SUMS_SUFFICE in ErrorFeedback(Dense()).traits
    assert Traits.SUMS_SUFFICE not in ErrorFeedback(TopK(0.1)).traits
    assert GradientTurn(OneShot()).sums_suffice
    assert not GradientTurn(LayerDivergence()).sums_suffice
    assert not KeepUploads(WeightedMean()).sums_suffice
    assert MomentumInStages((Apply(),), Momentum()).sums_suffice
    assert not MomentumInStages((Apply(), DynamicServerUpdate()), Momentum()).sums_suffice
    pytest.importorskip("constriction")
    assert Traits.SUMS_SUFFICE not in EntropyCoded(Dense()).traits


def test_several_slots_are_all_named_and_a_wrapped_method_is_as_its_base():
    method = FedProx(
        uplink=TopK(0.1), aggregator=KeepUploads(MaskedMean()), steps=[Distillation()], exchange=LayerDivergence
    )
    assert method.readers_of_single_clients() == [
        ("exchange", "LayerDivergence"),
        ("uplink", "TopK"),
        ("aggregator", "KeepUploads"),
        ("steps", "Distillation"),
    ]
    assert FedDP(base=FedAvg(uplink=TopK(0.1))).readers_of_single_clients() == [("uplink", "TopK")]
    assert FedAvg(aggregator=NormBound()).readers_of_single_clients() == [("aggregator", "NormBound")]


def test_only_fedkt_reads_clients_before_the_first_round():
    reading = {name for name in algorithms.__all__ if getattr(algorithms, name)().setup_reads_clients}
    assert reading == {"FedKT"}
    assert FedDP(base=FedKT()).setup_reads_clients


def test_an_undeclared_step_says_no():
    @dataclass(frozen=True)
    class Own(Step):
        def __call__(self, turn, state):
            return state

    assert Algorithm(steps=[Apply(), Own()]).readers_of_single_clients() == [("steps", "Own")]
