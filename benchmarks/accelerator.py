"""Check and time the package on a GPU in one command, and write a Markdown table and a JSON file.

    python benchmarks/accelerator.py --out DIR                      # all parts, at most 8 minutes
    python benchmarks/accelerator.py --out DIR --only methods step  # some parts
    python benchmarks/accelerator.py --out DIR --tiny               # all parts in small, also without a GPU

It needs no network and no installed lightning_fl, only torch, lightning, numpy, tqdm and torchmetrics. The parts, in `gpu/`:

- methods: two rounds of every method with both runners on the device, compared with the CPU.
- numerics: the same of three methods with torch's own precision of float32.
- choice: the runner that `auto` chooses for many clients; running out of memory is a failure.
- modules: an LSTM that compacts its weights, attention, batch normalisation and dropout.
- repeats: a run repeated and resumed, equal or not, with and without `deterministic`.
- waits: how often the host waits for the GPU.
- two-gpus: a run on two GPUs, compared with one.
- codecs: times of all codecs, and whether the same arrives as on the CPU.
- rounds: rounds of serial and stacked clients and of a bare loop, in turns, with peak memory and utilisation.
- compiled: an epoch of 100 clients with steps that torch compiles, beside eager ones, one after the other and in stacks.
- at-once: clients per second as `clients_at_once` grows.
- step: kernels of one step, stacked and serial, and the time lost between them; CUDA graphs and torch.compile.

DIR/accelerator.md and DIR/accelerator.json are written again after every row, so an interrupted run loses nothing. Each part
has a share of the time; what does not fit is listed as skipped. The exit code is 1 if a method's numbers differ from the CPU's
by more than the tolerance, or if any measurement ends with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from dataclasses import asdict
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Timer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu import Row

REPOSITORY = Path(__file__).resolve().parents[1]
SHARES = {
    "methods": 0.21,
    "numerics": 0.03,
    "choice": 0.08,
    "modules": 0.08,
    "repeats": 0.05,
    "waits": 0.03,
    "two-gpus": 0.08,
    "codecs": 0.05,
    "rounds": 0.20,
    "compiled": 0.05,
    "at-once": 0.05,
    "step": 0.09,
}
"""Parts in their order, with their shares of the time; a part may also use what earlier parts have left."""
COLUMNS = ("part", "case", "way", "ms (min, median, max)", "clients/s", "peak MB", "GPU busy", "result")


class Report:
    """Rows of all parts, printed as they come and kept in DIR/accelerator.md and DIR/accelerator.json."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.facts = folder, facts
        self.rows: list[Row] = []
        self._lock = Lock()  # the watchdog adds a row too
        self._write()

    @property
    def num_failures(self) -> int:
        """Number of rows that report an error or a difference from the CPU."""
        return sum(row.failed is not None for row in self.rows)

    def add(self, row: Row) -> None:
        """Print a row, and write both files again."""
        with self._lock:
            self.rows.append(row)
            print("  ".join(cell for cell in cells(row) if cell), flush=True)
            self._write()

    def _write(self) -> None:
        rows = [{name: value for name, value in asdict(row).items() if value is not None} for row in self.rows]
        self._replace("accelerator.json", json.dumps({**self.facts, "rows": rows}, indent=1))
        lines = [f"{name}: {value}  " for name, value in self.facts.items()]
        lines += ["", _line(COLUMNS), _line("---" for _ in COLUMNS), *(_line(cells(row)) for row in self.rows)]
        self._replace("accelerator.md", "\n".join(lines) + "\n")

    def _replace(self, name: str, text: str) -> None:
        unfinished = self.folder / f"{name}.new"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self.folder / name)


def cells(row: Row) -> list[str]:
    """Return the cells of a row of the table."""
    reasons = {"skipped": row.skipped, "FAILED": row.failed}
    notes = [*(f"{word}: {reason}" for word, reason in reasons.items() if reason is not None), row.result or ""]
    return [
        row.part,
        row.case,
        row.way,
        ", ".join(f"{value:.3g}" for value in row.ms or ()),
        "" if row.clients_per_second is None else f"{row.clients_per_second:.1f}",
        "" if row.peak_mb is None else f"{row.peak_mb:.0f}",
        "" if row.busy is None else f"{row.busy:.0%}",
        "; ".join(note for note in notes if note).replace("|", "/"),
    ]


def _line(values: Any) -> str:
    return f"| {' | '.join(values)} |"


def make_importable() -> None:
    """Let `import lightning_fl` find this repository if the package is not installed.

    An installation maps the folders `modules/` and `callbacks/` into the package; here the package's path does.
    """
    if find_spec("lightning_fl") is None:
        sys.path.append(str(REPOSITORY))
    if find_spec("lightning_fl.modules") is None:
        import lightning_fl

        lightning_fl.__path__.append(str(REPOSITORY))


def machine(device: str) -> dict[str, Any]:
    """Return what the figures depend on: the day, the machine and the versions."""
    import lightning
    import torch

    import lightning_fl

    facts: dict[str, Any] = {
        "date": str(date.today()),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "lightning_fl": lightning_fl.__version__,
    }
    if device == "cuda":
        facts["cuda"], facts["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
        facts["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return facts


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the table and the JSON file")
    parser.add_argument("--only", nargs="+", choices=tuple(SHARES), default=list(SHARES), help="parts to run")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of the whole run")
    parser.add_argument("--tiny", action="store_true", help="run everything in small, also without a GPU")
    return parser.parse_args()


def run(options: argparse.Namespace, started: float) -> int:
    """Run the parts and return the exit code."""
    import torch

    if not (torch.cuda.is_available() or options.tiny):
        print("accelerator.py: torch finds no GPU; --tiny runs everything in small on the CPU.", file=sys.stderr)
        return 2
    make_importable()
    from gpu import FULL, TINY, Plan, Row, first_day, sentence
    from gpu.compiled import compiled
    from gpu.methods import TOLERANCE, methods
    from gpu.rounds import at_once, rounds
    from gpu.step import step

    parts = {
        "methods": methods,
        "numerics": first_day.numerics,
        "choice": first_day.choice,
        "modules": first_day.modules,
        "repeats": first_day.repeats,
        "waits": first_day.waits,
        "two-gpus": first_day.two_gpus,
        "codecs": first_day.codecs,
        "rounds": rounds,
        "compiled": compiled,
        "at-once": at_once,
        "step": step,
    }
    begun: list[str] = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = Report(options.out, {**machine(device), "tiny": options.tiny, "tolerance": TOLERANCE})

    def stop() -> None:
        reason = f"the limit of {options.minutes:g} minutes was reached"
        for name in (name for name in chosen if name not in begun[:-1]):
            report.add(Row(name, "the rest" if name in begun else "all", "", skipped=reason))
        os._exit(bool(report.num_failures))

    limit = 60 * options.minutes
    chosen = [name for name in SHARES if name in options.only]
    watchdog = Timer(started + limit - time.perf_counter(), stop)
    watchdog.daemon = True
    watchdog.start()
    for index, name in enumerate(chosen, start=1):
        share = sum(SHARES[part] for part in chosen[:index]) / sum(SHARES[part] for part in chosen)
        # A measurement that has begun runs to its end, so the parts end a little before the limit.
        plan = Plan(device, TINY if options.tiny else FULL, started + 0.95 * share * limit, report.add)
        begun.append(name)
        try:
            parts[name](plan)
        except Exception as error:
            traceback.print_exc()
            report.add(Row(name, "all", "", failed=sentence(error)))
    watchdog.cancel()
    skipped = sum(row.skipped is not None for row in report.rows)
    print(f"{len(report.rows)} rows, {report.num_failures} failed, {skipped} skipped: {options.out / 'accelerator.md'}")
    return bool(report.num_failures)


if __name__ == "__main__":
    begun = time.perf_counter()
    sys.exit(run(arguments(), begun))
