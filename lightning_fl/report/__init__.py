"""Several runs side by side."""

from lightning_fl.report.command import report

__all__ = ["report"]
