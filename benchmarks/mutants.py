"""Mutation testing of the mathematics: change one operator, comparison or constant at a time, and see whether a test fails.

    pip install -e '.[test]' mutmut==3.8.1
    python benchmarks/mutants.py run      # takes an hour or two, and resumes where it was stopped
    python benchmarks/mutants.py again    # tries the mutants again that no test has killed, after tests were added
    python benchmarks/mutants.py table    # score by room, and the mutants that live

mutmut does the work. Of its operators only those for numbers, arithmetic, comparisons, `and`, `or`, `not`, `in`, `is`, `break`
and `continue` are used: no texts and no arguments. `[tool.mutmut]` in pyproject.toml names the modules and the tests. Mutants
that no test could notice do not count: those of `UNNOTICED`, and those in `equivalent_mutants.txt` with the reason. The program
exits with 1 if the score is below 90 %.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
UNNOTICED = re.compile(r"\b(strict|non_blocking|sorted|stable|out_int32)=(True|False)")
"""Arguments that no test can notice: they guard against faults of ours, or change how fast a result comes, or its type within."""
OPERATORS = ("operator_number", "operator_swap_op", "operator_remove_unary_ops", "operator_keywords", "operator_name")
SURVIVED, NO_TESTS, KILLED = 0, 33, (1, 3)
GOAL = 0.9


def main() -> None:
    """Run mutmut with some of its operators, or print what it has found."""
    words = sys.argv[1:] or ["--help"]
    if words == ["table"]:
        print_table()
    elif words == ["again"]:
        call_mutmut(["run", *(name for name, code in results() if code in (SURVIVED, NO_TESTS))])
    elif words[0] == "run":
        call_mutmut(words)
    else:
        print(__doc__)


def call_mutmut(words: list[str]) -> None:
    """Run mutmut's command line in the repository."""
    from mutmut.__main__ import cli
    from mutmut.mutation import mutators

    kept = {getattr(mutators, name) for name in OPERATORS}
    mutators.mutation_operators[:] = [pair for pair in mutators.mutation_operators if pair[1] in kept]
    os.chdir(ROOT)
    cli(words)


def results() -> Iterator[tuple[str, int | None]]:
    """Yield the name and the exit code of each mutant's tests; None if they have not run yet."""
    for path in sorted((ROOT / "mutants" / "lightning_fl").rglob("*.meta")):
        yield from json.loads(path.read_text())["exit_code_by_key"].items()


def change_of(name: str) -> tuple[str, str]:
    """Return a mutated line before and after, without indentation."""
    shown = subprocess.run([sys.executable, "-m", "mutmut", "show", name], capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in shown.stdout.splitlines() if re.match(r"[-+](?![-+]{2})", line)]
    before, after = ("".join(line[1:].strip() + " " for line in lines if line[0] == sign).strip() for sign in "-+")
    return before, after


def print_table() -> None:
    """Print the score by package, and the mutants that live and are not equivalent."""
    lines = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    equivalent = {tuple(line.split("  |  ")[:3]) for line in lines}
    counts: dict[str, Counter[str]] = {}
    alive = []
    for name, code in results():
        if code is None:
            continue
        module = name.rpartition(".")[0].removeprefix("lightning_fl.")
        found = counts.setdefault(module.partition(".")[0], Counter())
        found["mutants"] += 1
        if code in (SURVIVED, NO_TESTS):
            before, after = change_of(name)
            is_unnoticed = UNNOTICED.sub("", before) == UNNOTICED.sub("", after)
            is_equivalent = is_unnoticed or (module, before, after) in equivalent
            found["equivalent" if is_equivalent else "alive"] += 1
            if not is_equivalent:
                alive.append(f"{module}\n    - {before}\n    + {after}")
        else:
            found["killed" if code in KILLED else "stopped"] += 1
    print("\n".join(alive))
    print(
        "\n| package | mutants | killed | stopped after a time | equivalent | alive | score |\n|---|---|---|---|---|---|---|"
    )
    total: Counter[str] = sum(counts.values(), Counter())
    for package, found in [*counts.items(), ("all", total)]:
        dead = found["killed"] + found["stopped"]
        cells = [found[key] for key in ("mutants", "killed", "stopped", "equivalent", "alive")]
        print(f"| {package} | {' | '.join(map(str, cells))} | {dead / (dead + found['alive']):.1%} |")
    dead = total["killed"] + total["stopped"]
    raise SystemExit(dead < GOAL * (dead + total["alive"]))


if __name__ == "__main__":
    main()
