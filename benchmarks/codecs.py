"""Time encoding and decoding against one `torch.topk` of the same vector.

    python benchmarks/codecs.py                           # see docs/explanation/speed.md
    python benchmarks/codecs.py --size 1000000 --turns 9

The codec and `torch.topk` alternate on one thread, on a vector (d,) of normal numbers with alpha = 0.05. The ratio compares times
in the same turn, so that a busy machine affects both alike. A codec encodes and decodes only `model`; the shared masks
also carry two moments, three vectors in total, against one `torch.topk` of one vector.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch

from lightning_fl.codecs import Dense, ErrorFeedback, FairTopK, OneBit, Quantiser, SharedTopK, TopK
from lightning_fl.slots import Codec, Message, Setting
from lightning_fl.vectors.layout import Layout
from lightning_fl.vectors.top_k import num_kept

ALPHA = 0.05
CODECS: dict[str, tuple[Codec, int]] = {
    "Dense": (Dense(), 1),
    "TopK": (TopK(ALPHA), 1),
    "ErrorFeedback(TopK)": (ErrorFeedback(TopK(ALPHA)), 1),
    "SharedTopK, 3 vectors": (SharedTopK(ALPHA), 3),
    "FairTopK, 3 vectors": (FairTopK(ALPHA), 3),
    "OneBit": (OneBit(), 1),
    "Quantiser, log, 3 bits": (Quantiser(), 1),
    "Quantiser, uniform, 4 bits": (Quantiser("uniform", 4), 1),
}


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def both_ways(codec: Codec, message: Message, setting: Setting) -> Message:
    """Encode and decode."""
    payload, _ = codec.encode(message, {}, setting)
    return codec.decode(payload, setting)


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=10_000_000, help="numbers of the vector, d")
    parser.add_argument("--turns", type=int, default=5, help="turns that count, after one to warm up")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    size = options.size
    tensors = Layout(tuple("abcdefghij"), ((size // 10,),) * 9 + ((size - 9 * (size // 10),),), (False,) * 10)
    setting = Setting(tensors, Layout((), (), ()), num_clients=1)
    names = ("model", "moments/first", "moments/second")
    vectors = {name: torch.randn(size) for name in names}
    k = num_kept(ALPHA, size)
    print(
        f"{date.today()}, {platform.processor() or platform.machine()}, {options.threads} thread(s), torch {torch.__version__}; "
        f"d = {size:,}, alpha = {ALPHA}, {options.turns} turns"
    )
    print(f"{'codec':<28}{'ms':>8}{'topk ms':>9}   ratio (min median max)       Mbit")
    for title, (codec, count) in CODECS.items():
        message = {name: vectors[name] for name in names[:count]}
        payload, _ = codec.encode(message, {}, setting)
        megabits = sum(packed.bits for packed in payload.values()) / 1e6
        ours, reference = [], []
        for _ in range(options.turns + 1):
            ours.append(seconds(lambda c=codec, m=message: both_ways(c, m, setting)))  # type: ignore[misc]
            reference.append(seconds(lambda: vectors["model"].topk(k)))
        ratios = sorted(a / b for a, b in zip(ours[1:], reference[1:], strict=True))
        shown = f"{ratios[0]:.2f} {statistics.median(ratios):.2f} {ratios[-1]:.2f}"
        times = f"{1e3 * statistics.median(ours[1:]):>8.0f}{1e3 * statistics.median(reference[1:]):>9.0f}"
        print(f"{title:<28}{times}   {shown:<26}{megabits:>7.1f}", flush=True)


if __name__ == "__main__":
    main()
