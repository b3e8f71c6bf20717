"""Commands that made runs, as far as their folders record them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from lightning_fl.outputs.run_folder import CONFIG, configs_of_fits
from lightning_fl.report.comparison import Group


def commands_of(groups: Sequence[Group]) -> list[str]:
    """Return the commands that repeat the runs of each group, below its name; [] if all runs are from Python.

    Runs from Python have no configuration and are left out.
    """
    lines = []
    for group in groups:
        configs = [path for curve in group.curves for path in configs_of_fits(curve.record.folder)]
        stem = CONFIG.partition(".")[0]
        commands = [
            shlex.join(["lightning-fl", "fit", "--config", str(path)]) for path in configs if path.name.startswith(stem)
        ]
        lines += [f"# {group.label}", *commands] if commands else []
    return lines
