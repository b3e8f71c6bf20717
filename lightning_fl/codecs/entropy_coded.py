"""Entropy-code a codec's whole numbers by a range code.

The coder is that of the package constriction (Bamler, Understanding Entropy Coding With Asymmetric Numeral Systems, 2022,
arXiv:2201.01741); range codes are Martin's (Video and Data Recording Conference, 1979).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor

from lightning_fl.coding.bit_packing import bit_width, pack, unpack
from lightning_fl.errors import require
from lightning_fl.slots import (
    Codec,
    Message,
    Packed,
    Payload,
    RoundContext,
    State,
    Traits,
    check_inner,
    compressible,
    forwards,
)

IS_CODED = "mask/coded/"
WORD = np.dtype("<u4")
WARNINGS = WarningCache()


@forwards(
    "codec",
    "any_size applies_to change_entry check from_symbols in_common is_lossy_for largest needs provides relative_variance uses",
)
@dataclass(frozen=True)
class EntropyCoded(Codec):
    """Entropy-code the whole numbers of another codec by a range code. Needs `pip install 'lightning-fl[entropy]'`.

    For n numbers out of A values, n, A and the counts of the values take 64 + A ⌈log2(n + 1)⌉ bits. Their code takes whole
    words of 32 bits, at most 1 % and 64 bits more than n times the entropy of these counts. Numbers that the code would not
    shorten are sent as before; one bit per vector of numbers says which. Decoded messages do not change.

    Attributes:
        codec: codec that sends few different numbers, such as `QSGD`, `Blockwise` or `TopK(values=…)`.
    """

    size_depends_on_values = True
    codec: Codec

    def __post_init__(self) -> None:
        check_inner(self, "codec", Codec, "QSGD()")
        require(
            find_spec("constriction") is not None,
            "EntropyCoded needs the package constriction, which is not installed: pip install 'lightning-fl[entropy]'.",
        )
        require(
            not any(isinstance(part, EntropyCoded) for part in _parts(self.codec)),
            f"EntropyCoded around {type(self.codec).__name__} would code the same numbers twice: give one EntropyCoded.",
        )

    @property
    def traits(self) -> Traits:
        """Traits of the inner codec, except for sums, because the length of a code depends on one client's numbers."""
        return self.codec.traits & ~Traits.SUMS_SUFFICE

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        """Encode by the inner codec, and entropy-code its whole numbers; `mask/coded/name` says whether an entry is coded."""
        plain, memory = self.codec.encode(message, memory, context)
        payload = dict(plain)
        entries = {name: self.codec.symbols(name, plain, context) for name in plain}
        numbers = {name: entry for name, entry in entries.items() if entry is not None}
        for name, (symbols, num_values) in numbers.items():
            packed = plain[name]
            if not len(symbols):
                continue
            content = self.codec.from_symbols(name, symbols, num_values)
            if not torch.equal(content, packed.content):
                raise ValueError(f"{type(self.codec).__name__}.from_symbols does not give back the content of {name!r}")
            coded = _coded(symbols, num_values)
            is_shorter = coded.bits < packed.bits
            payload[name] = coded if is_shorter else packed
            payload[f"{IS_CODED}{name}"] = Packed(torch.tensor([is_shorter], dtype=torch.uint8), 1)
        if not numbers and any(len(vector) for name, vector in message.items() if compressible(name)):
            WARNINGS.warn(f"EntropyCoded changes nothing, as {self.codec} sends no whole numbers. This is said once.")
        return payload, memory

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        """Return what the codec inside decodes."""
        return self.codec.decode(self._plain(payload), context)

    def decode_incremental(self, payload: Payload, memory: State, context: RoundContext) -> Message:
        """Return what the codec inside decodes."""
        return self.codec.decode_incremental(self._plain(payload), memory, context)

    def positions(self, name: str, payload: Payload, context: RoundContext) -> Tensor | None:
        """Return the positions of the codec inside."""
        return None if name.startswith(IS_CODED) else self.codec.positions(name, self._plain(payload), context)

    def choice(self, name: str, payload: Payload, context: RoundContext) -> tuple[int, int] | None:
        """Return the choice of the codec inside."""
        return None if name.startswith(IS_CODED) else self.codec.choice(name, self._plain(payload), context)

    def symbols(self, name: str, payload: Payload, context: RoundContext) -> tuple[Tensor, int] | None:
        """Return the whole numbers of the codec inside."""
        return None if name.startswith(IS_CODED) else self.codec.symbols(name, self._plain(payload), context)

    def bits_by_tensor(self, name: str, payload: Payload, context: RoundContext) -> dict[str, int] | None:
        """Return {} for entropy-coded numbers, whose bits vary, and the inner codec's bits for all others."""
        is_coded = name.startswith(IS_CODED) or _is_coded(name, payload)
        return {} if is_coded else self.codec.bits_by_tensor(name, self._plain(payload), context)

    def _plain(self, payload: Payload) -> Payload:
        """Return the payload as the codec inside has made it, with the bits that are sent."""
        plain: Payload = {}
        for name, packed in payload.items():
            if _is_coded(name, payload):
                plain[name] = Packed(self.codec.from_symbols(name, *_decoded(packed.content)), packed.bits)
            elif not name.startswith(IS_CODED):
                plain[name] = packed
        return plain


def _parts(part: Any) -> Iterator[Any]:
    """Yield a codec and the codecs inside it."""
    if isinstance(part, Codec):
        yield part
        for value in vars(part).values():
            yield from _parts(value)


def _is_coded(name: str, payload: Payload) -> bool:
    flag = payload.get(f"{IS_CODED}{name}")
    return flag is not None and bool(flag.content)


def _coded(symbols: Tensor, num_values: int) -> Packed:
    """Code whole numbers in [0, `num_values`); `num_values` is at least 2."""
    from constriction import stream

    numbers = symbols.flatten().cpu().numpy().astype(np.int32)
    counts = np.bincount(numbers, minlength=num_values)
    encoder = stream.queue.RangeEncoder()
    encoder.encode(numbers, _model(counts))
    words = encoder.get_compressed().astype(WORD)
    width = bit_width(len(numbers) + 1)
    shape = np.array([len(numbers), num_values], dtype=WORD)
    header = pack(torch.from_numpy(counts), width).numpy()
    content = np.concatenate([shape.view(np.uint8), header, words.view(np.uint8)])
    return Packed(
        torch.from_numpy(content).to(symbols.device), 8 * shape.nbytes + num_values * width + 8 * words.nbytes
    )


def _decoded(content: Tensor) -> tuple[Tensor, int]:
    """Return the whole numbers (n,) that `_coded` coded, and the number of their values."""
    from constriction import stream

    array = content.cpu().numpy()
    start = 2 * WORD.itemsize
    count, num_values = map(int, array[:start].view(WORD))
    width = bit_width(count + 1)
    end = start + -(-num_values * width // 8)
    counts = unpack(torch.from_numpy(array[start:end]), num_values, width).numpy()
    words = np.frombuffer(array[end:].tobytes(), dtype=WORD).astype(np.uint32)
    numbers = stream.queue.RangeDecoder(words).decode(_model(counts), count)
    return torch.from_numpy(numbers).to(content.device, torch.int64), num_values


def _model(counts: np.ndarray) -> Any:
    """Return the model in which each value is as probable as it is frequent; both ends make it from the same whole numbers."""
    from constriction import stream

    return stream.model.Categorical(counts / counts.sum(), perfect=False)
