"""Precision of products of float32 on a GPU, which torch's global switches decide.

TF32 keeps 10 of the 23 bits of each factor, so that a product is accurate to 1e-3 instead of 1e-7. By default torch uses it in
convolutions and recurrent layers, but not in other matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

PRECISIONS = ("highest", "high", "medium")
"""Values of `torch.set_float32_matmul_precision`."""


class Float32(NamedTuple):
    """Values of torch's switches.

    Attributes:
        products: precision of matrix products, one of `PRECISIONS`.
        tf32: True if cuDNN may use TF32 in convolutions and recurrent layers.
    """

    products: str
    tf32: bool

    @classmethod
    def now(cls) -> Float32:
        """Return the present values."""
        return cls(torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)

    @classmethod
    def of(cls, precision: str) -> Float32:
        """Return the values for one precision of all products."""
        return cls(precision, precision != "highest")

    def set(self) -> None:
        """Set torch's switches."""
        torch.set_float32_matmul_precision(self.products)
        torch.backends.cudnn.allow_tf32 = self.tf32

    def __str__(self) -> str:
        return f"float32 products {self.products!r}, convolutions in {'TF32' if self.tf32 else 'full precision'}"


UNSET = Float32("highest", tf32=True)
"""Torch's own values."""


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute all products in full precision inside the context, because ranks and curvature depend on small differences."""
    before = Float32.now()
    Float32.of("highest").set()
    try:
        yield
    finally:
        before.set()
