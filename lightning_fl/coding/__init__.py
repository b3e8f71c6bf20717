"""Codes of numbers and positions in bits."""
