"""Lightning's own Trainer with two of our callbacks, without a federation: `python stock_trainer.py`.

A small CNN learns scikit-learn's digits. AdaptivePruning removes filters from it before the third epoch; the curvature of the
loss determines how many. SparseUpdates lets five steps together change a tenth of the weights and counts the bytes for sending
them.
"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_fl.callbacks import AdaptivePruning, SparseUpdates
from lightning_fl.pruning import load_pruned


class SmallCNN(L.LightningModule):
    """Classifier of 8×8 images into ten classes."""

    def __init__(self, learning_rate: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val/accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)


def num_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def main():
    L.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    samples = TensorDataset(images, torch.tensor(digits.target))
    training, held_out = random_split(samples, [0.8, 0.2])
    train_loader = DataLoader(training, batch_size=32, shuffle=True)
    val_loader = DataLoader(held_out, batch_size=len(held_out))

    model = SmallCNN()
    before = num_parameters(model)
    sparse = SparseUpdates(alpha=0.1, every_n_steps=5)
    trainer = L.Trainer(
        max_epochs=8,
        accelerator="cpu",
        callbacks=[AdaptivePruning(prune_epoch=2, lanczos_steps=20), sparse],
        default_root_dir="runs/stock",
        logger=False,
    )
    trainer.fit(model, train_loader, val_loader)

    print(f"accuracy    {trainer.callback_metrics['val/accuracy']:.4f}")
    print(f"parameters  {before:,} before, {num_parameters(model):,} after")
    print(f"sent        {trainer.callback_metrics['sparse/bytes'] / 1e6:.1f} MB")
    dense_bytes = trainer.global_step * before * 4
    print(f"unpruned    {dense_bytes / 1e6:.1f} MB with dense steps")

    trainer.save_checkpoint("runs/stock/pruned.ckpt")
    # SmallCNN.load_from_checkpoint would expect the unpruned network.
    small = load_pruned(SmallCNN, "runs/stock/pruned.ckpt")
    accuracy = trainer.validate(small, val_loader, verbose=False)[0]["val/accuracy"]
    print(f"loaded      {accuracy:.4f} with {num_parameters(small):,} parameters")


if __name__ == "__main__":
    main()
