"""Command line: commands, class names, checks of configurations, error messages, completion."""

from lightning_fl.cli.federated_cli import FederatedCLI, main

__all__ = ["FederatedCLI", "main"]
