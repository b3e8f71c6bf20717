"""What runs have reached, for people: the table at the end of a run, and several runs side by side."""

from lightning_fl.report.command import report
from lightning_fl.report.summary import final_table

__all__ = ["final_table", "report"]
