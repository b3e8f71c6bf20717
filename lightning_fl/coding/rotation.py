"""Random rotations of long vectors, HDx/√n: D are random signs, H is the Hadamard matrix (n, n)."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.coding.bit_packing import unpack

Chunks = Literal["split", "pad"]
SMALLEST_CHUNK = 64
FACTOR = 32  # H is a product of matrices of this size: fewer passes over the vector than with sums and differences


def chunk_sizes(count: int, chunks: Chunks = "split") -> list[int]:
    """Return the sizes of the chunks of `count` numbers, powers of two.

    >>> chunk_sizes(21840), chunk_sizes(21840, "pad"), chunk_sizes(0)
    ([16384, 4096, 1024, 256, 128], [32768], [])
    """
    if chunks == "pad":
        return [1 << (count - 1).bit_length()] if count else []
    total = -(-count // SMALLEST_CHUNK) * SMALLEST_CHUNK
    return [1 << i for i in reversed(range(total.bit_length())) if total >> i & 1]


def rotate(vector: Tensor) -> Tensor:
    """Return Hx/√n for the Hadamard matrix H (n, n), n a power of two; H/√n is its own inverse.

    On a GPU, products of float32 matrices have the precision that the user allows (`torch.set_float32_matmul_precision`).

    >>> rotate(torch.tensor([1.0, 2.0, 3.0, 6.0]).double()).tolist()
    [6.0, -2.0, -3.0, 1.0]
    """
    matrix, done = _hadamard(vector.device).to(vector.dtype), min(FACTOR, len(vector))
    rotated = vector.view(-1, done) @ matrix[:done, :done]
    while done < len(vector):
        size = min(FACTOR, len(vector) // done)
        rotated = matrix[:size, :size] @ rotated.view(-1, size, done)
        done *= size
    return rotated.view(-1) / len(vector) ** 0.5


@cache
def _hadamard(device: torch.device) -> Tensor:
    """Return the largest matrix H that is a factor; its first n rows and columns are that of size n."""
    matrix, two = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(matrix) < FACTOR:
        matrix = torch.kron(two, matrix)
    return matrix.to(device)


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw the signs D (n,), −1 or 1, on the device of a vector (n,)."""
    count = len(like)
    drawn = torch.randint(256, (-(-count // 8),), dtype=torch.uint8, generator=generator)
    return unpack(drawn.to(like.device, non_blocking=True), count, 1).to(torch.int8).mul_(2).sub_(1)
