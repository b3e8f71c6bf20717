"""Modes of a module and switches of torch that are set for a while, and restored."""
