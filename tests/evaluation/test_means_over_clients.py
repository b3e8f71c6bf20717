"""Test the means over clients of what each logs on its own, where clients log different names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fl.evaluation.validation import _means

LOGGED = st.dictionaries(st.sampled_from(["recall_0", "recall_1", "recall_2"]), st.floats(0, 1))


@pytest.mark.long
@given(st.lists(LOGGED, max_size=4))
def test_a_name_is_averaged_over_the_clients_that_log_it(logged: list[dict[str, float]]) -> None:
    expected = {}
    for name in {name for one in logged for name in one}:
        values = [one[name] for one in logged if name in one]
        expected[name] = pytest.approx(sum(values) / len(values))
    assert _means(logged) == expected
