"""What a run may add to rounds: privacy, attacks, clocks, secure sums, guards, notes; each imports the engine, not another."""
