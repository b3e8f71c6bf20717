"""The command line: commands, names of classes, checks of configurations, error sentences, completion."""

from lightning_fl.cli.federated_cli import FederatedCLI, main

__all__ = ["FederatedCLI", "main"]
