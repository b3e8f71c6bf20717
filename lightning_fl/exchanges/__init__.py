"""Who uploads what, in how many turns."""

from lightning_fl.exchanges.one_shot import OneShot

__all__ = ["OneShot"]
