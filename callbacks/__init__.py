"""Lightning callbacks that run in `L.Trainer` and in `FederatedTrainer`."""
