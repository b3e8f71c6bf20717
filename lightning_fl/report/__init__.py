"""Comparison of several runs."""

from lightning_fl.report.command import report

__all__ = ["report"]
