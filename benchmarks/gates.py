"""Time inference through gates: the dense network, the masked one, and the one that computes only the chosen channels.

    python benchmarks/gates.py                                     # see docs/explanation/speed.md
    python benchmarks/gates.py --network resnet32 --keep 0.5 --batch 64
    python benchmarks/gates.py --layers --device cuda              # one convolution of each width

The three variants alternate. The ratio compares times in the same turn, so that a busy machine affects all alike. A batch shares
one mask.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date

import torch
from torch import Tensor, nn

from lightning_fl.gates import add_gates, count_sliced_macs, gates_of, sliced, without_gates
from lightning_fl.modules import network


def seconds(call: Callable[[], object], device: str) -> float:
    """Return the seconds that one call takes."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def compare(name: str, net: nn.Module, inputs: Tensor, turns: int) -> None:
    """Print one row of the table."""
    device = inputs.device.type
    for gate in gates_of(net).values():
        gate.shared = len(inputs) > 1
    dense, masked, chosen = [], [], []
    with torch.no_grad():
        for turn in range(turns + 1):
            times = []
            for variant in (without_gates(net), nullcontext(), sliced(net, shared=len(inputs) > 1)):
                with variant:
                    times.append(seconds(lambda: net(inputs), device))
            if turn:
                dense.append(times[0])
                masked.append(times[1] / times[0])
                chosen.append(times[2] / times[0])
    macs = count_sliced_macs(net, inputs) / len(inputs) / 1e6
    spread = f"{statistics.median(chosen):.2f} ({min(chosen):.2f}-{max(chosen):.2f})"
    milliseconds = statistics.median(dense) * 1e3
    print(f"| {name} | {len(inputs)} | {milliseconds:.2f} | {statistics.median(masked):.2f} | {spread} | {macs:.1f} |")


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--network", default="vgg11_bn", help="a network of ImageClassifier")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the channels that stay")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="samples that share a mask")
    parser.add_argument("--layers", action="store_true", help="pairs of convolutions instead of a network")
    parser.add_argument("--turns", type=int, default=15, help="turns that count, after one to warm up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    machine = platform.processor() or platform.machine()
    print(f"{date.today()}, {machine}, {options.device}, {options.threads} threads, torch {torch.__version__}\n")
    print(
        f"| keep = {options.keep} | batch | dense, ms | masked / dense | sliced / dense (min-max) | MMACs a sample, sliced |"
    )
    print("|---|---|---|---|---|---|")
    for batch in options.batch:
        if options.layers:
            for channels in (32, 64, 128, 256, 512):
                pair = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
                net: nn.Module = nn.Sequential(pair[0], nn.ReLU(), pair[1], nn.ReLU())
                inputs = torch.randn(batch, channels, 16, 16, device=options.device)
                row = f"two 3×3 convolutions of {channels} channels, 16×16"
                add_gates(net, options.keep)
                compare(row, net.to(options.device).eval(), inputs, options.turns)
        else:
            net = network(options.network, 10)
            add_gates(net, options.keep)
            inputs = torch.randn(batch, 3, 32, 32, device=options.device)
            compare(options.network, net.to(options.device).eval(), inputs, options.turns)


if __name__ == "__main__":
    main()
