"""Test noise by a tree, and passes over the clients."""

from collections import Counter
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from toys import Perceptron, federation, fit_until, vector

from lightning_fl import UserError
from lightning_fl.algorithms import FedAvg
from lightning_fl.engine.population import Population
from lightning_fl.features.privacy import AdaptiveClip, ClientPrivacy
from lightning_fl.features.privacy.accountant import epsilon
from lightning_fl.features.privacy.central import CentralMechanism
from lightning_fl.features.privacy.noisy_sum import drawn
from lightning_fl.features.privacy.spent_privacy import SpentPrivacy
from lightning_fl.features.privacy.tree import changed_nodes, nodes, number_of
from lightning_fl.state.run_state import Run
from lightning_fl.vectors.layout import NO_LAYOUT

TREE: dict[str, Any] = {"sampling": "passes", "mechanism": "tree"}


def new_run(seed: int = 0) -> Run:
    return Run(seed, NO_LAYOUT, NO_LAYOUT, torch.zeros(1), torch.zeros(0), {})


def test_nodes_cover_the_first_rounds_once_in_blocks_of_powers_of_two() -> None:
    numbers = set()
    for rounds in range(1, 70):
        covered = sorted(
            place for level, index in nodes(rounds) for place in range(index << level, (index + 1) << level)
        )
        assert covered == list(range(rounds))
        assert len(nodes(rounds)) == rounds.bit_count()
        numbers |= {(number_of(node), node) for node in nodes(rounds)}
    assert len({number for number, _ in numbers}) == len(numbers)


def test_noises_of_a_pass_sum_to_a_few_nodes() -> None:
    """The sum of the noises of rounds 1..t has variance popcount(t); a new pass draws a new tree."""
    mechanism = CentralMechanism(ClientPrivacy(noise_multiplier=1, **TREE), 120, 10, 120.0, 1e-3)
    size, run, totals = 40_000, new_run(), []
    for number in range(2):
        total = torch.zeros(size, dtype=torch.float64)
        for position in range(12):
            run.round = 12 * number + position
            for seed, sign in mechanism._draws(run):
                total += sign * drawn(seed, {"model": size}, None)["model"]
            count = (position + 1).bit_count()
            assert float(total.var()) == pytest.approx(count, rel=5 * sqrt(2 / size))
        totals.append(total)
    assert abs(float(torch.corrcoef(torch.stack(totals))[0, 1])) < 4 / sqrt(size)


def test_changed_nodes_lead_from_round_to_round() -> None:
    present: set[tuple[int, int]] = set()
    for rounds in range(1, 40):
        for node, sign in changed_nodes(rounds):
            assert (node in present) == (sign < 0)
            present ^= {node}
        assert present == nodes(rounds)


def test_a_pass_takes_every_client_once_and_each_pass_anew() -> None:
    population, run = Population(np.array([0, *[3] * 11]), 4, sampling="passes"), new_run()
    passes = []
    for number in range(3):
        cohorts = []
        for position in range(3):
            run.round = 3 * number + position
            cohorts.append(population.select(run))
        assert [len(cohort) for cohort in cohorts] == [4, 4, 3]
        passes.append([client for cohort in cohorts for client in cohort])
        assert sorted(passes[-1]) == list(range(1, 12))
    assert passes[0] != passes[1] != passes[2]


@pytest.mark.parametrize(("rounds", "known"), [(100, 1.374122), (20, 2.776609)])
def test_passes_cost_what_their_trees_cost(rounds: int, known: float) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    settings = ClientPrivacy(noise_multiplier=8, delta=1e-5, **TREE)
    mechanism = CentralMechanism.of(settings, np.full(10 * rounds, 3), 10)
    assert mechanism.rounds_of_pass == rounds
    assert epsilon(mechanism.events(SpentPrivacy(8.0), 100), 1e-5) == pytest.approx(known, abs=1e-5)
    partial = [epsilon(mechanism.events(SpentPrivacy(8.0), number), 1e-5) for number in range(0, 101, 7)]
    assert partial[0] == 0
    assert partial == sorted(partial)


def test_a_resumed_run_equals_a_whole_one_and_keeps_its_passes(
    make_trainer: MakeTrainer, tmp_path: Any, keeps_files: dict[str, Any]
) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")

    def fit(folder: str, rounds: int, cohort: int, ckpt_path: str | None = None, until: int | None = None) -> Any:
        torch.default_generator.manual_seed(0)
        module, privacy = Perceptron(), ClientPrivacy(noise_multiplier=2, delta=0.01, **TREE)
        flags = {**keeps_files, "default_root_dir": tmp_path / folder, "clients_per_round": cohort, "privacy": privacy}
        trainer = make_trainer(max_rounds=rounds, **flags)
        fit_until(trainer, until or rounds, module, federation(), FedAvg(), ckpt_path=ckpt_path)
        return vector(module), trainer

    whole, trainer = fit("whole", 5, 2)
    noises = [row["privacy/noise"] for row in trainer.fit_loop.rows]
    # A round of this pass of three adds and takes back 1, 2 and 1 nodes.
    assert noises == [pytest.approx(sqrt(nodes) * 2 / 2) for nodes in (1, 2, 1, 1, 2)]
    assert trainer.privacy_in_words.endswith("(one client replaced by nothing, passes, RDP)")
    fit("resumed", 5, 2, until=3)
    resumed, again = fit("resumed", 5, 2, "last")
    assert equal_states(trainer.run.state_dict(), again.run.state_dict())
    assert np.array_equal(whole, resumed)
    with pytest.raises(
        UserError, match=r"passes over the clients take 2 clients a round, and now 3, so that a client could"
    ):
        fit("resumed", 6, 3, "last")


def test_passes_are_cut_as_the_checkpoint_cuts_them_or_not_at_all() -> None:
    """Other cohorts and other clients are refused, also if passes take as many rounds."""
    settings = ClientPrivacy(noise_multiplier=0, **TREE)

    def resumed(cohort: int, then: int, num_clients: int = 11, forgets: bool = False) -> bool:
        run = new_run()
        CentralMechanism(settings, 11, cohort, 11.0, 0.01).begin(run, 9, lambda noise_multiplier: 1)
        spent = run.features["privacy"]
        spent.events[CentralMechanism(settings, 11, cohort, 11.0, 0.01)._event(0.0)] += 1
        state = {name: value for name, value in spent.state_dict().items() if not forgets or name != "num_clients"}
        run.round, run.features["privacy"] = 1, SpentPrivacy.from_state(state)
        try:
            CentralMechanism(settings, num_clients, then, 11.0, 0.01).begin(run, 9, lambda noise_multiplier: 1)
        except UserError:
            return False
        return True

    for cohort in range(1, 12):
        for then in range(1, 12):
            assert resumed(cohort, then) == (cohort == then)
    assert [resumed(2, 2, num_clients) for num_clients in (5, 10, 12, 20)] == [False] * 4
    assert resumed(2, 2, forgets=True)  # a checkpoint that does not know its clients


def test_rounds_of_passes_of_another_length_count() -> None:
    mechanism = CentralMechanism(ClientPrivacy(noise_multiplier=4, **TREE), 6, 2, 6.0, 0.01)
    spent = SpentPrivacy(4.0, events=Counter({("passes", 4.0, 5.0, 0.0): 11}))
    assert mechanism.events(spent, 7) == {
        ("passes", 4.0, 5.0, 0.0): 2,
        ("passes", 4.0, 1.0, 0.0): 2,  # the rests of both
        ("passes", 4.0, 3.0, 0.0): 2,
    }


@pytest.mark.parametrize("rounds", [7, 10])
def test_a_target_is_met_by_whole_passes_and_by_parts(rounds: int) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    mechanism = CentralMechanism.of(ClientPrivacy(epsilon=8, delta=0.01, **TREE), np.full(10, 3), 2)
    run = new_run()
    mechanism.begin(run, rounds)
    reached = epsilon(mechanism.events(run.features["privacy"], rounds), 0.01)
    assert 7.99 < reached <= 8


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sampling": "passes"}, r"tree is for sampling passes.* got mechanism gaussian and sampling passes"),
        ({"mechanism": "tree"}, r"got mechanism tree and sampling poisson"),
        ({**TREE, "clip": AdaptiveClip()}, r"takes noise back that it has added, so the clip must stay"),
        ({**TREE, "accountant": "pld"}, r"pld knows the samplings poisson and every, got passes"),
    ],
)
def test_other_patterns_of_participation_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ClientPrivacy(noise_multiplier=1, **settings)
