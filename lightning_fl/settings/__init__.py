"""Settings of a run: those that a resumed run must keep, and those that are written for reports."""
