"""Outputs about single clients: `clients.csv`, and statistics over clients."""
