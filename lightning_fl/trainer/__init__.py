"""The trainer, its flags, and the loops that it runs."""

from lightning_fl.trainer.federated_trainer import FederatedTrainer

__all__ = ["FederatedTrainer"]
