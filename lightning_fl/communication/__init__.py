"""Communication between server and clients: the link, the ledger of its bits, the simulated clock."""
