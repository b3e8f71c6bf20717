"""Time encoding and decoding of every codec against one `torch.topk` of the same vector.

    python benchmarks/codecs.py                           # see docs/explanation/speed.md
    python benchmarks/codecs.py --size 10000000 --turns 5

Each codec of `lightning_fl.codecs` and `torch.topk` of the largest 5 % alternate on one thread, on a vector (d,) of normal
numbers and on one of LeNet-5's size. Times are the processor's; the ratio compares times in the same turn, so that a busy machine
affects both alike. A codec encodes and decodes only `model`; the shared masks also carry two moments, three vectors in total,
against one `torch.topk` of one vector. The codec's memory is that of an earlier message, in which 5 % of the numbers were others;
the error is ‖C(x) − x‖²/‖x‖² of a first message.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from importlib.util import find_spec
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from lightning_fl import codecs
from lightning_fl.checks import parameters_of
from lightning_fl.codecs import QSGD, TopK
from lightning_fl.coding.top_k import num_kept
from lightning_fl.modules import ImageClassifier
from lightning_fl.slots import Codec, Draw, Message, RoundContext, State
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

ALPHA = 0.05
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "Blockwise": [{}, {"levels": "nf4", "bits": 4}],
    "Cast": [{}, {"stochastic": True}],
    "EDEN": [{}, {"bits": 4}],
    "Quantiser": [{}, {"levels": "uniform", "bits": 4}],
    "Uniform": [{}, {"rotate": True}],
}
"""Arguments of the codecs that are tried with several; the others get their defaults."""
INSIDE: dict[str, Codec] = {"EntropyCoded": QSGD(), "Differences": QSGD()}
"""Codecs inside others; `TopK` for those that are not listed."""
NEEDS = {"EntropyCoded": "constriction"}
"""Package that a codec needs."""
THREE_VECTORS = ("SharedTopK", "FairTopK")


def cases() -> Iterator[tuple[str, Codec]]:
    """Yield each codec with its name and arguments, without those whose package is not installed."""
    for name in codecs.__all__:
        if find_spec(NEEDS.get(name, "torch")) is None:
            continue
        found = getattr(codecs, name)
        required = [key for key, given in parameters_of(found).items() if given.default is Parameter.empty]
        for arguments in ARGUMENTS.get(name, [{}]):
            inner = {"codec": INSIDE.get(name, TopK(ALPHA))} if "codec" in required else {}
            named = [f"{key}={value!r}" for key, value in arguments.items()]
            shown = ", ".join([*(type(codec).__name__ for codec in inner.values()), *named])
            yield f"{name}({shown})" if shown else name, found(**inner, **arguments)


def normal_vector(size: int) -> Layout:
    """Return the layout of ten matrices of 100 columns, and of what is left of `size` numbers."""
    rows = size // 1000
    shapes = (*((rows, 100),) * 10, (size - 1000 * rows,))
    return Layout(tuple("abcdefghijk"), shapes)


def message_of(name: str, codec: Codec, vectors: list[Tensor]) -> Message:
    """Return the entries that a codec encodes: `model`, the moments too, or the server's change with the model beside it."""
    change = codec.change_entry()
    if change is not None:
        return {"model": vectors[0], change[0]: vectors[0]}
    names = ("model", "moments/first", "moments/second")
    return dict(zip(names[: 3 if name.startswith(THREE_VECTORS) else 1], vectors, strict=False))


def both_ways(codec: Codec, message: Message, memory: State, context: RoundContext) -> Message:
    """Encode and decode."""
    payload, _ = codec.encode(message, memory, context)
    return codec.decode_incremental(payload, memory, context)


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of the processor that one call takes."""
    started = time.process_time()
    call()
    return time.process_time() - started


def row(name: str, codec: Codec, layout: Layout, turns: int) -> str:
    """Return the codec's row of the table."""
    context = RoundContext(layout, NO_LAYOUT, num_clients=1)
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(layout.numel, generator=generator) for _ in range(3)]
    earlier = [torch.where(torch.rand(layout.numel, generator=generator) < ALPHA, 0, vector) for vector in vectors]
    message = message_of(name, codec, vectors)
    carrier = "model" if codec.change_entry() is None else (*message,)[-1]
    arrived = both_ways(codec, message, {}, context)[carrier]
    error = float((arrived - message[carrier]).square().sum() / message[carrier].square().sum())
    memory = codec.encode(message_of(name, codec, earlier), {}, context)[1]
    bits = sum(packed.bits for packed in codec.encode(message, memory, context)[0].values())
    numbers = layout.numel * (3 if name.startswith(THREE_VECTORS) else 1)
    ours, reference, k = [], [], num_kept(ALPHA, layout.numel)
    for turn in range(turns + 1):  # the first one warms up
        drawn = context.drawing(Draw(party=turn))  # every message has draws of its own
        ours.append(1e3 * seconds(partial(both_ways, codec, message, memory, drawn)))
        reference.append(1e3 * seconds(lambda: vectors[0].topk(k)))
    ratios = sorted(a / b for a, b in zip(ours[1:], reference[1:], strict=True))
    shown = f"{ratios[0]:.2f} {statistics.median(ratios):.2f} {ratios[-1]:.2f}"
    times = f"{statistics.median(ours[1:]):>9.2f}{statistics.median(reference[1:]):>9.2f}"
    return f"{name:<36}{times}   {shown:<24}{bits / numbers:>8.3f}{error:>11.2e}"


def main() -> None:
    """Parse the command line and print a table for each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=1_000_000, help="numbers of the normal vector, d")
    parser.add_argument("--turns", type=int, default=9, help="turns that count, after one to warm up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    processor = platform.processor() or platform.machine()
    print(f"{date.today()}, {processor}, one thread, torch {torch.__version__}; {options.turns} turns")
    lenet5 = Layout.of(dict(ImageClassifier("lenet5").network.named_parameters()))
    for title, layout in (
        (f"d = {options.size:,}", normal_vector(options.size)),
        (f"LeNet-5, d = {lenet5.numel:,}", lenet5),
    ):
        print(f"\n{title:<36}{'ms':>9}{'topk ms':>9}   {'ratio: min median max':<24}{'bits/d':>8}{'error':>11}")
        for name, codec in cases():
            print(row(name, codec, layout, options.turns), flush=True)


if __name__ == "__main__":
    main()
