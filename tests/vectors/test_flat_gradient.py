"""Test the gradients of a module's parameters in one vector, against those that torch adds up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import reordered

from lightning_fl.vectors.flat_gradient import FlatGradient
from lightning_fl.vectors.layout import Layout

SHAPES = {"a": (2, 3), "b": (4,), "c": (2, 2, 1, 3)}
PASSES = st.lists(st.sets(st.sampled_from(sorted(SHAPES)), min_size=1), max_size=3)
"""Leaves that each backward pass of a step reaches."""


def leaves() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: value.requires_grad_() for name, value in reordered(values).items()}


def backward(tree: dict[str, Tensor], names: set[str], factor: float) -> None:
    torch.stack([(factor * tree[name] ** 3).sum() for name in sorted(names)]).sum().backward()


@pytest.mark.long
@settings(max_examples=60)
@given(steps=st.lists(PASSES, min_size=1, max_size=4), num_known=st.integers(0, 3))
def test_steps_have_the_gradients_that_torch_adds_up(steps: list[list[set[str]]], num_known: int) -> None:
    ours, theirs = leaves(), leaves()
    layout, known = Layout.of(ours), list(SHAPES)[:num_known]
    vector = torch.zeros(layout.numel, dtype=torch.float64)
    gradient = FlatGradient(layout, list(ours.values()), vector, known, tells_missing=True)
    seen, factor = set(known), 0.0
    for step in steps:
        vector.add_(1.0)  # as rules change it in the step before
        gradient.zero()
        assert all(leaf.grad is None for leaf in ours.values())
        for leaf in theirs.values():
            leaf.grad = None
        for names in step:
            factor += 0.5
            backward(ours, names, factor)
            backward(theirs, names, factor)
            assert set(gradient.discover()) == names - seen
            seen |= names
        gradient.complete()
        expected = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in theirs.items()}
        for name, view in layout.views(vector).items():
            torch.testing.assert_close(view, expected[name], rtol=0, atol=1e-12)
        assert set(gradient.missing) == {name for name in seen if theirs[name].grad is None}
        for name in seen:  # hooks of the user that change a gradient in place change the vector
            gradient_of = ours[name].grad
            assert gradient_of is not None
            assert gradient_of.data_ptr() == layout.views(vector)[name].data_ptr()


@pytest.mark.parametrize("passes", [1, 2])
def test_a_computed_gradient_replaces_the_last_step(passes: int) -> None:
    ours = leaves()
    layout = Layout.of(ours)
    vector = torch.full((layout.numel,), 7.0, dtype=torch.float64)
    gradient = FlatGradient(layout, list(ours.values()), vector, SHAPES)
    gradient.zero()
    for _ in range(passes):
        gradient.add(torch.arange(layout.numel, dtype=torch.float64), list(SHAPES), 0.5)
    assert torch.equal(vector, passes * 0.5 * torch.arange(layout.numel, dtype=torch.float64))
    assert all(
        torch.equal(leaf.grad, view) for leaf, view in zip(ours.values(), layout.views(vector).values(), strict=True)
    )


def test_a_step_without_a_backward_pass_has_gradient_0() -> None:
    ours = leaves()
    layout = Layout.of(ours)
    vector = torch.full((layout.numel,), 7.0, dtype=torch.float64)
    gradient = FlatGradient(layout, list(ours.values()), vector, ["a"])
    gradient.zero()
    gradient.complete()
    assert not vector.any()
