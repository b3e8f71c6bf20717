"""Test the means over clients of what each logs on its own, where clients log different names."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fl.algorithms.algorithm import mean_over_clients

LOGGED = st.dictionaries(st.sampled_from(["recall_0", "recall_1", "recall_2"]), st.floats(0, 1))


def validation(averages: list[dict[str, float]], local: list[dict[str, float]]) -> Any:
    return SimpleNamespace(
        has_taken_part=lambda client: True,
        averages=lambda client: averages[client],
        local_averages=lambda client: local[client],
    )


@given(st.lists(st.tuples(LOGGED, LOGGED), max_size=4))
def test_a_name_is_averaged_over_the_clients_that_log_it(
    logged: list[tuple[dict[str, float], dict[str, float]]],
) -> None:
    common, local = [first for first, _ in logged], [second for _, second in logged]
    means = mean_over_clients(validation(common, local), range(len(logged)))
    expected = {}
    for suffix, parts in (("", common), ("_local", local)):
        for name in {name for part in parts for name in part}:
            values = [part[name] for part in parts if name in part]
            expected[name + suffix] = pytest.approx(sum(values) / len(values))
    assert means == expected
