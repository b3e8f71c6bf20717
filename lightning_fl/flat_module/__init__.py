"""The user's module on flat storage: its hooks, logs, buffers and optimiser, for clients, server and trainer."""
