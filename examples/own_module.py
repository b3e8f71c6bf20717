"""Your own LightningModule and LightningDataModule, federated with FedDUM: `python own_module.py`.

The same from the command line, in this folder: `lightning-fl fit --config own_module.yaml`. Neither class depends on federated
learning: both also work in `L.Trainer`.
"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import FedDUM
from lightning_fl.data import Dirichlet, Federated


class Perceptron(L.LightningModule):
    """Classifier of 64 pixels into ten classes."""

    def __init__(self, width: int = 64, learning_rate: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, pixels):
        return self.net(pixels)

    def training_step(self, batch, batch_idx):
        pixels, labels = batch
        return nn.functional.cross_entropy(self(pixels), labels)

    def validation_step(self, batch, batch_idx):
        pixels, labels = batch
        self.log("val/accuracy", (self(pixels).argmax(1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)


class Pixels(L.LightningDataModule):
    """scikit-learn's digits as vectors of 64 pixels."""

    def __init__(self, batch_size: int = 10):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        pixels, labels = load_digits(return_X_y=True)
        samples = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
        self.training, self.held_out = random_split(samples, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.training, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=100)


def main():
    L.seed_everything(0)
    data = Federated(
        Pixels(),
        num_clients=40,
        partition=Dirichlet(alpha=0.5),
        client_fraction=0.9,  # the clients' share of the training samples
        server_fraction=0.05,  # the server's samples, from the other tenth: a twentieth as many as the clients'
    )
    trainer = FederatedTrainer(
        max_rounds=20, clients_per_round=10, local_epochs=2, accelerator="cpu", default_root_dir="runs/own_module"
    )
    trainer.fit(Perceptron(), data, algorithm=FedDUM(beta=0.5, local_beta=0.5))

    model = Perceptron.load_from_checkpoint("runs/own_module/model.ckpt")  # an ordinary Lightning checkpoint
    print(f"loaded {type(model).__name__} of width {model.hparams.width}")


if __name__ == "__main__":
    main()
