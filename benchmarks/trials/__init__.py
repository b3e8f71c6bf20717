"""Parts of `torture.py`: random configurations, commands in processes of their own, and the mishaps."""
