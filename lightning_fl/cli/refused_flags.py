"""Flags of `lightning.Trainer` that a federation does not have: why, and what there is instead."""

STOCK_FLAGS = {
    "max_epochs": "a federation runs in rounds, which are epochs to callbacks: give max_rounds, and local_epochs for the passes "
    "of a client in a round",
    "min_epochs": "a federation runs max_rounds rounds unless a callback stops it: let EarlyStopping be more patient instead",
    "max_steps": "clients make steps of their own, side by side: give max_rounds, and local_steps for the steps of a client in a "
    "round",
    "min_steps": "clients make steps of their own, side by side: let EarlyStopping be more patient instead",
    "overfit_batches": "clients train on samples of their own: give limit_train_batches and limit_val_batches, or fewer "
    "data.num_clients",
    "val_check_interval": "the server's model is there between rounds alone: give val_every_n_rounds",
    "check_val_every_n_epoch": "a round is the epoch here: give val_every_n_rounds",
    "log_every_n_steps": "a federation logs a row for a round: give log_every_n_rounds",
    "use_distributed_sampler": "processes share the clients, not the samples, so there is no sampler to replace: leave it out",
    "barebones": "a federation has no such mode: give enable_progress_bar false, enable_model_summary false, "
    "enable_checkpointing false and logger false",
    "sync_batchnorm": "clients are trained apart, each on its own samples, and sharing the statistics of their batches would mix "
    "them: leave it out, the server averages the running statistics in every round",
    "reload_dataloaders_every_n_epochs": "the samples of a client are fixed when a run begins: leave it out",
    "enable_autolog_hparams": "the model's hyper-parameters are always logged: logger false logs nothing at all",
    "model_registry": "there is no upload to a registry: the model is in model.ckpt when a run ends",
}
