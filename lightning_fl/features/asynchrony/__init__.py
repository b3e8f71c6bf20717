"""Asynchronous rounds, which do not wait for all clients."""
