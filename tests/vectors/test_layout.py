"""Test the layout of trees in flat vectors."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import in_format

from lightning_fl.errors import UserError
from lightning_fl.vectors.layout import Layout, Tree, common_dtype, is_channels_last

shapes = st.lists(st.lists(st.integers(0, 4), max_size=5).map(tuple), max_size=5)


def tree_of(shapes: list[tuple[int, ...]], channels_last: bool = False) -> Tree:
    return in_format({f"p{i}": torch.randn(shape) for i, shape in enumerate(shapes)}, channels_last)


@pytest.mark.long
@given(shapes=shapes, channels_last=st.booleans())
@settings(max_examples=60)
def test_flatten_and_views_are_inverse(shapes: list[tuple[int, ...]], channels_last: bool) -> None:
    tree = tree_of(shapes, channels_last)
    layout = Layout.of(tree)
    assert layout.numel == sum(prod(shape) for shape in shapes)
    vector = layout.flatten(tree)
    views = layout.views(vector)
    assert list(views) == list(tree)
    for name, tensor in tree.items():
        assert views[name].shape == tensor.shape
        assert torch.equal(views[name], tensor)
        assert is_channels_last(views[name]) == is_channels_last(tensor)
    assert torch.equal(layout.flatten(views), vector)


@pytest.mark.long
@given(shapes=shapes, num_clients=st.integers(1, 3), channels_last=st.booleans())
@settings(max_examples=40)
def test_one_layout_reads_a_stack_of_clients(
    shapes: list[tuple[int, ...]], num_clients: int, channels_last: bool
) -> None:
    layout = Layout.of(tree_of(shapes, channels_last))
    stack = torch.randn(num_clients, layout.numel)
    stacked = layout.views(stack)
    for client in range(num_clients):
        alone = layout.views(stack[client])
        for name in layout.names:
            assert torch.equal(stacked[name][client], alone[name])


def test_views_share_memory_and_convolutions_are_channels_last() -> None:
    layout = Layout.of(in_format({"conv": torch.empty(5, 3, 2, 2), "bias": torch.empty(5)}, channels_last=True))
    vector = torch.zeros(layout.numel)
    views = layout.views(vector)
    assert views["conv"].is_contiguous(memory_format=torch.channels_last)
    views["conv"][0, 2, 0, 0] = 7.0
    assert vector.nonzero().tolist() == [[2]], "the third input channel of the first pixel must be the third entry"
    views["bias"].fill_(1.0)
    assert vector[-5:].tolist() == [1.0] * 5


def test_orders_that_are_the_same_are_one_layout() -> None:
    shapes = (2, 1, 3, 3), (2, 3, 1, 1), (2, 3, 2, 1)
    innermost = Layout(("one", "two", "three"), shapes, (True, True, True))
    tree = in_format({name: torch.empty(shape) for name, shape in zip(innermost.names, shapes, strict=True)}, True)
    assert innermost == Layout.of(tree)
    assert innermost.channels_last == (False, False, True)


def test_relaying_changes_the_order_and_not_the_values() -> None:
    tree = tree_of([(5, 3, 2, 2), (4,)])
    plain, innermost = (Layout.of(in_format(tree, channels_last)) for channels_last in (False, True))
    vector = plain.flatten(tree)
    relaid = innermost.relay(vector, plain)
    assert not torch.equal(relaid, vector)
    assert torch.equal(relaid, innermost.flatten(tree))
    assert plain.relay(vector, plain) is vector


def test_what_does_not_fit_is_refused() -> None:
    layout = Layout.of({"a": torch.empty(3), "b": torch.empty(2)})
    with pytest.raises(ValueError, match="5 entries"):
        layout.views(torch.empty(4))
    with pytest.raises(KeyError, match="b"):
        layout.flatten({"a": torch.empty(3)})
    with pytest.raises(UserError, match=r"float32.*float64.*module\.float"):
        common_dtype({"a": torch.empty(1), "b": torch.empty(1, dtype=torch.float64)})
