"""Rounds that do not wait for all their clients."""
