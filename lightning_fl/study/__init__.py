"""Studies: methods, settings and seeds as runs, compared in one report."""

from lightning_fl.study.command import report_on_study, study

__all__ = ["report_on_study", "study"]
