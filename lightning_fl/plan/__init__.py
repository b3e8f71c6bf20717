"""Plan of a fit: its costs, found by rehearsing it on a copy."""
