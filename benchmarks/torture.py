"""Try random runs under random mishaps, and report whatever does not end as it should.

    python benchmarks/torture.py --minutes 30              # see docs/explanation/speed.md
    python benchmarks/torture.py --trials 1 --first 123    # one trial again, with its folder kept if --keep is given

A trial draws a configuration from the classes that `lightning-fl list` names, runs it, and runs it again with a mishap: a kill,
Ctrl-C twice, a full disk, a flipped bit, a second run in the same folder, a process that dies, links and other people's files in
its folder, clients without samples. Every command must end with exit
code 0, or with one sentence and exit code 2 (a mistake of the user's), 1 (the machine's) or 130 (Ctrl-C); none may end with a
traceback or wait for ever. A run that is resumed after the mishap, also one that a callback has stopped, must give the rows, bits
and weights of the unbroken one; with another number of processes, the same counts, and averages and weights up to the order of
summation. A few trials kill studies or run thousands of rounds. Trials are forked from this process, which has imported
everything; those with several processes or studies start anew, which takes seconds.

Each trial depends only on `--seed` and its number. The program exits with 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from trials import empty_clients, links, long_runs, mishaps, processes, studies
from trials.commands import FindingError
from trials.trial import Trial


class Mishap(NamedTuple):
    """Mishap, and how often it is drawn in relation to others."""

    happen: Callable[[Trial], None]
    weight: float


MISHAPS = {
    "none": Mishap(mishaps.nothing, 4),
    "planned": Mishap(mishaps.planned, 2),
    "side channels": Mishap(mishaps.told_nothing, 0.3),
    "kill -9": Mishap(mishaps.killed, 3),
    "SIGTERM": Mishap(mishaps.terminated, 1),
    "Ctrl-C twice": Mishap(mishaps.interrupted_twice, 1),
    "out of time": Mishap(mishaps.out_of_time, 0.3),
    "limited files": Mishap(mishaps.small_files, 1),
    "full disk": Mishap(mishaps.full_disk, 1),
    "flipped bit": Mishap(mishaps.flipped_bit, 2),
    "two runs": Mishap(mishaps.two_in_one_folder, 1),
    "links": Mishap(links.linked, 1),
    "empty clients": Mishap(empty_clients.beside_empty_clients, 1),
    "dead process": Mishap(processes.process_dies, 0.1),
    "other processes": Mishap(processes.other_processes, 0.1),
    "killed study": Mishap(studies.study_killed, 0.1),
    "study on a full disk": Mishap(studies.study_on_full_disk, 0.06),
    "two studies": Mishap(studies.two_studies, 0.06),
    "catching up": Mishap(long_runs.catches_up, 0.06),
    "3,000 rounds": Mishap(long_runs.keeps_memory, 0.06),
}
"""Mishaps by name, with weights that make those that take long rare."""


def main() -> None:
    """Run the trials, and print a table of counts and all findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=None, help="begin no trial after so many minutes")
    parser.add_argument("--trials", type=int, default=None, help="number of trials")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=sorted(MISHAPS), default=sorted(MISHAPS), help="mishaps to try")
    parser.add_argument("--folder", type=Path, default=None, help="folder for the runs; a temporary one if not given")
    parser.add_argument("--keep", action="store_true", help="keep the folders of trials with a finding")
    options = parser.parse_args()
    if options.minutes is None and options.trials is None:
        options.trials = 100
    root = Path(tempfile.mkdtemp(prefix="torture-", dir=options.folder))
    counts: dict[str, Counter[str]] = {name: Counter() for name in options.only}
    findings: list[str] = []
    began, number = time.monotonic(), options.first
    while (options.trials is None or number < options.first + options.trials) and (
        options.minutes is None or time.monotonic() - began < 60 * options.minutes
    ):
        found = run_trial(number, options, root, counts)
        if found is not None:
            findings.append(found)
            print(found, flush=True)
        number += 1
    if not options.keep or not findings:
        shutil.rmtree(root, ignore_errors=True)
    print_table(counts)
    seconds = time.monotonic() - began
    print(f"\n{number - options.first} trials, seed {options.seed}, {seconds:.0f} s, {len(findings)} findings.")
    raise SystemExit(1 if findings else 0)


def run_trial(number: int, options: argparse.Namespace, root: Path, counts: dict[str, Counter[str]]) -> str | None:
    """Run one trial, and count its outcomes; return a description of what it found, or None."""
    random = np.random.default_rng([options.seed, number])
    weights = np.array([MISHAPS[name].weight for name in options.only])
    name = options.only[int(random.choice(len(options.only), p=weights / weights.sum()))]
    trial = Trial(random, root / str(number))
    found = None
    try:
        MISHAPS[name].happen(trial)
    except FindingError as finding:
        counts[name]["findings"] += 1
        found = f"--seed {options.seed} --first {number} ({name}): {finding}\n    lightning-fl {' '.join(trial.flags)}"
    counts[name]["trials"] += 1
    counts[name].update(trial.outcomes)
    if found is None or not options.keep:
        shutil.rmtree(trial.folder, ignore_errors=True)
    return found


def print_table(counts: dict[str, Counter[str]]) -> None:
    """Print one row for each mishap."""
    columns = ("trials", "completed", "refused", "stopped", "killed", "resumed identically", "findings")
    print(f"\n| mishap | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, count in counts.items():
        print(f"| {name} | {' | '.join(str(count[column]) for column in columns)} |")
    total = sum(counts.values(), Counter[str]())
    print(f"| all | {' | '.join(str(total[column]) for column in columns)} |")


if __name__ == "__main__":
    main()
