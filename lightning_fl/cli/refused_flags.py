"""Flags of `lightning.Trainer` that FederatedTrainer does not have: the reason, and what to use instead."""

STOCK_FLAGS = {
    "max_epochs": "a federation trains in rounds, which callbacks count as epochs: use max_rounds, and local_epochs for the "
    "passes of a client in a round",
    "min_epochs": "a federation runs max_rounds rounds unless a callback stops it: give EarlyStopping more patience instead",
    "max_steps": "each client takes steps of its own: use max_rounds, and local_steps for the steps of a client in a round",
    "min_steps": "each client takes steps of its own: give EarlyStopping more patience instead",
    "overfit_batches": "clients train on samples of their own: use limit_train_batches and limit_val_batches, or fewer "
    "data.num_clients",
    "val_check_interval": "the server's model exists only between rounds: use val_every_n_rounds",
    "check_val_every_n_epoch": "the epoch of a federation is a round: use val_every_n_rounds",
    "log_every_n_steps": "a federation logs one row for each round: use log_every_n_rounds",
    "use_distributed_sampler": "processes share the clients, not the samples, so there is no sampler to replace: leave it out",
    "barebones": "a federation has no such mode: use enable_progress_bar false, enable_model_summary false, "
    "enable_checkpointing false and logger false",
    "sync_batchnorm": "clients are trained apart, each on its own samples, and sharing their batch statistics would mix them: "
    "leave it out, the server averages the running statistics in every round",
    "reload_dataloaders_every_n_epochs": "the samples of a client do not change during a run: leave it out",
    "enable_autolog_hparams": "the model's hyper-parameters are always logged: use logger false to log nothing",
    "model_registry": "models are not uploaded to a registry: the final model is in model.ckpt",
}
