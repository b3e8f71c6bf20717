"""Precision of products of float32 on a GPU, which torch's global switches decide.

TF32 keeps 10 of the 23 bits of each factor, so that a product is accurate to 1e-3 instead of 1e-7. By default torch uses it in
convolutions and recurrent layers, but not in other matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
        """Return the present values, which `fp32_precision` of single backends may have set."""
        on_gpu, on_cpu, *in_cudnn = _precisions()
        products = "medium" if on_cpu == "bf16" else "high" if "tf32" in (on_gpu, on_cpu) else "highest"
        return cls(products, "tf32" in in_cudnn)

    @classmethod
    def of(cls, precision: str) -> Float32:
        """Return the values for one precision of all products."""
        return cls(precision, precision != "highest")

    def set(self) -> None:
        """Set torch's switches."""
        torch.set_float32_matmul_precision(self.products)
        torch.backends.cudnn.allow_tf32 = self.tf32
        for switch in [] if self.tf32 else _switches()[2:]:  # of cuDNN
            if switch.fp32_precision == "tf32":  # as torch.backends.fp32_precision says
                switch.fp32_precision = "ieee"

    def __str__(self) -> str:
        return f"float32 products {self.products!r}, convolutions in {'TF32' if self.tf32 else 'full precision'}"


UNSET = Float32("highest", tf32=True)
"""Torch's own values."""


class Float32Switches(NamedTuple):
    """Values of all of torch's switches, which can differ between its backends, to restore them.

    Torch's older functions read none of these values once `fp32_precision` of a single backend is set.

    Attributes:
        float32: the values that torch's older functions set.
        precisions: `fp32_precision` of each backend.
    """

    float32: Float32
    precisions: tuple[str, ...]

    @classmethod
    def now(cls) -> Float32Switches:
        """Return the present values."""
        return cls(Float32.now(), _precisions())

    def restore(self) -> None:
        """Set the switches whose values have changed."""
        if Float32.now() != self.float32:
            self.float32.set()
        for switch, precision in zip(_switches(), self.precisions, strict=True):
            if switch.fp32_precision != precision:
                switch.fp32_precision = precision


def _switches() -> tuple[Any, ...]:
    """Return torch's objects whose `fp32_precision` decides a kind of product."""
    backends: Any = torch.backends  # whose modules mypy does not know whole
    return backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn


def _precisions() -> tuple[str, ...]:
    return tuple(switch.fp32_precision for switch in _switches())


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute all products in full precision inside the context, because ranks and curvature depend on small differences."""
    before = Float32Switches.now()
    Float32.of("highest").set()
    try:
        yield
    finally:
        before.restore()
