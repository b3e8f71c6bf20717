"""Everything that changes during a run: the model, the states of server and clients, random streams."""
