"""Messages between server and clients, and the ledger of their bits."""
