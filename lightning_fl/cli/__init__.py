"""Command line: commands, class names, checks of configurations, error messages, completion."""

from lightning_fl.cli.commands import main

__all__ = ["main"]
