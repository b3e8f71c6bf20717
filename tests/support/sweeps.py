"""Commands of a sweep's trials, composed as W&B's agent does it."""

from typing import Any


def trial_command(sweep: dict[str, Any], number: int) -> list[str]:
    """Return the command line of the first (0) or second (1) trial, with the first or second, or least or largest, values."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args  # takes seconds

    ends = ("min", "max")
    chosen = {
        name: of["values"][number] if "values" in of else of[ends[number]] for name, of in sweep["parameters"].items()
    }
    macros = create_sweep_command_args({"args": {name: {"value": value} for name, value in chosen.items()}})
    macros |= {"env": ["/usr/bin/env"]}
    words: list[str] = []
    for part in create_sweep_command(list(sweep["command"])):
        words += macros[part[2:-1]] if part.startswith("${") and part.endswith("}") else [part]
    return words
