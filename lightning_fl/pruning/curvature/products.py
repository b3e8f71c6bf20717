"""Curvature of a network's loss: products of its Hessian, or of the generalised Gauss-Newton matrix, with vectors.

    H v = ∇(∇L(w)ᵀ v)                           two backward passes; all products share the first
    G v = Jᵀ (∇²ℓ(z) (J v)),  L(w) = ℓ(z(w))    one forward and one backward pass; positive semi-definite if ℓ is convex

Neither matrix is ever stored. A product is a function of one vector (d,), the concatenation of all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp

Product = Callable[[Tensor], Tensor]
"""Product of a symmetric matrix (d, d) with a vector (d,)."""

Function = Callable[[Sequence[Tensor]], Tensor]
"""Function of parameters, in the order of `trainable`."""


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters, detached: the point at which the functions of `as_function` are evaluated."""
    return {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}


def as_function(module: nn.Module, compute: Callable[[nn.Module], Tensor]) -> Function:
    """Return `compute(module)` as a function of the module's trainable parameters, without changing the module.

    Args:
        module: any module; its other parameters are constants, and its buffers are copied for each call.
        compute: any use of the module, for instance the loss of a batch.
    """
    caller, names = _Caller(module, compute), list(trainable(module))

    @torch.compiler.set_stance("force_eager")  # torch differentiates no compiled function twice
    def function(parameters: Sequence[Tensor]) -> Tensor:
        buffers = {f"module.{name}": buffer.clone() for name, buffer in module.named_buffers()}
        tensors = {f"module.{name}": tensor for name, tensor in zip(names, parameters, strict=True)}
        return functional_call(caller, tensors | buffers, ())

    return function


def hessian_product(loss: Function, point: Sequence[Tensor]) -> Product:
    """Return the product with the Hessian of a loss at a point.

    Args:
        loss: scalar function of the parameters.
        point: the parameters.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in point]
    with torch.enable_grad():
        gradient = torch.autograd.grad(loss(leaves), leaves, create_graph=True, materialize_grads=True)
    # A part of the gradient that does not depend on the parameters cannot be differentiated.
    curved = [index for index, part in enumerate(gradient) if part.requires_grad]

    def product(vector: Tensor) -> Tensor:
        parts = _split(vector, leaves)
        if not curved:
            return torch.zeros_like(vector)
        result = torch.autograd.grad(
            [gradient[index] for index in curved],
            leaves,
            [parts[index] for index in curved],
            retain_graph=True,
            materialize_grads=True,
        )
        return _flat(result).to(vector.dtype)

    return product


def gauss_newton_product(outputs: Function, loss: Callable[[Tensor], Tensor], point: Sequence[Tensor]) -> Product:
    """Return the product with the generalised Gauss-Newton matrix of a loss of outputs at a point.

    Args:
        outputs: function of the parameters, such as logits (n, C).
        loss: scalar function of the outputs.
        point: the parameters.
    """
    leaves = tuple(tensor.detach() for tensor in point)

    def at(*parameters: Tensor) -> Tensor:
        return outputs(parameters)

    with torch.enable_grad():
        value, pull_back = vjp(at, *leaves)[:2]

    def product(vector: Tensor) -> Tensor:
        moved = jvp(at, leaves, tuple(_split(vector, leaves)))[1]
        curved = jvp(grad(loss), (value,), (moved,))[1]
        return _flat(pull_back(curved)).to(vector.dtype)

    return product


class _Caller(nn.Module):
    """Wrap any use of a module as a forward pass, for `functional_call`."""

    def __init__(self, module: nn.Module, compute: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.compute = compute
        self.training = module.training

    def forward(self) -> Tensor:
        return self.compute(self.module)


def _split(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = vector.to(like[0].dtype).split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
