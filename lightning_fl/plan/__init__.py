"""What a fit would cost, found by rehearsing it on a copy."""
