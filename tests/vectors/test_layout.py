"""Test the layout of trees in flat vectors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import reordered

from lightning_fl.errors import UserError
from lightning_fl.vectors.layout import Layout, Tree, common_dtype

shapes = st.lists(st.lists(st.integers(0, 4), max_size=5).map(tuple), max_size=5)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Draw tensors with their axes in any order in memory."""
    tree = {}
    for i, shape in enumerate(draw(shapes)):
        order = draw(st.permutations(range(len(shape))))
        tree[f"p{i}"] = torch.empty_permuted(shape, order).normal_()
    return tree


@pytest.mark.long
@given(tree=trees())
@settings(max_examples=60)
def test_flatten_and_views_are_inverse(tree: Tree) -> None:
    layout = Layout.of(tree)
    assert layout.numel == sum(tensor.numel() for tensor in tree.values())
    vector = layout.flatten(tree)
    views = layout.views(vector)
    assert list(views) == list(tree)
    for name, tensor in tree.items():
        assert views[name].shape == tensor.shape
        assert torch.equal(views[name], tensor)
        long = [axis for axis, size in enumerate(tensor.shape) if size > 1 and tensor.numel()]
        assert [views[name].stride(axis) for axis in long] == [tensor.stride(axis) for axis in long]
    assert torch.equal(layout.flatten(views), vector)
    assert Layout.of(views) == layout


@pytest.mark.long
@given(tree=trees(), num_clients=st.integers(1, 3))
@settings(max_examples=40)
def test_one_layout_reads_a_stack_of_clients(tree: Tree, num_clients: int) -> None:
    layout = Layout.of(tree)
    stack = torch.randn(num_clients, layout.numel)
    stacked = layout.views(stack)
    for client in range(num_clients):
        alone = layout.views(stack[client])
        for name in layout.names:
            assert torch.equal(stacked[name][client], alone[name])


def test_views_share_memory_and_convolutions_are_channels_last() -> None:
    layout = Layout.of(reordered({"conv": torch.empty(5, 3, 2, 2), "bias": torch.empty(5)}))
    vector = torch.zeros(layout.numel)
    views = layout.views(vector)
    assert views["conv"].is_contiguous(memory_format=torch.channels_last)
    views["conv"][0, 2, 0, 0] = 7.0
    assert vector.nonzero().tolist() == [[2]], "the third input channel of the first pixel must be the third entry"
    views["bias"].fill_(1.0)
    assert vector[-5:].tolist() == [1.0] * 5


def test_orders_that_are_the_same_are_one_layout() -> None:
    shapes = (2, 1, 3, 3), (2, 3, 1, 1), (2, 3, 2, 1)
    innermost = Layout(("one", "two", "three"), shapes, ((0, 2, 3, 1),) * 3)
    assert innermost.dim_orders == ((0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3, 1))
    tree = {name: torch.empty(shape) for name, shape in zip(innermost.names, shapes, strict=True)}
    assert innermost == Layout.of(reordered(tree))


def test_a_tensor_with_gaps_is_laid_out_as_a_copy_of_it() -> None:
    base = torch.randn(4, 6)
    for tensor in (base[:, :3], base.t()[:3], base[:1].expand(4, 6)):
        view = Layout.of({"a": tensor}).views(torch.zeros(tensor.numel()))["a"]
        assert view.stride() == torch.empty_like(tensor).stride()


def test_relaying_changes_the_order_and_not_the_values() -> None:
    tree = {"a": torch.randn(5, 3, 2, 2), "b": torch.randn(4, 3), "c": torch.randn(4)}
    plain, other = Layout.of(tree), Layout.of(reordered(tree))
    vector = plain.flatten(tree)
    relaid = other.relay(vector, plain)
    assert not torch.equal(relaid, vector)
    assert torch.equal(relaid, other.flatten(tree))
    assert plain.relay(vector, plain) is vector
    stack = torch.stack([vector, 2 * vector])
    assert torch.equal(other.relay(stack, plain), torch.stack([relaid, 2 * relaid]))


def test_what_does_not_fit_is_refused() -> None:
    layout = Layout.of({"a": torch.empty(3), "b": torch.empty(2)})
    with pytest.raises(ValueError, match="5 entries"):
        layout.views(torch.empty(4))
    with pytest.raises(KeyError, match="b"):
        layout.flatten({"a": torch.empty(3)})
    with pytest.raises(UserError, match=r"float32.*float64.*module\.float"):
        common_dtype({"a": torch.empty(1), "b": torch.empty(1, dtype=torch.float64)})
