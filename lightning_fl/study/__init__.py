"""Studies: methods, settings and seeds as runs, compared in one report."""

from lightning_fl.study.command import study

__all__ = ["study"]
