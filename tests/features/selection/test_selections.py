"""Test the draws, choices and probabilities of selections, by themselves."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle_selection as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fl import UserError
from lightning_fl.engine.population import Population
from lightning_fl.features.selection import BySize, ClientSelection, Fastest, InTurn, PowerOfChoice, SelectionTurn
from lightning_fl.features.selection.by_norm import approximate, optimal
from lightning_fl.features.selection.selection import largest
from lightning_fl.state.run_state import Run
from lightning_fl.vectors.layout import NO_LAYOUT

norms = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=12)


def turn(
    selection: ClientSelection, index: int = 0, num_clients: int = 2, sizes: Any = (1, 2, 3, 4, 5), **more: Any
) -> Any:
    def random(in_round: int | None = None) -> np.random.Generator:
        return np.random.default_rng([0, index if in_round is None else in_round])

    known, seconds = more.get("last_losses", {}), more.get("seconds", {})
    everyone = np.arange(len(sizes))
    return SelectionTurn(selection, index, everyone, num_clients, random, np.array(sizes), known, lambda _: seconds)


@pytest.mark.long
@given(norms, st.integers(1, 8))
def test_optimal_probabilities_are_those_of_a_search(u: list[float], m: int) -> None:
    np.testing.assert_allclose(optimal(u, m), oracle.optimal_probabilities(u, m), rtol=1e-9, atol=1e-12)


@pytest.mark.long
@given(norms.filter(any), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_no_other_probabilities_have_a_smaller_variance(u: list[float], m: int, seed: int) -> None:
    """The variance of Σ_k (w_k / p_k) Δ_k is Σ_k u_k² (1 / p_k − 1)."""
    found = np.array(optimal(u, m))
    sends = found > 0
    other = np.random.default_rng(seed).uniform(0.01, 1, len(u)) * sends
    for _ in range(50):  # onto those whose sum is that of the optimal ones
        other = np.minimum(1.0, other * found.sum() / other.sum())

    def variance(p: np.ndarray) -> float:
        return float((np.array(u)[sends] ** 2 * (1 / p[sends] - 1)).sum())

    assert variance(found) <= variance(other) * (1 + 1e-6) + 1e-9


@pytest.mark.long
@given(norms.filter(any), st.integers(1, 8))
def test_algorithm_2_is_that_of_the_paper_and_sends_no_more_than_the_optimum(u: list[float], m: int) -> None:
    m = min(m, len(u))
    found = np.array(approximate(u, m)[0])
    np.testing.assert_allclose(found, oracle.approximate_probabilities(u, m), rtol=1e-9)
    assert np.all(found <= np.array(optimal(u, m)) + 1e-9)


@pytest.mark.long
@given(norms, st.floats(0, 1e3), st.integers(1, 6))
def test_a_further_client_makes_no_other_more_probable(u: list[float], more: float, m: int) -> None:
    assert np.all(np.array(optimal([*u, more], m)[:-1]) <= np.array(optimal(u, m)) * (1 + 1e-9))


@pytest.mark.parametrize("count", [2, 5, 9])
def test_equal_norms_make_it_uniform_and_norms_of_0_send_nothing(count: int) -> None:
    assert optimal([0.3] * count, 2) == pytest.approx([2 / count] * count)
    assert approximate([0.3] * count, 2)[0] == pytest.approx([2 / count] * count)
    assert optimal([0.0] * count, 2) == approximate([0.0] * count, 2)[0] == [0.0] * count


@pytest.mark.matrix
def test_clients_are_drawn_as_often_as_their_sizes_say() -> None:
    """With replacement K p_k times; without it the first draw is client k with p_k."""
    sizes, draws = np.array([1, 2, 3, 4, 5]), 4000
    p = sizes / sizes.sum()
    again = Counter(k for t in range(draws) for k in BySize(replace=True).draw(turn(BySize(), t, 3)))
    first = Counter(BySize().draw(turn(BySize(), t, 3))[0] for t in range(draws))
    for counts, total in ((again, 3 * draws), (first, draws)):
        errors = 4 * np.sqrt(total * p * (1 - p))
        assert np.all(np.abs([counts[k] for k in range(5)] - total * p) < errors)


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("num_clients", [1, 2, 3, 5])
def test_every_client_comes_once_before_any_comes_twice(num_clients: int, shuffled: bool) -> None:
    selection, rounds_of_pass = InTurn(shuffled), -(-5 // num_clients)
    passes = []
    for number in range(3):
        rounds = [
            selection.draw(turn(selection, number * rounds_of_pass + t, num_clients)) for t in range(rounds_of_pass)
        ]
        assert [len(clients) for clients in rounds] == [num_clients] * (5 // num_clients) + [5 % num_clients][
            : 5 % num_clients
        ]
        passes.append([client for clients in rounds for client in clients])
    assert all(sorted(clients) == list(range(5)) for clients in passes)
    assert (passes[0] == passes[1] == passes[2]) != shuffled


def test_in_turn_draws_the_passes_of_a_private_run() -> None:
    run, selection = Run(3, NO_LAYOUT, NO_LAYOUT, torch.zeros(0), torch.zeros(0), {}), InTurn()
    population = Population(np.array([1, 0, 3, 4, 5, 2]), 2, sampling="passes")
    for _ in range(7):
        drawn = selection.draw(
            SelectionTurn(
                selection,
                run.round,
                population.eligible,
                2,
                lambda index=None: run.random(0, in_round=index),
                population.sizes,
                {},
                lambda _: {},
            )
        )
        assert drawn == population.select(run)
        run.round += 1


def test_losses_that_are_not_finite_come_last_and_unknown_ones_first() -> None:
    losses = {3: float("nan"), 1: 0.2, 4: float("inf"), 2: 0.9, 0: 0.9}
    assert [largest(losses, count) for count in (1, 2, 3, 4)] == [[2], [2, 0], [1, 2, 0], [3, 1, 2, 0]]
    selection = PowerOfChoice(5, reuse_losses=True)
    order = selection.draw(turn(selection, num_clients=5))
    known = {order[0]: float("nan"), order[1]: 1.0, order[3]: 2.0, order[4]: 0.5}
    chosen = [set(selection.draw(turn(selection, num_clients=count, last_losses=known))) for count in (1, 2, 3, 4, 5)]
    ranked = [order[2], order[3], order[1], order[4], order[0]]
    assert chosen == [set(ranked[: count + 1]) for count in range(5)]


def test_the_fastest_candidates_are_selected_in_the_order_of_the_draw() -> None:
    selection = Fastest(4)
    seconds = {0: 5.0, 1: 1.0, 2: 3.0, 3: 2.0, 4: 4.0}
    for t in range(20):
        candidates = turn(selection, t).random().choice(5, 4, replace=False).tolist()
        fastest = sorted(candidates, key=seconds.__getitem__)[:2]
        assert selection.draw(turn(selection, t, seconds=seconds)) == [k for k in candidates if k in fastest]


@dataclass(frozen=True)
class Curious(ClientSelection):
    def draw(self, turn: SelectionTurn) -> list[int]:
        return [int(turn.sizes.argmax())]


def test_what_is_not_declared_is_not_read() -> None:
    with pytest.raises(UserError, match=r"^Curious reads what it does not declare: add Reads\.SIZES to its reads\.$"):
        Curious().draw(turn(Curious()))
