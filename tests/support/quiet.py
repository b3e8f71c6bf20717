"""Flags of trainers in tests."""

from typing import Any

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "logger": False,
}
"""Flags of a trainer on the CPU that prints nothing and writes nothing."""
