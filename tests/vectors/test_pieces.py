"""Test that arithmetic by pieces gives the bits of torch's own, and that memory is used again only when nothing refers to it."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from compared_runs import equal_states
from hypothesis import given, settings
from hypothesis import strategies as st
from roster import COVERING, ROSTER
from torch import Tensor
from toys import Perceptron

from lightning_fl import FederatedTrainer
from lightning_fl.vectors import pieces
from lightning_fl.vectors.pieces import BLOCKS, Blocks

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let vectors of ten numbers be long, and pieces have four."""
    monkeypatch.setattr(pieces, "LONG", 10)
    monkeypatch.setattr(pieces, "PIECE", 4)
    yield
    BLOCKS.release()


def vectors(seed: int, count: int, dtype: torch.dtype, number: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator).to(dtype) for _ in range(number))


@pytest.mark.long
@settings(max_examples=60)
@given(st.integers(0, 99), st.integers(0, 30), st.sampled_from(DTYPES), st.floats(-10, 10))
def test_results_have_the_bits_of_the_whole_expression(
    seed: int, count: int, dtype: torch.dtype, weight: float
) -> None:
    one, other, rates = vectors(seed, count, dtype, 3)
    total = pieces.zeros_like(one, torch.float64)
    assert torch.equal(total, torch.zeros_like(one, dtype=torch.float64))
    pieces.add_scaled(total, one, weight)
    assert torch.equal(total, torch.zeros_like(total).add_(one, alpha=weight))
    assert torch.equal(pieces.difference(one, other), one - other)
    assert torch.equal(pieces.sum_of(one, other), one + other)
    assert torch.equal(pieces.converted(total, dtype), total.to(dtype))
    assert torch.equal(pieces.by_pieces(torch.lerp, one, other, rates), torch.lerp(one, other, rates))
    moved, expected = one.clone(), one.clone().add_(other - rates, alpha=weight)
    pieces.add_difference(moved, other, rates, weight)
    assert torch.equal(moved, expected)
    for rate in (weight, rates, torch.tensor(weight, dtype=dtype)):
        expected = one - other * rate
        changed = one.clone()
        pieces.subtract_scaled(changed, other, rate)
        assert torch.equal(changed, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("source", DTYPES)
def test_a_vector_is_narrowed_in_its_own_memory(source: torch.dtype, dtype: torch.dtype) -> None:
    (vector,) = vectors(0, 30, source, 1)
    for start in (0, 5):
        owner = vector.clone()
        narrow = pieces.narrowed(owner[start:], dtype)
        assert torch.equal(narrow, vector[start:].to(dtype))
        shares = narrow.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()
        assert shares == (dtype.itemsize <= source.itemsize)


def test_pieces_are_views_and_leave_nothing_out() -> None:
    vector, other = torch.arange(11.0), torch.arange(11)
    found = [(len(part), len(piece), number) for part, piece, number in pieces.pieces(vector, other, 3)]
    assert found == [(4, 4, 3), (4, 4, 3), (3, 3, 3)]
    for part, _ in pieces.pieces(vector, other):
        part.zero_()
    assert not vector.any()


def test_memory_is_used_again_only_when_no_tensor_refers_to_it() -> None:
    blocks = Blocks()
    first = blocks.empty(20, torch.float32)
    address, part = first.data_ptr(), first.fill_(1.0)[3:5]
    second = blocks.empty(20, torch.float32).fill_(2.0)
    assert second.data_ptr() != address
    del first
    third = blocks.empty(20, torch.float32).fill_(3.0)  # `part` still refers to the memory of the first
    assert third.data_ptr() not in (address, second.data_ptr())
    assert part.tolist() == [1.0, 1.0]
    del part
    assert blocks.empty(20, torch.float32).data_ptr() == address


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_are_aligned_as_those_of_torch(dtype: torch.dtype) -> None:
    vector = Blocks().empty(17, dtype)
    assert vector.data_ptr() % pieces.ALIGNMENT == 0
    assert (vector.shape, vector.dtype) == ((17,), dtype)


def test_only_vectors_of_the_same_length_share_memory_until_it_is_released() -> None:
    blocks = Blocks()
    kept = blocks.empty(30, torch.float32).fill_(3.0)
    for count in (10, 20, 10, 20):
        blocks.empty(count, torch.float64)
    assert blocks.free_bytes == [80, 160]
    blocks.release()
    assert blocks.free_bytes == []
    assert kept.tolist() == [3.0] * 30
    del kept
    assert blocks.free_bytes == [], "memory that was in use at the release is given back, too"


def test_memory_of_the_largest_vectors_is_given_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "KEPT_AT_MOST", 80)
    blocks = Blocks()
    for count, kept in ((21, []), (20, [80])):
        assert blocks.empty(count, torch.float32).shape == (count,)
        assert blocks.free_bytes == kept


@pytest.mark.parametrize("name", COVERING)
def test_methods_train_to_the_bits_of_whole_vectors(
    name: str, make_trainer: Callable[..., FederatedTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, module, rows, states = ROSTER[name], Perceptron(), [], []
    for long in (10, 2**20):
        monkeypatch.setattr(pieces, "LONG", long)
        trainer = make_trainer(max_rounds=3, runner="serial")
        trainer.fit(copy.deepcopy(module), entry.federation(), entry.algorithm())
        states.append(trainer.run.state_dict())
        rows.append([{key: row[key] for key in row if "time" not in key} for row in trainer.fit_loop.rows])
        assert not BLOCKS.free_bytes, "a fit gives its memory back"
    # FedExP's rate is a ratio of norms in float64, which are summed piece by piece; the model rounds it to float32.
    for by_pieces, whole in zip(*rows, strict=True):
        rates = [row.pop("fedexp/server_learning_rate", 1.0) for row in (by_pieces, whole)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-14)
    assert str(rows[0]) == str(rows[1])  # as text, because some values are NaN
    assert equal_states(*states)
