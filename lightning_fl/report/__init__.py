"""What a run has reached, for people."""

from lightning_fl.report.summary import final_table

__all__ = ["final_table"]
