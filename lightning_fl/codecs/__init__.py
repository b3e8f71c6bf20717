"""How a message becomes bits and back."""

from lightning_fl.codecs.dense import Dense

__all__ = ["Dense"]
